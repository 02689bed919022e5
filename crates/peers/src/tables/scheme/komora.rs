//! `pagetable` 0.4 (komora): a tree of 64-bit keys that is only ever added to.
//!
//! What it does not do: it is no page table of a processor, but a map from a number to an atomic
//! word, with 65 536 entries a table: for these keys two loads instead of four. It frees no table
//! before all are dropped, has no lock, no guard, no counts, no page sizes and no ranges (they are
//! loops here), and takes its 512 KiB tables from the global allocator, which has them backed by
//! memory already, as the allocator's. With two threads it allocates in fewer than half of the
//! chunks, so that medians do not show it there. What an entry means, and how it changes, is ours:
//! present and writable as in the floors, by compare-exchange.

use super::floor::{Change, Exchange};
use super::{Found, Parallel, Scheme, Worker};
use crate::sync::{AtomicU64, Ordering};
use crate::tables::allocator::{FRAME, PRESENT, WRITE};
use pageferry_addr::{Gfn, GfnRange, PAGE_SHIFT, Pfn};
use pagetable::PageTable;

/// `pagetable::PageTable<AtomicU64>`, by guest frame number.
#[derive(Debug)]
pub struct Komora;

/// A thread's way to it.
pub struct KomoraWorker(PageTable<AtomicU64>);

impl Scheme for Komora {
    const NAME: &'static str = "pagetable 0.4 (komora)";
    type Alone = KomoraWorker;

    fn alone() -> KomoraWorker {
        KomoraWorker(PageTable::new())
    }
}

impl Parallel for Komora {
    type Tables = PageTable<AtomicU64>;
    type Worker = KomoraWorker;

    fn tables() -> Self::Tables {
        PageTable::new()
    }

    fn worker(tables: &Self::Tables) -> KomoraWorker {
        KomoraWorker(tables.clone())
    }
}

impl Worker for KomoraWorker {
    #[inline]
    fn map(&mut self, gfn: Gfn, pfn: Pfn) {
        let entry = self.0.get(gfn.0);
        if entry.load(Ordering::Relaxed) == 0 {
            Exchange::change(entry, 0, pfn.0 << PAGE_SHIFT | PRESENT | WRITE);
        }
    }

    fn map_range(&mut self, range: GfnRange, pfn: Pfn) {
        for (gfn, frame) in range.iter().zip(pfn.0..) {
            let value = frame << PAGE_SHIFT | PRESENT | WRITE;
            Exchange::change(self.0.get(gfn.0), 0, value);
        }
    }

    #[inline]
    fn find(&mut self, gfn: Gfn) -> Option<Found> {
        let value = self.0.get(gfn.0).load(Ordering::Acquire);
        (value != 0).then_some(Found {
            pfn: Pfn((value & FRAME) >> PAGE_SHIFT),
            writable: value & WRITE != 0,
        })
    }

    fn protect_range(&mut self, range: GfnRange) {
        for gfn in range.iter() {
            let entry = self.0.get(gfn.0);
            let old = entry.load(Ordering::Relaxed);
            Exchange::change(entry, old, old & !WRITE);
        }
    }

    fn unmap_range(&mut self, range: GfnRange) {
        range.iter().for_each(|gfn| self.unmap(gfn));
    }

    #[inline]
    fn unmap(&mut self, gfn: Gfn) {
        let entry = self.0.get(gfn.0);
        Exchange::change(entry, entry.load(Ordering::Relaxed), 0);
    }
}
