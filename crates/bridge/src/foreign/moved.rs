//! The note beside an API socket that its VM was handed over.
//!
//! **Guarantee.** A VM that was handed over is not moved again from the process that keeps it
//! paused, also when our own process is gone. The note counts for that process only: another one
//! at the same path has another socket.

use super::VmmError;
use pageferry_hostfs::Note;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Serialize, Deserialize)]
struct Moved {
    /// The address of the destination.
    to: String,
    /// The time in seconds since 1970.
    at: u64,
    /// The socket: device, inode, and the time of its birth.
    socket: [i64; 4],
}

fn socket(api: &Path) -> io::Result<[i64; 4]> {
    let found = std::fs::metadata(api)?;
    let birth = [found.mtime(), found.mtime_nsec()];
    Ok([
        found.dev().cast_signed(),
        found.ino().cast_signed(),
        birth[0],
        birth[1],
    ])
}

fn path(api: &Path) -> PathBuf {
    let mut path = api.as_os_str().to_owned();
    path.push(".pageferry.moved");
    path.into()
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// Notes the hand-over, before it comes to pass.
pub(super) fn note(api: &Path, to: &str) -> io::Result<()> {
    let moved = Moved {
        to: to.into(),
        at: now(),
        socket: socket(api)?,
    };
    let text = serde_json::to_vec(&moved)?;
    Note::at(&path(api)).write(&text)
}

/// The VM is here again.
pub(super) fn forget(api: &Path) {
    Note::at(&path(api)).remove();
}

/// Refuses a VM that was handed over.
pub(crate) fn check(api: &Path) -> Result<(), VmmError> {
    let Ok(text) = Note::at(&path(api)).read() else {
        return Ok(());
    };
    let moved = serde_json::from_slice::<Moved>(&text);
    let Some(moved) = moved
        .ok()
        .filter(|moved| socket(api).ok() == Some(moved.socket))
    else {
        // It is of a process that is gone.
        forget(api);
        return Ok(());
    };
    let (to, ago) = (moved.to.escape_debug(), now().saturating_sub(moved.at));
    Err(VmmError::Moved(format!(
        "the VM was handed over to {to} {ago} s ago, and this is its paused copy: end its VMM; if \
         the other host is gone for good, remove {} and resume it by its API",
        path(api).display()
    )))
}
