//! What tells a snapshot from another one, wherever it lies.

use crate::source::{Source, SourceError};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3Default;

/// The pages that are read. Each costs a VM's start a read, and those of another host at once.
const PAGES: u64 = 8;
const PAGE: u64 = 4096;

/// The length of a snapshot's memory, and a sum of eight pages of it, evenly apart. Copies of a
/// snapshot have the same one. Other snapshots may have it too, if little has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// The length in bytes.
    pub bytes: u64,
    /// The sum.
    pub sum: u64,
}

impl Fingerprint {
    /// Reads that of a source.
    ///
    /// # Errors
    /// Those of the source, and when there is no thread.
    pub fn of(source: &dyn Source) -> Result<Self, SourceError> {
        let bytes = source.bytes();
        let last = bytes.saturating_sub(1) / PAGE;
        let read = |number: u64| {
            let offset = last * number / (PAGES - 1) * PAGE;
            let mut page = vec![0; PAGE.min(bytes - offset) as usize];
            source.read(offset, &mut page).map(|()| page)
        };
        let mut sum = Xxh3Default::new();
        std::thread::scope(|scope| {
            let reads: Vec<_> = (0..PAGES)
                .map(|number| {
                    let thread = std::thread::Builder::new();
                    thread.spawn_scoped(scope, move || read(number))
                })
                .collect();
            for read in reads {
                let read = read.and_then(|thread| {
                    let panicked = |_| io::Error::other("a read has panicked");
                    thread.join().map_err(panicked)
                });
                let failed = |why| SourceError::Failed {
                    what: source.identity(),
                    why,
                };
                sum.update(&read.map_err(failed)??);
            }
            Ok::<_, SourceError>(())
        })?;
        Ok(Self {
            bytes,
            sum: sum.digest(),
        })
    }
}

/// A file as it was when a restore began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

impl Stamp {
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let found = std::fs::metadata(path)?;
        Ok(Self {
            device: found.dev(),
            inode: found.ino(),
            bytes: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
        })
    }

    /// Whether a path leads to the same file, or to one that may be its copy.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        let same = |now: Self| (now.device, now.inode) == (self.device, self.inode);
        let copy = |now: Self| (now.bytes, now.modified) == (self.bytes, self.modified);
        Self::of(path).is_ok_and(|now| same(now) || copy(now))
    }
}
