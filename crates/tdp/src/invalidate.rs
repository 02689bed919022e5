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
//! Without the lock the same words are a hint that lets a fault give up early.

use crate::sync::{AtomicU64, Ordering};
use pageferry_addr::Gfn;

/// The moment at which a fault began, in invalidations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Invalidation {
    ended: AtomicU64,
    active: AtomicU64,
    first: AtomicU64,
    end: AtomicU64,
}

impl Invalidation {
    pub(crate) fn new() -> Self {
        Self {
            ended: AtomicU64::new(0),
            active: AtomicU64::new(0),
            first: AtomicU64::new(u64::MAX),
            end: AtomicU64::new(0),
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
        self.active.load(Ordering::Relaxed) != 0
            && self.first.load(Ordering::Relaxed) < first.0 + frames
            && first.0 < self.end.load(Ordering::Relaxed)
    }

    /// Whether a fault with `ticket` may map the page of `frames` frames, a power of two, around `gfn`. The caller holds
    /// the shared side.
    #[inline]
    pub(crate) fn admits(&self, ticket: Ticket, gfn: Gfn, frames: u64) -> bool {
        // The lock orders these loads.
        self.ended.load(Ordering::Relaxed) == ticket.0
            && !self.covers(Gfn(gfn.0 & !(frames - 1)), frames)
    }

    /// Begins one more, of the frames `first..end`. The caller holds the exclusive side.
    pub(crate) fn begin(&self, first: u64, end: u64) {
        let active = self.active.load(Ordering::Relaxed);
        let (old_first, old_end) = match active {
            0 => (u64::MAX, 0),
            _ => (
                self.first.load(Ordering::Relaxed),
                self.end.load(Ordering::Relaxed),
            ),
        };
        self.first.store(old_first.min(first), Ordering::Relaxed);
        self.end.store(old_end.max(end), Ordering::Relaxed);
        self.active.store(active + 1, Ordering::Relaxed);
    }

    /// Ends one. The caller holds the exclusive side.
    pub(crate) fn end(&self) {
        let ended = self.ended.load(Ordering::Relaxed);
        // Release: what the host did before this is found by look-ups after a ticket with the new number.
        self.ended.store(ended + 1, Ordering::Release);
        let active = self.active.load(Ordering::Relaxed);
        debug_assert!(active > 0);
        self.active.store(active - 1, Ordering::Relaxed);
    }
}
