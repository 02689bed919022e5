//! Recorded results, and the page of figures.
//!
//! **Guarantee.** Every figure of the page is in a recorded result. Each result has its command,
//! its time, and how busy the machine was before it began.
//!
//! **Mechanism.** A [`RecordedRun`] is a command with the JSON that it printed. [`page`] recognises
//! the kind of a result by its keys, and turns each verdict or target into a row. It shows the rows
//! of `CLAIMS`.

use crate::BenchError;
use crate::command::write;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fmt::{Display, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{SystemTime, UNIX_EPOCH};

/// The output of one command, with the conditions.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RecordedRun {
    /// The command line, without the program's path.
    pub(crate) command: String,
    /// The time when it began, in UTC: `YYYY-MM-DD HH:MM`.
    pub(crate) began: String,
    /// The share of the cores that other work had in the second before it began, 0 to 1.
    pub(crate) busy_before: f64,
    /// The kernel's release.
    pub(crate) kernel: String,
    /// The processor's name.
    pub(crate) processor: String,
    /// The number of cores that the process could use.
    pub(crate) cores: usize,
    /// Its standard output.
    pub(crate) output: Value,
}

impl RecordedRun {
    /// Whether other work has probably affected the figures.
    #[must_use]
    pub(crate) fn is_disturbed(&self) -> bool {
        self.busy_before > 0.1
    }
}

/// A row of the page.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    claim: String,
    figure: String,
    ratio: String,
    /// The lower bound or the peer, and the target.
    against: String,
    met: Option<bool>,
}

/// The claims of the page: what the user of a fault, a migration or a restore would notice. Each is
/// the beginning of a row's name, and stands for the last such row. The raw results have all rows.
const CLAIMS: [&str; 20] = [
    "post-copy, 4k pages, 1 vCPUs, cubic: mean of preempt, to QEMU's",
    "post-copy, 4k pages, 1 vCPUs, cubic: p99 of preempt, to QEMU's",
    "post-copy, 4k pages, 16 vCPUs, cubic: mean of preempt, to QEMU's",
    "post-copy, 4k pages, 16 vCPUs, cubic: p99 of preempt, to QEMU's",
    "post-copy, 4k pages, 16 vCPUs, cubic: stalls of preempt above 4 ms",
    "`blackout`, kvm",
    "`overhead.destination`, kvm",
    "`push.rate`, background push, kvm",
    "`stall.urgent_p50`, kvm by poison",
    "`stall.urgent_p50`, kvm by minor",
    "`linux.up_wall`, soft",
    "`linux.fork`, soft",
    "`linux.exec`, soft",
    "`linux.loop_time`, soft",
    "first touches of 2 vCPUs on kvm, delivery poison",
    "first touches of 2 vCPUs on kvm, delivery minor",
    "first touches of 2 vCPUs on kvm, delivery missing",
    "first touches of 2 vCPUs on soft, delivery exit, parallel",
    "vs vm-memory 0.18",
    "map a page, 2 threads partitioned vs pagetable 0.4 (komora)",
];

/// How the measurements of some claims work.
const METHODS: &str = "
**Post-copy.** `pageferry-bench postcopy-latency` moves a VM between two network namespaces. A veth
pair joins them, and `tc` shapes each direction to 1 Gbit/s with one queue for all packets. All
pages move in post-copy, and all vCPUs write pages at random meanwhile. A stall lasts from a fault's
arrival at Pageferry until the page is there. Requested pages have a channel of their own
(*preempt*). Ratios are taken within a round, and verdicts are of medians over rounds. In a round
that counts, others used under 10 % of the cores, and a thread that slept 1 ms was late by less than
1 ms at p99.

QEMU emulates RV64 and runs the same guest program, with its capability `postcopy-preempt` and with
TCP_NODELAY, which QEMU does not set. Its stalls are from its trace points: from its fault thread's
read of the fault until the page is there, so they are slightly too short.

**Linux.** `pageferry-bench linux --peer qemu` starts the same kernel and initrd on our own
hypervisor and on QEMU, in turns. The first process times its work by the guest's clock. QEMU
translates code, and our engine interprets it. QEMU's `up_wall` includes its process and firmware.
Runs differ by a few percent, so ratios near 1.0 are met in one run and missed in the next.

**Memory slots.** The row names the operation that compares worst, and any other that loses.
";

