//! Addresses of a virtual machine's memory, with one type for each kind.
//!
//! **Guarantee.** The compiler rejects a guest-physical address in place of a host-virtual one, and
//! a frame number in place of an address. No arithmetic here wraps silently: operations that can
//! overflow are `checked_*`.
//!
//! **Mechanism.** One-word newtypes over `u64` ([`Gpa`], [`Gfn`], [`Hva`], [`Pfn`], [`RamPage`]),
//! [`PageSize`] for the leaf sizes of a page table, and the half-open ranges [`GfnRange`].
//! [`first_access`] divides a copy into accesses that tear no value.
//!
//! **Neighbours.** Every other crate of Pageferry uses this one. It must not know slots, tables or
//! system calls.
#![no_std]

mod frame;
mod page_size;
mod parts;
mod range;

pub use frame::{Gfn, Gpa, Hva, PAGE_MASK, PAGE_SHIFT, PAGE_SIZE, Pfn, RamPage};
pub use page_size::PageSize;
pub use parts::first_access;
pub use range::GfnRange;

/// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
