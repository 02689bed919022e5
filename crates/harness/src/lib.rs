//! Which VM do commands, benchmarks and tests run?
//!
//! **Guarantee.** A [`Vm`] is a machine, its vCPUs' threads, and a guest program put into it.
//! Dropping it ends it. No call waits without a limit.
//!
//! **Mechanism.** The [`Hooks`] of the threads bring missing pages through [`Faults`] and count the
//! vCPUs whose program has ended. [`Vm::load`] writes a program to memory and its start values to
//! the vCPUs. [`verify`] compares every page with what the guest's own counters say it must be.
//!
//! **Neighbours.** Below: `machine`, `migration`, and `guest` for the programs. Above: `cli` and
//! `bench`. It must not print, and must not know flags.

mod hooks;
mod vm;

pub use hooks::{Faults, Hooks};
pub use vm::{BootError, Vm, WaitError, deliveries_of, isa_of, start_of, verify, write_image};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
