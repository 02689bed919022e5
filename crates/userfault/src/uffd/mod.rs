//! userfaultfd: the kernel reports a thread that touches a missing page, and puts the thread to
//! sleep.
//!
//! **Guarantee.** Only [`Userfaultfd::register`] is unsafe: its caller is responsible for the
//! effects of touching the range. Errors have the kernel's `errno` unchanged, and the progress of
//! the call. The numbers and layouts shared with the kernel are asserted at compile time. No call
//! blocks.
//!
//! **Mechanism.** One descriptor, [`Userfaultfd`]. Its ioctls resolve faults
//! ([`Userfaultfd::copy`], [`Userfaultfd::continue_range`], ..), and reading it yields [`Event`]s.
//! [`UffdSupport`] probes the host's capabilities. The ABI is that of
//! `include/uapi/linux/userfaultfd.h`, Linux 6.18. The semantics are those of `fs/userfaultfd.c`
//! and `mm/userfaultfd.c`.
//!
//! **Neighbours.** This module knows only addresses. Its users ask
//! [`PageStates`](crate::PageStates) which pages are missing.
//!
//! Not supported: `UFFDIO_MOVE`, which takes pages away under references to the source and has no
//! user yet, and adopting another process's userfaultfd.

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
