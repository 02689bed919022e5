//! A snapshot that is read lazily.
//!
//! **Guarantee.** Opening reads the header, the details, and the headers of the bases: not the
//! index, and no chunk. Bytes are verified before a caller gets them. Any number of threads may
//! read at once, by positioned reads that share nothing.
//!
//! **Mechanism.** A block of the index is loaded at its first use, and stays. To read a chunk, its
//! row names a file and a place there. The stored bytes are verified before they are decompressed,
//! and the result is verified too.

use crate::bases::{Source, find, find_by};
use crate::blob::Blob;
use crate::codec::{HAS_ZSTD, Kind, decode};
use crate::columns::{Block, Place, Row};
use crate::details::{Base, Details, Labels, State};
use crate::error::{ChunkError, Fault, OpenError, StateError};
use crate::figures::Figures;
use crate::header::{Geometry, SnapshotId};
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// An open snapshot. It is `Send` and `Sync`.
pub struct Snapshot {
    /// The snapshot's own file, then its bases.
    files: Vec<Source>,
    details: Details,
    blocks: Box<[OnceLock<Block>]>,
}

/// A chunk's entry in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Chunk {
    /// How it is stored.
    pub kind: Kind,
    /// The file that has its stored bytes: 0 is the snapshot's own, others count the bases from 1.
    pub file: u16,
    /// The length of its stored bytes.
    pub stored_bytes: u32,
    /// The place of its stored bytes in that file. Chunks at the same place of the same file have
    /// the same bytes.
    pub place: u64,
}

impl Chunk {
    /// Whether all its bytes are zero.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.kind == Kind::Zero
    }
}

