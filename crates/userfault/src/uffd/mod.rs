//! userfaultfd: the kernel reports a thread that touches a missing page, and puts the thread to
//! sleep.
//!
//! **Guarantee.** Two calls are unsafe. The caller of [`Userfaultfd::register`] is responsible for
//! the effects of touching the range. [`Userfaultfd::move_pages`] empties its source.
//!
//! Errors have the kernel's `errno` unchanged, its meaning for the call, and the progress of the
//! call. The numbers and layouts shared with the kernel are asserted at compile time. No call
//! blocks but [`EventReader::next`].
//!
//! **Mechanism.** One descriptor, [`Userfaultfd`]. Its ioctls resolve faults
//! ([`Userfaultfd::copy`], [`Userfaultfd::continue_range`], ..), and an [`EventReader`] reads its
//! [`Event`]s. [`Userfaultfd::adopt`] takes a descriptor of another process. [`UffdSupport`] probes
//! the host's capabilities. The ABI is that of `include/uapi/linux/userfaultfd.h`, Linux 6.18. The
//! semantics are those of `fs/userfaultfd.c` and `mm/userfaultfd.c`.
//!
//! # The rules of faults
//!
//! The mode of a registration decides which touches fault. Register a shared range for missing
//! *and* minor faults. With [`RegisterMode::MISSING`] alone, a page that is in the page cache is
//! mapped without a fault, so its bytes must be right. With [`RegisterMode::MINOR`] alone, a hole
//! is filled with zeros without a fault. Private memory has missing faults only.
//!
//! | fault | meaning | answer |
//! |---|---|---|
//! | [`PageFault::minor`] | the page is in the page cache, and not mapped | [`Userfaultfd::continue_range`], once its bytes are right |
//! | [`PageFault::write_protected`] | the page is mapped, and a write to it was to be reported | [`Userfaultfd::write_unprotect`] |
//! | neither | there is no page | [`Userfaultfd::copy`], [`Userfaultfd::zeropage`] (not on hugetlbfs), [`Userfaultfd::move_pages`]; or write it through another mapping, then [`Userfaultfd::continue_range`] |
//!
//! An answer may fail because another thread was faster, or because the memory changes:
//!
//! | errno | meaning | what to do |
//! |---|---|---|
//! | `EEXIST`, [`RangeError::is_already_there`] | another thread has placed the page | wake the sleepers by [`Userfaultfd::wake`]: the failed call woke none. Do not write the bytes again |
//! | `EFAULT` of a continue, [`RangeError::is_not_in_page_cache`] | the page has left the page cache, such as by a punched hole | wake the sleepers. The touch then faults as a missing one |
//! | `EAGAIN`, [`RangeError::is_changing`] | the mappings change: a fork, `mremap` or `madvise` waits until its event is read | read the events, then repeat the call from `start + done` |
//! | `ENOENT`, [`RangeError::is_not_registered`] | the range is gone: unmapped, replaced or unregistered | wake the sleepers, since an unmap wakes none. Their touches meet what is there now, or SIGSEGV |
//! | `ESRCH`, [`RangeError::is_process_gone`] | the process has exited | end |
//!
//! One thread may not wait for an event of its own: the thread that forks, moves or drops
//! registered memory sleeps until *another* thread has read the event. After
//! [`Event::Remove`] the dropped pages are missing again, and empty: answer with zeros.
//!
//! [`Userfaultfd::poison`] makes a page that will never come a SIGBUS at each touch, at once and
//! without an event. It replaces no page, and [`Userfaultfd::continue_range`] replaces it.
//! [`Userfaultfd::copy`] and [`Userfaultfd::zeropage`] do not: they fail with `EEXIST`.
//!
//! ```
//! use pageferry_addr::Hva;
//! use pageferry_userfault::uffd::{PageFault, RangeError, Userfaultfd, Wake};
//!
//! /// Answers a fault in memory with pages of 4 KiB. `bytes` are those of a missing page, or
//! /// `None` if it is zero. Returns false if the caller must read events and then try again.
//! fn resolve(
//!     uffd: &Userfaultfd,
//!     fault: &PageFault,
//!     bytes: Option<&[u8; 4096]>,
//! ) -> Result<bool, RangeError> {
//!     let page = Hva(fault.address.0 & !4095);
//!     let answer = match bytes {
//!         _ if fault.write_protected => uffd.write_unprotect(page, 4096, Wake::Now),
//!         _ if fault.minor => uffd.continue_range(page, 4096, Wake::Now),
//!         Some(bytes) => uffd.copy(page, bytes, Wake::Now),
//!         None => uffd.zeropage(page, 4096, Wake::Now),
//!     };
//!     match answer {
//!         Err(why) if why.is_changing() => Ok(false),
//!         // Whatever is there now, or is not: the thread finds it when it touches the page again.
//!         Err(why)
//!             if why.is_already_there()
//!                 || why.is_not_in_page_cache()
//!                 || why.is_not_registered() =>
//!         {
//!             uffd.wake(page, 4096).map(|()| true)
//!         }
//!         answer => answer.map(|()| true),
//!     }
//! }
//! # mod frame {
//! # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
//! # pub fn main() { example(Features::MISSING_SHMEM | Features::MINOR_SHMEM, |uffd| {
//! #     let (guest, alias) = shared(4)?;
//! #     let mode = RegisterMode::MISSING | RegisterMode::MINOR;
//! #     // SAFETY: only this thread touches the pages, after they are present.
//! #     unsafe { uffd.register(guest, 3 * PAGE, mode)? };
//! #     let fault = |page: u64, minor| PageFault {
//! #         address: Hva(guest.0 + page * PAGE + 5),
//! #         write: false,
//! #         write_protected: false,
//! #         minor,
//! #         thread: 0,
//! #     };
//! #     write(Hva(alias.0 + PAGE), 9);
//! #     assert!(super::resolve(&uffd, &fault(0, false), Some(&[7; 4096]))?);
//! #     assert!(super::resolve(&uffd, &fault(1, true), None)?);
//! #     assert!(super::resolve(&uffd, &fault(2, false), None)?);
//! #     assert_eq!([0, 1, 2].map(|page| read(Hva(guest.0 + page * PAGE))), [7, 9, 0]);
//! #     // Others were faster, the page has left the page cache, or the range is gone.
//! #     assert!(super::resolve(&uffd, &fault(0, false), Some(&[8; 4096]))?);
//! #     assert!(super::resolve(&uffd, &fault(1, true), None)?);
//! #     assert!(super::resolve(&uffd, &fault(3, false), None)?);
//! #     assert_eq!(read(guest), 7);
//! #     Ok(())
//! # }) }
//! # }
//! # fn main() { frame::main() }
//! ```
//!
//! **Neighbours.** This module knows only addresses. Its users ask
//! [`PageStates`](crate::PageStates) which pages are missing.

mod abi;
mod adopt;
mod error;
mod event;
mod fd;
mod fill;
mod flags;
mod protect;
mod range_error;
mod raw;
mod read;
mod relocate;
mod retry;
mod support;
mod sys;
mod written;

pub use error::{AdoptError, OpenError};
pub use event::{Event, PageFault};
pub use fd::{OpenedBy, Userfaultfd};
pub use fill::Wake;
pub use flags::{Features, RangeIoctls, RegisterMode};
pub use range_error::{RangeError, RangeOp};
pub use raw::{MESSAGE_BYTES, decode_message};
pub use read::{EventReader, ReadError, Wait};
pub use relocate::SourceHoles;
pub use support::UffdSupport;
pub use written::WrittenPages;
