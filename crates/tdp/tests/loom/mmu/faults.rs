//! A fault beside another, and beside an invalidation.

use super::explore_orders;
use super::format::WithBits;
use super::vm::{AT_0, NEW, OLD, Vm, W, fault, range, target};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use pageferry_addr::Gfn;
use pageferry_tdp::format::Access;
use pageferry_tdp::{How, Look};
use pageferry_testkit::model::Watched;
use std::collections::BTreeSet;

#[test]
fn two_faults_of_one_frame_agree_on_one_leaf() {
    let seen = explore_orders(|swap| {
        let vm = Vm::<WithBits>::new();
        let map = |_: &Vm<_>, worker: &mut W<_>| {
            let mapped = fault(worker, 0, Access::READ, target(OLD, 1), &());
            mapped.unwrap().how == How::Installed
        };
        let (mine, theirs, workers) = vm.race(swap, map, map);
        vm.check(workers);
        (mine, theirs)
    });
    assert_eq!(seen, BTreeSet::from([(true, false), (false, true)]));
}

/// Host memory that is given away once an invalidation allows it.
struct Ram([Watched; 2]);

impl Ram {
    fn new() -> Arc<Self> {
        Arc::new(Self([Watched::new(), Watched::new()]))
    }

    /// The guest uses the frame.
    fn touch(&self, pfn: u64) {
        self.0[usize::from(pfn == NEW)].read();
    }

    /// The host reuses the old frame.
    fn give_away(&self) {
        self.0[0].write();
    }
}

#[test]
fn a_fault_beside_an_invalidation_never_maps_what_is_given_away() {
    let seen = explore_orders(|swap| {
        let vm = Vm::<WithBits>::new();
        let (ram, host) = (Ram::new(), Arc::new(AtomicU64::new(OLD)));
        let (ram_too, host_too) = (ram.clone(), host.clone());
        let (used, (), mut workers) = vm.race(
            swap,
            move |vm, worker| {
                let _inside = vm.gate.lock().unwrap();
                let ticket = worker.ticket();
                let pfn = host.load(Ordering::Relaxed);
                let answer = worker.fault(ticket, AT_0, target(pfn, 1), &());
                if answer.is_ok() {
                    ram.touch(worker.translate(Gfn(0), Access::READ)?.leaf.pfn.0);
                }
                Some(answer.map(|mapped| mapped.leaf.pfn.0))
            },
            move |_, worker| {
                let invalidating = worker.invalidate(&[range(1)], &());
                // The host moves the page.
                ram_too.give_away();
                host_too.store(NEW, Ordering::Relaxed);
                drop(invalidating);
            },
        );
        let left = workers[0].walk(Gfn(0)).map(|found| found.leaf.pfn.0);
        assert!(left.is_none_or(|pfn| pfn == NEW));
        vm.check(workers);
        used.map(|answer| answer.map_err(|refused| format!("{refused:?}")))
    });
    let refused = |why: &str| Some(Err(why.to_owned()));
    let all = [
        // The page was zapped between the fault and the look. The look ends before the flush.
        None,
        Some(Ok(OLD)),
        Some(Ok(NEW)),
        refused("Excluded"),
        refused("Invalidated"),
    ];
    assert_eq!(seen, BTreeSet::from(all));
}

/// The slots change, and markers are forgotten. The remaining markers are of the new generation.
#[test]
fn no_marker_of_an_old_generation_outlives_the_sweep() {
    let seen = explore_orders(|swap| {
        let vm = Vm::<WithBits>::new();
        let slots = Arc::new(AtomicU64::new(0));
        let slots_too = slots.clone();
        let (marked, cleared, mut workers) = vm.race(
            swap,
            move |_, worker| {
                let ticket = worker.ticket();
                let generation = slots.load(Ordering::Relaxed);
                let marked = worker.mark_mmio(ticket, Gfn(0), generation);
                marked.map(|()| generation)
            },
            move |_, worker| {
                slots_too.store(1, Ordering::Relaxed);
                worker.forget_mmio()
            },
        );
        match workers[0].look(Gfn(0), Access::READ) {
            Look::Absent | Look::Mmio { generation: 1 } => {}
            old => panic!("{old:?} is left"),
        }
        vm.check(workers);
        (marked.map_err(|refused| format!("{refused:?}")), cleared)
    });
    let refused = |why: &str| (Err(why.to_owned()), 0);
    let all = [
        (Ok(0), 1),
        (Ok(1), 0),
        (Ok(1), 1),
        refused("Excluded"),
        refused("Invalidated"),
    ];
    assert_eq!(seen, BTreeSet::from(all));
}
