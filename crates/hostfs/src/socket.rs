//! Listening sockets.

use crate::folder::path_in;
use crate::{Folder, Owner, identity, kind, split};
use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, chmodat, chownat, fchmod, flock,
    fstat, openat, renameat_with, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The most connections that wait to be accepted. The kernel keeps them, and a crowd of strangers
/// must not fill this before they are accepted.
const BACKLOG: i32 = 512;
/// The longest wait for the lock of a directory. Its holder makes a socket, in far less.
const LOCKED: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(5);

/// The refusal of a socket's path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// Somebody listens there.
    #[error("another process listens at {}", .0.display())]
    InUse(PathBuf),
    /// Something that is no socket.
    #[error("{} is there and is no socket", .0.display())]
    NoSocket(PathBuf),
    /// The path does not fit into an address.
    #[error("{} has more than the 107 bytes of a socket's path", .0.display())]
    TooLong(PathBuf),
    /// The owner has numbers that mean nothing.
    #[error(
        "mode {:o}, user {:?} and group {:?} are no owner of a socket: expected modes from 0 to 777 \
         (octal), and ids below 4294967295", .0.mode, .0.user, .0.group
    )]
    NoOwner(Owner),
    /// The host refused it.
    #[error("cannot listen at {}: {why}", path.display())]
    Refused {
        /// The path.
        path: PathBuf,
        /// The reason.
        #[source]
        why: io::Error,
    },
}

/// The file of a listening socket. Dropping it removes the file, unless another process has made
/// one of its name since.
#[derive(Debug)]
pub struct SocketFile {
    parent: OwnedFd,
    name: OsString,
    /// Held, so that no newer file gets its number.
    inode: OwnedFd,
    stays: bool,
}

impl SocketFile {
    /// Whether the file is still there and still the same.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        let there = statat(&self.parent, &self.name, AtFlags::SYMLINK_NOFOLLOW);
        let own = fstat(&self.inode).map(|found| identity(&found));
        there.map(|found| identity(&found)) == own
    }

    /// Leaves the file where it is: the next process replaces it.
    pub fn keep(mut self) {
        self.stays = true;
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Under the lock, since another process may be about to replace it. Without the lock it
        // stays, and the next process replaces it.
        if !self.stays && lock(&self.parent).is_ok() {
            if self.is_in_place() {
                let _ = unlinkat(&self.parent, &self.name, AtFlags::empty());
            }
            let _ = flock(&self.parent, FlockOperation::Unlock);
        }
    }
}

/// Listens at `path`. The socket is close-on-exec and does not block. It replaces a socket that
/// nobody listens at.
///
/// # Errors
/// [`ListenError`]. Nothing has changed then.
pub fn listen_at(path: &Path, owner: &Owner) -> Result<(UnixListener, SocketFile), ListenError> {
    let refused = |errno: Errno| ListenError::Refused {
        path: path.to_owned(),
        why: errno.into(),
    };
    if SocketAddrUnix::new(path).is_err() {
        return Err(ListenError::TooLong(path.to_owned()));
    }
    // The kernel takes the last id as none, and the socket would keep its owner.
    if owner.mode > 0o777 || [owner.user, owner.group].contains(&Some(u32::MAX)) {
        return Err(ListenError::NoOwner(*owner));
    }
    let (parent, name) = split(path).map_err(refused)?;
    // Released when the process ends, also by a kill.
    lock(&parent).map_err(refused)?;
    let made = replace(&parent, name, path).and_then(|()| {
        let folder = path.parent().unwrap_or(Path::new(""));
        make(&parent, name, folder, owner).map_err(|errno| match errno {
            Errno::EXIST | Errno::ADDRINUSE => ListenError::InUse(path.to_owned()),
            errno => refused(errno),
        })
    });
    let _ = flock(&parent, FlockOperation::Unlock);
    made
}

/// Waits for the lock of a directory. No other thread may use this open directory: the lock is its
/// own.
fn lock(directory: &OwnedFd) -> Result<(), Errno> {
    let until = Instant::now() + LOCKED;
    loop {
        match flock(directory, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(LOOK),
            other => return other,
        }
    }
}

/// Removes a socket that nobody listens at.
fn replace(parent: &OwnedFd, name: &OsStr, path: &Path) -> Result<(), ListenError> {
    let refused = |errno: Errno| ListenError::Refused {
        path: path.to_owned(),
        why: errno.into(),
    };
    match statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(refused(errno)),
        Ok(found) if kind(&found) != FileType::Socket => {
            return Err(ListenError::NoSocket(path.to_owned()));
        }
        Ok(_) => {}
    }
    let address = SocketAddrUnix::new(path_in(parent.as_fd(), name)).map_err(refused)?;
    // It does not wait: a full backlog is a listener too.
    match connect(new_socket().map_err(refused)?, &address) {
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::CONNREFUSED) => match unlinkat(parent, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(refused(errno)),
        },
        _ => Err(ListenError::InUse(path.to_owned())),
    }
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Makes a listening socket of that name in `parent`, whose path is `folder`.
pub(crate) fn make(
    parent: &OwnedFd,
    name: &OsStr,
    folder: &Path,
    owner: &Owner,
) -> Result<(UnixListener, SocketFile), Errno> {
    let clone = || parent.try_clone().map_err(|_| Errno::MFILE);
    let socket = new_socket()?;
    // Linux gives the file the mode of the socket's inode, less the umask (net/unix/af_unix.c,
    // unix_bind_bsd). So nobody else can ever connect.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    let is_mine = owner
        .user
        .is_none_or(|id| id == rustix::process::geteuid().as_raw())
        && owner
            .group
            .is_none_or(|id| id == rustix::process::getegid().as_raw());
    if is_mine && owner.mode == 0o600 {
        bind(&socket, &SocketAddrUnix::new(folder.join(name))?)?;
    } else {
        let own = Folder::new(clone()?, folder)?;
        bind(&socket, &SocketAddrUnix::new(path_in(own.as_fd(), name))?)?;
        // Nobody else can enter the folder, so the name is still this socket's.
        let (user, group) = owner.ids();
        chownat(&own, name, user, group, AtFlags::SYMLINK_NOFOLLOW)?;
        let mode = Mode::from_raw_mode(owner.mode);
        chmodat(&own, name, mode, AtFlags::empty())?;
        renameat_with(&own, name, parent, name, RenameFlags::NOREPLACE)?;
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = SocketFile {
        inode: openat(parent, name, flags, Mode::empty())?,
        name: name.to_owned(),
        parent: clone()?,
        stays: false,
    };
    listen(&socket, BACKLOG)?;
    Ok((socket.into(), file))
}
