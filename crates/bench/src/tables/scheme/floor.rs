//! The floors: bare stores of entries, and bare stores inside some protection.
//!
//! They keep no counts, know no TLBs, never free a table, and have one page size.

use super::radix::{Radix, index};
use super::{Found, Parallel, Scheme, TABLE_PAGES, Worker};
use crate::tables::allocator::{ENTRIES, FRAME, PRESENT, WRITE};
use crossbeam_epoch::{Collector, LocalHandle};
use pageferry_addr::{Gfn, GfnRange, PAGE_SHIFT, Pfn};
use std::marker::PhantomData;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard};

/// A way to change an entry.
pub(crate) trait EntryWrite {
    /// Changes `entry` from `old`, which was just loaded, to `new`.
    fn write(entry: &AtomicU64, old: u64, new: u64);
}

/// A plain store, for one thread.
#[derive(Debug)]
pub(crate) struct Store;

impl EntryWrite for Store {
    #[inline]
    fn write(entry: &AtomicU64, _: u64, new: u64) {
        // On x86-64 and arm64, a relaxed store is a plain store.
        entry.store(new, Ordering::Relaxed);
    }
}

/// A compare-exchange. If it loses, another thread has made the same change.
#[derive(Debug)]
pub(crate) struct Exchange;

impl EntryWrite for Exchange {
    #[inline]
    fn write(entry: &AtomicU64, old: u64, new: u64) {
        let _ = entry.compare_exchange(old, new, Ordering::Release, Ordering::Relaxed);
    }
}

/// The protection of entries, which each call takes once.
pub(crate) trait Protection {
    /// The protection while it is held.
    type Guard<'a>
    where
        Self: 'a;

    /// Takes the protection.
    fn enter(&self) -> Self::Guard<'_>;
}

/// No protection.
#[derive(Debug)]
pub(crate) struct Nothing;

impl Protection for Nothing {
    type Guard<'a> = ();

    #[inline]
    fn enter(&self) {}
}

impl Protection for LocalHandle {
    type Guard<'a> = crossbeam_epoch::Guard;

    #[inline]
    fn enter(&self) -> crossbeam_epoch::Guard {
        self.pin()
    }
}

impl Protection for Arc<RwLock<()>> {
    type Guard<'a> = RwLockReadGuard<'a, ()>;

    #[inline]
    fn enter(&self) -> RwLockReadGuard<'_, ()> {
        self.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread's handle to a [`Radix`].
#[derive(Debug)]
pub(crate) struct Walker<W, P> {
    tables: Arc<Radix>,
    protection: P,
    write: PhantomData<W>,
}

impl<W: EntryWrite, P: Protection> Walker<W, P> {
    fn new(tables: &Arc<Radix>, protection: P) -> Self {
        Self {
            tables: Arc::clone(tables),
            protection,
            write: PhantomData,
        }
    }

    /// Changes each entry of `range` that is not 0 to `new` of its value, table by table.
    #[inline]
    fn sweep(&self, range: GfnRange, new: impl Fn(u64) -> u64) {
        let _held = self.protection.enter();
        for (at, count) in by_table(range) {
            if let Some(leaves) = self.tables.leaves(at) {
                for entry in part(leaves, at, count) {
                    let old = entry.load(Ordering::Relaxed);
                    if old != 0 {
                        W::write(entry, old, new(old));
                    }
                }
            }
        }
    }
}

/// Splits `range` at the ends of level 1 tables. Yields the first frame and the number of pages of
/// each part.
pub(super) fn by_table(range: GfnRange) -> impl Iterator<Item = (Gfn, u64)> {
    let (mut at, end) = (range.start().0, range.end().0);
    std::iter::from_fn(move || {
        let count = (TABLE_PAGES - at % TABLE_PAGES).min(end.checked_sub(at)?);
        let part = (count > 0).then_some((Gfn(at), count));
        at += count;
        part
    })
}

fn part(leaves: &[AtomicU64; ENTRIES], at: Gfn, count: u64) -> &[AtomicU64] {
    &leaves[index(at, 1)..][..count as usize]
}

#[inline]
const fn leaf(pfn: Pfn) -> u64 {
    pfn.0 << PAGE_SHIFT | PRESENT | WRITE
}

impl<W: EntryWrite, P: Protection> Worker for Walker<W, P> {
    #[inline]
    fn map(&mut self, gfn: Gfn, pfn: Pfn) {
        let _held = self.protection.enter();
        let entry = &self.tables.leaves_or_new(gfn)[index(gfn, 1)];
        let old = entry.load(Ordering::Relaxed);
        if old == 0 {
            W::write(entry, old, leaf(pfn));
        }
    }

