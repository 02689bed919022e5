//! The debts of changes: a TLB flush, and the tables that they cut off.
//!
//! **Guarantee.** The memory of a table that was cut off is freed after a later TLB flush, *and*
//! after a grace period that began after that flush. Both queues are bounded. A sweep stops for a
//! flush when a batch has [`Batch::MOST_TABLES`] tables. `waiting.rs` bounds the queue for the
//! grace period.
//!
//! **Mechanism.** Each worker has one batch. Before the batch's first change that TLBs may
//! contradict, the worker counts the batch as open in the MMU ([`Unflushed`]). To settle the batch,
//! it flushes, and then counts it as closed. Another thread may need to know that no stale
//! translation is left, of any worker's changes. It reads that count, and flushes if a batch is
//! open. `Unflushed` also counts the replaced roots that vCPUs may still use, and the permissions
//! to store that aging took without a flush.

use crate::pages::Page;
use crate::platform::{Flush, Platform};
use crate::sync::{AtomicU64, Ordering};
use alloc::vec::{Drain, Vec};
use core::mem;
use pageferry_addr::{Gfn, GfnRange};

/// The counts of changes that TLBs may contradict, of all workers.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Unflushed {
    /// The number of batches that have changed entries and not flushed yet.
    batches: AtomicU64,
    /// The number of replaced roots that vCPUs may still use.
    roots: AtomicU64,
    /// The number of leaves that have ever lost the permission to store by aging.
    aged: AtomicU64,
    /// The value of `aged` when the latest completed flush of everything began. It only grows.
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

    /// Precedes the first change of a batch. A thread that sees that change sees this count too:
    /// the change is a later read-modify-write with release order.
    pub(crate) fn open(&self) {
        self.batches.fetch_add(1, Ordering::Relaxed);
    }

    /// Follows the flush.
    fn close(&self) {
        self.batches.fetch_sub(1, Ordering::Release);
    }

    /// Precedes the replacement of a root, and orders as [`open`](Self::open) does.
    pub(crate) fn open_root(&self) {
        self.roots.fetch_add(1, Ordering::Relaxed);
    }

    /// Follows [`Flush::Roots`].
    pub(crate) fn close_root(&self) {
        self.roots.fetch_sub(1, Ordering::Release);
    }

    /// Follows a change that took the permission to store by aging. [`open`](Self::open) preceded
    /// the change. The flush is left to a thread that needs it, as with KVM's `tlbs_dirty`.
    ///
    /// `aged` is counted before the batch is closed, so the flush is owed at every moment. `aged`
    /// is counted after the change, since a flush before the change does not cover it.
    pub(crate) fn close_aged(&self) {
        // Release: the thread that flushes for it makes vCPUs see the change.
        self.aged.fetch_add(1, Ordering::Release);
        self.close();
    }

    /// Flushes if TLBs may contradict changes that happened before this call. `all` are all frames.
    pub(crate) fn pay<P: Platform>(&self, platform: &P, all: GfnRange) {
        // Acquire: a closed batch's flush is over. This load is the first of the three. A thread
        // that has closed an aged batch has counted `aged` before.
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
    /// The frames whose translations changed, end excluded. Empty if none did.
    first: u64,
    end: u64,
    /// Whether the changes took nothing but permissions to store.
    writes_only: bool,
    /// The number of roots that this worker has replaced and whose flush has failed.
    roots: u64,
    /// Grows before the worker takes a side of the lock, so that nothing is allocated under it.
    tables: Vec<Page>,
}

impl Batch {
    /// The number of tables at which a sweep stops to flush: 64 tables of 4 KiB, and at least one
    /// subtree.
    pub(crate) const MOST_TABLES: usize = 64;

    pub(crate) const fn new() -> Self {
        Self {
            first: u64::MAX,
            end: 0,
            writes_only: true,
            roots: 0,
            tables: Vec::new(),
        }
    }

    /// Makes room for a full batch whose last visit cuts off `most` tables. If memory is short
    /// there is no room, and sweeps leave tables linked.
    pub(crate) fn reserve(&mut self, most: usize) {
        let more = (Self::MOST_TABLES - 1 + most).saturating_sub(self.tables.len());
        let _ = self.tables.try_reserve(more);
    }

    /// Whether there is room for `tables` more without an allocation.
    pub(crate) const fn has_room(&self, tables: usize) -> bool {
        self.tables.capacity() - self.tables.len() >= tables
    }

    /// The number of tables that were cut off and not handed over yet.
    pub(crate) const fn len(&self) -> usize {
        self.tables.len()
    }

    /// Whether no debt is left.
    pub(crate) const fn is_empty(&self) -> bool {
        self.end == 0 && self.tables.is_empty()
    }

    /// Whether the worker should settle it before it cuts off more tables.
    pub(crate) const fn is_full(&self) -> bool {
        self.tables.len() >= Self::MOST_TABLES
    }

    /// Announces a change of entries for the `frames` frames from `gfn`. It precedes the change.
    #[inline]
    pub(crate) fn owe(&mut self, unflushed: &Unflushed, gfn: Gfn, frames: u64, writes_only: bool) {
        if self.end == 0 {
            unflushed.open();
        }
        self.first = self.first.min(gfn.0);
        self.end = self.end.max(gfn.0 + frames);
        self.writes_only &= writes_only;
    }

    /// Makes [`Flush::Roots`] owed for a root that this worker has replaced.
    pub(crate) const fn owe_root(&mut self) {
        self.roots += 1;
    }

    /// Takes over a table that was cut off and whose entries are frozen.
    pub(crate) fn keep(&mut self, page: Page) {
        self.tables.push(page);
    }

    /// Flushes if that is owed, and empties the batch. Returns the tables, for which a grace period
    /// may begin. If the flush panics, everything stays owed.
    pub(crate) fn settle<P: Platform>(
        &mut self,
        unflushed: &Unflushed,
        platform: &P,
    ) -> Drain<'_, Page> {
        if let Some(what) = self.owed() {
            platform.flush(what);
            for _ in 0..mem::take(&mut self.roots) {
                unflushed.close_root();
            }
            if self.end != 0 {
                unflushed.close();
            }
            (self.first, self.end, self.writes_only) = (u64::MAX, 0, true);
        }
        self.tables.drain(..)
    }

    /// The flush that the changes of this batch need.
    fn owed(&self) -> Option<Flush> {
        if self.roots != 0 {
            return Some(Flush::Roots);
        }
        if self.end == 0 {
            return None;
        }
        let range = GfnRange::new(Gfn(self.first), self.end - self.first);
        let range = range.unwrap_or_else(|| unreachable!("frames below the format's limit"));
        Some(if self.writes_only && self.tables.is_empty() {
            Flush::Writes(range)
        } else {
            Flush::Range(range)
        })
    }
}
