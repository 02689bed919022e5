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
mod channels;
mod command;
mod cores;
mod demand_paging;
mod dirty_log;
mod error;
mod exits;
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
mod serialised;
mod slots;
mod soft;
mod states;
mod tables;
mod tunnel;
mod vm;

use blackout::blackout;
use error::BenchError;
use kit::Samples;
use link::link;
use row::{Bound, Conditions, Row};
use soft::soft;
use states::states;

use clap::Parser;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// The settings of a benchmark that prints [`Row`]s.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    /// The engines to measure.
    pub(crate) engines: Vec<pageferry_machine::Engine>,
    /// The rounds of each measurement, at least 1. Each round gives one sample of each figure.
    pub(crate) repeat: u32,
}

fn main() -> ExitCode {
    match command::run(&args::Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            note(&format!("error: {why}"));
            ExitCode::from(why.exit_code())
        }
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

/// Writes a line to stderr.
fn note(text: &str) {
    // Nobody reads it, and the figures go elsewhere.
    let _ = writeln!(std::io::stderr().lock(), "pageferry-bench: {text}");
}