/// The page in Markdown, with those of its claims that `results` have.
///
/// # Errors
/// If the results have none of the claims.
pub(crate) fn page(results: &[RecordedRun]) -> Result<String, String> {
    let all: Vec<Vec<Row>> = results.iter().map(|run| rows(&run.output)).collect();
    let found: Vec<(usize, &Row)> = CLAIMS
        .iter()
        .filter_map(|claim| {
            all.iter().enumerate().rev().find_map(|(run, rows)| {
                let row = rows.iter().rev().find(|row| row.claim.starts_with(claim));
                Some((run, row?))
            })
        })
        .collect();
    if found.is_empty() {
        return Err("the results have no claim of the page".into());
    }
    let mut used: Vec<usize> = found.iter().map(|claim| claim.0).collect();
    used.sort_unstable();
    used.dedup();
    let mut out = String::from(
        "# Measured figures\n\n\
         `pageferry-bench report docs/results` writes this page from the raw output in [results](results),\n\
         which has more figures. `docs/results/measure` measures and writes both. Figures are medians. Shared\n\
         machines are noisy: compare within a run, by the ratio, and measure again before you rely on a figure.\n\n",
    );
    conditions(&mut out, used.iter().map(|&run| &results[run]));
    out.push_str(
        "\nThe machine was busy with other work while figures with `*` were measured. Their verdicts, in\n\
         brackets, prove little.\n\n\
         | claim | figure | ratio | lower bound or peer, and target | | run |\n|---|---|---|---|---|---|\n",
    );
    for (run, row) in found {
        let busy = results[run].is_disturbed();
        let number = 1 + used.partition_point(|&before| before < run);
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} | {} | {number} |",
            row.claim,
            marked(&row.figure, busy),
            marked(&row.ratio, busy),
            row.against,
            verdict(row.met, busy)
        );
    }
    out.push_str(METHODS);
    Ok(out)
}

/// Marks a figure that other work has probably affected.
fn marked(figure: &str, busy: bool) -> String {
    let mark = if busy && !figure.is_empty() {
        "\\*"
    } else {
        ""
    };
    format!("{figure}{mark}")
}

/// The verdict in words, in brackets if other work has probably affected it.
const fn verdict(met: Option<bool>, busy: bool) -> &'static str {
    match (met, busy) {
        (None, _) => "",
        (Some(true), false) => "met",
        (Some(true), true) => "(met)",
        (Some(false), false) => "**missed**",
        (Some(false), true) => "(missed)",
    }
}

/// Writes the table of runs and their conditions.
fn conditions<'a>(out: &mut String, results: impl Iterator<Item = &'a RecordedRun>) {
    out.push_str("| run | command | began (UTC) | busy before | host |\n|---|---|---|---|---|\n");
    for (number, result) in (1..).zip(results) {
        let _ = writeln!(
            out,
            "| {number} | `{}` | {} | {:.0} % | {} cores, {}, Linux {} |",
            result.command,
            result.began,
            100.0 * result.busy_before,
            result.cores,
            result.processor,
            result.kernel
        );
    }
}

/// The rows of one output. Some kinds have none.
fn rows(output: &Value) -> Vec<Row> {
    if let Value::Array(rows) = output {
        return rows.iter().filter_map(of_benchmark).collect();
    }
    if let Some(cells) = output["cells"].as_array()
        && cells.iter().any(|cell| cell["scaling"].is_f64())
    {
        return of_demand_paging(cells);
    }
    if let Some(columns) = output["columns"].as_array() {
        return columns.iter().flat_map(of_latency).collect();
    }
    let verdicts = output["verdicts"].as_array().into_iter().flatten();
    verdicts.filter_map(of_verdict).collect()
}

/// A row of `bench link`, `blackout`, `soft`, `states` or `linux`, if it has a target.
fn of_benchmark(row: &Value) -> Option<Row> {
    let met = row["met"].as_bool()?;
    let baseline = row["baseline"].as_str().map(|name| format!("{name}; "));
    Some(Row {
        claim: format!("`{}`, {}", row["case"].as_str()?, row["subject"].as_str()?),
        figure: number(row["value"].as_f64()?, row["unit"].as_str()?),
        ratio: row["ratio"]
            .as_f64()
            .map_or_else(String::new, |ratio| format!("{ratio:.2}")),
        against: format!(
            "{}{}",
            baseline.unwrap_or_default(),
            row["target"].as_str()?
        ),
        met: Some(met),
    })
}

