//! Write protection: protecting, lifting the protection, and pages that arrive protected.
//!
//! **Guarantee.** A thread that writes to a protected page of a range registered with
//! [`RegisterMode::WP`](super::RegisterMode) sleeps, and the kernel sends an event. With
//! [`Features::WP_ASYNC`](super::Features) the kernel lifts the protection itself instead, without
//! a sleep or an event. The missing protection is then the record of the write.
//!
//! **Neighbours.** Pages that arrive without protection: `fill`. Reading the record: `written`.

use super::abi::{self, UffdioRange, UffdioWriteprotect};
use super::fd::Userfaultfd;
use super::fill::Wake;
use super::range_error::{RangeError, RangeOp};
use super::retry::advance;
use super::sys;
use pageferry_addr::Hva;

impl Userfaultfd {
    /// Write-protects `len` bytes from `start`, which are registered with
    /// [`RegisterMode::WP`](super::RegisterMode).
    ///
    /// Pages that are not present are protected on arrival only in shared memory and on hugetlbfs,
    /// or with [`Features::WP_UNPOPULATED`](super::Features).
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::PAGEFAULT_FLAG_WP, |uffd| {
    /// # let memory = private(1)?;
    /// # // SAFETY: only this thread touches the pages, after they are present.
    /// # unsafe { uffd.register(memory, PAGE, RegisterMode::MISSING | RegisterMode::WP)? };
    /// uffd.copy(memory, &[7; 4096], Wake::Now)?;
    /// uffd.write_protect(memory, PAGE)?;
    /// assert_eq!(read(memory), 7); // a write would sleep
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// [`RangeError`]. Among others `ENOENT`: the range is not registered with that mode.
    pub fn write_protect(&self, start: Hva, len: u64) -> Result<(), RangeError> {
        self.set_write_protection(start, len, abi::WRITEPROTECT_MODE_WP)
    }

    /// Lifts the write protection of `len` bytes from `start`.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::PAGEFAULT_FLAG_WP, |uffd| {
    /// # let memory = private(1)?;
    /// # // SAFETY: only this thread touches the pages, after they are present.
    /// # unsafe { uffd.register(memory, PAGE, RegisterMode::MISSING | RegisterMode::WP)? };
    /// uffd.copy(memory, &[7; 4096], Wake::Now)?;
    /// uffd.write_protect(memory, PAGE)?;
    /// uffd.write_unprotect(memory, PAGE, Wake::Now)?;
    /// write(memory, 8);
    /// assert_eq!(read(memory), 8);
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// As [`Userfaultfd::write_protect`].
    pub fn write_unprotect(&self, start: Hva, len: u64, wake: Wake) -> Result<(), RangeError> {
        let mode = match wake {
            Wake::Now => 0,
            Wake::Later => abi::WRITEPROTECT_MODE_DONTWAKE,
        };
        self.set_write_protection(start, len, mode)
    }

    /// Does a [`Userfaultfd::copy`] whose pages arrive write-protected.
    ///
    /// The first write to each page then sends an event, also if it comes right after the copy.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::PAGEFAULT_FLAG_WP, |uffd| {
    /// # let memory = private(1)?;
    /// # // SAFETY: only this thread touches the pages, after they are present.
    /// # unsafe { uffd.register(memory, PAGE, RegisterMode::MISSING | RegisterMode::WP)? };
    /// uffd.copy_protected(memory, &[7; 4096], Wake::Now)?;
    /// let writer = std::thread::spawn(move || write(memory, 8)); // sleeps
    ///
    /// let mut reader = EventReader::new(1);
    /// let event = reader.next(&uffd, Wait::default())?;
    /// let Some(Event::PageFault(fault)) = event else { panic!("{event:?}") };
    /// assert!(fault.write_protected && fault.address == memory);
    /// uffd.write_unprotect(memory, PAGE, Wake::Now)?;
    /// writer.join().unwrap();
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// As [`Userfaultfd::copy`]. Also `EINVAL`: the range is not registered with
    /// [`RegisterMode::WP`](super::RegisterMode).
    pub fn copy_protected(&self, dst: Hva, bytes: &[u8], wake: Wake) -> Result<(), RangeError> {
        self.copy_with(dst, bytes, wake.mode() | abi::MODE_WP)
    }

    /// Does a [`Userfaultfd::continue_range`] whose pages arrive write-protected (Linux 6.4 and
    /// later).
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() {
    /// # let features = Features::MINOR_SHMEM | Features::WP_HUGETLBFS_SHMEM;
    /// # example(features | Features::WP_UNPOPULATED, |uffd| {
    /// # let (guest, alias) = shared(1)?;
    /// # // SAFETY: only this thread touches the page, after it is present.
    /// # unsafe { uffd.register(guest, PAGE, RegisterMode::MINOR | RegisterMode::WP)? };
    /// write(alias, 7);
    /// uffd.continue_protected(guest, PAGE, Wake::Now)?;
    /// assert_eq!(read(guest), 7); // a write would sleep
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// As [`Userfaultfd::continue_range`]. Also `EINVAL`: the range is not registered with
    /// [`RegisterMode::WP`](super::RegisterMode), or the kernel is older.
    pub fn continue_protected(&self, start: Hva, len: u64, wake: Wake) -> Result<(), RangeError> {
        self.fill(RangeOp::Continue, start, len, wake.mode() | abi::MODE_WP)
    }

    fn set_write_protection(&self, start: Hva, len: u64, mode: u64) -> Result<(), RangeError> {
        let range = UffdioRange {
            start: start.0,
            len,
        };
        // This call has no count of bytes done.
        advance(RangeOp::WriteProtect, start, len, self.retries(), |_| {
            (
                sys::write_protect(self, UffdioWriteprotect { range, mode }),
                0,
            )
        })
    }
}
