//! Second-stage page tables: which host page backs a guest page, right now?
//!
//! **Guarantee.** Any number of vCPUs fault into one set of tables at once. Meanwhile other threads
//! take translations away, log the pages that guests write, and change the size of pages.
//!
//! - A look-up sees each entry before or after a change.
//! - When a call that takes translations away returns, no TLB holds them.
//! - Every page that a guest wrote is in the log.
//! - The memory of a table is freed once neither hardware nor a reader can reach it.
//! - vCPUs that fault at different places write no cache line that the other reads.
//!
//! **Mechanism.** After Linux's TDP MMU (`arch/x86/kvm/mmu/tdp_mmu.c`).
//!
//! - One function (`change.rs`) changes an entry of a live table, by compare-exchange, and does all
//!   the bookkeeping. Everything else calls it.
//! - A walk (`walk.rs`) goes from the root to the entries of a range, in order.
//! - Faults and other work on single entries hold the shared side of the MMU lock. Invalidations
//!   hold the exclusive side. Both sides use the announcement that each guard makes
//!   ([`pageferry_epoch`]).
//! - When a table is cut off, its entries are frozen. It waits for a TLB flush (`batch.rs`) and
//!   then for a grace period (`waiting.rs`).
//!
//! The types:
//!
//! - [`Mmu`]: the state that the vCPUs of a VM share. [`Worker`]: one thread's access to it.
//! - [`format`]: EPT, NPT, Sv48x4 and Sv57x4, arm64 stage 2. [`Platform`]: table memory and TLB
//!   flushes.
//! - [`Worker::fault`], [`Worker::fast_fault`]; [`Worker::invalidate`] for notifiers;
//!   [`Worker::zap`], [`Worker::zap_all`]; [`Worker::log_by_fault`] and [`Worker::clear_dirty`] for
//!   [logs](Log); [`Worker::split`], [`Worker::recover`]; [`Worker::age`]; [`Worker::mark_mmio`];
//!   [`Worker::reclaim`].
//! - [`ring`]: dirty rings.
//!
//! **Neighbours.** `pageferry-addr` and `pageferry-epoch` below, the hypervisor above. This crate
//! must not know memory slots, the structure of TLBs, or the contents of guest memory: callers hand
//! it frames. There is no struct per table and no reverse map. A caller that knows a host page asks
//! the memory slots for its guest frames.
//!
//! ```
//! use core::ptr::NonNull;
//! use pageferry_addr::{Gfn, GfnRange, PAGE_SHIFT, Pfn};
//! use pageferry_tdp::format::{Access, Ept4, MemoryType, Writes};
//! use pageferry_tdp::{Entry, Fault, Flush, How, Mmu, Platform, Target};
//! use std::alloc::{Layout, alloc_zeroed, dealloc};
//!
//! /// Tables from the heap, for no hardware.
//! struct Heap;
//!
//! fn layout(entries: usize) -> Layout {
//!     Layout::from_size_align(entries * 8, entries * 8).unwrap()
//! }
//!
//! // SAFETY: the allocator's memory is zeroed and aligned to its size, which is a page or more.
//! // Its addresses are exposed. There is no hardware.
//! unsafe impl Platform for Heap {
//!     fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>> {
//!         // SAFETY: not of size 0.
//!         let table = NonNull::new(unsafe { alloc_zeroed(layout(entries)) })?;
//!         table.as_ptr().expose_provenance();
//!         Some(table.cast())
//!     }
//!     unsafe fn free_table(&self, table: NonNull<Entry>, entries: usize) {
//!         // SAFETY: from `allocate_table`.
//!         unsafe { dealloc(table.as_ptr().cast(), layout(entries)) }
//!     }
//!     fn frame(&self, table: NonNull<Entry>) -> Pfn {
//!         Pfn(table.as_ptr() as u64 >> PAGE_SHIFT)
//!     }
//!     fn pointer(&self, table: Pfn) -> NonNull<Entry> {
//!         let address = (table.0 << PAGE_SHIFT) as usize;
//!         NonNull::new(core::ptr::with_exposed_provenance_mut(address)).unwrap()
//!     }
//!     fn flush(&self, _: Flush) {}
//! }
//!
//! let mmu = Mmu::<Ept4, _>::new(Heap)?;
//! let mut vcpu = mmu.try_worker()?;
//!
//! let fault = Fault { gfn: Gfn(0x80123), access: Access::READ_WRITE };
//! let ticket = vcpu.ticket(); // Before the slot is looked up.
//! let target = Target {
//!     pfn: Pfn(0x7123),
//!     level: 2,
//!     access: Access::ALL,
//!     writes: Writes::Allowed,
//!     memory: MemoryType::WriteBack,
//! };
//! let mapped = vcpu.fault(ticket, fault, target, &())?;
//! assert_eq!((mapped.how, mapped.leaf.pfn), (How::Installed, Pfn(0x7000)));
//! assert_eq!(vcpu.walk(Gfn(0x801ff)).unwrap().level, 2);
//! assert_eq!(vcpu.zap(GfnRange::new(Gfn(0x80000), 512).unwrap(), &()), 512);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![no_std]
// Hot paths are `inline(always)` in optimised builds only. In debug builds, those copies would take
// a third of the time to compile the tests.

extern crate alloc;

mod batch;
mod change;
mod counts;
mod fault;
pub mod format;
mod invalidate;
mod log;
mod mmio;
mod mmu;
mod pages;
mod platform;
mod protect;
mod resize;
pub mod ring;
mod split;
mod sync;
mod waiting;
mod walk;
mod worker;
mod zap;

pub use counts::Stats;
pub use fault::{Fault, How, Mapped, Refused, Target, largest_level};
pub use invalidate::Ticket;
pub use log::Log;
pub use mmio::{is_mmio_current, must_forget_mmio};
pub use mmu::Mmu;
pub use pages::OutOfTables;
pub use platform::{Entry, Flush, Platform};
pub use worker::{Found, Look, Worker};
pub use zap::Invalidating;

pub use pageferry_epoch::{Barrier, OutOfMemory};
