//! `pageferry-compare`: other public crates, measured next to Pageferry's memory slots and page
//! tables.
//!
//! **Guarantee.** Figures go to stdout, progress and errors to stderr. A failure is one sentence,
//! and its exit code is one of [`EXIT_CODES`].

use clap::{Args, Parser, Subcommand};
use pageferry_peers::results::{self, moment};
use pageferry_peers::{RunError, slots, tables};
use serde::Serialize;
use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

/// The exit codes of this program. They have the same meaning as those of `pageferry`.
const EXIT_CODES: &str = "\
Exit codes:
   0  done
   1  a scheme gave a wrong answer to a look-up
   2  wrong flags, sizes or files
  12  the host refused something (the message says what), or a bug";

/// Measures other public crates next to Pageferry's memory slots and page tables
#[derive(Debug, Parser)]
#[command(name = "pageferry-compare", version, after_help = EXIT_CODES, propagate_version = true)]
struct Cli {
    /// The command.
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Compares our memory slots with the memory maps of other crates: nanoseconds per operation
    ///
    /// Every scheme holds the same slots and looks up the same keys. The floor, a lower bound, is a
    /// binary search over sorted keys.
    #[command(after_help = EXIT_CODES)]
    Slots(SlotFlags),
    /// Compares our second-stage page tables with the page tables of other crates: nanoseconds per
    /// page
    ///
    /// Every timed look-up is checked; a wrong translation ends the command with 1. Figures with
    /// two threads need two idle cores. The floors, which are lower bounds, are bare stores and
    /// compare-exchanges.
    #[command(after_help = EXIT_CODES)]
    Tables(TableFlags),
    /// Run a command that prints JSON, and store its output with the conditions of the run
    ///
    /// Example: pageferry-compare record docs/results/soft.json -- pageferry bench soft --json
    #[command(after_help = EXIT_CODES)]
    Record {
        /// The file for the result
        #[arg(value_name = "FILE.json")]
        file: PathBuf,
        /// The command
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Print the page of figures, docs/performance.md, from the results in a directory
    #[command(after_help = EXIT_CODES)]
    Report {
        /// The directory. The page has its results in the order of their file names
        #[arg(value_name = "DIR")]
        results: PathBuf,
    },
}

#[derive(Debug, Args)]
struct SlotFlags {
    /// A few seconds instead of about a minute: 10 and 509 slots only, and noisier
    #[arg(long)]
    quick: bool,
    /// Numbers of slots, from 4 to 32764 [default: 10,30,50,100,509,8194,32764]
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    slots: Vec<u32>,
    #[command(flatten)]
    common: CommonFlags,
}

#[derive(Debug, Args)]
struct TableFlags {
    /// A second or two instead of about ten: 128 MiB per thread instead of 1 GiB, and noisier
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    common: CommonFlags,
    /// Write a self-contained HTML page with bars for each operation
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct CommonFlags {
    /// The number of rounds; medians are printed [default: slots 15, tables 9; 5 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A failure of a command: its exit code and one sentence.
struct Failure(u8, String);

impl Failure {
    /// A refusal of the host.
    fn host(what: impl Display, why: impl Display) -> Self {
        Self(12, format!("{what}: {why}"))
    }
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Self {
        let code = match error {
            RunError::Wrong { .. } => 1,
            RunError::Slots(_) | RunError::Nothing | RunError::Pages { .. } => 2,
            RunError::AddressSpace => 12,
        };
        Self(code, error.to_string())
    }
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Slots(flags) => compare_slots(&flags),
        Command::Tables(flags) => compare_tables(&flags),
        Command::Record { file, command } => record(&file, &command),
        Command::Report { results } => report(&results),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure(code, why)) => {
            let _ = writeln!(std::io::stderr().lock(), "pageferry-compare: error: {why}");
            ExitCode::from(code)
        }
    }
}

fn progress(doing: &str) {
    let _ = writeln!(std::io::stderr().lock(), "pageferry-compare: {doing}");
}

fn compare_slots(flags: &SlotFlags) -> Result<(), Failure> {
    let config = slot_config(flags);
    show(&slots::run(&config, &mut progress)?, flags.common.json)
}

fn slot_config(flags: &SlotFlags) -> slots::Config {
    let mut config = if flags.quick {
        slots::Config::quick()
    } else {
        slots::Config::default()
    };
    if !flags.slots.is_empty() {
        config.sizes.clone_from(&flags.slots);
        config.sizes.sort_unstable();
        config.sizes.dedup();
    }
    config.rounds = flags.common.repeat.unwrap_or(config.rounds);
    config
}

fn compare_tables(flags: &TableFlags) -> Result<(), Failure> {
    let config = if flags.quick {
        tables::Config::quick()
    } else {
        tables::Config::default()
    };
    let rounds = flags.common.repeat.unwrap_or(config.rounds);
    let config = tables::Config { rounds, ..config };
    let report = tables::run(&config, &mut progress)?;
    // The figures come first, so that a page that cannot be written does not lose them.
    show(&report, flags.common.json)?;
    match &flags.report {
        Some(path) => write_page(path, &tables::page(&report)),
        None => Ok(()),
    }
}

/// Prints figures as a table, or as one JSON object.
fn show(report: &(impl Serialize + Display), json: bool) -> Result<(), Failure> {
    let text = if json {
        let object = serde_json::to_string_pretty(report);
        object.map_err(|why| Failure::host("cannot write the figures as JSON", why))? + "\n"
    } else {
        report.to_string()
    };
    print(&text)
}

fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        // The reader has closed the pipe, so nothing is lost.
        Err(why) if why.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::host("cannot write the figures to stdout", why))
        }
        _ => Ok(()),
    }
}