/// A verdict of a comparison. Ratios have the unit `x`.
fn of_verdict(verdict: &Value) -> Option<Row> {
    let slots = verdict["slots"]
        .as_u64()
        .map(|slots| format!(", {slots} slots"));
    let claim = format!("{}{}", verdict["name"].as_str()?, slots.unwrap_or_default());
    let (measured, limit) = (verdict["measured"].as_f64()?, verdict["limit"].as_f64()?);
    let unit = verdict["unit"].as_str()?;
    let ratio = unit == "x";
    Some(Row {
        claim,
        figure: if ratio {
            String::new()
        } else {
            number(measured, unit)
        },
        ratio: if ratio {
            format!("{measured:.2}")
        } else {
            String::new()
        },
        against: format!(
            "at most {limit}{}",
            if ratio {
                String::new()
            } else {
                format!(" {unit}")
            }
        ),
        met: verdict["met"].as_bool(),
    })
}

/// The rows of `bench demand-paging`, for the largest number of vCPUs.
fn of_demand_paging(cells: &[Value]) -> Vec<Row> {
    let most = cells.iter().filter_map(|cell| cell["vcpus"].as_u64()).max();
    let cells = cells.iter().filter(|cell| cell["vcpus"].as_u64() == most);
    let rows = cells.filter_map(|cell| {
        let scheme = cell["scheme"].as_str().map(|scheme| format!(", {scheme}"));
        Some(Row {
            claim: format!(
                "first touches of {} vCPUs on {}, delivery {}{}",
                most?,
                cell["engine"].as_str()?,
                cell["delivery"].as_str()?,
                scheme.unwrap_or_default()
            ),
            figure: number(cell["pages_per_s"]["median"].as_f64()?, "pages/s"),
            ratio: format!("{:.2}", cell["scaling"].as_f64()?),
            against: "the fewest vCPUs of the run".into(),
            met: None,
        })
    });
    rows.collect()
}

/// The rows of a column of `bench postcopy-latency`: its verdicts.
fn of_latency(column: &Value) -> Vec<Row> {
    let word = |key: &str| column[key].as_str().unwrap_or_default();
    let name = format!(
        "post-copy, {} pages, {} vCPUs, {}{}",
        word("host_page"),
        column["vcpus"],
        word("congestion"),
        if column["tls"] == true { ", TLS" } else { "" }
    );
    let verdicts = column["verdicts"].as_array().into_iter().flatten();
    let rows = verdicts.filter_map(|verdict| {
        let met = verdict["met"].as_bool();
        let bound = if verdict["at_least"] == true {
            "at least"
        } else {
            "at most"
        };
        let unit = verdict["unit"].as_str()?;
        let figure = verdict["measured"]
            .as_f64()
            .map_or_else(String::new, |measured| number(measured, unit));
        let (figure, ratio) = if unit == "x" {
            let ratio = figure.trim_end_matches(" x").to_owned();
            (String::new(), ratio)
        } else {
            (figure, String::new())
        };
        Some(Row {
            claim: format!("{name}: {}", verdict["name"].as_str()?),
            figure,
            ratio,
            against: format!(
                "{bound} {}{}{}",
                verdict["limit"],
                if unit == "x" { "" } else { " %" },
                if met.is_none() {
                    "; not measured: too few quiet rounds"
                } else {
                    ""
                }
            ),
            met,
        })
    });
    rows.collect()
}

/// Formats a number with three digits, and a prefix if it is large.
fn number(value: f64, unit: &str) -> String {
    let (value, unit) = match unit {
        "us" if value >= 1e6 => (value / 1e6, "s"),
        "us" if value >= 1e3 => (value / 1e3, "ms"),
        "ms" if value >= 1e3 => (value / 1e3, "s"),
        _ => (value, unit),
    };
    let (scaled, prefix) = match value.abs() {
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$} {prefix}{unit}")
}

/// Formats seconds since 1970 as `YYYY-MM-DD HH:MM`, in UTC.
///
/// The algorithm is `civil_from_days` of Howard Hinnant, "chrono-Compatible Low-Level Date
/// Algorithms".
#[must_use]
pub(crate) fn moment(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute) = (rest / 3600, rest % 3600 / 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}")
}

