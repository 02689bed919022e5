//! A panic inside the platform's flush or inside the log. Tables and counts stay right, and no
//! memory is lost.

use crate::platform::{Hooked, OnDirty, fault, map, new, range, target};
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{Access, Arm64Ipa48, Ept4, Format, Sv48x4Svade};
use pageferry_tdp::{Flush, Mmu, Worker};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

type Break = Arm64Ipa48<true>;

fn panics<R>(body: impl FnOnce() -> R) {
    assert!(catch_unwind(AssertUnwindSafe(body)).is_err(), "it panics");
}

/// The counts equal the contents of the tables. When the workers are gone, all memory that is not
/// linked is free.
fn check<F: Format>(mmu: &Arc<Mmu<F, Hooked>>, mut worker: Worker<F, Hooked>) {
    let mut leaves = [0; 3];
    worker.scan(range(0, F::GFN_LIMIT.0), |_, found| {
        leaves[found.level as usize - 1] += 1;
    });
    assert_eq!(mmu.stats().leaves, leaves);
    drop(worker);
    assert_eq!(mmu.platform().live() as u64, 1 + mmu.stats().tables);
    mmu.worker().zap_all(&()).unwrap();
    assert_eq!((mmu.stats().leaves, mmu.stats().tables), ([0; 3], 0));
    assert_eq!(mmu.platform().live(), 1);
}

#[test]
fn a_split_whose_flush_panics_leaves_the_page_as_it_was() {
    let mmu = new::<Break>();
    let mut worker = mmu.worker();
    fault(&mut worker, 0x200, Access::READ, target(0x800, 2)).unwrap();
    mmu.platform().at_next_flush(|| panic!("the flush fails"));
    panics(|| worker.split(range(0x200, 512), 1, &()));
    assert_eq!(worker.walk(Gfn(0x201)).map(|found| found.level), Some(2));
    assert_eq!(worker.split(range(0x200, 512), 1, &()), Ok(1));
    assert_eq!(worker.walk(Gfn(0x201)).unwrap().leaf.pfn, Pfn(0x801));
    check(&mmu, worker);
}

#[test]
fn a_recovery_whose_flush_panics_leaves_the_pages_as_they_were() {
    let mmu = new::<Break>();
    let mut worker = mmu.worker();
    map(&mut worker, 0x201);
    let large = |gfn: Gfn, level| (level == 2).then(|| target(gfn.0, level));
    mmu.platform().at_next_flush(|| panic!("the flush fails"));
    panics(|| worker.recover(range(0x200, 512), &(), large));
    assert_eq!(worker.walk(Gfn(0x201)).map(|found| found.level), Some(1));
    assert_eq!(worker.recover(range(0x200, 512), &(), large), 1);
    assert_eq!(worker.walk(Gfn(0x202)).map(|found| found.level), Some(2));
    check(&mmu, worker);
}

/// Tables that were cut off are not lost if the flush fails: the next call flushes again.
#[test]
fn a_zap_whose_flush_panics_is_flushed_later() {
    let mmu = new::<Ept4>();
    let mut worker = mmu.worker();
    map(&mut worker, 0x201);
    mmu.platform().at_next_flush(|| panic!("the flush fails"));
    panics(|| worker.zap(range(0x200, 512), &()));
    mmu.platform().take_flushes();
    worker.flush();
    assert_eq!(
        mmu.platform().take_flushes().len(),
        1,
        "what is owed stays owed"
    );
    worker.flush();
    assert_eq!(mmu.platform().take_flushes(), [], "and is paid once");
    check(&mmu, worker);
}

/// A log that panics at its `n`th report.
fn panic_at(n: u64) -> OnDirty<impl Fn(Gfn)> {
    let told = AtomicU64::new(0);
    OnDirty(move |_| {
        if told.fetch_add(1, Ordering::Relaxed) + 1 == n {
            panic!("the log fails");
        }
    })
}

fn mapped<F: Format>() -> (Arc<Mmu<F, Hooked>>, Worker<F, Hooked>) {
    let mmu = new::<F>();
    let mut worker = mmu.worker();
    // Two tables of level 1 under one of level 2, and one at a distance.
    for gfn in [0, 1, 2, 3, 511, 512, 513, 1 << 27] {
        map(&mut worker, gfn);
    }
    (mmu, worker)
}

fn a_zap_whose_log_panics<F: Format>() {
    for n in 1..=7 {
        let (mmu, mut worker) = mapped::<F>();
        panics(|| worker.zap(range(0, 1024), &panic_at(n)));
        check(&mmu, worker);
    }
}

fn a_fast_zap_whose_log_panics<F: Format>() {
    for n in 1..=8 {
        let (mmu, mut worker) = mapped::<F>();
        panics(|| worker.zap_all(&panic_at(n)));
        assert_eq!((mmu.stats().leaves, mmu.stats().tables), ([0; 3], 0), "{n}");
        check(&mmu, worker);
    }
}

fn a_fast_zap_whose_flush_panics<F: Format>() {
    let (mmu, mut worker) = mapped::<F>();
    let reported = RefCell::new(Vec::new());
    let log = OnDirty(|gfn: Gfn| reported.borrow_mut().push(gfn.0));
    mmu.platform().at_next_flush(|| panic!("the flush fails"));
    panics(|| worker.zap_all(&log));
    assert_eq!(reported.take(), [0, 1, 2, 3, 511, 512, 513, 1 << 27]);
    assert_eq!((mmu.stats().leaves, mmu.stats().tables), ([0; 3], 0));

    // vCPUs may still use the old root.
    mmu.platform().take_flushes();
    mmu.worker().flush();
    assert_eq!(mmu.platform().take_flushes(), [Flush::Roots]);
    map(&mut worker, 2);
    worker.flush();
    assert_eq!(mmu.platform().take_flushes(), [Flush::Roots]);
    worker.flush();
    assert_eq!(mmu.platform().take_flushes(), [], "the flush was owed once");
    check(&mmu, worker);
}

fn a_recovery_whose_log_panics<F: Format>() {
    for n in 1..=6 {
        let (mmu, mut worker) = mapped::<F>();
        // All of 1 GiB at once, so that the call cuts off a table of tables.
        let large = |gfn: Gfn, level| (level == 3).then(|| target(gfn.0, level));
        panics(|| worker.recover(range(0, 1 << 18), &panic_at(n), large));
        check(&mmu, worker);
    }
}

macro_rules! of_formats {
    ($($check:ident),+) => { $(mod $check {
        use super::{Break, Ept4};
        #[test] fn ept4() { super::$check::<Ept4>(); }
        #[test] fn arm64_ipa48() { super::$check::<Break>(); }
    })+ };
}

of_formats!(
    a_zap_whose_log_panics,
    a_fast_zap_whose_log_panics,
    a_fast_zap_whose_flush_panics,
    a_recovery_whose_log_panics
);

/// If dirty equals writable, the fault reports to the log.
#[test]
fn a_fault_whose_log_panics_has_mapped_the_page() {
    let mmu = new::<Sv48x4Svade>();
    let mut worker = mmu.worker();
    let fault = pageferry_tdp::Fault {
        gfn: Gfn(9),
        access: Access::READ_WRITE,
    };
    panics(|| worker.fault(worker.ticket(), fault, target(9, 1), &panic_at(1)));
    assert!(worker.walk(Gfn(9)).is_some());
    check(&mmu, worker);
}
