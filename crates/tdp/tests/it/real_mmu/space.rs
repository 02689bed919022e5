//! The fault path of a vCPU that runs on the crate's tables.

use super::layout::pinned;
use super::slot::Slot;
use super::tables::{GuestMmu, GuestWorker};
use super::vcpu::{Answer, PageFault, Space};
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{Access, MemoryType, Writes};
use pageferry_tdp::{Fault, How, Log, Refused, Target};
use std::sync::Arc;

/// The number of faults of a vCPU, by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    pub(crate) installed: u64,
    pub(crate) upgraded: u64,
    pub(crate) spurious: u64,
    /// The upgraded ones that needed no lock.
    pub(crate) fast: u64,
    /// Refused and retried.
    pub(crate) again: u64,
}

/// A vCPU's side of the MMU.
pub(crate) struct MmuSpace<'s, S, L> {
    pub(crate) worker: GuestWorker,
    pub(crate) slot: &'s S,
    pub(crate) log: &'s L,
    pub(crate) faults: Faults,
    /// The length of the current sequence of spurious faults.
    stuck: (Option<PageFault>, u32),
}

impl<'s, S: Slot, L: Log> MmuSpace<'s, S, L> {
    pub(crate) fn new(mmu: &Arc<GuestMmu>, slot: &'s S, log: &'s L) -> Self {
        Self {
            worker: mmu.worker(),
            slot,
            log,
            faults: Faults::default(),
            stuck: (None, 0),
        }
    }

    /// Takes the faults since the last call.
    pub(crate) fn take_faults(&mut self) -> Faults {
        std::mem::take(&mut self.faults)
    }

    fn pin(&mut self, gfn: Gfn, pfn: Pfn, memory: MemoryType) {
        let access = Access::ALL;
        let target = Target {
            pfn,
            level: 1,
            access,
            writes: Writes::Allowed,
            memory,
        };
        loop {
            let ticket = self.worker.ticket();
            match self
                .worker
                .fault(ticket, Fault { gfn, access }, target, &())
            {
                Ok(_) => return,
                Err(Refused::Excluded) => self.worker.wait(),
                Err(Refused::Invalidated) => {}
                Err(why) => panic!("{gfn:?} is not pinned: {why}"),
            }
        }
    }

    fn count(&mut self, how: How, fault: PageFault) {
        match how {
            How::Installed => self.faults.installed += 1,
            How::Upgraded => self.faults.upgraded += 1,
            How::Spurious => self.faults.spurious += 1,
        }
        let times = match self.stuck {
            (Some(last), times) if last == fault && how == How::Spurious => times + 1,
            _ => 0,
        };
        assert!(
            times < 1000,
            "{fault:x?} comes again and again, though it is mapped"
        );
        self.stuck = (Some(fault), times);
    }
}

impl<S: Slot, L: Log> Space for MmuSpace<'_, S, L> {
    fn root(&mut self) -> Pfn {
        loop {
            let root = self.worker.mmu().root();
            for (gfn, pfn, memory) in pinned() {
                self.pin(gfn, pfn, memory);
            }
            if root == self.worker.mmu().root() {
                return root;
            }
        }
    }

    fn fault(&mut self, page_fault: PageFault) -> Answer {
        let strange = page_fault.error & (PageFault::RESERVED | PageFault::USER);
        assert_eq!(strange, PageFault::USER, "{page_fault:x?}");
        let fault = Fault {
            gfn: page_fault.gfn(),
            access: page_fault.access(),
        };
        if let Some(mapped) = self.worker.fast_fault(fault, self.log) {
            self.faults.fast += u64::from(mapped.how == How::Upgraded);
            self.count(mapped.how, page_fault);
            return Answer::Retry;
        }
        loop {
            let ticket = self.worker.ticket();
            let Some(target) = self.slot.target(fault.gfn, fault.access) else {
                return Answer::Abandon;
            };
            match self.worker.fault(ticket, fault, target, self.log) {
                Ok(mapped) => {
                    assert!(mapped.level <= target.level);
                    self.count(mapped.how, page_fault);
                    return Answer::Retry;
                }
                Err(Refused::Excluded) => self.worker.wait(),
                Err(Refused::Invalidated) => std::thread::yield_now(),
                Err(Refused::Denied) => return Answer::Abandon,
                Err(why) => panic!("{page_fault:x?}: {why}"),
            }
            self.faults.again += 1;
        }
    }
}
