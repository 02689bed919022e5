//! Interleavings of two mappers that race to link the same tables, of a zapper beside them, and of who looks on.
//!
//! Run by `RUSTFLAGS="--cfg loom" cargo test -p pageferry-tdp --release --test loom`. Tables have two
//! entries there: frames 0 and 1 share all tables, 0 and 2 all but the last.
//!
//! Each model gives what its threads saw, and the test names the sets of outcomes that must and may be seen:
//! loom remembers one last access an atomic, so a thread that loads before it exchanges can hide an earlier
//! load of another's from it, and a model may silently explore less than it says. The thread whose loads
//! decide is therefore the one that is spawned last.
#![cfg(loom)]

use loom::sync::Arc;
use loom::thread;
use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_tdp::{MapOutcome, StageTwo};
use std::collections::BTreeSet;
use std::sync::Mutex;

/// A root and one table at each of three levels; alignment keeps their size as loom shrinks their entries.
const BYTES_OF_ONE_PATH: u64 = (16 << 10) + 3 * 4096;

/// All that `model` can give.
fn explore<O: Ord + Send + 'static>(model: impl Fn() -> O + Sync + Send + 'static) -> BTreeSet<O> {
    let seen = std::sync::Arc::new(Mutex::new(BTreeSet::new()));
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    let outcomes = std::sync::Arc::clone(&seen);
    builder.check(move || {
        let outcome = model();
        outcomes.lock().unwrap().insert(outcome);
    });
    std::mem::take(&mut seen.lock().unwrap())
}

fn both_frames() -> GfnRange {
    GfnRange::new(Gfn(0), 2).unwrap()
}

/// What stands at frame 0: nothing, or whether it is writable. The counts must say the same.
fn left_at_zero(tables: &StageTwo) -> Option<bool> {
    let left = tables.walk(Gfn(0)).map(|leaf| leaf.writable);
    assert_eq!(tables.mapped_pages(), u64::from(left.is_some()));
    assert_eq!(tables.writable_pages(), u64::from(left == Some(true)));
    left
}

#[test]
fn two_mappers_link_one_path() {
    explore(|| {
        let tables = Arc::new(StageTwo::new());
        let other = {
            let tables = Arc::clone(&tables);
            thread::spawn(move || {
                assert_eq!(tables.map(Gfn(0), Pfn(7), true), MapOutcome::Installed);
            })
        };
        assert_eq!(tables.map(Gfn(1), Pfn(8), false), MapOutcome::Installed);
        other.join().unwrap();
        // Had both linked, one of the two pages would be in a table that nobody finds.
        assert_eq!(tables.walk(Gfn(0)).map(|leaf| leaf.pfn), Some(Pfn(7)));
        assert_eq!(tables.walk(Gfn(1)).map(|leaf| leaf.pfn), Some(Pfn(8)));
        assert_eq!((tables.mapped_pages(), tables.writable_pages()), (2, 1));
        assert_eq!(tables.table_bytes(), BYTES_OF_ONE_PATH);
    });
}

#[test]
fn two_mappers_of_one_page_and_a_zapper() {
    let seen = explore(|| {
        let tables = Arc::new(StageTwo::new());
        let mapper = {
            let tables = Arc::clone(&tables);
            thread::spawn(move || tables.map(Gfn(0), Pfn(7), true))
        };
        let zapper = {
            let tables = Arc::clone(&tables);
            thread::spawn(move || tables.zap(both_frames()))
        };
        let outcomes = [tables.map(Gfn(0), Pfn(7), false), mapper.join().unwrap()];
        let removed = zapper.join().unwrap();
        let installed = outcomes
            .iter()
            .filter(|outcome| **outcome == MapOutcome::Installed)
            .count() as u64;
        assert_eq!(tables.mapped_pages(), installed - removed);
        assert_eq!(tables.table_bytes(), BYTES_OF_ONE_PATH);
        (installed, removed, left_at_zero(&tables))
    });
    // Without a removal one mapper installs and the writable permission stands; between the two, both
    // install; after both, nothing is left.
    let possible = BTreeSet::from([
        (1, 0, Some(true)),
        (1, 1, None),
        (2, 1, Some(false)),
        (2, 1, Some(true)),
    ]);
    assert_eq!(seen, possible);
}

