//! Limits the rate of pages.
//!
//! **Guarantee.** In any time `t`, the pages of one limit have at most `rate * t` bytes, plus one
//! burst, plus one frame of each thread. A thread that has nothing to send loses nothing but the
//! burst. Urgent pages never wait, and the other pages make up for them.
//!
//! **Mechanism.** Each limit is one atomic: the time at which the bytes sent so far would all have
//! passed at its rate. A thread waits while that time is ahead by more than the burst. It charges
//! its bytes when it sends them. Threads that look at once may all send one frame.

use super::shared::Mode;
use crate::sync::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The time by which pages may be ahead of their rate.
const BURST: Duration = Duration::from_millis(2);

/// No limit.
const NONE: u64 = 0;

/// One limit, in virtual time.
#[derive(Debug)]
struct Limit {
    /// Bytes a second, or [`NONE`].
    rate: AtomicU64,
    /// Nanoseconds from the limiter's start.
    passed_at: AtomicU64,
}

impl Limit {
    const fn new() -> Self {
        Self {
            rate: AtomicU64::new(NONE),
            passed_at: AtomicU64::new(0),
        }
    }

    /// Changes the rate, and forgets the bytes that are ahead of the old one.
    fn set(&self, rate: Option<u64>) {
        let rate = rate.unwrap_or(NONE);
        if self.rate.swap(rate, Ordering::Relaxed) != rate {
            self.passed_at.store(0, Ordering::Relaxed);
        }
    }

    /// The time to wait at `now` before a frame is sent.
    fn wait(&self, now: u64) -> Duration {
        if self.rate.load(Ordering::Relaxed) == NONE {
            return Duration::ZERO;
        }
        let ahead = self.passed_at.load(Ordering::Relaxed).saturating_sub(now);
        Duration::from_nanos(ahead).saturating_sub(BURST)
    }

    /// Counts bytes that are sent at `now`.
    fn charge(&self, now: u64, bytes: u64) {
        let rate = self.rate.load(Ordering::Relaxed);
        if rate == NONE {
            return;
        }
        let ns = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(rate));
        let ns = u64::try_from(ns).unwrap_or(u64::MAX);
        let add = |passed_at: u64| Some(passed_at.max(now).saturating_add(ns));
        // It never fails: `add` always returns a value.
        let (set, fetch) = (Ordering::Relaxed, Ordering::Relaxed);
        let _ = self.passed_at.fetch_update(set, fetch, add);
    }
}

/// The limits of a migration, which all sending threads share.
#[derive(Debug)]
pub(super) struct Limiter {
    began: Instant,
    all: Limit,
    push: Limit,
}

impl Limiter {
    /// Without limits.
    pub(super) fn new() -> Self {
        Self {
            began: Instant::now(),
            all: Limit::new(),
            push: Limit::new(),
        }
    }

    /// Sets the limits: of all pages, and of the background push. In bytes a second.
    pub(super) fn set(&self, all: Option<u64>, push: Option<u64>) {
        self.all.set(all);
        self.push.set(push);
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// The time that a bulk thread waits before it fills its next frame. `None`: it may go on.
    pub(super) fn wait(&self, mode: Mode) -> Option<Duration> {
        let now = self.now();
        let wait = match mode {
            Mode::Push => self.all.wait(now).max(self.push.wait(now)),
            _ => self.all.wait(now),
        };
        (!wait.is_zero()).then_some(wait)
    }

    /// Counts the bytes of a bulk frame.
    pub(super) fn charge(&self, mode: Mode, bytes: u64) {
        let now = self.now();
        self.all.charge(now, bytes);
        if mode == Mode::Push {
            self.push.charge(now, bytes);
        }
    }

    /// Counts the bytes of urgent pages, which never wait.
    pub(super) fn charge_urgent(&self, bytes: u64) {
        self.all.charge(self.now(), bytes);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn without_a_limit_nothing_waits() {
        let limiter = Limiter::new();
        for mode in [Mode::Copy, Mode::Push] {
            limiter.charge(mode, u64::MAX);
            assert_eq!(limiter.wait(mode), None);
        }
    }

    #[test]
    fn urgent_pages_take_from_the_push_and_not_from_its_own_limit() {
        let limiter = Limiter::new();
        limiter.set(None, Some(1 << 20));
        limiter.charge_urgent(1 << 20);
        assert_eq!(limiter.wait(Mode::Push), None);
        limiter.set(Some(1 << 20), Some(1 << 20));
        limiter.charge_urgent(1 << 20);
        for mode in [Mode::Copy, Mode::Push] {
            assert!(limiter.wait(mode).unwrap() > Duration::from_millis(800));
        }
    }

    #[test]
    fn a_push_limit_counts_in_the_push_only() {
        let limiter = Limiter::new();
        limiter.set(None, Some(1 << 20));
        limiter.charge(Mode::Copy, 1 << 20);
        assert_eq!(limiter.wait(Mode::Push), None);
        limiter.charge(Mode::Push, 1 << 20);
        assert!(limiter.wait(Mode::Push).is_some());
        assert_eq!(limiter.wait(Mode::Copy), None);
    }

    #[test]
    fn another_rate_counts_at_once() {
        let limit = Limit::new();
        limit.set(Some(1 << 10));
        limit.charge(0, 1 << 20);
        assert!(limit.wait(0) > Duration::from_secs(1000));
        limit.set(Some(1 << 10));
        assert!(limit.wait(0) > Duration::from_secs(1000), "the same rate");
        limit.set(Some(1 << 30));
        assert_eq!(limit.wait(0), Duration::ZERO);
        limit.charge(0, 1 << 30);
        limit.set(None);
        assert_eq!(limit.wait(0), Duration::ZERO);
    }

    proptest! {
        /// Threads that obey the limit stay below it in every stretch of time, and use it when
        /// they always have something to send.
        #[test]
        fn the_rate_holds_in_every_stretch_and_is_used(
            rate in (64u64 << 10)..(10 << 30),
            threads in 1u64..=16,
            frames in prop::collection::vec((1u64..=(256 << 10), 0u64..3), 50..300),
        ) {
            let limit = Limit::new();
            limit.set(Some(rate));
            let (mut now, mut idle) = (MS, 0);
            let mut sent: Vec<(u64, u64)> = Vec::new();
            for (at, (bytes, pause)) in frames.iter().enumerate() {
                // As many threads as there are look before the first of them has sent.
                if (at as u64).is_multiple_of(threads) {
                    let wait = limit.wait(now).as_nanos() as u64;
                    now += wait;
                    if *pause == 0 {
                        now += MS / 10;
                        idle += MS / 10;
                    }
                }
                limit.charge(now, *bytes);
                sent.push((now, *bytes));
            }
            let frame = 256 << 10;
            let bound = |ns: u64| {
                (u128::from(rate) * u128::from(ns + 2 * MS) / 1_000_000_000) as u64
                    + threads * frame
            };
            for from in 0..sent.len() {
                let mut bytes = 0;
                for (at, more) in &sent[from..] {
                    bytes += more;
                    prop_assert!(bytes <= bound(at - sent[from].0) + 1);
                }
            }
            // Busy threads get the whole rate, but for the last frames and the idle time.
            let all: u64 = sent.iter().map(|(_, bytes)| bytes).sum();
            let used = now - MS;
            let owed = u128::from(rate) * u128::from(used.saturating_sub(idle)) / 1_000_000_000;
            prop_assert!(u128::from(all + threads * frame) >= owed);
        }
    }
}
