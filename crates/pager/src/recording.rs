//! Recordings: the pages of a snapshot in the order in which a VM touched them first.
//!
//! **Guarantee.** A recording that was damaged or is of another snapshot is refused. It costs at
//! most 4 bytes a page of the snapshot, and this room is there before the VM starts.
//!
//! **Mechanism.** The file is 8 bytes of magic, the fingerprint of the snapshot (its length and its
//! sum, 8 bytes each, zeros if it is not known), the number of pages (4 bytes), the pages in order
//! (4 bytes each: the place in the memory file, in units of 4 KiB), and an xxh3 checksum of all
//! before it (8 bytes), all little-endian. Version 1 had no fingerprint. Merging keeps the order of
//! the first recording, and puts what others touched behind it.

use crate::fingerprint::Fingerprint;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"PFWORK\x02\0";
const FORMER: &[u8; 8] = b"PFWORK\x01\0";
/// The bytes besides pages.
const FRAME: u64 = 36;
/// The unit of places in the memory file.
const UNIT: u64 = 4096;
/// The most pages: 1 TiB.
const MAX_PAGES: usize = 1 << 28;

/// The pages of a snapshot in the order of first touches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
    snapshot: Option<Fingerprint>,
    pages: Vec<u32>,
}

/// The refusal of a recording.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// A system call failed.
    #[error("{}: {why}", path.display())]
    Failed {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: io::Error,
    },
    /// The bytes are no recording.
    #[error("{} is no recording of a working set: {why}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The fault.
        why: &'static str,
    },
    /// It is of another snapshot.
    #[error(
        "{} is a recording of another snapshot: of {} bytes with the sum {:016x}, and this one has \
         {} bytes and {:016x}", path.display(), recorded.bytes, recorded.sum, found.bytes, found.sum
    )]
    Other {
        /// The file.
        path: PathBuf,
        /// The snapshot of the recording.
        recorded: Fingerprint,
        /// The snapshot at hand.
        found: Fingerprint,
    },
}

impl Recording {
    /// A recording of places in the memory file, in bytes. Only the first of equal places counts.
    ///
    /// ```
    /// use pageferry_pager::Recording;
    ///
    /// let recording = Recording::of([8192, 0, 8192]);
    /// assert_eq!(recording.offsets().collect::<Vec<_>>(), [8192, 0]);
    /// ```
    #[must_use]
    pub fn of(offsets: impl IntoIterator<Item = u64>) -> Self {
        let mut seen = HashSet::new();
        let pages = offsets
            .into_iter()
            .filter_map(|offset| u32::try_from(offset / UNIT).ok())
            .filter(|page| seen.insert(*page))
            .take(MAX_PAGES)
            .collect();
        Self {
            snapshot: None,
            pages,
        }
    }

    /// The same as a recording of this snapshot.
    #[must_use]
    pub fn about(mut self, snapshot: Option<Fingerprint>) -> Self {
        self.snapshot = snapshot;
        self
    }

    /// The snapshot, if it is known.
    #[must_use]
    pub fn snapshot(&self) -> Option<Fingerprint> {
        self.snapshot
    }

    /// The places in the memory file in order, in bytes, multiples of 4096.
    pub fn offsets(&self) -> impl Iterator<Item = u64> {
        self.pages.iter().map(|page| u64::from(*page) * UNIT)
    }

    /// The number of places.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether nothing was touched.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Puts the places of `other` that are not here behind those that are. `None` if they are of
    /// different snapshots.
    #[must_use]
    pub fn merged(self, other: &Self) -> Option<Self> {
        let snapshot = match (self.snapshot, other.snapshot) {
            (Some(own), Some(other)) if own != other => return None,
            // A recording of an unknown snapshot makes the whole unknown, but for an empty one.
            (Some(_), None) if !other.is_empty() => None,
            (None, _) if !self.is_empty() => None,
            (own, other) => own.or(other),
        };
        let own = self.offsets().collect::<Vec<_>>();
        let all = own.into_iter().chain(other.offsets());
        Some(Self::of(all).about(snapshot))
    }

    /// The file's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FRAME as usize + 4 * self.pages.len());
        bytes.extend_from_slice(MAGIC);
        let snapshot = self.snapshot.unwrap_or(Fingerprint { bytes: 0, sum: 0 });
        bytes.extend_from_slice(&snapshot.bytes.to_le_bytes());
        bytes.extend_from_slice(&snapshot.sum.to_le_bytes());
        bytes.extend_from_slice(&(self.pages.len() as u32).to_le_bytes());
        for page in &self.pages {
            bytes.extend_from_slice(&page.to_le_bytes());
        }
        let sum = xxh3_64(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads the bytes of a file.
    ///
    /// # Errors
    /// The fault.
    pub fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let (text, sum) = bytes.split_last_chunk::<8>().ok_or("it is too short")?;
        let (snapshot, rest) = match text.strip_prefix(FORMER) {
            Some(rest) => (None, rest),
            None => {
                let rest = text.strip_prefix(MAGIC).ok_or("it does not begin as one")?;
                let (fields, rest) = rest.split_at_checked(16).ok_or("it is too short")?;
                let (words, _) = fields.as_chunks::<8>();
                let [bytes, sum] = [words[0], words[1]].map(u64::from_le_bytes);
                ((bytes > 0).then_some(Fingerprint { bytes, sum }), rest)
            }
        };
        let (count, rest) = rest.split_first_chunk::<4>().ok_or("it is too short")?;
        if u64::from_le_bytes(*sum) != xxh3_64(text) {
            return Err("its checksum is wrong");
        }
        let (pages, odd) = rest.as_chunks::<4>();
        if pages.len() != u32::from_le_bytes(*count) as usize || !odd.is_empty() {
            return Err("its length is wrong");
        }
        let offsets = pages
            .iter()
            .map(|page| u64::from(u32::from_le_bytes(*page)) * UNIT);
        let recording = Self::of(offsets);
        if recording.len() != pages.len() {
            return Err("it has a page twice");
        }
        Ok(recording.about(snapshot))
    }

