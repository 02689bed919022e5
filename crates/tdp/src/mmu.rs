#![expect(
    unsafe_code,
    reason = "owns the root and, when it is dropped, every table below it"
)]
//! The second stage of one VM: the state that all its workers share.

use crate::batch::Unflushed;
use crate::counts::{AllCounts, LEAF_LEVELS, OwnCounts, Stats};
use crate::format::Format;
use crate::invalidate::Invalidations;
use crate::pages::{OutOfTables, Page, Table};
use crate::platform::Platform;
use crate::sync::{AtomicU64, Ordering};
use crate::waiting::Abandoned;
use alloc::sync::Arc;
use core::fmt;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use pageferry_addr::{Gfn, GfnRange, PAGE_SIZE, Pfn};
use pageferry_epoch::{Domain, Exclusive, Guard, Limbo, Reader, Shared};

/// The second-stage tables of one VM, in format `F` on platform `P`.
///
/// All work goes through a [`Worker`](crate::Worker). Each vCPU has one, and each thread that
/// maintains the tables. The workers share the state here: the root, the MMU lock, the sequence of
/// invalidations, and the sums of the counts.
///
/// The MMU lock is the shared and the exclusive side of an epoch [`Domain`]. Faults and all other
/// changes of single entries hold the shared side. Taking it writes only a cache line of the
/// worker. Invalidations and the swap of roots hold the exclusive side.
pub struct Mmu<F: Format, P: Platform> {
    platform: P,
    domain: pageferry_epoch::TryArc<Domain>,
    /// The frame of the current root, replaced under the exclusive side only.
    root: AtomicU64,
    pub(crate) invalidations: Invalidations,
    pub(crate) unflushed: Unflushed,
    pub(crate) abandoned: Abandoned,
    pub(crate) counts: AllCounts,
    format: PhantomData<F>,
}

impl<F: Format, P: Platform> Mmu<F, P> {
    /// Tables that translate nothing.
    ///
    /// # Errors
    /// If the platform has no memory for a root.
    ///
    /// # Panics
    /// If the platform's [`pointer`](Platform::pointer) of the root's [`frame`](Platform::frame) is
    /// not the root. Every call that allocates a table checks the new table in the same way.
    pub fn new(platform: P) -> Result<Arc<Self>, OutOfTables> {
        const { assert!(F::NON_PRESENT == 0, "fresh tables are all 0") };
        let root = new_root::<F, P>(&platform)?;
        Ok(Arc::new(Self {
            root: AtomicU64::new(root.frame(&platform).0),
            domain: Domain::with_barrier(platform.barrier()),
            platform,
            invalidations: Invalidations::new(),
            unflushed: Unflushed::new(),
            abandoned: Abandoned::new(),
            counts: AllCounts::new(),
            format: PhantomData,
        }))
    }

    /// The frame of the root, for the hardware: the format makes the register's value of it, such
    /// as [`Ept::eptp`](crate::format::Ept::eptp). It changes when everything is zapped, and
    /// [`Flush::Roots`](crate::Flush::Roots) then tells the platform.
    #[must_use]
    pub fn root(&self) -> Pfn {
        Pfn(self.root.load(Ordering::Acquire))
    }

    /// The platform.
    #[must_use]
    pub const fn platform(&self) -> &P {
        &self.platform
    }

