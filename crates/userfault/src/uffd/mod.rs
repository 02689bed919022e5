//! userfaultfd: the kernel reports a thread that touches a missing page, and lets the thread sleep.
//!
//! **Guarantee.** Only [`Userfaultfd::register`] is unsafe: its caller answers for the effect of
//! touching the range then. Errors carry the kernel's `errno` unchanged, and how far the call had
//! come. The numbers and layouts shared with the kernel are asserted at compile time. No call
//! blocks.
//!
//! **Mechanism.** One descriptor, [`Userfaultfd`]. Its ioctls resolve faults
//! ([`Userfaultfd::copy`], [`Userfaultfd::continue_range`], ..), and reading it yields [`Event`]s.
//! [`UffdSupport`] asks for the host's capabilities. The ABI is that of
//! `include/uapi/linux/userfaultfd.h`, Linux 6.18. The semantics are those of `fs/userfaultfd.c`
//! and `mm/userfaultfd.c`.
//!
//! **Neighbours.** It knows addresses and nothing else. Its users ask
//! [`PageStates`](crate::PageStates) which page is missing.
//!
//! Not here: `UFFDIO_MOVE`, which takes pages from under references to the source and has no user
//! yet; and adopting another process's userfaultfd.

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
