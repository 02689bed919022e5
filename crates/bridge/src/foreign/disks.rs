//! The disks of a paused VM reach the storage that both hosts share.

use rustix::fs::{Mode, OFlags};
use std::path::Path;

/// Flushes files of a VMM, by their paths in the process with this id. Returns a sentence for each
/// that could not be flushed.
pub(crate) fn flush<'a>(
    process: Option<rustix::process::Pid>,
    paths: impl IntoIterator<Item = &'a str>,
) -> Vec<String> {
    let root = process.map(|pid| format!("/proc/{}/root", pid.as_raw_nonzero()));
    let flush = |path: &str| {
        let inside = format!("{}{path}", root.as_deref().unwrap_or_default());
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let path = if path.starts_with('/') {
            Path::new(&inside)
        } else {
            Path::new(path)
        };
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        rustix::fs::fsync(file)
    };
    let failed = |path: &'a str| {
        let why = flush(path).err()?;
        Some(format!(
            "the disk {path} was not flushed ({why}): the other host may read older data"
        ))
    };
    paths.into_iter().filter_map(failed).collect()
}