    /// The current counts. They are exact while nothing changes. Otherwise each part may miss
    /// changes in flight.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let sum = self.counts.sum();
        let entries = sum.tables * F::entries(1) as u64 + root_entries::<F>() as u64;
        Stats {
            table_bytes: entries * size_of::<u64>() as u64,
            invalidations: self.invalidations.in_progress(),
            ..sum
        }
    }

    /// The frames on which faults are refused because of invalidations: one range that covers all
    /// invalidations in progress. The call waits for other workers' calls, like all exclusive work,
    /// so callbacks must not make it.
    #[must_use]
    pub fn invalidating(&self) -> Option<GfnRange> {
        let _exclusive = self.exclude();
        self.invalidations.current()
    }

    /// Ends all invalidations in progress and returns their number. Dropping their
    /// [`Invalidating`](crate::Invalidating) later does nothing.
    ///
    /// This is the way out after an `Invalidating` was forgotten ([`core::mem::forget`]): until
    /// then no fault maps anything in its range. [`Stats::invalidations`] and
    /// [`invalidating`](Self::invalidating) show the leak. The caller ensures that the host has
    /// finished its changes in all of these ranges. Callbacks must not make this call.
    pub fn end_invalidations(&self) -> u64 {
        let _exclusive = self.exclude();
        self.invalidations.end_all()
    }

    pub(crate) const fn domain(&self) -> &pageferry_epoch::TryArc<Domain> {
        &self.domain
    }

    /// Takes the exclusive side of the MMU lock.
    pub(crate) fn exclude(&self) -> Exclusive<'_> {
        self.domain.exclude(|| self.platform.relax())
    }

    /// Takes the shared side of the MMU lock, for `reader`.
    #[inline]
    pub(crate) fn share<'r>(&self, reader: &'r mut Reader) -> Shared<'r> {
        reader.share(|| self.platform.relax())
    }

    /// The root, under a guard.
    #[inline]
    pub(crate) fn top<'g>(&self, guard: &'g Guard<'_>) -> Table<'g, F> {
        // SAFETY: loaded with acquire order, under the guard.
        unsafe { Table::root(guard, &self.platform, self.root()) }
    }

    /// Puts another root in place and returns the old one. The caller holds the exclusive side, so
    /// no worker changes entries, and later calls begin at the new root.
    pub(crate) fn swap_root(&self, new: Page) -> OldRoot {
        let new = new.frame(&self.platform).0;
        self.unflushed.open_root();
        // Release: the entries of the new root. Acquire: the history of the old one.
        let old = Pfn(self.root.swap(new, Ordering::AcqRel));
        // SAFETY: `root` was the one link to it, and now has another value.
        OldRoot(unsafe { Page::from_link(&self.platform, old, root_entries::<F>()) })
    }
}

/// The number of entries that a root has memory for. It is at least a page of them: a frame number
/// cannot say where in its page a smaller root begins. Entries beyond the format's are never used.
fn root_entries<F: Format>() -> usize {
    let page = if cfg!(any(loom, shuttle)) {
        1
    } else {
        PAGE_SIZE as usize / size_of::<u64>()
    };
    F::entries(F::LEVELS).max(page)
}

/// Memory for a root.
pub(crate) fn new_root<F: Format, P: Platform>(platform: &P) -> Result<Page, OutOfTables> {
    Page::new::<F, P>(platform, root_entries::<F>()).ok_or(OutOfTables)
}

/// A tree whose root was replaced. vCPUs and guards may still use it.
pub(crate) struct OldRoot(Page);

impl OldRoot {
    /// The root's own memory. The tables below become the caller's as well.
    pub(crate) fn into_page(self) -> Page {
        self.0
    }

    /// Waits until no guard is left in the old tree, and frees it, entry by entry with plain loads.
    /// Takes its leaves and tables from `counts`. Calls `leaf` with the value, the level and the
    /// first frame of each leaf. Returns the number of frames that had a translation.
    ///
    /// All vCPUs use the new root already, and the caller holds no guard.
    pub(crate) fn dismantle<F: Format, P: Platform>(
        self,
        mmu: &Mmu<F, P>,
        counts: &mut OwnCounts,
        mut leaf: impl FnMut(u64, u32, Gfn),
    ) -> u64 {
        let mut limbo = Limbo::new();
        limbo.retire(mmu.domain.stamp(), self.0);
        let root = loop {
            mmu.domain.try_advance();
            if let Some(root) = limbo.next_expired(&mmu.domain) {
                break root;
            }
            mmu.platform.relax();
        };
        let mut gone = Gone {
            counts,
            tally: Tally::default(),
        };
        // SAFETY: the root was replaced, then vCPUs left it, then guards.
        let tree =
            unsafe { Dismantling::<F, P>::new(&mmu.platform, root, F::LEVELS, 0, &mut gone.tally) };
        tree.free(&mut leaf);
        gone.tally.frames::<F>()
    }
}

