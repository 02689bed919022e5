//! Tables that a call cuts off are freed before it returns, so that an idle VM does not keep them.

use crate::support::fleet::LARGE;
use crate::support::programs::{self, STORE, begin};
use crate::support::vm::{HostRam, PAGE};
use pageferry_hypervisor::{Exit, HostMemory, Region, VcpuCore, Vm, VmConfig};
use std::sync::Arc;

const MEMORY: u64 = 0x4000_0000;
const TABLE: u64 = LARGE * PAGE;
/// The number of slots. Each fills one table of small pages.
const SLOTS: u64 = 40;

struct Test {
    vm: Vm,
    vcpu: VcpuCore,
    ram: Arc<HostRam>,
    /// The bytes of the tables without those of the slots.
    others: u64,
}

impl Test {
    /// All slots have the same host memory.
    fn new() -> Self {
        let vm = Vm::new(VmConfig::default());
        vm.set_user_memory_region2(programs::code().region(0, 0, 0, 1))
            .unwrap();
        let ram = HostRam::new(LARGE as usize);
        for slot in 0..SLOTS {
            let region = ram.region(slot as u16 + 1, MEMORY + slot * TABLE, 0, LARGE);
            vm.set_user_memory_region2(region).unwrap();
        }
        let vcpu = vm.create_vcpu(0).unwrap();
        let mut test = Self {
            vm,
            vcpu,
            ram,
            others: 0,
        };
        test.map();
        test.others = test.vm.table_bytes() - SLOTS * PAGE;
        test
    }

    /// Maps a page of each slot.
    fn map(&mut self) {
        for slot in 0..SLOTS {
            let gpa = MEMORY + slot * TABLE;
            begin(&mut self.vcpu, STORE, 0, gpa, gpa + PAGE);
            assert_eq!(self.vcpu.run(), Exit::Halted);
        }
    }

    #[track_caller]
    fn expect_freed(&self, slots: u64) {
        assert_eq!(self.vm.table_bytes(), self.others + (SLOTS - slots) * PAGE);
        assert_eq!(self.vm.waiting_tables(), 0);
    }
}

#[test]
fn a_notifier_leaves_no_table_waiting() {
    let mut test = Test::new();
    for _ in 0..3 {
        let unmapped = test.vm.invalidate_hva(test.ram.hva_range());
        assert_eq!(unmapped, SLOTS);
        test.expect_freed(SLOTS);
        test.map();
    }
}

#[test]
fn a_deleted_slot_leaves_no_table_waiting() {
    let test = Test::new();
    for slot in 1..=SLOTS {
        let region = Region::delete(slot as u16);
        test.vm.set_user_memory_region2(region).unwrap();
        test.expect_freed(slot);
    }
}

#[test]
fn zapping_everything_leaves_no_table_waiting() {
    let mut test = Test::new();
    assert_eq!(test.vm.zap_all(), SLOTS + 1);
    assert_eq!(test.vm.waiting_tables(), 0);
    test.map();
    test.expect_freed(0);
}
