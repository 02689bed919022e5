//! Calls that take translations away: from a range, for a notifier, or everything.

use crate::change::{Preserves, Seen, Session, tell};
use crate::format::Format;
use crate::invalidate::Begun;
use crate::log::Log;
use crate::mmu::{Mmu, OldRoot, new_root};
use crate::pages::OutOfTables;
use crate::platform::{Flush, Platform};
use crate::worker::{Hold, Then, Worker};
use alloc::sync::Arc;
use core::fmt;
use pageferry_addr::GfnRange;

impl<F: Format, P: Platform> Worker<F, P> {
    /// Removes all translations and MMIO markers of `range`, and flushes. Returns the number of
    /// frames that had a translation. A large page that reaches past the range is removed as a
    /// whole. Faults restore the part outside.
    ///
    /// A fault that looked its frame up before may map it again at any time. To prevent that, use
    /// [`invalidate`](Self::invalidate), or ensure that no such fault is in progress.
    ///
    /// It holds the shared side, in turns. In a format with break-before-make it is an
    /// invalidation: no fault may store a new entry before the flush.
    ///
    /// Emptied tables are freed after a grace period: see [`MOST_WAITING`](Self::MOST_WAITING).
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
        self.state.batch.reserve(1);
        let swept = self.sweep(range, 1, hold, log, |session, seen| {
            zap_here(session, seen, range, &mut zapped)
        });
        debug_assert!(swept.is_ok(), "zapping needs no tables");
        zapped
    }

    /// Begins to invalidate `ranges`: the first half of an MMU notifier, before the host changes
    /// the memory behind them. Dropping the result is the second half.
    ///
    /// The result owns its data. A caller can keep it from one callback of the host to another, on
    /// any thread, and use this worker meanwhile. Until it is dropped, no fault maps anything in
    /// the ranges, nor between them. A fault there with an earlier [`Ticket`](crate::Ticket) maps
    /// nothing later either, and must be retried.
    ///
    /// When this returns, all translations in the ranges are gone and flushed, with one flush for
    /// all. It holds the exclusive side, in turns if faults wait.
    pub fn invalidate<L: Log>(&mut self, ranges: &[GfnRange], log: &L) -> Invalidating<F, P> {
        let first = ranges.iter().map(|r| r.start().0).min();
        let end = ranges.iter().map(|r| r.end().0).max();
        let (mut first, mut end) = (first.unwrap_or(0), end.unwrap_or(0));
        if F::BREAK_BEFORE_MAKE {
            // A large page that reaches past the ranges is removed as a whole. No fault may replace
            // any part of it before the flush.
            let largest = F::frames_per_entry(F::MAX_LEAF_LEVEL);
            first &= !(largest - 1);
            end = end.div_ceil(largest).saturating_mul(largest);
        }
        let begun = {
            let mmu = &*self.mmu;
            let _exclusive = mmu.exclude();
            mmu.invalidations.begin(first..end)
        };
        // From here on a panic ends it.
        let mut invalidating = Invalidating {
            mmu: Arc::clone(&self.mmu),
            begun,
            zapped: 0,
        };
        for &range in ranges {
            invalidating.zapped += self.zap_holding(range, Hold::Exclusive, log);
        }
        self.flush();
        invalidating
    }

    /// Removes everything, fast, and returns the number of frames that had a translation:
    ///
    /// 1. It puts an empty root in place. That takes the exclusive side briefly, however much is
    ///    mapped.
    /// 2. It makes all vCPUs use the new root.
    /// 3. It waits until other workers' calls have left the old tree. Then no thread can reach that
    ///    tree, and it takes the tree apart without a lock and without locked instructions.
    ///
    /// Faults begin at the new root at once, and step 3 does not delay them.
    ///
    /// Dirty bits of the old tree reach `log` before this returns, but not earlier: a log that is
    /// read meanwhile does not have them. A caller that reads logs by dirty bits keeps these calls
    /// apart.
    ///
    /// If the flush of step 2 panics, vCPUs may still use the old tree. Its dirty bits reach `log`
    /// all the same, and its tables wait for the worker's next flush. If `log` panics as well, the
    /// process aborts.
    ///
    /// # Errors
    /// If there is no memory for a root. Then nothing has changed.
    pub fn zap_all<L: Log>(&mut self, log: &L) -> Result<u64, OutOfTables> {
        let Self { mmu, state, .. } = self;
        let mmu = &**mmu;
        let fresh = new_root::<F, P>(mmu.platform())?;
        let old = {
            let _exclusive = mmu.exclude();
            mmu.swap_root(fresh)
        };
        let mut replaced = Replaced {
            session: Session { mmu, state, log },
            old: Some(old),
        };
        mmu.platform().flush(Flush::Roots);
        mmu.unflushed.close_root();
        let old = replaced.old.take();
        let counts = &mut replaced.session.state.counts;
        Ok(old.map_or(0, |old| {
            old.dismantle(mmu, counts, |value, level, first| {
                tell::<F>(log, first, level, Some(value), None);
            })
        }))
    }
}

