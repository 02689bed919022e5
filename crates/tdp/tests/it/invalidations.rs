//! Concurrent invalidations, their tokens, and tickets.

use crate::platform::{fault, map, new, range, target};
use pageferry_addr::Gfn;
use pageferry_tdp::format::{Access, Ept4};
use pageferry_tdp::{Fault, Refused};

#[test]
fn an_invalidation_keeps_its_range_while_another_begins_and_ends() {
    let mmu = new::<Ept4>();
    let (mut worker, mut a, mut b) = (mmu.worker(), mmu.worker(), mmu.worker());
    let read = |worker: &mut _, gfn| fault(worker, gfn, Access::READ, target(gfn, 1)).map(drop);
    let first = a.invalidate(&[range(0x10, 1)], &());
    let second = b.invalidate(&[range(0x40, 1)], &());
    for gfn in [0x10, 0x40] {
        assert_eq!(
            read(&mut worker, gfn),
            Err(Refused::Invalidated),
            "{gfn:#x}"
        );
    }
    drop(second);
    assert_eq!(
        read(&mut worker, 0x10),
        Err(Refused::Invalidated),
        "still in progress"
    );
    drop(first);
    for gfn in [0x10, 0x40] {
        read(&mut worker, gfn).unwrap();
    }
}

#[test]
#[should_panic(expected = "the ticket is of another MMU")]
fn a_ticket_of_another_mmu_is_refused() {
    let (mmu, other) = (new::<Ept4>(), new::<Ept4>());
    let (mut worker, foreign) = (mmu.worker(), other.worker().ticket());
    let at = Fault {
        gfn: Gfn(7),
        access: Access::READ,
    };
    _ = worker.fault(foreign, at, target(7, 1), &());
}

#[test]
fn one_worker_has_several_invalidations_and_other_work_between_their_callbacks() {
    let mmu = new::<Ept4>();
    let mut worker = mmu.worker();
    for gfn in [0x10, 0x40] {
        map(&mut worker, gfn);
    }
    let begun: Vec<_> = [0x10, 0x40]
        .map(|gfn| worker.invalidate(&[range(gfn, 1)], &()))
        .into_iter()
        .collect();
    assert_eq!(begun.iter().map(|one| one.zapped()).sum::<u64>(), 2);
    assert_eq!(mmu.stats().invalidations, 2);
    assert_eq!(mmu.invalidating(), Some(range(0x10, 0x31)));
    map(&mut worker, 0x100);
    // The second callback comes on another thread.
    std::thread::spawn(move || drop(begun)).join().unwrap();
    assert_eq!((mmu.stats().invalidations, mmu.invalidating()), (0, None));
    map(&mut worker, 0x40);
}

#[test]
fn a_forgotten_invalidation_is_seen_and_can_be_ended() {
    let mmu = new::<Ept4>();
    let mut worker = mmu.worker();
    let ticket = worker.ticket();
    let kept = worker.invalidate(&[range(0x20, 1)], &());
    std::mem::forget(worker.invalidate(&[range(0x10, 1)], &()));
    let read = |worker: &mut _, gfn| fault(worker, gfn, Access::READ, target(gfn, 1)).map(drop);
    assert_eq!(read(&mut worker, 0x10), Err(Refused::Invalidated));
    assert_eq!(mmu.stats().invalidations, 2);
    assert_eq!(mmu.end_invalidations(), 2);
    assert_eq!((mmu.stats().invalidations, mmu.invalidating()), (0, None));
    read(&mut worker, 0x10).unwrap();
    // Earlier tickets are old in all of its ranges.
    let at = Fault {
        gfn: Gfn(0x20),
        access: Access::READ,
    };
    let refused = worker.fault(ticket, at, target(0x20, 1), &());
    assert_eq!(refused.map(drop), Err(Refused::Invalidated));
    // The token of an invalidation that was already ended must not end a later one.
    let later = worker.invalidate(&[range(0x30, 1)], &());
    drop(kept);
    assert_eq!(mmu.stats().invalidations, 1);
    assert_eq!(read(&mut worker, 0x30), Err(Refused::Invalidated));
    drop(later);
    read(&mut worker, 0x30).unwrap();
}
