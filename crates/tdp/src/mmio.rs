//! MMIO markers: with them, the walk alone finds that no slot holds a frame.
//!
//! **Guarantee.** A marker exists only where nothing is mapped, and holds the slots' generation at
//! which it was made. A fault makes no marker if its [`Ticket`] is older than an invalidation of
//! the frame, or than [`Worker::forget_mmio`].
//!
//! **Mechanism.** As with KVM's MMIO SPTEs. A marker is an entry of level 1 that is not present. So
//! nothing counts it, and no TLB caches it. Code that stores a leaf in its place, or cuts its table
//! off, treats it as an empty entry. Besides look-ups only zaps read it, and clear it. It is
//! *current* if its generation is the current one of the slots. So a change of slots makes all
//! markers stale, and removes none.
//!
//! # When generations repeat
//!
//! A marker keeps the low
//! [`MMIO_GENERATION_BITS`](crate::format::EntryLayout::MMIO_GENERATION_BITS) of its generation.
//! When those bits repeat, an old marker would be current again. So a caller must call
//! [`Worker::forget_mmio`] in each generation for which [`must_forget_mmio`] holds, which is twice
//! a round. The call comes after the slots have that generation, and before they get the next.
//!
//! 1. The call moves the invalidation sequence on, under the exclusive side.
//! 2. A fault that looked at the slots before makes its marker before that, or is refused.
//! 3. A fault that took its ticket later has seen this generation.
//! 4. Then the call sweeps, and finds the markers of step 2. So markers of older generations are
//!    gone.
//! 5. Markers of this generation go half a round later, before they could be current again.
//!
//! Once a round would not suffice: a marker of the generation of one call would be current in the
//! generation of the next call, until the sweep clears it.

use crate::change::{Preserves, Seen, Session};
use crate::fault::{Refused, see};
use crate::format::Format;
use crate::invalidate::Ticket;
use crate::log::Log;
use crate::pages::Table;
use crate::platform::Platform;
use crate::worker::{Hold, Then, Worker, all_frames, found};
use pageferry_addr::Gfn;

/// Whether `generation` equals the generation of a marker, as
/// [`Look::Mmio`](crate::Look::Mmio) gives it, in the bits that markers keep.
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

/// Whether a caller must [forget](Worker::forget_mmio) markers in `generation`, before the next
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

impl<F: Format, P: Platform> Worker<F, P> {
    /// Marks `gfn`: no slot held it in `generation`. A fault that found this calls it with the
    /// `ticket` that it took before. From then on [`look`](Self::look) returns
    /// [`Look::Mmio`](crate::Look::Mmio) there. The marker replaces an older one.
    ///
    /// Like a fault of a 4 KiB page, marking links tables. They stay until the range is zapped, and
    /// prevent large pages there. If a new slot wants large pages, zap its frames.
    ///
    /// # Errors
    /// As [`fault`](Self::fault). [`Refused::Conflict`] if something is mapped.
    ///
    /// # Panics
    /// If the ticket is of another MMU.
    pub fn mark_mmio(&mut self, ticket: Ticket, gfn: Gfn, generation: u64) -> Result<(), Refused> {
        Self::check_reach(gfn)?;
        let (shared, mut session) = self.begin_fault(ticket, gfn, 1, &())?;
        let marker = F::mmio(gfn, generation);
        (0..Self::TRIES)
            .find_map(|_| session.mark(session.mmu.top(&shared), gfn, marker))
            .unwrap_or(Err(Refused::Invalidated))
    }

    /// Clears all markers of generations before the slots' current one, and prevents faults in
    /// progress from making more. Returns the number of cleared markers. If a caller omits this
    /// call where [`must_forget_mmio`] demands it, stale markers become current again. It holds the
    /// exclusive side briefly, then the shared side, in turns.
    pub fn forget_mmio(&mut self) -> u64 {
        {
            let mmu = &*self.mmu;
            let _exclusive = mmu.exclude();
            // All frames: a fault that looked up before makes no marker. Mapped pages stay.
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
