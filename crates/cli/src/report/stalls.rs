//! The stalls of vCPUs on missing pages.

use pageferry_charts::Bucket;
use serde::{Deserialize, Serialize};

/// A long stall. In QEMU's preempt series every seventh fault still exceeded this.
const LONG_NS: u64 = 2_000_000;
/// Buckets per decade of the histogram.
const BUCKETS_A_DECADE: f64 = 10.0;

/// The distribution of stalls: values in nanoseconds (three significant digits) with their counts,
/// ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stalls(Vec<(u64, u64)>);

impl Stalls {
    /// From values in nanoseconds with their counts, in any order.
    pub(crate) fn new(pairs: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let mut pairs: Vec<_> = pairs.into_iter().filter(|pair| pair.1 > 0).collect();
        pairs.sort_unstable();
        Self(pairs)
    }

    /// The number of stalls.
    pub(crate) fn count(&self) -> u64 {
        self.0.iter().map(|pair| pair.1).sum()
    }

    /// The mean in microseconds; 0 without stalls.
    pub(crate) fn mean_us(&self) -> f64 {
        let sum: f64 = self
            .0
            .iter()
            .map(|&(ns, count)| ns as f64 * count as f64)
            .sum();
        sum / self.count().max(1) as f64 / 1e3
    }

    /// The least value in microseconds that at least `share` (0 to 1) of all stalls do not exceed;
    /// 0 without stalls.
    pub(crate) fn quantile_us(&self, share: f64) -> f64 {
        let wanted = (share * self.count() as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for &(ns, count) in &self.0 {
            seen += count;
            if seen >= wanted {
                return ns as f64 / 1e3;
            }
        }
        0.0
    }

    /// The longest stall in microseconds; 0 without stalls.
    pub(crate) fn max_us(&self) -> f64 {
        self.0.last().map_or(0.0, |pair| pair.0 as f64 / 1e3)
    }

    /// The number of stalls longer than 2 ms.
    pub(crate) fn over_2ms(&self) -> u64 {
        self.0
            .iter()
            .filter(|pair| pair.0 > LONG_NS)
            .map(|pair| pair.1)
            .sum()
    }

    /// A histogram with ten buckets per decade, from the first non-empty bucket to the last.
    pub(crate) fn buckets(&self) -> Vec<Bucket> {
        let index = |ns: u64| ((ns.max(1) as f64 / 1e3).log10() * BUCKETS_A_DECADE).floor() as i64;
        let (Some(first), Some(last)) = (self.0.first(), self.0.last()) else {
            return Vec::new();
        };
        let edge = |i: i64| 10f64.powf(i as f64 / BUCKETS_A_DECADE);
        let low = index(first.0);
        let mut buckets: Vec<_> = (low..=index(last.0))
            .map(|i| Bucket {
                from_us: edge(i),
                to_us: edge(i + 1),
                count: 0,
            })
            .collect();
        for &(ns, count) in &self.0 {
            buckets[(index(ns) - low) as usize].count += count;
        }
        buckets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_the_least_values_that_reach_their_share() {
        let stalls = Stalls::new([(3000, 1), (1000, 90), (2000, 9)]);
        assert_eq!(stalls.count(), 100);
        assert_eq!(stalls.quantile_us(0.5), 1.0);
        assert_eq!(stalls.quantile_us(0.9), 1.0);
        assert_eq!(stalls.quantile_us(0.91), 2.0);
        assert_eq!(stalls.quantile_us(0.999), 3.0);
        assert_eq!(stalls.max_us(), 3.0);
        assert!((stalls.mean_us() - 1.11).abs() < 1e-9);
    }

    #[test]
    fn none_gives_zeros_and_no_buckets() {
        let none = Stalls::new([(5, 0)]);
        assert_eq!(
            (
                none.count(),
                none.quantile_us(0.5),
                none.max_us(),
                none.mean_us()
            ),
            (0, 0.0, 0.0, 0.0)
        );
        assert!(none.buckets().is_empty());
    }

    #[test]
    fn every_stall_is_in_one_bucket() {
        let stalls = Stalls::new([
            (1, 2),
            (999, 3),
            (1000, 5),
            (2_000_000, 7),
            (2_000_001, 11),
            (u64::MAX, 1),
        ]);
        let buckets = stalls.buckets();
        assert_eq!(buckets.iter().map(|b| b.count).sum::<u64>(), stalls.count());
        let one = buckets
            .iter()
            .find(|b| (b.from_us - 1.0).abs() < 1e-9)
            .unwrap();
        assert_eq!(one.count, 5);
        assert_eq!(stalls.over_2ms(), 12);
    }
}
