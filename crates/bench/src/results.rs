//! Recorded results, and the page of figures.
//!
//! **Guarantee.** Every figure of the page is in a recorded result. Each result has its command,
//! its time, and how busy the machine was before it began.
//!
//! **Mechanism.** A [`RecordedRun`] is a command with the rows that it printed: those with a
//! target, and those of [`CLAIMS`]. [`page`] shows the claims.

use crate::BenchError;
use crate::output::{json, write};
use crate::postcopy_latency::Ticks;
use crate::row::Row;
use serde::{Deserialize, Serialize};
use std::fmt::{Display, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The rows of one command, with the conditions.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct RecordedRun {
    /// The command line, without the program's path.
    command: String,
    /// The time when it began, in UTC: `YYYY-MM-DD HH:MM`.
    began: String,
    /// The share of the cores that other work had in the second before it began, 0 to 1.
    busy_before: f64,
    /// The kernel's release.
    kernel: String,
    /// The processor's name.
    processor: String,
    /// The number of cores that the process could use.
    cores: usize,
    rows: Vec<Row>,
}

impl RecordedRun {
    /// Whether other work has probably affected the figures.
    fn is_disturbed(&self) -> bool {
        self.busy_before > 0.1
    }
}

/// A claim of the page: a case, the beginning of a subject, and the beginning of a baseline.
#[derive(Clone, Copy)]
struct Claim(&'static str, &'static str, &'static str);

impl Claim {
    fn is_of(self, row: &Row) -> bool {
        row.case == self.0
            && row.subject.starts_with(self.1)
            && row.baseline.as_deref().unwrap_or("").starts_with(self.2)
    }
}

/// The claims of the page: what the user of a fault, a migration or a restore would notice. Each is
/// a line: case, subject and baseline.
const CLAIMS: &str = "\
latency.mean | preempt, 4 KiB pages, 1 vCPU, plain, cubic | qemu preempt nodelay
latency.p99 | preempt, 4 KiB pages, 1 vCPU, plain, cubic | qemu preempt nodelay
latency.mean | qemu preempt nodelay, 4 KiB pages, 1 vCPU, plain, cubic |
latency.p99 | qemu preempt nodelay, 4 KiB pages, 1 vCPU, plain, cubic |
latency.mean | preempt, 4 KiB pages, 16 vCPUs, plain, cubic | qemu preempt nodelay
latency.p99 | preempt, 4 KiB pages, 16 vCPUs, plain, cubic | qemu preempt nodelay
latency.over_4ms | preempt, 4 KiB pages, 16 vCPUs, plain, cubic |
blackout | kvm |
overhead.destination | kvm |
push.rate | background push, kvm |
stall.urgent_p50 | kvm by poison |
stall.urgent_p50 | kvm by minor |
linux.up | soft, 1 vCPU |
linux.up | QEMU |
linux.up_wall | soft, 1 vCPU |
linux.fork | soft, 1 vCPU |
linux.exec | soft, 1 vCPU |
linux.loop_time | soft, 1 vCPU |
demand_paging.scaling | kvm, poison, 2 vCPUs |
demand_paging.scaling | kvm, minor, 1 reader, 2 vCPUs |
demand_paging.scaling | kvm, missing, 1 reader, 2 vCPUs |
demand_paging.scaling | soft, exit, 2 vCPUs |
slots.by_gfn_held | pageferry memslot, 32764 slots | vm-memory
tables.map_partitioned | pageferry tdp | pagetable";

fn claims() -> impl Iterator<Item = Claim> {
    CLAIMS.lines().map(|line| {
        let mut parts = line.split('|').map(str::trim);
        let mut part = || parts.next().unwrap_or("");
        Claim(part(), part(), part())
    })
}

/// How the measurements of some claims work.
const METHODS: &str = include_str!("methods.md");

/// The page in Markdown, with those of its claims that `results` have.
///
/// # Errors
/// If the results have none of the claims.
fn page(results: &[RecordedRun]) -> Result<String, String> {
    let found: Vec<(usize, &Row)> = claims()
        .filter_map(|claim| {
            results.iter().enumerate().rev().find_map(|(run, result)| {
                let mut rows: Vec<&Row> =
                    result.rows.iter().filter(|row| claim.is_of(row)).collect();
                // The one that is judged, if there is one.
                rows.sort_by_key(|row| row.target.is_none());
                Some((run, *rows.first()?))
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
         `pageferry-bench report docs/results` writes this page from the rows in [results](results), which has\n\
         more of them. `docs/results/measure` measures and writes both. Figures are medians. Shared machines are\n\
         noisy: compare within a run, by the ratio, and measure again before you rely on a figure.\n\n",
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
        let mark = if busy { "\\*" } else { "" };
        let ratio = row
            .ratio
            .map_or_else(String::new, |ratio| format!("{ratio:.2}{mark}"));
        let against = [row.baseline.as_deref(), row.target.as_deref()];
        let against: Vec<&str> = against.into_iter().flatten().collect();
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "| `{}`, {} | {}{mark} | {ratio} | {} | {} | {number} |",
            row.case,
            row.subject,
            row.figure(),
            against.join("; "),
            verdict(row.met, busy)
        );
    }
    out.push('\n');
    out.push_str(METHODS);
    Ok(out)
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

/// Runs `command`, and stores the rows that it prints with the conditions in `file`.
pub(crate) fn record(file: &Path, command: &[String]) -> Result<(), BenchError> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let before = Ticks::now()?;
    std::thread::sleep(std::time::Duration::from_secs(1));
    let busy_before = Ticks::now()?.others_percent(&before) / 100.0;
    let processor = read("/proc/cpuinfo");
    let mut processor = processor
        .lines()
        .filter(|line| line.starts_with("model name"));
    let cannot_run = |what: &str, why| BenchError::Setting(format!("cannot run {what}: {why}"));
    let began = Command::new("date")
        .args(["--utc", "+%F %H:%M"])
        .output()
        .map_err(|why| cannot_run("date", why))?;
    let output = Command::new(&command[0])
        .args(&command[1..])
        .stderr(Stdio::inherit())
        .output()
        .map_err(|why| cannot_run(&command[0], why))?;
    if !output.status.success() {
        let why = format!(
            "{} ended with {}: its output is not recorded",
            command[0], output.status
        );
        return Err(BenchError::Peer(why));
    }
    let mut rows: Vec<Row> = serde_json::from_slice(&output.stdout)
        .map_err(|why| BenchError::Setting(format!("{} did not print rows: {why}", command[0])))?;
    rows.retain(|row| row.target.is_some() || claims().any(|claim| claim.is_of(row)));
    let name = Path::new(&command[0]).file_name().unwrap_or_default();
    let mut words = vec![name.to_string_lossy().into_owned()];
    words.extend_from_slice(&command[1..]);
    let result = RecordedRun {
        command: words.join(" "),
        began: String::from_utf8_lossy(&began.stdout).trim().to_owned(),
        busy_before,
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        processor: processor
            .next()
            .and_then(|line| line.split_once(": "))
            .map_or_else(|| "unknown processor".to_owned(), |pair| pair.1.to_owned()),
        cores: crate::row::cores() as usize,
        rows,
    };
    write(file, &(json(&result)? + "\n"))
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
    use crate::kit::Samples;
    use crate::row::{Bound, Conditions};

    fn result(rows: Vec<Row>, busy_before: f64) -> RecordedRun {
        RecordedRun {
            command: "pageferry-bench x --json".into(),
            began: "1970-01-01 00:00".into(),
            busy_before,
            kernel: "6.18".into(),
            processor: "a processor".into(),
            cores: 2,
            rows,
        }
    }

    fn row(case: &'static str, subject: &str, ms: f64) -> Row {
        Samples::from_iter([ms]).row(case, subject, "ms", Conditions::default())
    }

    #[test]
    fn claims_are_shown_with_their_runs_and_nothing_else() {
        let judged = |ms| row("blackout", "kvm", ms).aiming_at(Bound::Below(5.0));
        let slots = |ms| row("slots.by_gfn_held", "pageferry memslot, 32764 slots", ms);
        let results = [
            result(vec![row("nothing", "kvm", 1.0)], 0.1),
            result(vec![row("blackout", "kvm", 3.0), judged(2.0)], 0.1),
            result(
                vec![slots(1.0), slots(2.0).against("vm-memory 0.18", 4.0)],
                0.9,
            ),
        ];
        let page = page(&results).expect("a page");
        for row in [
            "| `blackout`, kvm | 2.00 ms |  | < 5.00 ms | met | 1 |",
            "32764 slots | 2.00 ms\\* | 0.50\\* | vm-memory 0.18 |  | 2 |",
            "| 2 | `pageferry-bench x --json` | 1970-01-01 00:00 | 90 % | 2 cores, a processor, Linux 6.18 |",
        ] {
            assert!(page.contains(row), "{row} in\n{page}");
        }
        assert!(!page.contains("nothing"), "{page}");
    }

    #[test]
    fn results_without_a_claim_are_refused() {
        let refused = page(&[result(Vec::new(), 0.1)]).expect_err("no claim");
        assert!(refused.contains("no claim"), "{refused}");
    }
}
