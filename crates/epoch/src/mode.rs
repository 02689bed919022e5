//! The choice between readers that fence and scanning threads that fence for them.
//!
//! A guard needs a full fence between its announcement and the loads that follow. The fence takes
//! tens of cycles. In a domain with a [`Barrier`] readers may omit it: their guards are then
//! *light*. A *scan* reads all announcements, to advance the epoch, to find the domain quiet, or to
//! exclude. If guards may be light, the scanning thread calls the barrier, which fences in all
//! threads and takes microseconds.
//!
//! That pays if there are many guards for each scan. So a domain switches between the two:
//!
//! - A scan makes readers fence.
//! - A reader that has fenced [`QUIET_GUARDS`] times in a row without a scan turns the domain
//!   light.
//!
//! So one reader pays at most about twice the cost of the best choice in hindsight. With many
//! processors a barrier costs more, as it interrupts each one that runs a thread of the process.
//! But then as many readers have fenced, and each counts for itself. Linux's `percpu_rw_semaphore`
//! and `rcu_sync` switch likewise.
//!
//! # The word
//!
//! | bits | meaning |
//! |---|---|
//! | [`LIGHT`] | readers need not fence |
//! | [`TURNING`] | a scan removed `LIGHT`, and the barrier that must follow is not over yet |
//! | [`EXCLUDED`] | a thread excludes, or is about to (`exclusion.rs`) |
//! | above | a count of scans that changed the word; it does not wrap |
//!
//! # Steps
//!
//! | step | by | what |
//! |---|---|---|
//! | l1 | the reader of a light guard | loads the word and finds `LIGHT` |
//! | l2 | the same | announces |
//! | l3 | the same | only a compiler fence, which keeps l2 before later accesses |
//! | l4 | the same | loads the word with acquire order |
//! | d1 | a thread that scans | a sequentially consistent fence |
//! | d2 | the same | loads the word with acquire order; exchanges `LIGHT`, if set, for `TURNING` |
//! | d3 | the same | calls the barrier if the word had `LIGHT` or `TURNING`; then removes `TURNING` if it set it |
//! | d4 | the same | loads the announcements |
//! | b | a reader | sets `LIGHT` in a word that has none of the three bits, and fences |
//!
//! If l4 does not find `LIGHT`, the reader fences after all, and the guard is not light. A thread
//! that excludes scans too: its d2 is an exchange that also sets `EXCLUDED`. If the word has
//! `LIGHT`, an ordinary d1 to d3 comes first, so that sharers are not kept out during a barrier.
//!
//! # Why a light guard is as safe as one that fences
//!
//! *The barrier.* It gives every thread a fence at some moment of the call. Either l3 comes before
//! that moment: then loads after the call see l2 or a later announcement of that reader. Or that
//! moment comes before l3: then l4 and the guard's loads see everything before the call.
//!
//! *The promise.* Let a guard be light, so its l4 read a `LIGHT` that some b wrote. Let the d4 of a
//! scan miss its l2.
//!
//! 1. A barrier H followed the first exchange that removed that `LIGHT`.
//! 2. l3 came before H. Otherwise l4 would have seen the exchange.
//! 3. A d4 after H would have found l2. So the d4 of our scan does not come after H.
//! 4. Until H is over the word has `LIGHT` or `TURNING`, because b needs a word without `TURNING`.
//!    So a scan whose d2 comes between b and the end of H calls a barrier too.
//! 5. By the same argument as in steps 2 and 3, that barrier would have made d4 find l2.
//! 6. So the d2 of our scan found a word from before b.
//! 7. If the scan *excludes*, its d2 set `EXCLUDED`, and b does not come while that bit is set. So
//!    the exclusive work was over before b. Each exchange of the word acquires from the one before
//!    it, so that work happens before the guard.
//! 8. If the scan *advances the epoch* or asks whether the domain is *quiet*, all processors see
//!    everything before d1 when d2 loads. They see b later than that, and l4 reads b. So the
//!    guard's loads see everything before d1. The guard does not count for this scan, like a guard
//!    that fences after d1.
//!
//! Step 8 and one step in `domain.rs` need this: all other processors see a store at the same time
//! (*multi-copy atomicity*). x86-64 promises it. So do AArch64 and RISC-V, but the only model of
//! this proof is of x86-64. `tests/tso.rs` runs this code on processors with store buffers, with
//! guards that are really light, and fails if a rule is missing. So light guards exist on x86-64
//! only. The language's memory model promises nothing like it and has no such barrier. Loom and
//! Miri check the switching with light guards that fence after all. Under ThreadSanitizer readers
//! always fence.

use crate::Barrier;
use crate::sync::{AtomicU64, MAY_BE_LIGHT, Ordering, full_fence, full_fence_after_exchange};

/// Readers need not fence.
const LIGHT: u64 = 1;
/// A scan removed `LIGHT`, and its barrier is not over yet.
const TURNING: u64 = 2;
/// Shared guards are kept out.
const EXCLUDED: u64 = 4;
/// The unit of the count of scans. The count stops a reader that is about to turn the domain light.
const SCAN: u64 = 8;

