//! All interleavings and all allowed reorderings of two or three threads on few pages.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pageferry-userfault --profile stress --test loom`
//!
//! A relaxed atomic stands for a page's bytes: a reader that is not ordered behind the writer sees
//! the old value in some execution.
#![cfg(loom)]

mod runs;
mod summary;

use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use loom::thread;
use pageferry_addr::RamPage;
use pageferry_userfault::{Arrival, Claim, PageBitmap, PageStates, Waiters};
use std::sync::Arc;

const PAGE: RamPage = RamPage(1);
const BYTES: u64 = 0xb17e5;

struct Page {
    states: PageStates,
    bytes: AtomicU64,
}

impl Page {
    fn missing() -> Arc<Self> {
        let missing = Arc::new(PageBitmap::new(3));
        missing.set_range(0..3);
        Arc::new(Self {
            states: PageStates::try_new(missing).unwrap(),
            bytes: AtomicU64::new(0),
        })
    }

    fn claim(&self) -> Claim {
        let claim = self.states.claim(PAGE);
        if claim == Claim::Present {
            assert_eq!(
                self.bytes.load(Relaxed),
                BYTES,
                "present, but without its bytes"
            );
        }
        claim
    }

    fn arrive(&self) -> Arrival {
        self.bytes.store(BYTES, Relaxed);
        self.states.arrive(PAGE, 1)
    }
}

fn mine(claims: &[Claim]) -> usize {
    claims.iter().filter(|claim| **claim == Claim::Mine).count()
}

#[test]
fn one_of_three_claims_of_a_missing_page_is_mine() {
    loom::model(|| {
        let page = Page::missing();
        let others = [(); 2].map(|()| {
            let page = Arc::clone(&page);
            thread::spawn(move || page.claim())
        });
        let mut claims = vec![page.claim()];
        claims.extend(others.map(|thread| thread.join().unwrap()));
        assert_eq!(mine(&claims), 1);
        assert!(!claims.contains(&Claim::Present));
        assert_eq!(page.states.next_outstanding(0), Some(PAGE));
    });
}

#[test]
fn an_arrival_between_two_claims_loses_and_doubles_nothing() {
    loom::model(|| {
        let page = Page::missing();
        let claimers = [(); 2].map(|()| {
            let page = Arc::clone(&page);
            thread::spawn(move || page.claim())
        });
        let arrival = page.arrive();
        let claims = claimers.map(|thread| thread.join().unwrap());
        assert!(mine(&claims) <= 1, "asked for twice: {claims:?}");
        assert_eq!(arrival.newly, 1);
        if claims.iter().any(|claim| *claim != Claim::Present) {
            assert_eq!(
                arrival.requested, 1,
                "the arrival missed a waiter: {claims:?}"
            );
        }
        if claims.contains(&Claim::Others) {
            let present = claims.contains(&Claim::Present);
            assert!(
                present || mine(&claims) == 1,
                "all threads wait and none has asked: {claims:?}"
            );
        }
        assert_eq!(page.claim(), Claim::Present);
        assert_eq!(page.states.next_outstanding(0), None);
    });
}

#[test]
fn two_arrivals_of_a_page_count_it_once() {
    loom::model(|| {
        let page = Page::missing();
        let other = {
            let page = Arc::clone(&page);
            thread::spawn(move || page.arrive())
        };
        let claim = {
            let page = Arc::clone(&page);
            thread::spawn(move || page.claim())
        };
        let first = page.arrive();
        let second = other.join().unwrap();
        assert_eq!(first.newly + second.newly, 1);
        if claim.join().unwrap() != Claim::Present {
            assert_eq!(first.requested + second.requested, 1);
        }
    });
}

#[test]
fn a_clear_bit_shows_the_bytes() {
    loom::model(|| {
        let page = Page::missing();
        let reader = {
            let page = Arc::clone(&page);
            thread::spawn(move || {
                if !page.states.is_missing(PAGE) {
                    assert_eq!(page.bytes.load(Relaxed), BYTES);
                }
            })
        };
        page.bytes.store(BYTES, Relaxed);
        assert!(page.states.missing().clear(PAGE));
        reader.join().unwrap();
    });
}