fn write_page(path: &Path, page: &str) -> Result<(), Failure> {
    pageferry_bench::kit::replace_file(path, page)
        .map_err(|why| Failure(2, format!("cannot write {}: {why}", path.display())))
}

/// Runs `command`, and stores its output with the conditions in `file`.
fn record(file: &Path, command: &[String]) -> Result<(), Failure> {
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
        .map_err(|why| Failure(2, format!("cannot run {}: {why}", command[0])))?;
    if !output.status.success() {
        let why = format!(
            "{} ended with {}: its output is not recorded",
            command[0], output.status
        );
        return Err(Failure(12, why));
    }
    let name = Path::new(&command[0]).file_name().unwrap_or_default();
    let words = [name.to_string_lossy().into_owned()];
    let words: Vec<String> = words
        .into_iter()
        .chain(command[1..].iter().cloned())
        .collect();
    let result = results::RecordedRun {
        command: words.join(" "),
        began,
        busy_before: busy.unwrap_or(f64::NAN),
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        processor: processor
            .next()
            .and_then(|line| line.split_once(": "))
            .map_or_else(|| "unknown processor".to_owned(), |pair| pair.1.to_owned()),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        output: serde_json::from_slice(&output.stdout)
            .map_err(|why| Failure(2, format!("{} did not print JSON: {why}", command[0])))?,
    };
    let text = serde_json::to_string_pretty(&result);
    let text = text.map_err(|why| Failure::host("cannot write the result as JSON", why))?;
    write_page(file, &(text + "\n"))
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

/// Prints the page of figures for the results in `directory`.
fn report(directory: &Path) -> Result<(), Failure> {
    let wrong = |path: &Path, why: &dyn Display| {
        Failure(2, format!("cannot read {}: {why}", path.display()))
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
    print(&results::page(&all).map_err(|why| Failure(2, why))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn slot_flags(words: &[&str]) -> SlotFlags {
        let words = ["pageferry-compare", "slots"].iter().chain(words);
        match Cli::parse_from(words).command {
            Command::Slots(flags) => flags,
            other => panic!("slots is {other:?}"),
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
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_is_asked_for_is_measured() {
        let config = slot_config(&slot_flags(&[
            "--quick", "--slots", "30,10,30", "--repeat", "2",
        ]));
        assert_eq!((config.sizes, config.rounds), (vec![10, 30], 2));
        let config = slot_config(&slot_flags(&[]));
        assert_eq!((config.sizes.last(), config.rounds), (Some(&32_764), 15));
    }
}
