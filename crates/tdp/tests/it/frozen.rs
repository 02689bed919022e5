//! Sweeps that meet frozen entries. Another worker cut their table off, or is changing the size of
//! a page, so they start again from the root.
//!
//! The other worker recovers a large page in the middle of the sweep. That cuts the sweep's table
//! off and installs a large leaf in its place. The sweep must find the new entries.

use crate::platform::{Hooked, OnDirty, map, new, range, target};
use pageferry_addr::Gfn;
use pageferry_tdp::format::{Access, Arm64Ipa48, Ept4, Format, Npt4, Sv48x4Svadu};
use pageferry_tdp::{Look, Mmu, Target, Worker};
use pageferry_testkit::{Stop, wait_until};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const FIRST: u64 = 0x200;

/// Maps 512 dirty pages, and calls `sweep` with a log. At the first page, the log recovers their
/// large page.
fn meets_a_recovery<F: Format>(
    sweep: impl FnOnce(&mut Worker<F, Hooked>, &OnDirty<&dyn Fn(Gfn)>),
) -> (Arc<Mmu<F, Hooked>>, Worker<F, Hooked>) {
    let mmu = new::<F>();
    let (mut worker, other) = (mmu.worker(), RefCell::new(mmu.worker()));
    for gfn in FIRST..FIRST + 512 {
        map(&mut worker, gfn);
    }
    let recovered = RefCell::new(0);
    let recover = |gfn: Gfn| {
        if gfn.0 == FIRST {
            let large = |gfn: Gfn, level| (level == 2).then(|| target(gfn.0, level));
            *recovered.borrow_mut() += other.borrow_mut().recover(range(FIRST, 512), &(), large);
        }
    };
    sweep(&mut worker, &OnDirty(&recover));
    assert_eq!(recovered.take(), 1, "the large page came in the middle");
    drop(other);
    (mmu, worker)
}

/// Less than the whole table, which would be cut off at once.
const MOST: u64 = 511;

fn a_zap_finds_the_large_page<F: Format>() {
    let (mmu, mut worker) = meets_a_recovery::<F>(|worker, log| {
        worker.zap(range(FIRST, MOST), log);
    });
    assert_eq!(worker.walk(Gfn(FIRST + 5)), None, "zapped as a whole");
    assert_eq!(mmu.stats().leaves, [0; 3]);
}

fn write_protection_finds_the_large_page<F: Format>() {
    let (_mmu, mut worker) = meets_a_recovery::<F>(|worker, log| {
        worker.write_protect(range(FIRST, MOST), log);
    });
    assert_eq!(worker.translate(Gfn(FIRST + 5), Access::READ_WRITE), None);
    assert!(worker.translate(Gfn(FIRST + 5), Access::READ).is_some());
}

/// The callback of [`Worker::recover`] that allows pages of `level` only.
fn only(level: u32) -> impl Fn(Gfn, u32) -> Option<Target> {
    move |gfn, at| (at == level).then(|| target(gfn.0, at))
}

/// Maps pages of 4 KiB, and calls `sweep`. When that enters the table of level 2, another worker
/// recovers the page of 1 GiB, which cuts that table off. Then it calls `after`.
fn enters_a_table_that_is_cut_off<F: Format>(
    after: impl FnOnce(&mut Worker<F, Hooked>) + Send + 'static,
    sweep: impl FnOnce(&mut Worker<F, Hooked>),
) -> Worker<F, Hooked> {
    let mmu = new::<F>();
    let (mut worker, mut other) = (mmu.worker(), mmu.worker());
    for gfn in [5, 512 + 5] {
        map(&mut worker, gfn);
    }
    let tables = mmu.platform().tables_to(&mut worker, 5);
    let recovered = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&recovered);
    mmu.platform().at_table(tables[tables.len() - 2], move || {
        assert_eq!(other.recover(range(0, 1 << 18), &(), only(3)), 1);
        after(&mut other);
        recovered.store(true, Ordering::Relaxed);
    });
    sweep(&mut worker);
    assert!(seen.load(Ordering::Relaxed), "the sweep entered the table");
    worker
}

fn a_split_finds_the_large_page<F: Format>() {
    let mut worker = enters_a_table_that_is_cut_off::<F>(
        |_| {},
        |worker| assert_eq!(worker.split(range(0, 1024), 1, &()), Ok(3)),
    );
    for gfn in [5, 512 + 5] {
        let found = worker.walk(Gfn(gfn)).unwrap();
        assert_eq!((found.level, found.leaf.pfn.0), (1, gfn));
    }
}

/// The large page is split again before the sweep goes on.
fn a_recovery_finds_the_new_tables<F: Format>() {
    let mut worker = enters_a_table_that_is_cut_off::<F>(
        |other| assert_eq!(other.split(range(0, 1024), 1, &()), Ok(3)),
        |worker| assert_eq!(worker.recover(range(0, 1024), &(), only(2)), 2),
    );
    for gfn in [5, 512 + 5] {
        let found = worker.walk(Gfn(gfn)).unwrap();
        assert_eq!((found.level, found.leaf.pfn.0), (2, gfn & !511));
    }
}

/// A recovery freezes the link to the marker's table, flushes, and puts the link back because the
/// flush panics. The sweep meets the frozen entry and must wait for the link.
#[test]
fn forgotten_markers_go_from_a_table_whose_link_was_frozen() {
    type F = Arm64Ipa48<true>;
    let mmu = new::<F>();
    let (mut worker, mut other) = (mmu.worker(), mmu.worker());
    worker.mark_mmio(worker.ticket(), Gfn(5), 1).unwrap();
    let tables = mmu.platform().tables_to(&mut worker, 5);

    // The sweep is about to read the link. The link is frozen. The sweep is over.
    let [at_link, frozen, over] = [(); 3].map(|()| Arc::new(Stop::new()));
    mmu.platform().at_table(tables[tables.len() - 2], {
        let (at_link, frozen) = (Arc::clone(&at_link), Arc::clone(&frozen));
        move || {
            at_link.stop();
            wait_until("the frozen link", || frozen.is_stopped());
        }
    });
    mmu.platform().at_next_flush({
        let (mmu, over) = (Arc::downgrade(&mmu), Arc::clone(&over));
        move || {
            let mmu = mmu.upgrade().unwrap();
            let relaxed = mmu.platform().relaxed();
            frozen.stop();
            let is_met = || over.is_stopped() || mmu.platform().relaxed() > relaxed;
            wait_until("the sweep at the frozen link", is_met);
            panic!("the flush fails");
        }
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _over = over.on_drop();
            worker.forget_mmio();
        });
        wait_until("the sweep at the link", || at_link.is_stopped());
        let recovery = AssertUnwindSafe(|| other.recover(range(0, 512), &(), only(2)));
        assert!(catch_unwind(recovery).is_err(), "the flush panics");
    });
    assert_eq!(other.look(Gfn(5), Access::READ), Look::Absent);
}

macro_rules! of_formats {
    ($($check:ident),+) => { $(mod $check {
        use super::{Ept4, Npt4, Sv48x4Svadu};
        #[test] fn ept4() { super::$check::<Ept4>(); }
        #[test] fn npt4() { super::$check::<Npt4>(); }
        #[test] fn sv48x4_svadu() { super::$check::<Sv48x4Svadu>(); }
    })+ };
}

of_formats!(
    a_zap_finds_the_large_page,
    write_protection_finds_the_large_page,
    a_split_finds_the_large_page,
    a_recovery_finds_the_new_tables
);