/// A tree between the replacement of its root and the flush. If the flush panics, vCPUs may still
/// use the tree. Then dropping this cuts it off like a table, and the worker owes the flush.
struct Replaced<'w, F: Format, P: Platform, L: Log> {
    session: Session<'w, F, P, L>,
    old: Option<OldRoot>,
}

impl<F: Format, P: Platform, L: Log> Drop for Replaced<'_, F, P, L> {
    fn drop(&mut self) {
        if let Some(old) = self.old.take() {
            self.session.cut_off_root(old.into_page());
        }
    }
}

/// An invalidation in progress: no fault maps anything in its ranges until it is dropped.
///
/// If it is forgotten ([`core::mem::forget`]), faults in its ranges are refused from then on, and
/// the MMU is never dropped. [`Stats::invalidations`](crate::Stats::invalidations) and
/// [`Mmu::invalidating`] show such a leak, and [`Mmu::end_invalidations`] ends it.
#[must_use = "the ranges can be mapped again as soon as this is dropped"]
pub struct Invalidating<F: Format, P: Platform> {
    mmu: Arc<Mmu<F, P>>,
    begun: Begun,
    zapped: u64,
}

impl<F: Format, P: Platform> Invalidating<F, P> {
    /// The number of frames that had a translation before.
    #[must_use]
    pub const fn zapped(&self) -> u64 {
        self.zapped
    }
}

impl<F: Format, P: Platform> Drop for Invalidating<F, P> {
    /// The second half of the notifier: the host has finished its change.
    fn drop(&mut self) {
        let mmu = &*self.mmu;
        let _exclusive = mmu.exclude();
        mmu.invalidations.end(&self.begun);
    }
}

impl<F: Format, P: Platform> fmt::Debug for Invalidating<F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invalidating")
            .field("zapped", &self.zapped)
            .finish_non_exhaustive()
    }
}

/// Zaps the entry at `seen`, if it lies in `range`.
#[inline]
fn zap_here<F: Format, P: Platform, L: Log>(
    session: &mut Session<'_, F, P, L>,
    seen: &mut Seen<'_>,
    range: GfnRange,
    zapped: &mut u64,
) -> Then {
    let level = seen.level;
    if F::is_frozen(seen.value) {
        return Then::Again;
    }
    let frames = F::frames_per_entry(level);
    if F::is_leaf(seen.value, level) {
        return match session.change(seen, F::NON_PRESENT, Preserves::Nothing) {
            Ok(()) => {
                *zapped += frames;
                Then::On
            }
            Err(_) => Then::Again,
        };
    }
    if F::is_mmio(seen.value) {
        return session.clear_marker(seen);
    }
    let whole = seen.first >= range.start() && seen.first.0 + frames <= range.end().0;
    if level == 2 && whole && F::is_table(seen.value, level) {
        if !session.may_cut_off(1) {
            // Without room the table stays linked, and the sweep removes its entries one by one.
            return if session.state.has_waited {
                Then::On
            } else {
                Then::NeedsRoom
            };
        }
        let before = session.state.counts.frames::<F>();
        return match session.change(seen, F::NON_PRESENT, Preserves::Nothing) {
            Ok(()) => {
                let after = session.state.counts.frames::<F>();
                *zapped += (before - after).unsigned_abs();
                Then::Side
            }
            Err(_) => Then::Again,
        };
    }
    Then::On
}
