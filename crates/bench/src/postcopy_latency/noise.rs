//! Whether other work disturbed a round.
//!
//! **Mechanism.** The kernel counts the busy time of all cores. What remains without this process
//! and its children is the time of others. It contains stolen time, and interrupts of idle cores. A
//! thread sleeps for 1 ms again and again, and its lateness shows how soon a thread gets a core.
//! The bench's own vCPUs would delay it, so it sleeps only in the gaps before the rows.

use crate::{BenchError, Samples};
use std::time::{Duration, Instant};

/// The sleeps before each row.
const SLEEPS: u32 = 100;
/// The length of a sleep.
const SLEEP: Duration = Duration::from_millis(1);

/// What disturbed a round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Noise {
    /// The share of all cores' time that others used, in percent.
    pub(crate) others_percent: f64,
    /// The lateness of a thread that slept for 1 ms, at the 99th percentile, in microseconds.
    pub(crate) sleeper_p99_us: f64,
}

impl Noise {
    /// A round counts if others used less than this, in percent.
    pub(crate) const MAX_OTHERS_PERCENT: f64 = 10.0;
    /// A round counts if the sleeper was late by less than this, in microseconds.
    pub(crate) const MAX_SLEEPER_US: f64 = 1000.0;

    /// Whether the round counts.
    #[must_use]
    pub(crate) fn is_quiet(&self) -> bool {
        self.others_percent < Self::MAX_OTHERS_PERCENT && self.sleeper_p99_us < Self::MAX_SLEEPER_US
    }
}

/// Times in ticks of the kernel's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticks {
    /// All cores, idle time included.
    all: u64,
    /// All cores, when not idle.
    busy: u64,
    /// This process, and its children that have ended.
    ours: u64,
}

impl Ticks {
    pub(crate) fn now() -> Result<Self, BenchError> {
        let read = |path, what| {
            std::fs::read_to_string(path).map_err(|source| BenchError::Os { what, source })
        };
        let stat = read("/proc/stat", "cannot read /proc/stat")?;
        let own = read("/proc/self/stat", "cannot read /proc/self/stat")?;
        let cores = cores(&stat).zip(ours(&own));
        let ((all, busy), ours) = cores.ok_or_else(|| {
            BenchError::Setting("/proc/stat and /proc/self/stat have no times".into())
        })?;
        Ok(Self { all, busy, ours })
    }

    /// The share of all cores' time since then that others used, in percent.
    pub(crate) fn others_percent(&self, since: &Self) -> f64 {
        let [all, busy, ours] = [
            self.all - since.all,
            self.busy - since.busy,
            self.ours - since.ours,
        ];
        busy.saturating_sub(ours) as f64 * 100.0 / all.max(1) as f64
    }
}

/// The first line of /proc/stat: all ticks, and those that were not idle.
fn cores(stat: &str) -> Option<(u64, u64)> {
    let words = stat.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = words
        .split_whitespace()
        .map_while(|word| word.parse().ok())
        .collect();
    // user, nice, system, idle, iowait, irq, softirq, steal. What follows is part of user and nice.
    let eight: &[u64; 8] = ticks.first_chunk()?;
    let all: u64 = eight.iter().sum();
    Some((all, all - eight[3] - eight[4]))
}

/// The line of /proc/self/stat: user and system time, also of children that have ended.
fn ours(stat: &str) -> Option<u64> {
    // The name in parentheses may hold spaces. The third field follows it.
    let (_, fields) = stat.rsplit_once(')')?;
    let times = fields.split_whitespace().skip(11).take(4);
    times.map(|word| word.parse::<u64>().ok()).sum()
}

/// Watches one round.
pub(super) struct Meter {
    began: Ticks,
    late_us: Samples,
}

impl Meter {
    pub(super) fn start() -> Result<Self, BenchError> {
        Ok(Self {
            began: Ticks::now()?,
            late_us: Samples::default(),
        })
    }

    /// Sleeps while nothing of ours runs.
    pub(super) fn gap(&mut self) {
        for _ in 0..SLEEPS {
            let began = Instant::now();
            std::thread::sleep(SLEEP);
            let late = began.elapsed().saturating_sub(SLEEP);
            self.late_us.push(late.as_secs_f64() * 1e6);
        }
    }

    pub(super) fn end(self) -> Result<Noise, BenchError> {
        Ok(Noise {
            others_percent: Ticks::now()?.others_percent(&self.began),
            sleeper_p99_us: self.late_us.quantile(0.99),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_counts_below_both_bounds() {
        let quiet = |others_percent, sleeper_p99_us| {
            let noise = Noise {
                others_percent,
                sleeper_p99_us,
            };
            noise.is_quiet()
        };
        assert!(quiet(9.9, 999.0));
        assert!(!quiet(10.0, 100.0));
        assert!(!quiet(1.0, 1000.0));
    }

    #[test]
    fn the_times_of_the_kernel_are_read() {
        let stat = "cpu  100 10 50 700 40 5 15 80 60 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(cores(stat), Some((1000, 260)));
        assert_eq!(cores("cpu  1 2 3"), None);
        let own = "42 (a) name) S 1 1 1 0 -1 4194304 9 9 9 9 11 22 33 44 20 0 1 0 5";
        assert_eq!(ours(own), Some(110));
        assert_eq!(ours("42 (x) S 1 1 1 0 -1 1 1 1 1 1 a b c d"), None);
        Ticks::now().expect("this kernel has them");
    }

    #[test]
    fn others_are_what_is_busy_and_not_ours() {
        let ticks = |all, busy, ours| Ticks { all, busy, ours };
        let began = ticks(1000, 100, 50);
        assert_eq!(ticks(2000, 400, 200).others_percent(&began), 15.0);
        // The kernel counts the cores by samples, so ours may be more than all.
        assert_eq!(ticks(2000, 200, 250).others_percent(&began), 0.0);
        assert_eq!(began.others_percent(&began), 0.0);
    }

    #[test]
    fn a_gap_gives_a_lateness_for_each_sleep() {
        let mut meter = Meter::start().expect("this kernel counts");
        meter.gap();
        assert_eq!(meter.late_us.len(), SLEEPS as usize);
        assert!(meter.end().expect("this kernel counts").sleeper_p99_us > 0.0);
    }
}
