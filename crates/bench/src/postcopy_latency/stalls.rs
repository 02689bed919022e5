//! The stalls of one row in one round.

/// The summary of stalls, in microseconds. Without stalls all values are 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Stalls {
    pub(super) count: u64,
    pub(super) mean_us: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) max_us: f64,
    pub(super) over_2ms_percent: f64,
    pub(super) over_4ms_percent: f64,
}

impl Stalls {
    /// Summarises times in nanoseconds, ascending, each with its count.
    pub(super) fn of(times: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let times: Vec<(u64, u64)> = times.into_iter().filter(|time| time.1 > 0).collect();
        let count: u64 = times.iter().map(|time| time.1).sum();
        let Some(&(max, _)) = times.last() else {
            return Self::default();
        };
        let sum: f64 = times.iter().map(|(ns, n)| *ns as f64 * *n as f64).sum();
        let over = |limit: u64| {
            let over = times.iter().filter(|(ns, _)| *ns > limit);
            over.map(|time| time.1).sum::<u64>() as f64 * 100.0 / count as f64
        };
        let us = |ns: u64| ns as f64 / 1000.0;
        Self {
            count,
            mean_us: sum / count as f64 / 1000.0,
            p50_us: us(quantile(&times, count, 0.5)),
            p99_us: us(quantile(&times, count, 0.99)),
            max_us: us(max),
            over_2ms_percent: over(2_000_000),
            over_4ms_percent: over(4_000_000),
        }
    }
}

/// The time at quantile `q` by nearest rank.
fn quantile(times: &[(u64, u64)], count: u64, q: f64) -> u64 {
    let rank = (q * count as f64).ceil() as u64;
    let mut before = 0;
    for (ns, n) in times {
        before += n;
        if before >= rank {
            return *ns;
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_single_times() {
        // 98 times of 100 us, one of 3 ms, one of 5 ms.
        let stalls = Stalls::of([(100_000, 98), (3_000_000, 1), (5_000_000, 1)]);
        assert_eq!(stalls.count, 100);
        assert!((stalls.mean_us - 178.0).abs() < 1e-9, "{stalls:?}");
        assert_eq!((stalls.p50_us, stalls.p99_us), (100.0, 3000.0));
        assert_eq!(stalls.max_us, 5000.0);
        assert_eq!(
            (stalls.over_2ms_percent, stalls.over_4ms_percent),
            (2.0, 1.0)
        );
        assert_eq!(Stalls::of([]), Stalls::default());
        assert_eq!(Stalls::of([(7000, 1)]).p99_us, 7.0);
    }

    #[test]
    fn a_share_counts_only_times_above_its_bound() {
        let stalls = Stalls::of([(2_000_000, 1), (2_000_001, 1)]);
        assert_eq!(stalls.over_2ms_percent, 50.0);
    }
}
