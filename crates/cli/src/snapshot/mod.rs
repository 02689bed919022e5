//! `pageferry snapshot`: packs the memory of snapshots, and gives it back.
//!
//! **Guarantee.** A file that is written appears whole or not at all, also after Ctrl-C, and never
//! in the place of another. Damage ends a command with [`Exit::Protocol`], and names the chunk.

mod args;
mod failure;
mod read;
mod show;
mod write;

pub(crate) use args::SnapshotArgs;
pub(crate) use failure::{of_open, of_pack};

use crate::exit::{Exit, Failure};
use crate::signals::Interrupts;
use args::SnapshotCommand;
use pageferry_snapshot::Snapshot;
use std::path::Path;

/// Runs a command on snapshots.
///
/// # Errors
/// Its failure.
pub(crate) fn snapshot(args: &SnapshotArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    match &args.command {
        SnapshotCommand::Pack(args) => write::pack(args, interrupts),
        SnapshotCommand::Diff(args) => write::diff(args, interrupts),
        SnapshotCommand::Unpack(args) => read::unpack(args, interrupts),
        SnapshotCommand::Verify(args) => read::verify(args, interrupts),
        SnapshotCommand::Info(args) => read::info(args),
    }
}

fn open(path: &Path, directories: &[&Path]) -> Result<Snapshot, Failure> {
    Snapshot::open_in(path, directories).map_err(|error| of_open(&error))
}

/// The failure of work that an interrupt has stopped.
fn cancelled() -> Failure {
    Failure::new(Exit::Cancelled, "cancelled")
}
