//! Changes of page size.

use super::explore_orders;
use super::format::{Breaking, WithBits};
use super::vm::{BOTH, OLD, Vm, fault, range, target};
use pageferry_addr::Gfn;
use pageferry_tdp::format::Access;
use std::collections::BTreeSet;

#[test]
fn a_split_beside_the_hardware_keeps_its_dirty_bit() {
    let seen = explore_orders(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 2), &()).unwrap());
        let (stored, split, mut workers) = vm.race(
            swap,
            // A lost exchange reads as absent, and the guest would fault.
            |vm, worker| vm.store(worker, 1, 1, |_| false),
            |vm, worker| worker.split(range(BOTH), 1, &vm.log),
        );
        assert_eq!(split, Ok(1));
        let found = [0, 1].map(|gfn| workers[0].walk(Gfn(gfn)).unwrap());
        let found = found.map(|found| (found.leaf.pfn.0, found.level));
        assert_eq!(found, [(OLD, 1), (OLD + 1, 1)]);
        let dirty = vm.dirty(&mut workers[0]);
        vm.check(workers);
        (stored, dirty)
    });
    // Of the large page, or of the small one.
    let all = [(true, 0b11), (true, 0b10), (false, 0)];
    assert_eq!(seen, BTreeSet::from(all));
}

/// Old and new translate the same, so no reader notices.
#[test]
fn a_page_is_there_while_it_is_split() {
    let seen = explore_orders(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 2), &()).unwrap());
        let (found, split, workers) = vm.race(
            swap,
            |_, worker| {
                worker
                    .walk(Gfn(1))
                    .map(|found| (found.leaf.pfn.0, found.level))
            },
            |_, worker| worker.split(range(BOTH), 1, &()),
        );
        assert_eq!(split, Ok(1));
        vm.check(workers);
        found
    });
    assert_eq!(seen, BTreeSet::from([Some((OLD, 2)), Some((OLD + 1, 1))]));
}

/// The flush between break and make waits for the vCPU, so the vCPU must not wait for the entry.
#[test]
fn a_split_by_break_before_make_and_a_fault_do_not_wait_for_each_other() {
    let seen = explore_orders(|swap| {
        let vm = Vm::<Breaking>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 2), &()).unwrap());
        let (stored, split, mut workers) = vm.race(
            swap,
            |vm, worker| {
                let mut refused = false;
                let stored = vm.store(worker, 1, 1, |worker| {
                    let answer = fault(worker, 1, Access::READ_WRITE, target(OLD + 1, 1), &());
                    refused = answer.is_err();
                    answer.is_ok()
                });
                assert!(stored || refused);
                stored
            },
            |vm, worker| worker.split(range(BOTH), 1, &vm.log),
        );
        assert_eq!(split, Ok(1));
        let dirty = vm.dirty(&mut workers[0]);
        vm.check(workers);
        (stored, dirty)
    });
    assert_eq!(
        seen,
        BTreeSet::from([(true, 0b11), (true, 0b10), (false, 0)])
    );
}

#[test]
fn a_fault_beside_a_recovery_finds_the_page_and_loses_no_dirty_bit() {
    let seen = explore_orders(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap());
        let (stored, recovered, mut workers) = vm.race(
            swap,
            |vm, worker| {
                // Its mapping may be gone before its look. Then it would fault again.
                vm.store(worker, 1, 1, |worker| {
                    let answer = fault(worker, 1, Access::READ_WRITE, target(OLD + 1, 1), &());
                    answer.unwrap();
                    true
                })
            },
            |vm, worker| {
                let large = |gfn: Gfn, level| Some(target(OLD + gfn.0, level));
                worker.recover(range(BOTH), &vm.log, large)
            },
        );
        let found = workers[0].walk(Gfn(1)).unwrap();
        assert_eq!((recovered, found.leaf.pfn.0, found.level), (1, OLD, 2));
        let dirty = vm.dirty(&mut workers[0]);
        assert!(!stored || dirty & 0b10 != 0, "the dirty bit is lost");
        vm.check(workers);
        (stored, dirty)
    });
    assert!(seen.is_superset(&BTreeSet::from([(true, 0b10), (true, 0b11)])));
}
