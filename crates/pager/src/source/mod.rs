//! Where the bytes of pages come from.

mod again;
mod file;
mod packed;

pub use file::FileSource;
pub use packed::PackedSource;

pub(crate) use again::again;

use crate::options::Format;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// The contents of a VM's memory at its snapshot, from byte 0 to [`Source::bytes`].
///
/// Many threads read at once. The contents never change.
pub trait Source: std::fmt::Debug + Send + Sync {
    /// The length in bytes.
    fn bytes(&self) -> u64;

    /// The bytes that one read should bring, a power of two. A slow source has a large block: the
    /// neighbours of a byte cost little more than the byte.
    fn block(&self) -> u64;

    /// Whether `len` bytes from `offset` are known to be zeros without reading them.
    fn is_zero(&self, offset: u64, len: u64) -> bool;

    /// Reads bytes that are at hand, such as in the page cache. Returns false if that would mean to
    /// wait; the buffer has no meaning then.
    ///
    /// # Errors
    /// [`SourceError`].
    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, SourceError>;

    /// Reads bytes, and waits for them.
    ///
    /// # Errors
    /// [`SourceError`]. The buffer has no meaning then.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError>;

    /// Tells this source from a changed one of the same path.
    fn identity(&self) -> String;
}

/// The failure of a source. The pager tries again, since a network or a disk may come back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// A system call failed.
    #[error("reading {what} failed: {why}")]
    Failed {
        /// The source.
        what: String,
        /// The reason.
        why: io::Error,
    },
    /// The file has become shorter.
    #[error("{what} ends before byte {end}: it was cut off")]
    Short {
        /// The source.
        what: String,
        /// The first byte behind the read.
        end: u64,
    },
    /// The file is not the one with which the restore began.
    #[error("{what} has changed since the restore began: it was {before} and is {now}")]
    Changed {
        /// The source.
        what: String,
        /// Its identity at the start.
        before: String,
        /// Its identity now.
        now: String,
    },
    /// The bytes are not those that were packed.
    #[error("{what}: {why}")]
    Damaged {
        /// The source.
        what: String,
        /// The damaged part.
        why: String,
    },
}

/// Opens the memory of a snapshot.
///
/// # Errors
/// [`SourceError`].
pub fn open(path: &Path, format: Format) -> Result<Arc<dyn Source>, SourceError> {
    Ok(match format {
        Format::Raw => Arc::new(FileSource::open(path)?),
        Format::Packed => Arc::new(PackedSource::open(path)?),
    })
}
