//! The interface between a VM and its scheme of slots: the order of the parts of a change, and a
//! vCPU's reaction to look-ups.

use crate::support::vm::{HostRam, PAGE, asm::*, vcpu, vm_of};
use crate::support::watched::{DENIED, HOOK, Part, Watched};
use pageferry_addr::{Gfn, GfnRange, Gpa, Hva};
use pageferry_hypervisor::{Begun, Exit, Region, SlotError, SlotFlags, Vm, VmError};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc;
use std::time::Duration;

/// Calls `change` and returns the parts of the change, each with the number of mapped pages at that
/// time.
fn parts(vm: &Vm<Watched>, change: impl FnOnce()) -> Vec<(Part, Begun, u64)> {
    let (send, receive) = mpsc::channel();
    let watched = vm.clone();
    HOOK.set(Some(Box::new(move |part, begun| {
        send.send((part, begun, watched.mapped_pages())).unwrap();
    })));
    change();
    HOOK.set(None);
    receive.try_iter().collect()
}

fn frames(first: u64, pages: u64) -> GfnRange {
    GfnRange::new(Gfn(first), pages).unwrap()
}

#[test]
fn a_fault_that_meets_an_invalid_slot_is_tried_again() {
    let ram = HostRam::new(2);
    ram.code(
        0,
        &[
            addi(A0, A0, 1),
            sd(A0, A1, 0),
            ld(A2, A1, 0),
            addi(A2, A2, 1),
            WFI,
        ],
    );
    let vm = vm_of::<Watched>(&ram);
    for denied in [0, 1, 2, 1000] {
        let mut vcpu = vcpu(&vm, denied, 0);
        vcpu.hart_mut().set_x(10, 40);
        vcpu.hart_mut().set_x(11, PAGE);
        // The fetch of the code finds the invalid slot first.
        DENIED.set(denied);
        assert_eq!(vcpu.run(), Exit::Halted);
        assert_eq!(DENIED.get(), 0, "the vCPU did not try again");
        assert_eq!(vcpu.hart().x(12), 42);
        let retired = vcpu.hart().instret();
        assert_eq!(retired, 5, "each instruction once");

        // With the code already decoded, the store finds it.
        vm.invalidate_hva(Hva(ram.hva().0 + PAGE)..Hva(ram.hva().0 + 2 * PAGE));
        vcpu.hart_mut().set_pc(0).unwrap();
        vcpu.hart_mut().set_x(10, 0);
        ram.set(PAGE, 0);
        DENIED.set(denied);
        assert_eq!((vcpu.run(), DENIED.get()), (Exit::Halted, 0));
        assert_eq!((ram.get(PAGE), vcpu.hart().x(10)), (1, 1));
    }
}

#[test]
fn a_kick_ends_the_wait_for_a_change() {
    let ram = HostRam::new(1);
    ram.code(0, &[WFI]);
    let vm = vm_of::<Watched>(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    let kick = vcpu.kick_handle();
    let (left, exits) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        DENIED.set(u32::MAX);
        left.send(vcpu.run()).unwrap();
        DENIED.set(0);
        left.send(vcpu.run()).unwrap();
    });
    let early = exits.recv_timeout(Duration::from_millis(20));
    assert!(early.is_err(), "it waits inside run: {early:?}");
    kick.kick();
    let exit = || exits.recv_timeout(pageferry_testkit::LIMIT).unwrap();
    assert_eq!(exit(), Exit::Kicked);
    assert_eq!(exit(), Exit::Halted);
    thread.join().unwrap();
}

