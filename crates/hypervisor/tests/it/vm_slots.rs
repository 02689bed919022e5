//! Changes of memory slots, also under running vCPUs.

use crate::support::vm::{HostRam, PAGE, StopOnDrop, asm::*, vcpu, vm};
use pageferry_addr::{Gfn, Gpa, Hva, RamPage};
use pageferry_hypervisor::{
    Exit, HostMemory, Limits, Region, SlotError, SlotFlags, UserfaultBits, Vm, VmConfig, VmError,
};
use pageferry_testkit::{Stop, wait_until};
use pageferry_userfault::PageBitmap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const DEVICE: u64 = 0x1000_0000;

/// Slots with the default limits lie where tables of four and five levels reach, those of this
/// hypervisor included.
#[test]
fn tables_reach_every_slot_of_the_default_limits() {
    use pageferry_tdp::format::{
        Arm64Ipa48, EntryLayout, Ept4, Ept4NoAd, Ept5, Npt4, Npt5, Sv48x4Svade, Sv48x4Svadu,
        Sv57x4Svade, Sv57x4Svadu,
    };
    const fn reach<F: EntryLayout>() -> Gfn {
        F::GFN_LIMIT
    }
    let limit = Limits::default().gfn_limit;
    for reach in [
        reach::<Ept4>(),
        reach::<Ept4NoAd>(),
        reach::<Ept5>(),
        reach::<Npt4>(),
        reach::<Npt5>(),
        reach::<Sv48x4Svadu>(),
        reach::<Sv48x4Svade>(),
        reach::<Sv57x4Svadu>(),
        reach::<Sv57x4Svade>(),
        reach::<Arm64Ipa48<true>>(),
    ] {
        assert!(limit <= reach, "{limit:?} is behind {reach:?}");
    }
    let vm = Vm::new(VmConfig::default());
    let bits = vm.capabilities().gpa_bits;
    assert_eq!(vm.slot_table().limits().gfn_limit, Gfn(1 << (bits - 12)));
}

#[test]
fn requests_that_break_a_rule_are_refused_and_change_nothing() {
    let ram = HostRam::new(8);
    let vm = Vm::new(VmConfig {
        max_slots: 4,
        ..VmConfig::default()
    });
    vm.set_user_memory_region2(ram.region(0, 0, 0, 4)).unwrap();
    let set = |change: &dyn Fn(&mut Region)| {
        let mut region = ram.region(1, 0x10_0000, 4, 4);
        change(&mut region);
        vm.set_user_memory_region2(region).unwrap_err()
    };
    assert!(matches!(
        set(&|r| r.slot = 4),
        VmError::Slot(SlotError::IdTooLarge { id: 4, .. })
    ));
    assert!(matches!(
        set(&|r| r.gpa = Gpa(0)),
        VmError::Slot(SlotError::Overlap { other: 0, .. })
    ));
    assert!(matches!(
        set(&|r| r.size += 1),
        VmError::Slot(SlotError::UnalignedSize { .. })
    ));
    assert!(matches!(
        set(&|r| r.gpa = Gpa((1 << 50) - PAGE)),
        VmError::Slot(SlotError::GpaTooHigh { .. })
    ));
    for flags in [SlotFlags::GUEST_MEMFD, SlotFlags(1 << 9)] {
        assert!(matches!(
            set(&|r| r.flags = flags),
            VmError::Slot(SlotError::UnknownFlags { unknown }) if unknown == flags
        ));
    }
    assert!(matches!(
        set(&|r| *r = Region::delete(3)),
        VmError::Slot(SlotError::NothingToDelete { .. })
    ));
    // The given memory must hold the whole range.
    assert!(matches!(
        set(&|r| r.memory = None),
        VmError::NotOwned { memory: None, .. }
    ));
    for flags in [SlotFlags::EMPTY, SlotFlags::LOG_DIRTY_PAGES] {
        // The memory's pages are 0 to 7.
        for (first, pages) in [(5, 4), (-1, 4), (8, 1), (0, 9), (0, 1 << 30)] {
            let refused = set(&|r| {
                r.flags = flags;
                r.hva = Hva(ram.hva().0.wrapping_add_signed(first * PAGE as i64));
                r.size = pages * PAGE;
            });
            assert!(
                matches!(
                    refused,
                    VmError::NotOwned {
                        slot: 1,
                        memory: Some(_),
                        ..
                    }
                ),
                "{first}: {refused}"
            );
        }
    }
    assert_eq!(
        set(&|r| r.flags = SlotFlags::USERFAULT),
        VmError::NoUserfaultBitmap(1)
    );
    let bits_from = |first| {
        set(&|r| {
            r.flags = SlotFlags::USERFAULT;
            r.userfault = Some(UserfaultBits {
                bitmap: Arc::new(PageBitmap::new(64 + 3)),
                first,
            });
        })
    };
    for first in [RamPage(64), RamPage(128), RamPage(1 << 63)] {
        let refused = bits_from(first);
        assert!(
            matches!(refused, VmError::UserfaultBitmapTooSmall { pages: 4, .. }),
            "{refused}"
        );
    }
    for first in [RamPage(1), RamPage(63), RamPage(u64::MAX)] {
        let unaligned = VmError::UserfaultBitsUnaligned { slot: 1, first };
        assert_eq!(bits_from(first), unaligned);
    }
    let mut log = [0; 1];
    assert_eq!(vm.get_dirty_log(1, &mut log), Err(VmError::NoSuchSlot(1)));
    assert_eq!(vm.get_dirty_log(0, &mut log), Err(VmError::NoDirtyLog(0)));
    // After all those errors, a valid request succeeds.
    vm.set_user_memory_region2(ram.region(1, 0x10_0000, 4, 4))
        .unwrap();
}

