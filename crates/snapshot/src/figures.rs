//! The parts of a snapshot, in numbers.

use crate::codec::Kind;
use crate::columns::Row;
use crate::header::HEADER_BYTES;

/// The chunks of a snapshot, counted. Each is in exactly one of the counts below `chunks`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Figures {
    /// All chunks.
    pub chunks: u64,
    /// All bytes are zero.
    pub zero: u64,
    /// Stored in a base.
    pub in_bases: u64,
    /// The same bytes as a chunk of this file before it: stored there.
    pub repeated: u64,
    /// Stored in this file as they are.
    pub raw: u64,
    /// Stored in this file, compressed by LZ4.
    pub lz4: u64,
    /// Stored in this file, compressed by zstd.
    pub zstd: u64,
    /// Pages of zeros that take the place of other pages of the base. Only a packer counts them.
    pub zeroed_pages: u64,
    /// Bytes of the chunks that are stored in this file.
    pub stored_bytes: u64,
    /// Bytes of the file.
    pub file_bytes: u64,
}

impl Figures {
    /// Counts the next row. Chunks are stored in the order of their first use.
    pub(crate) fn count(&mut self, row: &Row) {
        let end = HEADER_BYTES as u64 + self.stored_bytes;
        self.chunks += 1;
        let count = match row.kind {
            Kind::Zero => &mut self.zero,
            _ if row.file != 0 => &mut self.in_bases,
            _ if row.place < end => &mut self.repeated,
            Kind::Raw => &mut self.raw,
            Kind::Lz4 => &mut self.lz4,
            Kind::Zstd => &mut self.zstd,
        };
        *count += 1;
        if row.file == 0 && row.place >= end && row.kind != Kind::Zero {
            self.stored_bytes += u64::from(row.bytes);
        }
    }
}
