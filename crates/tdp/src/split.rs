//! Changes of page size in place: large pages are split, and small pages become large again.
//!
//! **Guarantee.** A guest that uses the pages meanwhile sees at most a spurious fault. No dirty
//! state is lost.
//!
//! **Mechanism.** *Split*: the worker fills an unlinked table with the translations of the large
//! leaf. One compare-exchange links it in place of the leaf. The exchange fails if hardware has set
//! a bit of the leaf meanwhile. Old and new translate the same, so nothing is flushed.
//!
//! *Recovery*: one compare-exchange replaces the link by a large leaf. Then the worker freezes the
//! table's entries, which collects the bits that hardware has set in them. The table waits for the
//! flush.
//!
//! **Neighbours.** [`super::resize`] has the one step in each direction.

use crate::change::{Preserves, Seen, Session};
use crate::fault::{Fault, Target, leaf_for};
use crate::format::{Access, Format};
use crate::log::Log;
use crate::pages::OutOfTables;
use crate::platform::Platform;
use crate::resize::NotSplit;
use crate::worker::{Hold, Then, Worker};
use pageferry_addr::{Gfn, GfnRange};

impl<F: Format, P: Platform> Worker<F, P> {
    /// Splits the pages of `range` that are larger than level `to`. Called before a log starts, it
    /// saves faults that work. Pages that reach past the range are split too. Returns the number of
    /// pages that were split. It holds the shared side, in turns, and allocates tables between
    /// turns.
    ///
    /// # Errors
    /// If there is no memory for tables. Pages that were already split stay split.
    ///
    /// # Panics
    /// If `to` is 0: levels begin at 1.
    pub fn split<L: Log>(&mut self, range: GfnRange, to: u32, log: &L) -> Result<u64, OutOfTables> {
        assert!(to >= 1, "there is no level below 1");
        let mut split = 0;
        let swept = self.sweep(range, to + 1, Hold::Shared, log, |session, seen| {
            if F::is_frozen(seen.value) {
                return Then::Again;
            }
            // The root may hold leaves, and its level may be lower than the walk's lowest.
            if !F::is_leaf(seen.value, seen.level) || seen.level <= to {
                return Then::On;
            }
            match session.split_here(seen) {
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

    /// Makes pages of `range` large again, and returns the number of new large pages. It replaces
    /// whole subtrees that lie in the range, the largest first. It holds the shared side, in turns.
    ///
    /// `allowed` returns what a page of that level, which begins at that frame, may map. Its answer
    /// must hold for *all* frames of the page, mapped or not. One piece backs them, all of it may
    /// be accessed, and they are neither logged nor tracked. This must stay true until the call is
    /// over, except for invalidations. The call runs `allowed` under the shared side, and not for
    /// pages that overlap an invalidation in progress. So `allowed` only has to look up what backs
    /// the page at that moment.
    ///
    /// Replaced tables are freed after a grace period: see [`MOST_WAITING`](Self::MOST_WAITING).
    ///
    /// # Panics
    /// If the format has no room for the target's frame, or if the page and the frame are out of
    /// step.
    pub fn recover<L: Log>(
        &mut self,
        range: GfnRange,
        log: &L,
        mut allowed: impl FnMut(Gfn, u32) -> Option<Target>,
    ) -> u64 {
        let mut recovered = 0;
        self.state.batch.reserve(1 + F::entries(1));
        let swept = self.sweep(range, 2, Hold::Shared, log, |session, seen| {
            let level = seen.level;
            if F::is_frozen(seen.value) {
                return Then::Again;
            }
            let end = seen.first.0 + F::frames_per_entry(level);
            let whole = seen.first >= range.start() && end <= range.end().0;
            if !whole || !F::may_hold_leaves(level) || !F::is_table(seen.value, level) {
                return Then::On;
            }
            let frames = F::frames_per_entry(level);
            if session.mmu.invalidations.covers(seen.first, frames) {
                return Then::On;
            }
            let most = if level > 2 { 1 + F::entries(1) } else { 1 };
            if !session.may_cut_off(most) {
                return if session.state.has_waited {
                    Then::On
                } else {
                    Then::NeedsRoom
                };
            }
            let Some(target) = allowed(seen.first, level).filter(|t| t.level >= level) else {
                return Then::On;
            };
            assert!(
                target.pfn < F::PFN_LIMIT && target.pfn.0 & (frames - 1) == 0,
                "{target:?} cannot be mapped at {:?}",
                seen.first
            );
            match session.merge_here(seen, target) {
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
    /// Replaces the link at `seen` by a leaf that maps `target`.
    #[cold]
    fn merge_here(&mut self, seen: &Seen<'_>, target: Target) -> Result<(), u64> {
        let fault = Fault {
            gfn: seen.first,
            access: Access::READ,
        };
        self.replace(
            seen,
            leaf_for::<F>(seen.level, fault, target),
            Preserves::Nothing,
        )
    }
}
