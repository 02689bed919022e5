//! Where the bytes of pages come from.

mod again;
mod file;
mod kept;
mod packed;

pub use file::FileSource;
pub(crate) use kept::Kept;
pub use packed::PackedSource;

pub(crate) use again::again;

use crate::options::Format;
use pageferry_snapshot::Blob;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

/// The reads at once of a source that says nothing: a local disk has enough to choose from.
const READS: usize = 16;

/// The contents of a VM's memory at its snapshot, from byte 0 to [`Source::bytes`].
///
/// Many threads read at once. The contents never change.
pub trait Source: std::fmt::Debug + Send + Sync {
    /// The length in bytes.
    fn bytes(&self) -> u64;

    /// The bytes that one read should bring, a power of two. A slow source has a large block: the
    /// neighbours of a byte cost little more than the byte.
    fn block(&self) -> u64;

    /// The reads at once that are worth having. A source that is far away wants many.
    fn reads(&self) -> usize {
        READS
    }

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

    /// [`Self::read`] of bytes whose neighbours nobody will ask for: no more than these come.
    ///
    /// # Errors
    /// As [`Self::read`].
    fn read_once(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        self.read(offset, buffer)
    }

    /// Tells this source from one with other bytes.
    fn identity(&self) -> String;

    /// Whether this is the source that had that identity. It may read.
    fn is(&self, identity: &str) -> bool {
        self.identity() == identity
    }

    /// The open file that has these bytes, if it is one and nothing else. A keeper may have it for
    /// the next pager.
    fn file(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Drops copies of these bytes: they were damaged. The next read brings them anew.
    fn forget(&self, _offset: u64, _len: u64) {}
}

/// The way back of a VM whose memory file is not what it was.
const BACK: &str = "the VM goes on when that is undone; if it cannot be, end the VM and restore \
                    another copy of the snapshot";

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
    #[error("{what} ends before byte {end}: it was cut off; {BACK}")]
    Short {
        /// The source.
        what: String,
        /// The first byte behind the read.
        end: u64,
    },
    /// The file is not the one with which the restore began.
    #[error("{what} has changed since the restore began: it was {before} and is {now}; {BACK}")]
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

/// A place of snapshots other than the file system, such as an object store.
pub trait Store: std::fmt::Debug + Send + Sync {
    /// The schemes of its addresses, such as `s3` of `s3://bucket/web/memory`.
    fn schemes(&self) -> &[&str];

    /// Opens a file by its address, whatever its format. It may wait for another host, but not
    /// without a limit.
    ///
    /// # Errors
    /// [`SourceError`].
    fn open(&self, address: &str) -> Result<Arc<dyn Source>, SourceError>;
}

/// The stores of a pager.
#[derive(Clone, Debug, Default)]
pub struct Stores(Vec<Arc<dyn Store>>);

impl Stores {
    /// These stores. Of two with the same scheme the first counts.
    #[must_use]
    pub fn new(stores: impl IntoIterator<Item = Arc<dyn Store>>) -> Self {
        Self(stores.into_iter().collect())
    }

    /// Opens the memory of a snapshot. A path that is an address, such as `s3://bucket/memory`, is
    /// one in a store.
    ///
    /// # Errors
    /// [`SourceError`], also for an address of no store.
    pub fn open(&self, path: &Path, format: Format) -> Result<Arc<dyn Source>, SourceError> {
        let Some((scheme, address)) = address(path) else {
            return open(path, format);
        };
        let store = self
            .0
            .iter()
            .find(|store| store.schemes().contains(&scheme));
        let store = store.ok_or_else(|| {
            let known = self.0.iter().flat_map(|store| store.schemes());
            let known = known
                .map(|scheme| format!("{scheme}://"))
                .collect::<Vec<_>>();
            let why = match known.is_empty() {
                true => "this pager has no store: expected a path".to_owned(),
                false => format!("expected a path, or one of {}", known.join(", ")),
            };
            SourceError::Failed {
                what: address.to_owned(),
                why: io::Error::new(io::ErrorKind::Unsupported, why),
            }
        })?;
        let source = store.open(address)?;
        proven(match format {
            Format::Raw => source,
            Format::Packed => Arc::new(PackedSource::in_store(&**store, address, source)?),
        })
    }
}

/// Opens the memory of a snapshot that lies in the file system.
///
/// # Errors
/// [`SourceError`].
pub fn open(path: &Path, format: Format) -> Result<Arc<dyn Source>, SourceError> {
    proven(match format {
        Format::Raw => Arc::new(FileSource::open(path)?),
        Format::Packed => Arc::new(PackedSource::open(path)?),
    })
}

/// Reads the first block as a page fault will: what refuses that must do so before a VM needs it.
fn proven(source: Arc<dyn Source>) -> Result<Arc<dyn Source>, SourceError> {
    let mut block = vec![0; source.block().min(source.bytes()) as usize];
    source.read(0, &mut block).map(|()| source)
}

/// Whether a path is an address in a store, such as `s3://bucket/memory`.
#[must_use]
pub fn is_address(path: &Path) -> bool {
    address(path).is_some()
}

/// The scheme of an address, and the address. `None` for a path.
fn address(path: &Path) -> Option<(&str, &str)> {
    let address = path.to_str()?;
    let (scheme, _) = address.split_once("://")?;
    let letters = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'+';
    (!scheme.is_empty() && scheme.bytes().all(letters)).then_some((scheme, address))
}

/// A file in a store, whose bytes are a packed snapshot.
struct InStore(Arc<dyn Source>);

impl Blob for InStore {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.0.bytes())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read(offset, buffer).map_err(|why| match why {
            SourceError::Failed { why, .. } => why,
            SourceError::Short { .. } => io::ErrorKind::UnexpectedEof.into(),
            why => io::Error::other(why),
        })
    }

    fn forget(&self, offset: u64, len: u64) {
        self.0.forget(offset, len);
    }
}