    /// Reads a recording.
    ///
    /// # Errors
    /// [`RecordingError`].
    pub fn load(path: &Path) -> Result<Self, RecordingError> {
        let failed = |why| RecordingError::Failed {
            path: path.to_owned(),
            why,
        };
        let most = FRAME + 4 * MAX_PAGES as u64;
        let mut bytes = Vec::new();
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32)
            .open(path)
            .map_err(failed)?;
        file.take(most + 1)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        Self::decode(&bytes).map_err(|why| RecordingError::Invalid {
            path: path.to_owned(),
            why,
        })
    }

    /// Reads the recording of a snapshot, whose fingerprint it must have if both are known.
    ///
    /// # Errors
    /// [`RecordingError`].
    pub fn load_of(path: &Path, found: Option<Fingerprint>) -> Result<Self, RecordingError> {
        let recording = Self::load(path)?;
        match (recording.snapshot, found) {
            (Some(recorded), Some(found)) if recorded != found => Err(RecordingError::Other {
                path: path.to_owned(),
                recorded,
                found,
            }),
            (Some(_), _) => Ok(recording),
            (None, _) => {
                let path = path.display();
                tracing::warn!("{path} does not say of which snapshot it is: record it again");
                Ok(recording)
            }
        }
    }

    /// Writes a recording: the file is the old or the new one whole.
    ///
    /// # Errors
    /// [`RecordingError::Failed`].
    pub fn save(&self, path: &Path) -> Result<(), RecordingError> {
        let fresh = fresh(path);
        let bytes = self.encode();
        let written = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&fresh)
            .and_then(|mut file| {
                file.write_all(&bytes)?;
                file.set_len(bytes.len() as u64)
            })
            .and_then(|()| std::fs::rename(&fresh, path));
        written.map_err(|why| {
            let _ = std::fs::remove_file(&fresh);
            RecordingError::Failed {
                path: path.to_owned(),
                why,
            }
        })
    }
}

/// The file in which a recording will be written, with room for it. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct Room(PathBuf);

impl Room {
    /// Makes room for a recording of a snapshot of `bytes` bytes.
    ///
    /// # Errors
    /// [`RecordingError::Failed`].
    pub(crate) fn reserve(path: &Path, bytes: u64) -> Result<Self, RecordingError> {
        let most = FRAME + bytes.div_ceil(UNIT) * 4;
        let reserved = match path.is_dir() {
            true => Err(io::ErrorKind::IsADirectory.into()),
            false => File::create(fresh(path)),
        };
        let reserved = reserved.and_then(|file| {
            let room = Self(fresh(path));
            match fallocate(file, FallocateFlags::empty(), 0, most) {
                // A file system that keeps no room says at the end whether there is some.
                Ok(()) | Err(Errno::OPNOTSUPP) => Ok(room),
                Err(errno) => Err(errno.into()),
            }
        });
        reserved.map_err(|why| RecordingError::Failed {
            path: path.to_owned(),
            why,
        })
    }

    /// The room that a killed pager has left.
    pub(crate) fn of(path: &Path) -> Self {
        Self(fresh(path))
    }

    /// Leaves it to [`Recording::save`].
    pub(crate) fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The file that becomes the one at `path`.
fn fresh(path: &Path) -> PathBuf {
    let mut fresh = OsString::from(path);
    fresh.push(".new");
    fresh.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_changed_bit_is_found() {
        let snapshot = Fingerprint {
            bytes: 2 << 30,
            sum: 7,
        };
        let recording = Recording::of([0, 8192, 4096, 1 << 30]).about(Some(snapshot));
        let bytes = recording.encode();
        assert_eq!(Recording::decode(&bytes), Ok(recording));
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(Recording::decode(&changed).is_err(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(Recording::decode(&bytes[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn a_recording_of_the_former_version_has_no_snapshot() {
        let mut bytes = FORMER.to_vec();
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend(5_u32.to_le_bytes());
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        assert_eq!(Recording::decode(&bytes), Ok(Recording::of([5 * UNIT])));
    }

    #[test]
    fn recordings_of_different_snapshots_are_not_merged() {
        let of = |bytes| Recording::of([0]).about(bytes);
        let snapshot = |bytes| Some(Fingerprint { bytes, sum: 7 });
        let (first, other) = (of(snapshot(4096)), of(snapshot(8192)));
        assert_eq!(first.clone().merged(&other), None);
        let merged = Recording::default().merged(&first).unwrap();
        assert_eq!(merged.merged(&first), Some(first.clone()));
        assert_eq!(first.merged(&of(None)), Some(of(None)));
    }

    proptest! {
        #[test]
        fn merging_keeps_the_first_order(a in prop::collection::vec(0..50_u64, 0..20), b in prop::collection::vec(0..50_u64, 0..20)) {
            let of = |pages: &[u64]| Recording::of(pages.iter().map(|page| page * UNIT));
            let merged = of(&a).merged(&of(&b)).unwrap();
            let mut model: Vec<u64> = Vec::new();
            for page in a.iter().chain(&b) {
                if !model.contains(page) { model.push(*page); }
            }
            let found: Vec<u64> = merged.offsets().map(|offset| offset / UNIT).collect();
            prop_assert_eq!(found, model);
        }
    }
}
