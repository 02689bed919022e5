//! The benchmarks by their flags: settings, and the output of figures.

mod demand_paging;
mod dirty_log;
mod linux;
mod postcopy_latency;
mod schemes;
mod tunnel;

use crate::args::{BenchFlags, Command, RestoreFlags};
use crate::error::os;
use crate::peer::Role;
use crate::restore::RestoreSizes;
use crate::{BenchError, Row, Setting, note, results};
use pageferry_harness::size;
use pageferry_machine::{Engine, EngineChoice};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

type Progress<'a> = &'a mut dyn FnMut(&str);
type Benchmark<'a> = &'a dyn Fn(&Setting, Progress<'_>) -> Result<Vec<Row>, BenchError>;

/// Runs a benchmark and prints its figures, or runs the other process of one.
pub(crate) fn run(command: &Command) -> Result<(), BenchError> {
    let run = |flags: &BenchFlags, benchmark: Benchmark<'_>| rows(command, flags, benchmark);
    match command {
        Command::Peer { role } => Role::from_json(role)?.play(),
        Command::Link(flags) => run(&flags.common, &|setting, progress| {
            crate::link(setting, &flags.channels(), progress)
        }),
        Command::Blackout(flags) => run(&flags.common, &|setting, progress| {
            crate::blackout(setting, flags.sparse, progress)
        }),
        Command::Soft(flags) => run(flags, &crate::soft),
        Command::States(flags) => run(flags, &crate::states),
        Command::Restore(flags) => restore(flags),
        Command::DemandPaging(flags) => demand_paging::demand_paging(flags),
        Command::PostcopyLatency(flags) => postcopy_latency::postcopy_latency(flags),
        Command::Linux(flags) => linux::linux(flags),
        Command::DirtyLog(flags) => dirty_log::dirty_log(flags),
        Command::Tunnel(flags) => tunnel::tunnel(flags),
        Command::Slots(flags) => schemes::slots(flags),
        Command::Tables(flags) => schemes::tables(flags),
        Command::Record { file, command } => results::record(file, command),
        Command::Report { results } => print(&results::report(results)?),
    }
}

/// Whether the user asks to stop, from now on.
fn interrupts() -> Result<Arc<AtomicBool>, BenchError> {
    let asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&asked))
            .map_err(os("cannot handle signals"))?;
    }
    Ok(asked)
}

/// Checks that this host has memory for `machines` machines.
fn check_host_memory(memory_bytes: u64, machines: u64) -> Result<(), BenchError> {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let needed = memory_bytes.saturating_mul(machines);
    match kib.map(|kib| kib << 10) {
        Some(available) if available < needed => Err(BenchError::Setting(format!(
            "the guests need {} of memory, and this host has {} available: choose a smaller --memory",
            size::human(needed),
            size::human(available)
        ))),
        _ => Ok(()),
    }
}

/// Runs a benchmark that gives rows.
fn rows(command: &Command, flags: &BenchFlags, benchmark: Benchmark<'_>) -> Result<(), BenchError> {
    if matches!(command, Command::Soft(_) | Command::States(_))
        && flags.engine == EngineChoice::Only(Engine::Kvm)
    {
        let why = "soft and states use no KVM: use --engine soft, or leave it out";
        return Err(BenchError::Setting(why.into()));
    }
    let setting = Setting {
        executable: executable()?,
        engines: engines(flags.engine)?,
        repeat: flags.repeat,
    };
    let rows = benchmark(&setting, &mut note)?;
    show_rows(&rows, flags.json)
}

fn restore(flags: &RestoreFlags) -> Result<(), BenchError> {
    if flags.working_set > flags.memory / 2 {
        let why = "the working set is more than half of the memory: choose less";
        return Err(BenchError::Setting(why.into()));
    }
    let setting = Setting {
        executable: executable()?,
        engines: Vec::new(),
        repeat: flags.repeat,
    };
    let sizes = RestoreSizes {
        memory: flags.memory,
        working_set: flags.working_set,
    };
    let rows = crate::restore::restore(&setting, &sizes, &mut note)?;
    show_rows(&rows, flags.json)
}

fn show_rows(rows: &[Row], as_json: bool) -> Result<(), BenchError> {
    if as_json {
        return json(&rows);
    }
    print(&table(rows))
}

/// This program's file, for the other process of a benchmark.
fn executable() -> Result<PathBuf, BenchError> {
    std::env::current_exe().map_err(os("cannot find this program's own file"))
}

