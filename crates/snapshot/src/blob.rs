//! Bytes that are read at any place: of a file, or of something at another host.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes that are read at any place. They never change. Many threads read at once.
pub trait Blob: Send + Sync {
    /// The number of bytes.
    ///
    /// # Errors
    /// When it cannot be found out.
    fn bytes(&self) -> io::Result<u64>;

    /// Fills the buffer with the bytes from `offset` on.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] if they are fewer, and what the reading meets. The buffer
    /// has no meaning then.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// Drops copies of these bytes: they were damaged. The next read brings them anew.
    fn forget(&self, _offset: u64, _len: u64) {}
}

impl fmt::Debug for dyn Blob + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Blob")
    }
}

impl Blob for File {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }
}
