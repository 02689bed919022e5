//! Sweeps that meet frozen entries: their table was cut off under them, so they begin again from
//! the root.
//!
//! The other worker recovers the large page from inside the log's callback, that is between two
//! entries of the sweep. Its table is cut off then, and a large leaf stands in its place, which the
//! sweep must find.

use crate::platform::{Hooked, OnDirty, map, new, range, target};
use pageferry_addr::Gfn;
use pageferry_tdp::format::{Access, Ept4, Format, Npt4, Sv48x4Svadu};
use pageferry_tdp::{Mmu, Worker};
use std::cell::RefCell;
use std::sync::Arc;

const FIRST: u64 = 0x200;

/// Maps 512 dirty pages, and calls `sweep` with a log that recovers their large page when it is
/// told of the first.
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

/// Not the whole table, which would be cut off at once.
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
    write_protection_finds_the_large_page
);