#[test]
fn changes_of_neighbours_in_a_word_do_not_hide_the_bytes() {
    // The reader may see the bit clear in a value of the word that another thread wrote last.
    loom::model(|| {
        let page = Page::missing();
        let neighbour = {
            let page = Arc::clone(&page);
            thread::spawn(move || page.states.missing().clear(RamPage(2)))
        };
        let reader = {
            let page = Arc::clone(&page);
            thread::spawn(move || page.claim())
        };
        let _ = page.arrive();
        assert!(neighbour.join().unwrap());
        reader.join().unwrap();
        assert_eq!(page.states.missing().count(), 1);
    });
}

#[test]
fn racing_changes_of_a_bit_have_one_winner() {
    loom::model(|| {
        let map = Arc::new(PageBitmap::new(3));
        let other = {
            let map = Arc::clone(&map);
            thread::spawn(move || (map.set(PAGE), map.or_word(0, 0b110)))
        };
        let here = map.set_range(0..2);
        let (set, ored) = other.join().unwrap();
        // Only this thread counts bit 0, and only the other counts bit 2. The first of them counts
        // bit 1, once.
        let bit1 = usize::from(set) + usize::from(ored & 0b010 != 0) + (here - 1);
        assert_eq!(
            (bit1, ored & 0b100, map.take_word(0, u64::MAX)),
            (1, 0b100, 0b111)
        );
    });
}

/// A harvest of a dirty log copies the pages whose bits it took.
#[test]
fn a_thread_that_takes_a_bit_finds_what_came_before_its_set() {
    let sets: [fn(&PageBitmap) -> bool; 2] = [|map| map.set(PAGE), |map| map.or_word(0, 0b10) != 0];
    for set in sets {
        loom::model(move || {
            let shared = Arc::new((PageBitmap::new(3), AtomicU64::new(0)));
            let writer = {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    shared.1.store(BYTES, Relaxed);
                    assert!(set(&shared.0));
                })
            };
            if shared.0.take_word(0, u64::MAX) != 0 {
                assert_eq!(shared.1.load(Relaxed), BYTES, "taken, and not its bytes");
            }
            writer.join().unwrap();
        });
    }
}

/// A bitmap of missing pages and its waiters, as in a receiving VM.
fn waited(pages: usize) -> Arc<(PageBitmap, Waiters)> {
    let missing = PageBitmap::new(pages);
    missing.set_range(0..pages);
    Arc::new((missing, Waiters::new(pages)))
}

/// Starts the thread of slot `slot`, which sleeps until the page of the same number is present.
fn sleeper(shared: &Arc<(PageBitmap, Waiters)>, slot: usize) -> thread::JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::spawn(move || {
        let (missing, waiters) = (&shared.0, &shared.1);
        waiters.announce(slot, slot as u64);
        while missing.test(RamPage(slot as u64)) {
            thread::park();
        }
        waiters.withdraw(slot);
    })
}

/// A sleeper sleeps only if it must, and is always woken. A lost wake-up is a deadlock in this
/// model.
#[test]
fn a_sleeper_is_woken_by_the_arrival_of_its_page() {
    loom::model(|| {
        let shared = waited(1);
        let sleeper = sleeper(&shared, 0);
        shared.0.clear(RamPage(0));
        shared.1.arrived(0..1, |slot| {
            assert_eq!(slot, 0);
            sleeper.thread().unpark();
        });
        sleeper.join().unwrap();
    });
}

/// Two sleepers on two pages: each is woken by its own page.
#[test]
fn sleepers_do_not_take_each_others_wakes() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let shared = waited(2);
        let sleepers = [sleeper(&shared, 0), sleeper(&shared, 1)];
        for page in 0..2 {
            shared.0.clear(RamPage(page));
            shared
                .1
                .arrived(page..page + 1, |slot| sleepers[slot].thread().unpark());
        }
        for sleeper in sleepers {
            sleeper.join().unwrap();
        }
    });
}
