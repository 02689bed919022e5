//! `pageferry-bench`: how fast is Pageferry, next to its lower bounds and to other projects?
//!
//! **Guarantee.** Every figure was measured by the run that prints it. A figure that is compared
//! stands next to its baseline from the same run. The module `model` simulates; its inputs are
//! figures of the same run, and its results say that they are modelled wherever they are shown.
//! Figures go to stdout, progress and errors to stderr. A failure is one sentence, and its exit
//! code is one of [`args::EXIT_CODES`].
//!
//! **Mechanism.** A benchmark is a function that returns figures. A benchmark of two processes
//! starts a [`peer::Peer`]: this executable again, in a part of its own. Figures are medians of
//! several samples, and carry the smallest and the largest sample. In `slots` and in `tables` the
//! *schemes* of other crates implement one trait and get the same inputs in turn. A *floor* is a
//! scheme that does only the least work that any scheme must do: a lower bound.
//!
//! **Neighbours.** Below: everything. Nothing is above, and no published crate depends on this one.

mod args;
mod blackout;
mod cores;
mod demand_paging;
mod dirty_log;
mod error;
mod kit;
mod link;
mod linux;
mod model;
mod mover;
mod output;
mod peer;
mod postcopy_latency;
mod restore;
mod results;
mod row;
mod schemes;
mod slots;
mod soft;
mod states;
mod tables;
mod tunnel;
mod vm;
mod watched;

use args::Command;
use error::BenchError;
use kit::Samples;
use peer::Part;
use row::{Bound, Conditions, Row};

use clap::Parser;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

fn main() -> ExitCode {
    match run(&args::Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            note(&format!("error: {why}"));
            ExitCode::from(why.exit_code())
        }
    }
}

/// Runs a benchmark and prints its figures, or runs the other process of one.
fn run(command: &Command) -> Result<(), BenchError> {
    let (output, common) = match command {
        Command::Link(flags) => (link::link(flags)?.into(), &flags.common),
        Command::Blackout(flags) => (blackout::blackout(flags)?.into(), &flags.engine.common),
        Command::Soft(common) => (soft::soft(common)?.into(), common),
        Command::States(common) => (states::states(common)?.into(), common),
        Command::Restore(flags) => (restore::restore(flags)?.into(), &flags.common),
        Command::DemandPaging(flags) => (demand_paging::demand_paging(flags)?, &flags.common),
        Command::PostcopyLatency(flags) => {
            (postcopy_latency::postcopy_latency(flags)?, &flags.common)
        }
        Command::Linux(flags) => (linux::linux(flags)?.into(), &flags.common),
        Command::DirtyLog(flags) => (dirty_log::dirty_log(flags)?.into(), &flags.common),
        Command::Tunnel(flags) => (tunnel::tunnel(flags)?.into(), &flags.common),
        Command::Slots(flags) => (slots::slots(flags)?.into(), &flags.common),
        Command::Tables(common) => (tables::tables(common)?.into(), common),
        Command::Record { file, command } => return results::record(file, command),
        Command::Report { results } => return output::print(&results::report(results)?),
        Command::Peer { name, part } => return play(name, part),
    };
    output.show(common)
}

/// Plays the part `name` of another process.
fn play(name: &str, part: &str) -> Result<(), BenchError> {
    use link::{Bulk, Pong};
    use linux::LinuxSource;
    use mover::SourceVm;
    use restore::{Paced, Restarted, Restored};
    use tunnel::TunnelEnd;
    match name {
        Bulk::NAME => peer::play::<Bulk>(part),
        Pong::NAME => peer::play::<Pong>(part),
        LinuxSource::NAME => peer::play::<LinuxSource>(part),
        SourceVm::NAME => peer::play::<SourceVm>(part),
        Paced::NAME => peer::play::<Paced>(part),
        Restarted::NAME => peer::play::<Restarted>(part),
        Restored::NAME => peer::play::<Restored>(part),
        TunnelEnd::NAME => peer::play::<TunnelEnd>(part),
        _ => Err(BenchError::Peer(format!("unknown part '{name}'"))),
    }
}

static ASKED_TO_STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From now on, an interrupt ends the benchmark in order: namespaces and processes are removed.
fn stop_on_interrupt() -> Result<(), BenchError> {
    let asked = ASKED_TO_STOP.get_or_init(Arc::default);
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(asked))
            .map_err(error::os("cannot handle signals"))?;
    }
    Ok(())
}

/// Whether the user asks to stop.
fn is_cancelled() -> bool {
    ASKED_TO_STOP
        .get()
        .is_some_and(|asked| asked.load(Ordering::Relaxed))
}

/// The rounds of a measurement. Each is noted when it begins.
fn rounds(count: u32, what: impl Display) -> impl Iterator<Item = u32> {
    (1..=count).inspect(move |round| note(&format!("{what}, round {round} of {count}")))
}

/// Writes a line to stderr.
fn note(text: &str) {
    // Nobody reads it, and the figures go elsewhere.
    let _ = writeln!(std::io::stderr().lock(), "pageferry-bench: {text}");
}
