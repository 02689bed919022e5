//! A small VM for tests: host memory that a slot may point at, and programs in it.
#![expect(unsafe_code, reason = "puts test memory into slots")]

pub(crate) use crate::support::asm;

use pageferry_addr::{Gpa, Hva};
use pageferry_hypervisor::{HostMemory, Memslots, Region, SlotFlags, VcpuCore, Vm, VmConfig};
use pageferry_testkit::Stop;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) const PAGE: u64 = 4096;

#[repr(align(4096))]
struct Page([AtomicU64; 512]);

/// Host memory of some pages, all zero.
pub(crate) struct HostRam(Box<[Page]>);

// SAFETY: 1. The box owns the pages and keeps them as long as it lives. 2. `hva_range` exposes
// their provenance. 3. The tests access them by atomics only.
unsafe impl HostMemory for HostRam {
    fn hva_range(&self) -> Range<Hva> {
        let start = self.0.as_ptr().expose_provenance() as u64;
        Hva(start)..Hva(start + self.0.len() as u64 * PAGE)
    }
}

impl HostRam {
    pub(crate) fn new(pages: usize) -> Arc<Self> {
        let page = |_| Page([const { AtomicU64::new(0) }; 512]);
        Arc::new(Self((0..pages).map(page).collect()))
    }

    pub(crate) fn hva(&self) -> Hva {
        self.hva_range().start
    }

    /// The doubleword at byte `offset`.
    pub(crate) fn word(&self, offset: u64) -> &AtomicU64 {
        &self.0[(offset / PAGE) as usize].0[(offset % PAGE / 8) as usize]
    }

    pub(crate) fn get(&self, offset: u64) -> u64 {
        self.word(offset).load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, offset: u64, value: u64) {
        self.word(offset).store(value, Ordering::Relaxed);
    }

    /// Puts `value` into the doubleword at `offset`, and returns the old value. No guest may access
    /// the word during the call.
    pub(crate) fn replace(&self, offset: u64, value: u64) -> u64 {
        let word = self.word(offset);
        // Plain accesses, so that ThreadSanitizer checks that they are ordered with all accesses of
        // guests.
        #[cfg(pageferry_tsan)]
        // SAFETY: no other thread accesses the word, unless the hypervisor is wrong.
        // ThreadSanitizer then reports it.
        return unsafe { word.as_ptr().replace(value) };
        #[cfg(not(pageferry_tsan))]
        word.swap(value, Ordering::Relaxed)
    }

    pub(crate) fn code(&self, offset: u64, code: &[u32]) {
        for (i, pair) in code.chunks(2).enumerate() {
            let high = pair.get(1).copied().unwrap_or(0);
            self.set(
                offset + 8 * i as u64,
                u64::from(pair[0]) | u64::from(high) << 32,
            );
        }
    }

    /// Slot `slot` at `gpa` over `pages` pages from page `first`.
    pub(crate) fn region(self: &Arc<Self>, slot: u16, gpa: u64, first: u64, pages: u64) -> Region {
        Region {
            slot,
            flags: SlotFlags::EMPTY,
            gpa: Gpa(gpa),
            size: pages * PAGE,
            hva: Hva(self.hva().0 + first * PAGE),
            memory: Some(Arc::clone(self) as Arc<dyn HostMemory>),
            userfault: None,
        }
    }
}

/// A VM whose slot 0 has all of `ram` at address 0.
pub(crate) fn vm(ram: &Arc<HostRam>) -> Vm {
    vm_of(ram)
}

/// The same, with the scheme `M`.
pub(crate) fn vm_of<M: Memslots>(ram: &Arc<HostRam>) -> Vm<M> {
    let vm = Vm::with_memslots(VmConfig::default());
    vm.set_user_memory_region2(ram.region(0, 0, 0, ram.0.len() as u64))
        .unwrap();
    vm
}

/// A vCPU that starts at `pc`.
pub(crate) fn vcpu<M: Memslots>(vm: &Vm<M>, id: u32, pc: u64) -> VcpuCore<M> {
    let mut vcpu = vm.create_vcpu(id).unwrap();
    vcpu.hart_mut().set_pc(pc).unwrap();
    vcpu
}

/// Stops a test's threads and kicks its vCPUs when dropped, also during a panic.
pub(crate) struct StopOnDrop<'a>(
    pub(crate) &'a Stop,
    pub(crate) Vec<pageferry_hypervisor::KickHandle>,
);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop();
        self.1
            .iter()
            .for_each(pageferry_hypervisor::KickHandle::kick);
    }
}
