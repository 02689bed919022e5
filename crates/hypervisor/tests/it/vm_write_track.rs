//! The calls of write tracking: which stores leave the guest, and which pages are tracked until
//! when.

use crate::support::tracked::{ELSEWHERE, LOAD, MEMORY, One, SD, STORES, VALUE, one};
use crate::support::vm::{HostRam, PAGE};
use pageferry_addr::Gpa;
use pageferry_hypervisor::{Exit, HostMemory, Region, SlotFlags, VmError};

#[test]
fn every_kind_of_store_leaves_the_guest_and_is_repeated() {
    for (name, program) in STORES {
        // The page is not mapped, then mapped by a load, then writable in the TLB.
        for before in [None, Some(LOAD), Some(program)] {
            let mut one = one(4);
            if let Some(before) = before {
                assert_eq!(one.run(before, PAGE), Exit::Halted);
                (0..PAGE / 8).for_each(|word| one.ram.set(PAGE + 8 * word, 0));
            }
            assert!(one.vm.capabilities().write_tracking);
            assert_eq!(one.track(1..2), 1);
            assert_eq!(one.run(program, PAGE), one.tracked(1), "{name}, {before:?}");
            let pc = one.vcpu.hart().pc();
            let retired = one.vcpu.hart().instret();
            for _ in 0..3 {
                assert_eq!(one.vcpu.run(), one.tracked(1), "{name}: again");
                assert_eq!(
                    (one.vcpu.hart().pc(), one.vcpu.hart().instret()),
                    (pc, retired)
                );
            }
            assert!((0..PAGE / 8).all(|word| one.ram.get(PAGE + 8 * word) == 0));
            assert_eq!(one.run(LOAD, PAGE), Exit::Halted, "loads go through");
            one.store([0, 2]);
            assert_eq!(
                one.run(program, PAGE),
                one.tracked(1),
                "{name}: after loads"
            );
            assert_eq!(one.untrack(1..2), 1);
            assert_eq!(one.vcpu.run(), Exit::Halted, "{name}");
            assert_ne!(one.ram.get(PAGE) | one.ram.get(PAGE + 8), 0, "{name}");
        }
    }
}

#[test]
fn a_store_over_two_pages_needs_both_untracked() {
    for tracked in [0..1, 1..2, 0..2] {
        let mut one = one(2);
        one.store([0, 1]);
        one.ram.set(0, 0);
        one.ram.set(PAGE, 0);
        one.track(tracked.clone());
        for page in tracked {
            assert_eq!(one.run(SD, PAGE - 3), one.tracked(page));
            assert_eq!(
                (one.ram.get(PAGE - 8), one.ram.get(PAGE)),
                (0, 0),
                "no byte is stored"
            );
            one.untrack(page..page + 1);
        }
        assert_eq!(one.vcpu.run(), Exit::Halted);
        assert_eq!(one.ram.get(PAGE - 8), VALUE << 40);
        assert_eq!(one.ram.get(PAGE), VALUE >> 24);
    }
}

#[test]
fn fetches_from_tracked_pages_go_on() {
    let mut one = one(1);
    one.vm.track_writes(0, 0..1).unwrap();
    one.load([0]);
    one.store([0]);
}

#[test]
fn calls_count_pages_and_refuse_what_is_not_there() {
    let mut one = one(100);
    assert_eq!(one.untrack(0..100), 0);
    assert_eq!(
        (one.track(10..70), one.track(0..20), one.track(5..5)),
        (60, 10, 0)
    );
    assert_eq!((one.untrack(60..80), one.untrack(60..80)), (10, 0));
    one.refuses([0, 59]);
    one.store([60, 99]);
    assert_eq!(one.vm.track_writes(2, 0..1), Err(VmError::NoSuchSlot(2)));
    assert_eq!(one.vm.untrack_writes(2, 0..1), Err(VmError::NoSuchSlot(2)));
    #[expect(clippy::reversed_empty_ranges, reason = "is refused")]
    for pages in [99..101, 101..101, 2..1, 0..u64::MAX, u64::MAX..u64::MAX] {
        let outside = VmError::PagesOutside {
            slot: 1,
            pages: pages.clone(),
            has: 100,
        };
        assert_eq!(one.vm.track_writes(1, pages.clone()), Err(outside.clone()));
        assert_eq!(one.vm.untrack_writes(1, pages), Err(outside));
    }
    one.store([99]);
    let mut region = HostRam::new(1).region(2, ELSEWHERE, 0, 1);
    region.flags = SlotFlags::READONLY;
    one.vm.set_user_memory_region2(region).unwrap();
    assert_eq!(one.vm.track_writes(2, 0..1), Err(VmError::ReadOnlySlot(2)));
    assert_eq!(one.vm.untrack_writes(2, 0..1), Ok(0));
}

#[test]
fn tracking_goes_with_a_deleted_slot() {
    let mut one = one(4);
    one.track(0..4);
    one.vm.set_user_memory_region2(Region::delete(1)).unwrap();
    one.set(|_| ());
    one.store(0..4);
    assert_eq!(one.untrack(0..4), 0);
}

#[test]
fn tracking_stays_with_a_moved_slot_and_through_changes_of_flags() {
    let mut one = one(4);
    one.store(0..4);
    one.track(1..3);
    for (gpa, log) in [
        (ELSEWHERE, false),
        (ELSEWHERE, true),
        (MEMORY, true),
        (MEMORY, false),
    ] {
        one.set(|region| {
            region.gpa = Gpa(gpa);
            region.flags = if log {
                SlotFlags::LOG_DIRTY_PAGES
            } else {
                SlotFlags::EMPTY
            };
        });
        one.refuses([1, 2]);
        one.store([0, 3]);
        one.load(0..4);
        one.refuses([1, 2]);
    }
    // These pages were tracked in an older record of the slot.
    assert_eq!(one.untrack(0..4), 2);
    one.store(0..4);
    // These pages are tracked in the new record, and untracked in the next.
    one.log(true);
    one.track(3..4);
    one.log(false);
    one.refuses([3]);
    one.untrack(3..4);
    one.log(true);
    one.store(0..4);
}

#[test]
fn a_tracked_page_that_is_unmapped_is_tracked_still() {
    let mut one = one(4);
    let unmap: [fn(&One<HostRam>); 2] = [
        |one| {
            one.vm.invalidate_hva(one.ram.hva_range());
        },
        |one| {
            one.vm.zap_all();
        },
    ];
    one.store(0..4);
    one.track(0..2);
    for unmap in unmap {
        unmap(&one);
        one.refuses([0]);
        one.load([1]);
        one.refuses([1]);
        one.store([2, 3]);
        one.vm.age_hva(one.ram.hva_range(), true);
        one.refuses([0, 1]);
    }
    // The page is untracked while it is not mapped.
    one.vm.zap_all();
    one.untrack(0..1);
    one.store([0]);
    one.refuses([1]);
}
