//! Many random interleavings of an urgent and two bulk threads: the ledger, the cursors of prefetch
//! and the gate together. And of bulk threads that know of holes, beside harvests.
//!
//! ```sh
//! RUSTFLAGS="--cfg shuttle" \
//!     cargo test -p pageferry-migration --profile stress --lib source::model
//! ```

use super::gate::UrgentGate;
use super::prefetch::Prefetch;
use super::shared::{Mode, Modes};
use crate::ledger::Ledger;
use pageferry_addr::RamPage;
use shuttle::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as Plain, Ordering::Relaxed};

const PAGES: usize = 12;

struct ModelState {
    ledger: Ledger,
    gate: UrgentGate,
    prefetch: Prefetch,
    sendings: [Plain; PAGES],
}

impl ModelState {
    fn send(&self, channel: usize, pages: std::ops::Range<usize>) {
        for page in pages.clone() {
            self.sendings[page].fetch_add(1, Relaxed);
        }
        self.ledger.sent(channel, [pages], 0);
    }

    /// As the thread of an urgent channel.
    fn answer(&self, requests: &[usize]) {
        for &page in requests {
            self.prefetch.requested(RamPage(page as u64));
            if self.ledger.claim(RamPage(page as u64)) {
                let _due = self.gate.to_answer();
                assert!(self.gate.is_closed());
                self.send(2, page..page + 1);
            }
        }
    }

    /// As the thread of a bulk channel.
    fn push(&self, channel: usize) {
        let mut ahead = Vec::new();
        while self.ledger.unsent_count() > 0 {
            if self.gate.is_closed() {
                thread::yield_now();
                continue;
            }
            let is_unsent = |page| self.ledger.unsent().test(page);
            self.prefetch.take(2, PAGES as u64, is_unsent, &mut ahead);
            for page in &ahead {
                if self.ledger.claim(*page) {
                    self.send(channel, page.index()..page.index() + 1);
                }
            }
            if ahead.is_empty()
                && let Some(run) = self.ledger.claim_run(0, 1)
            {
                self.send(channel, run);
            }
        }
    }
}

fn scenario() {
    let ledger = Ledger::try_new(PAGES, 3).expect("little memory");
    ledger.set_unsent(0..PAGES);
    let shared = Arc::new(ModelState {
        ledger,
        gate: UrgentGate::new(),
        prefetch: Prefetch::new(1),
        sendings: [(); PAGES].map(|()| Plain::new(0)),
    });
    let start = |work: fn(&ModelState)| {
        let shared = Arc::clone(&shared);
        thread::spawn(move || work(&shared))
    };
    let threads = [
        start(|shared| shared.answer(&[4, 6, 8, 1])),
        start(|shared| shared.push(0)),
        start(|shared| shared.push(1)),
    ];
    for thread in threads {
        thread.join().expect("no thread panics");
    }
    let sendings = shared.sendings.each_ref().map(|count| count.load(Relaxed));
    assert_eq!(sendings, [1; PAGES], "each page is sent once");
    assert!(!shared.gate.is_closed());
    assert_eq!(shared.ledger.unacknowledged(), PAGES as u64);
}

#[test]
fn each_page_is_sent_once_and_the_push_ends() {
    // Not by priorities: a thread that polls the gate would never let the others run.
    shuttle::check_random(scenario, 10_000);
}

/// One page in pre-copy. The guest writes it once; it was a hole before.
struct Copying {
    ledger: Ledger,
    modes: Modes,
    written: Plain,
    dirty: Plain,
    /// What the destination has: 1 for the guest's bytes.
    there: Plain,
}

impl Copying {
    /// As the thread of a bulk channel, which looks for holes before it claims.
    fn copy(&self, channel: usize) {
        let mut sent = 0;
        for _ in 0..6 {
            let turn = self.modes.turn();
            if turn.mode() == Mode::Copy && self.ledger.unsent().test(RamPage(0)) {
                let is_hole = self.written.load(Relaxed) == 0;
                thread::yield_now();
                if self.ledger.claim(RamPage(0)) {
                    if self.modes.turn() != turn {
                        self.ledger.unclaim(0..1);
                        continue;
                    }
                    self.ledger.sent(channel, [0..1], 4096);
                    self.there.store(u64::from(!is_hole), Relaxed);
                    sent += 1;
                    self.ledger.receipt(channel, sent).expect("as many as sent");
                }
            }
            thread::yield_now();
        }
    }

    /// As the supervisor: two passes and a harvest after each.
    fn supervise(&self) {
        for _ in 0..2 {
            self.ledger.set_closed(false);
            self.modes.set(Mode::Copy);
            for _ in 0..8 {
                if self.ledger.unacknowledged() == 0 {
                    break;
                }
                thread::yield_now();
            }
            self.ledger.set_closed(true);
            self.modes.set(Mode::Hold);
            if self.ledger.in_flight() > 0 {
                return;
            }
            // A switch-over announces this number.
            let missing = self.ledger.unsent_count();
            thread::yield_now();
            assert_eq!(self.ledger.unsent_count(), missing, "a late claim");
            assert_eq!(self.ledger.unsent_runs().count() as u64, missing);
            if self.dirty.swap(0, Relaxed) == 1 {
                self.ledger.set_unsent(0..1);
            }
        }
    }
}

fn copies_beside_harvests() {
    let ledger = Ledger::try_new(1, 2).expect("little memory");
    ledger.set_unsent(0..1);
    let copying = Arc::new(Copying {
        ledger,
        modes: Modes::new(),
        written: Plain::new(0),
        dirty: Plain::new(0),
        there: Plain::new(0),
    });
    let start = |work: fn(&Copying)| {
        let copying = Arc::clone(&copying);
        thread::spawn(move || work(&copying))
    };
    let threads = [
        start(|copying| copying.copy(0)),
        start(|copying| copying.copy(1)),
        start(|copying| {
            copying.written.store(1, Relaxed);
            thread::yield_now();
            copying.dirty.store(1, Relaxed);
        }),
        start(Copying::supervise),
    ];
    for thread in threads {
        thread.join().expect("no thread panics");
    }
    let is_due = copying.dirty.load(Relaxed) == 1 || copying.ledger.unsent_count() > 0;
    let there = copying.there.load(Relaxed);
    assert!(is_due || there == 1, "the guest's bytes are lost");
}

#[test]
fn a_page_that_was_a_hole_is_sent_again() {
    shuttle::check_random(copies_beside_harvests, 5_000);
    // One thread must stand still while others do a whole pass.
    shuttle::check_pct(copies_beside_harvests, 20_000, 3);
}
