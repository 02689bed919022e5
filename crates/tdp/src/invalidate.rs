//! Faults that race an invalidation: the frame that a fault has looked up is stale if the host
//! takes it away before the fault maps it.
//!
//! **Guarantee.** A fault takes its [`Ticket`] before it looks its frame up. It maps no frame that
//! an invalidation has taken away since the ticket. While an invalidation is in progress, no fault
//! maps anything in its range.
//!
//! **Mechanism.** As in KVM (`virt/kvm/kvm_main.c`, `kvm_mmu_invalidate_begin`). There is a
//! sequence number that each end of an invalidation increments, a count of those in progress, and
//! one range that covers all of these. Begin and end hold the exclusive side. The check in a fault
//! holds the shared side. So each check is wholly before or wholly after each begin and end:
//!
//! 1. Before begin: the invalidation's zap finds the leaf that the fault maps.
//! 2. Between begin and end: the range covers the fault.
//! 3. After end: a ticket from before end has an old number. After a ticket from after end, the
//!    look-up finds the host's current frame.
//!
//! KVM retries every fault with an old number, wherever it was. Beside a host that invalidates all
//! the time, hardly one succeeds. Here the ranges of the last [`KEPT`] invalidations are known. An
//! old ticket is still good for a page outside all ranges that have ended since.
//!
//! Without the lock the same words are a hint that lets a fault give up early.
//!
//! The numbers of two MMUs are far apart, so a ticket identifies its MMU.

use crate::sync::{AtomicU64, Ordering};
use core::ops::Range;
use core::sync::atomic::AtomicU64 as Unmodelled;
use pageferry_addr::{Gfn, GfnRange};

/// The moment at which a fault began, as a number of invalidations of one MMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

/// The number of latest invalidations whose ranges are kept.
const KEPT: usize = if cfg!(any(loom, shuttle)) { 2 } else { 16 };

/// The bound on the distance between two numbers of one MMU. An invalidation takes more than 100
/// ns, so this many take more than a month.
const FAR: u64 = 1 << 45;

