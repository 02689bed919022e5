#![expect(
    unsafe_code,
    reason = "implements the contract of the memory that tables are made of"
)]
//! Tables by the crate, in guest memory, and the fault path of a vCPU that runs on them.

use crate::host::Host;
use crate::layout::{PINNED_GVA, TABLES, pinned};
use crate::vcpu::{Answer, PageFault, Space};
use crate::vm::Vm;
use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_tdp::format::{Access, MemoryType, Npt4, Writes};
use pageferry_tdp::{Entry, Fault, Flush, How, Log, Mmu, Platform, Refused, Target, Worker};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a freed table is filled with: present, with reserved bits. A processor that still walks it faults, and says so.
const FREED: u64 = u64::MAX;

/// Guest memory for tables, and the flush.
pub(crate) struct GuestTables {
    vm: Arc<Vm>,
    free: Mutex<Vec<Pfn>>,
    /// Each flush the MMU has asked for.
    asked: Mutex<Vec<Flush>>,
}

impl GuestTables {
    fn new(vm: &Arc<Vm>) -> Self {
        Self {
            vm: Arc::clone(vm),
            free: Mutex::new(TABLES.rev().map(Pfn).collect()),
            asked: Mutex::new(Vec::new()),
        }
    }

    fn free(&self) -> MutexGuard<'_, Vec<Pfn>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many frames are in use.
    pub(crate) fn in_use(&self) -> u64 {
        TABLES.end - TABLES.start - self.free().len() as u64
    }

    /// The flushes that were asked for since the last call.
    pub(crate) fn take_flushes(&self) -> Vec<Flush> {
        std::mem::take(&mut self.asked.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

// SAFETY: 1. Frames of the VM's RAM, 4 KiB each and so aligned; zeroed here; on the list once. The mapping lives as long
// as the VM, which `self` holds. 2. The offset in RAM, and back. 3. `Vm::flush`. 4. Each `MmuSpace` holds the MMU, and a
// vCPU is inside the guest only in a call that borrows one.
unsafe impl Platform for GuestTables {
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>> {
        assert_eq!(entries, 512, "all tables of this format are one frame");
        let frame = self.free().pop()?;
        for word in 0..512 {
            self.vm
                .ram
                .word((frame.0 << 12) + word * 8)
                .store(0, Ordering::Relaxed);
        }
        Some(self.pointer(frame))
    }

    unsafe fn free_table(&self, table: NonNull<Entry>, entries: usize) {
        assert_eq!(entries, 512);
        let frame = self.frame(table);
        for word in 0..512 {
            let word = self.vm.ram.word((frame.0 << 12) + word * 8);
            let was = word.swap(FREED, Ordering::Relaxed);
            assert_ne!(was, FREED, "{frame:?} is freed twice");
        }
        self.free().push(frame);
    }

    fn frame(&self, table: NonNull<Entry>) -> Pfn {
        Pfn(self.vm.ram.gpa(table) >> 12)
    }

    fn pointer(&self, table: Pfn) -> NonNull<Entry> {
        assert!(TABLES.contains(&table.0), "{table:?} is no table");
        self.vm.ram.words(table.0 << 12, 512)
    }

    fn flush(&self, what: Flush) {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.push(what);
        drop(asked);
        self.vm.flush();
    }

    fn relax(&self) {
        std::thread::yield_now();
    }
}

/// The MMU under test.
pub(crate) type GuestMmu = Mmu<Npt4, GuestTables>;
/// A worker of it.
pub(crate) type GuestWorker = Worker<Npt4, GuestTables>;

/// What is behind guest frames: the part of a memory slot.
pub(crate) trait Slot: Sync {
    /// What may be mapped for an access to `gfn`, if anything.
    fn target(&self, gfn: Gfn, access: Access) -> Option<Target>;
}

impl<F: Fn(Gfn, Access) -> Option<Target> + Sync> Slot for F {
    fn target(&self, gfn: Gfn, access: Access) -> Option<Target> {
        self(gfn, access)
    }
}

/// Consecutive frames behind consecutive guest frames.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear {
    pub(crate) range: GfnRange,
    pub(crate) pfn: Pfn,
    /// The level of the largest page its backing allows.
    pub(crate) level: u32,
}

impl Linear {
    pub(crate) fn new(gfn: u64, pages: u64, pfn: u64, level: u32) -> Self {
        Self {
            range: GfnRange::new(Gfn(gfn), pages).expect("a range of frames"),
            pfn: Pfn(pfn),
            level,
        }
    }

    /// The guest-virtual address of its first page.
    pub(crate) fn gva(&self) -> u64 {
        self.range.start().gpa().0
    }

    /// The guest-physical address behind its first page.
    pub(crate) fn gpa(&self) -> u64 {
        self.pfn.0 << 12
    }

    /// What may be mapped at `gfn`: everything, by the largest page.
    pub(crate) fn everything(&self, gfn: Gfn) -> Option<Target> {
        let offset = gfn.checked_offset_from(self.range.start())?;
        let pfn = Pfn(self.pfn.0 + offset);
        self.range.contains(gfn).then(|| Target {
            pfn,
            level: pageferry_tdp::largest_level::<Npt4>(self.range, gfn, pfn, self.level),
            access: Access::ALL,
            writes: Writes::Allowed,
            memory: MemoryType::WriteBack,
        })
    }
}

impl Slot for Linear {
    fn target(&self, gfn: Gfn, _: Access) -> Option<Target> {
        self.everything(gfn)
    }
}

/// How many faults a vCPU took, by what they came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    pub(crate) installed: u64,
    pub(crate) upgraded: u64,
    pub(crate) spurious: u64,
    /// Of the upgraded: without the lock.
    pub(crate) fast: u64,
    /// Refused and tried again.
    pub(crate) again: u64,
}

/// A vCPU's side of the MMU.
pub(crate) struct MmuSpace<'s, S, L> {
    pub(crate) worker: GuestWorker,
    pub(crate) slot: &'s S,
    pub(crate) log: &'s L,
    pub(crate) faults: Faults,
    /// How often the last fault was spurious in a row.
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

