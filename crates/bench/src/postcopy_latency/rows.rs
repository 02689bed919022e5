//! The rows of a column: the figures of its modes, and its aims, judged by the rounds that count.

use super::round::{Measured, Round};
use super::setting::{Column, HostPage, LatencyFlags, Mode};
use crate::Samples;
use crate::output::Output;
use crate::row::{Bound, Conditions, Row};
use pageferry_charts::time;

/// Fewer counted rounds give no verdict.
const MIN_ROUNDS: usize = 5;
/// The rate that the aims are for, in bytes a second: 1 Gbit/s.
const AIMED_RATE: u64 = 125_000_000;

/// A figure of a mode in a round.
type Of = fn(&Measured) -> Option<f64>;

/// The cases: name, unit and figure.
const CASES: [(&str, &str, Of); 10] = [
    ("latency.mean", "us", |row| row.stalls().map(|s| s.mean_us)),
    ("latency.p50", "us", |row| row.stalls().map(|s| s.p50_us)),
    ("latency.p99", "us", |row| row.stalls().map(|s| s.p99_us)),
    ("latency.max", "us", |row| row.stalls().map(|s| s.max_us)),
    ("latency.over_2ms", "%", |row| {
        row.stalls().map(|s| s.over_2ms_percent)
    }),
    ("latency.over_4ms", "%", |row| {
        row.stalls().map(|s| s.over_4ms_percent)
    }),
    ("latency.link_busy", "%", |row| row.link_busy_percent),
    ("latency.total", "s", |row| row.total_s),
    ("latency.bulk", "B/s", |row| row.bulk_rate),
    ("latency.sum", "s", |row| {
        let stalls = row.stalls().filter(|_| row.total_s.is_some());
        stalls.map(|s| s.mean_us * s.count as f64 / 1e6)
    }),
];

/// Whose figure is the baseline of an aim.
type Baseline = Option<(Mode, usize)>;

/// Indices of [`CASES`].
const MEAN: usize = 0;
const P50: usize = 1;
const P99: usize = 2;
const OVER_2MS: usize = 4;
const OVER_4MS: usize = 5;
const LINK_BUSY: usize = 6;
const TOTAL: usize = 7;
const BULK: usize = 8;

/// The aims of `preempt` in a column. Only 1 and 16 vCPUs have any. QEMU's figures are those with
/// preempt and TCP_NODELAY.
fn aims(column: &Column) -> Vec<(usize, Baseline, Bound)> {
    use Bound::{AtLeast, AtMost, RatioAtLeast, RatioAtMost};
    use Mode::{Bare, Floor, Idle, NoPrefetch, QemuPreemptNoDelay, Vanilla};
    if column.link.is_some() {
        return vec![(BULK, Some((Bare, BULK)), RatioAtLeast(0.7))];
    }
    let gain = |times: f64| (MEAN, Some((Vanilla, MEAN)), RatioAtMost(1.0 / times));
    let mut all = match (column.host_page, column.vcpus) {
        (HostPage::Size4K, 1) => vec![
            gain(30.0),
            (MEAN, Some((Idle, MEAN)), RatioAtMost(3.0)),
            (P99, Some((Idle, P50)), RatioAtMost(6.0)),
            (OVER_2MS, None, AtMost(0.1)),
        ],
        (HostPage::Size4K, 16) => vec![
            gain(10.0),
            (MEAN, Some((Floor, MEAN)), RatioAtMost(3.0)),
            (OVER_4MS, None, AtMost(1.0)),
        ],
        (HostPage::Size2M, 1 | 16) => vec![(MEAN, Some((Floor, MEAN)), RatioAtMost(1.3))],
        _ => return Vec::new(),
    };
    let busy = if column.vcpus == 1 { 93.0 } else { 85.0 };
    all.push((LINK_BUSY, None, AtLeast(busy)));
    if column.host_page == HostPage::Size4K {
        all.push((MEAN, Some((NoPrefetch, MEAN)), RatioAtMost(1.05)));
    }
    for case in [MEAN, P99, OVER_2MS] {
        all.push((case, Some((QemuPreemptNoDelay, case)), RatioAtMost(1.0)));
    }
    all.push((TOTAL, Some((Vanilla, TOTAL)), RatioAtMost(1.1)));
    all
}

