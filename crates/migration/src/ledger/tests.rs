//! The ledger against a plain model, and under many threads.
#![expect(
    clippy::single_range_in_vec_init,
    reason = "lists of runs, some of them with one"
)]

use super::*;
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicU32};

const ONE: fn(usize) -> Range<usize> = |page| page..page + 1;

fn ledger(pages: usize, channels: usize) -> Ledger {
    Ledger::try_new(pages, channels).unwrap()
}

fn counts(ledger: &Ledger) -> (u64, u64, u64) {
    (
        ledger.unsent_count(),
        ledger.in_flight(),
        ledger.unacknowledged(),
    )
}

#[test]
fn a_page_is_unsent_then_in_flight_then_acknowledged() {
    let ledger = ledger(200, 2);
    assert_eq!(counts(&ledger), (0, 0, 0));
    ledger.set_unsent(10..150);
    assert_eq!(counts(&ledger), (140, 0, 140));
    assert!(ledger.claim(RamPage(70)) && !ledger.claim(RamPage(70)));
    assert!(!ledger.claim(RamPage(3)));
    assert_eq!(ledger.claim_run(0, 1000), Some(10..70));
    assert_eq!(ledger.claim_run(0, 1000), Some(71..150));
    assert_eq!(ledger.claim_run(0, 1000), None);
    assert_eq!(counts(&ledger), (0, 140, 140));
    ledger.sent(0, [ONE(70)], 0);
    ledger.sent(1, [10..70, 71..149], 0);
    ledger.unclaim(149..150);
    assert_eq!(counts(&ledger), (1, 139, 140));
    let pages = |pages, unsent| Ok(Released { pages, unsent });
    assert_eq!(ledger.receipt(0, 1), pages(1, 0));
    assert_eq!(ledger.receipt(0, 1), pages(0, 0));
    assert_eq!(ledger.receipt(1, 1), pages(138, 0));
    assert_eq!(counts(&ledger), (1, 0, 1));
    assert_eq!(ledger.unsent_runs().collect::<Vec<_>>(), [149..150]);
}

#[test]
fn bytes_count_when_the_destination_has_them() {
    let ledger = ledger(100, 3);
    ledger.set_unsent(0..80);
    for first in [0, 10, 20, 30, 40, 50, 60] {
        assert_eq!(ledger.claim_run(first, 10), Some(first..first + 10));
    }
    ledger.sent(0, [0..10], 1);
    ledger.sent(0, [10..20], 2);
    assert_eq!(ledger.acknowledged_bytes(), 0, "sent only");
    ledger.receipt(0, 1).unwrap();
    ledger.receipt(0, 1).unwrap();
    assert_eq!(ledger.acknowledged_bytes(), 1);
    // The channel is lost, with a message that arrived and one that did not.
    ledger.sent(0, [20..30], 4);
    assert_eq!(ledger.reclaim(0, 2), Ok(10));
    assert_eq!(ledger.acknowledged_bytes(), 3);
    // All channels are lost. Messages count if none of their pages is missing.
    ledger.sent(1, [30..35, 36..40], 8);
    ledger.sent(1, [40..50], 16);
    ledger.sent(2, [50..60], 32);
    ledger.sent(2, [60..70], 64);
    let missing = [20..30, 35..36, 49..50, 70..80];
    ledger.adopt_missing(missing.into_iter()).unwrap();
    assert_eq!(ledger.acknowledged_bytes(), 3 + 8 + 32 + 64);
}

/// Adds dirty pages, and returns those that were not unsent.
fn newly(ledger: &Ledger, dirty: &PageBitmap) -> Vec<Range<usize>> {
    let mut runs = Vec::new();
    ledger.add_dirty(dirty, |run| runs.push(run));
    runs
}