impl Snapshot {
    /// Opens a snapshot whose bases, if it has any, are in the same directory.
    ///
    /// # Errors
    /// When the file, or a base, is missing, damaged, or not the right one.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_in(path, &[])
    }

    /// As [`Snapshot::open`]. Bases may also be in one of `directories`.
    ///
    /// # Errors
    /// As [`Snapshot::open`].
    pub fn open_in(path: &Path, directories: &[&Path]) -> Result<Self, OpenError> {
        Self::beside(Source::open(path)?, directories)
    }

    /// As [`Snapshot::open_in`], for a file that is open. Errors name it `path`, and bases may be
    /// in the directory of `path`.
    ///
    /// # Errors
    /// As [`Snapshot::open`].
    pub fn from_file(file: File, path: &Path, directories: &[&Path]) -> Result<Self, OpenError> {
        Self::beside(Source::of(Arc::new(file), path)?, directories)
    }

    /// Opens a snapshot of `blob`, such as one at another host. Errors name it `path`. Its bases
    /// are those that `open` finds by their names, which are the last parts of paths.
    ///
    /// # Errors
    /// As [`Snapshot::open`].
    pub fn from_blob(
        blob: Arc<dyn Blob>,
        path: &Path,
        mut open: impl FnMut(&OsStr) -> io::Result<Arc<dyn Blob>>,
    ) -> Result<Self, OpenError> {
        let own = Source::of(blob, path)?;
        Self::from_source(own, &mut |base, path| find_by(base, path, &mut open))
    }

    fn beside(own: Source, directories: &[&Path]) -> Result<Self, OpenError> {
        let path = own.path.clone();
        let directory = path.parent().filter(|path| !path.as_os_str().is_empty());
        let mut all = vec![directory.unwrap_or(Path::new("."))];
        all.extend(directories);
        Self::from_source(own, &mut |base, path| find(base, path, &all))
    }

    fn from_source(
        own: Source,
        find: &mut dyn FnMut(&Base, &Path) -> Result<Source, OpenError>,
    ) -> Result<Self, OpenError> {
        let file = || own.path.clone();
        // The length of the file has been compared with these, so the allocation is bounded by it.
        let mut bytes = vec![0; own.header.details_bytes as usize];
        let at = own.header.details_start();
        own.file
            .read_exact_at(&mut bytes, at)
            .map_err(|why| OpenError::Io { file: file(), why })?;
        if xxh3_64(&bytes) != own.header.details_sum {
            let why = "their checksum is wrong";
            return Err(OpenError::Details { file: file(), why });
        }
        let details = Details::decode(&bytes, &own.header)
            .map_err(|why| OpenError::Details { file: file(), why })?;
        if own.header.codecs & Kind::Zstd.codec() != 0 && !HAS_ZSTD {
            return Err(OpenError::NoZstd { file: file() });
        }
        let bases = details.bases.iter();
        let bases = bases
            .map(|base| find(base, &own.path))
            .collect::<Result<Vec<_>, _>>()?;
        let blocks = own.header.geometry.blocks();
        Ok(Self {
            files: std::iter::once(own).chain(bases).collect(),
            details,
            blocks: (0..blocks).map(|_| OnceLock::new()).collect(),
        })
    }

    fn own(&self) -> &Source {
        &self.files[0]
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.own().header.geometry
    }

    /// The path of the snapshot's own file, as it was given.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.own().path
    }

    /// The path of a file with chunks: 0 is the snapshot's own, others count the bases from 1.
    #[must_use]
    pub fn file(&self, index: u16) -> Option<&Path> {
        Some(&self.files.get(usize::from(index))?.path)
    }

    /// The id.
    #[must_use]
    pub fn id(&self) -> SnapshotId {
        self.own().id
    }

    /// The bases: the one that a diff was made on, its own base, and so on.
    #[must_use]
    pub fn bases(&self) -> &[Base] {
        &self.details.bases
    }

    /// The labels of the VMM and the CPU.
    #[must_use]
    pub fn labels(&self) -> &Labels {
        &self.details.labels
    }

    /// The state files.
    #[must_use]
    pub fn states(&self) -> &[State] {
        &self.details.states
    }

    /// The length of memory in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "no memory is empty")]
    pub fn len(&self) -> u64 {
        self.geometry().memory_bytes
    }

    /// The size of chunks in bytes: a power of two from 4 KiB to 1 MiB.
    #[must_use]
    pub fn chunk_bytes(&self) -> u32 {
        self.geometry().chunk_bytes
    }

    /// The number of chunks.
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.geometry().chunks()
    }

    /// The length of a chunk in bytes. The last chunk of memory may be shorter than the others.
    /// It is 0 behind the last.
    #[must_use]
    pub fn chunk_len(&self, index: u64) -> usize {
        match index < self.chunks() {
            true => self.geometry().chunk_len(index),
            false => 0,
        }
    }

    /// The bytes of the snapshot's own file.
    #[must_use]
    pub fn file_bytes(&self) -> u64 {
        self.own().header.file_bytes()
    }

    /// The entry of chunk `index` in the index.
    ///
    /// # Errors
    /// When there is no such chunk, or its part of the index is damaged or cannot be read.
    pub fn chunk(&self, index: u64) -> Result<Chunk, ChunkError> {
        let row = self.row(index)?;
        Ok(Chunk {
            kind: row.kind,
            file: row.file,
            stored_bytes: row.bytes,
            place: row.place,
        })
    }

    /// Whether the chunks that hold `range` of memory are zero. An empty range is.
    ///
    /// # Errors
    /// As [`Snapshot::chunk`].
    pub fn is_zero(&self, range: Range<u64>) -> Result<bool, ChunkError> {
        let size = u64::from(self.chunk_bytes());
        if range.is_empty() {
            return Ok(true);
        }
        for index in range.start / size..range.end.div_ceil(size) {
            if !self.chunk(index)?.is_zero() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Reads chunk `index`.
    ///
    /// # Errors
    /// When there is no such chunk, it is damaged, or it cannot be read. Then `out` is all zeros.
    ///
    /// # Panics
    /// If `out` has not the length of the chunk: see [`Snapshot::chunk_len`].
    pub fn read_chunk(&self, index: u64, out: &mut [u8]) -> Result<(), ChunkError> {
        let read = self.row(index).and_then(|row| {
            assert_eq!(out.len(), self.chunk_len(index), "the buffer for a chunk");
            let source = &self.files[usize::from(row.file)];
            read(source, &row, out).map_err(|fault| self.error(index, row.file, fault))
        });
        if read.is_err() {
            // No caller may take damaged bytes for memory.
            out.fill(0);
        }
        read
    }

    /// Reads memory from `offset` on. It reads whole chunks: a caller that wants many small parts
    /// should keep chunks itself.
    ///
    /// # Errors
    /// As [`Snapshot::read_chunk`], also when the range leaves memory. Then `out` may have the
    /// bytes of earlier chunks, and is zero behind them.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), ChunkError> {
        let size = u64::from(self.chunk_bytes());
        let mut chunk = Vec::new();
        let (mut at, mut done) = (offset, 0);
        while done < out.len() {
            let (index, skip) = (at / size, (at % size) as usize);
            let len = self.chunk_len(index);
            let take = len.saturating_sub(skip).min(out.len() - done);
            let read = match &mut out[done..] {
                to if take == len && take > 0 => self.read_chunk(index, &mut to[..take]),
                to if take > 0 => {
                    chunk.resize(len, 0);
                    self.read_chunk(index, &mut chunk)
                        .map(|()| to[..take].copy_from_slice(&chunk[skip..][..take]))
                }
                _ => Err(self.error(index, 0, Fault::OutOfRange)),
            };
            if let Err(error) = read {
                out[done..].fill(0);
                return Err(error);
            }
            at += take as u64;
            done += take;
        }
        Ok(())
    }

    /// Reads the state `index` of [`Snapshot::states`].
    ///
    /// # Errors
    /// When it is damaged or cannot be read.
    ///
    /// # Panics
    /// If there is no such state.
    pub fn read_state(&self, index: usize) -> Result<Vec<u8>, StateError> {
        let state = &self.details.states[index];
        let (file, name) = (self.path().to_owned(), state.name.clone());
        let mut bytes = vec![0; state.bytes as usize];
        let at = self.own().header.data_end() + self.details.state_at(index);
        match self.own().file.read_exact_at(&mut bytes, at) {
            Err(why) => Err(StateError::Io { file, name, why }),
            Ok(()) if xxh3_64(&bytes) != state.sum => Err(StateError::Damaged { file, name }),
            Ok(()) => Ok(bytes),
        }
    }

    /// Counts the chunks. It reads the whole index.
    ///
    /// # Errors
    /// As [`Snapshot::chunk`].
    pub fn figures(&self) -> Result<Figures, ChunkError> {
        let mut figures = Figures::default();
        for index in 0..self.chunks() {
            figures.count(&self.row(index)?);
        }
        figures.file_bytes = self.file_bytes();
        Ok(figures)
    }

    pub(crate) fn error(&self, chunk: u64, file: u16, fault: Fault) -> ChunkError {
        ChunkError {
            chunk,
            offset: chunk.saturating_mul(self.chunk_bytes().into()),
            file: self.files[usize::from(file)].path.clone(),
            fault,
        }
    }

    fn place(&self) -> Place<'_> {
        Place {
            file: &*self.own().file,
            start: self.own().header.index_start(),
            sums: &self.details.sums,
            geometry: *self.geometry(),
        }
    }

    /// A block of the index. One that is damaged is read again by the next call: the bytes may have
    /// been damaged on their way.
    pub(crate) fn block(&self, block: u64) -> Result<&Block, Fault> {
        let cell = &self.blocks[block as usize];
        match cell.get() {
            Some(block) => Ok(block),
            None => {
                let loaded = self.place().load(block)?;
                // Another thread may have loaded the same meanwhile.
                Ok(cell.get_or_init(|| loaded))
            }
        }
    }

    /// The row of a chunk, checked.
    pub(crate) fn row(&self, index: u64) -> Result<Row, ChunkError> {
        let failed = |fault| self.error(index, 0, fault);
        if index >= self.chunks() {
            return Err(failed(Fault::OutOfRange));
        }
        let row = self
            .block(index / Geometry::BLOCK)
            .map_err(failed)?
            .row((index % Geometry::BLOCK) as usize)
            .map_err(failed)?;
        let data_end = |file: u16| Some(self.files.get(usize::from(file))?.header.data_end());
        row.check(self.chunk_len(index), data_end)
            .map_err(|why| failed(Fault::Row(why)))?;
        Ok(row)
    }

    /// The maps of pages of a block of chunks: bit `i` of a chunk's map says that its page `i` was
    /// data in the packed file, and no hole.
    pub(crate) fn maps(&self, block: u64) -> Result<Box<[u8]>, ChunkError> {
        let failed = |fault| self.error(block * Geometry::BLOCK, 0, fault);
        self.place().maps(block).map_err(failed)
    }
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot")
            .field("path", &self.path())
            .field("id", &self.id())
            .field("bases", &self.bases().len())
            .finish_non_exhaustive()
    }
}

