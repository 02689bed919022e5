//! Governors on a simulated link: one queue, a rate, a delay, and steps of both.

use super::{FRAME_BYTES, Governor};
use crate::wire::PAGE_BYTES;
use proptest::prelude::*;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

const SECOND: u64 = 1_000_000_000;
const QUEUE: Duration = Duration::from_micros(300);

/// A link with one queue. Rates are in bytes a second, times in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Link {
    rate: u64,
    /// The delay of one direction.
    delay: u64,
    /// Bytes that pass at once after an idle time.
    burst: u64,
}

impl Link {
    fn time_of(self, bytes: u64) -> u64 {
        (u128::from(bytes) * u128::from(SECOND) / u128::from(self.rate)) as u64
    }

    /// The bytes that may be under way: those of the least round trip of a page, and the queue.
    fn allowed(self, queue: Duration) -> u64 {
        self.allowed_with(queue.as_nanos() as u64)
    }

    /// The same with a queue in nanoseconds.
    fn allowed_with(self, queue: u64) -> u64 {
        let time = 2 * self.delay + queue;
        PAGE_BYTES as u64 + (u128::from(self.rate) * u128::from(time) / u128::from(SECOND)) as u64
    }
}

/// The observations of a part of a run.
#[derive(Debug, Default)]
struct Seen {
    delivered: u64,
    most_under_way: u64,
    /// The time with more under way than allowed.
    excess: u64,
    largest_frame: u64,
}

struct Run {
    now: u64,
    link: Link,
    free_at: u64,
    governors: Vec<Governor>,
    /// The receipts to come: the time, and the channel.
    receipts: BinaryHeap<Reverse<(u64, usize)>>,
    /// The push gives way in this part of each millisecond, in nanoseconds.
    gives_way: u64,
    /// The sender wakes up so much later than its receipt, at most.
    lateness: u64,
    random: u64,
}

impl Run {
    fn new(link: Link, channels: usize) -> Self {
        let queue = QUEUE / channels as u32;
        Self {
            now: SECOND,
            link,
            free_at: 0,
            governors: (0..channels).map(|_| Governor::new(queue)).collect(),
            receipts: BinaryHeap::new(),
            gives_way: 0,
            lateness: 0,
            random: 1,
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.random >> 33) % (below + 1)
    }

    /// The bytes that may be under way. Each channel may have some pages, whatever the rate.
    fn allowed(&self) -> u64 {
        let channels = self.governors.len() as u64;
        // The bound looks for more by a quarter. Channels that share a link unevenly measure more
        // than their shares.
        let (quarters, pages) = if channels > 1 { (7, 3) } else { (6, 2) };
        // Late receipts look like a longer way.
        let queue = QUEUE.as_nanos() as u64 + self.lateness;
        self.link.allowed_with(queue) * quarters / 4 + channels * pages * PAGE_BYTES as u64
    }

    fn under_way(&self) -> u64 {
        self.governors
            .iter()
            .map(|governor| governor.under_way)
            .sum()
    }

    fn send(&mut self, seen: &mut Seen) {
        let gives_way = self.now % 1_000_000 < self.gives_way;
        for channel in 0..self.governors.len() {
            loop {
                if gives_way {
                    self.governors[channel].limited();
                    break;
                }
                let Some(bytes) = self.governors[channel].room() else {
                    break;
                };
                seen.largest_frame = seen.largest_frame.max(bytes);
                self.governors[channel].sent(self.now, bytes);
                let idle_since = self.now.saturating_sub(self.link.time_of(self.link.burst));
                self.free_at = self.free_at.max(idle_since) + self.link.time_of(bytes);
                let receipt =
                    self.free_at.max(self.now) + 2 * self.link.delay + self.random(self.lateness);
                self.receipts.push(Reverse((receipt, channel)));
            }
        }
        seen.most_under_way = seen.most_under_way.max(self.under_way());
    }

    fn run(&mut self, time: u64) -> Seen {
        let mut seen = Seen::default();
        let end = self.now + time;
        while self.now < end {
            self.send(&mut seen);
            let (sent_at, excess) = (self.now, self.under_way() > self.allowed());
            let next_turn = (self.now / 1_000_000 + 1) * 1_000_000;
            let way_is_free = self.now / 1_000_000 * 1_000_000 + self.gives_way;
            let idle = if self.now < way_is_free {
                way_is_free
            } else {
                next_turn
            };
            match self.receipts.peek() {
                Some(Reverse((at, _))) if *at <= idle => {
                    let Reverse((at, channel)) = self.receipts.pop().expect("seen");
                    self.now = self.now.max(at);
                    let before = self.governors[channel].delivered;
                    self.governors[channel].receipts(self.now, 1);
                    seen.delivered += self.governors[channel].delivered - before;
                }
                _ => self.now = idle,
            }
            if excess {
                seen.excess += self.now - sent_at;
            }
        }
        seen
    }

