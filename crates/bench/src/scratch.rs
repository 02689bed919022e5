//! A folder for the files and the sockets of a benchmark.

use crate::BenchError;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder. Dropping it removes it, with all that is in it.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Result<Self, BenchError> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let (pid, n) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(format!("pageferry-bench-{pid}-{n}"));
        let made = std::fs::create_dir(&path);
        made.map_err(|source| BenchError::Os {
            what: "cannot make a folder for files",
            source,
        })?;
        Ok(Self(path))
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.0
    }

    /// The path of a file in it.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
