//! A small file at a path that a user may know, for the next process.
//!
//! **Guarantee.** It is this user's or root's, and no link was followed. A file of another user
//! counts as none.

use crate::{kind, split};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, openat, unlinkat};
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::Path;

/// The longest note.
const MAX_BYTES: u64 = 64 << 10;

/// A note.
#[derive(Clone, Copy, Debug)]
pub struct Note<'a>(&'a Path);

impl<'a> Note<'a> {
    /// The note at a path, which may not exist.
    #[must_use]
    pub fn at(path: &'a Path) -> Self {
        Self(path)
    }

    /// Writes it with mode 0600, in the place of an older one.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn write(&self, text: &[u8]) -> io::Result<()> {
        let (parent, name) = split(self.0)?;
        let _ = unlinkat(&parent, name, AtFlags::empty());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(&parent, name, flags, Mode::RUSR | Mode::WUSR)?;
        File::from(file).write_all(text)
    }

    /// Reads it.
    ///
    /// # Errors
    /// When there is none, it is another user's, or it has more than 64 KiB.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        let (parent, name) = split(self.0)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(&parent, name, flags, Mode::empty())?;
        let found = fstat(&file)?;
        let users = [0, rustix::process::geteuid().as_raw()];
        let length = u64::try_from(found.st_size).unwrap_or(u64::MAX);
        if kind(&found) != FileType::RegularFile
            || !users.contains(&found.st_uid)
            || length > MAX_BYTES
        {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut text = Vec::new();
        File::from(file).take(MAX_BYTES).read_to_end(&mut text)?;
        Ok(text)
    }

    /// Removes it, if it is there.
    pub fn remove(&self) {
        if let Ok((parent, name)) = split(self.0) {
            let _ = unlinkat(&parent, name, AtFlags::empty());
        }
    }
}
