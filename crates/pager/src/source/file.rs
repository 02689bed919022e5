//! A memory file: the regions of a VM one after the other, with holes where pages are zero.

use super::{Source, SourceError};
use rustix::fs::{Advice, FileType, SeekFrom, fadvise, fstat, seek};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The bytes that one read from the disk brings.
const BLOCK: u64 = 64 << 10;
/// The most extents that are kept. The rest of a file with more counts as data.
const MAX_EXTENTS: usize = 1 << 20;

/// A memory file.
#[derive(Debug)]
pub struct FileSource {
    path: PathBuf,
    file: File,
    bytes: u64,
    changed: (i64, i64),
    /// The parts with data, in order: first byte, and first byte behind.
    extents: Vec<(u64, u64)>,
    identity: String,
}

impl FileSource {
    /// Opens a memory file, or a block device, for reading.
    ///
    /// # Errors
    /// [`SourceError::Failed`], also for a file that is neither.
    pub fn open(path: &Path) -> Result<Self, SourceError> {
        let failed = |why| SourceError::Failed {
            what: path.display().to_string(),
            why,
        };
        // A fifo must not hold the caller up.
        let file = std::os::unix::fs::OpenOptionsExt::custom_flags(
            std::fs::OpenOptions::new().read(true),
            rustix::fs::OFlags::NONBLOCK.bits() as i32,
        )
        .open(path)
        .map_err(failed)?;
        Self::from_file(file, path)
    }

    /// Takes a file that is open for reading. Errors call it `path`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_file(file: File, path: &Path) -> Result<Self, SourceError> {
        let failed = |why| SourceError::Failed {
            what: path.display().to_string(),
            why,
        };
        let metadata = file.metadata().map_err(failed)?;
        let kind = FileType::from_raw_mode(metadata.mode());
        let bytes = match kind {
            FileType::RegularFile => metadata.len(),
            FileType::BlockDevice => seek(&file, SeekFrom::End(0)).map_err(|e| failed(e.into()))?,
            _ => {
                let why = "it is no file and no block device: expected a memory file";
                return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, why)));
            }
        };
        let identity = format!(
            "{}:{}, {bytes} bytes, changed at {}.{:09}",
            metadata.dev(),
            metadata.ino(),
            metadata.mtime(),
            metadata.mtime_nsec()
        );
        // A fault asks for what it needs. The kernel's guess at more would delay it. A refusal
        // costs nothing but speed.
        let _ = fadvise(&file, 0, None, Advice::Random);
        let extents = extents(&file, bytes).map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            bytes,
            changed: (metadata.mtime(), metadata.mtime_nsec()),
            extents,
            identity,
        })
    }

    /// The parts with data, in order: the first byte, and the first byte behind.
    #[must_use]
    pub fn extents(&self) -> &[(u64, u64)] {
        &self.extents
    }

    /// Checks behind each read that the file is still the same. A file that is cut off and grown
    /// again reads as zeros.
    fn check(&self) -> Result<(), SourceError> {
        let now = fstat(&self.file).map_err(|errno| self.failed(errno.into()))?;
        let changed = (now.st_mtime, now.st_mtime_nsec as i64);
        if changed == self.changed {
            return Ok(());
        }
        Err(SourceError::Changed {
            what: self.path.display().to_string(),
            before: self.identity.clone(),
            now: format!(
                "{} bytes, changed at {}.{:09}",
                now.st_size, changed.0, changed.1
            ),
        })
    }

    fn short(&self, end: u64) -> SourceError {
        SourceError::Short {
            what: self.path.display().to_string(),
            end,
        }
    }

    fn failed(&self, why: io::Error) -> SourceError {
        SourceError::Failed {
            what: self.path.display().to_string(),
            why,
        }
    }
}

/// The parts of a file that have data.
fn extents(file: &File, bytes: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut extents = Vec::new();
    let mut at = 0;
    while at < bytes {
        if extents.len() == MAX_EXTENTS {
            extents.push((at, bytes));
            break;
        }
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // No data behind.
            Err(Errno::NXIO) => break,
            // A file system or a device without holes.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                extents.push((at, bytes));
                break;
            }
            Err(errno) => return Err(errno.into()),
        };
        let end = seek(file, SeekFrom::Hole(start))?.min(bytes);
        extents.push((start, end));
        at = end;
    }
    Ok(extents)
}

impl Source for FileSource {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn block(&self) -> u64 {
        BLOCK
    }

    fn is_zero(&self, offset: u64, len: u64) -> bool {
        let behind = self.extents.partition_point(|&(_, end)| end <= offset);
        offset + len <= self.bytes
            && self
                .extents
                .get(behind)
                .is_none_or(|&(start, _)| offset + len <= start)
    }

    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, SourceError> {
        let expected = buffer.len();
        let mut parts = [IoSliceMut::new(buffer)];
        match preadv2(&self.file, &mut parts, offset, ReadWriteFlags::NOWAIT) {
            Ok(read) if read == expected => self.check().map(|()| true),
            // A part is in the page cache, or the file has been cut off: a whole read tells.
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            // A file system in memory, such as tmpfs before Linux 6.6.
            Err(Errno::OPNOTSUPP) => self.read(offset, buffer).map(|()| true),
            Err(errno) => Err(self.failed(errno.into())),
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        self.file.read_exact_at(buffer, offset).map_err(|why| {
            if why.kind() == io::ErrorKind::UnexpectedEof {
                self.short(offset + buffer.len() as u64)
            } else {
                self.failed(why)
            }
        })?;
        self.check()
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("pageferry-source-{name}-{}", std::process::id()))
    }

    #[test]
    fn holes_are_zero_without_a_read() {
        let path = path("holes");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(&[7; 4096], 256 << 10).unwrap();
        let source = FileSource::open(&path).unwrap();
        assert_eq!(source.bytes(), 1 << 20);
        assert!(source.is_zero(0, 256 << 10));
        assert!(!source.is_zero(0, (256 << 10) + 1));
        assert!(!source.is_zero(256 << 10, 4096));
        assert!(source.is_zero(512 << 10, 512 << 10));
        assert!(!source.is_zero(1 << 20, 4096), "behind the end");
        let mut page = [1; 4096];
        source.read(256 << 10, &mut page).unwrap();
        assert_eq!(page, [7; 4096]);
        assert!(source.read_now(256 << 10, &mut page).unwrap());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_that_is_cut_off_is_an_error_and_no_zeros() {
        let path = path("short");
        std::fs::write(&path, vec![7; 64 << 10]).unwrap();
        let source = FileSource::open(&path).unwrap();
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(8192)
            .unwrap();
        let mut page = [1; 4096];
        let error = source.read(16384, &mut page).unwrap_err();
        assert!(matches!(error, SourceError::Short { .. }), "{error}");
        assert!(!source.read_now(16384, &mut page).unwrap());
        let error = source.read(0, &mut page).unwrap_err();
        assert!(matches!(error, SourceError::Changed { .. }), "{error}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn other_kinds_of_files_are_refused() {
        assert!(FileSource::open(Path::new("/dev/null")).is_err());
        assert!(FileSource::open(&std::env::temp_dir()).is_err());
        assert!(FileSource::open(&path("absent")).is_err());
    }
}
