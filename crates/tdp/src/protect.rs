//! Calls that take permissions and state from leaves: write protection, dirty bits, age.

use crate::change::{Preserves, Seen, Session};
use crate::format::{Format, Writes};
use crate::log::Log;
use crate::platform::Platform;
use crate::worker::{Hold, Then, Worker};
use pageferry_addr::{Gfn, GfnRange};

impl<F: Format, P: Platform> Worker<F, P> {
    /// Takes the permission to store from all leaves of `range`, and flushes. Returns the number of
    /// frames that had it. It holds the shared side, in turns.
    ///
    /// If hardware sets dirty bits, a leaf that loses the permission loses its dirty bit too, and
    /// `log` hears of it.
    ///
    /// A caller that starts a log ensures that no fault is in progress that looked at the slot
    /// before it was logged.
    pub fn write_protect<L: Log>(&mut self, range: GfnRange, log: &L) -> u64 {
        self.protect(range, u64::MAX, log, F::write_protect, F::is_writable)
    }

    /// Does [`write_protect`](Self::write_protect) for one word of a log: the frames among the 64
    /// from `base` whose bit is set in `mask` (bit 0 is `base`). For many words, make the calls
    /// inside [`deferred`](Self::deferred). A large page is protected as a whole. `base` needs no
    /// alignment.
    pub fn write_protect_mask<L: Log>(&mut self, base: Gfn, mask: u64, log: &L) -> u64 {
        self.protect_mask(base, mask, log, F::write_protect, F::is_writable)
    }

    /// Reports the dirty leaves of `range` to `log`, makes them clean, and flushes. Returns the
    /// number of dirty frames. It holds the shared side, in turns.
    ///
    /// This reads a log by dirty bits. Leaves that are dirty exactly while they are writable lose
    /// the permission to store. The log heard of them when they got it.
    pub fn clear_dirty<L: Log>(&mut self, range: GfnRange, log: &L) -> u64 {
        self.protect(range, u64::MAX, log, F::clear_dirty, F::is_dirty)
    }

    /// Does [`clear_dirty`](Self::clear_dirty) for the frames of a mask, as in
    /// [`write_protect_mask`](Self::write_protect_mask).
    pub fn clear_dirty_mask<L: Log>(&mut self, base: Gfn, mask: u64, log: &L) -> u64 {
        self.protect_mask(base, mask, log, F::clear_dirty, F::is_dirty)
    }

    /// Makes the next store to each leaf of `range` fault, and flushes: the start of a log by write
    /// protection.
    ///
    /// Leaves of class [`Writes::Allowed`] get [`Writes::AllowedLoggedByFault`]. All lose the
    /// permission to store and the dirty bits that hardware set, and `log` hears of those. Returns
    /// the number of frames that have changed. It holds the shared side, in turns.
    pub fn log_by_fault<L: Log>(&mut self, range: GfnRange, log: &L) -> u64 {
        self.protect(range, u64::MAX, log, by_fault::<F>, is_unlogged::<F>)
    }

    /// Does [`log_by_fault`](Self::log_by_fault) for the frames of a mask, as in
    /// [`write_protect_mask`](Self::write_protect_mask).
    pub fn log_by_fault_mask<L: Log>(&mut self, base: Gfn, mask: u64, log: &L) -> u64 {
        self.protect_mask(base, mask, log, by_fault::<F>, is_unlogged::<F>)
    }

    /// Takes back the class that [`log_by_fault`](Self::log_by_fault) gave. Faults restore the
    /// permissions. Returns the number of frames of that class. It holds the shared side, in turns.
    pub fn unlog<L: Log>(&mut self, range: GfnRange, log: &L) -> u64 {
        self.protect(
            range,
            u64::MAX,
            log,
            |leaf| F::set_writes(leaf, Writes::Allowed),
            |leaf| F::writes(leaf) == Writes::AllowedLoggedByFault,
        )
    }

    /// Gives all leaves of `range` another class of [`Writes`], and flushes. Returns the number of
    /// frames that were of another class. It holds the shared side, in turns.
    ///
    /// [`Writes::MmuForbids`] is for a tracker: every store faults until a call or a fault's target
    /// changes the class.
    pub fn set_writes<L: Log>(&mut self, range: GfnRange, writes: Writes, log: &L) -> u64 {
        self.protect(
            range,
            u64::MAX,
            log,
            |leaf| F::set_writes(leaf, writes),
            |leaf| F::writes(leaf) != writes,
        )
    }

