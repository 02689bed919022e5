//! The effect of each call on tables, on one thread.

use super::heap::Heap;
use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_tdp::format::{Access, Ept4, MemoryType, Npt5, Sv48x4Svade, Writes};
use pageferry_tdp::{Fault, How, Log, Mmu, Refused, Target, Worker};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

type M<F> = Worker<F, Heap>;

/// A log that records frames.
#[derive(Default)]
struct Dirty(RefCell<BTreeSet<u64>>);

impl Log for Dirty {
    fn dirtied(&self, gfn: Gfn, pages: u64) {
        self.0.borrow_mut().extend(gfn.0..gfn.0 + pages);
    }
}

impl Dirty {
    fn take(&self) -> Vec<u64> {
        std::mem::take(&mut *self.0.borrow_mut())
            .into_iter()
            .collect()
    }
}

fn range(start: u64, pages: u64) -> GfnRange {
    GfnRange::new(Gfn(start), pages).unwrap()
}

fn target(pfn: u64, level: u32, write: bool) -> Target {
    Target {
        pfn: Pfn(pfn),
        level,
        access: if write {
            Access::ALL
        } else {
            Access::READ_EXECUTE
        },
        writes: Writes::Allowed,
        memory: MemoryType::WriteBack,
    }
}

fn fault<F: pageferry_tdp::format::Format>(
    worker: &mut M<F>,
    gfn: u64,
    access: Access,
    target: Target,
    log: &impl Log,
) -> Result<How, Refused> {
    let ticket = worker.ticket();
    let fault = Fault {
        gfn: Gfn(gfn),
        access,
    };
    worker
        .fault(ticket, fault, target, log)
        .map(|mapped| mapped.how)
}

#[test]
fn a_fault_maps_and_a_second_is_spurious() {
    let mmu = Mmu::<Ept4, _>::new(Heap::default()).unwrap();
    let mut worker = mmu.worker();
    let write = Access::READ_WRITE;
    assert_eq!(
        fault(&mut worker, 0x1234, write, target(0x77, 1, true), &()),
        Ok(How::Installed)
    );
    assert_eq!(
        fault(&mut worker, 0x1234, write, target(0x77, 1, true), &()),
        Ok(How::Spurious)
    );
    let found = worker.walk(Gfn(0x1234)).unwrap();
    assert_eq!((found.leaf.pfn, found.level), (Pfn(0x77), 1));
    assert_eq!((mmu.stats().leaves, mmu.stats().tables), ([1, 0, 0], 3));
    assert_eq!(worker.zap(range(0x1234, 1), &()), 1);
    assert_eq!(worker.walk(Gfn(0x1234)), None);
    assert_eq!(mmu.platform().take_flushes().len(), 1);
    drop(worker);
    assert_eq!(mmu.platform().live.load(Ordering::Relaxed), 4);
}

#[test]
fn large_pages_are_mapped_split_and_recovered() {
    let mmu = Mmu::<Npt5, _>::new(Heap::default()).unwrap();
    let mut worker = mmu.worker();
    let large = |gfn: u64| target(0x4_0000 + gfn, 2, true);
    assert_eq!(
        fault(&mut worker, 0x210, Access::READ, large(0x210), &()),
        Ok(How::Installed)
    );
    assert_eq!(mmu.stats().leaves, [0, 1, 0]);
    assert_eq!(worker.split(range(0x200, 0x200), 1, &()), Ok(1));
    assert_eq!(mmu.stats().leaves, [512, 0, 0]);
    assert_eq!(worker.walk(Gfn(0x3ff)).unwrap().leaf.pfn, Pfn(0x4_03ff));
    assert_eq!(
        mmu.platform().take_flushes(),
        [],
        "a split changes no translation"
    );
    let log = Dirty::default();
    assert_eq!(worker.write_protect(range(0x200, 0x200), &()), 512);
    let small = Target {
        level: 1,
        ..large(0x2aa)
    };
    assert_eq!(
        fault(&mut worker, 0x2aa, Access::READ_WRITE, small, &log),
        Ok(How::Upgraded)
    );
    assert_eq!(worker.clear_dirty(range(0x200, 0x200), &log), 1);
    assert_eq!(log.take(), [0x2aa]);
    assert_eq!(
        worker.recover(range(0x200, 0x200), &(), |gfn, level| Some(Target {
            level,
            ..large(gfn.0)
        })),
        1
    );
    assert_eq!(mmu.stats().leaves, [0, 1, 0]);
    assert_eq!(mmu.stats().tables, 3);
    assert_eq!(worker.reclaim(), 0);
}

