//! Table memory: the time at which it is freed, the bound on waiting tables, and that nothing is
//! allocated under the lock.

use crate::allocator::{allocations, with_allocations};
use crate::platform::{Hooked, OnDirty, map, new, range};
use pageferry_addr::Gfn;
use pageferry_tdp::format::Ept4;
use pageferry_tdp::{Mmu, Worker};
use pageferry_testkit::{Stop, wait_until};
use std::cell::Cell;
use std::sync::Arc;

/// Runs `body` while another thread holds a guard.
fn beside_a_guard(mmu: &Arc<Mmu<Ept4, Hooked>>, body: impl FnOnce()) {
    let (held, end) = (Stop::new(), Stop::new());
    std::thread::scope(|scope| {
        let mut reader = mmu.worker();
        let (held, end) = (&held, &end);
        scope.spawn(move || {
            map(&mut reader, (1 << 36) - 1);
            reader.scan(range((1 << 36) - 1, 1), |_, _| {
                held.stop();
                wait_until("the guard's end", || end.is_stopped());
            });
        });
        let _end = end.on_drop();
        wait_until("the guard", || held.is_stopped());
        body();
    });
}

const TABLES: u64 = 20_000;

/// Maps a page in each of `TABLES` tables.
fn map_tables(worker: &mut Worker<Ept4, Hooked>) {
    for table in 0..TABLES {
        map(worker, table * 512);
    }
}

#[test]
#[cfg_attr(miri, ignore = "too many tables for Miri")]
fn tables_that_wait_for_a_guard_are_bounded_and_come_back() {
    let mmu = new::<Ept4>();
    let mut worker = mmu.worker();
    map_tables(&mut worker);
    beside_a_guard(&mmu, || {
        assert_eq!(worker.zap(range(0, TABLES * 512), &()), TABLES);
        let stats = mmu.stats();
        assert_eq!(stats.leaves[0], 1, "what the guard's thread has mapped");
        assert!(
            stats.waiting > 0 && stats.waiting <= Worker::<Ept4, Hooked>::MOST_WAITING as u64,
            "{stats:?}"
        );
    });
    // The guard is over. The next zap of the range removes empty tables that are still linked.
    assert_eq!(worker.zap(range(0, TABLES * 512), &()), 0);
    wait_until("all tables", || worker.reclaim() == 0);
    assert_eq!(mmu.stats().waiting, 0);
    worker.zap_all(&()).unwrap();
    drop(worker);
    assert_eq!(mmu.platform().live(), 1);
}

/// Each call frees more tables than it adds.
#[test]
#[cfg_attr(miri, ignore = "too many tables for Miri")]
fn what_waited_goes_beside_later_calls() {
    let mmu = new::<Ept4>();
    let mut worker = mmu.worker();
    map_tables(&mut worker);
    beside_a_guard(&mmu, || {
        worker.zap(range(0, 900 * 512), &());
        assert_eq!(mmu.stats().waiting, 900);
    });
    for table in 900..1100 {
        worker.zap(range(table * 512, 512), &());
    }
    assert!(mmu.stats().waiting < 300, "{:?}", mmu.stats());
}

#[test]
fn a_worker_that_is_dropped_beside_a_guard_leaves_its_tables_to_others() {
    let mmu = new::<Ept4>();
    let mut worker = mmu.worker();
    map(&mut worker, 0x200);
    map(&mut worker, 0x400);
    worker.scan(range(0x400, 1), |_, _| {
        let mut other = mmu.worker();
        assert_eq!(other.zap(range(0x200, 512), &()), 1);
        drop(other);
        assert_eq!(mmu.stats().waiting, 1);
    });
    wait_until("the table", || worker.reclaim() == 0);
    drop(worker);
    assert_eq!(mmu.platform().live() as u64, 1 + mmu.stats().tables);
}

#[test]
fn an_mmu_that_goes_takes_what_waits_along() {
    let mmu = new::<Ept4>();
    let mut worker = mmu.worker();
    map(&mut worker, 0x200);
    map(&mut worker, 0x400);
    worker.scan(range(0x400, 1), |_, _| {
        mmu.worker().zap(range(0x200, 512), &());
    });
    // `Hooked` reports memory that is freed with another size than it was allocated. Miri and
    // sanitizers find leaks.
    drop((worker, mmu));
}

/// The log is called under the lock. So no allocation comes between two of its calls in one turn.
#[test]
fn nothing_is_allocated_while_tables_are_cut_off() {
    const TABLES: u64 = 60;
    let mmu = new::<Ept4>();
    let mut worker = mmu.worker();
    for table in 0..TABLES {
        map(&mut worker, table * 512);
    }
    let told = [const { Cell::new(0) }; TABLES as usize];
    let log = OnDirty(|gfn: Gfn| told[gfn.0 as usize / 512].set(allocations()));
    assert_eq!(worker.zap(range(0, TABLES * 512), &log), TABLES);
    assert_eq!(mmu.stats().tables, 2, "tables were cut off");
    let first = told[0].get();
    assert!(
        first > 0 && told.iter().all(|at| at.get() == first),
        "{told:?}"
    );
}

/// Making a worker takes two allocations: one record of counts, and one of a reader.
#[test]
fn a_worker_without_memory_is_refused_and_leaves_nothing() {
    let mmu = new::<Ept4>();
    let first = mmu.worker();
    for refused in [0, 1] {
        let error = with_allocations(refused, || mmu.try_worker().err());
        assert!(error.is_some_and(|error| error.bytes > 0), "{refused}");
        assert_eq!(Arc::strong_count(&mmu), 2, "this and the first worker");
    }
    // The second attempt's record of counts serves this worker.
    let second = with_allocations(1, || mmu.try_worker()).unwrap();
    drop((first, second));
    let mut third = with_allocations(0, || mmu.try_worker()).unwrap();
    map(&mut third, 7);
    assert_eq!(mmu.stats().leaves, [1, 0, 0]);
}
