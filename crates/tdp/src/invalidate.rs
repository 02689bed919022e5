//! Faults that race an invalidation: which frame a fault has looked up is worth nothing if the host takes it away before it
//! is mapped.
//!
//! **Guarantee.** A fault whose [`Ticket`] was taken before its frame was looked up maps nothing that an invalidation
//! of these frames, which began since, has taken away; and none maps anything in the range while the invalidation is
//! in progress.
//!
//! **Mechanism.** As KVM's (`virt/kvm/kvm_main.c`, `kvm_mmu_invalidate_begin`): a sequence number that moves on when an
//! invalidation ends, a count of those in progress, and one range that covers all of these. Begin and end hold the
//! exclusive side, and the check that counts the shared one, so each check is wholly before or wholly after:
//! - before begin: what the fault maps is there for the invalidation's zap to find;
//! - between begin and end: the range tells;
//! - after end: a ticket from before end has an old number. One from after end was followed by a look-up after
//!   end, which found what the host has now.
//!
//! KVM tries every fault with an old number again, wherever it was; beside a host that invalidates all the time, hardly one
//! gets through. Here the ranges of the last [`KEPT`] invalidations are known, and a fault whose page lies in none of those
//! that have ended since its ticket is as good as new: what it looked up was not taken away by them.
//!
//! Without the lock the same words are a hint that lets a fault give up early.

use crate::sync::{AtomicU64, Ordering};
use core::ops::Range;
use pageferry_addr::Gfn;

/// The moment at which a fault began, in invalidations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

/// The ranges of how many invalidations are known after their end.
const KEPT: usize = if cfg!(any(loom, shuttle)) { 2 } else { 16 };

/// The first frame, and the first behind the last.
#[derive(Debug)]
struct Frames {
    first: AtomicU64,
    end: AtomicU64,
}

impl Frames {
    fn none() -> Self {
        Self {
            first: AtomicU64::new(u64::MAX),
            end: AtomicU64::new(0),
        }
    }

    fn set(&self, first: u64, end: u64) {
        self.first.store(first, Ordering::Relaxed);
        self.end.store(end, Ordering::Relaxed);
    }

    /// Whether some of the `frames` frames from `first` on are among them.
    #[inline]
    fn overlap(&self, first: Gfn, frames: u64) -> bool {
        self.first.load(Ordering::Relaxed) < first.0 + frames
            && first.0 < self.end.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Invalidation {
    ended: AtomicU64,
    active: AtomicU64,
    /// What is in progress.
    current: Frames,
    /// What number `n` was of, at `n` modulo their count.
    recent: [Frames; KEPT],
}

impl Invalidation {
    pub(crate) fn new() -> Self {
        Self {
            ended: AtomicU64::new(0),
            active: AtomicU64::new(0),
            current: Frames::none(),
            recent: core::array::from_fn(|_| Frames::none()),
        }
    }

    /// For a fault, before it looks anything up.
    #[inline]
    pub(crate) fn ticket(&self) -> Ticket {
        // Acquire: the look-up that follows finds what the host had at the end of that invalidation, or later.
        Ticket(self.ended.load(Ordering::Acquire))
    }

    /// Whether some of the `frames` frames from `first` are in a range that is being invalidated: exact under the lock,
    /// a hint without.
    #[inline]
    pub(crate) fn covers(&self, first: Gfn, frames: u64) -> bool {
        self.active.load(Ordering::Relaxed) != 0 && self.current.overlap(first, frames)
    }

    /// Whether a fault with `ticket` may map the page of `frames` frames, a power of two, around `gfn`. The caller holds
    /// the shared side.
    #[inline]
    pub(crate) fn admits(&self, ticket: Ticket, gfn: Gfn, frames: u64) -> bool {
        // The lock orders these loads.
        let (ended, first) = (
            self.ended.load(Ordering::Relaxed),
            Gfn(gfn.0 & !(frames - 1)),
        );
        (ended == ticket.0 || self.spared(ticket.0..ended, first, frames))
            && !self.covers(first, frames)
    }

    /// Whether it is sure that the invalidations of these numbers, which have ended, were of other frames.
    #[cold]
    fn spared(&self, numbers: Range<u64>, first: Gfn, frames: u64) -> bool {
        let known = KEPT as u64;
        let of = |number: u64| &self.recent[(number % known) as usize];
        numbers.end - numbers.start <= known
            && numbers
                .into_iter()
                .all(|number| !of(number).overlap(first, frames))
    }

    /// Begins one more, of the frames `first..end`. The caller holds the exclusive side.
    pub(crate) fn begin(&self, first: u64, end: u64) {
        let active = self.active.load(Ordering::Relaxed);
        let (old_first, old_end) = match active {
            0 => (u64::MAX, 0),
            _ => (
                self.current.first.load(Ordering::Relaxed),
                self.current.end.load(Ordering::Relaxed),
            ),
        };
        self.current.set(old_first.min(first), old_end.max(end));
        self.active.store(active + 1, Ordering::Relaxed);
    }

    /// Ends one, that was of the frames `first..end`. The caller holds the exclusive side.
    pub(crate) fn end(&self, first: u64, end: u64) {
        let ended = self.ended.load(Ordering::Relaxed);
        self.recent[(ended % KEPT as u64) as usize].set(first, end);
        // Release: what the host did before this is found by look-ups after a ticket with the new number.
        self.ended.store(ended + 1, Ordering::Release);
        let active = self.active.load(Ordering::Relaxed);
        debug_assert!(active > 0);
        self.active.store(active - 1, Ordering::Relaxed);
    }
}