#[test]
fn a_page_that_changes_in_flight_waits_for_the_receipt() {
    let ledger = ledger(100, 1);
    ledger.set_unsent(0..10);
    assert_eq!(ledger.claim_run(0, 10), Some(0..10));
    ledger.sent(0, [0..10], 0);
    let dirty = PageBitmap::new(100);
    dirty.set_range(5..7);
    dirty.set_range(90..100);
    assert_eq!(newly(&ledger, &dirty), [5..7, 90..100]);
    assert_eq!(dirty.count(), 0);
    assert_eq!(counts(&ledger), (12, 10, 22));
    assert!(!ledger.claim(RamPage(5)));
    assert_eq!(ledger.claim_run(0, 64), Some(90..100));
    assert_eq!(ledger.claim_run(0, 64), None);
    ledger.unclaim(90..100);
    let (pages, unsent) = (10, 2);
    assert_eq!(ledger.receipt(0, 1), Ok(Released { pages, unsent }));
    assert_eq!(ledger.claim_run(0, 64), Some(5..7));
    assert_eq!(counts(&ledger), (10, 2, 12));
}

#[test]
fn a_run_ends_where_a_page_is_in_flight() {
    let ledger = ledger(300, 1);
    ledger.set_unsent(0..300);
    for page in [3, 100, 128, 200] {
        assert!(ledger.claim(RamPage(page)));
        ledger.set_unsent(ONE(page as usize));
    }
    assert_eq!(ledger.claim_run(0, 300), Some(0..3));
    assert_eq!(ledger.claim_run(0, 300), Some(4..100));
    assert_eq!(ledger.claim_run(0, 300), Some(101..128));
    assert_eq!(ledger.claim_run(0, 300), Some(129..200));
    assert_eq!(ledger.claim_run(0, 0), Some(201..202));
    assert_eq!(ledger.claim_run(0, 300), Some(202..300));
    assert_eq!(ledger.claim_run(0, 300), None);
    assert_eq!(counts(&ledger), (4, 300, 304));
}

#[test]
fn a_wrong_receipt_changes_nothing() {
    let ledger = ledger(10, 1);
    ledger.set_unsent(0..10);
    for page in 0..3 {
        assert!(ledger.claim(RamPage(page)));
        ledger.sent(0, [ONE(page as usize)], 0);
    }
    let (acknowledged, sent) = (2, 3);
    assert_eq!(ledger.receipt(0, 2).map(|it| it.pages), Ok(2));
    for upto in [0, 1, 4, u64::MAX] {
        let error = ReceiptError {
            upto,
            acknowledged,
            sent,
        };
        assert_eq!(ledger.receipt(0, upto), Err(error));
        assert_eq!(ledger.reclaim(0, upto), Err(error));
    }
    assert_eq!(counts(&ledger), (7, 1, 8));
}

#[test]
fn an_ended_channel_gives_back_what_is_not_in_place_and_counts_anew() {
    let ledger = ledger(100, 2);
    ledger.set_unsent(0..100);
    for start in [0, 10, 20] {
        assert_eq!(ledger.claim_run(start, 10), Some(start..start + 10));
        ledger.sent(1, [start..start + 10], 0);
    }
    ledger.set_unsent(25..26);
    assert_eq!(ledger.receipt(1, 1).map(|it| it.pages), Ok(10));
    assert_eq!(ledger.reclaim(1, 2), Ok(10));
    assert_eq!(counts(&ledger), (80, 0, 80));
    assert_eq!(ledger.claim_run(0, 5), Some(20..25));
    ledger.sent(1, [20..25], 0);
    assert!(ledger.receipt(1, 2).is_err());
    assert_eq!(ledger.receipt(1, 1).map(|it| it.pages), Ok(5));
}

#[test]
fn a_missing_set_replaces_what_no_receipt_has_told() {
    let ledger = ledger(300, 2);
    ledger.set_unsent(0..200);
    assert_eq!(ledger.claim_run(0, 50), Some(0..50));
    ledger.sent(0, [0..50], 0);
    assert_eq!(ledger.claim_run(50, 50), Some(50..100));
    ledger.sent(1, [50..100], 0);
    assert_eq!(ledger.receipt(1, 1).map(|it| it.pages), Ok(50));
    let before = counts(&ledger);
    for (missing, page) in [
        (vec![0..10, 40..51], 50),
        (vec![0..10, 99..120], 99),
        (vec![150..201], 200),
    ] {
        let error = TakesBack {
            page: RamPage(page),
        };
        assert_eq!(ledger.adopt_missing(missing.into_iter()), Err(error));
        assert_eq!(counts(&ledger), before);
    }
    assert_eq!(ledger.adopt_missing([5..10, 120..200].into_iter()), Ok(()));
    assert_eq!(counts(&ledger), (85, 0, 85));
    let runs: Vec<_> = ledger.unsent_runs().collect();
    assert_eq!(runs, [5..10, 120..200]);
    assert!(ledger.receipt(0, 1).is_err(), "its messages are forgotten");
}

