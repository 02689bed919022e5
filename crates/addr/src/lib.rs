//! Addresses of a virtual machine's memory, each with a type of its own.
//!
//! **Guarantee.** A guest-physical address is never mistaken for a host-virtual one, a frame number
//! never for an address, and no arithmetic here wraps silently: what can overflow is `checked_*`.
//!
//! **Mechanism.** One-word newtypes over `u64` ([`Gpa`], [`Gfn`], [`Hva`], [`Pfn`], [`RamPage`]),
//! [`PageSize`] for the leaf sizes of a page table, and the half-open ranges [`GfnRange`].
//!
//! **Neighbours.** Every other crate of Pageferry uses this one. It must not know any of them: no
//! slots, no tables, no system calls.
#![no_std]

mod frame;
mod page_size;
mod range;

pub use frame::{Gfn, Gpa, Hva, PAGE_MASK, PAGE_SHIFT, PAGE_SIZE, Pfn, RamPage};
pub use page_size::PageSize;
pub use range::GfnRange;

/// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