#[test]
fn a_walker_follows_tables_that_are_just_being_linked() {
    let seen = explore(|| {
        let tables = Arc::new(StageTwo::new());
        let walker = {
            let tables = Arc::clone(&tables);
            thread::spawn(move || tables.walk(Gfn(2)).map(|leaf| leaf.pfn.0))
        };
        tables.map(Gfn(2), Pfn(7), true);
        walker.join().unwrap()
    });
    assert_eq!(seen, BTreeSet::from([None, Some(7)]));
}

#[test]
fn a_walker_sees_what_was_written_before_the_page_was_mapped() {
    use loom::sync::atomic::{AtomicU64, Ordering};
    let seen = explore(|| {
        let tables = Arc::new(StageTwo::new());
        // Its tables are linked before, so that no link orders the page's contents.
        tables.map(Gfn(3), Pfn(6), true);
        let page = Arc::new(AtomicU64::new(0));
        let walker = {
            let (tables, page) = (Arc::clone(&tables), Arc::clone(&page));
            thread::spawn(move || {
                let leaf = tables.walk(Gfn(2));
                leaf.map(|_| page.load(Ordering::Relaxed))
            })
        };
        page.store(42, Ordering::Relaxed);
        tables.map(Gfn(2), Pfn(7), true);
        walker.join().unwrap()
    });
    assert_eq!(seen, BTreeSet::from([None, Some(42)]));
}

#[test]
fn who_maps_in_vain_sees_what_the_first_wrote() {
    use loom::sync::atomic::{AtomicU64, Ordering};
    let seen = explore(|| {
        let tables = Arc::new(StageTwo::new());
        tables.map(Gfn(1), Pfn(6), true);
        let page = Arc::new(AtomicU64::new(0));
        let second = {
            let (tables, page) = (Arc::clone(&tables), Arc::clone(&page));
            thread::spawn(move || {
                let spurious = tables.map(Gfn(0), Pfn(7), true) == MapOutcome::Spurious;
                spurious.then(|| page.load(Ordering::Relaxed))
            })
        };
        page.store(42, Ordering::Relaxed);
        tables.map(Gfn(0), Pfn(7), true);
        second.join().unwrap()
    });
    assert_eq!(seen, BTreeSet::from([None, Some(42)]));
}

#[test]
fn a_zapper_and_a_protector_count_one_page_once() {
    let seen = explore(|| {
        let tables = Arc::new(StageTwo::new());
        tables.map(Gfn(0), Pfn(7), true);
        let protector = {
            let tables = Arc::clone(&tables);
            thread::spawn(move || tables.write_protect_mask(Gfn(0), 1))
        };
        let removed = tables.zap(both_frames());
        let protected = protector.join().unwrap();
        (removed, protected, left_at_zero(&tables))
    });
    assert_eq!(seen, BTreeSet::from([(1, 0, None), (1, 1, None)]));
}

#[test]
fn two_zappers_remove_one_page_once() {
    let seen = explore(|| {
        let tables = Arc::new(StageTwo::new());
        tables.map(Gfn(0), Pfn(7), true);
        let other = {
            let tables = Arc::clone(&tables);
            thread::spawn(move || tables.zap(both_frames()))
        };
        let removed = tables.zap(both_frames());
        (removed, other.join().unwrap(), left_at_zero(&tables))
    });
    assert_eq!(seen, BTreeSet::from([(0, 1, None), (1, 0, None)]));
}

#[test]
fn an_upgrade_beside_write_protection_counts_the_permission_once() {
    let seen = explore(|| {
        let tables = Arc::new(StageTwo::new());
        tables.map(Gfn(0), Pfn(7), true);
        let upgrade = {
            let tables = Arc::clone(&tables);
            thread::spawn(move || tables.map(Gfn(0), Pfn(7), true))
        };
        let protected = tables.write_protect(both_frames());
        let upgraded = upgrade.join().unwrap() == MapOutcome::Upgraded;
        (protected, upgraded, left_at_zero(&tables))
    });
    let possible = BTreeSet::from([(1, false, Some(false)), (1, true, Some(true))]);
    assert_eq!(seen, possible);
}
