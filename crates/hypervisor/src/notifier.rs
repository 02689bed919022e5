//! The calls of an MMU notifier: the host takes pages back, or asks which were used.
//!
//! **Guarantee.** When a call that takes pages away has returned, no vCPU has a translation from
//! before it. Each page whose entry was dirty is in its slot's log. [`Vm::age_hva`] takes nothing
//! away.
//!
//! **Mechanism.** The slots are found by host address, and the tables' worker gets their frames,
//! under the writer's mutex. The sequence of invalidations refuses faults of those frames, or
//! faults meet an empty root.
//!
//! **Neighbours.** `revoke.rs` says what else is taken away, and in which order. `vm.rs` has the
//! other calls.

use crate::log::{SlotLog, SlotLogs};
use crate::slots::Memslots;
use crate::state::Writer;
use crate::vm::Vm;
use core::ops::Range;
use pageferry_addr::{GfnRange, Hva};

impl<M: Memslots> Vm<M> {
    /// Unmaps the guest pages that `hva` backs, if only by a byte, and flushes: an MMU notifier's
    /// call, before the host changes what is mapped there. Every translation that existed when the
    /// call began is gone when it returns. Later touches fault, and map what the slots say. Returns
    /// how many pages were unmapped. Large pages are unmapped, and counted, as a whole.
    pub fn invalidate_hva(&self, hva: Range<Hva>) -> u64 {
        self.invalidate_hva_around(hva, || ()).0
    }

    /// Both halves of an MMU notifier, around a change of what is mapped at `hva`. It unmaps and
    /// flushes as [`invalidate_hva`](Self::invalidate_hva) does, then calls `change`. Faults map
    /// there again only when `change` has returned. Returns how many pages were unmapped, and the
    /// value of `change`.
    ///
    /// A vCPU that touches the range meanwhile retries until `change` is over, so keep `change`
    /// short. It must not call this VM.
    pub fn invalidate_hva_around<R>(
        &self,
        hva: Range<Hva>,
        change: impl FnOnce() -> R,
    ) -> (u64, R) {
        let mut writer = self.changes.lock();
        let Writer {
            slots,
            worker,
            ranges,
            ..
        } = &mut *writer;
        let logs = backed_by(slots, &hva, ranges);
        if ranges.is_empty() {
            return (0, change());
        }
        let _held = slots.exclude();
        let invalidating = worker.invalidate(ranges, &logs);
        let zapped = invalidating.zapped();
        let changed = change();
        drop(invalidating);
        (zapped, changed)
    }

    /// Unmaps everything, fast: an empty root replaces the old one. vCPUs fault into it at once,
    /// while the old tables are taken apart. Returns how many pages of 4 KiB were mapped. Pages
    /// that are dirty by the entries' bits go into the logs.
    pub fn zap_all(&self) -> u64 {
        let mut writer = self.changes.lock();
        let Writer { slots, worker, .. } = &mut *writer;
        let logs = backed_by(slots, &(Hva(0)..Hva(u64::MAX)), &mut Vec::new());
        match worker.zap_all(&logs) {
            Ok(zapped) => zapped,
            Err(_) => unreachable!("the platform aborts where there is no memory"),
        }
    }

    /// How many of the guest pages that `hva` backs, if only by a byte, the guest has used since
    /// this was last cleared. A page that a larger one maps counts with all that this one maps.
    /// With `clear`, they count as unused from now on.
    ///
    /// It takes no lock that a fault needs, and flushes nothing. So it does not see a use through a
    /// translation that a vCPU still has in its TLB.
    pub fn age_hva(&self, hva: Range<Hva>, clear: bool) -> u64 {
        let mut writer = self.changes.lock();
        let Writer {
            slots,
            worker,
            ranges,
            ..
        } = &mut *writer;
        backed_by(slots, &hva, ranges);
        ranges.iter().map(|&r| worker.age(r, clear, &())).sum()
    }
}

/// How many ranges keep their space between calls. Most calls concern one slot.
const RANGES_KEPT: usize = 64;

/// Puts the frames that `hva` backs into `ranges`, slot by slot. Returns the logs of those slots.
fn backed_by<'a, M: Memslots>(
    slots: &'a M,
    hva: &Range<Hva>,
    ranges: &mut Vec<GfnRange>,
) -> SlotLogs<'a> {
    let mut logs = Vec::new();
    ranges.clear();
    ranges.shrink_to(RANGES_KEPT);
    slots.for_each_in_hva(hva.clone(), |slot| {
        if let Some(frames) = slot.frames_in_hva(hva.clone()) {
            ranges.push(frames);
            logs.push(SlotLog::of(slot));
        }
    });
    SlotLogs::new(logs)
}
