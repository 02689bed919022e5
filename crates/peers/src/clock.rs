//! Time for one operation, from batches.

use crate::layout::KEYS;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// The time one reading of the clock adds to a batch: the least of many.
pub(crate) fn overhead() -> Duration {
    (0..1000)
        .map(|_| Instant::now().elapsed())
        .min()
        .unwrap_or_default()
}

/// Nanoseconds for one of `count` operations done in `spent`, less what the clock itself costs.
pub(crate) fn per_operation(spent: Duration, overhead: Duration, count: usize) -> f64 {
    spent.saturating_sub(overhead).as_nanos() as f64 / count as f64
}

/// Nanoseconds for one call of `look_up`, which is given the indices of keys in turn.
///
/// A quarter of `sample` warms the caches and says how many calls fill `sample`; those are then timed at once.
#[inline]
pub(crate) fn per_look_up<T>(sample: Duration, mut look_up: impl FnMut(usize) -> T) -> f64 {
    let mut at = 0usize;
    let mut run = |count: u64| {
        let start = Instant::now();
        for _ in 0..count {
            black_box(look_up(at % KEYS));
            at += 1;
        }
        start.elapsed()
    };
    let mut count = 1;
    let cost = loop {
        let spent = run(count);
        if spent >= sample / 8 {
            break spent.as_secs_f64() / count as f64;
        }
        count *= 2;
    };
    let count = ((sample.as_secs_f64() / cost) as u64).max(1);
    run(count).as_nanos() as f64 / count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_costs_what_it_waits() {
        let wait = Duration::from_micros(200);
        let mut seen = Vec::new();
        let cost = per_look_up(Duration::from_millis(8), |key| {
            seen.push(key);
            let start = Instant::now();
            while start.elapsed() < wait {}
        });
        assert!(cost >= 200_000.0, "{cost}");
        assert!(seen.iter().copied().eq(0..seen.len()));
    }

    #[test]
    fn the_clock_s_own_cost_is_taken_off_and_never_more() {
        let ns = Duration::from_nanos;
        assert_eq!(per_operation(ns(1040), ns(40), 10), 100.0);
        assert_eq!(per_operation(ns(10), ns(40), 10), 0.0);
        assert!(overhead() < Duration::from_micros(10));
    }
}