/// Runs `command`, and stores its output with the conditions in `file`.
pub(crate) fn record(file: &Path, command: &[String]) -> Result<(), BenchError> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let times = || cpu_times(&read("/proc/stat"));
    let before = times();
    std::thread::sleep(std::time::Duration::from_secs(1));
    let busy = busy_share(before, times());
    let processor = read("/proc/cpuinfo");
    let mut processor = processor
        .lines()
        .filter(|line| line.starts_with("model name"));
    let since_1970 = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let began = moment(since_1970.as_secs());
    let output = std::process::Command::new(&command[0])
        .args(&command[1..])
        .stderr(Stdio::inherit())
        .output()
        .map_err(|why| BenchError::Setting(format!("cannot run {}: {why}", command[0])))?;
    if !output.status.success() {
        let why = format!(
            "{} ended with {}: its output is not recorded",
            command[0], output.status
        );
        return Err(BenchError::Peer(why));
    }
    let name = Path::new(&command[0]).file_name().unwrap_or_default();
    let words = [name.to_string_lossy().into_owned()];
    let words: Vec<String> = words
        .into_iter()
        .chain(command[1..].iter().cloned())
        .collect();
    let result = RecordedRun {
        command: words.join(" "),
        began,
        busy_before: busy.unwrap_or(f64::NAN),
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        processor: processor
            .next()
            .and_then(|line| line.split_once(": "))
            .map_or_else(|| "unknown processor".to_owned(), |pair| pair.1.to_owned()),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        output: serde_json::from_slice(&output.stdout).map_err(|why| {
            BenchError::Setting(format!("{} did not print JSON: {why}", command[0]))
        })?,
    };
    let text = serde_json::to_string_pretty(&result);
    let text = text.map_err(|why| BenchError::Setting(why.to_string()))?;
    write(file, &(text + "\n"))
}

/// The total time of all cores and the part of it that was idle, in ticks, by `/proc/stat`.
fn cpu_times(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let times = line.split_whitespace().map(str::parse);
    let times: Vec<u64> = times.collect::<Result<_, _>>().ok()?;
    // proc_stat(5): idle and iowait are the fourth and the fifth; guest times, from the ninth on,
    // are in others already.
    let idle = times.get(3)? + times.get(4)?;
    Some((times.iter().take(8).sum(), idle))
}

/// The share of the time between two samples in which cores were not idle, 0 to 1.
fn busy_share(before: Option<(u64, u64)>, after: Option<(u64, u64)>) -> Option<f64> {
    let ((total, idle), (later_total, later_idle)) = (before?, after?);
    let passed = later_total
        .checked_sub(total)
        .filter(|&passed| passed > 0)?;
    let idle = later_idle.saturating_sub(idle).min(passed);
    Some(1.0 - idle as f64 / passed as f64)
}

