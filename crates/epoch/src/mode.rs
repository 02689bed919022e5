//! Whether readers fence, or have it done for them.
//!
//! A guard needs a full fence between its announcement and what it loads then: tens of cycles, at each guard. In a domain that
//! has a [`Barrier`] readers may leave it out, and be *light*: whoever frees or excludes then makes all threads go through a
//! fence (*heavy*, microseconds). That pays where there are many guards to each such demand. Where demands come one after the
//! other it does not, so a domain turns: the first demand makes readers fence, and a reader that has fenced [`CALM`]
//! guards in a row, while nobody moved the epoch on, excluded, or tried in vain, turns them light again. So one reader pays at most
//! about twice what it would pay if it knew what comes. With many processors a barrier costs more, as it interrupts each that runs a
//! thread of the process, but so many readers have fenced then, each of which counts for itself. (Linux's `percpu_rw_semaphore` and
//! `rcu_sync` turn likewise; there, back after a grace period.)
//!
//! # The word
//!
//! [`LIGHT`]: readers need not fence. [`TURNING`]: somebody has taken `LIGHT` away, and the heavy barrier that must follow is not
//! over yet. [`EXCLUDED`]: somebody excludes, or is about to (`exclusion.rs`). Above them is a count of demands that changed the
//! word, which does not wrap.
//!
//! # Why a light guard is as good as one that fences
//!
//! *Readers.* A light guard is (l1) a load of the word, which gives `LIGHT`, (l2) the announcement, (l3) nothing but a promise of
//! the compiler to keep l2 before what follows, (l4) a load of the word, with acquire order. If l4 does not give `LIGHT`, the guard
//! fences now; then it is one that fences, and nothing here is about it. Only what l4 gives counts.
//!
//! *The barrier.* Let H be a heavy barrier. Either l3 comes before H: then whatever follows H finds l2, or what the reader
//! announced later. Or H comes before l3: then l4, and all that the guard loads, sees what came before H.
//!
//! *Demands.* Who wants to find announcements (d1) fences, (d2) loads the word, with acquire order, and where that has `LIGHT`, exchanges it
//! for `TURNING`. Where there is `TURNING` now it (d3) calls H. Then (d4) it loads the announcements. Who has taken `LIGHT` away
//! takes `TURNING` away after H. Who demands seldom may leave `LIGHT` where it is, if H is called for it as well: then that is all there
//! is to show, by what H promises. To exclude is such a demand, too, whose d2 is an exchange. It comes after one that is none, where there is
//! `LIGHT`: nobody is kept out for as long as a barrier takes, unless readers turn just then.
//!
//! *Turning back.* A reader exchanges a word that has none of the three bits for the same with `LIGHT` (b), and fences.
//!
//! Let a guard be light, so l4 read `LIGHT` as some b wrote it, and let a demand's d4 miss its l2. The first exchange that took that
//! `LIGHT` away was followed by a barrier H', and l3 came before H', or l4 would have seen the exchange. So had d4 come after H',
//! it would have found l2; and likewise if d3 was a barrier, after somebody else's exchange. What remains is a demand whose d2
//! found a word from before b.
//! - *An exclusion* sets `EXCLUDED` by d2, and b does not come while that stays. So it was over before b, and the guard comes
//!   after it: by the word, each exchange of which acquires what the one before released, down to l4.
//! - *Moving the epoch on, or finding it quiet* may not be over yet. But what came before the fence d1 is seen by all
//!   processors when d2 loads; b is seen later than that, and l4 reads b; so the guard's loads see what came before d1. The guard does not
//!   count for this demand, as one that fences does not whose fence comes after d1. That is what `domain.rs` asks for.
//!
//! The last step, and one in `domain.rs`, take it that a store is seen by all other processors at the same time. x86-64, AArch64
//! (ARMv8) and RISC-V promise that (*multi-copy atomicity*); the language's memory model does not, and has no heavy barrier
//! either. So elsewhere, and under Miri and ThreadSanitizer, readers always fence. Loom and shuttle check the turns with readers
//! that fence after all. `tests/tso.rs` runs this code on processors with store buffers, with guards that are really light, and fails where a
//! rule is missing.

use crate::Barrier;
use crate::sync::{AtomicU64, MAY_BE_LIGHT, Ordering, full_fence, full_fence_after_exchange};

/// Readers need not fence.
const LIGHT: u64 = 1;
/// `LIGHT` was taken away just now, and the barrier after that is not over.
const TURNING: u64 = 2;
/// Shared guards are kept out.
const EXCLUDED: u64 = 4;
/// One demand more that changed the word, for those who would turn back.
const DEMAND: u64 = 8;

