//! Sweeps that meet frozen entries. Another worker cut their table off, so they start again from
//! the root.
//!
//! The other worker recovers the large page inside the log's callback, so between two entries of
//! the sweep. That cuts the sweep's table off and installs a large leaf in its place. The sweep
//! must find that leaf.

use crate::platform::{Hooked, OnDirty, map, new, range, target};
use pageferry_addr::Gfn;
use pageferry_tdp::format::{Access, Ept4, Format, Npt4, Sv48x4Svadu};
use pageferry_tdp::{Mmu, Worker};
use std::cell::RefCell;
use std::sync::Arc;

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