/// An endless loop that stores its count at `a1` and loads it back. `x12` counts rounds.
fn counting(ram: &HostRam) {
    let code = [addi(A2, A2, 1), sd(A2, A1, 0), ld(A3, A1, 0), jal(X0, -12)];
    ram.code(0, &code);
}

#[test]
fn a_slot_deleted_under_a_running_guest_is_out_of_reach_at_once() {
    let ram = HostRam::new(4);
    counting(&ram);
    let vm = vm(&HostRam::new(1));
    vm.set_user_memory_region2(Region::delete(0)).unwrap();
    vm.set_user_memory_region2(ram.region(0, 0, 0, 1)).unwrap();
    let mut vcpu = vcpu(&vm, 0, 0);
    vcpu.hart_mut().set_x(11, DEVICE);
    let kick = vcpu.kick_handle();
    let alarm = Stop::new();
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&alarm, vec![kick]);
        let alarm = &alarm;
        scope.spawn(move || {
            while !alarm.is_stopped() {
                // Without the slot, the guest leaves.
                match vcpu.run() {
                    Exit::MmioRead { gpa, .. } | Exit::MmioWrite { gpa, .. } => {
                        assert_eq!(gpa, Gpa(DEVICE));
                    }
                    Exit::Kicked => {}
                    other => panic!("{other:?}"),
                }
            }
        });
        for round in 0..300 {
            // Two places in host memory, in turns.
            let page = 2 + round % 2;
            vm.set_user_memory_region2(ram.region(1, DEVICE, page, 1))
                .unwrap();
            let start = ram.get(page * PAGE);
            wait_until("the guest to write", || ram.get(page * PAGE) != start);
            vm.set_user_memory_region2(Region::delete(1)).unwrap();
            let end = ram.get(page * PAGE);
            std::thread::yield_now();
            for _ in 0..200 {
                std::hint::spin_loop();
            }
            assert_eq!(
                ram.get(page * PAGE),
                end,
                "round {round}: written after the slot was deleted"
            );
        }
    });
}

#[test]
fn a_slot_moves_with_its_bytes() {
    let ram = HostRam::new(8);
    counting(&ram);
    let vm = vm(&HostRam::new(1));
    vm.set_user_memory_region2(Region::delete(0)).unwrap();
    vm.set_user_memory_region2(ram.region(0, 0, 0, 1)).unwrap();
    // Two pages move by one page, over a part of themselves.
    let place = |at: u64| ram.region(1, DEVICE + at * PAGE, 4, 2);
    vm.set_user_memory_region2(place(0)).unwrap();
    let mut vcpu = vcpu(&vm, 0, 0);
    // The middle frame is in the slot at both places: first as its second page, then as its first.
    vcpu.hart_mut().set_x(11, DEVICE + PAGE);
    let kick = vcpu.kick_handle();
    let alarm = Stop::new();
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&alarm, vec![kick]);
        let alarm = &alarm;
        scope.spawn(move || {
            while !alarm.is_stopped() {
                assert_eq!(vcpu.run(), Exit::Kicked);
            }
        });
        for round in 0..300 {
            let [now, other] = [[5, 4], [4, 5]][round % 2];
            let start = ram.get(now * PAGE);
            wait_until("the guest to write", || ram.get(now * PAGE) != start);
            vm.set_user_memory_region2(place(1 - round as u64 % 2))
                .unwrap();
            let end = ram.get(now * PAGE);
            wait_until("the guest to write elsewhere", || {
                ram.get(other * PAGE) > end
            });
            assert_eq!(
                ram.get(now * PAGE),
                end,
                "round {round}: written at the old place"
            );
        }
    });
}

