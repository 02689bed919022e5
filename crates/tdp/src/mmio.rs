//! Markers of MMIO: the walk alone says that no slot holds a frame.
//!
//! **Guarantee.** A marker is found only where nothing is mapped, and says under which generation
//! of the slots it was made. A fault makes none if its [`Ticket`] is older than an invalidation of
//! the frame, or than [`Worker::forget_mmio`].
//!
//! **Mechanism.** As KVM's MMIO SPTEs. A marker is an entry of level 1 that is not present. So
//! nothing counts it, and no TLB knows it. Code that puts a leaf in its place, or cuts its table
//! off, treats it as an empty entry. Besides look-ups only zaps see it, and clear it. It is
//! *current* if its generation is that of the slots now. So a change of slots has nothing to take
//! back: all markers are stale then.
//!
//! # When generations repeat
//!
//! A marker keeps the low
//! [`MMIO_GENERATION_BITS`](crate::format::EntryLayout::MMIO_GENERATION_BITS) of its generation.
//! One that was not replaced since would count again when those repeat. So [`Worker::forget_mmio`]
//! has to be called in each generation for which [`must_forget_mmio`] holds, twice a round: after
//! the slots have that generation, and before they get the next.
//!
//! 1. It moves the invalidation sequence on, under the exclusive side.
//! 2. A fault that looked at the slots before makes its marker before that, or is refused.
//! 3. A fault that took its ticket later has seen this generation.
//! 4. Then it sweeps, and finds the markers of step 2. So markers of older generations are gone.
//! 5. Those of this generation go half a round later, before they could count again.
//!
//! Once a round would not do: a marker of the generation of one call would count in that of the
//! next, until the sweep comes by.

use crate::change::{Preserves, Seen, Session};
use crate::fault::{Refused, see};
use crate::format::Format;
use crate::invalidate::Ticket;
use crate::log::Log;
use crate::pages::Table;
use crate::platform::Platform;
use crate::worker::{Hold, Look, Then, Worker, all_frames, found};
use pageferry_addr::Gfn;

/// Whether a marker's generation, as [`Look::Mmio`] gives it, is `generation`, in the bits that
/// markers keep.
///
/// ```
/// use pageferry_tdp::format::{Ept4, EntryLayout};
/// use pageferry_tdp::is_mmio_current;
///
/// let bits = Ept4::MMIO_GENERATION_BITS;
/// assert!(is_mmio_current::<Ept4>(5, 5) && !is_mmio_current::<Ept4>(5, 6));
/// assert!(is_mmio_current::<Ept4>(5, 5 + (1 << bits)), "forgotten long before");
/// ```
#[inline]
#[must_use]
pub const fn is_mmio_current<F: Format>(found: u64, generation: u64) -> bool {
    (found ^ generation) & ((1 << F::MMIO_GENERATION_BITS) - 1) == 0
}

/// Whether markers have to be [forgotten](Worker::forget_mmio) in `generation`, before the next
/// begins.
///
/// ```
/// use pageferry_tdp::format::{EntryLayout, Sv57x4Svadu};
/// use pageferry_tdp::must_forget_mmio;
///
/// // After a generation, and before its bits repeat.
/// let round = 1 << Sv57x4Svadu::MMIO_GENERATION_BITS;
/// let is_forgotten = |made| (made + 1..made + round).any(must_forget_mmio::<Sv57x4Svadu>);
/// assert!((0..3 * round).all(is_forgotten));
/// let times = (0..round).filter(|&now| must_forget_mmio::<Sv57x4Svadu>(now)).count();
/// assert_eq!(times, 2);
/// ```
#[inline]
#[must_use]
pub const fn must_forget_mmio<F: Format>(generation: u64) -> bool {
    generation & ((1 << (F::MMIO_GENERATION_BITS - 1)) - 1) == 0
}

