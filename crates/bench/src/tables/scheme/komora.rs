//! `pagetable` 0.4 (komora): a tree of 64-bit keys that never removes entries.
//!
//! It is not a processor's page table, but a map from a number to an atomic word:
//!
//! - A table has 65 536 entries. A look-up of these keys takes two loads instead of four.
//! - It frees no table before all are dropped.
//! - It has no lock, guard, counts, page sizes or ranges. Ranges are loops here.
//! - It takes its 512 KiB tables from the global allocator, whose memory the system has backed
//!   before, as with our allocator. With two threads, fewer than half of the chunks allocate, so
//!   the medians do not show it.
//! - The entries' format and their changes are ours: present and writable bits as in the floors,
//!   changed by compare-exchange.

use super::floor::{EntryWrite, Exchange};
use super::{Found, Parallel, Scheme, Worker};
use crate::tables::allocator::{FRAME, PRESENT, WRITE};
use pageferry_addr::{Gfn, GfnRange, PAGE_SHIFT, Pfn};
use pagetable::PageTable;
use std::sync::atomic::{AtomicU64, Ordering};

/// `pagetable::PageTable<AtomicU64>`, by guest frame number.
#[derive(Debug)]
pub(crate) struct Komora;

/// A thread's handle to it.
pub(crate) struct KomoraWorker(PageTable<AtomicU64>);

impl Scheme for Komora {
    const NAME: &'static str = "pagetable 0.4 (komora)";
    type Single = KomoraWorker;

    fn single() -> KomoraWorker {
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
            Exchange::write(entry, 0, pfn.0 << PAGE_SHIFT | PRESENT | WRITE);
        }
    }

    fn map_range(&mut self, range: GfnRange, pfn: Pfn) {
        for (gfn, frame) in range.iter().zip(pfn.0..) {
            let value = frame << PAGE_SHIFT | PRESENT | WRITE;
            Exchange::write(self.0.get(gfn.0), 0, value);
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
            Exchange::write(entry, old, old & !WRITE);
        }
    }

    fn unmap_range(&mut self, range: GfnRange) {
        range.iter().for_each(|gfn| self.unmap(gfn));
    }

    #[inline]
    fn unmap(&mut self, gfn: Gfn) {
        let entry = self.0.get(gfn.0);
        Exchange::write(entry, entry.load(Ordering::Relaxed), 0);
    }
}