#[test]
fn a_notifier_unmaps_what_host_memory_backs() {
    let ram = HostRam::new(8);
    ram.code(0, &[sd(A0, A1, 0), WFI]);
    let vm = vm(&ram);
    // Page 5 is in a second slot.
    vm.set_user_memory_region2(ram.region(1, DEVICE, 5, 1))
        .unwrap();
    let mut vcpu = vcpu(&vm, 0, 0);
    for gpa in [4 * PAGE, 5 * PAGE, DEVICE] {
        vcpu.hart_mut().set_pc(0).unwrap();
        vcpu.hart_mut().set_x(11, gpa);
        assert_eq!(vcpu.run(), Exit::Halted);
    }
    assert_eq!(vm.mapped_pages(), 4);
    let page = |i: u64| Hva(ram.hva().0 + i * PAGE);
    assert_eq!(vm.invalidate_hva(page(6)..page(8)), 0);
    assert_eq!(vm.invalidate_hva(Hva(page(6).0 - 1)..page(6)), 2);
    assert_eq!(vm.mapped_pages(), 2);
    // An access faults and maps the page again.
    vcpu.hart_mut().set_pc(0).unwrap();
    assert_eq!(vcpu.run(), Exit::Halted);
    assert_eq!(vm.mapped_pages(), 3);
}

#[test]
fn code_of_a_deleted_slot_runs_no_more() {
    let ram = HostRam::new(4);
    ram.code(0, &[addi(A0, X0, 1), WFI]);
    ram.code(PAGE, &[addi(A0, X0, 2), WFI]);
    let vm = Vm::new(VmConfig::default());
    vm.set_user_memory_region2(ram.region(0, 0, 0, 1)).unwrap();
    let mut vcpu = vcpu(&vm, 0, 0);
    assert_eq!((vcpu.run(), vcpu.hart().x(10)), (Exit::Halted, 1));
    vm.set_user_memory_region2(Region::delete(0)).unwrap();
    vm.set_user_memory_region2(ram.region(0, 0, 1, 1)).unwrap();
    vcpu.hart_mut().set_pc(0).unwrap();
    assert_eq!((vcpu.run(), vcpu.hart().x(10)), (Exit::Halted, 2));
}

/// Host memory that sets a flag when dropped.
struct Owned(Arc<HostRam>, Arc<AtomicBool>);

#[expect(unsafe_code, reason = "wraps test memory")]
// SAFETY: the wrapped memory keeps the contract.
unsafe impl HostMemory for Owned {
    fn hva_range(&self) -> Range<Hva> {
        self.0.hva_range()
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Relaxed);
    }
}

/// A slot's region over separate memory, and a flag for whether that memory was dropped.
fn owned(ram: &Arc<HostRam>, slot: u16, gpa: u64, flags: SlotFlags) -> (Region, Arc<AtomicBool>) {
    let dropped = Arc::new(AtomicBool::new(false));
    let mut region = ram.region(slot, gpa, 0, 1);
    region.flags = flags;
    region.memory = Some(Arc::new(Owned(Arc::clone(ram), Arc::clone(&dropped))));
    (region, dropped)
}

