//! Page tables of other public crates, next to our second-stage page tables.
//!
//! **Guarantee.** All schemes map the same frames to the same frames in the same order. The system
//! has backed the memory for their tables before. If a scheme lets its platform provide tables,
//! they come from one allocator. Every answer to a timed look-up is checked.
//!
//! **Mechanism.** Each thread has 1 GiB of guest frames of its own. It works through them in
//! chunks, which are timed one by one. Two threads start each chunk together. A figure is the
//! median over the chunks of all rounds. Chunks during which a thread lost its core to another
//! process do not count.
//!
//! The floors are radix trees of the same shape that only store entries: a lower bound for any
//! scheme. `ostd` of Asterinas has the other page tables known to take faults in parallel
//! (CortenMM, SOSP 2025). It cannot be built here: it compiles for bare-metal targets only, and its
//! page tables are private to the crate.

mod allocator;
mod measure;
mod operation;
mod run;
mod scheme;
mod switches;
#[cfg(test)]
mod tests;

use operation::Operation;
pub(crate) use run::tables;
