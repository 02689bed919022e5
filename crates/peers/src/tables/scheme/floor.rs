//! The floors: nothing but the stores, and nothing but those and a way to protect them.
//!
//! They keep no counts, know no TLB, never free a table, and know one page size.

use super::radix::{Radix, index};
use super::{Found, Parallel, Scheme, TABLE_PAGES, Worker};
use crate::sync::{Arc, AtomicU64, Ordering, RwLock, RwLockReadGuard};
use crate::tables::allocator::{ENTRIES, FRAME, PRESENT, WRITE};
use crossbeam_epoch::{Collector, LocalHandle};
use pageferry_addr::{Gfn, GfnRange, PAGE_SHIFT, Pfn};
use std::marker::PhantomData;
use std::sync::PoisonError;

/// How an entry changes.
pub trait Change {
    /// From `old`, which was just loaded, to `new`.
    fn change(entry: &AtomicU64, old: u64, new: u64);
}

/// By a plain store: for one thread alone.
#[derive(Debug)]
pub struct Store;

impl Change for Store {
    #[inline]
    fn change(entry: &AtomicU64, _: u64, new: u64) {
        // On the machines this is for, a relaxed store is a plain one.
        entry.store(new, Ordering::Relaxed);
    }
}

/// By compare-exchange, where losing is fine: whoever wins has made the same change.
#[derive(Debug)]
pub struct Exchange;

impl Change for Exchange {
    #[inline]
    fn change(entry: &AtomicU64, old: u64, new: u64) {
        let _ = entry.compare_exchange(old, new, Ordering::Release, Ordering::Relaxed);
    }
}

/// What is held while entries are looked at or changed: once for a call.
pub trait Protection {
    /// Held by this.
    type Guard<'a>
    where
        Self: 'a;

    /// Takes it.
    fn enter(&self) -> Self::Guard<'_>;
}

/// Nothing is held.
#[derive(Debug)]
pub struct Nothing;

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

/// A thread's way to a [`Radix`].
#[derive(Debug)]
pub struct Walker<C, P> {
    tables: Arc<Radix>,
    protection: P,
    change: PhantomData<C>,
}

impl<C: Change, P: Protection> Walker<C, P> {
    fn new(tables: &Arc<Radix>, protection: P) -> Self {
        Self {
            tables: Arc::clone(tables),
            protection,
            change: PhantomData,
        }
    }

    /// Changes each entry of `range` that is not 0, table by table, to what `new` makes of it.
    #[inline]
    fn sweep(&self, range: GfnRange, new: impl Fn(u64) -> u64) {
        let _held = self.protection.enter();
        for (at, count) in by_table(range) {
            if let Some(leaves) = self.tables.leaves(at) {
                for entry in part(leaves, at, count) {
                    let old = entry.load(Ordering::Relaxed);
                    if old != 0 {
                        C::change(entry, old, new(old));
                    }
                }
            }
        }
    }
}

/// The parts of `range` that lie in one table of level 1 each: first frame and number.
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

impl<C: Change, P: Protection> Worker for Walker<C, P> {
    #[inline]
    fn map(&mut self, gfn: Gfn, pfn: Pfn) {
        let _held = self.protection.enter();
        let entry = &self.tables.leaves_or_new(gfn)[index(gfn, 1)];
        let old = entry.load(Ordering::Relaxed);
        if old == 0 {
            C::change(entry, old, leaf(pfn));
        }
    }

    fn map_range(&mut self, range: GfnRange, pfn: Pfn) {
        let _held = self.protection.enter();
        let mut value = leaf(pfn);
        for (at, count) in by_table(range) {
            for entry in part(self.tables.leaves_or_new(at), at, count) {
                C::change(entry, 0, value);
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
            C::change(entry, entry.load(Ordering::Relaxed), 0);
        }
    }
}

/// The floor of one thread: entries are stored plainly.
#[derive(Debug)]
pub struct PlainStores;

impl Scheme for PlainStores {
    const NAME: &'static str = "floor: plain stores";
    type Alone = Walker<Store, Nothing>;

    fn alone() -> Self::Alone {
        Walker::new(&Arc::new(Radix::new()), Nothing)
    }
}

/// The floor of several threads: entries are exchanged, and tables are never freed.
#[derive(Debug)]
pub struct CompareExchange;

impl Scheme for CompareExchange {
    const NAME: &'static str = "floor: compare-exchange";
    type Alone = Walker<Exchange, Nothing>;

    fn alone() -> Self::Alone {
        Self::worker(&Self::tables())
    }
}

impl Parallel for CompareExchange {
    type Tables = Arc<Radix>;
    type Worker = Self::Alone;

    fn tables() -> Arc<Radix> {
        Arc::new(Radix::new())
    }

    fn worker(tables: &Arc<Radix>) -> Self::Worker {
        Walker::new(tables, Nothing)
    }
}

/// The same inside a guard of crossbeam-epoch 0.9, one a call: tables could be freed, but are not.
#[derive(Debug)]
pub struct EpochPinned;

impl Scheme for EpochPinned {
    const NAME: &'static str = "+ crossbeam-epoch pin";
    type Alone = Walker<Exchange, LocalHandle>;

    fn alone() -> Self::Alone {
        Self::worker(&Self::tables())
    }
}

impl Parallel for EpochPinned {
    type Tables = (Arc<Radix>, Collector);
    type Worker = Self::Alone;

    fn tables() -> Self::Tables {
        (Arc::new(Radix::new()), Collector::new())
    }

    fn worker((tables, collector): &Self::Tables) -> Self::Worker {
        Walker::new(tables, collector.register())
    }
}

/// The same under the reading side of the standard library's `RwLock`, one a call, which nobody
/// ever writes: as an MMU lock of two sides does it that is one shared word.
#[derive(Debug)]
pub struct ReadLocked;

impl Scheme for ReadLocked {
    const NAME: &'static str = "+ std RwLock read";
    type Alone = Walker<Exchange, Arc<RwLock<()>>>;

    fn alone() -> Self::Alone {
        Self::worker(&Self::tables())
    }
}

impl Parallel for ReadLocked {
    type Tables = (Arc<Radix>, Arc<RwLock<()>>);
    type Worker = Self::Alone;

    fn tables() -> Self::Tables {
        (Arc::new(Radix::new()), Arc::default())
    }

    fn worker((tables, lock): &Self::Tables) -> Self::Worker {
        Walker::new(tables, Arc::clone(lock))
    }
}