#[test]
fn a_slot_keeps_its_memory_alive_and_lets_it_go() {
    let ram = HostRam::new(1);
    ram.code(0, &[WFI]);
    let vm = Vm::new(VmConfig::default());
    let (region, dropped) = owned(&ram, 0, 0, SlotFlags::EMPTY);
    vm.set_user_memory_region2(region).unwrap();
    let mut vcpu = vcpu(&vm, 0, 0);
    assert_eq!(vcpu.run(), Exit::Halted);
    assert!(!dropped.load(Ordering::Relaxed));
    vm.set_user_memory_region2(Region::delete(0)).unwrap();
    // The vCPU that used the slot has not entered its guest since then.
    assert!(dropped.load(Ordering::Relaxed));

    // After a move, the slot has the owner of the request.
    let (region, first) = owned(&ram, 0, 0, SlotFlags::EMPTY);
    vm.set_user_memory_region2(region).unwrap();
    let (region, second) = owned(&ram, 0, PAGE, SlotFlags::EMPTY);
    vm.set_user_memory_region2(region).unwrap();
    assert!(first.load(Ordering::Relaxed) && !second.load(Ordering::Relaxed));
    // A refused request does not change the owner, nor does a request for the present state.
    let (mut region, third) = owned(&ram, 0, PAGE, SlotFlags::EMPTY);
    vm.set_user_memory_region2(region.clone()).unwrap();
    region.flags = SlotFlags::READONLY;
    assert!(vm.set_user_memory_region2(region).is_err());
    assert!(third.load(Ordering::Relaxed) && !second.load(Ordering::Relaxed));
    // After a change of flags, the old owner is dropped at once or by one of the next changes.
    let (region, third) = owned(&ram, 0, PAGE, SlotFlags::LOG_DIRTY_PAGES);
    vm.set_user_memory_region2(region).unwrap();
    let (region, fourth) = owned(&ram, 0, PAGE, SlotFlags::EMPTY);
    vm.set_user_memory_region2(region).unwrap();
    assert!(second.load(Ordering::Relaxed) && !fourth.load(Ordering::Relaxed));
    vm.set_user_memory_region2(Region::delete(0)).unwrap();
    assert!(third.load(Ordering::Relaxed) && fourth.load(Ordering::Relaxed));

    // Dropping the VM drops all owners.
    let (region, last) = owned(&ram, 0, 0, SlotFlags::EMPTY);
    vm.set_user_memory_region2(region).unwrap();
    drop(vm);
    assert!(!last.load(Ordering::Relaxed), "the vCPU is left");
    drop(vcpu);
    assert!(last.load(Ordering::Relaxed));
}

#[test]
fn what_a_guard_has_found_stays_until_the_guard_goes() {
    let ram = HostRam::new(1);
    let vm = Vm::new(VmConfig::default());
    let (region, dropped) = owned(&ram, 7, 5 * PAGE, SlotFlags::EMPTY);
    vm.set_user_memory_region2(region).unwrap();
    let table = vm.slot_table();
    let before = vm.generation();
    assert_eq!(table.generation(), before);
    let mut reader = table.reader();
    let guard = reader.pin();
    let slot = guard.lookup(Gfn(5)).expect("the slot is there");
    assert_eq!((slot.id, slot.hva_of(Gfn(5))), (7, Some(ram.hva())));
    assert_eq!(guard.view().by_id(7).map(|slot| slot.id), Some(7));
    let at = ram.hva()..Hva(ram.hva().0 + 1);
    assert_eq!(guard.view().iter_hva(at.clone()).count(), 1);
    let old = guard.view();

    vm.set_user_memory_region2(Region::delete(7)).unwrap();
    assert!(slot.is_invalid() && guard.lookup(Gfn(5)).is_none());
    assert_eq!(vm.generation().number(), before.number() + 1);
    assert_eq!(old.iter_hva(at.clone()).count(), 1, "the view's version");
    assert_eq!(guard.view().iter_hva(at).count(), 0);
    assert!(!dropped.load(Ordering::Relaxed), "the guard keeps it");
    drop(guard);
    vm.set_user_memory_region2(ram.region(1, 0, 0, 1)).unwrap();
    vm.set_user_memory_region2(Region::delete(1)).unwrap();
    assert!(dropped.load(Ordering::Relaxed));
}

#[test]
fn slots_cost_what_they_hold() {
    let ram = HostRam::new(1);
    let vm = Vm::new(VmConfig::default());
    let empty = vm.slot_metadata_bytes();
    assert!(empty < 1024, "{empty}");
    let slots = 2000;
    for slot in 0..slots {
        vm.set_user_memory_region2(ram.region(slot, u64::from(slot) * PAGE, 0, 1))
            .unwrap();
    }
    let each = (vm.slot_metadata_bytes() - empty) / usize::from(slots);
    println!("{empty} bytes without slots, {each} a slot");
    assert!(each < 256, "{each}");
}
