//! Tasks of development that cargo has no command for: `cargo xtask lab` and `cargo xtask
//! two-hosts`.
//!
//! **Guarantee.** A task leaves nothing behind outside the target directory. `lab` needs no
//! privileges. `two-hosts` needs root.
//!
//! **Mechanism.** Each task is a module. [`lab`] runs programs of the workspace on an emulated
//! machine, whose KVM has a TDP MMU. [`two_hosts`] runs a command beside two network namespaces.
//!
//! **Neighbours.** No crate uses this one. `.ci/lab` calls it.

mod lab;
mod two_hosts;

use clap::Parser;
use std::process::ExitCode;

/// The arguments of `cargo xtask`.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Task {
    Lab(lab::Args),
    TwoHosts(two_hosts::Args),
}

fn main() -> ExitCode {
    match Task::parse() {
        Task::Lab(args) => lab::run(&args),
        Task::TwoHosts(args) => two_hosts::run(&args),
    }
}
