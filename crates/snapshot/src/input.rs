//! Memory files: opening them, and finding their data and holes.

use crate::error::PackError;
use rustix::fs::{FileType, Mode, OFlags, SeekFrom, fstat, open, seek};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

/// Opens a regular file for reading. It never waits: a FIFO, a device or a socket is refused.
///
/// # Errors
/// When the file cannot be opened, or is not a regular file.
pub fn open_input(path: &Path) -> io::Result<File> {
    // Opening a FIFO would wait for a writer without NONBLOCK. NOCTTY: a terminal stays a stranger.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let fd = open(path, flags, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&fd)?.st_mode) != FileType::RegularFile {
        let why = "it is not a regular file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    Ok(File::from(fd))
}

/// The data of a sparse file, asked for in ascending order.
pub(crate) struct Extents<'a> {
    file: &'a File,
    /// The first extent that ends behind all that was asked for.
    current: Range<u64>,
}

impl<'a> Extents<'a> {
    pub(crate) fn new(file: &'a File) -> Self {
        Self {
            file,
            current: 0..0,
        }
    }

    /// Whether the file has a hole before `end`.
    pub(crate) fn has_hole(&self, end: u64) -> Result<bool, PackError> {
        let first = self.behind(0).map_err(|why| PackError::Read(why.into()))?;
        Ok(first.start > 0 || first.end < end)
    }

    /// The parts of `range` that are data.
    pub(crate) fn of(&mut self, range: Range<u64>) -> Result<Vec<Range<u64>>, PackError> {
        let mut found = Vec::new();
        let mut at = range.start;
        while at < range.end {
            if self.current.end <= at {
                self.current = self.behind(at).map_err(|why| PackError::Read(why.into()))?;
            }
            let part = self.current.start.max(at)..self.current.end.min(range.end);
            if part.start >= range.end {
                break;
            }
            at = part.end;
            found.push(part);
        }
        Ok(found)
    }

    /// The first extent that ends behind `at`. Behind the last one it is the end of all offsets.
    fn behind(&self, at: u64) -> Result<Range<u64>, Errno> {
        // The file's own position changes, which nothing else uses.
        match seek(self.file, SeekFrom::Data(at)) {
            Ok(start) => Ok(start..seek(self.file, SeekFrom::Hole(start))?),
            Err(Errno::NXIO) => Ok(u64::MAX..u64::MAX),
            Err(why) => Err(why),
        }
    }
}
