//! The dirty ring against a plain model, the batches of a reset, and three threads at once.

use pageferry_tdp::ring::{self, BadRing, DirtyPage, Full, Harvester, Producer, Resetter};
use pageferry_testkit::LIMIT;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::Instant;

const fn page(slot: u32, offset: u64) -> DirtyPage {
    DirtyPage { slot, offset }
}

/// Pushes `pages` and harvests them.
fn harvested(pages: &[DirtyPage]) -> (Producer, Harvester, Resetter) {
    let (producer, mut harvester, resetter) = ring::new(256, 0).unwrap();
    for &page in pages {
        producer.push(page).unwrap();
        assert_eq!(harvester.harvest(), Some(page));
    }
    (producer, harvester, resetter)
}

/// The batches of a reset for `offsets` in one slot.
fn batches(offsets: impl IntoIterator<Item = u64>) -> Vec<(u64, u64)> {
    let pages: Vec<_> = offsets.into_iter().map(|offset| page(7, offset)).collect();
    let (_producer, _harvester, mut resetter) = harvested(&pages);
    let mut batches = Vec::new();
    let count = resetter.reset(|slot, base, mask| {
        assert_eq!(slot, 7);
        batches.push((base, mask));
    });
    assert_eq!(count as usize, pages.len());
    batches
}

#[test]
fn neighbours_share_a_mask() {
    assert_eq!(batches([]), []);
    assert_eq!(batches([5]), [(5, 1)]);
    assert_eq!(batches([5, 5, 8]), [(5, 0b1001)]);
    assert_eq!(batches(100..164), [(100, u64::MAX)]);
    assert_eq!(batches(100..165), [(100, u64::MAX), (164, 1)]);
    // Backwards, as a guest may walk its memory too, and from the middle.
    assert_eq!(batches((100..164).rev()), [(100, u64::MAX)]);
    assert_eq!(batches((100..165).rev()), [(101, u64::MAX), (100, 1)]);
    assert_eq!(batches([40, 70, 10]), [(10, 1 | 1 << 30 | 1 << 60)]);
    assert_eq!(batches([40, 100, 10]), [(40, 1 | 1 << 60), (10, 1)]);
    // The ends of masks and of offsets.
    assert_eq!(batches([0, 63]), [(0, 1 | 1 << 63)]);
    assert_eq!(batches([63, 0]), [(0, 1 | 1 << 63)]);
    assert_eq!(batches([0, 64]), [(0, 1), (64, 1)]);
    assert_eq!(batches([64, 0]), [(64, 1), (0, 1)]);
    assert_eq!(batches([u64::MAX, 0]), [(u64::MAX, 1), (0, 1)]);
    assert_eq!(batches([0, u64::MAX]), [(0, 1), (u64::MAX, 1)]);
}

#[test]
fn slots_do_not_share_a_mask() {
    let (_producer, _harvester, mut resetter) =
        harvested(&[page(1, 10), page(1, 11), page(2, 12), page(1, 12)]);
    let mut batches = Vec::new();
    assert_eq!(
        resetter.reset(|slot, base, mask| batches.push((slot, base, mask))),
        4
    );
    assert_eq!(batches, [(1, 10, 3), (2, 12, 1), (1, 12, 1)]);
}

#[test]
fn the_reserve_is_what_is_left_when_it_is_soft_full() {
    let (producer, mut harvester, mut resetter) = ring::new(8, 3).unwrap();
    for round in 0..5 {
        for offset in 0..8 {
            assert_eq!(producer.is_soft_full(), offset >= 5, "{round} {offset}");
            producer.push(page(0, offset)).unwrap();
        }
        let full = Full { entries: 8 };
        assert_eq!(producer.push(page(0, 8)), Err(full));
        assert_eq!(
            full.to_string(),
            "the dirty ring is full: none of its 8 pages was reset"
        );
        assert_eq!(resetter.reset(|_, _, _| panic!("nothing was harvested")), 0);
        for offset in 0..8 {
            assert_eq!(harvester.harvest(), Some(page(0, offset)));
        }
        assert_eq!(harvester.harvest(), None, "a lap ago is not now");
        assert!(producer.is_soft_full() && producer.push(page(0, 8)).is_err());
        assert_eq!(resetter.reset(|_, _, _| ()), 8);
        assert_eq!(resetter.reset(|_, _, _| panic!("all is reset")), 0);
    }
    assert!(!producer.is_soft_full());
}

