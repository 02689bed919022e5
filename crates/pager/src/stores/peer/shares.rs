//! The files that a server shares.
//!
//! **Guarantee.** No name leads out of what is shared: not by `..`, not by a symbolic link, and not
//! by a file system that changes meanwhile. The kernel resolves names below the directory.

use crate::{FileSource, SourceError};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Files by their names.
#[derive(Debug)]
pub struct Shares {
    named: BTreeMap<String, PathBuf>,
    directory: Option<(PathBuf, OwnedFd)>,
    /// Those that connections have open: the list of a file's holes is made once.
    open: Mutex<BTreeMap<String, (Stamp, Weak<FileSource>)>>,
}

/// Device, inode, length, and time of the last change.
type Stamp = (u64, u64, u64, i64, i64);

/// The files cannot be shared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShareError {
    /// A name is not allowed.
    #[error("'{0}' is no name: expected at most 1024 bytes, and parts such as web/memory")]
    Name(String),
    /// The directory cannot be opened.
    #[error("cannot share {}: {why}", path.display())]
    Directory {
        /// Its path.
        path: PathBuf,
        /// The reason.
        why: io::Error,
    },
}

impl Shares {
    /// Shares these files. A base of a packed snapshot needs its file name, beside the snapshot's.
    ///
    /// # Errors
    /// [`ShareError::Name`].
    pub fn of_files(
        files: impl IntoIterator<Item = (String, PathBuf)>,
    ) -> Result<Self, ShareError> {
        let named: BTreeMap<_, _> = files.into_iter().collect();
        match named.keys().find(|name| !is_name(name)) {
            Some(name) => Err(ShareError::Name(name.clone())),
            None => Ok(Self::new(named, None)),
        }
    }

    /// Shares all regular files in a directory, and in those below.
    ///
    /// # Errors
    /// [`ShareError::Directory`].
    pub fn of_directory(path: &Path) -> Result<Self, ShareError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty());
        let directory = directory.map_err(|errno| ShareError::Directory {
            path: path.to_owned(),
            why: errno.into(),
        })?;
        Ok(Self::new(
            BTreeMap::new(),
            Some((path.to_owned(), directory)),
        ))
    }

    fn new(named: BTreeMap<String, PathBuf>, directory: Option<(PathBuf, OwnedFd)>) -> Self {
        Self {
            named,
            directory,
            open: Mutex::default(),
        }
    }

    /// Opens a shared file.
    ///
    /// # Errors
    /// [`SourceError`], of the kind `NotFound` if nothing is shared under the name.
    pub(crate) fn open(&self, name: &str) -> Result<Arc<FileSource>, SourceError> {
        let failed = |why: io::Error| SourceError::Failed {
            what: name.to_owned(),
            why,
        };
        let absent = || failed(io::ErrorKind::NotFound.into());
        let (path, file) = match (self.named.get(name), &self.directory) {
            (Some(path), _) => {
                let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
                let file = rustix::fs::open(path, flags, Mode::empty());
                (path.clone(), file)
            }
            (None, Some((path, directory))) if is_name(name) => {
                let file = open_below(directory, name);
                (path.join(name), file)
            }
            _ => return Err(absent()),
        };
        let file = File::from(file.map_err(|errno| match errno {
            // A way out is no place, and so is a directory in the place of a file.
            Errno::XDEV | Errno::LOOP | Errno::NOTDIR => absent(),
            errno => failed(errno.into()),
        })?);
        let metadata = file.metadata().map_err(failed)?;
        let kind = FileType::from_raw_mode(metadata.mode());
        // A device in a shared directory is there by accident.
        if self.directory.is_some() && kind != FileType::RegularFile {
            return Err(absent());
        }
        let stamp = (
            metadata.dev(),
            metadata.ino(),
            metadata.len(),
            metadata.mtime(),
            metadata.mtime_nsec(),
        );
        let known = |open: &BTreeMap<String, (Stamp, Weak<FileSource>)>| match open.get(name) {
            Some((before, file)) if *before == stamp => file.upgrade(),
            _ => None,
        };
        if let Some(file) = known(&self.open.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(file);
        }
        let file = Arc::new(FileSource::from_file(file, &path)?);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, (_, file)| file.strong_count() > 0);
        open.insert(name.to_owned(), (stamp, Arc::downgrade(&file)));
        Ok(file)
    }
}

fn open_below(directory: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let within = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    loop {
        match openat2(directory, name, flags, Mode::empty(), within) {
            // A rename happened meanwhile, and the kernel cannot say whether it led out.
            Err(Errno::AGAIN | Errno::INTR) => {}
            result => return result,
        }
    }
}

/// Whether this is a relative path without detours.
pub(super) fn is_name(name: &str) -> bool {
    let is_part = |part: &str| !matches!(part, "" | "." | "..") && !part.contains('\0');
    name.len() <= super::wire::MAX_NAME && name.split('/').all(is_part)
}
