//! `pageferry bench`: measurements, each next to its lower bound from the same run.

mod args;
mod demand_paging;
mod dirty_log;
mod linux;
mod postcopy_latency;
mod tunnel;

pub(crate) use args::BenchArgs;

use crate::exit::{Exit, Failure};
use crate::{output, report};
use args::{BenchCommand, BenchFlags, RestoreFlags};
use pageferry_bench::peer::Role;
use pageferry_bench::restore::RestoreSizes;
use pageferry_bench::{BenchError, Row, Setting};
use pageferry_machine::{Engine, EngineChoice};
use std::fmt::Write;
use std::path::{Path, PathBuf};

type Progress<'a> = &'a mut dyn FnMut(&str);
type Benchmark<'a> = &'a dyn Fn(&Setting, Progress<'_>) -> Result<Vec<Row>, BenchError>;

/// Runs a benchmark and prints its rows, or runs the other process of one.
///
/// # Errors
/// The failure of the measurement.
pub(crate) fn bench(args: &BenchArgs) -> Result<(), Failure> {
    let run = |flags: &BenchFlags, benchmark: Benchmark<'_>| run(&args.command, flags, benchmark);
    match &args.command {
        BenchCommand::Peer { role } => Ok(Role::from_words(role)?.play()?),
        BenchCommand::Link(flags) => run(&flags.common, &|setting, progress| {
            pageferry_bench::link(setting, &flags.channels(), progress)
        }),
        BenchCommand::Blackout(flags) => run(&flags.common, &|setting, progress| {
            pageferry_bench::blackout(setting, flags.sparse, progress)
        }),
        BenchCommand::Soft(flags) => run(flags, &pageferry_bench::soft),
        BenchCommand::States(flags) => run(flags, &pageferry_bench::states),
        BenchCommand::Restore(flags) => restore(flags),
        BenchCommand::DemandPaging(flags) => demand_paging::demand_paging(flags),
        BenchCommand::PostcopyLatency(flags) => postcopy_latency::postcopy_latency(flags),
        BenchCommand::Linux(flags) => linux::linux(flags),
        BenchCommand::DirtyLog(flags) => dirty_log::dirty_log(flags),
        BenchCommand::Tunnel(flags) => tunnel::tunnel(flags),
    }
}

/// Runs a benchmark that gives rows.
fn run(
    command: &BenchCommand,
    flags: &BenchFlags,
    benchmark: Benchmark<'_>,
) -> Result<(), Failure> {
    if matches!(command, BenchCommand::Soft(_) | BenchCommand::States(_))
        && flags.engine == EngineChoice::Only(Engine::Kvm)
    {
        let why = "bench soft and bench states use no KVM: use --engine soft, or leave it out";
        return Err(Failure::new(Exit::Usage, why));
    }
    let setting = Setting {
        executable: executable()?,
        engines: engines(flags.engine)?,
        repeat: flags.repeat,
    };
    let rows = benchmark(&setting, &mut |doing| output::note(doing))?;
    show_rows(&rows, flags.json)
}

fn restore(flags: &RestoreFlags) -> Result<(), Failure> {
    if flags.working_set > flags.memory / 2 {
        let why = "the working set is more than half of the memory: choose less";
        return Err(Failure::new(Exit::Usage, why));
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
    let rows = pageferry_bench::restore::restore(&setting, &sizes, &mut |doing| {
        output::note(doing);
    })?;
    show_rows(&rows, flags.json)
}

fn show_rows(rows: &[Row], as_json: bool) -> Result<(), Failure> {
    if as_json {
        return json(&rows);
    }
    output::result(&table(rows));
    Ok(())
}

/// This program's file, for the other process of a benchmark.
fn executable() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|e| {
        Failure::new(
            Exit::Internal,
            format!("cannot find this program's own file: {e}"),
        )
    })
}

/// Prints figures, and then writes the requested page. A page that cannot be drawn or written must
/// not cost the figures.
fn show<F: serde::Serialize + std::fmt::Display>(
    figures: &F,
    as_json: bool,
    report: Option<&Path>,
    draw: impl FnOnce(&F) -> Result<String, String>,
) -> Result<(), Failure> {
    if as_json {
        json(figures)?;
    } else {
        output::result(&figures.to_string());
    }
    match report {
        Some(path) => report::write(path, draw(figures)),
        None => Ok(()),
    }
}

fn json(figures: &impl serde::Serialize) -> Result<(), Failure> {
    let value = serde_json::to_value(figures).map_err(|e| {
        Failure::new(
            Exit::Internal,
            format!("cannot write the figures as JSON: {e}"),
        )
    })?;
    output::json(&value);
    Ok(())
}

/// The engines to measure: the chosen one, or all that run here.
fn engines(choice: EngineChoice) -> Result<Vec<Engine>, Failure> {
    match choice {
        EngineChoice::Only(_) => Ok(vec![pageferry_machine::select(choice)?.0]),
        EngineChoice::Auto => {
            let kvm = pageferry_machine::select(EngineChoice::Only(Engine::Kvm));
            if let Err(why) = &kvm {
                output::note(&format!("KVM is not measured: {why}"));
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

impl From<BenchError> for Failure {
    fn from(error: BenchError) -> Self {
        match error {
            BenchError::Machine(error) => error.into(),
            BenchError::WrongValue(_) => Self::new(Exit::Verification, error.to_string()),
            BenchError::Setting(_) => Self::new(Exit::Usage, error.to_string()),
            BenchError::Stopped(_) => Self::new(Exit::Guest, error.to_string()),
            BenchError::Cancelled => Self::new(Exit::Cancelled, error.to_string()),
            BenchError::Busy(_) => Self::new(Exit::Busy, error.to_string()),
            other => Self::new(Exit::Internal, other.to_string()),
        }
    }
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
    fn the_exit_code_says_whose_fault_it_was() {
        let exit = |error: BenchError| Failure::from(error).exit;
        let text = || "why".to_owned();
        assert_eq!(exit(BenchError::Busy(text())), Exit::Busy);
        assert_eq!(exit(BenchError::Stopped(text())), Exit::Guest);
        assert_eq!(exit(BenchError::Setting(text())), Exit::Usage);
        assert_eq!(exit(BenchError::Cancelled), Exit::Cancelled);
        assert_eq!(exit(BenchError::WrongValue(text())), Exit::Verification);
        assert_eq!(exit(BenchError::Peer(text())), Exit::Internal);
    }

    #[test]
    fn the_table_says_whether_a_target_was_met() {
        use pageferry_bench::{Bound, Conditions, kit::Samples};
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