/// Adds the rows of a column.
pub(super) fn add(output: &mut Output, flags: &LatencyFlags, column: &Column, all: &[Round]) {
    let counted: Vec<&Round> = all.iter().filter(|round| round.noise.is_quiet()).collect();
    let noisy = counted.len() < MIN_ROUNDS;
    let rounds = if noisy {
        all.iter().collect()
    } else {
        counted.clone()
    };
    let worst = |of: fn(&Round) -> f64| all.iter().map(of).fold(0.0, f64::max);
    output.notes.push(format!(
        "{}: {} of {} rounds count{}; in the worst, others used {:.1} % of the cores, and a \
         thread that slept 1 ms was late by {} at p99",
        column.name(),
        counted.len(),
        all.len(),
        if noisy {
            ", too few for a verdict: these are the figures of all"
        } else {
            ""
        },
        worst(|round| round.noise.others_percent),
        time(worst(|round| round.noise.sleeper_p99_us)),
    ));
    for mode in Mode::ALL {
        for (case, unit, of) in CASES {
            let samples: Samples = figures(&rounds, mode, of).collect();
            if !samples.is_empty() {
                let how = conditions(flags, column, mode, &rounds);
                output
                    .rows
                    .push(samples.row(case, subject(column, mode), unit, how));
            }
        }
    }
    if flags.rate.bytes_per_second() == AIMED_RATE || column.link.is_some() {
        let judged = aims(column)
            .into_iter()
            .filter_map(|aim| judge(flags, column, Mode::Preempt, &counted, aim));
        output.rows.extend(judged);
    }
    let alone = (BULK, Some((Mode::Bare, BULK)), Bound::RatioAtLeast(0.85));
    let alone = judge(flags, column, Mode::NoReaders, &counted, alone);
    output.rows.extend(alone);
}

fn subject(column: &Column, mode: Mode) -> String {
    format!("{}, {}", mode.name(), column.name())
}

fn conditions(flags: &LatencyFlags, column: &Column, mode: Mode, rounds: &[&Round]) -> Conditions {
    let note = format!(
        "{} by {}; {} rounds count",
        flags.engine_of(column.host_page),
        flags.rate,
        rounds.len()
    );
    let memory = flags.memory_of(column.host_page, mode);
    let delivery = rounds.iter().find_map(|round| round.row(mode)?.delivery);
    Conditions::here(column.vcpus, memory, note).with_delivery(delivery)
}

/// The figures of a mode.
fn figures<'a>(rounds: &'a [&Round], mode: Mode, of: Of) -> impl Iterator<Item = f64> + 'a {
    let rows = rounds.iter().filter_map(move |round| round.row(mode));
    rows.filter_map(of)
}

/// The row of an aim. Its ratio is the median of those within the rounds. Too few rounds give no
/// verdict.
fn judge(
    flags: &LatencyFlags,
    column: &Column,
    mode: Mode,
    rounds: &[&Round],
    (case, baseline, bound): (usize, Baseline, Bound),
) -> Option<Row> {
    let (name, unit, of) = CASES[case];
    let ours: Samples = figures(rounds, mode, of).collect();
    let how = conditions(flags, column, mode, rounds);
    let mut row = ours.row(name, subject(column, mode), unit, how);
    if let Some((other, case)) = baseline {
        let ratios: Samples = rounds
            .iter()
            .filter_map(|round| {
                let below = figures(&[round], other, CASES[case].2).next()?;
                let above = figures(&[round], mode, of).next()?;
                (below > 0.0).then(|| above / below)
            })
            .collect();
        if ratios.is_empty() {
            return None;
        }
        let same = case == CASES.iter().position(|one| one.0 == name)?;
        let which = if same {
            ""
        } else {
            CASES[case].0.trim_start_matches("latency")
        };
        row.baseline = Some(format!("{}{which}", other.name()));
        row.ratio = Some(ratios.median());
    }
    let row = row.aiming_at(bound);
    Some(match ours.len() >= MIN_ROUNDS {
        true => row,
        false => Row { met: None, ..row },
    })
}
