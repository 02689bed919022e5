//! Many threads on the same tables: what each sees is consistent, and the counts are right in the end.

use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_tdp::{MapOutcome, StageTwo};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Four tables of leaves; the ranges of all threads overlap.
const FRAMES: u64 = 2048;
const BASE: u64 = (1 << 18) - 1024;
/// How many leaves the zapper removes, and the protector changes, before all stop.
const ENOUGH: u64 = 50_000;
/// Hundreds of times what the test takes.
const LIMIT: Duration = Duration::from_secs(60);

/// Every mapper maps a frame to this, so that any other translation is a torn or lost one.
fn pfn_of(gfn: u64) -> Pfn {
    Pfn(gfn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20)
}

fn all() -> GfnRange {
    GfnRange::new(Gfn(BASE), FRAMES).unwrap()
}

/// `pages` frames from the `start`th, or what there is of them.
fn part(start: u64, pages: u64) -> GfnRange {
    GfnRange::new(Gfn(BASE + start), pages.min(FRAMES - start)).unwrap()
}

/// All frames in an order of each seed's own: an odd stride visits every one once.
fn frames(seed: u64) -> impl Iterator<Item = u64> {
    let stride = (seed * 2 + 1) * 397;
    (0..FRAMES).map(move |i| BASE + (i * stride + seed) % FRAMES)
}

#[derive(Default)]
struct Seen {
    installed: u64,
    installed_writable: u64,
    upgraded: u64,
}

/// Maps all frames again and again, with permissions that vary, until `stop`.
fn map_until(stop: &AtomicBool, tables: &StageTwo, seed: u64) -> Seen {
    let mut seen = Seen::default();
    for round in seed.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        for gfn in frames(round) {
            let writable = (gfn + round) % 3 != 0;
            match tables.map(Gfn(gfn), pfn_of(gfn), writable) {
                MapOutcome::Installed => {
                    seen.installed += 1;
                    seen.installed_writable += u64::from(writable);
                }
                MapOutcome::Upgraded => seen.upgraded += 1,
                MapOutcome::Spurious => {}
                MapOutcome::Conflict { existing } => {
                    panic!("frame {gfn:#x} was mapped to {existing:?}")
                }
            }
        }
    }
    seen
}

/// Calls `change` with ever new starts until it has changed `ENOUGH`; gives how much it has.
fn change_enough(what: &str, mut change: impl FnMut(u64) -> u64) -> u64 {
    let begun = Instant::now();
    let mut changed = 0;
    let mut start = 0;
    while changed < ENOUGH {
        assert!(
            begun.elapsed() < LIMIT,
            "only {changed} {what} in {LIMIT:?}"
        );
        changed += change(start);
        start = (start + 211) % FRAMES;
    }
    changed
}

#[test]
fn overlapping_mappers_zappers_and_protectors_count_every_change_once() {
    let tables = StageTwo::new();
    let tables = &tables;
    let stop = AtomicBool::new(false);
    let stop = &stop;
    let (mapped, removed, protected) = thread::scope(|scope| {
        let mappers =
            [0, 1000, 2000].map(|seed| scope.spawn(move || map_until(stop, tables, seed)));
        let walker = scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                for gfn in frames(5) {
                    if let Some(leaf) = tables.walk(Gfn(gfn)) {
                        assert_eq!(leaf.pfn, pfn_of(gfn));
                    }
                }
            }
        });
        let zapper = scope.spawn(|| change_enough("removed", |start| tables.zap(part(start, 300))));
        let protector = scope.spawn(|| {
            change_enough("protected", |start| {
                let word = tables.write_protect_mask(Gfn(BASE + start), 0xaaaa_ffff_0000_5555);
                word + tables.write_protect(part(start, 100))
            })
        });
        let (removed, protected) = (zapper.join(), protector.join());
        stop.store(true, Ordering::Relaxed);
        walker.join().expect("saw only what was mapped");
        let mapped = mappers.map(|thread| thread.join().expect("mapped what was asked"));
        (mapped, removed.unwrap(), protected.unwrap())
    });

    let sum = |count: fn(&Seen) -> u64| mapped.iter().map(count).sum::<u64>();
    let found: Vec<_> = all().iter().filter_map(|gfn| tables.walk(gfn)).collect();
    let found_writable = found.iter().filter(|leaf| leaf.writable).count() as u64;
    assert_eq!(tables.mapped_pages(), found.len() as u64);
    assert_eq!(tables.writable_pages(), found_writable);
    // Every installation was reported once, and every removal. (The protector's last word reaches past
    // the last frame, where nothing is mapped.)
    assert_eq!(sum(|seen| seen.installed) - removed, found.len() as u64);
    // Zaps take writable pages without saying so: what was made writable bounds the rest.
    let made_writable = sum(|seen| seen.installed_writable + seen.upgraded);
    assert!(made_writable >= protected + found_writable);
    assert_eq!(tables.zap(all()), found.len() as u64);
    assert_eq!((tables.mapped_pages(), tables.writable_pages()), (0, 0));
    // Losers of a link race freed their spares: the tables are those one thread would have made. The
    // frames lie on both sides of the border between two tables of level 2.
    assert_eq!(tables.table_bytes(), (16 << 10) + (1 + 2 + 4) * 4096);
}

#[test]
fn what_was_written_before_mapping_is_seen_after_walking() {
    // The page's contents stand for guest memory: filled before the page is mapped.
    let contents: Vec<AtomicU64> = (0..FRAMES).map(|_| AtomicU64::new(0)).collect();
    let tables = StageTwo::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..FRAMES {
                contents[i as usize].store(!i, Ordering::Relaxed);
                tables.map(Gfn(BASE + i), Pfn(i), true);
            }
        });
        scope.spawn(|| {
            let begun = Instant::now();
            let mut seen = 0;
            while seen < FRAMES {
                if let Some(leaf) = tables.walk(Gfn(BASE + seen)) {
                    let page = &contents[leaf.pfn.0 as usize];
                    assert_eq!(page.load(Ordering::Relaxed), !seen);
                    seen += 1;
                } else {
                    assert!(begun.elapsed() < LIMIT, "frame {seen} never came");
                    thread::yield_now();
                }
            }
        });
    });
}

#[test]
fn racing_links_of_the_same_tables_agree() {
    // A fresh tree each round, so that every round races for all of its links.
    for round in 0..200u64 {
        let tables = StageTwo::new();
        let start = Barrier::new(2);
        thread::scope(|scope| {
            for thread in 0..2 {
                let (tables, start) = (&tables, &start);
                scope.spawn(move || {
                    start.wait();
                    for i in 0..16 {
                        let gfn = (i << 27) + (round << 9) + thread;
                        let outcome = tables.map(Gfn(gfn), pfn_of(gfn), true);
                        assert_eq!(outcome, MapOutcome::Installed);
                    }
                });
            }
        });
        assert_eq!(tables.mapped_pages(), 32);
        for i in 0..16 {
            for thread in 0..2 {
                let gfn = (i << 27) + (round << 9) + thread;
                assert_eq!(tables.walk(Gfn(gfn)).unwrap().pfn, pfn_of(gfn));
            }
        }
        assert_eq!(tables.table_bytes(), (16 << 10) + 16 * 3 * 4096);
    }
}
