//! Every scheme compared with a plain map, and used by two threads.

use super::Operation;
use super::measure::frame;
use super::run::run;
#[cfg(target_pointer_width = "64")]
use super::scheme::Aarch64Paging;
use super::scheme::{
    CompareExchange, EpochPinned, Found, Komora, Locked, Parallel, PlainStores, ReadLocked, Scheme,
    TABLE_PAGES, Tdp, Worker,
};
#[cfg(target_arch = "x86_64")]
use super::scheme::{Multiarch, OffsetTable};
use crate::kit::Random;
use crate::schemes::Operation as _;
use pageferry_addr::{Gfn, GfnRange};
use std::collections::BTreeMap;

/// The first frame of the tests: three tables, across the end of a table of level 3.
const FIRST: u64 = (1 << 27) - TABLE_PAGES;
const PAGES: u64 = 3 * TABLE_PAGES;

/// The mapped frames, and whether stores to them are allowed.
type Model = BTreeMap<u64, bool>;

fn range(start: u64, pages: u64) -> GfnRange {
    GfnRange::new(Gfn(start), pages).expect("a range")
}

/// The length of the longest range from `start` whose pages are all mapped, or all unmapped. At
/// most `most` pages.
fn run_of(model: &Model, start: u64, most: u64, mapped: bool) -> u64 {
    let end = (start + most).min(FIRST + PAGES);
    (start..end)
        .take_while(|gfn| model.contains_key(gfn) == mapped)
        .count() as u64
}

fn agree<W: Worker>(worker: &mut W, model: &Model, gfn: u64, after: &str) {
    let expected = model.get(&gfn).map(|&writable| Found {
        pfn: frame(Gfn(gfn)),
        writable,
    });
    assert_eq!(
        worker.find(Gfn(gfn)),
        expected,
        "gfn {gfn:#x} after {after}"
    );
}

/// Does random operations. After each, random pages and the edges of the change must be as in the
/// model.
fn follows_the_model<S: Scheme>() {
    let mut random = Random::new(8);
    let (mut worker, mut model) = (S::single(), Model::new());
    let mut done = [0; 5];
    for _ in 0..600 {
        let start = FIRST + random.below(PAGES);
        let most = 1 + random.below(700);
        let (from, count, kind);
        match random.below(8) {
            0..3 => {
                (kind, from) = (0, start);
                count = run_of(&model, start, most, false);
                for gfn in start..start + count {
                    worker.map(Gfn(gfn), frame(Gfn(gfn)));
                    model.insert(gfn, true);
                }
            }
            3 => {
                (kind, from) = (1, start / TABLE_PAGES * TABLE_PAGES);
                let free = run_of(&model, from, PAGES, false);
                count = free / TABLE_PAGES * TABLE_PAGES;
                if count > 0 {
                    worker.map_range(range(from, count), frame(Gfn(from)));
                    model.extend((from..from + count).map(|gfn| (gfn, true)));
                }
            }
            4 => {
                (kind, from) = (2, start);
                count = run_of(&model, start, most, true);
                if count > 0 {
                    worker.protect_range(range(start, count));
                    model.extend((start..start + count).map(|gfn| (gfn, false)));
                }
            }
            5 => {
                (kind, from) = (3, start);
                count = run_of(&model, start, most.min(9), true);
                for gfn in start..start + count {
                    worker.unmap(Gfn(gfn));
                    model.remove(&gfn);
                }
            }
            _ => {
                (kind, from) = (4, start);
                count = run_of(&model, start, 2 * most, true);
                if count > 0 {
                    worker.unmap_range(range(start, count));
                    model.retain(|gfn, _| !(start..start + count).contains(gfn));
                }
            }
        }
        done[kind] += count;
        let after = format!(
            "operation {kind} on {count} pages from {from:#x}, {}",
            S::NAME
        );
        for edge in [from - 1, from, from + count - 1, from + count] {
            agree(&mut worker, &model, edge, &after);
        }
        for _ in 0..4 {
            agree(&mut worker, &model, FIRST + random.below(PAGES), &after);
        }
    }
    for gfn in FIRST..FIRST + PAGES {
        agree(&mut worker, &model, gfn, "all");
    }
    assert!(
        done.iter().all(|&pages| pages > 0),
        "{done:?} of {}",
        S::NAME
    );
}