/// Prints figures, and then writes the requested page. A page that cannot be drawn or written must
/// not cost the figures.
fn show<F: serde::Serialize + std::fmt::Display>(
    figures: &F,
    as_json: bool,
    report: Option<&Path>,
    draw: impl FnOnce(&F) -> Result<String, String>,
) -> Result<(), BenchError> {
    if as_json {
        json(figures)?;
    } else {
        print(&figures.to_string())?;
    }
    match report {
        Some(path) => write(path, &draw(figures).map_err(BenchError::Setting)?),
        None => Ok(()),
    }
}

fn json(figures: &impl serde::Serialize) -> Result<(), BenchError> {
    let text =
        serde_json::to_string_pretty(figures).map_err(|why| os(JSON)(io::Error::from(why)))?;
    print(&(text + "\n"))
}

const JSON: &str = "cannot write the figures as JSON";

/// Writes to stdout.
fn print(text: &str) -> Result<(), BenchError> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // The reader has closed the pipe, so nothing is lost.
        Err(why) if why.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done.map_err(os("cannot write the figures to stdout")),
    }
}

/// Writes a file whole, or not at all.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), BenchError> {
    let wrote = pageferry_charts::replace_file(path, text);
    wrote.map_err(|why| BenchError::Setting(format!("cannot write {}: {why}", path.display())))
}

/// The engines to measure: the chosen one, or all that run here.
fn engines(choice: EngineChoice) -> Result<Vec<Engine>, BenchError> {
    match choice {
        EngineChoice::Only(_) => Ok(vec![pageferry_machine::select(choice)?.0]),
        EngineChoice::Auto => {
            let kvm = pageferry_machine::select(EngineChoice::Only(Engine::Kvm));
            if let Err(why) = &kvm {
                note(&format!("KVM is not measured: {why}"));
            }
            Ok(kvm
                .ok()
                .map(|(engine, _)| engine)
                .into_iter()
                .chain([Engine::Soft])
                .collect())
        }
    }
}

/// Figures in engineering notation: three digits and a power of a thousand.
fn figure(value: f64) -> String {
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
    format!("{scaled:.digits$} {prefix}")
}

fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "{:<26} {:<40} {:>16} {:>21} {:>3}  {:<6} {:<26} baseline",
        "case", "subject", "median", "min .. max", "n", "ratio", "target"
    );
    for row in rows {
        let ratio = row
            .ratio
            .map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        let range = format!(
            "{} .. {}",
            figure(row.min).trim_end(),
            figure(row.max).trim_end()
        );
        let _ = writeln!(
            out,
            "{:<26} {:<40} {:>16} {range:>21} {:>3}  {ratio:<6} {:<26} {}",
            row.case,
            row.subject,
            format!("{}{}", figure(row.value), row.unit),
            row.samples,
            target(row),
            row.baseline.as_deref().unwrap_or(""),
        );
    }
    out
}

/// The verdict and the target of a row, if it has one.
fn target(row: &Row) -> String {
    let Some(target) = &row.target else {
        return String::new();
    };
    let verdict = match row.met {
        Some(true) => "met: ",
        Some(false) => "MISSED: ",
        None => "",
    };
    format!("{verdict}{target}")
}

/// Whether `PAGEFERRY_REQUIRE` makes it an error that KVM cannot be measured.
fn is_kvm_required() -> bool {
    let required = std::env::var("PAGEFERRY_REQUIRE").unwrap_or_default();
    required.split(',').any(|word| word == "kvm")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_whether_a_target_was_met() {
        use crate::{Bound, Conditions, kit::Samples};
        let row = || {
            let samples: Samples = [6.0].into_iter().collect();
            samples.row("case", "subject", "us", Conditions::default())
        };
        let aiming = |most| row().aiming_at("median < 7 us", Bound::Below(most));
        assert_eq!(target(&row()), "");
        assert_eq!(target(&aiming(7.0)), "met: median < 7 us");
        assert_eq!(target(&aiming(5.0)), "MISSED: median < 7 us");
        assert!(table(&[aiming(7.0)]).contains("met: median < 7 us"));
    }

    #[test]
    fn figures_have_three_digits() {
        let shown: Vec<String> = [7.456, 12.34, 812.3, 9999.0, 45_600.0, 3.1e8, 4.25e9]
            .map(figure)
            .to_vec();
        assert_eq!(
            shown,
            [
                "7.46 ", "12.3 ", "812 ", "9999 ", "45.6 k", "310 M", "4.25 G"
            ]
        );
    }
}
