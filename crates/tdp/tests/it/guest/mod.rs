//! A machine to test the MMU: a host that moves frames, and vCPUs whose TLBs check the words that
//! they read.
//!
//! **Guarantee.** A run of a [`Machine`] panics in these cases:
//!
//! - a vCPU uses a host frame that was taken away;
//! - a thread reaches a table after it was freed;
//! - a vCPU reads a word other than the one it wrote last;
//! - at the end, the log misses a page that was stored to, or the tables contradict the host.
//!
//! **Mechanism.** The machine models hardware, not the MMU. vCPUs walk the tables without a guard,
//! from the root that they last received. They cache translations and pointers to tables in a TLB
//! until a flush that covers them is requested. They acknowledge a flush between two accesses.
//! Guest memory is one word for each vCPU in each frame.
//!
//! `tests/shuttle` runs it under a scheduler that decides every step, on tables of two entries.
//! `tests/it/stress.rs` runs it on threads and real tables. `sync.rs` chooses.

mod board;
mod host;
mod machine;
mod maintain;
mod sync;
mod vcpu;

pub(crate) use machine::{Length, Machine, Role};