/// Two threads map the same pages, or disjoint ones. Then all pages are mapped, and all can be
/// unmapped.
fn maps_with_two_threads<S: Parallel>() {
    for firsts in [[FIRST, FIRST], [FIRST, FIRST + PAGES]] {
        let tables = S::tables();
        std::thread::scope(|scope| {
            for first in firsts {
                let tables = &tables;
                scope.spawn(move || {
                    let mut worker = S::worker(tables);
                    for gfn in first..first + PAGES {
                        worker.map(Gfn(gfn), frame(Gfn(gfn)));
                        agree(&mut worker, &Model::from([(gfn, true)]), gfn, S::NAME);
                    }
                });
            }
        });
        let mut worker = S::worker(&tables);
        let pages = firsts[1] + PAGES - FIRST;
        for gfn in FIRST..FIRST + pages {
            agree(&mut worker, &Model::from([(gfn, true)]), gfn, S::NAME);
        }
        worker.unmap_range(range(FIRST, pages));
        for gfn in FIRST..FIRST + pages {
            agree(&mut worker, &Model::new(), gfn, S::NAME);
        }
    }
}

/// All tests of a scheme that several threads change.
fn both<S: Parallel>() {
    follows_the_model::<S>();
    maps_with_two_threads::<S>();
}

#[test]
fn the_floors_translate_what_was_mapped() {
    follows_the_model::<PlainStores>();
    both::<CompareExchange>();
    both::<EpochPinned>();
    both::<ReadLocked>();
}

#[test]
fn ours_translates_what_was_mapped() {
    both::<Tdp>();
}

#[test]
fn the_peers_translate_what_was_mapped() {
    both::<Komora>();
    #[cfg(target_arch = "x86_64")]
    both::<Locked<OffsetTable>>();
    #[cfg(target_arch = "x86_64")]
    both::<Locked<Multiarch>>();
    #[cfg(target_pointer_width = "64")]
    both::<Locked<Aarch64Paging>>();
}

#[test]
fn ours_flushes_what_it_takes_away_and_nothing_else() {
    let mut worker = Tdp::single();
    for gfn in 0..TABLE_PAGES {
        worker.map(Gfn(gfn), frame(Gfn(gfn)));
    }
    assert_eq!(worker.flushes(), 0);
    worker.protect_range(range(0, TABLE_PAGES));
    assert_eq!(worker.flushes(), 1);
    worker.unmap(Gfn(0));
    assert_eq!(worker.flushes(), 2);
    worker.unmap_range(range(1, TABLE_PAGES - 1));
    assert_eq!(worker.flushes(), 3);
}

#[test]
fn a_run_has_every_figure_of_every_scheme() {
    let rows = run(2 * TABLE_PAGES, TABLE_PAGES, TABLE_PAGES, 2).expect("a run");
    let of = |operation: Operation, scheme: &str| {
        let mut rows = rows.iter();
        rows.find(|row| row.case == operation.case() && row.subject == scheme)
    };
    use Operation::{Find, FindRandom, MapPage, MapRange, ProtectRange, UnmapPage, UnmapRange};
    let schemes: std::collections::BTreeSet<_> = rows.iter().map(|row| &row.subject).collect();
    assert!(schemes.len() >= 6, "{schemes:?}");
    // If this machine is too busy to run two threads at once, they have no figures.
    for operation in [
        Find,
        FindRandom,
        MapPage,
        MapRange,
        ProtectRange,
        UnmapPage,
        UnmapRange,
    ] {
        for scheme in &schemes {
            assert!(of(operation, scheme).is_some(), "{operation:?} of {scheme}");
        }
    }
    assert!(rows.iter().all(|row| row.value > 0.0 && row.min <= row.max));
    assert!(of(Operation::MapPartitioned, PlainStores::NAME).is_none());
    let note = |operation| &of(operation, Tdp::NAME).expect("a row").conditions.note;
    assert!(!note(MapPage).contains("flush"));
    assert!(
        note(UnmapPage).contains("per 1 pages"),
        "{}",
        note(UnmapPage)
    );
    assert!(note(ProtectRange).contains(&format!("per {TABLE_PAGES} pages")));
    let judged = rows.iter().filter(|row| row.met.is_some());
    assert!(judged.clone().count() >= 8);
    assert!(judged.clone().all(|row| row.subject == Tdp::NAME));
}
