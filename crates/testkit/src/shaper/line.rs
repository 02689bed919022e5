//! The state that all connections share: the time, and whatever holds bytes.
//!
//! **Guarantee.** Over any longer time, the bytes of a direction do not exceed the rate.
//!
//! **Mechanism.** The rate is a clock for each direction. Bytes move it on by the time that they
//! take, and the next ones wait for it.
//!
//! **Neighbours.** [`super::pair`] asks it, [`super::faults`] changes it.

use super::Plan;
use super::pipe::Hold;
use crate::Random;
use std::time::{Duration, Instant};

/// The time that a throttled direction may be late and still catch up.
const SLACK: Duration = Duration::from_millis(5);

/// The state that all connections share.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) now: Instant,
    pub(super) frozen: [Hold; 2],
    /// When the next bytes may pass, for each direction.
    pub(super) clear: [Instant; 2],
    pub(super) delay: Duration,
    pub(super) jitter: Duration,
    pub(super) rate: Option<u64>,
    /// The delay of a fault, and how long it lasts.
    pub(super) late: (Hold, Duration),
    /// The rate of a fault, and how long it lasts.
    pub(super) slow: (Hold, u64),
    random: Random,
}

impl Line {
    pub(super) fn new(plan: &Plan) -> Self {
        let now = Instant::now();
        Self {
            now,
            frozen: [Hold::No; 2],
            clear: [now; 2],
            delay: plan.delay,
            jitter: plan.jitter,
            rate: plan.rate,
            late: (Hold::No, Duration::ZERO),
            slow: (Hold::No, 0),
            random: Random::new(plan.seed),
        }
    }

    /// When bytes that are read now arrive.
    pub(super) fn due(&mut self) -> Instant {
        let jitter = self.jitter.as_nanos() as u64;
        let jitter = match jitter {
            0 => Duration::ZERO,
            most => Duration::from_nanos(self.random.below(most)),
        };
        let more = match self.late.0.holds(self.now) {
            true => self.late.1,
            false => Duration::ZERO,
        };
        self.now + self.delay + jitter + more
    }

    fn rate(&self) -> Option<u64> {
        let slow = Some(self.slow.1).filter(|_| self.slow.0.holds(self.now));
        slow.or(self.rate).map(|rate| rate.max(1))
    }

    /// How many bytes may pass now.
    pub(super) fn most(&self, way: usize) -> usize {
        match self.rate() {
            None => usize::MAX,
            Some(_) if self.clear[way] > self.now => 0,
            Some(rate) => (rate / 200).clamp(1, 64 << 10) as usize,
        }
    }

    pub(super) fn wrote(&mut self, way: usize, bytes: usize) {
        let oldest = self.now.checked_sub(SLACK).unwrap_or(self.now);
        if let Some(rate) = self.rate() {
            let time = Duration::from_secs_f64(bytes as f64 / rate as f64);
            self.clear[way] = self.clear[way].max(oldest) + time;
        }
    }
}