/// After how many guards that fenced while nobody demanded anything a reader turns the domain: a heavy barrier costs about as much
/// as so many fences.
pub(crate) const CALM: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 512 };

/// The word of a domain.
#[derive(Debug)]
pub(crate) struct Mode {
    word: AtomicU64,
    barrier: Option<Barrier>,
}

/// What the word was at some moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen(u64);

impl Seen {
    /// What no word is.
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

/// What the word was when somebody excluded.
#[must_use]
pub(crate) struct Owed(u64);

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

    /// A heavy barrier. (H)
    #[cold]
    fn everywhere(&self) {
        if let Some(barrier) = self.barrier {
            barrier.everywhere();
        }
    }

    /// The barrier that is needed where the word was `before`, and lacks `LIGHT` now. (d3)
    #[inline]
    fn turn(&self, before: u64) {
        if before & (LIGHT | TURNING) != 0 {
            self.everywhere();
        }
        if before & LIGHT != 0 {
            // Release: who finds readers that fence comes after the barrier.
            self.word.fetch_and(!TURNING, Ordering::AcqRel);
        }
    }

    /// Fences, in all threads where readers do not. (d1 to d3)
    pub(crate) fn demand(&self) {
        full_fence();
        if self.barrier.is_none() {
            return;
        }
        let mut word = self.word.load(Ordering::Acquire);
        while word & LIGHT != 0 {
            let turning = (word & !LIGHT | TURNING) + DEMAND;
            match self.exchange(word, turning) {
                Ok(()) => break,
                Err(now) => word = now,
            }
        }
        self.turn(word);
    }

    /// Fences, in all threads where readers do not, and lets them go on so. (d1 to d3, where d2 changes nothing)
    pub(crate) fn demand_of_light(&self) {
        full_fence();
        if self.barrier.is_some() && self.word.load(Ordering::Acquire) & (LIGHT | TURNING) != 0 {
            self.everywhere();
        }
    }

    /// Exchanges the word, if it is what it was taken for. Acquires what other exchanges released, and passes it on.
    fn exchange(&self, known: u64, new: u64) -> Result<(), u64> {
        let (both, failed) = (Ordering::AcqRel, Ordering::Acquire);
        self.word.compare_exchange(known, new, both, failed)?;
        Ok(())
    }

    /// Keeps shared guards out, unless somebody does. (x1) Announcements are found when what is owed has been
    /// [paid](Self::pay).
    pub(crate) fn exclude(&self) -> Option<Owed> {
        if self.load(Ordering::Relaxed).is_light() {
            self.demand();
        }
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            if word & EXCLUDED != 0 {
                return None;
            }
            let mut excluded = (word | EXCLUDED) + DEMAND;
            if word & LIGHT != 0 {
                excluded = excluded & !LIGHT | TURNING;
            }
            match self.exchange(word, excluded) {
                Ok(()) => return Some(Owed(word)),
                Err(now) => word = now,
            }
        }
    }

    /// Fences for who excluded just now, in all threads where readers do not. (x2, d3)
    #[inline]
    pub(crate) fn pay(&self, owed: Owed) {
        full_fence_after_exchange();
        self.turn(owed.0);
    }

    /// Lets shared guards in again. (x5)
    pub(crate) fn include(&self) {
        // Release: what was done happens before what those do who come now.
        if self.barrier.is_some() {
            self.word.fetch_and(!EXCLUDED, Ordering::AcqRel);
        } else {
            // Then nobody changes the word but who excludes.
            let word = self.word.load(Ordering::Relaxed);
            self.word.store(word & !EXCLUDED, Ordering::Release);
        }
    }

    /// Tells readers of a demand that came to nothing, so that they do not turn light beside who asks again and again.
    pub(crate) fn ask_again(&self) {
        if self.barrier.is_some() {
            self.word.fetch_add(DEMAND, Ordering::AcqRel);
        }
    }

    /// Lets readers be light, unless the word is not as it was `seen` any more. (b)
    #[cold]
    pub(crate) fn turn_light(&self, seen: Seen) {
        if seen.0 & (LIGHT | TURNING | EXCLUDED) == 0 {
            // Without success somebody demanded something meanwhile, or another reader was first.
            let _ = self.exchange(seen.0, seen.0 | LIGHT);
            // Nor does this thread see it before others do.
            full_fence();
        }
    }
}