    /// The bound is kept, but for short times.
    fn check_bound(&self, seen: &Seen, time: u64) -> Result<(), TestCaseError> {
        let most = 2 * self.allowed();
        let excess = seen.excess as f64 / time as f64;
        prop_assert!(excess < 0.1, "{:?}: {excess:.2} of the time", self.link);
        prop_assert!(seen.most_under_way <= most, "{seen:?}, allowed {most}");
        Ok(())
    }

    /// Checks the next two seconds.
    fn check(&mut self, busy: f64) -> Result<(), TestCaseError> {
        let seen = self.run(2 * SECOND);
        let possible = 2 * self.link.rate;
        let share = seen.delivered as f64 / possible as f64;
        prop_assert!(share > busy, "{:?}: {share:.2} of the rate", self.link);
        self.check_bound(&seen, 2 * SECOND)?;
        let frame = (self.link.rate / 4000).max(PAGE_BYTES as u64) * 5 / 4;
        prop_assert!(seen.largest_frame <= frame.min(FRAME_BYTES), "{seen:?}");
        Ok(())
    }
}

/// From 10 Mbit/s to loopback, and from a rack to a continent.
fn links() -> impl Strategy<Value = Link> {
    (1.25e6_f64.ln()..3e9_f64.ln(), 5e3_f64.ln()..2e7_f64.ln()).prop_map(|(rate, delay)| Link {
        rate: rate.exp() as u64,
        delay: delay.exp() as u64,
        burst: 0,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_link_is_busy_and_its_queue_short(link in links(), channels in 1_usize..5) {
        let mut run = Run::new(link, channels);
        run.run(3 * SECOND);
        run.check(0.8)?;
    }

    #[test]
    fn a_link_that_changes_is_followed_within_a_second(
        first in links(),
        factor in 0.05_f64..20.0,
    ) {
        let mut run = Run::new(first, 1);
        run.run(3 * SECOND);
        let rate = (first.rate as f64 * factor).clamp(1.25e6, 3e9) as u64;
        run.link.rate = rate;
        // The bytes under way have to arrive first.
        run.run(SECOND + first.time_of(first.allowed(QUEUE)) * first.rate / rate + 100 * first.delay);
        run.check(0.8)?;
    }

    #[test]
    fn a_push_that_gives_way_keeps_its_bound(link in links(), gives_way in 0_u64..900_000) {
        let mut run = Run::new(link, 1);
        run.gives_way = gives_way;
        run.run(3 * SECOND);
        let seen = run.run(SECOND);
        run.check_bound(&seen, SECOND)?;
        prop_assert!(seen.delivered > 0);
    }

    #[test]
    fn bursts_say_nothing_of_the_rate(
        rate in 10_000_000_u64..500_000_000,
        delay in 5_000_u64..100_000,
        lateness in 0_u64..500_000,
    ) {
        let mut run = Run::new(Link { rate, delay, burst: 128 << 10 }, 1);
        run.lateness = lateness;
        run.run(3 * SECOND);
        let seen = run.run(SECOND);
        run.check_bound(&seen, SECOND)?;
    }

    #[test]
    fn a_sender_that_wakes_late_is_not_starved(link in links(), lateness in 0_u64..200_000) {
        let mut run = Run::new(link, 1);
        run.lateness = lateness;
        run.run(3 * SECOND);
        let seen = run.run(SECOND);
        let share = seen.delivered as f64 / link.rate as f64;
        prop_assert!(share > 0.5, "{share}");
    }
}

#[test]
fn a_longer_route_is_noticed() {
    let near = Link {
        rate: 125_000_000,
        delay: 20_000,
        burst: 0,
    };
    let mut run = Run::new(near, 1);
    run.run(3 * SECOND);
    run.check(0.9).unwrap();
    run.link.delay = 5_000_000;
    run.run(3 * SECOND);
    run.check(0.85).unwrap();
}

#[test]
fn a_channel_with_nothing_under_way_may_send() {
    let mut governor = Governor::new(QUEUE);
    for second in 1..100 {
        assert!(governor.room().is_some());
        governor.sent(second * SECOND, 1);
        governor.receipts(second * SECOND + SECOND / 2, 1);
    }
}
