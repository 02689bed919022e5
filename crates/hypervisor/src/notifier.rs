//! The calls of an MMU notifier: the host takes pages back, or asks which pages the guest used.
//!
//! **Guarantee.** When a call that takes pages away has returned, no vCPU has a translation from
//! before it. Each page whose entry was dirty is in its slot's log. [`Vm::age_hva`] takes nothing
//! away.
//!
//! **Mechanism.** Under the writer's mutex, a call finds the slots by host address and passes their
//! frames to the tables' worker. Until the invalidation ends, the tables refuse faults of those
//! frames. After [`Vm::zap_all`], faults meet an empty root.
//!
//! **Neighbours.** `revoke.rs` has the protocol of all revocations. `vm.rs` has the other calls.

use crate::log::{SlotLog, SlotLogs};
use crate::slots::Memslots;
use crate::state::Writer;
use crate::vm::Vm;
use core::ops::Range;
use pageferry_addr::{GfnRange, Hva};

impl<M: Memslots> Vm<M> {
    /// Unmaps every guest page of which `hva` backs a byte or more, and flushes. An MMU notifier
    /// calls it before the host changes the mapping at `hva`. Returns the number of unmapped pages.
    /// Large pages are unmapped, and counted, as a whole.
    ///
    /// Every translation that existed when the call began is gone when it returns. Later accesses
    /// fault, and map the pages of the slots again.
    pub fn invalidate_hva(&self, hva: Range<Hva>) -> u64 {
        self.invalidate_hva_around(hva, || ()).0
    }

    /// Both halves of an MMU notifier, around a change of the mapping at `hva`. The call unmaps and
    /// flushes like [`invalidate_hva`](Self::invalidate_hva), then calls `change`. Faults map pages
    /// there only after `change` has returned. Returns the number of unmapped pages, and the value
    /// of `change`.
    ///
    /// A vCPU that accesses the range meanwhile retries until `change` has returned, so keep
    /// `change` short. It must not call this VM.
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
    /// while this thread takes the old tables apart. Returns the number of mapped pages of 4 KiB.
    /// Pages whose entries are dirty go into the logs.
    pub fn zap_all(&self) -> u64 {
        let mut writer = self.changes.lock();
        let Writer { slots, worker, .. } = &mut *writer;
        let logs = backed_by(slots, &(Hva(0)..Hva(u64::MAX)), &mut Vec::new());
        match worker.zap_all(&logs) {
            Ok(zapped) => zapped,
            Err(_) => unreachable!("the platform aborts where there is no memory"),
        }
    }

    /// Returns the number of guest pages at `hva` that the guest has used since the last call with
    /// `clear`. With `clear`, they count as unused from now on. If `hva` backs a part of a page,
    /// the page counts. If a large page maps it, all pages of the large page count.
    ///
    /// The call takes no lock that a fault needs, and flushes nothing. So it does not see a use
    /// through a translation that a vCPU still has in its TLB, which may hold 32 768 pages.
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

/// The capacity for ranges that stays allocated between calls. Most calls concern one slot.
const RANGES_KEPT: usize = 64;

/// Puts the frames at `hva` into `ranges`, slot by slot. Returns the logs of those slots.
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