#[test]
fn a_huge_memory_costs_little_where_nothing_is_unsent() {
    let pages = (12 << 40) / 4096;
    let ledger = ledger(pages, 1);
    ledger.set_unsent(pages - 1..pages);
    assert_eq!(ledger.claim_run(0, 64), Some(pages - 1..pages));
    assert_eq!(ledger.claim_run(0, 64), None);
    let dirty = PageBitmap::new(pages);
    dirty.set(RamPage(1 << 30));
    assert_eq!(newly(&ledger, &dirty).len(), 1);
    assert!(ledger.claim(RamPage(1 << 30)));
}

/// A change of a ledger.
#[derive(Debug, Clone)]
enum Step {
    Dirty(Range<usize>),
    Send {
        channel: usize,
        limits: Vec<usize>,
        from: usize,
    },
    Request {
        channel: usize,
        page: usize,
    },
    GiveBack {
        from: usize,
        limit: usize,
    },
    Receipt {
        channel: usize,
        more: u64,
    },
    Reclaim {
        channel: usize,
        more: u64,
    },
    /// Each page in flight or unsent is missing if its bit (modulo 64) is set.
    Adopt(u64),
    /// Names an acknowledged page, if there is one.
    TakeBack,
}

const PAGES: usize = 200;
const CHANNELS: usize = 3;

fn any_step() -> impl Strategy<Value = Step> {
    let range = (0..PAGES, 1..80_usize).prop_map(|(at, len)| at..(at + len).min(PAGES));
    let channel = 0..CHANNELS;
    prop_oneof![
        3 => range.prop_map(Step::Dirty),
        4 => (channel.clone(), vec(0..90_usize, 1..4), 0..PAGES)
            .prop_map(|(channel, limits, from)| Step::Send { channel, limits, from }),
        2 => (channel.clone(), 0..PAGES).prop_map(|(channel, page)| Step::Request { channel, page }),
        1 => (0..PAGES, 0..90_usize).prop_map(|(from, limit)| Step::GiveBack { from, limit }),
        3 => (channel.clone(), 0..5_u64).prop_map(|(channel, more)| Step::Receipt { channel, more }),
        1 => (channel, 0..5_u64).prop_map(|(channel, more)| Step::Reclaim { channel, more }),
        1 => any::<u64>().prop_map(Step::Adopt),
        1 => Just(Step::TakeBack),
    ]
}

/// The same with plain vectors.
struct Model {
    unsent: Vec<bool>,
    in_flight: Vec<bool>,
    /// Of each channel: the messages with a receipt, and the pages of the others.
    channels: Vec<(u64, Vec<Vec<usize>>)>,
}

impl Model {
    /// The run that a claim from `from` gets.
    fn claim_run(&mut self, from: usize, limit: usize) -> Option<Range<usize>> {
        let free = |model: &Self, page: usize| model.unsent[page] && !model.in_flight[page];
        let mut start = from;
        loop {
            // The ledger searches stretches of unsent pages, each at most `limit` long.
            start = (start..PAGES).find(|&page| self.unsent[page])?;
            let stop = (start + limit.max(1)).min(PAGES);
            let end = (start..stop)
                .find(|&page| !self.unsent[page])
                .unwrap_or(stop);
            if let Some(first) = (start..end).find(|&page| free(self, page)) {
                let last = (first..end).find(|&page| !free(self, page)).unwrap_or(end);
                for page in first..last {
                    (self.unsent[page], self.in_flight[page]) = (false, true);
                }
                return Some(first..last);
            }
            start = end;
        }
    }

    fn receipt(&mut self, channel: usize, upto: u64) -> Option<Vec<usize>> {
        let (acknowledged, messages) = &mut self.channels[channel];
        let taken = upto.checked_sub(*acknowledged)?;
        if taken > messages.len() as u64 {
            return None;
        }
        *acknowledged = upto;
        let pages: Vec<usize> = messages.drain(..taken as usize).flatten().collect();
        pages.iter().for_each(|&page| self.in_flight[page] = false);
        Some(pages)
    }

