//! What changes leave behind: a flush that is owed, and tables that were cut off.
//!
//! **Guarantee.** The memory of a table that was cut off is given back after a TLB flush that came
//! later, *and* after a grace period that began later still. Both wait in bounded amounts: a sweep
//! stops for a flush when [`Batch::MOST_TABLES`] tables are in a batch, and `waiting.rs` bounds the
//! second wait.
//!
//! **Mechanism.** Each worker has one batch. Before the first change of a batch that TLBs may
//! contradict, the worker counts the batch as open, in the MMU ([`Unflushed`]). When it settles the
//! batch it flushes, and then counts it as closed. A thread that needs to know that nothing stale
//! is left, of any worker's changes, reads that count and flushes itself if a batch is open. Two
//! more things are counted there: roots that were replaced, as long as vCPUs may use them; and
//! permissions to store that aging took without flushing.

use crate::pages::Page;
use crate::platform::{Flush, Platform};
use crate::sync::{AtomicU64, Ordering};
use alloc::vec::{Drain, Vec};
use pageferry_addr::{Gfn, GfnRange};

/// What TLBs may contradict, whichever worker has changed it.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Unflushed {
    /// How many batches have changed entries and not flushed yet.
    batches: AtomicU64,
    /// How many roots were replaced that vCPUs may still use.
    roots: AtomicU64,
    /// How many leaves have lost the permission to store by aging, ever.
    aged: AtomicU64,
    /// The value of `aged` when the last flush of everything that is over began. It only grows.
    aged_flushed: AtomicU64,
}

impl Unflushed {
    pub(crate) fn new() -> Self {
        Self {
            batches: AtomicU64::new(0),
            roots: AtomicU64::new(0),
            aged: AtomicU64::new(0),
            aged_flushed: AtomicU64::new(0),
        }
    }

    /// Comes before the first change of a batch. A thread that sees that change sees this too: the
    /// change is a read-modify-write with release order, and comes after it.
    pub(crate) fn open(&self) {
        self.batches.fetch_add(1, Ordering::Relaxed);
    }

    /// Comes after the flush.
    fn close(&self) {
        self.batches.fetch_sub(1, Ordering::Release);
    }

    /// Comes before a root is replaced, and orders as [`open`](Self::open) does.
    pub(crate) fn open_root(&self) {
        self.roots.fetch_add(1, Ordering::Relaxed);
    }

    /// Comes after [`Flush::Roots`].
    pub(crate) fn close_root(&self) {
        self.roots.fetch_sub(1, Ordering::Release);
    }

    /// Comes after a change that took the permission to store by aging, and leaves the flush to a
    /// thread that needs it, as KVM's `tlbs_dirty` did. [`open`](Self::open) came before the
    /// change.
    ///
    /// The change is counted as aged before its batch is closed, so it is owed at every moment. It
    /// is counted after the change, since a flush before the change pays for nothing.
    pub(crate) fn close_aged(&self) {
        // Release: the thread that pays for it makes vCPUs see the change.
        self.aged.fetch_add(1, Ordering::Release);
        self.close();
    }

    /// Flushes if TLBs may contradict changes that happened before this call; `all` are all frames.
    pub(crate) fn pay<P: Platform>(&self, platform: &P, all: GfnRange) {
        // Acquire: what was flushed is over. This load is the first: a thread that has closed what
        // it aged has counted it before.
        let open = self.batches.load(Ordering::Acquire) != 0;
        let aged = self.aged.load(Ordering::Acquire);
        let is_aged = self.aged_flushed.load(Ordering::Acquire) < aged;
        let root = self.roots.load(Ordering::Acquire) != 0;
        if open || is_aged || root {
            // A vCPU that runs on a replaced root would fill its TLB from there again.
            platform.flush(if root {
                Flush::Roots
            } else {
                Flush::Range(all)
            });
            if is_aged {
                self.aged_flushed.fetch_max(aged, Ordering::Release);
            }
        }
    }
}

/// One worker's batch.
#[derive(Debug)]
pub(crate) struct Batch {
    /// The frames whose translations changed, end excluded; empty if none did.
    first: u64,
    end: u64,
    /// Whether permissions to store are all that was taken.
    writes_only: bool,
    /// Has room before a side of the lock is taken, so that nothing is allocated under it.
    tables: Vec<Page>,
}

impl Batch {
    /// How many tables wait for one flush at most: 64 tables of 4 KiB, and at least one subtree.
    pub(crate) const MOST_TABLES: usize = 64;

    pub(crate) const fn new() -> Self {
        Self {
            first: u64::MAX,
            end: 0,
            writes_only: true,
            tables: Vec::new(),
        }
    }

    /// Makes room for a full batch whose last visit cuts off `most` tables. Without memory for that
    /// there is no room, and sweeps leave tables linked.
    pub(crate) fn reserve(&mut self, most: usize) {
        let more = (Self::MOST_TABLES - 1 + most).saturating_sub(self.tables.len());
        let _ = self.tables.try_reserve(more);
    }

    /// Whether `tables` more can be kept without an allocation.
    pub(crate) const fn has_room(&self, tables: usize) -> bool {
        self.tables.capacity() - self.tables.len() >= tables
    }

    /// How many tables were cut off and not handed over yet.
    pub(crate) const fn len(&self) -> usize {
        self.tables.len()
    }

    /// Whether nothing is owed.
    pub(crate) const fn is_empty(&self) -> bool {
        self.end == 0 && self.tables.is_empty()
    }

    /// Whether it should be settled before more is cut off.
    pub(crate) const fn is_full(&self) -> bool {
        self.tables.len() >= Self::MOST_TABLES
    }

    /// Announces a change of entries for the `frames` frames from `gfn`, before it is made.
    #[inline]
    pub(crate) fn owe(&mut self, unflushed: &Unflushed, gfn: Gfn, frames: u64, writes_only: bool) {
        if self.end == 0 {
            unflushed.open();
        }
        self.first = self.first.min(gfn.0);
        self.end = self.end.max(gfn.0 + frames);
        self.writes_only &= writes_only;
    }

    /// Takes over a table that was cut off and whose entries are frozen.
    pub(crate) fn keep(&mut self, page: Page) {
        self.tables.push(page);
    }

    /// Flushes what is owed and empties the batch. Returns the tables, for which a grace period may
    /// begin. If the flush panics, all stays owed.
    pub(crate) fn settle<P: Platform>(
        &mut self,
        unflushed: &Unflushed,
        platform: &P,
    ) -> Drain<'_, Page> {
        if self.end != 0 {
            let pages = self.end - self.first;
            let range = GfnRange::new(Gfn(self.first), pages);
            let range = range.unwrap_or_else(|| unreachable!("frames below the format's limit"));
            platform.flush(if self.writes_only && self.tables.is_empty() {
                Flush::Writes(range)
            } else {
                Flush::Range(range)
            });
            unflushed.close();
            (self.first, self.end, self.writes_only) = (u64::MAX, 0, true);
        }
        self.tables.drain(..)
    }
}
