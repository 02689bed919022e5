//! Second-stage page tables: which host page backs a guest page, right now?
//!
//! **Guarantee.** Any number of threads look up, map, write-protect and zap at once, through `&StageTwo`.
//! Each entry changes by itself and atomically: a look-up sees the entry before or after a change, two
//! mappers of one page agree on one entry, and every change is counted exactly once. There are no locks:
//! looking up is wait-free, changing lock-free but for the allocator where a table is missing.
//!
//! **Mechanism.** The tables have the format of RISC-V's Sv48x4 ([`Sv48x4`], [`Entry`]), every entry one
//! `AtomicU64`. A missing table is allocated outside and linked by compare-exchange; who loses the race
//! frees the spare and uses the winner's. One function changes a leaf, by compare-exchange, and does all
//! bookkeeping; everything else calls it (as `handle_changed_spte` of Linux's `arch/x86/kvm/mmu/tdp_mmu.c`).
//!
//! **Reclamation.** A linked table is freed when its [`StageTwo`] is dropped and never before: zapping
//! clears leaves and leaves tables where they are. A walker therefore follows links without any guard.
//! What it costs: 4 KiB for each 2 MiB of guest memory that was ever mapped.
//!
//! **What callers owe.** [`StageTwo`] lists the TLB flushes and the orderings that are theirs.
//!
//! **Neighbours.** `pageferry-addr` below, the hypervisor above. This crate must not know memory slots,
//! vCPUs, TLBs or the contents of guest memory: it is told frame numbers and keeps them.
//!
//! ```
//! use pageferry_addr::{Gfn, GfnRange, Pfn};
//! use pageferry_tdp::{MapOutcome, StageTwo};
//!
//! let tables = StageTwo::new();
//! assert_eq!(tables.map(Gfn(0x80000), Pfn(7), false), MapOutcome::Installed);
//! assert_eq!(tables.map(Gfn(0x80000), Pfn(7), true), MapOutcome::Upgraded);
//! assert!(tables.walk(Gfn(0x80000)).unwrap().writable);
//! let range = GfnRange::new(Gfn(0x80000), 512).unwrap();
//! assert_eq!(tables.zap(range), 1);
//! assert_eq!(tables.mapped_pages(), 0);
//! ```
#![no_std]

extern crate alloc;

mod batch;
mod change;
mod counters;
mod counts;
mod fault;
pub mod format;
mod invalidate;
mod log;
mod mmu;
mod pages;
mod platform;
mod protect;
mod range;
mod split;
mod stage_two;
mod sync;
mod table;
mod walk;
mod worker;
mod zap;

pub use counts::Stats;
pub use fault::{Fault, How, Mapped, Refused, Target, largest_level};
pub use format::Sv48x4;
pub use invalidate::Ticket;
pub use log::Log;
pub use mmu::Mmu;
pub use pages::OutOfTables;
pub use platform::{Entry, Flush, Platform};
pub use stage_two::{Leaf, MapOutcome, StageTwo};
pub use worker::{Found, Look, Worker};
pub use zap::Invalidating;
