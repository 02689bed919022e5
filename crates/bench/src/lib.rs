//! How fast is it, beside its floor, in one run?
//!
//! **Guarantee.** Every figure was measured by the run that prints it; a figure that is compared stands
//! beside its baseline from the same run. What is simulated is in [`model`], driven by figures of the same run, and
//! says so wherever it is shown.
//!
//! **Mechanism.** A benchmark is a function that returns [`Row`]s. What needs two processes starts a
//! [`Peer`]: this executable again, in a role of [`peer::Role`]. Figures are medians of several samples,
//! with the smallest and the largest beside them.
//!
//! **Neighbours.** Below: everything. Above: `cli`, which parses the flags and prints the rows. It must
//! not print, and must not know flags.

mod blackout;
mod cores;
pub mod demand_paging;
pub mod dirty_log;
mod exits;
mod link;
pub mod memslot;
pub mod model;
pub mod peer;
mod row;
mod serialised;
mod soft;
mod vm;

pub use blackout::blackout;
pub use link::link;
pub use peer::Peer;
pub use row::{Conditions, Row, Samples};
pub use serialised::{Serialised, SerialisedReader};
pub use soft::soft;

use std::path::PathBuf;

/// What every benchmark is told.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The executable that plays the other process when run with `bench peer ROLE ..`.
    pub executable: PathBuf,
    /// The engines to measure.
    pub engines: Vec<pageferry_machine::Engine>,
    /// How often each measurement is repeated.
    pub repeat: u32,
}

/// Why a benchmark has no figures.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The migration in it failed.
    #[error("a migration of the benchmark failed: {0}")]
    Migration(String),
    /// The machine failed.
    #[error(transparent)]
    Machine(#[from] pageferry_machine::MachineError),
    /// The guest program cannot be planned so.
    #[error(transparent)]
    Guest(#[from] pageferry_guest::GuestError),
    /// A socket failed.
    #[error(transparent)]
    Channel(#[from] pageferry_migration::channel::ChannelError),
    /// The other process failed or said something else than expected.
    #[error("the benchmark's other process: {0}")]
    Peer(String),
    /// A system call was refused.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The hypervisor refused a call, or a guest did what its program does not.
    #[error("{0}")]
    Memslot(String),
    /// A guest's value is not where it should be: memory went to the wrong place.
    #[error("wrong memory: {0}")]
    WrongValue(String),
    /// Nothing to measure: fewer faults or pages than a figure needs.
    #[error("{0}")]
    TooFew(String),
}