/// The number of guards in a row that fence without a scan between them, after which a reader turns
/// the domain light. A barrier costs about as much as so many fences.
pub(crate) const QUIET_GUARDS: u32 = if cfg!(any(loom, shuttle, miri)) {
    1
} else {
    512
};

/// The word of a domain.
#[derive(Debug)]
pub(crate) struct Mode {
    word: AtomicU64,
    barrier: Option<Barrier>,
}

/// A value of the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen(u64);

impl Seen {
    /// A value that the word never has.
    pub(crate) const NEVER: Self = Self(LIGHT | TURNING);

    #[inline]
    pub(crate) const fn is_light(self) -> bool {
        self.0 & LIGHT != 0
    }

    #[inline]
    pub(crate) const fn is_excluded(self) -> bool {
        self.0 & EXCLUDED != 0
    }
}

/// The word before a thread excluded. The thread must still fence.
#[must_use]
pub(crate) struct Unfenced(u64);

impl Mode {
    pub(crate) fn new(barrier: Option<Barrier>) -> Self {
        Self {
            word: AtomicU64::new(0),
            barrier: barrier.filter(|_| MAY_BE_LIGHT),
        }
    }

    /// Whether readers may ever be light.
    pub(crate) const fn has_barrier(&self) -> bool {
        self.barrier.is_some()
    }

    #[inline]
    pub(crate) fn load(&self, order: Ordering) -> Seen {
        Seen(self.word.load(order))
    }

    /// Calls the barrier if the word was `before`, lacks `LIGHT` now, and a barrier is needed. (d3)
    #[inline]
    fn finish_turn(&self, before: u64) {
        if before & (LIGHT | TURNING) != 0 {
            self.call_barrier();
        }
        if before & LIGHT != 0 {
            // Release: a scan that finds neither bit comes after the barrier.
            self.word.fetch_and(!TURNING, Ordering::AcqRel);
        }
    }

    #[cold]
    fn call_barrier(&self) {
        if let Some(barrier) = self.barrier {
            barrier.everywhere();
        }
    }

    /// Fences for a scan, in all threads if readers do not fence. (d1 to d3)
    pub(crate) fn fence_before_scan(&self) {
        full_fence();
        if self.barrier.is_none() {
            return;
        }
        let mut word = self.word.load(Ordering::Acquire);
        while word & LIGHT != 0 {
            let turning = (word & !LIGHT | TURNING) + SCAN;
            match self.exchange(word, turning) {
                Ok(()) => break,
                Err(now) => word = now,
            }
        }
        self.finish_turn(word);
    }

    /// Exchanges the word if it is `known`. Acquires from the exchange before, and releases to the
    /// next.
    fn exchange(&self, known: u64, new: u64) -> Result<(), u64> {
        let (both, failed) = (Ordering::AcqRel, Ordering::Acquire);
        self.word.compare_exchange(known, new, both, failed)?;
        Ok(())
    }

    /// Keeps shared guards out, unless another thread does so. (x1) The caller must
    /// [fence](Self::fence_after_exclude) before it scans.
    pub(crate) fn exclude(&self) -> Option<Unfenced> {
        if self.load(Ordering::Relaxed).is_light() {
            self.fence_before_scan();
        }
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            if word & EXCLUDED != 0 {
                return None;
            }
            let mut excluded = (word | EXCLUDED) + SCAN;
            if word & LIGHT != 0 {
                excluded = excluded & !LIGHT | TURNING;
            }
            match self.exchange(word, excluded) {
                Ok(()) => return Some(Unfenced(word)),
                Err(now) => word = now,
            }
        }
    }

    /// Fences for the thread that has just excluded, in all threads if readers do not fence. (x2,
    /// d3)
    #[inline]
    pub(crate) fn fence_after_exclude(&self, before: Unfenced) {
        full_fence_after_exchange();
        self.finish_turn(before.0);
    }

    /// Lets shared guards in again. (x5)
    pub(crate) fn include(&self) {
        // Release: the exclusive work happens before the accesses of later guards.
        if self.barrier.is_some() {
            self.word.fetch_and(!EXCLUDED, Ordering::AcqRel);
        } else {
            // Without a barrier only the excluding thread changes the word.
            let word = self.word.load(Ordering::Relaxed);
            self.word.store(word & !EXCLUDED, Ordering::Release);
        }
    }

    /// Counts a failed scan, so that readers do not turn light beside a thread that scans
    /// repeatedly.
    pub(crate) fn count_failed_scan(&self) {
        if self.barrier.is_some() {
            self.word.fetch_add(SCAN, Ordering::AcqRel);
        }
    }

    /// Turns the domain light, unless the word has changed since the reader has `seen` it. (b)
    #[cold]
    pub(crate) fn turn_light(&self, seen: Seen) {
        if seen.0 & (LIGHT | TURNING | EXCLUDED) == 0 {
            // If the exchange fails, a scan came in between, or another reader was first.
            let _ = self.exchange(seen.0, seen.0 | LIGHT);
            // The fence keeps this thread from seeing `LIGHT` earlier than others do.
            full_fence();
        }
    }
}
