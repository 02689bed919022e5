//! No memory for tables, at each allocation in turn. The call is refused, nothing is half done, and
//! a later call succeeds.

use super::machine::{Machine, Parts, range};
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{
    Access, Arm64Ipa40, Ept4, Ept5, Format, MemoryType, Npt4, Sv57x4Svadu, Writes,
};
use pageferry_tdp::{Fault, Found, Mmu, OutOfTables, Refused, Target, Worker};
use std::sync::Arc;
use std::sync::atomic::Ordering;

type W<F> = Worker<F, Machine>;

struct Scarce<F: Format> {
    parts: Arc<Parts>,
    mmu: Arc<Mmu<F, Machine>>,
}

impl<F: Format> Scarce<F> {
    fn new() -> Self {
        let parts = Arc::new(Parts::default());
        let mmu = Mmu::new(Machine(Arc::clone(&parts))).unwrap();
        Self { parts, mmu }
    }

    /// Allows this many more tables.
    fn allow(&self, tables: Option<usize>) {
        *self.parts.spare.lock().unwrap() = tables;
    }

    fn live(&self) -> usize {
        self.parts.live.load(Ordering::Relaxed)
    }
}

fn target(gfn: u64, level: u32) -> Target {
    Target {
        pfn: Pfn((1 << 18) + gfn),
        level,
        access: Access::ALL,
        writes: Writes::Allowed,
        memory: MemoryType::WriteBack,
    }
}

fn fault<F: Format>(worker: &mut W<F>, gfn: u64, level: u32) -> Result<(), Refused> {
    let fault = Fault {
        gfn: Gfn(gfn),
        access: Access::READ_WRITE,
    };
    let ticket = worker.ticket();
    worker
        .fault(ticket, fault, target(gfn, level), &())
        .map(drop)
}

fn leaves<F: Format>(worker: &mut W<F>) -> Vec<(u64, Found)> {
    let mut leaves = Vec::new();
    worker.scan(range(0, 1 << 20), |gfn, found| leaves.push((gfn.0, found)));
    leaves
}

fn no_root_no_mmu<F: Format>() {
    let parts = Arc::new(Parts::default());
    *parts.spare.lock().unwrap() = Some(0);
    let mmu = Mmu::<F, _>::new(Machine(Arc::clone(&parts)));
    assert_eq!(mmu.err(), Some(OutOfTables));
    assert_eq!(parts.live.load(Ordering::Relaxed), 0);
}

/// A fault allocates all tables that it may need before it begins.
fn a_fault_is_refused_whole<F: Format>() {
    let needs = F::LEVELS as usize - 1;
    for spare in 0..=needs {
        let scarce = Scarce::<F>::new();
        let mut worker = scarce.mmu.worker();
        scarce.allow(Some(spare));
        if spare < needs {
            let refused = fault(&mut worker, 0x1234, 1);
            assert_eq!(refused, Err(Refused::OutOfTables(OutOfTables)));
            assert_eq!(
                (scarce.mmu.stats().tables, scarce.mmu.stats().leaves),
                (0, [0; 3])
            );
            assert_eq!(leaves(&mut worker), []);
            // The allocated tables stay in the cache.
            assert_eq!(scarce.live(), 1 + spare);
            scarce.allow(Some(needs - spare));
        }
        fault(&mut worker, 0x1234, 1).unwrap();
        assert_eq!(
            worker.walk(Gfn(0x1234)).unwrap().leaf.pfn,
            Pfn((1 << 18) + 0x1234)
        );
        assert_eq!(scarce.live(), 1 + needs);
        // A fault that needs no table needs no memory either, but it does not know that before.
        let again = fault(&mut worker, 0x1234, 1);
        assert_eq!(again, Err(Refused::OutOfTables(OutOfTables)));
        drop(worker);
        assert_eq!(scarce.live() as u64, 1 + scarce.mmu.stats().tables);
    }
}

