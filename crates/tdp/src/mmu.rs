#![expect(
    unsafe_code,
    reason = "owns the root and, when it is dropped, every table below it"
)]
//! The second stage of one VM: what all its workers share.

use crate::batch::Unflushed;
use crate::counts::{AllCounts, Stats};
use crate::format::Format;
use crate::invalidate::Invalidation;
use crate::pages::{OutOfTables, Page, Table};
use crate::platform::{Flush, Platform};
use crate::sync::{AtomicU64, Ordering};
use crate::worker::Worker;
use alloc::sync::Arc;
use core::fmt;
use core::marker::PhantomData;
use pageferry_addr::{Gfn, Pfn};
use pageferry_epoch::{Domain, Guard, Limbo};

/// The second-stage tables of one VM, in format `F` on platform `P`.
///
/// Everything is done through a [`Worker`]: each vCPU has one, and each thread that maintains the tables. This is what
/// they share: the root, the MMU lock, the sequence of invalidations, and the sums of what is mapped.
///
/// The MMU lock is the pair of sides of an epoch [`Domain`]: faults, and whatever else changes entries one by one, hold
/// the shared side, which writes a cache line of the worker's own; invalidations and the swap of roots hold the
/// exclusive one. `docs/mmu.md` has the whole protocol.
pub struct Mmu<F: Format, P: Platform> {
    platform: P,
    domain: Arc<Domain>,
    /// The frame of the current root. Replaced under the exclusive side only.
    root: AtomicU64,
    pub(crate) invalidation: Invalidation,
    pub(crate) unflushed: Unflushed,
    pub(crate) counts: AllCounts,
    format: PhantomData<F>,
}

impl<F: Format, P: Platform> Mmu<F, P> {
    /// Tables that translate nothing.
    ///
    /// # Errors
    /// If the platform has no memory for a root.
    pub fn new(platform: P) -> Result<Arc<Self>, OutOfTables> {
        const { assert!(F::NON_PRESENT == 0, "fresh tables are all 0") };
        let root = new_root::<F, P>(&platform)?;
        Ok(Arc::new(Self {
            root: AtomicU64::new(root.frame(&platform).0),
            domain: Domain::with_barrier(platform.barrier()),
            platform,
            invalidation: Invalidation::new(),
            unflushed: Unflushed::new(),
            counts: AllCounts::new(),
            format: PhantomData,
        }))
    }

    /// A worker, for one thread at a time.
    #[must_use]
    pub fn worker(self: &Arc<Self>) -> Worker<F, P> {
        Worker::new(Arc::clone(self))
    }

    /// The frame of the root, for the hardware. It changes when everything is zapped:
    /// [`Flush::Roots`](crate::Flush::Roots) tells the platform.
    #[must_use]
    pub fn root(&self) -> Pfn {
        Pfn(self.root.load(Ordering::Acquire))
    }

    /// Where it runs.
    #[must_use]
    pub const fn platform(&self) -> &P {
        &self.platform
    }

    /// What is mapped now. Exact while nothing changes; otherwise each part may miss changes that are in flight.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let (leaves, tables) = self.counts.sum();
        let entry = size_of::<u64>() as u64;
        Stats {
            leaves,
            tables,
            table_bytes: (tables * F::entries(1) as u64 + F::entries(F::LEVELS) as u64) * entry,
        }
    }

    pub(crate) const fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }

    /// The root, under a guard.
    #[inline]
    pub(crate) fn top<'g>(&self, guard: &'g Guard<'_>) -> Table<'g, F> {
        // SAFETY: loaded with acquire order, under the guard.
        unsafe { Table::root(guard, &self.platform, self.root()) }
    }

    /// Puts another root in place and gives the old one. The caller holds the exclusive side, so nobody changes entries,
    /// and what comes after it begins at the new root.
    pub(crate) fn swap_root(&self, new: Page) -> OldRoot {
        let new = new.frame(&self.platform).0;
        self.unflushed.open_root();
        // Release: the entries of the new one. Acquire: the old one's history.
        let old = Pfn(self.root.swap(new, Ordering::AcqRel));
        // SAFETY: `root` was the one link to it, and is replaced.
        OldRoot(unsafe { Page::from_link(&self.platform, old, F::entries(F::LEVELS)) })
    }
}

