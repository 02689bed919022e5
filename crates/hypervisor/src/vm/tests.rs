#![expect(unsafe_code, reason = "puts test memory into slots")]
//! Zapped tables that a guard keeps while the call that zaps them returns.

use crate::{Exit, HostMemory, Region, SlotFlags, VcpuCore, Vm, VmConfig};
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use pageferry_addr::{Gfn, GfnRange, Gpa, Hva};
use pageferry_testkit::LIMIT;
use std::sync::{Arc, mpsc};

#[repr(align(4096))]
struct Page([AtomicU64; 512]);

struct Pages(Box<[Page]>);

// SAFETY: the pages live as long as the value and hold only atomics. Their provenance is exposed.
unsafe impl HostMemory for Pages {
    fn hva_range(&self) -> Range<Hva> {
        let start = self.0.as_ptr().expose_provenance() as u64;
        Hva(start)..Hva(start + self.0.len() as u64 * PAGE)
    }
}

const PAGE: u64 = 4096;
/// The number of bytes that a table of 4 KiB pages maps.
const TABLE: u64 = 512 * PAGE;
/// The number of slots. Each fills one table.
const SLOTS: u64 = 32;
const DATA: u64 = 0x4000_0000;

/// `ld a0, 0(a1); add a1, a1, a2`, then `bltu a1, a3, -8; wfi`.
const CODE: [u64; 2] = [0x00c5_85b3_0005_b503, 0x1050_0073_fed5_ece3];
/// The address of the WFI.
const IDLE: u64 = 12;

/// A VM with one vCPU. Slot 0 is the code. The other slots have the same memory.
fn new() -> (Vm, VcpuCore, Range<Hva>) {
    let page = |_| Page([const { AtomicU64::new(0) }; 512]);
    let pages = Arc::new(Pages((0..513).map(page).collect()));
    for (word, code) in pages.0[512].0.iter().zip(CODE) {
        word.store(code, Ordering::Relaxed);
    }
    let vm = Vm::new(VmConfig::default());
    let all = pages.hva_range();
    let data = all.start..Hva(all.start.0 + TABLE);
    let code = data.end..all.end;
    let set = |slot, gpa, hva: &Range<Hva>| {
        let region = Region {
            slot,
            flags: SlotFlags::EMPTY,
            gpa: Gpa(gpa),
            size: hva.end.0 - hva.start.0,
            hva: hva.start,
            memory: Some(Arc::clone(&pages) as Arc<dyn HostMemory>),
            userfault: None,
        };
        vm.set_user_memory_region2(region).unwrap();
    };
    set(0, 0, &code);
    for slot in 0..SLOTS {
        set(slot as u16 + 1, DATA + slot * TABLE, &data);
    }
    let vcpu = vm.create_vcpu(0).unwrap();
    (vm, vcpu, data)
}

/// Zaps the tables of all slots under a guard, which ends after the call that zaps them.
fn zap_under_a_guard(vm: &Vm, vcpu: &mut VcpuCore, data: &Range<Hva>) {
    vcpu.hart_mut().set_pc(0).unwrap();
    for (register, value) in [(11, DATA), (12, TABLE), (13, DATA + SLOTS * TABLE)] {
        vcpu.hart_mut().set_x(register, value);
    }
    assert_eq!(vcpu.run(), Exit::Halted);
    let (pinned, wait_for_guard) = mpsc::channel();
    let (release, wait_for_release) = mpsc::channel();
    std::thread::scope(|scope| {
        let mut worker = vm.state.mmu.worker();
        scope.spawn(move || {
            let code = GfnRange::new(Gfn(0), 1).unwrap();
            worker.scan(code, |_, _| {
                pinned.send(()).unwrap();
                wait_for_release.recv_timeout(LIMIT).unwrap();
            });
        });
        wait_for_guard.recv_timeout(LIMIT).unwrap();
        assert_eq!(vm.invalidate_hva(data.clone()), SLOTS);
        assert_eq!(vm.waiting_tables(), SLOTS, "the guard keeps them");
        release.send(()).unwrap();
    });
    assert_eq!(vm.waiting_tables(), SLOTS);
}

#[test]
fn an_idle_vcpu_frees_tables_that_a_guard_kept() {
    let (vm, mut vcpu, data) = new();
    for exit in [Exit::Halted, Exit::Kicked] {
        zap_under_a_guard(&vm, &mut vcpu, &data);
        vcpu.hart_mut().set_pc(IDLE).unwrap();
        if exit == Exit::Kicked {
            vcpu.kick_handle().kick();
        }
        assert_eq!(vcpu.run(), exit);
        assert_eq!(vm.waiting_tables(), 0, "{exit:?}");
    }
}
