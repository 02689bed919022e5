//! `pageferry`: the command line of Pageferry.
//!
//! **Guarantee.** Each command ends with a documented exit code ([`exit`]). A failure is one
//! sentence on stderr. Results are on stdout, progress is on stderr. No process, socket or
//! temporary file is left behind, however a command ends. SIGKILL is the exception, and even then a
//! demo's child ends.
//!
//! **Mechanism.** [`args`] parses the flags once. [`vm`] is a machine, its threads and its guest
//! program. [`run`] and [`receive`] own a VM ([`host`]) and serve its control socket ([`control`]);
//! [`migrate`] and [`status`] are its clients, and find it by [`sockets`]. [`metrics`] serves its
//! figures to Prometheus.
//! [`demo`] is a source that starts its destination. [`report`] shows the record of a migration as
//! a table, JSON or HTML. [`tunnel`] carries the streams of other VMMs, and [`bridge`] moves their
//! VMs. [`snapshot`] packs the memory of snapshots. [`probe`] tests the host.
//!
//! **Neighbours.** Below: `charts`, `harness`, `migration`, `machine`, `guest`, `userfault`,
//! `snapshot`. Nothing is above. The crate must not know wire formats, page tables or ioctls. Its
//! only unsafe code handles signals ([`signals`], [`terminal`]) and takes the descriptor that a
//! service manager hands over ([`activation`]).

mod activation;
mod args;
mod attach;
mod bridge;
mod cgroup;
mod console;
mod control;
mod demo;
mod detach;
mod exit;
mod host;
mod keys;
mod limits;
mod log;
mod manual;
mod memory;
mod metrics;
mod migrate;
mod output;
mod pager;
mod probe;
mod procfs;
mod progress;
mod rate;
mod receive;
mod recovery;
mod report;
mod restore;
mod run;
mod sampler;
mod set;
mod signals;
mod sink;
mod snapshot;
mod sockets;
mod status;
mod terminal;
mod tunnel;
mod vm;
mod wall_clock;
mod watch;

use args::{Cli, Command};
use clap::Parser;
use exit::Failure;
use signals::Interrupts;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let ended = start(&cli).and_then(|code| output::check().map(|()| code));
    let code = match ended {
        Ok(code) => code.into(),
        Err(failure) => {
            output::error(&failure);
            ExitCode::from(failure.exit as u8)
        }
    };
    output::finish();
    code
}

/// Runs the command, here or in the background. Returns the exit code.
fn start(cli: &Cli) -> Result<u8, Failure> {
    signals::outlive_large_files()?;
    if let Command::Keep = cli.command {
        let kept = pageferry_bridge::foreign::keep();
        return kept
            .map(|()| 0)
            .map_err(|e| Failure::os("cannot keep descriptors", e));
    }
    if cli.detached {
        detach::begin()?;
    }
    output::start()?;
    if detach::is_asked_for(cli)? {
        return detach::start();
    }
    log::start(cli.log)?;
    dispatch(cli).map(|()| 0)
}

fn dispatch(cli: &Cli) -> Result<(), Failure> {
    let owns_vm = match &cli.command {
        Command::Run(_) | Command::Receive(_) | Command::Restore(_) | Command::Tunnel(_) => true,
        Command::Pager(args) => args.serves(),
        _ => false,
    };
    if owns_vm {
        limits::check_service()?;
    }
    let interrupts = Interrupts::install(owns_vm)?;
    output::wait_by(&interrupts, owns_vm);
    match &cli.command {
        Command::Keep => Ok(()),
        Command::Demo(args) => demo::demo(args, &interrupts),
        Command::Run(args) => run::run(args, cli.detached, &interrupts),
        Command::Receive(args) => receive::receive(args, cli.detached, &interrupts),
        Command::Restore(args) => restore::restore(args, cli.detached, &interrupts),
        Command::Migrate(args) => migrate::migrate(args, &interrupts),
        Command::List(args) => sockets::list(args, &interrupts),
        Command::Status(args) => status::status(args, &interrupts),
        Command::Watch(args) => watch::watch(args, &interrupts),
        Command::Console(args) => attach::attach(args, &interrupts),
        Command::Pause(args) => status::pause(args, &interrupts),
        Command::Resume(args) => status::resume(args, &interrupts),
        Command::Verify(args) => status::verify(args, &interrupts),
        Command::Quit(args) => status::quit(args, &interrupts),
        Command::Recover(args) => recovery::recover(args, &interrupts),
        Command::Abandon(args) => recovery::abandon(args, &interrupts),
        Command::Set(args) => set::set(args, &interrupts),
        Command::Cancel(args) => recovery::cancel(args, &interrupts),
        Command::Tunnel(args) => tunnel::tunnel(args, &interrupts),
        Command::Pager(args) => pager::pager(args, &interrupts),
        Command::Snapshot(args) => snapshot::snapshot(args, &interrupts),
        Command::Probe(args) => probe::probe(args),
        Command::Completions(args) => {
            manual::completions(args);
            Ok(())
        }
        Command::Man(args) => manual::man(args),
        Command::ExitCodes => {
            output::result(&format!("{}\n", exit::TABLE));
            Ok(())
        }
    }
}
