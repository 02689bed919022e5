#![expect(unsafe_code, reason = "frees slots and tree nodes")]
//! When what the writer replaced is freed.
//!
//! Readers may use it while they hold guards from before. [`crate::table`] says why that is enough.

use crate::SlotWriter;
use crate::table::WriterState;
use pageferry_epoch::OutOfMemory;

/// How many replaced things make a batch beside readers at work: the writer looks at every reader
/// once a batch. An operation that completes a batch frees up to two batches.
const BATCH: usize = 32;
/// The same while no reader is at work: the things of a few operations, which caches still hold
/// when they are reused.
const QUIET_BATCH: usize = 5;

impl<D> SlotWriter<D> {
    /// Frees some of what no reader uses any more; waits if too much is in use.
    ///
    /// As long as no reader has a guard whenever the writer looks, it looks every few operations.
    /// Then the next operations reuse what was replaced while caches still hold it. Looking
    /// disturbs readers at work, so beside them the writer looks less often.
    pub(crate) fn free_some(&mut self) -> Result<(), OutOfMemory> {
        let limit = self.shared.limits.max_retired;
        let state = self.state();
        let batch = if state.quiet { QUIET_BATCH } else { BATCH };
        if state.replaced.len() < batch {
            return Ok(());
        }
        let quiet = self.advance() && self.shared.domain.is_quiet();
        self.state().quiet = quiet;
        if quiet {
            self.free_quietly(2 * BATCH);
            return Ok(());
        }
        self.retire()?;
        self.free(2 * BATCH);
        while self.state().limbo.len() > limit {
            if !self.advance() {
                (self.state().relax)();
            }
            self.free(2 * BATCH);
        }
        Ok(())
    }

    /// Frees all that was replaced, and `most` of what waits. Since it was replaced the epoch has
    /// moved on, and then no reader had a guard.
    fn free_quietly(&mut self, most: usize) {
        let WriterState {
            replaced,
            limbo,
            pools,
            ..
        } = self.state();
        while let Some(thing) = replaced.pop() {
            // SAFETY: no reader knows of it any more, as `Domain::is_quiet` says, and it was
            // replaced once.
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

    /// Stamps all that was replaced. For most of it the stamp is newer than it need be, which does
    /// no harm.
    fn retire(&mut self) -> Result<(), OutOfMemory> {
        let state = self.state();
        state.limbo.try_reserve(state.replaced.len())?;
        let stamp = self.shared.domain.stamp();
        let state = self.state();
        for thing in state.replaced.drain(..) {
            state.limbo.retire(stamp, thing);
        }
        Ok(())
    }

    /// Frees the oldest things that no reader can use any more, up to `most`.
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
        // Only the writer moves the epoch, so this is the next.
        let next = self.shared.domain.epoch().next();
        self.shared.forget_last_used(next);
        self.shared.domain.try_advance()
    }

    /// Frees all that no reader can use any more, without waiting. Returns how many slots and tree
    /// nodes are left.
    ///
    /// If nobody holds a guard, nothing is left, and the data of all deleted and replaced slots has
    /// been dropped. Without a call that happens during later operations, when the writer is
    /// dropped, or when the last reader's guard and the table are. Call it after a change if
    /// data owns something that should go soon.
    pub fn reclaim(&mut self) -> usize {
        if self.advance() && self.shared.domain.is_quiet() {
            self.free_quietly(usize::MAX);
            return 0;
        }
        if self.retire().is_err() {
            // Without memory for the list they wait for the next call.
            self.free(usize::MAX);
            return self.retired();
        }
        // What was stamped in this epoch goes after two advances.
        for _ in 0..2 {
            self.free(usize::MAX);
            if self.state().limbo.is_empty() || !self.advance() {
                break;
            }
        }
        self.free(usize::MAX);
        self.retired()
    }

    /// How many slots and tree nodes wait for a grace period.
    #[must_use]
    pub fn retired(&self) -> usize {
        let state = self.state_ref();
        state.limbo.len() + state.replaced.len()
    }
}
