//! The errors: what was wrong, in which file, and what would be right.

use crate::header::{HEADER_BYTES, MAX_MEMORY_BYTES, SnapshotId, VERSION};
use std::io;
use std::path::PathBuf;

/// The failure to open a snapshot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The host refused to open or read the file.
    #[error("cannot read {}: {why}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The reason.
        why: io::Error,
    },
    /// The file does not begin as a snapshot does.
    #[error("{} is not a packed snapshot: `pageferry snapshot pack` makes one", file.display())]
    NotASnapshot {
        /// The file.
        file: PathBuf,
    },
    /// The file has another version of the format.
    #[error("{} has version {found} of the format: expected {VERSION}", file.display())]
    Version {
        /// The file.
        file: PathBuf,
        /// Its version.
        found: u16,
    },
    /// The header's checksum is wrong.
    #[error("{}: the header is damaged: its checksum is wrong (bytes 0 to {})", file.display(), HEADER_BYTES - 1)]
    Header {
        /// The file.
        file: PathBuf,
    },
    /// A field of the header has a value that no packer writes.
    #[error("{}: the {field} in the header is out of bounds: {value}", file.display())]
    Bounds {
        /// The file.
        file: PathBuf,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The file has another length than its header says.
    #[error("{} is truncated or grown: it has {found} bytes, expected {expected}", file.display())]
    Truncated {
        /// The file.
        file: PathBuf,
        /// The length that the header says.
        expected: u64,
        /// The length of the file.
        found: u64,
    },
    /// The details behind the index are damaged.
    #[error("{}: the details behind the index are damaged: {why}", file.display())]
    Details {
        /// The file.
        file: PathBuf,
        /// The fault.
        why: &'static str,
    },
    /// A base is in none of the directories.
    #[error("the base {id} is missing: {} needs it, and it was not found as '{name}' nor under another name in {directories}", file.display())]
    BaseMissing {
        /// The snapshot that needs it.
        file: PathBuf,
        /// The id of the base.
        id: SnapshotId,
        /// The name that it had.
        name: String,
        /// The directories, in words.
        directories: String,
    },
    /// The file that has the name of a base is another snapshot.
    #[error("{} is not the base of {}: its id is {found}, expected {expected}", base.display(), file.display())]
    BaseWrong {
        /// The snapshot that needs the base.
        file: PathBuf,
        /// The file with its name.
        base: PathBuf,
        /// The id of that file.
        found: SnapshotId,
        /// The id that is needed.
        expected: SnapshotId,
    },
    /// This build has no decoder.
    #[error("{} has chunks compressed by zstd, and this build has no zstd: build it with the feature zstd", file.display())]
    NoZstd {
        /// The file.
        file: PathBuf,
    },
}

impl OpenError {
    /// Whether the file is damaged, rather than missing, unreadable or another one.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            Self::Header { .. }
                | Self::Bounds { .. }
                | Self::Truncated { .. }
                | Self::Details { .. }
        )
    }
}

/// A chunk that cannot be had.
#[derive(Debug, thiserror::Error)]
#[error("chunk {chunk} (memory offset {offset:#x}) in {}: {fault}", file.display())]
pub struct ChunkError {
    /// Its number, from 0.
    pub chunk: u64,
    /// Its first byte in memory.
    pub offset: u64,
    /// The file that holds it, or whose index does.
    pub file: PathBuf,
    /// The fault.
    pub fault: Fault,
}

/// The fault of a chunk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The memory has fewer chunks.
    #[error("there is no such chunk: the memory ends before it")]
    OutOfRange,
    /// The host refused to read it.
    #[error("cannot read it: {0}")]
    Io(io::Error),
    /// The file has become shorter.
    #[error("the file ends within it: it is truncated")]
    Truncated,
    /// The checksum of its part of the index is wrong.
    #[error("its index is damaged: the checksum of the column '{0}' is wrong")]
    Index(&'static str),
    /// Its row of the index has a value that no packer writes.
    #[error("its row of the index is invalid: {0}")]
    Row(&'static str),
    /// The checksum of its stored bytes is wrong.
    #[error("its stored bytes are damaged: their checksum is wrong")]
    Stored,
    /// Its stored bytes have the right checksum, and do not decompress.
    #[error("its stored bytes do not decompress")]
    Decompress,
    /// The checksum of its decompressed bytes is wrong.
    #[error("its decompressed bytes have a wrong checksum")]
    Content,
}

impl Fault {
    /// Whether the file is damaged.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        !matches!(self, Self::OutOfRange | Self::Io(_))
    }

    pub(crate) fn of_read(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Truncated,
            _ => Self::Io(error),
        }
    }
}

