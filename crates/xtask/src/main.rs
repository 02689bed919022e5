//! Tasks of development that cargo has no command for: `cargo xtask test`, `cargo xtask lab`,
//! `cargo xtask guest-linux` and `cargo xtask two-hosts`.
//!
//! **Guarantee.** A task leaves nothing behind outside the target directory. `lab` and
//! `guest-linux` need no privileges. `two-hosts` needs root.
//!
//! **Mechanism.** Each task is a module. [`lab`] runs programs of the workspace on an emulated
//! machine, whose KVM has a TDP MMU. [`guest_linux`] builds a Linux for guests.
//! [`two_hosts`] runs a command beside two network namespaces. [`mod@test`] runs all tests and says
//! which were skipped.
//!
//! **Neighbours.** No crate uses this one. `.ci/lab` calls it.

mod guest_linux;
mod lab;
mod test;
mod two_hosts;

use clap::Parser;
use std::process::ExitCode;

/// The arguments of `cargo xtask`.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Task {
    GuestLinux(guest_linux::Args),
    Lab(lab::Args),
    Test(test::Args),
    TwoHosts(two_hosts::Args),
}

fn main() -> ExitCode {
    match Task::parse() {
        Task::GuestLinux(args) => guest_linux::run(&args),
        Task::Lab(args) => lab::run(&args),
        Task::Test(args) => test::run(&args),
        Task::TwoHosts(args) => two_hosts::run(&args),
    }
}
