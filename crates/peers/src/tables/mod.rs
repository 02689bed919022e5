//! Other public crates' page tables, measured beside the second-stage page tables.
//!
//! **Guarantee.** All schemes map the same frames to the same frames in the same order, take turns in one run, and take
//! memory for tables that the system has backed before, from one pool where they let a platform give it. Every figure
//! was measured by the run that reports it, and each answer to a timed look-up was checked. What stands in a verdict
//! from elsewhere says so.
//!
//! **Mechanism.** [`scheme`] has the tables behind one static trait; [`run`] goes through rounds, steps and schemes, in this
//! nesting. A thread has a GiB of guest frames of its own, and goes over it in chunks, each timed by itself. Two threads
//! start each chunk together. A figure is the median over all chunks of all rounds in which no thread lost its core
//! to another process.
//!
//! **Neighbours.** Below: `pageferry-tdp`, and the crates it is compared with, which no other room needs. Above: the
//! command line. It must not print, and must not know flags.
//!
//! The floors are radix trees of the same shape that do nothing but store: what any scheme pays at least. `ostd` of
//! Asterinas, which has the other page tables known to take faults in parallel (CortenMM, SOSP 2025), is
//! [not built](NOT_BUILT).

mod bounds;
mod operation;
mod pool;
mod report;
mod run;
pub mod scheme;
mod stage;
mod switches;
#[cfg(test)]
mod tests;

pub use crate::verdict::Verdict;
pub use operation::Operation;
pub use report::{Absent, Figure, NOT_BUILT, Report};
pub use run::{Config, RunError, run};