/// The first number of a new MMU.
///
/// Multiples of 2^64 divided by the golden ratio are spread evenly: any hundred thousand
/// consecutive ones are more than [`FAR`] apart. Models count from 0, as they replay runs.
fn first_number() -> u64 {
    #[cfg(not(any(loom, shuttle)))]
    {
        use core::sync::atomic::AtomicU64;
        static MMUS: AtomicU64 = AtomicU64::new(0);
        MMUS.fetch_add(1, Ordering::Relaxed)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
    #[cfg(any(loom, shuttle))]
    0
}

/// The first frame, and the frame after the last.
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
        // Saturating: a guest may choose the frame.
        self.first.load(Ordering::Relaxed) < first.0.saturating_add(frames)
            && first.0 < self.end.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Invalidations {
    /// The number of the next invalidation to end.
    ended: AtomicU64,
    active: AtomicU64,
    /// The range that covers all invalidations in progress.
    current: Frames,
    /// The number of calls that ended all invalidations at once. The exclusive side orders it, so
    /// it is not modelled.
    resets: Unmodelled,
    /// The range of invalidation `n`, at index `n` modulo the length.
    recent: [Frames; KEPT],
}

/// An invalidation that has begun.
#[derive(Debug)]
pub(crate) struct Begun {
    frames: Range<u64>,
    resets: u64,
}

impl Invalidations {
    pub(crate) fn new() -> Self {
        Self {
            ended: AtomicU64::new(first_number()),
            active: AtomicU64::new(0),
            current: Frames::none(),
            resets: Unmodelled::new(0),
            recent: core::array::from_fn(|_| Frames::none()),
        }
    }

    /// The number of invalidations in progress.
    pub(crate) fn in_progress(&self) -> u64 {
        self.active.load(Ordering::Relaxed)
    }

    /// The range that covers all invalidations in progress. The caller holds the exclusive side.
    pub(crate) fn current(&self) -> Option<GfnRange> {
        let first = self.current.first.load(Ordering::Relaxed);
        let end = self.current.end.load(Ordering::Relaxed);
        if self.in_progress() == 0 || end <= first {
            return None;
        }
        GfnRange::new(Gfn(first), end - first)
    }

    /// A ticket for a fault, taken before its look-up.
    #[inline]
    pub(crate) fn ticket(&self) -> Ticket {
        // Acquire: the look-up that follows finds the host's state at the end of that invalidation,
        // or a later one.
        Ticket(self.ended.load(Ordering::Acquire))
    }

    /// Whether some of the `frames` frames from `first` are in a range that is being invalidated.
    /// This is exact under the lock, and a hint without it.
    #[inline]
    pub(crate) fn covers(&self, first: Gfn, frames: u64) -> bool {
        self.active.load(Ordering::Relaxed) != 0 && self.current.overlap(first, frames)
    }

    /// Whether a fault with `ticket` may map the page of `frames` frames, a power of two, around
    /// `gfn`. The caller holds the shared side.
    ///
    /// # Panics
    /// If the ticket is of another MMU.
    #[inline]
    pub(crate) fn admits(&self, ticket: Ticket, gfn: Gfn, frames: u64) -> bool {
        // The lock orders these loads.
        let (ended, first) = (
            self.ended.load(Ordering::Relaxed),
            Gfn(gfn.0 & !(frames - 1)),
        );
        (ended == ticket.0 || self.spared(ticket.0, ended, first, frames))
            && !self.covers(first, frames)
    }

    /// Whether all invalidations with numbers from `ticket` to `ended` are known, and were of other
    /// frames.
    #[cold]
    fn spared(&self, ticket: u64, ended: u64, first: Gfn, frames: u64) -> bool {
        let since = ended.wrapping_sub(ticket);
        assert!(
            since < FAR,
            "the ticket is of another MMU: take it by `Worker::ticket` of this one"
        );
        let known = KEPT as u64;
        let of = |number: u64| &self.recent[(number % known) as usize];
        since <= known && (0..since).all(|n| !of(ticket.wrapping_add(n)).overlap(first, frames))
    }

    /// Begins an invalidation of the frames `first..end`. The caller holds the exclusive side.
    #[must_use]
    pub(crate) fn begin(&self, frames: Range<u64>) -> Begun {
        let active = self.active.load(Ordering::Relaxed);
        let (old_first, old_end) = match active {
            0 => (u64::MAX, 0),
            _ => (
                self.current.first.load(Ordering::Relaxed),
                self.current.end.load(Ordering::Relaxed),
            ),
        };
        let (first, end) = (old_first.min(frames.start), old_end.max(frames.end));
        self.current.set(first, end);
        self.active.store(active + 1, Ordering::Relaxed);
        let resets = self.resets.load(Ordering::Relaxed);
        Begun { frames, resets }
    }

    /// Ends one. The caller holds the exclusive side.
    pub(crate) fn end(&self, begun: &Begun) {
        if begun.resets != self.resets.load(Ordering::Relaxed) {
            return;
        }
        self.moves_on(begun.frames.clone());
        let active = self.active.load(Ordering::Relaxed);
        debug_assert!(active > 0);
        self.active.store(active - 1, Ordering::Relaxed);
    }

    /// Ends all in progress and returns their number. The caller holds the exclusive side.
    pub(crate) fn end_all(&self) -> u64 {
        let active = self.in_progress();
        if let Some(frames) = self.current() {
            self.moves_on(frames.start().0..frames.end().0);
        }
        self.active.store(0, Ordering::Relaxed);
        let resets = self.resets.load(Ordering::Relaxed);
        self.resets.store(resets + 1, Ordering::Relaxed);
        active
    }

    /// Makes all earlier tickets old for `frames`. The caller holds the exclusive side.
    pub(crate) fn moves_on(&self, frames: Range<u64>) {
        let ended = self.ended.load(Ordering::Relaxed);
        self.recent[(ended % KEPT as u64) as usize].set(frames.start, frames.end);
        // Release: after a ticket with the new number, a look-up finds the host's changes from
        // before this.
        self.ended.store(ended.wrapping_add(1), Ordering::Release);
    }
}
