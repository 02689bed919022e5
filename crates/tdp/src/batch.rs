//! What changes leave behind: a flush that is owed, and tables that were cut off.
//!
//! **Guarantee.** The memory of a table that was cut off is given back after a TLB flush that came later, *and* after a
//! grace period that began later still. Both wait in bounded amounts: a sweep stops for a flush when
//! [`Batch::MOST_TABLES`] tables are in a batch.
//!
//! **Mechanism.** Each worker has one batch. Before the first change of a batch that TLBs may contradict, the worker
//! counts the batch as open, in the MMU ([`Unflushed`]); when the batch is settled it flushes, and then counts it
//! as closed. So who needs to know that nothing stale is left, whoever made the changes, looks at what the MMU counts, and
//! flushes itself where something is open. Two more things are counted there: roots that were replaced, as long
//! as vCPUs may use them; and permissions to store that aging took without flushing.

use crate::pages::Page;
use crate::platform::{Flush, Platform};
use crate::sync::{AtomicU64, Ordering};
use alloc::vec::Vec;
use pageferry_addr::{Gfn, GfnRange};

/// What TLBs may contradict, whoever has changed it.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Unflushed {
    /// How many batches have changed entries and not flushed yet.
    batches: AtomicU64,
    /// How many roots were replaced that vCPUs may still use.
    roots: AtomicU64,
    /// How many leaves have lost the permission to store by aging, ever.
    aged: AtomicU64,
    /// The value of `aged` at the begin of a flush of everything that is over; only grows.
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

    /// Comes before the first change of a batch. Whoever sees that change sees this too: the change, a
    /// read-modify-write with release order, comes after it.
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

    /// Comes after a change that took the permission to store by aging and leaves the flush to whoever needs it, as KVM's
    /// `tlbs_dirty` did; [`open`](Self::open) came before it. It is counted as aged before it is closed, so it is owed
    /// at every moment; and counted after the change, as a flush before that pays for nothing.
    pub(crate) fn close_aged(&self) {
        // Release: who pays for it makes vCPUs see the change.
        self.aged.fetch_add(1, Ordering::Release);
        self.close();
    }

    /// Flushes if TLBs may contradict changes that happened before this call; `all` are all frames.
    pub(crate) fn pay<P: Platform>(&self, platform: &P, all: GfnRange) {
        // Acquire: what was flushed is over. And first: whoever has closed what he aged has counted it before.
        let open = self.batches.load(Ordering::Acquire) != 0;
        let aged = self.aged.load(Ordering::Acquire);
        let is_aged = self.aged_flushed.load(Ordering::Acquire) < aged;
        let root = self.roots.load(Ordering::Acquire) != 0;
        if open || is_aged || root {
            // Who runs on a replaced root would fill its TLB from there again.
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
    /// The frames whose translations changed, end excluded; empty where none did.
    first: u64,
    end: u64,
    /// Whether permissions to store are all that was taken.
    writes_only: bool,
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

    /// Flushes what is owed and empties the batch; gives the tables, for which a grace period may begin.
    pub(crate) fn settle<P: Platform>(
        &mut self,
        unflushed: &Unflushed,
        platform: &P,
    ) -> impl Iterator<Item = Page> {
        let owed = core::mem::replace(self, Self::new());
        if owed.end != 0 {
            let pages = owed.end - owed.first;
            let range = GfnRange::new(Gfn(owed.first), pages);
            let range = range.unwrap_or_else(|| unreachable!("frames below the format's limit"));
            platform.flush(if owed.writes_only && owed.tables.is_empty() {
                Flush::Writes(range)
            } else {
                Flush::Range(range)
            });
            unflushed.close();
        }
        owed.tables.into_iter()
    }
}
