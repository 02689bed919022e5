//! Page tables of other public crates, beside the second-stage page tables.
//!
//! **Guarantee.** All schemes map the same frames to the same frames in the same order. Their
//! tables come from memory that the system has backed before, and from one allocator where a scheme
//! lets its platform give it. Each answer to a timed look-up is checked. A verdict that uses a
//! figure of another run says so.
//!
//! **Mechanism.** A thread has a GiB of guest frames of its own, and goes over it in chunks, each
//! timed by itself. Two threads start each chunk together. A figure is the median over all chunks
//! of all rounds in which no thread lost its core to another process.
//!
//! The floors are radix trees of the same shape that do nothing but store: the least that any
//! scheme pays. `ostd` of Asterinas has the other page tables known to take faults in parallel
//! (CortenMM, SOSP 2025). It is
//! [not built](NOT_BUILT).

mod allocator;
mod bounds;
mod measure;
mod operation;
mod page;
mod report;
mod run;
pub mod scheme;
mod switches;
#[cfg(test)]
mod tests;

pub use operation::Operation;
pub use page::page;
pub use report::{Absent, NOT_BUILT, Pages, Report};
pub use run::{Config, run};