/// The page of figures for the results in `directory`.
pub(crate) fn report(directory: &Path) -> Result<String, BenchError> {
    let wrong = |path: &Path, why: &dyn Display| {
        BenchError::Setting(format!("cannot read {}: {why}", path.display()))
    };
    let entries = std::fs::read_dir(directory).map_err(|why| wrong(directory, &why))?;
    let mut paths: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|end| end == "json"))
        .collect();
    paths.sort_unstable();
    if paths.is_empty() {
        return Err(wrong(directory, &"it has no results (*.json)"));
    }
    let mut all = Vec::new();
    for path in paths {
        let text = std::fs::read_to_string(&path).map_err(|why| wrong(&path, &why))?;
        all.push(serde_json::from_str(&text).map_err(|why| wrong(&path, &why))?);
    }
    page(&all).map_err(BenchError::Setting)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn result(output: Value, busy_before: f64) -> RecordedRun {
        RecordedRun {
            command: "pageferry bench x --json".into(),
            began: moment(0),
            busy_before,
            kernel: "6.18".into(),
            processor: "a processor".into(),
            cores: 2,
            output,
        }
    }

    #[test]
    fn aims_of_a_latency_run_say_when_they_were_not_measured() {
        let verdict = |name: &str, met: Option<bool>, unit: &str| {
            json!({"name": name, "limit": 3.0, "at_least": false, "unit": unit,
                   "measured": met.map(|_| 2.5), "met": met})
        };
        let column = json!({"host_page": "4k", "vcpus": 16, "tls": false, "congestion": "cubic",
                            "verdicts": [verdict("mean of preempt, to QEMU's", Some(true), "x"),
                                         verdict("stalls of preempt above 4 ms", None, "%")]});
        let page = page(&[result(json!({"columns": [column]}), 0.0)]).expect("a page");
        for row in [
            "| post-copy, 4k pages, 16 vCPUs, cubic: mean of preempt, to QEMU's |  | 2.50 | at most 3.0 | met | 1 |",
            ": stalls of preempt above 4 ms |  |  | at most 3.0 %; not measured: too few quiet rounds |  | 1 |",
        ] {
            assert!(page.contains(row), "no '{row}' in\n{page}");
        }
    }

    #[test]
    fn claims_are_shown_with_their_runs_and_nothing_else() {
        let case = |name: &str, value: f64, met: Option<bool>| {
            json!({"case": name, "subject": "kvm", "value": value, "unit": "ms", "ratio": 1.38,
                   "baseline": "the floor", "target": "ratio <= 1.6", "met": met})
        };
        let results = [
            result(json!([case("nothing", 1.0, Some(true))]), 0.1),
            result(
                json!([
                    case("blackout", 2.0, Some(true)),
                    case("blackout", 3.0, None)
                ]),
                0.1,
            ),
            result(
                json!({"verdicts": [
                    {"name": "add", "slots": 10, "limit": 500.0, "measured": 600.0, "unit": "ns", "met": false},
                    {"name": "vs vm-memory 0.18: add 0.30", "slots": 10, "limit": 1.05, "measured": 0.3, "unit": "x", "met": true},
                    {"name": "vs vm-memory 0.18: move 0.50", "slots": 509, "limit": 1.05, "measured": 0.5, "unit": "x", "met": true},
                ]}),
                0.9,
            ),
            result(json!({"engine": "soft", "blackout_ms": 0.44}), 0.1),
            result(
                json!({"cells": [
                    {"vcpus": 1, "scaling": 1.0},
                    {"vcpus": 2, "engine": "soft", "delivery": "exit", "scheme": "parallel", "scaling": 1.9, "pages_per_s": {"median": 2.5e6}},
                ]}),
                0.1,
            ),
        ];
        let page = page(&results).expect("a page");
        for row in [
            "| `blackout`, kvm | 2.00 ms | 1.38 | the floor; ratio <= 1.6 | met | 1 |",
            "| vs vm-memory 0.18: move 0.50, 509 slots |  | 0.50\\* | at most 1.05 | (met) | 2 |",
            "| first touches of 2 vCPUs on soft, delivery exit, parallel | 2.50 Mpages/s | 1.90 |",
            "| 2 | `pageferry bench x --json` | 1970-01-01 00:00 | 90 % | 2 cores, a processor, Linux 6.18 |",
        ] {
            assert!(page.contains(row), "{row} in\n{page}");
        }
        assert_eq!(page.matches("bench x").count(), 3, "runs without claims");
        assert!(!page.contains("nothing") && !page.contains("10 slots"));
    }

    #[test]
    fn results_without_a_claim_are_refused() {
        for output in [json!({"x": 1}), json!([]), json!({"verdicts": []})] {
            let refused = page(&[result(output, 0.1)]).expect_err("no claim");
            assert!(refused.contains("no claim"), "{refused}");
        }
    }

    #[test]
    fn the_busy_share_is_what_was_not_idle() {
        let before = cpu_times("cpu  10 0 10 60 20 0 0 0 7 0\ncpu0 1");
        let after = cpu_times("cpu  20 0 20 110 40 0 0 10 9 0\n");
        assert_eq!(before, Some((100, 80)));
        let share = busy_share(before, after).unwrap();
        assert!((share - 0.3).abs() < 1e-9, "{share}");
        assert_eq!(busy_share(before, before), None);
        assert_eq!(cpu_times("cpu 1 2 x"), None);
    }

    #[test]
    fn moments_are_dates_of_the_calendar() {
        assert_eq!(moment(951_782_400), "2000-02-29 00:00");
        assert_eq!(moment(1_767_225_599), "2025-12-31 23:59");
        assert_eq!(moment(1_795_410_000), "2026-11-23 05:00");
    }
}