/// Memory for a root.
pub(crate) fn new_root<F: Format, P: Platform>(platform: &P) -> Result<Page, OutOfTables> {
    Page::new(platform, F::entries(F::LEVELS)).ok_or(OutOfTables)
}

/// A tree whose root was replaced; vCPUs and guards may still use it.
pub(crate) struct OldRoot(Page);

/// What taking a tree apart meets.
pub(crate) enum Met {
    /// A table below the root.
    Table,
    /// A leaf.
    Leaf {
        /// Its value.
        value: u64,
        /// The level of its table.
        level: u32,
        /// Its first frame.
        first: Gfn,
    },
}

impl OldRoot {
    /// Makes all vCPUs use the new root, waits until nobody is left in the old tree, and frees it, entry by entry with
    /// plain loads. `met` is told what was there. The caller holds no guard.
    pub(crate) fn dismantle<F: Format, P: Platform>(
        self,
        mmu: &Mmu<F, P>,
        mut met: impl FnMut(Met),
    ) {
        mmu.platform.flush(Flush::Roots);
        mmu.unflushed.close_root();
        let mut limbo = Limbo::new();
        limbo.retire(mmu.domain.stamp(), self.0);
        let root = loop {
            mmu.domain.try_advance();
            if let Some(root) = limbo.next_expired(&mmu.domain) {
                break root;
            }
            mmu.platform.relax();
        };
        // SAFETY: the root was replaced; then vCPUs were made to leave it, then guards.
        unsafe { dismantle::<F, P>(&mmu.platform, root, F::LEVELS, 0, &mut met) };
    }
}

/// Frees a tree.
///
/// # Safety
/// `page` is a table of `level` whose link is gone, and its first entry is for frame `first`. No guard and no hardware can
/// reach it, or what is below.
unsafe fn dismantle<F: Format, P: Platform>(
    platform: &P,
    page: Page,
    level: u32,
    first: u64,
    met: &mut impl FnMut(Met),
) {
    let span = F::frames_per_entry(level);
    for (index, entry) in page.entries().iter().enumerate() {
        let value = entry.load(Ordering::Relaxed);
        let first = first + index as u64 * span;
        if F::is_leaf(value, level) {
            met(Met::Leaf {
                value,
                level,
                first: Gfn(first),
            });
        } else if F::is_table(value, level) {
            met(Met::Table);
            let pfn = F::table_pfn(value);
            // SAFETY: the one link to that table; the caller vouches that nobody follows it again.
            let below = unsafe { Page::from_link(platform, pfn, F::entries(level - 1)) };
            // SAFETY: as the caller vouches.
            unsafe { dismantle::<F, P>(platform, below, level - 1, first, met) };
        }
    }
    // SAFETY: as the caller vouches.
    unsafe { page.free(platform) };
}

impl<F: Format, P: Platform> Drop for Mmu<F, P> {
    fn drop(&mut self) {
        let entries = F::entries(F::LEVELS);
        // SAFETY: the root's one link is this field, which goes.
        let root = unsafe { Page::from_link(&self.platform, self.root(), entries) };
        // SAFETY: each worker holds the MMU, so there is none and no guard; vCPUs by `Platform`, 4.
        unsafe { dismantle::<F, P>(&self.platform, root, F::LEVELS, 0, &mut |_| {}) };
    }
}

impl<F: Format, P: Platform> fmt::Debug for Mmu<F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mmu")
            .field("format", &F::NAME)
            .field("root", &self.root())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
