#![expect(unsafe_code, reason = "frees slots and tree nodes")]
//! Frees the slots and tree nodes that the writer replaced.
//!
//! Readers may use a replaced thing while they hold guards from before. [`crate::table`] proves
//! that this is enough.

use crate::SlotWriter;
use crate::table::WriterState;
use pageferry_epoch::OutOfMemory;

/// The number of replaced things in a batch while readers are active. The writer scans all readers
/// once per batch. An operation that completes a batch frees up to two batches.
const BATCH: usize = 32;
/// The same while no reader is active: the things of a few operations, so that later operations
/// reuse memory which is still in the cache.
const QUIET_BATCH: usize = 5;

impl<D> SlotWriter<D> {
    /// Frees some of the things that no reader uses any more. Waits if too many are still in use.
    ///
    /// While no scan finds a reader with a guard, the writer scans every few operations. Then later
    /// operations reuse memory that is still in the cache. A scan disturbs active readers, so
    /// beside them the writer scans less often.
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

    /// Frees everything in `replaced`, and up to `most` things of the limbo. The caller has
    /// advanced the epoch since the things were replaced, and then found no reader with a guard.
    fn free_quietly(&mut self, most: usize) {
        let WriterState {
            replaced,
            limbo,
            pools,
            ..
        } = self.state();
        while let Some(thing) = replaced.pop() {
            // SAFETY: no reader knows of the thing any more, as `Domain::is_quiet` says. It was
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

    /// Stamps everything in `replaced` and retires it. Most stamps are newer than needed, which
    /// does no harm.
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
            // SAFETY: the grace period of the thing is over, and it was retired once.
            unsafe { state.pools.free(thing) };
        }
    }

    fn advance(&mut self) -> bool {
        // Only the writer moves the epoch, so `next` is the epoch that comes.
        let next = self.shared.domain.epoch().next();
        self.shared.forget_last_used(next);
        self.shared.domain.try_advance()
    }

    /// Frees everything that no reader can use any more, without waiting. Returns the number of
    /// slots and tree nodes that are left.
    ///
    /// If nobody holds a guard, nothing is left, and the data of all deleted and replaced slots has
    /// been dropped. Without this call the data goes during later operations, with the writer, or
    /// with the last handle to the table. Call it after a change if the data owns something that
    /// should go soon.
    pub fn reclaim(&mut self) -> usize {
        if self.advance() && self.shared.domain.is_quiet() {
            self.free_quietly(usize::MAX);
            return 0;
        }
        if self.retire().is_err() {
            // There is no memory for the list, so the things wait for the next call.
            self.free(usize::MAX);
            return self.retired();
        }
        // Things stamped in this epoch expire after two advances.
        for _ in 0..2 {
            self.free(usize::MAX);
            if self.state().limbo.is_empty() || !self.advance() {
                break;
            }
        }
        self.free(usize::MAX);
        self.retired()
    }

    /// The number of slots and tree nodes that wait for a grace period.
    #[must_use]
    pub fn retired(&self) -> usize {
        let state = self.state_ref();
        state.limbo.len() + state.replaced.len()
    }
}
