//! A table is freed only after all its users have left it.

use super::explore_orders;
use super::format::WithBits;
use super::machine::hardware_finds;
use super::vm::{BOTH, OLD, Vm, fault, range, target};
use pageferry_addr::Gfn;
use pageferry_tdp::format::Access;
use std::collections::BTreeSet;

/// A thread in a table that is cut off may stay there until its guard ends.
#[test]
fn a_table_is_not_freed_before_who_walks_it_has_gone() {
    let seen = explore_orders(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap());
        let (found, left, workers) = vm.race(
            swap,
            |_, worker| worker.walk(Gfn(0)).is_some(),
            |_, worker| {
                assert_eq!(worker.zap(range(BOTH), &()), 1);
                worker.reclaim();
                worker.reclaim()
            },
        );
        vm.check(workers);
        (found, left)
    });
    assert!(seen.is_superset(&BTreeSet::from([(true, 1), (true, 0), (false, 0)])));
}

/// The same for a tree whose root was replaced.
#[test]
fn a_tree_is_not_freed_before_who_walks_it_has_gone() {
    let seen = explore_orders(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap());
        let (found, zapped, workers) = vm.race(
            swap,
            |_, worker| worker.walk(Gfn(0)).is_some(),
            |_, worker| worker.zap_all(&()),
        );
        assert_eq!(zapped, Ok(1));
        vm.check(workers);
        found
    });
    assert_eq!(seen, BTreeSet::from([false, true]));
}

/// Hardware holds no guard. The flush makes it leave.
#[test]
fn a_table_is_not_freed_before_hardware_has_left_it() {
    let seen = explore_orders(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap());
        let (found, (), workers) = vm.race(
            swap,
            |vm, _| hardware_finds(&vm.mmu, &vm.gate.lock().unwrap(), 0),
            |_, worker| {
                assert_eq!(worker.zap(range(BOTH), &()), 1);
                // Nobody holds a guard for long.
                (0..4).for_each(|_| _ = worker.reclaim());
            },
        );
        vm.check(workers);
        found
    });
    assert_eq!(seen, BTreeSet::from([false, true]));
}