#[test]
fn what_cannot_be_a_ring_is_refused() {
    for entries in [0, 1, 3, 100, ring::MAX_ENTRIES + 1, 1 << 17, u32::MAX] {
        assert_eq!(ring::new(entries, 0).err(), Some(BadRing::Entries(entries)));
    }
    let refused = BadRing::Reserve {
        entries: 64,
        reserve: 64,
    };
    assert_eq!(ring::new(64, ring::RESERVED_ENTRIES).err(), Some(refused));
    assert_eq!(
        [BadRing::Entries(3), refused].map(|bad| bad.to_string()),
        [
            "a dirty ring cannot have 3 entries: expected a power of two from 2 to 65536",
            "the reserve of 64 entries leaves none: the dirty ring has 64 entries"
        ]
    );
    assert!(ring::new(2, 1).is_ok() && ring::new(ring::MAX_ENTRIES, 0).is_ok());
}

#[test]
fn what_a_panic_kept_from_being_protected_comes_again() {
    let pages = [page(0, 1), page(0, 2), page(0, 500), page(0, 900)];
    let (_producer, mut harvester, mut resetter) = harvested(&pages);
    let interrupted = catch_unwind(AssertUnwindSafe(|| {
        resetter.reset(|_, base, _| assert_ne!(base, 500, "the first is done"))
    }));
    assert!(interrupted.is_err());
    assert_eq!(harvester.harvest(), None);
    let mut batches = Vec::new();
    assert_eq!(
        resetter.reset(|_, base, mask| batches.push((base, mask))),
        2
    );
    assert_eq!(batches, [(500, 1), (900, 1)]);
}

#[derive(Clone, Debug)]
enum Op {
    Push(DirtyPage),
    Harvest(usize),
    Reset,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let push = (0..2_u32, prop_oneof![4 => 0..200_u64, 1 => Just(u64::MAX)])
        .prop_map(|(slot, offset)| Op::Push(page(slot, offset)));
    let op = prop_oneof![8 => push, 2 => (0..8_usize).prop_map(Op::Harvest), 1 => Just(Op::Reset)];
    proptest::collection::vec(op, 0..300)
}

proptest! {
    #[test]
    fn it_is_two_queues(ops in ops(), order in 1..6_u32, reserve in 0..2_u32) {
        let entries = 1 << order;
        let (producer, mut harvester, mut resetter) = ring::new(entries, reserve).unwrap();
        let (mut dirty, mut harvested) = (VecDeque::new(), Vec::new());
        for op in ops {
            match op {
                Op::Push(page) => {
                    let fits = dirty.len() + harvested.len() < entries as usize;
                    prop_assert_eq!(producer.push(page).is_ok(), fits);
                    if fits {
                        dirty.push_back(page);
                    }
                }
                Op::Harvest(count) => for _ in 0..count {
                    let next = dirty.pop_front();
                    prop_assert_eq!(harvester.harvest(), next);
                    harvested.extend(next);
                }
                Op::Reset => {
                    let (mut pages, mut calls) = (Vec::new(), 0);
                    let count = resetter.reset(|slot, base, mask| {
                        assert_eq!(mask & 1, 1);
                        calls += 1;
                        let set = (0..64).filter(|bit| mask >> bit & 1 == 1);
                        pages.extend(set.map(|bit| page(slot, base.strict_add(bit))));
                    });
                    prop_assert_eq!(count as usize, harvested.len());
                    prop_assert!(calls <= harvested.len());
                    // Sorted lists: a set takes long to compile.
                    for list in [&mut pages, &mut harvested] {
                        list.sort_unstable();
                        list.dedup();
                    }
                    prop_assert_eq!(&pages, &harvested);
                    harvested.clear();
                }
            }
            let taken = dirty.len() + harvested.len();
            prop_assert_eq!(producer.is_soft_full(), taken >= (entries - reserve) as usize);
        }
    }
}

/// All pages get through once and in order, with three threads.
#[test]
fn three_threads_lose_nothing() {
    const PAGES: u64 = if cfg!(miri) { 300 } else { 200_000 };
    let (producer, mut harvester, mut resetter) = ring::new(64, 8).unwrap();
    let end = Instant::now() + LIMIT;
    let relax = || {
        assert!(Instant::now() < end, "no progress");
        thread::yield_now();
    };
    thread::scope(|scope| {
        scope.spawn(move || {
            for offset in 0..PAGES {
                while producer.is_soft_full() {
                    relax();
                }
                producer.push(page((offset % 3) as u32, offset)).unwrap();
            }
        });
        scope.spawn(move || {
            for offset in 0..PAGES {
                let next = loop {
                    match harvester.harvest() {
                        Some(next) => break next,
                        None => relax(),
                    }
                };
                assert_eq!(next, page((offset % 3) as u32, offset));
            }
        });
        scope.spawn(move || {
            let mut next = 0;
            while next < PAGES {
                let reset = resetter.reset(|slot, base, mask| {
                    assert_eq!((slot, base, mask), ((next % 3) as u32, next, 1));
                    next += 1;
                });
                if reset == 0 {
                    relax();
                }
            }
            assert_eq!(resetter.reset(|_, _, _| panic!("all came")), 0);
        });
    });
}
