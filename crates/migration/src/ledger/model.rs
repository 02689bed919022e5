//! Many random interleavings of two threads on three pages.
//!
//! ```sh
//! RUSTFLAGS="--cfg shuttle" \
//!     cargo test -p pageferry-migration --profile stress --lib ledger::model
//! ```
//!
//! Atomics that are private to the model stand for the guest's memory and for the destination's.
#![expect(
    clippy::single_range_in_vec_init,
    reason = "lists of runs, some of them with one"
)]

use super::*;
use crate::sync::AtomicU64;
use shuttle::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as Plain, Ordering::Relaxed};

const PAGES: usize = 3;

fn check(scenario: impl Fn() + Copy + Send + Sync + 'static) {
    shuttle::check_random(scenario, 5_000);
    shuttle::check_pct(scenario, 5_000, 3);
}

/// A ledger of two channels, with all pages unsent. `sendings` counts the sendings of each page.
struct ModelState {
    ledger: Ledger,
    sendings: [Plain; PAGES],
}

fn all_unsent() -> Arc<ModelState> {
    let ledger = Ledger::try_new(PAGES, 2).unwrap();
    ledger.set_unsent(0..PAGES);
    Arc::new(ModelState {
        ledger,
        sendings: [(); PAGES].map(|()| Plain::new(0)),
    })
}

impl ModelState {
    fn send(&self, channel: usize, pages: Range<usize>) {
        for page in pages.clone() {
            self.sendings[page].fetch_add(1, Relaxed);
        }
        self.ledger.sent(channel, [pages], 0);
    }

    fn sendings(&self) -> [u64; PAGES] {
        [0, 1, 2].map(|page| self.sendings[page].load(Relaxed))
    }
}

#[test]
fn each_page_is_claimed_by_one_thread() {
    check(|| {
        let shared = all_unsent();
        let urgent = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                if shared.ledger.claim(RamPage(1)) {
                    shared.send(1, 1..2);
                }
            })
        };
        while let Some(run) = shared.ledger.claim_run(0, PAGES) {
            shared.send(0, run);
        }
        urgent.join().unwrap();
        assert_eq!(shared.sendings(), [1, 1, 1]);
        let ledger = &shared.ledger;
        assert_eq!((ledger.unsent_count(), ledger.in_flight()), (0, 3));
    });
}

/// A page that becomes dirty in flight is sent again, after its receipt and with its newer content.
#[test]
fn a_page_that_changes_in_flight_is_not_in_flight_twice() {
    check(|| {
        let shared = Arc::new((Ledger::try_new(PAGES, 2).unwrap(), AtomicU64::new(1)));
        shared.0.set_unsent(1..2);
        assert!(shared.0.claim(RamPage(1)));
        let first = shared.1.load(Ordering::Relaxed);
        shared.0.sent(0, [1..2], 0);
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.1.store(2, Ordering::Relaxed);
                shared.0.set_unsent(1..2);
                let claimed = shared.0.claim(RamPage(1));
                claimed.then(|| shared.1.load(Ordering::Relaxed))
            })
        };
        let released = shared.0.receipt(0, 1).unwrap();
        let second = other.join().unwrap();
        assert_eq!((first, released.pages), (1, 1));
        match second {
            Some(content) => assert_eq!(content, 2),
            // The receipt says that the page can be claimed now.
            None => {
                assert_eq!(released.unsent, 1);
                assert_eq!(shared.0.claim_run(0, 9), Some(1..2));
            }
        }
        assert_eq!(shared.0.unacknowledged(), 1);
    });
}

#[test]
fn the_pages_of_an_ended_channel_are_sent_again_on_another() {
    check(|| {
        let shared = all_unsent();
        assert_eq!(shared.ledger.claim_run(0, 1), Some(0..1));
        shared.send(0, 0..1);
        assert_eq!(shared.ledger.claim_run(0, 2), Some(1..3));
        shared.send(0, 1..3);
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                if let Some(run) = shared.ledger.claim_run(0, PAGES) {
                    shared.send(1, run.clone());
                    let pages = shared.ledger.receipt(1, 1).unwrap().pages;
                    assert_eq!(pages, run.len() as u64);
                }
            })
        };
        assert_eq!(shared.ledger.reclaim(0, 1), Ok(2));
        other.join().unwrap();
        let [first, second, third] = shared.sendings();
        assert_eq!(first, 1);
        // The count is exact when nothing runs, and each page was acknowledged once.
        let sent_again = (second - 1) + (third - 1);
        let left = shared.ledger.unsent_count();
        assert_eq!((sent_again + left, shared.ledger.in_flight()), (2, 0));
        assert_eq!(shared.ledger.unacknowledged(), left);
    });
}

/// A thread that finds pages unchanged, beside one that sends a page and takes its receipt. One of
/// the two sees that no page is left, as a pass would not end otherwise.
#[test]
fn unchanged_pages_end_a_pass_as_receipts_do() {
    check(|| {
        let shared = all_unsent();
        assert!(shared.ledger.claim(RamPage(0)));
        shared.send(0, 0..1);
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                while let Some(run) = shared.ledger.claim_run(0, 1) {
                    assert_eq!(shared.ledger.acknowledge(run), 1);
                }
                shared.ledger.unacknowledged() == 0
            })
        };
        assert_eq!(shared.ledger.receipt(0, 1).unwrap().pages, 1);
        let here = shared.ledger.unacknowledged() == 0;
        assert!(other.join().unwrap() || here);
        let ledger = &shared.ledger;
        assert_eq!((ledger.unsent_count(), ledger.in_flight()), (0, 0));
        assert_eq!(shared.sendings(), [1, 0, 0]);
    });
}

/// A thread that claims and then looks at the mode, against one that stops the sending.
#[test]
fn nothing_in_flight_means_that_no_thread_sends() {
    const HOLD: u64 = 1;
    check(|| {
        let shared = Arc::new((Ledger::try_new(PAGES, 1).unwrap(), AtomicU64::new(0)));
        shared.0.set_unsent(0..PAGES);
        let sender = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let claimed = shared.0.claim(RamPage(2));
                assert!(claimed);
                let sends = shared.1.load(Ordering::SeqCst) != HOLD;
                if !sends {
                    shared.0.unclaim(2..3);
                }
                sends
            })
        };
        shared.1.store(HOLD, Ordering::SeqCst);
        let idle = shared.0.in_flight() == 0;
        let sends = sender.join().unwrap();
        assert!(!(idle && sends), "a page is sent, and nobody knows");
    });
}
