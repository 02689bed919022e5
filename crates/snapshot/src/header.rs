//! The first bytes of a file, and the sizes of everything behind them.
//!
//! **Guarantee.** A decoded header has the checksum that it says, and all its fields are within
//! their bounds. So no length that follows from it overflows.
//!
//! **Mechanism.** [`Layout`] is the header byte by byte. [`Geometry`] divides memory into chunks,
//! and the index into blocks of rows.

use crate::error::OpenError;
use std::fmt;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_128;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A page: the unit in which the index tells data from holes.
pub const PAGE_BYTES: u64 = 4096;
/// The most memory of a snapshot: 16 TiB.
pub const MAX_MEMORY_BYTES: u64 = 16 << 40;

pub(crate) const MAGIC: [u8; 8] = *b"PGFSNAP\0";
pub(crate) const VERSION: u16 = 1;
pub(crate) const HEADER_BYTES: usize = size_of::<Layout>();
/// The smallest and the largest chunk, as powers of two.
pub(crate) const CHUNK_SHIFTS: std::ops::RangeInclusive<u8> = 12..=20;
/// The most chunks. The checksums of an index have 14 MiB then.
const MAX_CHUNKS: u64 = 1 << 28;
/// The most files below a diff. Each is open, and a process may often have 1024 descriptors.
pub(crate) const MAX_BASES: usize = 256;
pub(crate) const MAX_STATES: usize = 64;
/// The most bytes of one state file.
pub(crate) const MAX_STATE_BYTES: u64 = 16 << 20;
/// The most bytes of details beside the checksums: bases, labels and states at their largest.
pub(crate) const MAX_NAMES_BYTES: u64 =
    (MAX_BASES * (16 + 1 + 255) + 3 * (2 + 256) + MAX_STATES * (1 + 64 + 4 + 8)) as u64;

/// The name of a snapshot's contents.
///
/// It is the XXH3-128 of the header, which holds the checksum of the details, and so on down to the
/// chunks. Two files with the same id hold the same snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SnapshotId(pub [u8; 16]);

impl fmt::Display for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for SnapshotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The header's bytes.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    magic: [u8; 8],
    version: U16,
    chunk_shift: u8,
    codecs: u8,
    bases: U16,
    states: U16,
    memory_bytes: U64,
    data_bytes: U64,
    state_bytes: U64,
    details_bytes: U32,
    reserved: U32,
    details_sum: U64,
    id: [u8; 16],
}

const _: () = assert!(HEADER_BYTES == 72);

/// The bytes before the id, which it covers.
const COVERED: usize = HEADER_BYTES - 16;

/// How memory is divided into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// A positive multiple of a page, at most [`MAX_MEMORY_BYTES`].
    pub(crate) memory_bytes: u64,
    /// A power of two: 4 KiB to 1 MiB.
    pub(crate) chunk_bytes: u32,
}

impl Geometry {
    /// Rows of the index whose checksums are one.
    pub(crate) const BLOCK: u64 = 1024;

    /// # Errors
    /// The name and the value of the field that is out of bounds.
    pub(crate) fn new(memory_bytes: u64, chunk_bytes: u32) -> Result<Self, (&'static str, u64)> {
        let shift = chunk_bytes.trailing_zeros() as u8;
        if !chunk_bytes.is_power_of_two() || !CHUNK_SHIFTS.contains(&shift) {
            return Err(("size of chunks", chunk_bytes.into()));
        }
        let new = Self {
            memory_bytes,
            chunk_bytes,
        };
        let is_possible = (1..=MAX_MEMORY_BYTES).contains(&memory_bytes)
            && memory_bytes.is_multiple_of(PAGE_BYTES)
            && new.chunks() <= MAX_CHUNKS;
        is_possible
            .then_some(new)
            .ok_or(("length of memory", memory_bytes))
    }

    pub(crate) fn chunks(&self) -> u64 {
        self.memory_bytes.div_ceil(self.chunk_bytes.into())
    }

    pub(crate) fn offset(&self, chunk: u64) -> u64 {
        chunk * u64::from(self.chunk_bytes)
    }

    /// The length of a chunk: the last may be shorter.
    pub(crate) fn chunk_len(&self, chunk: u64) -> usize {
        let rest = self.memory_bytes - self.offset(chunk);
        rest.min(self.chunk_bytes.into()) as usize
    }

    /// Bytes of a row's bitmap of pages.
    pub(crate) fn map_bytes(&self) -> usize {
        (u64::from(self.chunk_bytes) / PAGE_BYTES).div_ceil(8) as usize
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.chunks().div_ceil(Self::BLOCK)
    }

    /// The number of rows of a block.
    pub(crate) fn rows(&self, block: u64) -> u64 {
        (self.chunks() - block * Self::BLOCK).min(Self::BLOCK)
    }
}