    fn check(&self, ledger: &Ledger) {
        let count = |bits: &[bool]| bits.iter().filter(|bit| **bit).count() as u64;
        let (unsent, in_flight) = (count(&self.unsent), count(&self.in_flight));
        assert_eq!(counts(ledger), (unsent, in_flight, unsent + in_flight));
        for page in 0..PAGES {
            let bits =
                [&ledger.unsent, &ledger.in_flight].map(|map| map.test(RamPage(page as u64)));
            assert_eq!(
                bits,
                [self.unsent[page], self.in_flight[page]],
                "page {page}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn the_ledger_does_what_a_plain_model_does(steps in vec(any_step(), 1..60)) {
        let ledger = ledger(PAGES, CHANNELS);
        let mut model = Model {
            unsent: vec![false; PAGES],
            in_flight: vec![false; PAGES],
            channels: vec![(0, Vec::new()); CHANNELS],
        };
        for step in steps {
            match step {
                Step::Dirty(pages) => {
                    let dirty = PageBitmap::new(PAGES);
                    dirty.set_range(pages.clone());
                    let new = pages.clone().filter(|&page| !model.unsent[page]);
                    let found = newly(&ledger, &dirty).into_iter().flatten();
                    prop_assert_eq!(found.collect::<Vec<_>>(), new.collect::<Vec<_>>());
                    pages.for_each(|page| model.unsent[page] = true);
                }
                Step::Send { channel, limits, from } => {
                    let mut runs = Vec::new();
                    let mut at = from;
                    for limit in limits {
                        let run = ledger.claim_run(at, limit);
                        prop_assert_eq!(&run, &model.claim_run(at, limit));
                        let Some(run) = run else { break };
                        at = run.end;
                        runs.push(run);
                    }
                    ledger.sent(channel, runs.iter().cloned(), 0);
                    let pages = runs.into_iter().flatten().collect();
                    model.channels[channel].1.push(pages);
                }
                Step::Request { channel, page } => {
                    let free = model.unsent[page] && !model.in_flight[page];
                    prop_assert_eq!(ledger.claim(RamPage(page as u64)), free);
                    if free {
                        ledger.sent(channel, [ONE(page)], 0);
                        (model.unsent[page], model.in_flight[page]) = (false, true);
                        model.channels[channel].1.push(vec![page]);
                    }
                }
                Step::GiveBack { from, limit } => {
                    let run = ledger.claim_run(from, limit);
                    prop_assert_eq!(&run, &model.claim_run(from, limit));
                    for page in run.into_iter().flatten() {
                        ledger.unclaim(ONE(page));
                        (model.unsent[page], model.in_flight[page]) = (true, false);
                    }
                }
                Step::Receipt { channel, more } => {
                    // Up to one message back, and up to any number ahead.
                    let upto = (model.channels[channel].0 + more).saturating_sub(1);
                    let released = model.receipt(channel, upto).map(|pages| Released {
                        pages: pages.len() as u64,
                        unsent: pages.iter().filter(|&&page| model.unsent[page]).count() as u64,
                    });
                    prop_assert_eq!(ledger.receipt(channel, upto).ok(), released);
                }
                Step::Reclaim { channel, more } => {
                    let placed = (model.channels[channel].0 + more).saturating_sub(1);
                    let back = model.receipt(channel, placed).map(|_| {
                        let (_, messages) = std::mem::take(&mut model.channels[channel]);
                        let pages: Vec<usize> = messages.into_iter().flatten().collect();
                        for &page in &pages {
                            (model.unsent[page], model.in_flight[page]) = (true, false);
                        }
                        pages.len() as u64
                    });
                    prop_assert_eq!(ledger.reclaim(channel, placed).ok(), back);
                }
                Step::Adopt(bits) => {
                    let missing: Vec<usize> = (0..PAGES)
                        .filter(|&page| model.unsent[page] || model.in_flight[page])
                        .filter(|page| bits >> (page % 64) & 1 == 1)
                        .collect();
                    let runs = missing.iter().map(|&page| page as u64..page as u64 + 1);
                    prop_assert_eq!(ledger.adopt_missing(runs), Ok(()));
                    model.in_flight.fill(false);
                    model.unsent.fill(false);
                    missing.into_iter().for_each(|page| model.unsent[page] = true);
                    model.channels.fill((0, Vec::new()));
                }
                Step::TakeBack => {
                    let acknowledged = |page: &usize| !model.unsent[*page] && !model.in_flight[*page];
                    if let Some(first) = (0..PAGES).find(acknowledged) {
                        let page = RamPage(first as u64);
                        let runs = core::iter::once(0..PAGES as u64);
                        prop_assert_eq!(ledger.adopt_missing(runs), Err(TakesBack { page }));
                    }
                }
            }
            model.check(&ledger);
        }
    }
}

/// Four channels send while pages become dirty, receipts come late and channels are lost. A page is
/// on one channel at a time, and its last content is sent.
#[test]
fn no_page_is_lost_or_sent_twice_at_once_however_many_threads_send() {
    const PAGES: usize = 2000;
    const CHANNELS: usize = 4;
    let ledger = ledger(PAGES, CHANNELS);
    // The guest's content of each page, the destination's, and the pages on a channel now.
    let [guest, there, flying] =
        [(); 3].map(|()| (0..PAGES).map(|_| AtomicU32::new(0)).collect::<Vec<_>>());
    let stopped = AtomicBool::new(false);
    const ORDER: Ordering = Ordering::SeqCst;
    std::thread::scope(|scope| {
        for channel in 0..CHANNELS {
            let (ledger, guest, there, flying, stopped) =
                (&ledger, &guest, &there, &flying, &stopped);
            scope.spawn(move || {
                let mut seed = channel as u64 + 1;
                let mut random = move |below: u64| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (seed >> 33) % below
                };
                // The messages on their way: pages with their contents.
                let mut wire: Vec<Vec<(usize, u32)>> = Vec::new();
                let (mut placed, mut told) = (0, 0);
                let land = |message: &[(usize, u32)]| {
                    for &(page, content) in message {
                        there[page].store(content, ORDER);
                        assert_eq!(flying[page].fetch_sub(1, ORDER), 1);
                    }
                };
                loop {
                    let stop = stopped.load(ORDER);
                    let start = random(PAGES as u64) as usize;
                    let run = match random(3) {
                        0 => ledger
                            .claim(RamPage(start as u64))
                            .then_some(start..start + 1),
                        _ => ledger.claim_run(start / 2, 1 + random(70) as usize),
                    };
                    if let Some(run) = run.clone() {
                        let read = |page: usize| {
                            assert_eq!(flying[page].fetch_add(1, ORDER), 0, "sent twice");
                            (page, guest[page].load(ORDER))
                        };
                        let message = run.clone().map(read).collect();
                        ledger.sent(channel, [run], 0);
                        wire.push(message);
                    }
                    match random(16) {
                        0 => {
                            // The channel is lost. Some of its messages have arrived.
                            let arrived = random(wire.len() as u64 + 1) as usize;
                            wire.drain(..arrived).for_each(|message| land(&message));
                            for (page, _) in wire.drain(..).flatten() {
                                flying[page].fetch_sub(1, ORDER);
                            }
                            ledger.reclaim(channel, placed + arrived as u64).unwrap();
                            (placed, told) = (0, 0);
                        }
                        1..8 if !wire.is_empty() => {
                            land(&wire.remove(0));
                            placed += 1;
                        }
                        _ => {}
                    }
                    if placed > told && random(2) == 0 {
                        told = placed;
                        ledger.receipt(channel, told).unwrap();
                    }
                    if stop && run.is_none() && ledger.unacknowledged() == 0 {
                        return;
                    }
                    if stop && run.is_none() && wire.is_empty() && told == placed {
                        std::thread::yield_now();
                    }
                }
            });
        }
        let dirty = PageBitmap::new(PAGES);
        for round in 1..300 {
            for at in 0..50 {
                let page = (round * 37 + at * at) % PAGES;
                guest[page].store(round as u32, ORDER);
                dirty.set(RamPage(page as u64));
            }
            ledger.add_dirty(&dirty, |_| ());
            std::thread::yield_now();
        }
        stopped.store(true, ORDER);
    });
    assert_eq!(counts(&ledger), (0, 0, 0));
    for page in 0..PAGES {
        assert_eq!(there[page].load(ORDER), guest[page].load(ORDER));
    }
}
