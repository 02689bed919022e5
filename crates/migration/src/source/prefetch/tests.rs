//! Cursors against guests that touch pages in simple orders, beside a push of a fixed speed.

use super::{Cursors, FIRST_AHEAD, MAX_REQUESTS, Prefetch};
use crate::report::PrefetchCounts;
use pageferry_addr::RamPage;
use proptest::prelude::*;

const PAGES: usize = 1 << 14;

/// A guest and the push to it. In each turn every vCPU touches a page, and the push sends some.
struct Race {
    cursors: Cursors,
    unsent: Vec<bool>,
    /// The rest of the push goes from the first page to the last.
    rest: usize,
    requests: usize,
    touches: usize,
}

impl Race {
    fn new(vcpus: usize) -> Self {
        Self {
            cursors: Cursors::new(vcpus),
            unsent: vec![true; PAGES],
            rest: 0,
            requests: 0,
            touches: 0,
        }
    }

    fn touch(&mut self, page: usize) {
        self.touches += 1;
        if std::mem::take(&mut self.unsent[page]) {
            self.requests += 1;
            let unsent = &self.unsent;
            let is_unsent = |page: RamPage| unsent[page.index()];
            self.cursors
                .requested(RamPage(page as u64), PAGES as u64, &is_unsent);
        }
    }

    fn push(&mut self, most: usize) {
        let mut out = Vec::new();
        let unsent = &self.unsent;
        let is_unsent = |page: RamPage| unsent[page.index()];
        self.cursors.take(most, PAGES as u64, &is_unsent, &mut out);
        assert!(out.len() <= most);
        for page in &out {
            assert!(std::mem::take(&mut self.unsent[page.index()]));
        }
        for _ in out.len()..most {
            while self.rest < PAGES && !self.unsent[self.rest] {
                self.rest += 1;
            }
            if self.rest < PAGES {
                self.unsent[self.rest] = false;
            }
        }
    }

    /// The part of the touches that found its page.
    fn came_first(&self) -> f64 {
        1.0 - self.requests as f64 / self.touches as f64
    }
}

/// The touches of one vCPU: the first page, the stride, and how many.
fn sequence(first: usize, stride: isize, count: usize) -> impl Iterator<Item = usize> {
    (0..count).map_while(move |step| {
        let page = first.checked_add_signed(stride * step as isize)?;
        (page < PAGES).then_some(page)
    })
}

proptest! {
    #[test]
    fn most_pages_of_a_sequence_come_first(
        vcpus in 1_usize..9,
        backwards in any::<bool>(),
        stride in 1_isize..32,
    ) {
        let mut race = Race::new(vcpus);
        // The vCPUs share the memory evenly. Together they touch half as fast as the push sends.
        let share = PAGES / vcpus;
        let stride = stride.min(share as isize / 400).max(1);
        let mut guests: Vec<_> = (0..vcpus)
            .map(|vcpu| {
                let first = vcpu * share;
                if backwards {
                    sequence(first + share - 1, -stride, share / stride as usize)
                } else {
                    sequence(first, stride, share / stride as usize)
                }
            })
            .collect();
        // The rest of the push must not come first by luck.
        race.rest = PAGES;
        loop {
            let mut touched = false;
            for guest in &mut guests {
                if let Some(page) = guest.next() {
                    race.touch(page);
                    touched = true;
                }
            }
            if !touched {
                break;
            }
            race.push(2 * vcpus);
        }
        let first = race.came_first();
        prop_assert!(first > 0.9, "{first:.3} of {} touches", race.touches);
        let counts = race.cursors.counts();
        let came = (race.touches - race.requests) as u64;
        prop_assert!(counts.in_time <= came, "{counts:?}, {came} came first");
    }

    #[test]
    fn any_requests_are_taken(
        requests in prop::collection::vec((0_u64..u64::MAX, any::<bool>()), 0..300),
        pages in 1_u64..10_000,
        vcpus in 0_usize..20,
        most in 0_usize..70,
    ) {
        let mut cursors = Cursors::new(vcpus);
        let mut sent = vec![false; pages as usize];
        let mut pushed = 0;
        for (page, push) in requests {
            let is_unsent = |page: RamPage| !sent[page.index()];
            cursors.requested(RamPage(page % pages), pages, &is_unsent);
            if push {
                let mut out = Vec::new();
                cursors.take(most, pages, &is_unsent, &mut out);
                for page in &out {
                    prop_assert!(page.0 < pages);
                    sent[page.index()] = true;
                }
                out.sort_unstable();
                out.dedup();
                pushed += out.len() as u64;
            }
        }
        let PrefetchCounts { in_time, unconfirmed, .. } = cursors.counts();
        prop_assert!(in_time + unconfirmed >= pushed, "{in_time} + {unconfirmed}, {pushed} pushed");
    }
}

#[test]
fn a_first_request_brings_its_neighbourhood() {
    let mut race = Race::new(1);
    race.touch(100);
    let mut out = Vec::new();
    let all = |_| true;
    race.cursors.take(64, PAGES as u64, &all, &mut out);
    let wanted: Vec<_> = (101..101 + FIRST_AHEAD).map(RamPage).collect();
    assert_eq!(out, wanted);
    race.cursors.take(64, PAGES as u64, &all, &mut out);
    assert_eq!(out, [], "no more without another request");
    assert_eq!(race.cursors.counts().unconfirmed, FIRST_AHEAD);
    // The guest comes out of the neighbourhood.
    race.touch(101 + FIRST_AHEAD as usize);
    let counts = race.cursors.counts();
    assert_eq!((counts.in_time, counts.unconfirmed), (FIRST_AHEAD, 0));
}

#[test]
fn pages_that_nobody_touched_are_unconfirmed() {
    let mut race = Race::new(1);
    for request in 0..20 {
        race.touch(request * 800);
        race.push(FIRST_AHEAD as usize);
    }
    let counts = race.cursors.counts();
    assert_eq!((counts.in_time, counts.unconfirmed), (0, 20 * FIRST_AHEAD));
}

/// Nothing is pushed, and requests come without an end.
#[test]
fn requests_that_nobody_looks_at_are_left_out() {
    let prefetch = Prefetch::new(1);
    for page in 0..100_000 {
        prefetch.requested(RamPage(page % 7));
    }
    let state = prefetch.state.lock().unwrap();
    assert_eq!(state.requests.try_iter().count(), MAX_REQUESTS);
}
