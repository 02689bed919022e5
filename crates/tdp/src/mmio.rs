//! Markers of MMIO: the walk alone says that no slot holds a frame.
//!
//! **Guarantee.** A marker is found only where nothing is mapped, and says under which generation of the slots it was made. No
//! fault makes one whose [`Ticket`] is older than an invalidation of the frame, or than [`Worker::forget_mmio`].
//!
//! **Mechanism.** As KVM's MMIO SPTEs. A marker is an entry of level 1 that is not present: nothing counts it, no TLB knows it,
//! and whatever puts a leaf in its place, or cuts its table off, needs to know no more of it than of an empty entry. Beside
//! look-ups only zaps see it, and clear it. It is *current* if its generation is that of the slots now, so that whoever changes slots has
//! nothing to take back: all markers are stale then.
//!
//! # When generations repeat
//!
//! A marker keeps the low [`MMIO_GENERATION_BITS`](crate::format::Layout::MMIO_GENERATION_BITS) of its generation, so one that
//! nobody has met since would count again when those repeat. In each generation for which [`must_forget_mmio`] holds, twice a
//! round, [`Worker::forget_mmio`] has to be called, after the slots have that generation and before they get the
//! next. It first moves the invalidation sequence on, under the exclusive side: a fault that looked at the slots before
//! makes its marker before that, where the sweep finds it, or is refused; one that took its ticket later has seen this
//! generation. Then it sweeps. So markers of older generations are gone, and those of this one go half a round later, before they
//! could count again. Once a round would not do: what is marked in the generation of the call would count in that of
//! the next, until its sweep comes by.

use crate::change::{Carries, Session, Spot};
use crate::fault::{Refused, spot_of};
use crate::format::Format;
use crate::invalidate::Ticket;
use crate::log::Log;
use crate::pages::Table;
use crate::platform::Platform;
use crate::worker::{Hold, Look, Then, Worker, all_frames, found};
use pageferry_addr::Gfn;

/// Whether a marker's generation, as [`Look::Mmio`] gives it, is `generation`, as far as markers keep
/// that.
///
/// ```
/// use pageferry_tdp::format::{Ept4, Layout};
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

/// Whether markers have to be [forgotten](Worker::forget_mmio) in `generation`, before the next begins.
///
/// ```
/// use pageferry_tdp::format::{Layout, Sv57x4Svadu};
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

/// What an entry says that is no leaf.
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
    /// Marks `gfn`, which no slot held in `generation`: for a fault that found that, under the `ticket` it took before. From then on
    /// [`look`](Self::look) says so. A marker that is there is replaced.
    ///
    /// Marking links tables as a fault of a 4 KiB page does. They stay until the range is zapped, and keep large
    /// pages from being mapped there: zap the frames of a slot that comes and wants those.
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

    /// Clears all markers of older generations than the slots have now, for good: no fault that is under way makes one later.
    /// Gives how many markers were cleared. Who does not call it where [`must_forget_mmio`] says so has markers that count
    /// when they should not. Held exclusive for a moment, then shared, with turns.
    pub fn forget_mmio(&mut self) -> u64 {
        {
            let mmu = &*self.mmu;
            let _exclusive = mmu.domain().exclude(|| mmu.platform().relax());
            // No frames: what is mapped stays.
            mmu.invalidation.begin(u64::MAX, 0);
            // All frames: whatever was looked up before makes no marker.
            mmu.invalidation.end(0, u64::MAX);
        }
        let mut cleared = 0;
        let all = all_frames::<F>();
        let swept = self.sweep(all, 1, Hold::Shared, &(), |session, spot| {
            if F::is_frozen(spot.value) {
                return Then::Again;
            }
            if !F::is_mmio(spot.value) {
                return Then::On;
            }
            let then = session.clear_marker(spot);
            cleared += u64::from(then == Then::On);
            then
        });
        debug_assert!(swept.is_ok(), "clearing needs no tables");
        cleared
    }
}

impl<F: Format, P: Platform, L: Log> Session<'_, F, P, L> {
    /// One walk from the root; `None` where it met what another worker is about to change.
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
            let spot = spot_of::<F>(table, gfn, value);
            if level > 1 {
                if !self.link(&spot) {
                    return Some(Err(Refused::Invalidated));
                }
            } else if self.change(&spot, marker, Carries::Nothing).is_ok() {
                return Some(Ok(()));
            }
        }
    }

    /// Clears the marker at `spot`.
    #[cold]
    pub(crate) fn clear_marker(&mut self, spot: &Spot<'_>) -> Then {
        match self.change(spot, F::NON_PRESENT, Carries::Nothing) {
            Ok(()) => Then::On,
            Err(_) => Then::Again,
        }
    }
}
