//! A machine to try the MMU on: a host that moves frames, and vCPUs with TLBs that check what they
//! read.
//!
//! **Guarantee.** A run of a [`Machine`] panics where a vCPU uses a host frame that was taken away,
//! where a table is reached after it was freed, where a word a vCPU reads is not what it wrote
//! last, and, at the end, where a page that was stored to is missing from the log or the tables say
//! anything that the host does not.
//!
//! **Mechanism.** Hardware is modelled, not the MMU: vCPUs walk the tables as hardware does,
//! without any guard, from the root they were last told, and keep what they find in a TLB, pointers
//! to tables included, until a flush that covers it is requested; they acknowledge between two
//! accesses. Guest memory is one word a vCPU in each frame.
//!
//! `tests/shuttle` runs it under a scheduler that decides every step, on tables of two entries;
//! `tests/stress_mmu.rs` on threads and real tables. `sync.rs` chooses.

mod board;
mod host;
mod machine;
mod maintain;
mod sync;
mod vcpu;

pub(crate) use machine::{Length, Machine, Role};
