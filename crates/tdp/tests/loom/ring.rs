//! A dirty ring's producer, harvester and resetter at once.
//!
//! Page `n` has slot `n` and offset `10 * n`, so that a mixture of two pages is noticed. Two cells
//! for each page check the order. The producer writes the first before the push, and the harvester
//! and the resetter read it. The resetter writes the second, and the next push into the same entry
//! reads it. The tests name the outcomes that must occur.
//!
//! The tests that fail when a rule is broken (tried by hand):
//! - relaxed order of either side of (p), no look for room, or a reset of what is dirty only, or
//!   that leaves entries harvested: `all_three_at_once` and others;
//! - relaxed order of either side of (z): `all_three_at_once` and `an_entry_is_used_again`;
//! - relaxed order of either side of (h): `all_three_at_once` only.

use loom::sync::Arc;
use loom::thread;
use pageferry_tdp::ring::{self, DirtyPage, Harvester, Producer, Resetter};
use pageferry_testkit::model::{Watched, explore};
use std::collections::BTreeSet;

const ENTRIES: u32 = 2;

/// Two cells for each page.
struct Cells {
    pushed: [Watched; 3],
    reset: [Watched; 3],
}

impl Cells {
    fn new() -> Arc<Self> {
        let cells = || [(); 3].map(|()| Watched::new());
        Arc::new(Self {
            pushed: cells(),
            reset: cells(),
        })
    }

    /// Pushes page `number`. Returns whether there was room.
    fn push(&self, producer: &Producer, number: u32) -> bool {
        self.pushed[number as usize].write();
        let page = DirtyPage {
            slot: number,
            offset: 10 * u64::from(number),
        };
        let pushed = producer.push(page).is_ok();
        if pushed && number >= ENTRIES {
            // The reset of the page that had this entry is over.
            self.reset[(number - ENTRIES) as usize].read();
        }
        pushed
    }

    /// Harvests a page, if there is one.
    fn harvest(&self, harvester: &mut Harvester) -> Option<u32> {
        let page = harvester.harvest()?;
        assert_eq!(page.offset, 10 * u64::from(page.slot));
        self.pushed[page.slot as usize].read();
        Some(page.slot)
    }

    /// Resets and returns the pages.
    fn reset(&self, resetter: &mut Resetter) -> Vec<u32> {
        let mut pages = Vec::new();
        let count = resetter.reset(|slot, base, mask| {
            assert_eq!((base, mask), (10 * u64::from(slot), 1));
            self.pushed[slot as usize].read();
            self.reset[slot as usize].write();
            pages.push(slot);
        });
        assert_eq!(count as usize, pages.len());
        pages
    }
}

/// A ring whose first `pages` pages were pushed.
fn pushed(pages: u32) -> (Arc<Cells>, Producer, Harvester, Resetter) {
    let (producer, harvester, resetter) = ring::new(ENTRIES, 1).unwrap();
    let cells = Cells::new();
    for page in 0..pages {
        assert!(cells.push(&producer, page));
    }
    (cells, producer, harvester, resetter)
}

#[test]
fn a_page_is_harvested_whole() {
    let seen = explore(3, || {
        let (cells, producer, mut harvester, _resetter) = pushed(0);
        let vcpu = {
            let cells = Arc::clone(&cells);
            thread::spawn(move || [0, 1, 2].map(|page| cells.push(&producer, page)))
        };
        let harvested = [(); 3].map(|()| cells.harvest(&mut harvester));
        assert_eq!(
            vcpu.join().unwrap(),
            [true, true, false],
            "nothing is reset"
        );
        harvested.into_iter().flatten().collect::<Vec<_>>()
    });
    assert_eq!(seen, BTreeSet::from([vec![], vec![0], vec![0, 1]]));
}

/// The results of the three threads, before the ring is emptied.
struct Seen<P> {
    pushed: P,
    harvested: Vec<u32>,
    reset: Vec<u32>,
    /// All harvested pages, in the end.
    all: Vec<u32>,
}

/// Lets the harvester look `looks` times and the resetter once, while the producer does `body`.
///
/// Loom remembers only the last access of an atomic. So a harvester that loads before it stores
/// hides an earlier load of the resetter's. Therefore each thread begins after those whose stores
/// it loads.
fn at_once<P>(
    (cells, producer, mut harvester, mut resetter): (Arc<Cells>, Producer, Harvester, Resetter),
    looks: usize,
    body: impl FnOnce(&Cells, &Producer) -> P,
) -> Seen<P> {
    let vmm = {
        let cells = Arc::clone(&cells);
        thread::spawn(move || {
            let pages = (0..looks).filter_map(|_| cells.harvest(&mut harvester));
            let pages: Vec<u32> = pages.collect();
            (harvester, pages)
        })
    };
    let resets = {
        let cells = Arc::clone(&cells);
        thread::spawn(move || {
            let pages = cells.reset(&mut resetter);
            (resetter, pages)
        })
    };
    let pushed = body(&cells, &producer);
    let (mut harvester, harvested) = vmm.join().unwrap();
    let (mut resetter, reset) = resets.join().unwrap();
    let mut all = harvested.clone();
    while let Some(page) = cells.harvest(&mut harvester) {
        all.push(page);
    }
    let rest = cells.reset(&mut resetter);
    assert!(all.ends_with(&rest), "{all:?} ends with {rest:?}");
    Seen {
        pushed,
        harvested,
        reset,
        all,
    }
}

/// The ring is full and partly harvested, while the producer needs an entry again.
#[test]
fn an_entry_is_used_again() {
    let seen = explore(3, || {
        let mut ring = pushed(2);
        assert_eq!(ring.0.harvest(&mut ring.2), Some(0));
        let seen = at_once(ring, 2, |cells, producer| {
            (producer.is_soft_full(), cells.push(producer, 2))
        });
        let all = if seen.pushed.1 { vec![1, 2] } else { vec![1] };
        assert_eq!(seen.all, all);
        (seen.pushed, seen.harvested, seen.reset)
    });
    for harvested in [vec![1], vec![1, 2]] {
        let fits = ((true, true), harvested, vec![0]);
        assert!(seen.contains(&fits), "{fits:?}");
    }
    assert!(seen.contains(&((true, false), vec![1], vec![0])));
    assert!(seen.contains(&((true, false), vec![1], vec![0, 1])));
    assert!(seen.contains(&((false, true), vec![1], vec![0, 1])));
}

/// The same from an entry that is only dirty, and from one that is empty.
#[test]
fn all_three_at_once() {
    let seen = explore(3, || {
        let seen = at_once(pushed(1), 2, |cells, producer| {
            [1, 2].map(|page| cells.push(producer, page))
        });
        let [first, second] = seen.pushed;
        assert!(first, "there was an entry");
        assert_eq!(seen.all, if second { vec![0, 1, 2] } else { vec![0, 1] });
        (second, seen.harvested, seen.reset)
    });
    for reset in [vec![], vec![0], vec![0, 1]] {
        assert!(
            seen.contains(&(false, vec![0, 1], reset.clone())),
            "{reset:?}"
        );
    }
    assert!(seen.contains(&(true, vec![0, 1], vec![0])));
    assert!(seen.contains(&(true, vec![0], vec![0])));
}
