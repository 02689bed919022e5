//! The aims of a column: bounds on its figures, judged by the rounds that count.

use super::round::{Measured, Round};
use super::setting::{Column, HostPage, Mode};
use crate::Samples;
use serde::Serialize;
use std::fmt;

/// Fewer counted rounds give no verdict.
pub(crate) const MIN_ROUNDS: usize = 5;

/// A bound on a figure, and whether the run met it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Aim {
    /// The figure in words.
    pub(crate) name: &'static str,
    /// The bound, in `unit`.
    pub(crate) limit: f64,
    /// Whether `limit` is the least. Otherwise it is the most.
    pub(crate) at_least: bool,
    /// The median over the rounds that count, in `unit`. `None` without such rounds.
    pub(crate) measured: Option<f64>,
    /// The unit of `limit` and `measured`: `%`, or `x` for a ratio of two figures of one round.
    pub(crate) unit: &'static str,
    /// Whether the bound was met. `None`: too few rounds count.
    pub(crate) met: Option<bool>,
}

impl Aim {
    /// `met`, `MISSED` or `not measured`.
    #[must_use]
    pub(crate) const fn verdict(&self) -> &'static str {
        match self.met {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "not measured",
        }
    }
}

impl fmt::Display for Aim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let measured = self.measured.map_or_else(
            || "-".to_owned(),
            |measured| format!("{measured:.2} {}", self.unit),
        );
        let bound = if self.at_least { "at least" } else { "at most" };
        write!(
            f,
            "{:<12}  {:<46} {measured:>10} ({bound} {} {})",
            self.verdict(),
            self.name,
            self.limit,
            self.unit
        )
    }
}

/// A bound on a figure of a round.
struct Bound {
    name: &'static str,
    limit: f64,
    at_least: bool,
    unit: &'static str,
    of: Of,
}

/// The figure of a round.
type Of = fn(&Round) -> Option<f64>;
/// The figure of a row.
type OfRow = fn(&Measured) -> f64;

const fn at_most(limit: f64, unit: &'static str, name: &'static str, of: Of) -> Bound {
    Bound {
        name,
        limit,
        at_least: false,
        unit,
        of,
    }
}

const fn at_least(limit: f64, unit: &'static str, name: &'static str, of: Of) -> Bound {
    Bound {
        at_least: true,
        ..at_most(limit, unit, name, of)
    }
}

/// A figure of a row. `None` if it has no stalls.
fn of(round: &Round, mode: Mode, figure: OfRow) -> Option<f64> {
    let row = round.row(mode).filter(|row| row.stalls.count > 0)?;
    Some(figure(row))
}

fn ratio(round: &Round, one: (Mode, OfRow), other: (Mode, OfRow)) -> Option<f64> {
    let below = of(round, other.0, other.1).filter(|below| *below > 0.0)?;
    Some(of(round, one.0, one.1)? / below)
}

const MEAN: OfRow = |row| row.stalls.mean_us;
const P50: OfRow = |row| row.stalls.p50_us;
const P99: OfRow = |row| row.stalls.p99_us;
const OVER_2MS: OfRow = |row| row.stalls.over_2ms_percent;

/// The bounds of a column. Only 1 and 16 vCPUs have any. QEMU's figures are those with preempt and
/// TCP_NODELAY.
fn bounds(column: &Column, beside_qemu: bool) -> Vec<Bound> {
    use Mode::{Floor, Idle, NoPrefetch, Preempt, QemuPreemptNoDelay, Vanilla};
    let gain: Of = |round| ratio(round, (Vanilla, MEAN), (Preempt, MEAN));
    let to_floor: Of = |round| ratio(round, (Preempt, MEAN), (Floor, MEAN));
    let mut all = match (column.host_page, column.vcpus) {
        (HostPage::Size4K, 1) => vec![
            at_least(30.0, "x", "mean of vanilla, to that of preempt", gain),
            at_most(3.0, "x", "mean of preempt, to that of idle", |round| {
                ratio(round, (Preempt, MEAN), (Idle, MEAN))
            }),
            at_most(6.0, "x", "p99 of preempt, to the p50 of idle", |round| {
                ratio(round, (Preempt, P99), (Idle, P50))
            }),
            at_most(0.1, "%", "stalls of preempt above 2 ms", |round| {
                of(round, Preempt, OVER_2MS)
            }),
        ],
        (HostPage::Size4K, 16) => vec![
            at_least(10.0, "x", "mean of vanilla, to that of preempt", gain),
            at_most(3.0, "x", "mean of preempt, to that of the floor", to_floor),
            at_most(1.0, "%", "stalls of preempt above 4 ms", |round| {
                of(round, Preempt, |row| row.stalls.over_4ms_percent)
            }),
        ],
        (HostPage::Size2M, 1 | 16) => vec![at_most(
            1.3,
            "x",
            "mean of preempt, to that of a bare transfer",
            to_floor,
        )],
        _ => return Vec::new(),
    };
    let busy = if column.vcpus == 1 { 93.0 } else { 85.0 };
    all.push(at_least(busy, "%", "link busy with preempt", |round| {
        round.row(Preempt)?.link_busy_percent
    }));
    if column.host_page == HostPage::Size4K {
        let name = "mean of preempt, to that without prefetch";
        all.push(at_most(1.05, "x", name, |round| {
            ratio(round, (Preempt, MEAN), (NoPrefetch, MEAN))
        }));
    }
    if beside_qemu {
        all.extend([
            at_most(1.0, "x", "mean of preempt, to QEMU's", |round| {
                ratio(round, (Preempt, MEAN), (QemuPreemptNoDelay, MEAN))
            }),
            at_most(1.0, "x", "p99 of preempt, to QEMU's", |round| {
                ratio(round, (Preempt, P99), (QemuPreemptNoDelay, P99))
            }),
            at_most(1.0, "x", "share above 2 ms, to QEMU's", |round| {
                ratio(round, (Preempt, OVER_2MS), (QemuPreemptNoDelay, OVER_2MS))
            }),
        ]);
    }
    all.push(at_most(
        1.1,
        "x",
        "length of preempt, to that of vanilla",
        |round| Some(round.row(Preempt)?.total_s? / round.row(Vanilla)?.total_s?),
    ));
    all
}

/// Judges a column. `rounds` are those that count.
pub(super) fn judge(column: &Column, rounds: &[&Round]) -> Vec<Aim> {
    let judge = |bound: Bound| {
        let samples: Samples = rounds
            .iter()
            .filter_map(|round| (bound.of)(round))
            .collect();
        let measured = (!samples.is_empty()).then(|| samples.median());
        let enough = measured.filter(|_| samples.len() >= MIN_ROUNDS);
        Aim {
            name: bound.name,
            limit: bound.limit,
            at_least: bound.at_least,
            measured,
            unit: bound.unit,
            met: enough.map(|measured| {
                if bound.at_least {
                    measured >= bound.limit
                } else {
                    measured <= bound.limit
                }
            }),
        }
    };
    let beside_qemu = rounds
        .iter()
        .any(|round| round.row(Mode::QemuPreemptNoDelay).is_some());
    bounds(column, beside_qemu).into_iter().map(judge).collect()
}
