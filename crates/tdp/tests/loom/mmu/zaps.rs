//! A table or the whole tree is cut off.

use super::format::WithBits;
use super::vm::{BOTH, OLD, Vm, fault, range, seen, target};
use super::{explore_orders, explore_preempting};
use pageferry_addr::Gfn;
use pageferry_tdp::How;
use pageferry_tdp::format::Access;
use std::collections::BTreeSet;

/// The fault's table is cut off before it, beside it, or after it.
#[test]
fn a_fault_beside_a_zap_that_cuts_its_table_off() {
    let seen = explore_orders(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap());
        let (mapped, zapped, mut workers) = vm.race(
            swap,
            |_, worker| fault(worker, 1, Access::READ, target(OLD + 1, 1), &()),
            |_, worker| worker.zap(range(BOTH), &()),
        );
        assert_eq!(mapped.unwrap().how, How::Installed);
        let there = workers[0].walk(Gfn(1)).is_some();
        assert_eq!(workers[0].walk(Gfn(0)), None);
        vm.check(workers);
        (zapped, there)
    });
    // The fault maps after the zap, or the zap finds its leaf.
    assert_eq!(seen, BTreeSet::from([(1, true), (2, false)]));
}

#[test]
fn a_fault_beside_a_fast_zap_is_in_the_old_tree_or_in_the_new() {
    let seen = explore_orders(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap());
        let (mapped, zapped, mut workers) = vm.race(
            swap,
            |vm, worker| {
                let _inside = vm.gate.lock().unwrap();
                fault(worker, 1, Access::READ, target(OLD + 1, 1), &()).is_ok()
            },
            |_, worker| worker.zap_all(&()).unwrap(),
        );
        let left = workers[0].walk(Gfn(1)).is_some();
        assert_eq!(u64::from(left) + zapped, 1 + u64::from(mapped));
        vm.check(workers);
        (mapped, left)
    });
    let all = [(true, false), (true, true), (false, false)];
    assert_eq!(seen, BTreeSet::from(all));
}

/// An invalidation that finds nothing in the new tree must not assume that vCPUs have left the old
/// one.
#[test]
fn an_invalidation_beside_a_fast_zap_waits_for_the_old_tree_as_well() {
    // Three preemptions take minutes, since the zap waits for the other worker to leave the old
    // tree.
    let seen = explore_preempting(2, |swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| {
            fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap();
            *vm.gate.lock().unwrap() = seen(worker, 0);
        });
        let (zapped, old, workers) = vm.race(
            swap,
            |vm, worker| {
                let invalidating = worker.invalidate(&[range(1)], &());
                // The vCPU uses its TLB's entry now, while the frame belongs to somebody else.
                let tlb = *vm.gate.lock().unwrap();
                assert!(
                    tlb.is_none_or(|cached| cached.pfn != OLD),
                    "it is given away"
                );
                invalidating.zapped()
            },
            |_, worker| worker.zap_all(&()).unwrap(),
        );
        assert_eq!(zapped + old, 1);
        vm.check(workers);
        zapped
    });
    assert_eq!(seen, BTreeSet::from([0, 1]));
}