    /// Returns the number of frames of `range` whose leaf was used. With `clear`, these leaves
    /// count as unused from then on. It takes no lock and flushes nothing, so it misses uses
    /// through a translation that a TLB still has.
    pub fn age<L: Log>(&mut self, range: GfnRange, clear: bool, log: &L) -> u64 {
        let mut young = 0;
        let swept = self.sweep(range, 1, Hold::Guard, log, |session, seen| {
            let level = seen.level;
            if !F::is_leaf(seen.value, level) || !F::is_accessed(seen.value) {
                return Then::On;
            }
            if clear {
                let aged = F::clear_accessed(seen.value);
                if session.change(seen, aged, Preserves::AllButAge).is_err() {
                    return Then::Again;
                }
            }
            young += F::frames_per_entry(level);
            Then::On
        });
        debug_assert!(swept.is_ok(), "aging needs no tables");
        young
    }

    /// Does [`protect`](Self::protect) for the frames in `mask`, whose bit 0 is `base`.
    fn protect_mask<L: Log>(
        &mut self,
        base: Gfn,
        mask: u64,
        log: &L,
        new: impl Fn(u64) -> u64,
        applies: impl Fn(u64) -> bool,
    ) -> u64 {
        mask_range(base, mask).map_or(0, |range| {
            let mask = mask >> (range.start().0 - base.0);
            self.protect(range, mask, log, new, applies)
        })
    }

    /// Changes the leaves of `range` for which `applies` holds and whose frame's bit is set in
    /// `mask`, and flushes. A `mask` of all ones stands for all frames.
    fn protect<L: Log>(
        &mut self,
        range: GfnRange,
        mask: u64,
        log: &L,
        new: impl Fn(u64) -> u64,
        applies: impl Fn(u64) -> bool,
    ) -> u64 {
        let mut changed = 0;
        let swept = self.sweep(range, 1, Hold::Shared, log, |session, seen| {
            let level = seen.level;
            if !F::is_leaf(seen.value, level) {
                return if F::is_frozen(seen.value) {
                    Then::Again
                } else {
                    Then::On
                };
            }
            if !is_marked::<F>(range, mask, seen) || !applies(seen.value) {
                return Then::On;
            }
            change_leaf(session, seen, new(seen.value), &mut changed)
        });
        debug_assert!(swept.is_ok(), "no tables are needed");
        self.finish();
        changed
    }
}

/// The leaf without permission to store. If its class allows stores, it gets the class that is
/// logged by faults.
fn by_fault<F: Format>(leaf: u64) -> u64 {
    let leaf = F::write_protect(leaf);
    if F::mmu_writable(leaf) {
        F::set_writes(leaf, Writes::AllowedLoggedByFault)
    } else {
        leaf
    }
}

/// Whether a store to the leaf would be missed, now or after the fast path has made the leaf
/// writable.
fn is_unlogged<F: Format>(leaf: u64) -> bool {
    F::is_writable(leaf) || F::writes(leaf) == Writes::Allowed
}

#[cfg_attr(not(debug_assertions), inline(always))]
fn change_leaf<F: Format, P: Platform, L: Log>(
    session: &mut Session<'_, F, P, L>,
    seen: &Seen<'_>,
    new: u64,
    changed: &mut u64,
) -> Then {
    if session.change(seen, new, Preserves::Nothing).is_err() {
        return Then::Again;
    }
    *changed += F::frames_per_entry(seen.level);
    Then::On
}

/// Whether one of the frames of `seen` has its bit set. Bit 0 of `mask` is the range's first frame.
/// All ones stand for all frames.
#[inline]
fn is_marked<F: Format>(range: GfnRange, mask: u64, seen: &Seen<'_>) -> bool {
    if mask == u64::MAX {
        return true;
    }
    let from = seen.first.0.saturating_sub(range.start().0);
    let end = seen.first.0 + F::frames_per_entry(seen.level) - range.start().0;
    let below_end = if end >= 64 { u64::MAX } else { (1 << end) - 1 };
    from < 64 && (mask & below_end) >> from != 0
}

/// The range from the first frame in `mask` to the last.
fn mask_range(base: Gfn, mask: u64) -> Option<GfnRange> {
    if mask == 0 {
        return None;
    }
    let first = mask.trailing_zeros();
    let pages = 64 - mask.leading_zeros() - first;
    GfnRange::new(base.checked_add(first.into())?, pages.into())
}
