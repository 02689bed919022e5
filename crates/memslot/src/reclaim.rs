#![expect(unsafe_code, reason = "frees slots, tree nodes and tombstones")]
//! When what the writer replaced is freed.
//!
//! Readers may see it as long as they hold guards of before; [`crate::table`] says why that is enough.

use crate::SlotWriter;
use crate::table::State;
use pageferry_epoch::Attempt;

/// How many replaced things make a batch beside readers at work: one look at every reader for each. An operation that
/// completes a batch frees up to two.
const BATCH: usize = 32;
/// The same where a look is a barrier in all threads, so that readers need none of their own.
const SELDOM_BATCH: usize = 256;
/// How many things of which no reader can know any more each operation frees then: more than most replace.
const SHARE: usize = 8;
/// With more slots than these what waits for a larger batch would leave the near caches, and cost a change more than readers save.
const FEW: usize = 1024;
/// The same while no reader is at work: those of few operations, which are still in a near cache when they are used again.
pub(crate) const QUIET_BATCH: usize = 5;

impl<D> SlotWriter<D> {
    /// Frees some of what no reader uses any more; waits if too much is in use.
    ///
    /// As long as no reader has a guard whenever it looks, it looks every few operations: what was replaced can be
    /// used for the next, while caches still hold it. Looking disturbs readers at work, so beside them it looks less often.
    pub(crate) fn free_some(&mut self) {
        let limit = self.shared.limits.max_retired;
        let has_barrier = self.shared.domain.has_barrier();
        let state = self.state();
        let seldom = has_barrier && !state.quiet && state.len <= FEW;
        let batch = if state.quiet {
            QUIET_BATCH
        } else if seldom {
            SELDOM_BATCH.min(limit).max(BATCH)
        } else {
            BATCH
        };
        if seldom && !state.limbo.is_empty() {
            self.free(SHARE);
        }
        if self.state().replaced.len() < batch {
            return;
        }
        let alone = if seldom {
            self.prepare_to_advance();
            self.shared.domain.try_advance_seldom() == Attempt::MovedAlone
        } else {
            self.advance()
        };
        let quiet = alone && self.shared.domain.is_quiet();
        self.state().quiet = quiet;
        if quiet {
            self.free_quietly(2 * BATCH);
            return;
        }
        self.retire();
        self.free(2 * BATCH);
        while self.state().limbo.len() > limit {
            if !self.advance() {
                (self.state().relax)();
            }
            self.free(2 * BATCH);
        }
    }

    /// Frees what was replaced, and some of what waits. The epoch has moved on since it was replaced, and then there was no guard.
    fn free_quietly(&mut self, most: usize) {
        let State {
            replaced,
            limbo,
            pools,
            ..
        } = self.state();
        while let Some(thing) = replaced.pop() {
            // SAFETY: no reader knows of it any more, as `Domain::is_quiet` says, and it was replaced once.
            unsafe { pools.free(thing) };
        }
        for _ in 0..most {
            let Some(thing) = limbo.take() else {
                return;
            };
            // SAFETY: as above.
            unsafe { pools.free(thing) };
        }
    }

    /// Stamps all that was replaced. The stamp is newer than need be for most of it, which does no harm.
    fn retire(&mut self) {
        let stamp = self.shared.domain.stamp();
        let state = self.state();
        for thing in state.replaced.drain(..) {
            state.limbo.retire(stamp, thing);
        }
    }

    /// Frees the oldest things of which no reader can know any more.
    fn free(&mut self, most: usize) {
        let now = self.shared.domain.epoch();
        let state = self.state();
        for _ in 0..most {
            let Some(thing) = state.limbo.next_expired_in(now) else {
                return;
            };
            // SAFETY: its grace period is over, and it was retired once.
            unsafe { state.pools.free(thing) };
        }
    }

    fn advance(&mut self) -> bool {
        self.prepare_to_advance();
        self.shared.domain.try_advance()
    }

    fn prepare_to_advance(&self) {
        // Only the writer moves the epoch, so this is the next.
        let next = self.shared.domain.epoch().next();
        self.shared.forget_last_used(next);
    }

    /// Frees all that no reader can use any more, without waiting; gives how many slots, tree nodes and tombstones are left.
    ///
    /// When nobody holds a guard, nothing is left, and the data of all deleted and replaced slots has been dropped. Without it
    /// that happens during later operations, when the writer goes, or with the last reader's guard and the table: call it after
    /// a change where data owns something that should go soon.
    pub fn reclaim(&mut self) -> usize {
        if self.advance() && self.shared.domain.is_quiet() {
            self.free_quietly(usize::MAX);
            return 0;
        }
        self.retire();
        // What was stamped in this epoch goes after two moves.
        for _ in 0..2 {
            self.free(usize::MAX);
            if self.state().limbo.is_empty() || !self.advance() {
                break;
            }
        }
        self.free(usize::MAX);
        self.retired()
    }

    /// How many slots, tree nodes and tombstones wait for a grace period.
    #[must_use]
    pub fn retired(&self) -> usize {
        let state = self.state_ref();
        state.limbo.len() + state.replaced.len()
    }
}
