//! userfaultfd: the kernel tells when a thread touches a page that is not there, and lets it sleep.
//!
//! **Guarantee.** A range is served only after [`Userfaultfd::register`], whose caller answers for what
//! touching it then means; all other calls are safe. Errors carry the kernel's `errno` unchanged, and
//! how far the call had come. The numbers and layouts shared with the kernel are asserted at compile
//! time. Nothing here blocks.
//!
//! **Mechanism.** One descriptor ([`Userfaultfd`]): its ioctls resolve faults ([`Userfaultfd::copy`],
//! [`Userfaultfd::continue_range`], ..), reading it yields [`Event`]s. [`UffdSupport`] asks what the
//! host can do. The ABI is that of `include/uapi/linux/userfaultfd.h`, Linux 6.18; the semantics those
//! of `fs/userfaultfd.c` and `mm/userfaultfd.c`.
//!
//! **Neighbours.** It knows addresses and nothing else: which page is missing is asked of
//! [`PageStates`](crate::PageStates) by those above.
//!
//! Not here: `UFFDIO_MOVE` (takes pages from under those who hold references to the source; nobody
//! needs it yet), and adopting another process's userfaultfd.

mod abi;
mod error;
mod event;
mod fd;
mod fill;
mod flags;
mod support;
mod sys;

pub use error::{OpenError, RangeError, RangeOp};
pub use event::{Event, PageFault};
pub use fd::{OpenedBy, Userfaultfd};
pub use fill::Wake;
pub use flags::{Features, RangeIoctls, RegisterMode};
pub use support::UffdSupport;
