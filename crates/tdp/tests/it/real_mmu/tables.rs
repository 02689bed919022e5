#![expect(
    unsafe_code,
    reason = "implements the contract of the memory that tables are made of"
)]
//! Guest memory for tables, and the MMU that uses it.
//!
//! A freed table is filled with entries at which a processor faults with a distinct error code.

use super::layout::{TABLES, pinned};
use super::vm::Vm;
use pageferry_addr::Pfn;
use pageferry_tdp::format::Npt4;
use pageferry_tdp::{Entry, Flush, Mmu, Platform, Worker};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The contents of a freed table: present, with reserved bits. A processor that still walks it
/// faults, and reports that.
const FREED: u64 = u64::MAX;

/// Guest memory for tables, and the flush.
pub(crate) struct GuestTables {
    vm: Arc<Vm>,
    free: Mutex<Vec<Pfn>>,
    /// Each requested flush.
    asked: Mutex<Vec<Flush>>,
    /// Whether a new root reaches the vCPUs late.
    late_roots: AtomicBool,
}

impl GuestTables {
    fn new(vm: &Arc<Vm>) -> Self {
        Self {
            vm: Arc::clone(vm),
            free: Mutex::new(TABLES.rev().map(Pfn).collect()),
            asked: Mutex::new(Vec::new()),
            late_roots: AtomicBool::new(false),
        }
    }

    /// Makes a new root reach the vCPUs late from now on, so that other threads run in between.
    pub(crate) fn flush_roots_late(&self) {
        self.late_roots.store(true, Ordering::Relaxed);
    }

    fn free(&self) -> MutexGuard<'_, Vec<Pfn>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of frames in use.
    pub(crate) fn in_use(&self) -> u64 {
        TABLES.end - TABLES.start - self.free().len() as u64
    }

    /// Takes the requested flushes since the last call.
    pub(crate) fn take_flushes(&self) -> Vec<Flush> {
        std::mem::take(&mut self.asked.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

// SAFETY: 1. Frames of the VM's RAM, 4 KiB each and so aligned, zeroed here, on the list once. The
// mapping lives as long as the VM, which `self` holds. 2. The offset in RAM, and back. 3.
// `Vm::flush`. 4. Each `MmuSpace` holds the MMU, and a vCPU is inside the guest only in a call that
// borrows one.
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
        if what == Flush::Roots && self.late_roots.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(20));
        }
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

/// A VM and an empty MMU for it. `None` without KVM.
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
