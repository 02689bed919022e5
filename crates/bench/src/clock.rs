//! The time of one operation, from batches.

use crate::slots::KEYS;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// The time that reading the clock adds to a batch: the minimum of many readings.
pub(crate) fn overhead() -> Duration {
    (0..1000)
        .map(|_| Instant::now().elapsed())
        .min()
        .unwrap_or_default()
}

/// Nanoseconds per operation, of `count` operations in `spent`, without the clock's own cost.
pub(crate) fn per_operation(spent: Duration, overhead: Duration, count: usize) -> f64 {
    spent.saturating_sub(overhead).as_nanos() as f64 / count as f64
}

/// The length of a chunk of look-ups. It is far shorter than a time slice. So even on a busy
/// machine most chunks run undisturbed, and the median is that of an undisturbed chunk.
const CHUNK: Duration = Duration::from_micros(100);
/// [`Sampler::look_ups`] calls `before` again after this many chunks.
const CHUNKS: usize = 8;

/// The longest warm-up of the caches, in samples.
const WARM_UP: u32 = 6;

/// The settings for samples.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sampler {
    /// The length of a sample.
    pub(crate) sample: Duration,
    /// The cost of reading the clock.
    pub(crate) overhead: Duration,
}

impl Sampler {
    /// Measures `look_up`, which gets the indices of keys in turn. `sink` gets nanoseconds per
    /// call, once per chunk.
    ///
    /// Calls `before` before the first chunk and before every [`CHUNKS`] further ones, untimed. The
    /// warm-up looks up all keys once, or as many as [`WARM_UP`] samples allow. So the caches hold
    /// the data of this scheme, not of the previous one.
    #[inline]
    pub(crate) fn look_ups<T>(
        self,
        mut before: impl FnMut(),
        mut look_up: impl FnMut(usize) -> T,
        mut sink: impl FnMut(f64),
    ) {
        let mut at = 0usize;
        let mut run = |count: usize| {
            let start = Instant::now();
            for _ in 0..count {
                black_box(look_up(at % KEYS));
                at += 1;
            }
            start.elapsed()
        };
        let (begun, mut count, mut warmed) = (Instant::now(), 1, 0);
        while begun.elapsed() < WARM_UP * self.sample && warmed < KEYS {
            warmed += count;
            if run(count) < CHUNK / 2 {
                count *= 2;
            }
        }
        let begun = Instant::now();
        loop {
            before();
            for _ in 0..CHUNKS {
                sink(per_operation(run(count), self.overhead, count));
                if begun.elapsed() >= self.sample {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_costs_what_it_waits() {
        let wait = Duration::from_micros(200);
        let (mut keys, mut asked, mut samples) = (Vec::new(), 0, Vec::new());
        let sampler = Sampler {
            sample: Duration::from_millis(8),
            overhead: Duration::ZERO,
        };
        sampler.look_ups(
            || asked += 1,
            |key| {
                keys.push(key);
                let start = Instant::now();
                while start.elapsed() < wait {}
            },
            |cost| samples.push(cost),
        );
        assert!(!samples.is_empty() && samples.iter().all(|&cost| cost >= 200_000.0));
        assert_eq!(asked, samples.len().div_ceil(CHUNKS));
        assert!(keys.iter().copied().eq(0..keys.len()));
    }

    #[test]
    fn the_clock_s_own_cost_is_taken_off_and_never_more() {
        let ns = Duration::from_nanos;
        assert_eq!(per_operation(ns(1040), ns(40), 10), 100.0);
        assert_eq!(per_operation(ns(10), ns(40), 10), 0.0);
        assert!(overhead() < Duration::from_micros(10));
    }
}
