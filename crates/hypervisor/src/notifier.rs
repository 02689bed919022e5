//! The calls of an MMU notifier: the host takes pages back, or asks which were used.
//!
//! **Guarantee.** When a call that takes away has returned, no vCPU has a translation from before it, and each page whose
//! entry knew it dirty is in its slot's log. [`Vm::age_hva`] takes nothing away.
//!
//! **Mechanism.** The slots are found by host address, their frames handed to the tables' worker, under the writer's
//! mutex. Faults are kept out by the invalidation's sequence, or meet an empty root (`docs/mmu.md`).
//!
//! **Neighbours.** `revoke.rs` argues what else is taken away, and in which order; `vm.rs` has the other calls.

use crate::log::{SlotLog, SlotLogs};
use crate::revoke::Writer;
use crate::slots::Memslots;
use crate::vm::Vm;
use core::ops::Range;
use pageferry_addr::{GfnRange, Hva};
use pageferry_tdp::Log as _;

impl<M: Memslots> Vm<M> {
    /// Unmaps the guest pages whose host memory any byte of `hva` lies in, and flushes: the call of an MMU notifier,
    /// before the host changes what is mapped there. Every translation that existed when the call began is
    /// gone when it returns; later touches fault and map what the slots say. Gives how many were unmapped: large pages
    /// go, and count, as a whole.
    pub fn invalidate_hva(&self, hva: Range<Hva>) -> u64 {
        self.invalidate_hva_around(hva, || ()).0
    }

    /// Both halves of an MMU notifier, around a change of what is mapped at `hva`: unmaps and flushes as
    /// [`invalidate_hva`](Self::invalidate_hva), calls `change`, and lets faults map there again only when that has returned. Gives
    /// how many pages were unmapped, and what `change` gave.
    ///
    /// A vCPU that touches the range meanwhile comes again and again until `change` is over, so that should be soon. `change` must
    /// not call this VM.
    pub fn invalidate_hva_around<R>(
        &self,
        hva: Range<Hva>,
        change: impl FnOnce() -> R,
    ) -> (u64, R) {
        let mut writer = self.shared.writer();
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

    /// Unmaps everything, fast: an empty root takes the place of the old, and vCPUs fault into it at once while the old tables are
    /// taken apart. Gives how many pages of 4 KiB were mapped. What is dirty by the entries' bits goes into the logs.
    pub fn zap_all(&self) -> u64 {
        let mut writer = self.shared.writer();
        let Writer { slots, worker, .. } = &mut *writer;
        let logs = backed_by(slots, &(Hva(0)..Hva(u64::MAX)), &mut Vec::new());
        match worker.zap_all(&logs) {
            Ok(zapped) => zapped,
            Err(_) => unreachable!("the platform aborts where there is no memory"),
        }
    }

    /// Whether the guest has used, since this was last cleared, a page whose host memory any byte of `hva` lies in; gives how many
    /// such pages were used. A page that is mapped by a larger one counts with all that this one maps. With `clear`, they
    /// count as unused from now on. Takes no lock that a fault needs, and flushes nothing: a use through a translation
    /// that a vCPU still has in its TLB is not seen.
    pub fn age_hva(&self, hva: Range<Hva>, clear: bool) -> u64 {
        let mut writer = self.shared.writer();
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

/// How many ranges there is room for between calls: most calls are about one slot.
const RANGES_KEPT: usize = 64;

/// Makes `ranges` the frames whose memory any byte of `hva` lies in, slot by slot; gives the logs of those of the slots that are
/// logged.
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
            logs.extend(Some(SlotLog::of(slot)).filter(SlotLog::is_on));
        }
    });
    SlotLogs(logs)
}
