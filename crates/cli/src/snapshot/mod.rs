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

use crate::exit::{Exit, Failure};
use crate::progress::{Display, Feed, Rates};
use crate::signals::Interrupts;
use args::SnapshotCommand;
use failure::of_open;
use pageferry_snapshot::Snapshot;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

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

/// Does `work` while its progress is shown, and measures its time. `work` gets a callback that
/// stops it after an interrupt.
fn with_progress<T>(
    step: &str,
    interrupts: &Interrupts,
    work: impl FnOnce(&mut pageferry_snapshot::Progress<'_>) -> T,
) -> (T, Duration) {
    let feed = Feed::new();
    let display = Display::start(&feed);
    feed.step(step);
    let start = Instant::now();
    let so_far = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let seen = Arc::clone(&so_far);
    feed.measure(move || {
        // Plain figures for people: nothing else is read because of them.
        let [done, all] = [0, 1].map(|at| seen[at].load(Ordering::Relaxed));
        let bytes = (done as f64 / start.elapsed().as_secs_f64()) as u64;
        let left = all.saturating_sub(done).checked_div(bytes)?;
        let left = Some(Duration::from_secs(left));
        Some(Rates { bytes, left })
    });
    let result = work(&mut |done, all| {
        so_far[0].store(done, Ordering::Relaxed);
        so_far[1].store(all, Ordering::Relaxed);
        feed.at(done, all);
        match interrupts.any() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    let took = start.elapsed();
    display.finish();
    (result, took)
}

/// The failure of work that an interrupt has stopped.
fn cancelled() -> Failure {
    Failure::new(Exit::Cancelled, "cancelled")
}