/// The answer for an entry that is no leaf.
#[inline]
pub(crate) fn absent<F: Format>(value: u64) -> Look {
    if F::is_mmio(value) {
        let generation = F::mmio_generation(value);
        Look::Mmio { generation }
    } else {
        Look::Absent
    }
}

impl<F: Format, P: Platform> Worker<F, P> {
    /// Marks `gfn`, which no slot held in `generation`: for a fault that found this, under the
    /// `ticket` that it took before. From then on [`look`](Self::look) says so. It replaces an
    /// older marker.
    ///
    /// Marking links tables as a fault of a 4 KiB page does. They stay until the range is zapped,
    /// and keep large pages from being mapped there: zap the frames of a slot that comes and wants
    /// those.
    ///
    /// # Errors
    /// As [`fault`](Self::fault); [`Refused::Conflict`] where something is mapped.
    ///
    /// # Panics
    /// If the format has no room for `gfn`.
    pub fn mark_mmio(&mut self, ticket: Ticket, gfn: Gfn, generation: u64) -> Result<(), Refused> {
        assert!(gfn < F::GFN_LIMIT, "{gfn:?} is past the tables' reach");
        let (shared, mut session) = self.begin_fault(ticket, gfn, 1, &())?;
        let marker = F::mmio(gfn, generation);
        (0..Self::TRIES)
            .find_map(|_| session.mark(session.mmu.top(&shared), gfn, marker))
            .unwrap_or(Err(Refused::Invalidated))
    }

    /// Clears all markers of older generations than the slots have now, for good: no fault that is
    /// under way makes one later. Returns how many it cleared. A caller that leaves it out where
    /// [`must_forget_mmio`] demands it has markers that count when they should not. It holds the
    /// exclusive side for a moment, then the shared one, in turns.
    pub fn forget_mmio(&mut self) -> u64 {
        {
            let mmu = &*self.mmu;
            let _exclusive = mmu.domain().exclude(|| mmu.platform().relax());
            // All frames: a fault that looked up before makes no marker. What is mapped stays.
            mmu.invalidations.moves_on(0..u64::MAX);
        }
        let mut cleared = 0;
        let all = all_frames::<F>();
        let swept = self.sweep(all, 1, Hold::Shared, &(), |session, seen| {
            if F::is_frozen(seen.value) {
                return Then::Again;
            }
            if !F::is_mmio(seen.value) {
                return Then::On;
            }
            let then = session.clear_marker(seen);
            cleared += u64::from(then == Then::On);
            then
        });
        debug_assert!(swept.is_ok(), "clearing needs no tables");
        cleared
    }
}

impl<F: Format, P: Platform, L: Log> Session<'_, F, P, L> {
    /// One walk from the root. `None` if it met an entry that another worker is about to change.
    fn mark(
        &mut self,
        mut table: Table<'_, F>,
        gfn: Gfn,
        marker: u64,
    ) -> Option<Result<(), Refused>> {
        let platform = self.mmu.platform();
        loop {
            let value;
            (table, value) = table.descend(platform, gfn);
            if F::is_frozen(value) {
                platform.relax();
                return None;
            }
            if value == marker {
                return Some(Ok(()));
            }
            let level = table.level();
            if let Some(existing) = found::<F>(value, level) {
                return Some(Err(Refused::Conflict { existing }));
            }
            let seen = see::<F>(table, gfn, value);
            if level > 1 {
                if !self.link(&seen) {
                    return Some(Err(Refused::Invalidated));
                }
            } else if self.change(&seen, marker, Preserves::Nothing).is_ok() {
                return Some(Ok(()));
            }
        }
    }

    /// Clears the marker at `seen`.
    #[cold]
    pub(crate) fn clear_marker(&mut self, seen: &Seen<'_>) -> Then {
        match self.change(seen, F::NON_PRESENT, Preserves::Nothing) {
            Ok(()) => Then::On,
            Err(_) => Then::Again,
        }
    }
}
