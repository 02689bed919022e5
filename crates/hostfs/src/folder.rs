//! Directories of this process, in directories that others may own.

use crate::{Owner, SocketFile, identity, kind, open_directory, socket, split};
use rustix::fs::{
    AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, flock, fstat, openat, statat, unlinkat,
};
use rustix::io::Errno;
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The tries to find a name that nobody has.
const TRIES: usize = 16;
/// The depth of directories below one that is removed.
const MOST_DEPTH: usize = 32;

/// How the names of these directories begin.
const PREFIX: &str = ".pageferry-";
/// The file in it that its process holds.
const HELD: &str = ".held";
/// The age from which a directory that no process holds is one that a killed process left. A
/// younger one may be about to be held.
const LEFT_AFTER: Duration = Duration::from_secs(10);

/// A new directory of mode 0700. Dropping it removes it with its contents. The next one that is
/// made in the same place removes those that killed processes have left.
#[derive(Debug)]
pub struct Folder {
    parent: OwnedFd,
    name: String,
    directory: OwnedFd,
    path: PathBuf,
    /// Locked until this process ends, also by a kill.
    _held: OwnedFd,
}

impl Folder {
    /// Makes a directory in `directory`.
    ///
    /// # Errors
    /// When the host refuses, or somebody swaps the new directory for another.
    pub fn within(directory: &Path) -> io::Result<Self> {
        Ok(Self::new(open_directory(directory)?, directory)?)
    }

    /// Makes a directory beside the socket `path` of a VMM, for the VMM's user: the owner of the
    /// socket. If this process may not give it away, it keeps it: then it has the same user, or the
    /// VMM's access fails with a reason. Returns the user and the group too.
    ///
    /// # Errors
    /// As [`Self::within`], and when there is no `path`.
    pub fn beside(path: &Path) -> io::Result<(Self, Owner)> {
        let (parent, name) = split(path)?;
        // A directory that was swapped for another has no such socket.
        let found = statat(&parent, name, AtFlags::empty())?;
        let folder = Self::new(parent, path.parent().unwrap_or(Path::new(".")))?;
        let owner = Owner {
            user: Some(found.st_uid),
            group: Some(found.st_gid),
            ..Owner::default()
        };
        match give(&folder, &owner) {
            Ok(()) => Ok((folder, owner)),
            Err(why) if why.kind() == io::ErrorKind::PermissionDenied => {
                Ok((folder, Owner::default()))
            }
            Err(why) => Err(why),
        }
    }

    pub(crate) fn new(parent: OwnedFd, parent_path: &Path) -> Result<Self, Errno> {
        sweep(&parent, LEFT_AFTER);
        for _ in 0..TRIES {
            let name = format!("{PREFIX}{:016x}", RandomState::new().hash_one(0));
            match rustix::fs::mkdirat(&parent, &name, Mode::RWXU) {
                Ok(()) => {}
                Err(Errno::EXIST) => continue,
                Err(why) => return Err(why),
            }
            let directory = enter(&parent, &name)?;
            // The owner of the parent may have swapped it. He has none that is ours alone.
            let found = fstat(&directory)?;
            let is_private = found.st_mode & 0o7777 == 0o700
                && found.st_uid == rustix::process::geteuid().as_raw();
            if !is_private {
                return Err(Errno::PERM);
            }
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            let held = openat(&directory, HELD, flags, Mode::RUSR | Mode::WUSR)?;
            flock(&held, FlockOperation::NonBlockingLockExclusive)?;
            let path = parent_path.join(&name);
            return Ok(Self {
                parent,
                name,
                directory,
                path,
                _held: held,
            });
        }
        Err(Errno::EXIST)
    }

    /// Its path. The owner of the directory above may lead it elsewhere.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a listening socket in it, for `owner`. It is close-on-exec and does not block.
    ///
    /// # Errors
    /// When the host refuses, or the name is taken.
    pub fn listen(&self, name: &str, owner: &Owner) -> io::Result<(UnixListener, SocketFile)> {
        let made = socket::make(&self.directory, name.as_ref(), &self.path, owner);
        Ok(made?)
    }

    /// Makes a file of mode 0600 in it, for `owner`, and opens it for writing.
    ///
    /// # Errors
    /// When the host refuses, or the name is taken.
    pub fn create(&self, name: &str, owner: &Owner) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = openat(&self.directory, name, flags, Mode::RUSR | Mode::WUSR)?;
        give(&file, owner)?;
        Ok(file.into())
    }

    /// Makes a directory of mode 0700 in it.
    ///
    /// # Errors
    /// When the host refuses, or the name is taken.
    pub fn create_directory(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::mkdirat(&self.directory, name, Mode::RWXU)?)
    }

    /// Opens a file in it for reading, which somebody else made. A link or a device is refused.
    ///
    /// # Errors
    /// When the host refuses, or it is no file.
    pub fn open(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(&self.directory, name, flags, Mode::empty())?;
        match kind(&fstat(&file)?) {
            FileType::RegularFile => Ok(file.into()),
            _ => Err(Errno::INVAL.into()),
        }
    }

    /// Removes a file that was made in it, if it is there.
    pub fn remove(&self, name: &str) {
        let _ = unlinkat(&self.directory, name, AtFlags::empty());
    }
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        empty(self.directory.as_fd(), MOST_DEPTH);
        let ours = fstat(&self.directory).map(|found| identity(&found));
        let there = statat(&self.parent, &self.name, AtFlags::SYMLINK_NOFOLLOW);
        if there.map(|found| identity(&found)) == ours {
            // If it was swapped since, only an empty directory of that user goes.
            let _ = unlinkat(&self.parent, &self.name, AtFlags::REMOVEDIR);
        }
    }
}

