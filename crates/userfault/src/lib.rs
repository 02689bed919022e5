//! The state of pages that a VM has not received yet, and userfaultfd.
//!
//! **Guarantee.** A page is *missing* until its bytes are in their final place. A thread that finds
//! a page present finds its bytes. A page is requested at most once, for any number of threads that
//! touch it.
//!
//! **Mechanism.** [`PageBitmap`] has one bit per page in atomic words, cleared with release order
//! and tested with acquire order. A summary makes searches skip empty parts. [`PageStates`]
//! (missing, requested, present) consists of two bitmaps. [`Waiters`] records which thread sleeps
//! until which page arrives. [`uffd`] is the kernel's userfaultfd, for threads that touch guest
//! memory without testing a bitmap. Its docs have [the rules of faults](uffd#the-rules-of-faults).
//!
//! **Neighbours.** Below: `addr`, and `epoch` for an error. Above: `hypervisor`, which tests the
//! bitmap on its fault path, and `machine`. This crate must not know vCPUs, nor the source of
//! pages.

mod bitmap;
mod states;
mod summary;
mod sync;
pub mod uffd;
mod waiters;
mod zeroed;

pub use bitmap::PageBitmap;
pub use pageferry_epoch::OutOfMemory;
pub use states::{Arrival, Claim, PageStates};
pub use waiters::Waiters;

/// Runs the examples of the README.
#[cfg(all(doctest, not(loom)))]
#[doc = include_str!("../README.md")]
mod readme {}
