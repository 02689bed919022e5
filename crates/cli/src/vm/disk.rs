//! The mark of a disk that tells a saved VM whether the disk has changed since.
//!
//! **Guarantee.** A disk that a guest of Pageferry has written since the save is found, where files
//! keep extended attributes. Others are found if a sampled block differs. Times alone refuse none:
//! a copy has other times.
//!
//! **Mechanism.** A save keeps a [`DiskMark`] of each disk that its guest may write: the run that
//! wrote it last, its times, and a sum of 512 blocks. If the times are the same, nobody wrote it.

use crate::exit::{Exit, Failure};
use pageferry_devices::Block;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// The blocks of a sample, and their bytes. A smaller disk is read whole.
const SPOTS: u64 = 512;
const SPOT: u64 = 64 << 10;

/// A disk that its guest may write.
pub(crate) struct Disk {
    path: PathBuf,
    file: File,
    bytes: u64,
}

/// The knowledge that a save has of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskMark {
    bytes: u64,
    /// Of the last change of its bytes, and of its inode: seconds and nanoseconds. Zeros if times
    /// say nothing.
    times: [i64; 4],
    /// Of the last run that wrote it, or zeros.
    writer: [u8; 16],
    sum: [u8; 16],
}

impl Disk {
    pub(crate) fn new(path: &Path, block: &Block) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            file: block.file().try_clone()?,
            bytes: block.bytes(),
        })
    }

    /// The mark of the disk as it is, which nobody may write meanwhile.
    ///
    /// # Errors
    /// [`Exit::Internal`] if it cannot be read.
    pub(crate) fn mark(&self) -> Result<DiskMark, Failure> {
        let mark = || -> io::Result<DiskMark> {
            Ok(DiskMark {
                bytes: self.bytes,
                times: self.times()?,
                writer: Block::writer(&self.file),
                sum: self.sum()?,
            })
        };
        mark().map_err(|why| Failure::os(self.unreadable(), why))
    }

    /// Checks that the disk is as `saved`.
    ///
    /// # Errors
    /// [`Exit::Refused`] if it has changed.
    pub(crate) fn check(&self, saved: &DiskMark) -> Result<(), Failure> {
        let changed = || -> io::Result<Option<&str>> {
            if self.bytes != saved.bytes {
                return Ok(Some("it has another size"));
            }
            let writer = Block::writer(&self.file);
            // A copy may have lost it.
            if writer != [0; 16] && writer != saved.writer {
                return Ok(Some("a guest has written it"));
            }
            if self.times()? == saved.times && saved.times != [0; 4] {
                return Ok(None);
            }
            Ok((self.sum()? != saved.sum).then_some("it has other bytes"))
        };
        match changed().map_err(|why| Failure::os(self.unreadable(), why))? {
            None => Ok(()),
            Some(why) => Err(Failure::new(
                Exit::Refused,
                format!(
                    "the disk {} has changed since the VM was saved: {why}. The guest may destroy \
                     its file systems: give each restore a copy of its own, made when the VM was \
                     saved, or start it by --changed-disk",
                    self.path.display()
                ),
            )),
        }
    }

    fn unreadable(&self) -> String {
        format!("cannot read the disk {}", self.path.display())
    }

    fn times(&self) -> io::Result<[i64; 4]> {
        let found = self.file.metadata()?;
        Ok(match found.is_file() {
            true => [
                found.mtime(),
                found.mtime_nsec(),
                found.ctime(),
                found.ctime_nsec(),
            ],
            // A block device has those of its name.
            false => [0; 4],
        })
    }

    fn sum(&self) -> io::Result<[u8; 16]> {
        let mut sum = Xxh3::new();
        let mut spot = vec![0; SPOT as usize];
        let blocks = self.bytes.div_ceil(SPOT);
        let spots = blocks.min(SPOTS);
        for number in 0..spots {
            // From the first block to the last, at equal distances.
            let at = number * (blocks - 1) / (spots - 1).max(1) * SPOT;
            let part = &mut spot[..(self.bytes - at).min(SPOT) as usize];
            self.file.read_exact_at(part, at)?;
            sum.update(part);
        }
        Ok(sum.digest128().to_le_bytes())
    }
}

impl DiskMark {
    /// The length of [`Self::to_bytes`].
    pub(super) const BYTES: usize = 72;

    /// Size, times, writer and sum. Numbers are little-endian.
    pub(super) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = self.bytes.to_le_bytes().to_vec();
        bytes.extend(self.times.iter().flat_map(|time| time.to_le_bytes()));
        bytes.extend(self.writer);
        bytes.extend(self.sum);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| *bytes[at..].first_chunk().expect("it has 72 bytes");
        let half = |at: usize| *bytes[at..].first_chunk().expect("it has 72 bytes");
        Self {
            bytes: u64::from_le_bytes(word(0)),
            times: [8, 16, 24, 32].map(|at| i64::from_le_bytes(word(at))),
            writer: half(40),
            sum: half(56),
        }
    }
}
