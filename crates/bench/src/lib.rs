//! How fast is it, next to its lower bound, in one run?
//!
//! **Guarantee.** Every figure was measured by the run that prints it. A figure that is compared
//! stands next to its baseline from the same run. The module `model` simulates; its inputs are
//! figures of the same run, and its results say that they are modelled wherever they are shown.
//!
//! **Mechanism.** A benchmark is a function that returns figures. A benchmark of two processes
//! starts a `Peer`: this executable again, in a role. Figures are medians of several samples, and
//! carry the smallest and the largest sample. All benchmarks share the measuring [`kit`]. With the
//! feature `benchmarks` off, the crate is the kit alone.
//!
//! **Neighbours.** Below: everything. Above: `cli`, which parses the flags and prints the figures,
//! and `peers`, which uses the kit. This crate must not print, and must not know flags.

pub mod kit;

#[cfg(feature = "benchmarks")]
mod blackout;
#[cfg(feature = "benchmarks")]
mod cores;
#[cfg(feature = "benchmarks")]
pub mod demand_paging;
#[cfg(feature = "benchmarks")]
pub mod dirty_log;
#[cfg(feature = "benchmarks")]
mod error;
#[cfg(feature = "benchmarks")]
mod exits;
#[cfg(feature = "benchmarks")]
mod link;
#[cfg(feature = "benchmarks")]
pub mod linux;
#[cfg(feature = "benchmarks")]
pub mod model;
#[cfg(feature = "benchmarks")]
pub mod peer;
#[cfg(feature = "benchmarks")]
pub mod postcopy_latency;
#[cfg(feature = "benchmarks")]
pub mod qemu;
#[cfg(feature = "benchmarks")]
pub mod restore;
#[cfg(feature = "benchmarks")]
mod row;
#[cfg(feature = "benchmarks")]
mod scratch;
#[cfg(feature = "benchmarks")]
mod serialised;
#[cfg(feature = "benchmarks")]
mod soft;
#[cfg(feature = "benchmarks")]
mod states;
#[cfg(feature = "benchmarks")]
pub mod tunnel;
#[cfg(feature = "benchmarks")]
mod vm;

#[cfg(feature = "benchmarks")]
use kit::Samples;
#[cfg(feature = "benchmarks")]
pub use {
    blackout::blackout,
    error::BenchError,
    link::link,
    peer::{Channels, Peer},
    row::{Bound, Conditions, Row},
    serialised::{Serialised, SerialisedReader},
    soft::soft,
    states::states,
};

/// The settings of a benchmark that prints [`Row`]s.
#[cfg(feature = "benchmarks")]
#[derive(Clone, Debug)]
pub struct Setting {
    /// The executable for the other process. It is run as `EXECUTABLE bench peer ROLE ..`.
    pub executable: std::path::PathBuf,
    /// The engines to measure.
    pub engines: Vec<pageferry_machine::Engine>,
    /// The rounds of each measurement, at least 1. Each round gives one sample of each figure.
    pub repeat: u32,
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
