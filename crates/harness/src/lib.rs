//! Which VM do commands, benchmarks and tests run?
//!
//! **Guarantee.** A [`Vm`] is a machine with the threads of its vCPUs and a guest program. Dropping
//! it ends its threads and frees its memory. No call waits without a limit.
//!
//! **Mechanism.** The [`Hooks`] of the threads resolve faults on missing pages through [`Faults`].
//! They count the vCPUs whose program has ended, and the errors that the guest signals.
//! [`Vm::load`] writes a program to memory and its start values to the vCPUs. [`verify`] compares
//! every page with the bytes that follow from the guest's counters. [`size`] reads sizes of memory
//! as users write them, and [`guest_linux`] finds the files of the Linux guest.
//!
//! **Neighbours.** Below: `machine`, `migration`, and `guest` for the programs. Above: `cli`,
//! `bench` and the tests of `migration`. This crate must not print, and must not know flags.

pub mod guest_linux;
mod hooks;
pub mod size;
mod vm;

pub use hooks::{Board, Faults, Hooks};
pub use vm::{BootError, Vm, WaitError, deliveries_of, isa_of, start_of, verify, write_image};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