/// Removes the directories in `parent` that killed processes have left: those of this user or of
/// the user of `parent` that nobody holds, and that are older than `age`.
pub(crate) fn sweep(parent: &OwnedFd, age: Duration) {
    let (Ok(entries), Ok(above)) = (Dir::read_from(parent), fstat(parent)) else {
        return;
    };
    let users = [above.st_uid, rustix::process::geteuid().as_raw()];
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    for entry in entries.flatten() {
        let name = entry.file_name();
        if !name.to_bytes().starts_with(PREFIX.as_bytes()) {
            continue;
        }
        let Ok(directory) = enter(parent, name) else {
            continue;
        };
        let is_left = fstat(&directory).is_ok_and(|found| {
            let changed = Duration::from_secs(u64::try_from(found.st_ctime).unwrap_or(0));
            users.contains(&found.st_uid) && now.saturating_sub(changed) >= age
        });
        if is_left && !is_held(&directory) {
            empty(directory.as_fd(), MOST_DEPTH);
            let _ = unlinkat(parent, name, AtFlags::REMOVEDIR);
        }
    }
}

/// Whether a process holds a directory.
fn is_held(directory: &OwnedFd) -> bool {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    match openat(directory, HELD, flags, Mode::empty()) {
        Ok(file) => flock(&file, FlockOperation::NonBlockingLockExclusive).is_err(),
        Err(errno) => errno != Errno::NOENT,
    }
}

/// Makes an open file or directory that of `owner`, but for the mode.
///
/// # Errors
/// When the host refuses: only root may.
pub fn give(file: impl AsFd, owner: &Owner) -> io::Result<()> {
    let (user, group) = owner.ids();
    Ok(rustix::fs::fchown(file, user, group)?)
}

/// The refusal of a directory for files that nobody else may change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OwnError {
    /// It is another user's, or others may write there.
    #[error("it belongs to user {owner} with mode {mode:03o}: expected this user and mode 700")]
    Foreign {
        /// Its owner.
        owner: u32,
        /// Its permission bits.
        mode: u32,
    },
    /// The host refused it.
    #[error(transparent)]
    Refused(#[from] io::Error),
}

/// Makes a directory of mode 0700, or takes the one that is there if nobody else may write to it.
/// It stays.
///
/// # Errors
/// [`OwnError`]. A link is refused.
pub fn own_directory(path: &Path) -> Result<(), OwnError> {
    let open = || -> Result<_, Errno> {
        let (parent, name) = split(path)?;
        match rustix::fs::mkdirat(&parent, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(why) => return Err(why),
        }
        fstat(enter(&parent, name)?)
    };
    let found = open().map_err(io::Error::from)?;
    let (owner, mode) = (found.st_uid, found.st_mode & 0o777);
    match owner == rustix::process::geteuid().as_raw() && mode & 0o022 == 0 {
        true => Ok(()),
        false => Err(OwnError::Foreign { owner, mode }),
    }
}

/// Removes a directory that a [`Folder`] of another process has left.
pub fn remove_directory(path: &Path) {
    let Ok((parent, name)) = split(path) else {
        return;
    };
    if let Ok(directory) = enter(&parent, name) {
        empty(directory.as_fd(), MOST_DEPTH);
        let _ = unlinkat(&parent, name, AtFlags::REMOVEDIR);
    }
}

/// Opens a directory in another. A link is refused.
fn enter(parent: impl AsFd, name: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(parent, name, flags, Mode::empty())
}

/// Removes the contents of a directory, as far as the host lets it. It follows no link.
fn empty(directory: BorrowedFd<'_>, depth: usize) {
    let dot = |name: &CStr| [c".", c".."].contains(&name);
    let Ok(entries) = Dir::read_from(directory) else {
        return;
    };
    let names: Vec<_> = entries
        .flatten()
        .map(|entry| entry.file_name().to_owned())
        .collect();
    for name in names.iter().filter(|name| !dot(name)) {
        if unlinkat(directory, name, AtFlags::empty()) != Err(Errno::ISDIR) || depth == 0 {
            continue;
        }
        if let Ok(below) = enter(directory, name.as_c_str()) {
            empty(below.as_fd(), depth - 1);
        }
        let _ = unlinkat(directory, name, AtFlags::REMOVEDIR);
    }
}

/// The path of a name in an open directory, which stays right when the directory is renamed.
pub(crate) fn path_in(directory: BorrowedFd<'_>, name: &OsStr) -> PathBuf {
    let number = std::os::fd::AsRawFd::as_raw_fd(&directory);
    Path::new("/proc/self/fd")
        .join(number.to_string())
        .join(name)
}
