//! Tasks of development that cargo has no command for: `cargo xtask lab`.
//!
//! **Guarantee.** A task needs no privileges and changes nothing outside the target directory.
//!
//! **Mechanism.** Each task is a module. [`lab`] runs programs of the workspace on an emulated
//! machine, whose KVM has a TDP MMU.
//!
//! **Neighbours.** No crate uses this one. `.ci/lab` calls it.

mod lab;

use clap::Parser;
use std::process::ExitCode;

/// The arguments of `cargo xtask`.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Task {
    Lab(lab::Args),
}

fn main() -> ExitCode {
    let Task::Lab(args) = Task::parse();
    lab::run(&args)
}
