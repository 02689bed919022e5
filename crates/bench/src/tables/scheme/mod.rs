//! The traits that every scheme implements.
//!
//! All calls are dispatched statically. So a scheme's code is compiled into the loop that times it,
//! as it would be in a hypervisor.

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
pub(crate) use aarch64::Aarch64Paging;
pub(crate) use floor::{CompareExchange, EpochPinned, PlainStores, ReadLocked};
pub(crate) use komora::Komora;
pub(crate) use mutex::Locked;
pub(crate) use ours::Tdp;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Multiarch, OffsetTable};

use pageferry_addr::{Gfn, GfnRange, Pfn};

/// A translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The frame that backs the page.
    pub(crate) pfn: Pfn,
    /// Whether stores are allowed.
    pub(crate) writable: bool,
}

/// Ranges that are mapped start at multiples of this, and have multiples of this many pages: those
/// of one table.
pub(crate) const TABLE_PAGES: u64 = 512;

/// One thread's handle to page tables. Look-ups are of 4 KiB pages.
pub(crate) trait Worker {
    /// Maps `gfn` to `pfn`, writable. The page is not mapped, or other workers are mapping it to
    /// the same frame.
    fn map(&mut self, gfn: Gfn, pfn: Pfn);

    /// Maps `range` to the frames from `pfn` on, writable. The start of `range`, `pfn` and the
    /// number of pages are multiples of [`TABLE_PAGES`]. No page is mapped.
    fn map_range(&mut self, range: GfnRange, pfn: Pfn);

    /// The translation of `gfn`.
    fn find(&mut self, gfn: Gfn) -> Option<Found>;

    /// Write-protects the pages of `range`. All of them are mapped.
    fn protect_range(&mut self, range: GfnRange);

    /// Unmaps the pages of `range`. All of them are mapped.
    fn unmap_range(&mut self, range: GfnRange);

    /// Unmaps `gfn`, which is mapped.
    fn unmap(&mut self, gfn: Gfn);

    /// The number of TLB flushes requested so far; 0 if the scheme knows no TLBs.
    fn flushes(&self) -> u64 {
        0
    }
}

/// Page tables, for one thread.
pub(crate) trait Scheme {
    /// Its name in tables.
    const NAME: &'static str;
    /// The only handle to its tables.
    type Single: Worker;

    /// Creates empty tables with one handle.
    fn single() -> Self::Single;
}

/// Page tables that several threads change at once.
pub(crate) trait Parallel: Scheme {
    /// The shared tables.
    type Tables: Sync;
    /// A thread's handle to the tables.
    type Worker: Worker;

    /// Creates empty tables.
    fn tables() -> Self::Tables;

    /// Creates a handle for the calling thread.
    fn worker(tables: &Self::Tables) -> Self::Worker;
}