/// Splits a page of 1 GiB into pages of 4 KiB, with memory for only `spare` tables. The pages that
/// are split by then stay split and translate as before. The others are unchanged.
fn a_split_stops_between_pages<F: Format>() {
    let range = range(0, 3 * 512);
    // One table for the page itself, three for its pages in the range.
    for spare in 0..5 + F::LEVELS as usize {
        let scarce = Scarce::<F>::new();
        let mut worker = scarce.mmu.worker();
        fault(&mut worker, 0, 3).unwrap();
        worker = {
            // A new worker, whose cache is empty.
            drop(worker);
            scarce.mmu.worker()
        };
        scarce.allow(Some(spare));
        let first = worker.split(range, 1, &());
        let done = scarce.mmu.stats();
        let mut covered = 0;
        for (gfn, found) in leaves(&mut worker) {
            assert_eq!(gfn, covered, "no gap, no overlap");
            assert_eq!(found.leaf.pfn, Pfn((1 << 18) + gfn));
            assert!(found.leaf.access.write && found.leaf.dirty && found.leaf.accessed);
            covered += F::frames_per_entry(found.level);
        }
        assert_eq!(covered, 1 << 18);
        // Each table is linked in place of one leaf.
        assert_eq!(
            done.leaves.iter().sum::<u64>(),
            1 + (done.tables - (F::LEVELS as u64 - 3)) * 511
        );
        scarce.allow(None);
        let split = match first {
            Ok(split) => split,
            Err(OutOfTables) => {
                let before = done.tables - (F::LEVELS as u64 - 3);
                before + worker.split(range, 1, &()).unwrap()
            }
        };
        assert_eq!(split, 4);
        assert_eq!(scarce.mmu.stats().leaves, [3 * 512, 509, 0]);
    }
}

fn a_fast_zap_needs_a_root<F: Format>() {
    let scarce = Scarce::<F>::new();
    let mut worker = scarce.mmu.worker();
    fault(&mut worker, 7, 1).unwrap();
    let (root, before) = (scarce.mmu.root(), leaves(&mut worker));
    scarce.allow(Some(0));
    assert_eq!(worker.zap_all(&()), Err(OutOfTables));
    assert_eq!((scarce.mmu.root(), leaves(&mut worker)), (root, before));
    assert!(scarce.parts.flushes.load(Ordering::Relaxed) == 0);
    scarce.allow(Some(1));
    assert_eq!(worker.zap_all(&()), Ok(1));
    assert_eq!(leaves(&mut worker), []);
}

/// Calls that take translations away need no memory.
#[test]
fn zapping_and_recovering_need_no_tables() {
    let scarce = Scarce::<Npt4>::new();
    let mut worker = scarce.mmu.worker();
    for gfn in 0..1024 {
        fault(&mut worker, gfn, 1).unwrap();
    }
    scarce.allow(Some(0));
    assert_eq!(worker.write_protect(range(0, 1024), &()), 1024);
    let large = |gfn: Gfn, level| Some(target(gfn.0, level));
    assert_eq!(worker.recover(range(0, 512), &(), large), 1);
    assert_eq!(worker.zap(range(0, 1024), &()), 1024);
    assert!(worker.invalidate(&[range(0, 1024)], &()).zapped() == 0);
}

macro_rules! of_formats {
    ($($check:ident),+) => { $(mod $check {
        use super::{Arm64Ipa40, Ept4, Ept5, Sv57x4Svadu};
        #[test] fn ept4() { super::$check::<Ept4>(); }
        #[test] fn ept5() { super::$check::<Ept5>(); }
        #[test] fn sv57x4_svadu() { super::$check::<Sv57x4Svadu>(); }
        #[test] fn arm64_ipa40() { super::$check::<Arm64Ipa40<true>>(); }
    })+ };
}

of_formats!(
    no_root_no_mmu,
    a_fault_is_refused_whole,
    a_split_stops_between_pages,
    a_fast_zap_needs_a_root
);