#[test]
fn what_a_slot_mapped_is_gone_before_its_end_is_committed() {
    let ram = HostRam::new(4);
    ram.code(0, &[ld(A0, A1, 0), WFI]);
    let vm = vm_of::<Watched>(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    let mut touch = |gpa: u64| {
        vcpu.hart_mut().set_pc(0).unwrap();
        vcpu.hart_mut().set_x(11, gpa);
        vcpu.run()
    };
    let set = |region: Region| vm.set_user_memory_region2(region).unwrap();
    let slot = |gfn: u64, flags: SlotFlags| {
        let mut region = ram.region(1, gfn * PAGE, 2, 2);
        region.flags = flags;
        region
    };
    let place = |gfn: u64| slot(gfn, SlotFlags::EMPTY);

    let created = Begun::Created { new: frames(16, 2) };
    assert_eq!(
        parts(&vm, || set(place(16))),
        [(Part::Begin, created, 0), (Part::Commit, created, 0)]
    );
    assert_eq!(touch(16 * PAGE), Exit::Halted);
    assert_eq!(touch(17 * PAGE), Exit::Halted);
    // The page of the code stays mapped.
    assert_eq!(vm.mapped_pages(), 3);
    let nothing = Begun::Nothing;
    assert_eq!(
        parts(&vm, || set(place(16))),
        [(Part::Begin, nothing, 3), (Part::GiveUp, nothing, 3)]
    );
    let moved = Begun::Moved {
        old: frames(16, 2),
        new: frames(17, 2),
    };
    assert_eq!(
        parts(&vm, || set(place(17))),
        [
            (Part::Begin, moved, 3),
            (Part::Commit, moved, 1),
            (Part::Reclaim, nothing, 1)
        ]
    );
    assert!(matches!(touch(16 * PAGE), Exit::MmioRead { .. }));
    assert_eq!(touch(17 * PAGE), Exit::Halted);
    let logged = Begun::FlagsChanged {
        range: frames(17, 2),
        old: SlotFlags::EMPTY,
        new: SlotFlags::LOG_DIRTY_PAGES,
    };
    // The commit of the flag comes before the zap.
    assert_eq!(
        parts(&vm, || set(slot(17, SlotFlags::LOG_DIRTY_PAGES))),
        [
            (Part::Begin, logged, 2),
            (Part::Commit, logged, 2),
            (Part::Reclaim, nothing, 2)
        ]
    );
    let deleted = Begun::Deleted { old: frames(17, 2) };
    assert_eq!(
        parts(&vm, || set(Region::delete(1))),
        [
            (Part::Begin, deleted, 2),
            (Part::Commit, deleted, 1),
            (Part::Reclaim, nothing, 1)
        ]
    );
    assert!(matches!(touch(17 * PAGE), Exit::MmioRead { .. }));
}

#[test]
fn a_change_that_is_given_up_has_changed_nothing() {
    let ram = HostRam::new(4);
    ram.code(0, &[ld(A0, A1, 0), WFI]);
    ram.set(2 * PAGE, 77);
    let vm = vm_of::<Watched>(&ram);
    vm.set_user_memory_region2(ram.region(1, 16 * PAGE, 2, 2))
        .unwrap();
    let mut vcpu = vcpu(&vm, 0, 0);
    let mut load = |gpa: u64| {
        vcpu.hart_mut().set_pc(0).unwrap();
        vcpu.hart_mut().set_x(10, 0);
        vcpu.hart_mut().set_x(11, gpa);
        (vcpu.run(), vcpu.hart().x(10))
    };
    let mut as_it_was = |what: &str| {
        assert_eq!(load(16 * PAGE), (Exit::Halted, 77), "{what}");
        let (exit, _) = load(17 * PAGE + PAGE);
        assert!(
            matches!(exit, Exit::MmioRead { gpa: Gpa(at), .. } if at == 18 * PAGE),
            "{what}: {exit:?}"
        );
    };
    as_it_was("before");
    let mapped = vm.mapped_pages();

    // A move to memory outside the given memory is refused after it has begun.
    let mut region = ram.region(1, 17 * PAGE, 2, 2);
    region.memory = None;
    let told = parts(&vm, || {
        let refused = vm.set_user_memory_region2(region.clone()).unwrap_err();
        assert!(matches!(
            refused,
            VmError::NotOwned {
                slot: 1,
                memory: None,
                ..
            }
        ));
    });
    let moved = Begun::Moved {
        old: frames(16, 2),
        new: frames(17, 2),
    };
    assert_eq!(
        told,
        [(Part::Begin, moved, mapped), (Part::GiveUp, moved, mapped)]
    );
    assert_eq!(vm.mapped_pages(), mapped);
    as_it_was("after a refused move");

    // A request that breaks a rule does not begin a change.
    let told = parts(&vm, || {
        let overlap = vm.set_user_memory_region2(ram.region(2, 17 * PAGE, 0, 1));
        assert!(matches!(
            overlap,
            Err(VmError::Slot(SlotError::Overlap { other: 1, .. }))
        ));
    });
    assert_eq!(told, []);

    // A panic between the halves gives the change up too, and the VM still works.
    for (what, request) in [
        ("delete", Region::delete(1)),
        ("move", ram.region(1, 17 * PAGE, 2, 2)),
        ("create", ram.region(2, 18 * PAGE, 0, 1)),
    ] {
        HOOK.set(Some(Box::new(|part, _| {
            if part == Part::Commit {
                resume_unwind(Box::new("the writer fails here"));
            }
        })));
        let failed = catch_unwind(AssertUnwindSafe(|| vm.set_user_memory_region2(request)));
        HOOK.set(None);
        assert!(failed.is_err(), "{what}");
        as_it_was(what);
    }
    vm.set_user_memory_region2(Region::delete(1)).unwrap();
    assert!(matches!(load(16 * PAGE).0, Exit::MmioRead { .. }));
}
