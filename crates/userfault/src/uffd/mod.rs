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
pub use read::{EventReader, ReadError, Wait};
pub use relocate::SourceHoles;
pub use support::UffdSupport;
pub use written::WrittenPages;
