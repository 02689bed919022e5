//! Taking translations away: a range, for a notifier, or everything.

use crate::change::{Carries, Session, Spot};
use crate::counts::LEAF_LEVELS;
use crate::format::Format;
use crate::log::Log;
use crate::mmu::{Met, new_root};
use crate::pages::OutOfTables;
use crate::platform::Platform;
use crate::worker::{Hold, Then, Worker};
use core::fmt;
use core::ops::Range;
use pageferry_addr::GfnRange;

impl<F: Format, P: Platform> Worker<F, P> {
    /// Removes all translations of `range`, and all MMIO markers, and flushes; gives how many frames had a translation. A large page that reaches
    /// past the range goes as a whole: what is outside comes back by a fault.
    ///
    /// Faults that looked their frame up before may map it again at any time: where that must not be, use
    /// [`invalidate`](Self::invalidate), or see to it that no such fault is under way. Held shared, with turns; but
    /// where the format asks for break-before-make it is an invalidation, as no fault may put something else in
    /// place before the flush.
    pub fn zap<L: Log>(&mut self, range: GfnRange, log: &L) -> u64 {
        if F::BREAK_BEFORE_MAKE {
            return self.invalidate(&[range], log).zapped();
        }
        let zapped = self.zap_holding(range, Hold::Shared, log);
        self.finish();
        zapped
    }

    fn zap_holding<L: Log>(&mut self, range: GfnRange, hold: Hold, log: &L) -> u64 {
        let mut zapped = 0;
        let swept = self.sweep(range, 1, hold, log, |session, spot| {
            zap_here(session, spot, range, &mut zapped)
        });
        debug_assert!(swept.is_ok(), "zapping needs no tables");
        zapped
    }

    /// Begins to invalidate `ranges`: the first half of an MMU notifier, before the host changes what is behind them.
    ///
    /// From now on until the result is dropped no fault maps anything in the ranges (nor between them), and faults there that
    /// took their [`Ticket`](crate::Ticket) earlier map nothing later either, and are tried again. When this returns, what was mapped in
    /// the ranges is gone and flushed, with one flush for all. Held exclusive, with turns where faults wait.
    pub fn invalidate<L: Log>(&mut self, ranges: &[GfnRange], log: &L) -> Invalidating<'_, F, P> {
        let first = ranges.iter().map(|r| r.start().0).min();
        let end = ranges.iter().map(|r| r.end().0).max();
        let (mut first, mut end) = (first.unwrap_or(0), end.unwrap_or(0));
        if F::BREAK_BEFORE_MAKE {
            // A large page that reaches past the ranges goes as a whole: nothing may take its place before the flush.
            let largest = F::frames_per_entry(F::MAX_LEAF_LEVEL);
            first &= !(largest - 1);
            end = end.div_ceil(largest).saturating_mul(largest);
        }
        {
            let mmu = &*self.mmu;
            let _exclusive = mmu.domain().exclude(|| mmu.platform().relax());
            mmu.invalidation.begin(first, end);
        }
        // From here on a panic ends it.
        let mut invalidating = Invalidating {
            worker: self,
            frames: first..end,
            zapped: 0,
        };
        for &range in ranges {
            invalidating.zapped += invalidating.worker.zap_holding(range, Hold::Exclusive, log);
        }
        invalidating.worker.flush();
        invalidating
    }

    /// Removes everything, fast: puts an empty root in place, which takes the exclusive side for a moment whatever is
    /// mapped; makes all vCPUs use it; and takes the old tree apart with nothing held, entry by entry without locked
    /// instructions, as nobody can reach it any more. Gives how many frames had a translation.
    ///
    /// Faults begin at the new root at once and are not delayed by the second half.
    ///
    /// Dirty bits that are in the old tree reach `log` before this returns, not before: a log that is read meanwhile does
    /// not have them. Who reads logs by dirty bits keeps these calls apart.
    ///
    /// # Errors
    /// If there is no memory for a root; nothing has changed then.
    pub fn zap_all<L: Log>(&mut self, log: &L) -> Result<u64, OutOfTables> {
        let mmu = &*self.mmu;
        let fresh = new_root::<F, P>(mmu.platform())?;
        let old = {
            let _exclusive = mmu.domain().exclude(|| mmu.platform().relax());
            mmu.swap_root(fresh)
        };
        let mut leaves = [0; LEAF_LEVELS];
        let (mut tables, mut zapped) = (0, 0);
        let session = Session {
            mmu,
            kit: &mut self.kit,
            log,
        };
        old.dismantle(mmu, |met| match met {
            Met::Table => tables += 1,
            Met::Leaf {
                value,
                level,
                first,
            } => {
                let frames = F::frames_per_entry(level);
                leaves[level as usize - 1] += 1;
                zapped += frames;
                session.tell::<F>(first, level, Some(value), None);
            }
        });
        for (level, count) in (1..).zip(leaves) {
            self.kit.counts.leaves(level, -count);
        }
        self.kit.counts.tables(-tables);
        Ok(zapped)
    }
}

/// An invalidation in progress: no fault maps anything in its ranges until it is dropped.
#[must_use = "the ranges can be mapped again as soon as this is dropped"]
pub struct Invalidating<'w, F: Format, P: Platform> {
    worker: &'w mut Worker<F, P>,
    /// What faults map nothing of.
    frames: Range<u64>,
    zapped: u64,
}

impl<F: Format, P: Platform> Invalidating<'_, F, P> {
    /// How many frames had a translation that was removed.
    #[must_use]
    pub const fn zapped(&self) -> u64 {
        self.zapped
    }
}

impl<F: Format, P: Platform> Drop for Invalidating<'_, F, P> {
    /// The second half of the notifier: the host has changed what it wanted to.
    fn drop(&mut self) {
        let mmu = &*self.worker.mmu;
        let _exclusive = mmu.domain().exclude(|| mmu.platform().relax());
        mmu.invalidation.end(self.frames.start, self.frames.end);
    }
}

impl<F: Format, P: Platform> fmt::Debug for Invalidating<'_, F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invalidating")
            .field("zapped", &self.zapped)
            .finish_non_exhaustive()
    }
}

/// Zaps what is at `spot`, as far as it lies in `range`.
#[inline]
fn zap_here<F: Format, P: Platform, L: Log>(
    session: &mut Session<'_, F, P, L>,
    spot: &mut Spot<'_>,
    range: GfnRange,
    zapped: &mut u64,
) -> Then {
    let level = spot.level;
    if F::is_frozen(spot.value) {
        return Then::Again;
    }
    let frames = F::frames_per_entry(level);
    if F::is_leaf(spot.value, level) {
        return match session.change(spot, F::NON_PRESENT, Carries::Nothing) {
            Ok(()) => {
                *zapped += frames;
                Then::On
            }
            Err(_) => Then::Again,
        };
    }
    if F::is_mmio(spot.value) {
        return session.clear_marker(spot);
    }
    let whole = spot.first >= range.start() && spot.first.0 + frames <= range.end().0;
    if level == 2 && whole && F::is_table(spot.value, level) {
        let before = session.kit.counts.frames::<F>();
        return match session.change(spot, F::NON_PRESENT, Carries::Nothing) {
            Ok(()) => {
                let after = session.kit.counts.frames::<F>();
                *zapped += (before - after).unsigned_abs();
                Then::Side
            }
            Err(_) => Then::Again,
        };
    }
    Then::On
}