/// The contents of a tree, counted.
#[derive(Default)]
struct Tally {
    leaves: [i64; LEAF_LEVELS],
    /// The root excluded.
    tables: i64,
}

impl Tally {
    fn frames<F: Format>(&self) -> u64 {
        let levels = (1..=F::MAX_LEAF_LEVEL).zip(self.leaves);
        levels
            .map(|(level, count)| count.cast_unsigned() * F::frames_per_entry(level))
            .sum()
    }
}

/// Takes the contents of a tree from the counts when it is dropped, so also if the log panics.
struct Gone<'c> {
    counts: &'c mut OwnCounts,
    tally: Tally,
}

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        for (level, count) in (1..).zip(self.tally.leaves) {
            self.counts.leaves(level, -count);
        }
        self.counts.tables(-self.tally.tables);
    }
}

/// A table that nobody else can reach. Dropping it frees it and all tables below, so also if the
/// log panics.
struct Dismantling<'t, F: Format, P: Platform> {
    platform: &'t P,
    page: ManuallyDrop<Page>,
    level: u32,
    first: u64,
    /// The number of entries that were visited.
    visited: usize,
    tally: &'t mut Tally,
    format: PhantomData<F>,
}

impl<'t, F: Format, P: Platform> Dismantling<'t, F, P> {
    /// # Safety
    /// `page` is a table of `level` whose link was removed, and its first entry is for frame
    /// `first`. No guard and no hardware can reach it, nor the tables below.
    unsafe fn new(
        platform: &'t P,
        page: Page,
        level: u32,
        first: u64,
        tally: &'t mut Tally,
    ) -> Self {
        Self {
            platform,
            page: ManuallyDrop::new(page),
            level,
            first,
            visited: 0,
            tally,
            format: PhantomData,
        }
    }

    /// Frees it. Calls `leaf` with the value, the level and the first frame of each leaf.
    fn free(mut self, leaf: &mut impl FnMut(u64, u32, Gfn)) {
        self.visit_rest(leaf);
    }

    fn visit_rest(&mut self, leaf: &mut impl FnMut(u64, u32, Gfn)) {
        let (level, span) = (self.level, F::frames_per_entry(self.level));
        let entries = self.page.entries();
        for (index, entry) in entries.iter().enumerate().skip(self.visited) {
            self.visited = index + 1;
            let value = entry.load(Ordering::Relaxed);
            let first = self.first + index as u64 * span;
            if F::is_leaf(value, level) {
                self.tally.leaves[level as usize - 1] += 1;
                leaf(value, level, Gfn(first));
            } else if F::is_table(value, level) {
                self.tally.tables += 1;
                let (platform, pfn) = (self.platform, F::table_pfn(value));
                // SAFETY: this was the one link to that table, and `new`'s caller promises that
                // nobody follows it again.
                let below = unsafe { Page::from_link(platform, pfn, F::entries(level - 1)) };
                // SAFETY: as `new`'s caller promises.
                let below = unsafe {
                    Dismantling::<F, P>::new(platform, below, level - 1, first, self.tally)
                };
                below.free(leaf);
            }
        }
    }
}

impl<F: Format, P: Platform> Drop for Dismantling<'_, F, P> {
    fn drop(&mut self) {
        // Does nothing unless the log has panicked.
        self.visit_rest(&mut |_, _, _| ());
        // SAFETY: taken once, as `drop` runs once; the rest as `new`'s caller promises.
        unsafe { ManuallyDrop::take(&mut self.page).free(self.platform) };
    }
}

impl<F: Format, P: Platform> Drop for Mmu<F, P> {
    fn drop(&mut self) {
        let entries = root_entries::<F>();
        let mut tally = Tally::default();
        // SAFETY: this field is the one link to the root, and is dropped.
        let root = unsafe { Page::from_link(&self.platform, self.root(), entries) };
        // SAFETY: each worker holds the MMU, so there is no worker and no guard. For vCPUs:
        // `Platform`, 4.
        let tree =
            unsafe { Dismantling::<F, P>::new(&self.platform, root, F::LEVELS, 0, &mut tally) };
        drop(tree);
        // SAFETY: as above.
        unsafe { self.abandoned.free_all(&self.platform) };
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
