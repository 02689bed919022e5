//! The socket of a restore, at which its VMM connects.
//!
//! **Guarantee.** Nobody but the owner by user, group and mode can connect, from the first moment
//! on. A socket of a process that runs is never taken away from it.

use crate::options::Owner;
use rustix::fs::{AtFlags, CWD, Gid, Mode, Uid, chmodat, chownat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// The connections that wait to be accepted. One VMM connects, once.
const BACKLOG: i32 = 8;

/// The refusal of a socket's path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// Another process listens there.
    #[error("another process listens at {}: choose another path", .0.display())]
    InUse(PathBuf),
    /// Something that is no socket.
    #[error("{} is there and is no socket: choose another path", .0.display())]
    NoSocket(PathBuf),
    /// A system call failed.
    #[error("cannot listen at {}: {call} failed: {errno}", path.display())]
    Failed {
        /// The path.
        path: PathBuf,
        /// The call.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
}

/// Makes a listening socket at `path`. It is close-on-exec and does not block. A socket file that
/// nobody listens at is replaced.
///
/// # Errors
/// [`ListenError`]. No file is left then.
pub fn listen_at(path: &Path, owner: &Owner) -> Result<OwnedFd, ListenError> {
    let failed = |call| {
        move |errno| ListenError::Failed {
            path: path.to_owned(),
            call,
            errno,
        }
    };
    let new = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(failed("socket"))
    };
    let address = SocketAddrUnix::new(path).map_err(failed("the path"))?;
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(ListenError::NoSocket(path.to_owned()));
        }
        // A full backlog (EAGAIN) is a listener too.
        match connect(new()?, &address) {
            Err(Errno::CONNREFUSED) => {}
            Err(Errno::NOENT) => {}
            _ => return Err(ListenError::InUse(path.to_owned())),
        }
        match rustix::fs::unlink(path) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(failed("unlink")(errno)),
        }
    }
    let socket = new()?;
    bind(&socket, &address).map_err(|errno| match errno {
        Errno::ADDRINUSE => ListenError::InUse(path.to_owned()),
        errno => failed("bind")(errno),
    })?;
    // Nobody can connect before `listen`.
    let prepared = chownat(
        CWD,
        path,
        owner.user.map(Uid::from_raw),
        owner.group.map(Gid::from_raw),
        AtFlags::SYMLINK_NOFOLLOW,
    )
    .map_err(failed("chown"))
    .and_then(|()| {
        let mode = Mode::from_raw_mode(owner.mode & 0o777);
        chmodat(CWD, path, mode, AtFlags::empty()).map_err(failed("chmod"))
    })
    .and_then(|()| listen(&socket, BACKLOG).map_err(failed("listen")));
    if let Err(why) = prepared {
        // The file is ours, and of no use.
        let _ = rustix::fs::unlink(path);
        return Err(why);
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_socket_has_its_mode_and_is_not_taken_from_a_listener() {
        let path = std::env::temp_dir().join(format!("pageferry-listen-{}", std::process::id()));
        let owner = Owner {
            mode: 0o640,
            ..Owner::default()
        };
        let socket = listen_at(&path, &owner).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        UnixStream::connect(&path).unwrap();
        assert!(matches!(
            listen_at(&path, &owner),
            Err(ListenError::InUse(_))
        ));
        drop(socket);
        drop(listen_at(&path, &owner).unwrap());
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "kept").unwrap();
        assert!(matches!(
            listen_at(&path, &owner),
            Err(ListenError::NoSocket(_))
        ));
        assert_eq!(std::fs::read(&path).unwrap(), b"kept");
        std::fs::remove_file(&path).unwrap();
        let absent = path.join("absent/socket");
        assert!(matches!(
            listen_at(&absent, &owner),
            Err(ListenError::Failed { call: "bind", .. })
        ));
    }
}
