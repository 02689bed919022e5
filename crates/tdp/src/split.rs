//! Pages change their size: large ones are split, and small ones become large again, in place.
//!
//! **Guarantee.** A guest that uses the pages meanwhile notices nothing but, perhaps, a fault that turns out to be
//! spurious. No dirty state is lost.
//!
//! **Mechanism.** *Split*: a table is filled with the translations that the large leaf stands for, aside, and linked in its
//! place by one compare-exchange, which fails if hardware has set a bit of the leaf meanwhile. Old and new
//! translate the same, so nothing is flushed. *Recovery*: the link is replaced by a large leaf, by one
//! compare-exchange; then the table's entries are frozen, which collects what the hardware has set in them, and the table waits
//! for the flush. Formats that ask for break-before-make get it: the entry is frozen, flushed, and then set.

use crate::change::{Carries, Session, Spot};
use crate::fault::{Fault, Target, leaf_for};
use crate::format::{Access, Format};
use crate::log::Log;
use crate::pages::OutOfTables;
use crate::platform::{Flush, Platform};
use crate::sync::Ordering;
use crate::worker::{Hold, Then, Worker};
use pageferry_addr::{Gfn, GfnRange};

/// Why a page was not split.
pub(crate) enum NotSplit {
    /// The cache is empty.
    NoTable,
    /// The entry has changed.
    Lost,
}

impl<F: Format, P: Platform> Worker<F, P> {
    /// Splits the pages of `range` that are larger than level `to`, eagerly: before a log starts, so that faults need not.
    /// Pages that reach past the range are split too. Gives how many were split. Held shared, with turns; tables
    /// are allocated between those.
    ///
    /// # Errors
    /// If there is no memory for tables; what was split by then stays so.
    ///
    /// # Panics
    /// If `to` is 0: levels begin at 1.
    pub fn split<L: Log>(&mut self, range: GfnRange, to: u32, log: &L) -> Result<u64, OutOfTables> {
        assert!(to >= 1, "there is no level below 1");
        let mut split = 0;
        let swept = self.sweep(range, to + 1, Hold::Shared, log, |session, spot| {
            if F::is_frozen(spot.value) {
                return Then::Again;
            }
            // At the root, which may hold leaves and be of a lower level than the walk's lowest.
            if !F::is_leaf(spot.value, spot.level) || spot.level <= to {
                return Then::On;
            }
            match session.split_here(spot) {
                Ok(()) => {
                    split += 1;
                    Then::On
                }
                Err(NotSplit::NoTable) => Then::NeedsTable,
                Err(NotSplit::Lost) => Then::Again,
            }
        });
        self.finish();
        swept.map(|()| split)
    }

    /// Makes pages of `range` large again where `allowed` says what a page of that level, beginning at that frame, may
    /// map; whole subtrees that lie in the range at once, the largest first. Gives how many large pages came to be.
    /// Held shared, with turns.
    ///
    /// `allowed` answers for *all* frames of the page, mapped now or not: that what backs them is one piece and all of it
    /// may be touched; that they are neither logged nor tracked. It must be sure that this stays so until the call
    /// is over, invalidations excepted: it is asked under the shared side, and not about pages that overlap what is being
    /// invalidated, so it only has to look up what is behind them when it is asked.
    ///
    /// # Panics
    /// If the format has no room for the target's frame, or the page and the frame are out of step.
    pub fn recover<L: Log>(
        &mut self,
        range: GfnRange,
        log: &L,
        mut allowed: impl FnMut(Gfn, u32) -> Option<Target>,
    ) -> u64 {
        let mut recovered = 0;
        let swept = self.sweep(range, 2, Hold::Shared, log, |session, spot| {
            let level = spot.level;
            if F::is_frozen(spot.value) {
                return Then::Again;
            }
            let end = spot.first.0 + F::frames_per_entry(level);
            let whole = spot.first >= range.start() && end <= range.end().0;
            if !whole || !F::may_hold_leaves(level) || !F::is_table(spot.value, level) {
                return Then::On;
            }
            let frames = F::frames_per_entry(level);
            if session.mmu.invalidation.covers(spot.first, frames) {
                return Then::On;
            }
            let Some(target) = allowed(spot.first, level).filter(|t| t.level >= level) else {
                return Then::On;
            };
            assert!(
                target.pfn < F::PFN_LIMIT && target.pfn.0 & (frames - 1) == 0,
                "{target:?} cannot be mapped at {:?}",
                spot.first
            );
            match session.merge_here(spot, target) {
                Ok(()) => {
                    recovered += 1;
                    Then::Side
                }
                Err(_) => Then::Again,
            }
        });
        debug_assert!(swept.is_ok(), "recovery needs no tables");
        self.finish();
        recovered
    }
}

impl<F: Format, P: Platform, L: Log> Session<'_, F, P, L> {
    /// Splits the leaf at `spot` into a table of the next level.
    #[cold]
    pub(crate) fn split_here(&mut self, spot: &Spot<'_>) -> Result<(), NotSplit> {
        let page = self.kit.cache.take().ok_or(NotSplit::NoTable)?;
        let (level, children) = (spot.level, page.entries());
        for (index, child) in children.iter().enumerate() {
            child.store(F::split(spot.value, level, index), Ordering::Relaxed);
        }
        let count = children.len() as i64;
        let link = F::table(page.frame(self.mmu.platform()));
        if self.replace(spot, link, Carries::All).is_err() {
            self.kit.cache.put_back(page);
            return Err(NotSplit::Lost);
        }
        self.kit.counts.leaves(level - 1, count);
        Ok(())
    }

    /// Replaces the link at `spot` by a leaf that maps `target`.
    #[cold]
    fn merge_here(&mut self, spot: &Spot<'_>, target: Target) -> Result<(), u64> {
        let fault = Fault {
            gfn: spot.first,
            access: Access::READ,
        };
        self.replace(
            spot,
            leaf_for::<F>(spot.level, fault, target),
            Carries::Nothing,
        )
    }

    /// A change between leaf and link.
    fn replace(&mut self, spot: &Spot<'_>, new: u64, carries: Carries) -> Result<(), u64> {
        if !F::BREAK_BEFORE_MAKE {
            return self.change(spot, new, carries);
        }
        spot.entry
            .compare_exchange(spot.value, F::FROZEN, Ordering::AcqRel, Ordering::Acquire)?;
        let frames = F::frames_per_entry(spot.level);
        let range = GfnRange::new(spot.first, frames);
        let range = range.unwrap_or_else(|| unreachable!("frames below the format's limit"));
        self.mmu.platform().flush(Flush::Range(range));
        // Frozen, so nobody else's. Release: what it leads to is filled.
        spot.entry.store(new, Ordering::Release);
        self.account(spot.first, spot.level, spot.value, new, carries);
        Ok(())
    }
}