/// A state file that cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// The host refused to read or write it.
    #[error("cannot copy the state '{name}' of {}: {why}", file.display())]
    Io {
        /// The snapshot.
        file: PathBuf,
        /// The name of the state.
        name: String,
        /// The reason.
        why: io::Error,
    },
    /// Its checksum is wrong.
    #[error("the state '{name}' in {} is damaged: its checksum is wrong", file.display())]
    Damaged {
        /// The snapshot.
        file: PathBuf,
        /// The name of the state.
        name: String,
    },
}

/// The doubt about a sparse diff, and the ways out of it.
const FILLED: &str = "a copy that fills holes (cat, scp, an object store, cp --sparse=never) makes \
                      such a file, which has lost its meaning. Pack the file that the VMM wrote. If \
                      this is it, say that its zeros are data (--zeros-are-data)";

/// The failure to pack.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// The memory cannot be read.
    #[error("cannot read the memory: {0}")]
    Read(io::Error),
    /// The memory has changed.
    #[error("the memory file changed while it was packed: pack a file that nothing writes")]
    Changed,
    /// The snapshot cannot be written.
    #[error("cannot write {}: {why}", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// The reason.
        why: io::Error,
    },
    /// The memory has a length that no VM has.
    #[error(
        "the memory has {0} bytes: expected a multiple of 4096, from 4096 to {MAX_MEMORY_BYTES}"
    )]
    Length(u64),
    /// The size of chunks is not possible.
    #[error(
        "chunks of {0} bytes are not possible: expected a power of two from 4096 to 1048576, and at most 2^28 chunks"
    )]
    ChunkBytes(u64),
    /// The memory has another length than the base.
    #[error("the memory has {found} bytes, and the base {expected}: a diff needs equal lengths")]
    BaseLength {
        /// The length of the memory.
        found: u64,
        /// The length of the base's memory.
        expected: u64,
    },
    /// The base has other chunks.
    #[error(
        "chunks of {asked} bytes were asked for, and the base has chunks of {base}: a diff has those of its base"
    )]
    BaseChunks {
        /// The size that was asked for.
        asked: u32,
        /// The size of the base's chunks.
        base: u32,
    },
    /// The base has as many bases as a snapshot may have.
    #[error("the base has {0} bases below it, which is the limit: pack the whole memory anew")]
    TooDeep(usize),
    /// The file name of the base cannot be recorded.
    #[error("the name of the base {} cannot be recorded: expected a file name of at most 255 bytes", .0.display())]
    BaseName(PathBuf),
    /// A sparse diff without a hole.
    #[error("the diff has no hole, so each of its pages replaces one of the base: {FILLED}")]
    NoHoles,
    /// A sparse diff with a long run of zeros.
    #[error(
        "the diff has more than 4 MiB of zeros that replace pages of the base, up to memory offset {0:#x} and on: {FILLED}"
    )]
    LongZeros(u64),
    /// A label is too long.
    #[error("the {0} has {1} bytes: expected at most 256")]
    Label(&'static str, usize),
    /// A state has an impossible name.
    #[error(
        "'{0}' cannot be the name of a state: expected 1 to 64 letters, digits, '.', '_' or '-', not beginning with '.', and each name once"
    )]
    StateName(String),
    /// There are too many states.
    #[error("{0} states were given: expected at most {max}", max = crate::header::MAX_STATES)]
    States(usize),
    /// A state is too large.
    #[error("the state '{0}' has more than 16 MiB, which is the limit")]
    StateBytes(String),
    /// A state cannot be read.
    #[error("cannot read the state '{name}': {why}")]
    StateRead {
        /// The name of the state.
        name: String,
        /// The reason.
        why: io::Error,
    },
    /// A chunk of the base, or of the snapshot that is packed, cannot be read.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// The compressor failed.
    #[error("cannot compress: {0}")]
    Compress(String),
    /// The host has no room for a thread.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}

/// The failure to unpack.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnpackError {
    /// The file cannot be written.
    #[error("cannot write {}: {why}", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// The reason.
        why: io::Error,
    },
    /// A chunk cannot be read.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// A state cannot be read.
    #[error(transparent)]
    State(#[from] StateError),
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}
