//! What every scheme can be asked: the one shape behind which they are measured.
//!
//! All calls are dispatched statically, so that a scheme's code is compiled into the loop that
//! times it, as it would be into a hypervisor's.

#[cfg(target_pointer_width = "64")]
mod aarch64;
mod floor;
mod komora;
mod mutex;
mod ours;
mod radix;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_pointer_width = "64")]
pub use aarch64::Aarch64Paging;
pub use floor::{CompareExchange, EpochPinned, PlainStores, ReadLocked};
pub use komora::Komora;
pub use mutex::Locked;
pub use ours::Tdp;
#[cfg(target_arch = "x86_64")]
pub use x86::{Multiarch, OffsetTable};

use pageferry_addr::{Gfn, GfnRange, Pfn};

/// A translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The frame that backs the page.
    pub pfn: Pfn,
    /// Whether it may be stored to.
    pub writable: bool,
}

/// The pages that range operations start at and count in multiples of: those of one table.
pub const TABLE_PAGES: u64 = 512;

/// One thread's way to page tables. Pages are of 4 KiB in all that is looked up.
pub trait Worker {
    /// Maps `gfn` to `pfn`, to be stored to. It is not mapped, or other workers are mapping it to
    /// just this.
    fn map(&mut self, gfn: Gfn, pfn: Pfn);

    /// Maps `range` to the frames from `pfn` on, to be stored to. The first of both and the number
    /// of pages are multiples of [`TABLE_PAGES`], and no page is mapped.
    fn map_range(&mut self, range: GfnRange, pfn: Pfn);

    /// What `gfn` is mapped to.
    fn find(&mut self, gfn: Gfn) -> Option<Found>;

    /// Takes away that the pages of `range` may be stored to. All are mapped.
    fn protect_range(&mut self, range: GfnRange);

    /// Unmaps `range`. All of its pages are mapped.
    fn unmap_range(&mut self, range: GfnRange);

    /// Unmaps `gfn`, which is mapped.
    fn unmap(&mut self, gfn: Gfn);

    /// How many TLB flushes it has asked for so far; 0 for what does not know TLBs.
    fn flushes(&self) -> u64 {
        0
    }
}

/// Page tables, for one thread.
pub trait Scheme {
    /// Its name in tables.
    const NAME: &'static str;
    /// The only way to its tables.
    type Alone: Worker;

    /// Empty tables, and nobody else who uses them.
    fn alone() -> Self::Alone;
}

/// Page tables that several threads change at once.
pub trait Parallel: Scheme {
    /// What the threads share.
    type Tables: Sync;
    /// A thread's way to it.
    type Worker: Worker;

    /// Empty tables.
    fn tables() -> Self::Tables;

    /// A way to them for the calling thread.
    fn worker(tables: &Self::Tables) -> Self::Worker;
}