    fn map_range(&mut self, range: GfnRange, pfn: Pfn) {
        let _held = self.protection.enter();
        let mut value = leaf(pfn);
        for (at, count) in by_table(range) {
            for entry in part(self.tables.leaves_or_new(at), at, count) {
                W::write(entry, 0, value);
                value += 1 << PAGE_SHIFT;
            }
        }
    }

    #[inline]
    fn find(&mut self, gfn: Gfn) -> Option<Found> {
        let _held = self.protection.enter();
        let value = self.tables.leaves(gfn)?[index(gfn, 1)].load(Ordering::Acquire);
        (value != 0).then_some(Found {
            pfn: Pfn((value & FRAME) >> PAGE_SHIFT),
            writable: value & WRITE != 0,
        })
    }

    fn protect_range(&mut self, range: GfnRange) {
        self.sweep(range, |old| old & !WRITE);
    }

    fn unmap_range(&mut self, range: GfnRange) {
        self.sweep(range, |_| 0);
    }

    #[inline]
    fn unmap(&mut self, gfn: Gfn) {
        let _held = self.protection.enter();
        if let Some(leaves) = self.tables.leaves(gfn) {
            let entry = &leaves[index(gfn, 1)];
            W::write(entry, entry.load(Ordering::Relaxed), 0);
        }
    }
}

/// The floor of one thread: plain stores.
#[derive(Debug)]
pub(crate) struct PlainStores;

impl Scheme for PlainStores {
    const NAME: &'static str = "floor: plain stores";
    type Single = Walker<Store, Nothing>;

    fn single() -> Self::Single {
        Walker::new(&Arc::new(Radix::new()), Nothing)
    }
}

/// The floor of several threads: compare-exchanges. Tables are never freed.
#[derive(Debug)]
pub(crate) struct CompareExchange;

impl Scheme for CompareExchange {
    const NAME: &'static str = "floor: compare-exchange";
    type Single = Walker<Exchange, Nothing>;

    fn single() -> Self::Single {
        Self::worker(&Self::tables())
    }
}

impl Parallel for CompareExchange {
    type Tables = Arc<Radix>;
    type Worker = Self::Single;

    fn tables() -> Arc<Radix> {
        Arc::new(Radix::new())
    }

    fn worker(tables: &Arc<Radix>) -> Self::Worker {
        Walker::new(tables, Nothing)
    }
}

/// [`CompareExchange`] inside a guard of crossbeam-epoch 0.9, one per call. Tables could be freed,
/// but are not.
#[derive(Debug)]
pub(crate) struct EpochPinned;

impl Scheme for EpochPinned {
    const NAME: &'static str = "+ crossbeam-epoch pin";
    type Single = Walker<Exchange, LocalHandle>;

    fn single() -> Self::Single {
        Self::worker(&Self::tables())
    }
}

impl Parallel for EpochPinned {
    type Tables = (Arc<Radix>, Collector);
    type Worker = Self::Single;

    fn tables() -> Self::Tables {
        (Arc::new(Radix::new()), Collector::new())
    }

    fn worker((tables, collector): &Self::Tables) -> Self::Worker {
        Walker::new(tables, collector.register())
    }
}

/// [`CompareExchange`] inside a read lock of the standard library's `RwLock`, one per call. There
/// is no writer. It stands for an MMU lock with a shared side that is one shared word.
#[derive(Debug)]
pub(crate) struct ReadLocked;

impl Scheme for ReadLocked {
    const NAME: &'static str = "+ std RwLock read";
    type Single = Walker<Exchange, Arc<RwLock<()>>>;

    fn single() -> Self::Single {
        Self::worker(&Self::tables())
    }
}

impl Parallel for ReadLocked {
    type Tables = (Arc<Radix>, Arc<RwLock<()>>);
    type Worker = Self::Single;

    fn tables() -> Self::Tables {
        (Arc::new(Radix::new()), Arc::default())
    }

    fn worker((tables, lock): &Self::Tables) -> Self::Worker {
        Walker::new(tables, Arc::clone(lock))
    }
}
