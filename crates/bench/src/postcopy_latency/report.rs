//! The results of a run.

use super::aims::{self, Aim};
use super::noise::Noise;
use super::round::{Measured, Round};
use super::setting::{Column, LatencySetting, Mode};
use super::stalls::{LogBucket, buckets};
use crate::demand_paging::Unmeasured;
use crate::kit::{Figure, Samples};
use pageferry_testkit::qemu::Qemu;
use serde::Serialize;
use std::time::Duration;

/// The figures of one row of a column.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LatencyRow {
    /// The row.
    pub(crate) mode: Mode,
    /// The number of stalls, or of exchanges, in all rounds of the figures.
    pub(crate) stalls: u64,
    /// The mean of a round, in microseconds.
    pub(crate) mean_us: Figure,
    /// The median of a round, in microseconds.
    pub(crate) p50_us: Figure,
    /// The 99th percentile of a round, in microseconds.
    pub(crate) p99_us: Figure,
    /// The longest of a round, in microseconds.
    pub(crate) max_us: Figure,
    /// The share above 2 ms in a round, in percent.
    pub(crate) over_2ms_percent: Figure,
    /// The share above 4 ms in a round, in percent.
    pub(crate) over_4ms_percent: Figure,
    /// The bytes that the source's host sent in post-copy, headers included, to those that the link
    /// can carry. `None` where nothing is pushed.
    pub(crate) link_busy_percent: Option<Figure>,
    /// The length of post-copy, in seconds. `None` where nothing is pushed.
    pub(crate) total_s: Option<Figure>,
    /// The stalls of all rounds of the figures, by powers of two.
    pub(crate) histogram: Vec<LogBucket>,
}

/// One round of a column.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct LatencyRound {
    /// What disturbed it.
    #[serde(flatten)]
    pub(crate) noise: Noise,
    /// Whether it counts.
    pub(crate) counts: bool,
}

/// The figures of a column.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LatencyColumn {
    /// The conditions.
    #[serde(flatten)]
    pub(crate) column: Column,
    /// The engine of the guests: `soft` or `kvm`.
    pub(crate) engine: &'static str,
    /// The delivery of faults on missing pages.
    pub(crate) delivery: Option<&'static str>,
    /// Guest memory of the idle row, in bytes.
    pub(crate) idle_memory_bytes: u64,
    /// All rounds in order.
    pub(crate) rounds: Vec<LatencyRound>,
    /// Whether too few rounds count for a verdict. The figures are then those of all rounds.
    pub(crate) noisy: bool,
    /// The rows.
    pub(crate) rows: Vec<LatencyRow>,
    /// The aims, if the link has the rate that they are for.
    pub(crate) verdicts: Vec<Aim>,
}

/// The results of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LatencyReport {
    /// The rate of the link in each direction, in bytes a second.
    pub(crate) rate_bytes_per_s: u64,
    /// Guest memory, in bytes. The idle rows have less.
    pub(crate) memory_bytes: u64,
    /// The version of QEMU in its rows. `None`: they were not asked for.
    pub(crate) qemu_version: Option<String>,
    /// The columns that were measured.
    pub(crate) columns: Vec<LatencyColumn>,
    /// What this machine cannot measure.
    pub(crate) unmeasured: Vec<Unmeasured>,
    /// The number of cores that this process may use.
    pub(crate) cores: u32,
    /// The length of the run, in seconds.
    pub(crate) seconds: f64,
}

/// The rate that the aims are for, in bytes a second: 1 Gbit/s.
const AIMED_RATE: u64 = 125_000_000;

impl LatencyReport {
    pub(super) fn new(setting: &LatencySetting, qemu: Option<&Qemu>) -> Self {
        Self {
            qemu_version: qemu.map(|qemu| qemu.version.clone()),
            rate_bytes_per_s: setting.rate.bytes_per_second(),
            memory_bytes: setting.memory_bytes,
            columns: Vec::new(),
            unmeasured: Vec::new(),
            cores: crate::demand_paging::cores(),
            seconds: 0.0,
        }
    }

    pub(super) fn lacks(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.unmeasured.push(Unmeasured {
            what: what.into(),
            why: why.into(),
        });
    }

    pub(super) fn end(&mut self, took: Duration) {
        self.seconds = took.as_secs_f64();
    }

    pub(super) fn add(&mut self, setting: &LatencySetting, column: &Column, rounds: &[Round]) {
        let counted: Vec<&Round> = rounds
            .iter()
            .filter(|round| round.noise.is_quiet())
            .collect();
        let noisy = counted.len() < aims::MIN_ROUNDS;
        let shown: Vec<&Round> = if noisy {
            rounds.iter().collect()
        } else {
            counted.clone()
        };
        let aimed = self.rate_bytes_per_s == AIMED_RATE;
        self.columns.push(LatencyColumn {
            column: column.clone(),
            engine: setting.engine_of(column.host_page).name(),
            idle_memory_bytes: setting.memory_of(column.host_page, Mode::Idle),
            delivery: shown
                .iter()
                .find_map(|round| round.row(Mode::Preempt)?.delivery),
            rounds: rounds
                .iter()
                .map(|round| LatencyRound {
                    noise: round.noise,
                    counts: round.noise.is_quiet(),
                })
                .collect(),
            noisy,
            rows: Mode::ALL
                .into_iter()
                .filter_map(|mode| row(mode, &shown))
                .collect(),
            verdicts: if aimed {
                aims::judge(column, &counted)
            } else {
                Vec::new()
            },
        });
    }
}

/// The figures of a row over rounds. `None` if no round has it.
fn row(mode: Mode, rounds: &[&Round]) -> Option<LatencyRow> {
    let all: Vec<&Measured> = rounds.iter().filter_map(|round| round.row(mode)).collect();
    if all.is_empty() {
        return None;
    }
    let figure =
        |of: fn(&Measured) -> f64| Figure::of(&all.iter().map(|row| of(row)).collect::<Samples>());
    let maybe = |of: fn(&Measured) -> Option<f64>| {
        let samples: Samples = all.iter().filter_map(|row| of(row)).collect();
        (!samples.is_empty()).then(|| Figure::of(&samples))
    };
    Some(LatencyRow {
        mode,
        stalls: all.iter().map(|row| row.stalls.count).sum(),
        mean_us: figure(|row| row.stalls.mean_us),
        p50_us: figure(|row| row.stalls.p50_us),
        p99_us: figure(|row| row.stalls.p99_us),
        max_us: figure(|row| row.stalls.max_us),
        over_2ms_percent: figure(|row| row.stalls.over_2ms_percent),
        over_4ms_percent: figure(|row| row.stalls.over_4ms_percent),
        link_busy_percent: maybe(|row| row.link_busy_percent),
        total_s: maybe(|row| row.total_s),
        histogram: buckets(all.iter().map(|row| &row.stalls)),
    })
}

impl LatencyColumn {
    /// The number of rounds that count.
    #[must_use]
    pub(crate) fn counted(&self) -> usize {
        self.rounds.iter().filter(|round| round.counts).count()
    }
}
