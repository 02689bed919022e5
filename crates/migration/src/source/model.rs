//! Many random interleavings of an urgent and two bulk threads: the ledger, the cursors of prefetch
//! and the gate together.
//!
//! ```sh
//! RUSTFLAGS="--cfg shuttle" \
//!     cargo test -p pageferry-migration --profile stress --lib source::model
//! ```

use super::gate::Gate;
use super::prefetch::Prefetch;
use crate::ledger::Ledger;
use pageferry_addr::RamPage;
use shuttle::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as Plain, Ordering::Relaxed};

const PAGES: usize = 12;

struct Shared {
    ledger: Ledger,
    gate: Gate,
    prefetch: Prefetch,
    sendings: [Plain; PAGES],
}

impl Shared {
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
                self.gate.to_answer(1);
                assert!(self.gate.is_closed());
                self.send(2, page..page + 1);
                self.gate.answered(1);
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
    let shared = Arc::new(Shared {
        ledger,
        gate: Gate::new(),
        prefetch: Prefetch::new(1),
        sendings: [(); PAGES].map(|()| Plain::new(0)),
    });
    let start = |work: fn(&Shared)| {
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
