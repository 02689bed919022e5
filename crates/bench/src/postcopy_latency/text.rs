//! The results as text: the table of the postcopy-preempt series, the figures of each column, its
//! verdicts and histograms.

use super::noise::Noise;
use super::report::{LatencyColumn, LatencyReport, LatencyRow};
use super::setting::Mode;
use super::stalls::LogBucket;
use crate::demand_paging::short;
use crate::kit::Figure;
use pageferry_charts::time;
use std::fmt;

/// The length of the longest bar.
const BAR: u64 = 48;

impl fmt::Display for LatencyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "A stall lasts from a fault on a missing page until the page is there. All vCPUs write pages at random, and\n\
             all pages move in post-copy, over a link of {}bit/s with one queue. Guests have {} MiB. Figures are medians\n\
             over rounds. {} cores, {:.0} s in all.\n\
             vanilla: requested pages follow what was pushed before. preempt: they have a channel of their own.\n\
             no prefetch: as preempt, pushed by address. in order: as preempt, but each vCPU writes its own part of the\n\
             pages in ascending order. idle: nothing is pushed. floor: bare requests and replies, as many\n\
             unanswered as there are vCPUs.",
            short(self.rate_bytes_per_s as f64 * 8.0),
            self.memory_bytes >> 20,
            self.cores,
            self.seconds
        )?;
        writeln!(
            f,
            "A round counts if others used less than {} % of the cores. Also, a thread that slept 1 ms must be late by less\n\
             than {} at p99. It sleeps in the gaps before rows, since the vCPUs of a row would delay it.",
            Noise::MAX_OTHERS_PERCENT,
            time(Noise::MAX_SLEEPER_US)
        )?;
        if let Some(version) = &self.qemu_version {
            writeln!(
                f,
                "qemu: QEMU {version} emulates RV64 with the same guest program, without and with its capability\n\
                 postcopy-preempt; nodelay: with TCP_NODELAY, which it does not set. Differences in method: QEMU's stalls begin\n\
                 when its fault thread has read the fault (its trace points), ours when the vCPU faults, so its way to that thread\n\
                 is not counted. Its guest has 4 MiB more, and runs translated code, ours an interpreter's."
            )?;
        }
        self.write_means(f)?;
        self.columns
            .iter()
            .try_for_each(|column| write_column(f, column))?;
        if !self.unmeasured.is_empty() {
            writeln!(f)?;
        }
        for unmeasured in &self.unmeasured {
            writeln!(f, "Not measured: {}: {}.", unmeasured.what, unmeasured.why)?;
        }
        Ok(())
    }
}

impl LatencyReport {
    /// The table of the series: host pages and modes.
    fn write_means(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let others = [Mode::InOrder, Mode::InOrderNoPrefetch];
        let in_series = |mode: &Mode| mode.qemu().is_none() && !others.contains(mode);
        let ours = || Mode::ALL.into_iter().filter(in_series);
        write!(f, "\n{:<40}", "mean stall")?;
        for mode in ours() {
            write!(f, " {:>11}", mode.name())?;
        }
        writeln!(f, " {:>10} {:>10}", "gain", "counted")?;
        for column in &self.columns {
            write!(f, "{:<40}", column.column.name())?;
            let mean = |mode| Some(column.row(mode)?.mean_us.median);
            for mode in ours() {
                write!(f, " {:>11}", mean(mode).map_or_else(dash, time))?;
            }
            let gain = mean(Mode::Vanilla).zip(mean(Mode::Preempt));
            let gain = gain.map_or_else(dash, |(vanilla, preempt)| {
                format!("{:.1} x", vanilla / preempt)
            });
            let counted = format!("{} of {}", column.counted(), column.rounds.len());
            writeln!(f, " {gain:>10} {counted:>10}")?;
        }
        Ok(())
    }
}

impl LatencyColumn {
    pub(super) fn row(&self, mode: Mode) -> Option<&LatencyRow> {
        self.rows.iter().find(|row| row.mode == mode)
    }
}

fn dash() -> String {
    "-".to_owned()
}

fn write_column(f: &mut fmt::Formatter<'_>, column: &LatencyColumn) -> fmt::Result {
    let delivery = column.delivery.unwrap_or("no fault delivery");
    writeln!(
        f,
        "\n== {}: {} by {delivery}, idle with {} MiB ==",
        column.column.name(),
        column.engine,
        column.idle_memory_bytes >> 20
    )?;
    if column.noisy {
        writeln!(
            f,
            "Too few quiet rounds for a verdict: {} of {}. These are the figures of all rounds.",
            column.counted(),
            column.rounds.len()
        )?;
    }
    let worst = |of: fn(&Noise) -> f64| {
        let all = column.rounds.iter().map(|round| of(&round.noise));
        all.fold(0.0, f64::max)
    };
    writeln!(
        f,
        "worst round: others used {:.1} % of the cores, the sleeper was late by {}",
        worst(|noise| noise.others_percent),
        time(worst(|noise| noise.sleeper_p99_us))
    )?;
    writeln!(
        f,
        "{:<20} {:>8} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>9} {:>8}",
        "", "stalls", "mean", "p50", "p99", "max", "> 2 ms", "> 4 ms", "link busy", "total"
    )?;
    for row in &column.rows {
        let us = |figure: &Figure| time(figure.median);
        let percent = |figure: &Figure| format!("{:.2} %", figure.median);
        let busy = row
            .link_busy_percent
            .as_ref()
            .map_or_else(dash, |busy| format!("{:.1} %", busy.median));
        let total = row
            .total_s
            .map_or_else(dash, |total| format!("{:.2} s", total.median));
        writeln!(
            f,
            "{:<20} {:>8} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {busy:>9} {total:>8}",
            row.mode.name(),
            row.stalls,
            us(&row.mean_us),
            us(&row.p50_us),
            us(&row.p99_us),
            us(&row.max_us),
            percent(&row.over_2ms_percent),
            percent(&row.over_4ms_percent),
        )?;
    }
    column
        .verdicts
        .iter()
        .try_for_each(|aim| writeln!(f, "{aim}"))?;
    column.rows.iter().try_for_each(|row| write_bars(f, row))
}

/// The histogram of a row: a line for each power of two.
fn write_bars(f: &mut fmt::Formatter<'_>, row: &LatencyRow) -> fmt::Result {
    writeln!(f, "{}, stalls by microseconds:", row.mode.name())?;
    let most = row.histogram.iter().map(|bar| bar.count).max().unwrap_or(1);
    for &LogBucket {
        from_us,
        to_us,
        count,
    } in &row.histogram
    {
        // A bar that is not empty is visible.
        let length = (count * BAR).div_ceil(most.max(1)) as usize;
        writeln!(
            f,
            "  {:>6} .. {:<6} {count:>8}{}{}",
            binary(from_us),
            binary(to_us),
            if length > 0 { " " } else { "" },
            "#".repeat(length)
        )?;
    }
    Ok(())
}

/// A power of two with K for 1024 and M for 1024 squared.
fn binary(number: u64) -> String {
    match number {
        n if n >= 1 << 20 => format!("{}M", n >> 20),
        n if n >= 1 << 10 => format!("{}K", n >> 10),
        n => n.to_string(),
    }
}
