//! A packed snapshot: chunks that are checked and decompressed when they are read.
//!
//! **Mechanism.** The last chunks are kept: pages come one by one, and a chunk has many. The kernel
//! keeps the compressed bytes in its page cache besides.

use super::{InStore, Kept, READS, Source, SourceError, Store};
use pageferry_snapshot::{Blob, Fault, OpenError, Snapshot};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The reads of a damaged chunk: the bytes may have been damaged on their way.
const TRIES: u32 = 3;
/// The bytes of chunks that are kept.
const KEPT: u64 = 8 << 20;

/// A snapshot made by `pageferry snapshot pack`, with its bases beside it.
#[derive(Debug)]
pub struct PackedSource {
    snapshot: Snapshot,
    kept: Kept,
    reads: usize,
}

impl PackedSource {
    /// Opens a packed snapshot, and its bases in the same directory.
    ///
    /// # Errors
    /// [`SourceError::Damaged`], also for a file that is no snapshot, and for a base that is
    /// missing.
    pub fn open(path: &Path) -> Result<Self, SourceError> {
        Self::of(Snapshot::open(path), &path.display(), READS)
    }

    /// Opens a packed snapshot that lies in a store, and its bases beside it.
    pub(super) fn in_store(
        store: &dyn Store,
        address: &str,
        file: Arc<dyn Source>,
    ) -> Result<Self, SourceError> {
        let beside = address.rsplit_once('/').map_or("", |(beside, _)| beside);
        let mut tries = 1;
        loop {
            let mut opened = vec![file.clone()];
            let own = Arc::new(InStore(file.clone()));
            let snapshot = Snapshot::from_blob(own, Path::new(address), |name| {
                let name = name.to_str().ok_or(io::ErrorKind::InvalidFilename)?;
                let base = store.open(&format!("{beside}/{name}"));
                let base = base.map_err(|why| match why {
                    SourceError::Failed { why, .. } => why,
                    why => io::Error::other(why),
                })?;
                opened.push(base.clone());
                Ok(Arc::new(InStore(base)) as Arc<dyn Blob>)
            });
            match &snapshot {
                Err(why) if tries < TRIES && !matches!(why, OpenError::Io { .. }) => {
                    tries += 1;
                    for file in opened {
                        file.forget(0, file.bytes());
                    }
                }
                _ => return Self::of(snapshot, &address, file.reads()),
            }
        }
    }

    fn of(
        opened: Result<Snapshot, OpenError>,
        what: &dyn std::fmt::Display,
        reads: usize,
    ) -> Result<Self, SourceError> {
        let snapshot = opened.map_err(|why| SourceError::Damaged {
            what: what.to_string(),
            why: why.to_string(),
        })?;
        let kept = Kept::new(snapshot.chunk_bytes().into(), KEPT);
        Ok(Self {
            snapshot,
            kept,
            reads,
        })
    }

    fn chunk(&self, index: u64) -> Result<Arc<[u8]>, SourceError> {
        let mut bytes = vec![0; self.snapshot.chunk_len(index)];
        let mut read = self.snapshot.read_chunk(index, &mut bytes);
        for _ in 1..TRIES {
            if matches!(&read, Err(why) if !matches!(why.fault, Fault::Io(_))) {
                read = self.snapshot.read_chunk(index, &mut bytes);
            }
        }
        read.map_err(|error| {
            let what = self.snapshot.path().display().to_string();
            match error.fault {
                Fault::Io(why) => SourceError::Failed { what, why },
                _ => SourceError::Damaged {
                    what,
                    why: error.to_string(),
                },
            }
        })?;
        Ok(bytes.into())
    }
}

impl Source for PackedSource {
    fn bytes(&self) -> u64 {
        self.snapshot.len()
    }

    fn block(&self) -> u64 {
        u64::from(self.snapshot.chunk_bytes())
    }

    fn reads(&self) -> usize {
        self.reads
    }

    fn is_zero(&self, offset: u64, len: u64) -> bool {
        // A damaged index is an error of the read that follows.
        self.snapshot.is_zero(offset..offset + len).unwrap_or(false)
    }

    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, SourceError> {
        Ok(self.kept.read_now(offset, buffer, |_| None))
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        let end = offset + buffer.len() as u64;
        let chunks = |run: Range<u64>| run.map(|index| self.chunk(index)).collect();
        if self.kept.read(offset, buffer, chunks)? {
            return Ok(());
        }
        Err(SourceError::Short {
            what: self.snapshot.path().display().to_string(),
            end,
        })
    }

    fn identity(&self) -> String {
        format!("packed snapshot {}", self.snapshot.id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_snapshot::{Input, Options, pack};
    use std::fs::File;
    use std::ops::ControlFlow;

    #[test]
    fn a_packed_snapshot_reads_as_the_memory_that_was_packed() {
        let path = std::env::temp_dir().join(format!("pageferry-packed-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        // 10 chunks of which one is zero, and the last one is short.
        let mut memory: Vec<u8> = (0..(9 << 16) + 4096)
            .map(|at| (at / 4096) as u8 | 1)
            .collect();
        memory[1 << 16..2 << 16].fill(0);
        std::fs::write(path.join("memory"), &memory).unwrap();
        let file = File::open(path.join("memory")).unwrap();
        let packed = path.join("packed");
        let on = &mut |_, _| ControlFlow::Continue(());
        pack(Input::File(&file), &packed, Options::default(), on).unwrap();

        let source = PackedSource::open(&packed).unwrap();
        assert_eq!(source.bytes(), memory.len() as u64);
        assert!(source.is_zero(1 << 16, 1 << 16) && !source.is_zero(0, 1 << 17));
        let mut buffer = vec![1; 3 << 16];
        assert!(!source.read_now(4096, &mut buffer).unwrap());
        source.read(4096, &mut buffer).unwrap();
        assert_eq!(buffer, memory[4096..4096 + (3 << 16)]);
        buffer.fill(0);
        assert!(
            source.read_now(4096, &mut buffer).unwrap(),
            "the chunks are kept"
        );
        assert_eq!(buffer, memory[4096..4096 + (3 << 16)]);
        let mut end = [0; 8192];
        assert!(source.read(9 << 16, &mut end).is_err(), "behind the end");
        source.read((9 << 16) - 4096, &mut end).unwrap();
        assert_eq!(end, memory[(9 << 16) - 4096..]);
        assert!(PackedSource::open(&path.join("memory")).is_err());
        std::fs::remove_dir_all(path).unwrap();
    }
}