/// Reads and verifies the bytes of a row.
fn read(source: &Source, row: &Row, out: &mut [u8]) -> Result<(), Fault> {
    let read = read_stored(source, row, out);
    if matches!(
        read,
        Err(Fault::Stored | Fault::Decompress | Fault::Content)
    ) {
        source.file.forget(row.place, row.bytes.into());
    }
    read
}

fn read_stored(source: &Source, row: &Row, out: &mut [u8]) -> Result<(), Fault> {
    let stored_at = |to: &mut [u8]| {
        source
            .file
            .read_exact_at(to, row.place)
            .map_err(Fault::of_read)?;
        (xxh3_64(to) == row.stored)
            .then_some(())
            .ok_or(Fault::Stored)
    };
    match row.kind {
        Kind::Zero => {
            out.fill(0);
            return Ok(());
        }
        Kind::Raw => stored_at(out)?,
        Kind::Lz4 | Kind::Zstd => {
            // At most a chunk: the row is checked.
            let mut stored = vec![0; row.bytes as usize];
            stored_at(&mut stored)?;
            if !decode(row.kind, &stored, out) {
                return Err(Fault::Decompress);
            }
        }
    }
    (xxh3_128(out) == row.content)
        .then_some(())
        .ok_or(Fault::Content)
}