/// A header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) geometry: Geometry,
    /// Bit 0: some chunk is compressed by LZ4. Bit 1: by zstd.
    pub(crate) codecs: u8,
    pub(crate) bases: usize,
    pub(crate) states: usize,
    pub(crate) data_bytes: u64,
    pub(crate) state_bytes: u64,
    pub(crate) details_bytes: u64,
    pub(crate) details_sum: u64,
}

impl Header {
    /// The end of the chunks in the file.
    pub(crate) fn data_end(&self) -> u64 {
        HEADER_BYTES as u64 + self.data_bytes
    }

    /// The place of the index.
    pub(crate) fn index_start(&self) -> u64 {
        self.data_end() + self.state_bytes
    }

    pub(crate) fn details_start(&self) -> u64 {
        self.index_start() + crate::columns::bytes(&self.geometry)
    }

    pub(crate) fn file_bytes(&self) -> u64 {
        self.details_start() + self.details_bytes
    }

    pub(crate) fn encode(&self) -> ([u8; HEADER_BYTES], SnapshotId) {
        let mut layout = Layout {
            magic: MAGIC,
            version: VERSION.into(),
            chunk_shift: self.geometry.chunk_bytes.trailing_zeros() as u8,
            codecs: self.codecs,
            bases: (self.bases as u16).into(),
            states: (self.states as u16).into(),
            memory_bytes: self.geometry.memory_bytes.into(),
            data_bytes: self.data_bytes.into(),
            state_bytes: self.state_bytes.into(),
            details_bytes: (self.details_bytes as u32).into(),
            reserved: 0.into(),
            details_sum: self.details_sum.into(),
            id: [0; 16],
        };
        layout.id = xxh3_128(&layout.as_bytes()[..COVERED]).to_le_bytes();
        let id = SnapshotId(layout.id);
        (zerocopy::transmute!(layout), id)
    }

    /// # Errors
    /// When these are not the first bytes of a snapshot of this version, are damaged, or have a
    /// field out of bounds. The error names `file`.
    pub(crate) fn decode(bytes: &[u8], file: &Path) -> Result<(Self, SnapshotId), OpenError> {
        let file = || file.to_owned();
        let seen = bytes.len().min(MAGIC.len());
        if bytes[..seen] != MAGIC[..seen] || bytes.is_empty() {
            return Err(OpenError::NotASnapshot { file: file() });
        }
        let Ok((layout, _)) = Layout::ref_from_prefix(bytes) else {
            return Err(OpenError::Truncated {
                file: file(),
                expected: HEADER_BYTES as u64,
                found: bytes.len() as u64,
            });
        };
        if layout.version.get() != VERSION {
            return Err(OpenError::Version {
                file: file(),
                found: layout.version.get(),
            });
        }
        if xxh3_128(&bytes[..COVERED]).to_le_bytes() != layout.id {
            return Err(OpenError::Header { file: file() });
        }
        let bounds = |(field, value): (&'static str, u64)| OpenError::Bounds {
            file: file(),
            field,
            value,
        };
        let shift = layout.chunk_shift;
        if !CHUNK_SHIFTS.contains(&shift) {
            return Err(bounds(("size of chunks", shift.into())));
        }
        let geometry = Geometry::new(layout.memory_bytes.get(), 1 << shift).map_err(bounds)?;
        let header = Self {
            geometry,
            codecs: layout.codecs,
            bases: layout.bases.get().into(),
            states: layout.states.get().into(),
            data_bytes: layout.data_bytes.get(),
            state_bytes: layout.state_bytes.get(),
            details_bytes: layout.details_bytes.get().into(),
            details_sum: layout.details_sum.get(),
        };
        let sums = crate::columns::sums_bytes(&geometry);
        for (field, value, allowed) in [
            ("set of codecs", layout.codecs.into(), 0..=3),
            ("reserved field", layout.reserved.get().into(), 0..=0),
            ("number of bases", header.bases as u64, 0..=MAX_BASES as u64),
            (
                "number of states",
                header.states as u64,
                0..=MAX_STATES as u64,
            ),
            // A chunk is never stored in more bytes than it has, nor twice.
            (
                "length of data",
                header.data_bytes,
                0..=geometry.memory_bytes,
            ),
            (
                "length of states",
                header.state_bytes,
                0..=header.states as u64 * MAX_STATE_BYTES,
            ),
            (
                "length of details",
                header.details_bytes,
                sums..=sums + MAX_NAMES_BYTES,
            ),
        ] {
            if !allowed.contains(&value) {
                return Err(bounds((field, value)));
            }
        }
        Ok((header, SnapshotId(layout.id)))
    }
}
