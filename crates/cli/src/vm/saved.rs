//! The description of a saved VM, in the file `state`: its memory, its disks, and its guest.
//!
//! The kind of the file `memory` (u8, 1: packed, 2: raw); the id of that file (16 bytes); the
//! number of disks that the guest may write (u8, 8 at most), and [`DiskMark::BYTES`] for each; then the
//! [`GuestDescription`](super::GuestDescription). So a state runs with no other memory and on no
//! other disk. The frames of `state` have checksums.

use super::disk::DiskMark;
use pageferry_devices::MmioBus;
use pageferry_snapshot::SnapshotId;

/// The files that belong to a state.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SavedFiles {
    /// Whether the memory is packed.
    pub(crate) is_packed: bool,
    /// The id of the packed memory, or the sum of the raw one.
    pub(crate) memory: SnapshotId,
    /// The disks that the guest may write, in their order.
    pub(crate) disks: Vec<DiskMark>,
}

impl SavedFiles {
    /// The bytes in front of the description of the guest.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![if self.is_packed { 1 } else { 2 }];
        bytes.extend(self.memory.0);
        bytes.push(self.disks.len() as u8);
        bytes.extend(self.disks.iter().flat_map(|disk| disk.to_bytes()));
        bytes
    }

    /// Decodes a description. What is left describes the guest.
    ///
    /// # Errors
    /// The words say what was wrong.
    pub(crate) fn decode(bytes: &[u8]) -> Result<(Self, &[u8]), String> {
        let Some(([kind, memory @ .., disks], rest)) = bytes.split_first_chunk::<18>() else {
            return Err(format!("its description has {} bytes only", bytes.len()));
        };
        let is_packed = match kind {
            1 | 2 => *kind == 1,
            _ => return Err(format!("its memory is of kind {kind}, expected 1 or 2")),
        };
        let count = usize::from(*disks);
        let (disks, guest) = rest
            .split_at_checked(count * DiskMark::BYTES)
            .filter(|_| count <= MmioBus::MOST)
            .ok_or_else(|| format!("it has {count} disks in {} bytes", rest.len()))?;
        let disks = disks.as_chunks().0.iter().map(DiskMark::decode).collect();
        let memory = SnapshotId(*memory);
        Ok((
            Self {
                is_packed,
                memory,
                disks,
            },
            guest,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Vec<u8> {
        let disk = (0..DiskMark::BYTES as u8).collect::<Vec<_>>();
        [
            &[1][..],
            &[7; 16],
            &[2],
            &disk,
            &[9; DiskMark::BYTES],
            b"guest",
        ]
        .concat()
    }

    #[test]
    fn a_description_survives_the_file() {
        let bytes = good();
        let (found, guest) = SavedFiles::decode(&bytes).unwrap();
        assert_eq!((found.is_packed, found.memory.0), (true, [7; 16]));
        assert_eq!((found.disks.len(), guest), (2, &b"guest"[..]));
        assert_eq!([&found.to_bytes(), guest].concat(), bytes);
    }

    #[test]
    fn foreign_descriptions_are_refused() {
        let refused = |bytes: &[u8], part: &str| {
            let why = SavedFiles::decode(bytes).expect_err(part);
            assert!(why.contains(part), "{why}");
        };
        for len in 0..18 {
            refused(&good()[..len], "bytes only");
        }
        for len in 18..18 + 2 * DiskMark::BYTES {
            refused(&good()[..len], "it has 2 disks in");
        }
        for kind in [0, 3, 255] {
            let mut bytes = good();
            bytes[0] = kind;
            refused(&bytes, "expected 1 or 2");
        }
        let mut bytes = good();
        bytes[17] = 9;
        bytes.resize(4096, 0);
        refused(&bytes, "it has 9 disks");
    }
}