#[test]
fn a_store_to_a_logged_page_splits_the_large_one() {
    let mmu = Mmu::<Sv48x4Svade, _>::new(Heap::default()).unwrap();
    let mut worker = mmu.worker();
    let log = Dirty::default();
    assert_eq!(
        fault(
            &mut worker,
            0x200,
            Access::READ,
            target(0x800, 2, false),
            &log
        ),
        Ok(How::Installed)
    );
    assert_eq!(
        fault(
            &mut worker,
            0x201,
            Access::READ_WRITE,
            target(0x801, 1, true),
            &log
        ),
        Ok(How::Upgraded)
    );
    assert_eq!(log.take(), [0x201]);
    assert_eq!(mmu.stats().leaves, [512, 0, 0]);
    assert_eq!(worker.write_protect(range(0x200, 512), &()), 1);
    let write = Fault {
        gfn: Gfn(0x205),
        access: Access::READ_WRITE,
    };
    assert_eq!(worker.fast_fault(write, &log).unwrap().how, How::Upgraded);
    assert_eq!(worker.fast_fault(write, &log).unwrap().how, How::Spurious);
    assert_eq!(log.take(), [0x205]);
}

#[test]
fn everything_goes_at_once_and_all_memory_comes_back() {
    let mmu = Mmu::<Ept4, _>::new(Heap::default()).unwrap();
    let mut worker = mmu.worker();
    for i in 0..2000 {
        let gfn = i * 0x333;
        fault(
            &mut worker,
            gfn,
            Access::READ_WRITE,
            target(gfn, 1, true),
            &(),
        )
        .unwrap();
    }
    let before = mmu.root();
    assert_eq!(worker.zap_all(&()), Ok(2000));
    assert_ne!(mmu.root(), before);
    assert_eq!((mmu.stats().leaves, mmu.stats().tables), ([0; 3], 0));
    drop(worker);
    assert_eq!(mmu.platform().live.load(Ordering::Relaxed), 1);
}

#[test]
fn what_an_invalidation_covers_is_not_mapped() {
    let mmu = Mmu::<Ept4, _>::new(Heap::default()).unwrap();
    let (mut worker, mut other) = (mmu.worker(), mmu.worker());
    fault(&mut worker, 0x10, Access::READ, target(0x10, 1, true), &()).unwrap();
    let old = worker.ticket();
    let invalidating = other.invalidate(&[range(0x10, 1)], &());
    assert_eq!(invalidating.zapped(), 1);
    assert!(worker.is_invalidating(Gfn(0x10)) && !worker.is_invalidating(Gfn(0x11)));
    assert_eq!(
        fault(&mut worker, 0x10, Access::READ, target(0x10, 1, true), &()),
        Err(Refused::Invalidated)
    );
    fault(&mut worker, 0x11, Access::READ, target(0x11, 1, true), &()).unwrap();
    drop(invalidating);
    let at = Fault {
        gfn: Gfn(0x10),
        access: Access::READ,
    };
    assert_eq!(
        worker.fault(old, at, target(0x10, 1, true), &()),
        Err(Refused::Invalidated)
    );
    fault(&mut worker, 0x10, Access::READ, target(0x20, 1, true), &()).unwrap();
}

#[test]
fn an_old_ticket_is_good_where_nothing_was_invalidated() {
    let mmu = Mmu::<Ept4, _>::new(Heap::default()).unwrap();
    let (mut worker, mut other) = (mmu.worker(), mmu.worker());
    let read = |gfn| Fault {
        gfn: Gfn(gfn),
        access: Access::READ,
    };
    let mut invalidate = |first, pages| drop(other.invalidate(&[range(first, pages)], &()));
    let old = worker.ticket();
    // While two ranges are invalidated together, no fault maps anything between them. Below and
    // above both, faults do.
    invalidate(0x10, 1);
    invalidate(0x20, 0x10);
    for (gfn, level, good) in [
        (0xf, 1, true),
        (0x10, 1, false),
        (0x11, 1, true),
        (0x1f, 1, true),
        (0x20, 1, false),
        (0x2f, 1, false),
        (0x30, 1, true),
        (0x1ff, 2, false),
        (0x200, 2, true),
    ] {
        let answer = worker.fault(old, read(gfn), target(gfn, level, true), &());
        assert_eq!(
            answer.is_ok(),
            good,
            "{gfn:#x} at level {level}: {answer:?}"
        );
    }
    // More invalidations have ended since than their ranges are kept.
    for _ in 2..16 {
        invalidate(0x10, 1);
    }
    let late = |worker: &mut Worker<Ept4, Heap>, gfn| {
        worker.fault(old, read(gfn), target(gfn, 1, true), &())
    };
    late(&mut worker, 0x40).unwrap();
    invalidate(0x10, 1);
    assert_eq!(late(&mut worker, 0x41), Err(Refused::Invalidated));
}
