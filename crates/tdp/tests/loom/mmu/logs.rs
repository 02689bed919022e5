//! No store is lost to a log's reader, for either source of the dirty state.

use super::format::{WithBits, WithoutBits};
use super::vm::{AT_0, OLD, Vm, W, fault, range, target};
use super::{explore_orders, explore_preempting};
use loom::sync::atomic::Ordering;
use pageferry_tdp::format::Access;
use std::collections::BTreeSet;

/// (W): first an entry is writable, then the log has its bit, then a TLB holds it. The reader takes
/// the bit, protects, and flushes.
fn no_store_is_lost_to_a_reader_of_the_log(mapped: bool) -> BTreeSet<(u64, u64, bool)> {
    explore_orders(move |swap| {
        let vm = Vm::<WithoutBits>::new();
        vm.before(|worker| {
            let access = if mapped {
                Access::READ_WRITE
            } else {
                Access::READ
            };
            fault(worker, 0, access, target(OLD, 1), &vm.log).unwrap();
            if !mapped {
                worker.write_protect(range(1), &());
                vm.log.take();
            }
        });
        let (last, (copied, bit), workers) = vm.race(
            swap,
            |vm, worker| {
                let fix = |worker: &mut W<_>| worker.fast_fault(AT_0, &vm.log).is_some();
                // If another thread protects the page in the middle of the fault, the guest would
                // fault again.
                (1..=2)
                    .take_while(|&value| vm.store(worker, 0, value, fix))
                    .count() as u64
            },
            |vm, worker| {
                let bit = vm.log.take() != 0;
                if bit {
                    worker.write_protect(range(1), &());
                }
                (vm.memory.load(Ordering::Relaxed), bit)
            },
        );
        assert!(
            copied == last || vm.log.take() != 0,
            "the store of {last} is lost"
        );
        vm.check(workers);
        (last, copied, bit)
    })
}

#[test]
fn no_store_is_lost_that_a_fast_fault_allows() {
    let seen = no_store_is_lost_to_a_reader_of_the_log(false);
    let some = [(2, 0, false), (2, 1, true), (2, 2, true)];
    assert!(seen.is_superset(&BTreeSet::from(some)));
}

#[test]
fn no_store_is_lost_that_was_allowed_before() {
    let seen = no_store_is_lost_to_a_reader_of_the_log(true);
    let some = [(2, 0, true), (2, 1, true), (2, 2, true)];
    assert!(seen.is_superset(&BTreeSet::from(some)));
}

#[test]
fn no_store_is_lost_that_only_a_dirty_bit_tells_of() {
    let seen = explore_orders(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &vm.log).unwrap());
        let ((), (copied, bit), mut workers) = vm.race(
            swap,
            |vm, worker| {
                for value in 1..=2 {
                    assert!(vm.store(worker, 0, value, |_| false));
                }
            },
            |vm, worker| {
                let bit = vm.dirty(worker) != 0;
                (vm.memory.load(Ordering::Relaxed), bit)
            },
        );
        assert!(
            copied == 2 || vm.dirty(&mut workers[0]) != 0,
            "the last store is lost"
        );
        vm.check(workers);
        (copied, bit)
    });
    // The flush waits for the store that the bit reports.
    assert!(!seen.contains(&(0, true)));
    assert!(seen.is_superset(&BTreeSet::from([(0, false), (1, true), (2, true)])));
}

/// Aging takes the permission to store and does not flush. A thread that needs the flush makes it,
/// even if it finds nothing to take.
#[test]
fn who_protects_pays_for_who_ages() {
    let seen = explore_preempting(2, |swap| {
        let vm = Vm::<WithoutBits>::new();
        vm.before(|worker| {
            fault(worker, 0, Access::READ_WRITE, target(OLD, 1), &vm.log).unwrap();
        });
        let guest = vm.spawn(|vm, worker| vm.store(worker, 0, 1, |_| false));
        let (young, (), workers) = vm.race(
            swap,
            |_, worker| worker.age(range(1), true, &()),
            |vm, worker| {
                worker.flush();
                worker.write_protect(range(1), &());
                let tlb = *vm.gate.lock().unwrap();
                assert!(
                    !tlb.is_some_and(|cached| cached.write),
                    "a store would go unnoticed"
                );
            },
        );
        let (stored, other) = guest.join().unwrap();
        drop(other);
        vm.check(workers);
        (young, stored)
    });
    assert_eq!(seen, BTreeSet::from([(1, false), (1, true)]));
}
