//! Tasks of development that cargo has no command for: `cargo xtask test`, `cargo xtask lab`,
//! `cargo xtask guest-linux` and `cargo xtask two-hosts`.
//!
//! **Guarantee.** A task leaves nothing behind outside the target directory and the user's cache.
//! `lab` and `guest-linux` need no privileges. `two-hosts` needs root.
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
struct Args {
    #[command(subcommand)]
    task: Task,
    /// Keep fetched packages and built kernels in the target directory, not in the user's cache
    #[arg(long, global = true)]
    no_cache: bool,
}

#[derive(clap::Subcommand)]
enum Task {
    GuestLinux(guest_linux::Args),
    Lab(lab::Args),
    Test(test::Args),
    TwoHosts(two_hosts::Args),
}

fn main() -> ExitCode {
    let Args { task, no_cache } = Args::parse();
    match task {
        Task::GuestLinux(args) => guest_linux::run(&args, no_cache),
        Task::Lab(args) => lab::run(&args, no_cache),
        Task::Test(args) => test::run(&args),
        Task::TwoHosts(args) => two_hosts::run(&args),
    }
}
