//! Faults that race an invalidation: the frame that a fault has looked up is stale if the host
//! takes it away before the fault maps it.
//!
//! **Guarantee.** A fault takes its [`Ticket`] before it looks its frame up. It maps nothing that
//! an invalidation of these frames, which began since, has taken away. While an invalidation is in
//! progress, no fault maps anything in its range.
//!
//! **Mechanism.** As KVM's (`virt/kvm/kvm_main.c`, `kvm_mmu_invalidate_begin`): a sequence number
//! that moves on when an invalidation ends, a count of those in progress, and one range that covers
//! all of these. Begin and end hold the exclusive side, and the check that counts holds the shared
//! one. So each check is wholly before or wholly after each of them:
//!
//! 1. Before begin: the invalidation's zap finds what the fault maps.
//! 2. Between begin and end: the range tells.
//! 3. After end: a ticket from before end has an old number. A ticket from after end was followed
//!    by a look-up after end, which found what the host has now.
//!
//! KVM retries every fault with an old number, wherever it was. Beside a host that invalidates all
//! the time, hardly one gets through. Here the ranges of the last [`KEPT`] invalidations are known.
//! An old ticket is still good for a page that lies in none of those that have ended since.
//!
//! Without the lock the same words are a hint that lets a fault give up early.
//!
//! The numbers of two MMUs are far apart, so that a ticket tells which MMU it is of.

use crate::sync::{AtomicU64, Ordering};
use core::ops::Range;
use core::sync::atomic::AtomicU64 as Unmodelled;
use pageferry_addr::{Gfn, GfnRange};

/// The moment at which a fault began, in invalidations of one MMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(u64);

/// The ranges of how many invalidations are known after their end.
const KEPT: usize = if cfg!(any(loom, shuttle)) { 2 } else { 16 };

/// Numbers of one MMU are nearer to each other than this: an invalidation takes more than 100 ns,
/// so this many take more than a month.
const FAR: u64 = 1 << 45;

/// Where the numbers of a new MMU begin.
///
/// Multiples of 2^64 divided by the golden ratio are spread evenly: a hundred thousand in a row are
/// more than [`FAR`] apart. Models count from 0, as they replay runs.
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
pub(crate) struct Invalidations {
    /// The number of the next one to end.
    ended: AtomicU64,
    active: AtomicU64,
    /// What is in progress.
    current: Frames,
    /// How often all were ended at once. The exclusive side orders it, and it is not modelled.
    resets: Unmodelled,
    /// What number `n` was of, at `n` modulo their count.
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

    /// How many are in progress.
    pub(crate) fn in_progress(&self) -> u64 {
        self.active.load(Ordering::Relaxed)
    }

    /// The range that holds those of all in progress. The caller holds the exclusive side.
    pub(crate) fn current(&self) -> Option<GfnRange> {
        let first = self.current.first.load(Ordering::Relaxed);
        let end = self.current.end.load(Ordering::Relaxed);
        if self.in_progress() == 0 || end <= first {
            return None;
        }
        GfnRange::new(Gfn(first), end - first)
    }

    /// For a fault, before it looks anything up.
    #[inline]
    pub(crate) fn ticket(&self) -> Ticket {
        // Acquire: the look-up that follows finds what the host had at the end of that
        // invalidation, or later.
        Ticket(self.ended.load(Ordering::Acquire))
    }

    /// Whether some of the `frames` frames from `first` are in a range that is being invalidated:
    /// exact under the lock, a hint without.
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

    /// Whether it is sure that the invalidations with numbers from `ticket` to `ended` were of
    /// other frames.
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

    /// Begins one more, of the frames `first..end`. The caller holds the exclusive side.
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

    /// Ends all in progress; returns how many. The caller holds the exclusive side.
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

    /// Makes tickets from before this old for `frames`. The caller holds the exclusive side.
    pub(crate) fn moves_on(&self, frames: Range<u64>) {
        let ended = self.ended.load(Ordering::Relaxed);
        self.recent[(ended % KEPT as u64) as usize].set(frames.start, frames.end);
        // Release: what the host did before this is found by look-ups after a ticket with the new
        // number.
        self.ended.store(ended.wrapping_add(1), Ordering::Release);
    }
}
