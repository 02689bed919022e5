//! The mark of a snapshot that tells it from another one, wherever it lies.

use crate::source::{Source, SourceError};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3Default;

/// The pages that are read, all at once unless they are at hand.
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
        let failed = |why| SourceError::Failed {
            what: source.identity(),
            why,
        };
        let mut sum = Xxh3Default::new();
        std::thread::scope(|scope| {
            let mut reads = Vec::new();
            for number in 0..PAGES {
                let offset = last * number / (PAGES - 1) * PAGE;
                let mut page = vec![0; PAGE.min(bytes - offset) as usize];
                reads.push(if source.read_now(offset, &mut page)? {
                    Ok(page)
                } else {
                    let read = move || source.read(offset, &mut page).map(|()| page);
                    let thread = std::thread::Builder::new().spawn_scoped(scope, read);
                    Err(thread.map_err(failed)?)
                });
            }
            for read in reads {
                let panicked = |_| Err(failed(io::Error::other("a read has panicked")));
                let page = read.or_else(|thread| thread.join().unwrap_or_else(panicked))?;
                sum.update(&page);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::FileSource;

    #[test]
    fn copies_have_one_fingerprint_and_others_have_not() {
        let path = std::env::temp_dir().join(format!("pageferry-print-{}", std::process::id()));
        let of = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            Fingerprint::of(&FileSource::open(&path).unwrap()).unwrap()
        };
        // Shorter than a page, and with a part of one.
        for bytes in [1, 4096, 4097, 64 << 10, (1 << 20) + 7] {
            let memory = vec![7; bytes];
            let found = of(&memory);
            assert_eq!((found.bytes, found), (bytes as u64, of(&memory)));
            assert_ne!(found, of(&vec![7; bytes + 1]));
            for changed in [0, bytes - 1] {
                let mut other = memory.clone();
                other[changed] = 8;
                assert_ne!(found, of(&other), "byte {changed} of {bytes}");
            }
        }
        std::fs::remove_file(path).unwrap();
    }
}
