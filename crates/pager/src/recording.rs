//! Recordings: the pages of a snapshot in the order in which a VM touched them first.
//!
//! **Guarantee.** A recording that was damaged or is of another size is refused. It costs at most
//! 4 bytes a page of the snapshot.
//!
//! **Mechanism.** The file is 8 bytes of magic, the number of pages (4 bytes), the pages in order
//! (4 bytes each: the place in the memory file, in units of 4 KiB), and an xxh3 checksum of all
//! before it (8 bytes), all little-endian. Merging keeps the order of the first recording, and puts
//! what others touched behind it.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"PFWORK\x01\0";
/// The unit of places in the memory file.
const UNIT: u64 = 4096;
/// The most pages: 1 TiB.
const MAX_PAGES: usize = 1 << 28;

/// The pages of a snapshot in the order of first touches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recording {
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
        Self { pages }
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

    /// Puts the places of `other` that are not here behind those that are.
    #[must_use]
    pub fn merged(self, other: &Self) -> Self {
        let own = self.offsets().collect::<Vec<_>>();
        Self::of(own.into_iter().chain(other.offsets()))
    }

    /// The file's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(20 + 4 * self.pages.len());
        bytes.extend_from_slice(MAGIC);
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
        let rest = text.strip_prefix(MAGIC).ok_or("it does not begin as one")?;
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
        Ok(recording)
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
        let most = 20 + 4 * MAX_PAGES as u64;
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

    /// Writes a recording: the file is the old or the new one whole.
    ///
    /// # Errors
    /// [`RecordingError::Failed`].
    pub fn save(&self, path: &Path) -> Result<(), RecordingError> {
        let mut fresh = path.as_os_str().to_owned();
        fresh.push(".new");
        let written = File::create(&fresh)
            .and_then(|mut file| file.write_all(&self.encode()))
            .and_then(|()| std::fs::rename(&fresh, path));
        written.map_err(|why| RecordingError::Failed {
            path: path.to_owned(),
            why,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_changed_bit_is_found() {
        let recording = Recording::of([0, 8192, 4096, 1 << 30]);
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

    proptest! {
        #[test]
        fn merging_keeps_the_first_order(a in prop::collection::vec(0..50_u64, 0..20), b in prop::collection::vec(0..50_u64, 0..20)) {
            let of = |pages: &[u64]| Recording::of(pages.iter().map(|page| page * UNIT));
            let merged = of(&a).merged(&of(&b));
            let mut model: Vec<u64> = Vec::new();
            for page in a.iter().chain(&b) {
                if !model.contains(page) { model.push(*page); }
            }
            let found: Vec<u64> = merged.offsets().map(|offset| offset / UNIT).collect();
            prop_assert_eq!(found, model);
        }
    }
}