    /// The faults since the last call.
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

/// A VM and an empty MMU for it; `None` where there is no KVM.
pub(crate) fn vm_and_mmu() -> Option<(Arc<Vm>, Arc<GuestMmu>)> {
    let vm = Vm::new()?;
    let mmu = Mmu::new(GuestTables::new(&vm)).expect("a frame for the root");
    Some((vm, mmu))
}

/// Leaves by level, without the pinned pages if `pins`.
pub(crate) fn leaves(mmu: &GuestMmu, pins: bool) -> [u64; 3] {
    let all = mmu.stats().leaves;
    let pinned = if pins { pinned().count() as u64 } else { 0 };
    [all[0] - pinned, all[1], all[2]]
}

/// Frames that were written, or can be without being noticed.
pub(crate) struct DirtyLog {
    range: GfnRange,
    is_on: bool,
    bits: Vec<AtomicU64>,
}

impl DirtyLog {
    /// A log that keeps writable pages small.
    pub(crate) fn new(range: GfnRange) -> Self {
        Self::with(range, true)
    }

    /// One that does not, but notes what it is told.
    pub(crate) fn off(range: GfnRange) -> Self {
        Self::with(range, false)
    }

    fn with(range: GfnRange, is_on: bool) -> Self {
        let words = range.pages().div_ceil(64);
        Self {
            range,
            is_on,
            bits: (0..words).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Takes out what was noted: frames of the range, counted from its start, in order.
    pub(crate) fn take(&self) -> Vec<u64> {
        let mut found = Vec::new();
        for (number, word) in (0..).zip(&self.bits) {
            let bits = word.swap(0, Ordering::AcqRel);
            found.extend(
                (0..64)
                    .filter(|bit| bits >> bit & 1 != 0)
                    .map(|bit| number * 64 + bit),
            );
        }
        found
    }
}

impl Log for DirtyLog {
    fn is_on(&self) -> bool {
        self.is_on
    }

    fn dirtied(&self, gfn: Gfn, pages: u64) {
        // Pinned pages are written as well; they have no slot.
        let dirtied = GfnRange::new(gfn, pages).expect("a range of frames");
        let Some(part) = dirtied.intersection(self.range) else {
            return;
        };
        for gfn in part.iter() {
            let page = gfn.0 - self.range.start().0;
            self.bits[page as usize / 64].fetch_or(1 << (page % 64), Ordering::AcqRel);
        }
    }
}

/// Whether the host's processors may set accessed bits of pages that the program did not use: those that walk the tables
/// themselves do so while they speculate. Dirty bits are exact on all.
pub(crate) const fn speculates(host: &Host) -> bool {
    host.second_level_paging
}

const _: () = assert!(PINNED_GVA >> 46 == 1, "tests use addresses below 2^46");
