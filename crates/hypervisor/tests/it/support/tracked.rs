//! One vCPU, memory with write tracking, and all ways to store to it.

use crate::support::fleet::{LargeRam, dirty_log, named, set};
use crate::support::vm::{HostRam, PAGE, asm::*};
use pageferry_addr::Gpa;
use pageferry_hypervisor::hart::Access;
use pageferry_hypervisor::{Exit, HostMemory, Region, SlotFlags, VcpuCore, Vm, VmConfig};
use std::sync::Arc;

pub(crate) const MEMORY: u64 = 0x4000_0000;
pub(crate) const ELSEWHERE: u64 = 0x8000_0000;
/// A value without zero bytes. Memory is zero, so each store below changes it.
pub(crate) const VALUE: u64 = 0x0101_0101_0101_0101;

pub(crate) const LOAD: u64 = 0;
/// Programs that store `VALUE`, in a0, to the address in a1.
pub(crate) const STORES: [(&str, u64); 6] = [
    ("sd", 64),
    ("sb", 128),
    ("amoswap.d", 192),
    ("amoor.w", 256),
    ("lr.d, sc.d", 320),
    ("misaligned sd", 384),
];
pub(crate) const SD: u64 = STORES[0].1;

pub(crate) fn code() -> Arc<HostRam> {
    let code = HostRam::new(1);
    code.code(LOAD, &[ld(A2, A1, 0), WFI]);
    let stores: [&[u32]; 6] = [
        &[sd(A0, A1, 0), WFI],
        &[sb(A0, A1, 5), WFI],
        &[atomic(AMOSWAP, D, A2, A1, A0), WFI],
        &[atomic(AMOOR, W, A2, A1, A0), WFI],
        &[
            atomic(LR, D, A2, A1, 0),
            atomic(SC, D, A3, A1, A0),
            bne(A3, X0, -8),
            WFI,
        ],
        &[sd(A0, A1, 3), WFI],
    ];
    for ((_, at), store) in STORES.iter().zip(stores) {
        code.code(*at, store);
    }
    code
}

/// One vCPU, and memory in slot 1.
pub(crate) struct One<M> {
    pub(crate) vm: Vm,
    pub(crate) vcpu: VcpuCore,
    pub(crate) ram: Arc<M>,
    pub(crate) region: Region,
}

impl<M: HostMemory + 'static> One<M> {
    pub(crate) fn of(config: VmConfig, ram: Arc<M>, region: Region) -> Self {
        let vm = Vm::new(config);
        vm.set_user_memory_region2(code().region(0, 0, 0, 1))
            .unwrap();
        vm.set_user_memory_region2(region.clone()).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        Self {
            vm,
            vcpu,
            ram,
            region,
        }
    }

    /// Runs a program with an address in the memory.
    pub(crate) fn run(&mut self, program: u64, offset: u64) -> Exit {
        set(
            &mut self.vcpu,
            program,
            &[(A0, VALUE), (A1, self.region.gpa.0 + offset)],
        );
        self.vcpu.run()
    }

    pub(crate) fn store(&mut self, pages: impl IntoIterator<Item = u64>) {
        for page in pages {
            let exit = self.run(SD, page * PAGE);
            assert_eq!(exit, Exit::Halted, "page {page}");
        }
    }

    pub(crate) fn load(&mut self, pages: impl IntoIterator<Item = u64>) {
        for page in pages {
            let exit = self.run(LOAD, page * PAGE);
            assert_eq!(exit, Exit::Halted, "page {page}");
        }
    }

    /// Checks that a store to each page leaves the guest.
    #[track_caller]
    pub(crate) fn refuses(&mut self, pages: impl IntoIterator<Item = u64>) {
        for page in pages {
            let exit = self.run(SD, page * PAGE);
            assert_eq!(exit, self.tracked(page), "page {page}");
        }
    }

    /// The exit of a store to a tracked page.
    pub(crate) fn tracked(&self, page: u64) -> Exit {
        Exit::MemoryFault {
            gpa: Gpa(self.region.gpa.0 + page * PAGE),
            size: PAGE,
            access: Access::Store,
            userfault: false,
            write_tracked: true,
        }
    }

    pub(crate) fn track(&self, pages: std::ops::Range<u64>) -> u64 {
        self.vm.track_writes(1, pages).unwrap()
    }

    pub(crate) fn untrack(&self, pages: std::ops::Range<u64>) -> u64 {
        self.vm.untrack_writes(1, pages).unwrap()
    }

    pub(crate) fn set(&mut self, change: impl FnOnce(&mut Region)) {
        change(&mut self.region);
        self.vm
            .set_user_memory_region2(self.region.clone())
            .unwrap();
    }

    pub(crate) fn log(&mut self, on: bool) {
        let flags = if on {
            SlotFlags::LOG_DIRTY_PAGES
        } else {
            SlotFlags::EMPTY
        };
        self.set(|region| region.flags = flags);
    }

    pub(crate) fn fetch(&self) -> Vec<u64> {
        named(&dirty_log(&self.vm, 1, self.region.size / PAGE)).collect()
    }
}

pub(crate) fn one_of(config: VmConfig, pages: u64) -> One<HostRam> {
    let ram = HostRam::new(pages as usize);
    let region = ram.region(1, MEMORY, 0, pages);
    One::of(config, ram, region)
}

pub(crate) fn one(pages: u64) -> One<HostRam> {
    one_of(VmConfig::default(), pages)
}

/// A slot of three pages of 2 MiB.
pub(crate) fn large() -> One<LargeRam> {
    let ram = LargeRam::new(3);
    let region = ram.region(1, MEMORY, SlotFlags::EMPTY);
    One::of(VmConfig::default(), ram, region)
}

/// The numbers of leaves of 4 KiB and of 2 MiB, without the page of the code.
pub(crate) fn leaves<M>(one: &One<M>) -> [u64; 2] {
    let [small, large, _] = one.vm.mapped_leaves();
    [small - 1, large]
}
