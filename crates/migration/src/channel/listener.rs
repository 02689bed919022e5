//! Listening for a source.

use rustix::event::PollFlags;
use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, accept_with, bind, listen, sockopt};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::connect::{resolve, stream_socket};
use super::wait::Waiter;
use super::{ChannelError, Connection, OpenError, Wait};
use crate::address::Address;

/// How many connections may wait to be accepted.
const BACKLOG: i32 = 64;

/// A listening socket. A unix socket has mode 0600 from its first moment, and its file is removed
/// when the listener is dropped, if it still is this listener's.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    address: Address,
    file: Option<SocketFile>,
}

/// The file of a unix socket, and what tells it from a later one of the same name.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|found| (found.dev(), found.ino()) == (self.device, self.inode));
        if ours {
            // Gone already, or a directory that may no longer be written: nothing to do about
            // either.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Listener {
    /// Listens on `address`; of a host with several addresses on the first that works.
    ///
    /// # Errors
    /// [`OpenError`]; a unix socket left behind by a dead process is told from one in use.
    pub fn bind(address: &Address) -> Result<Self, OpenError> {
        match address {
            Address::Unix(path) => Self::bind_unix(address, path),
            Address::Tcp { host, port } => {
                let mut failure = None;
                for resolved in resolve(host, *port)? {
                    match Self::bind_tcp(resolved) {
                        Err(errno) => failure = Some(OpenError::from_os(address, errno.into())),
                        Ok(listener) => return Ok(listener),
                    }
                }
                Err(failure.expect("a host that was found has an address"))
            }
        }
    }

    fn bind_tcp(resolved: SocketAddr) -> Result<Self, Errno> {
        let family = match resolved {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let socket = stream_socket(family)?;
        // A port whose last connections still linger may be listened on again; one in use may not.
        sockopt::set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &resolved)?;
        listen(&socket, BACKLOG)?;
        let bound = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
        Ok(Self {
            socket,
            address: Address::Tcp {
                host: bound.ip().to_string(),
                port: bound.port(),
            },
            file: None,
        })
    }

    fn bind_unix(address: &Address, path: &Path) -> Result<Self, OpenError> {
        let failed = |errno: Errno| OpenError::from_os(address, errno.into());
        let name = SocketAddrUnix::new(path).map_err(failed)?;
        let socket = stream_socket(AddressFamily::UNIX).map_err(failed)?;
        // Linux creates the file with the mode of the socket's own inode: so there is no moment in
        // which others could connect (net/unix/af_unix.c, unix_bind_bsd).
        fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        bind(&socket, &name).map_err(|errno| match errno {
            Errno::ADDRINUSE => occupied(address, path),
            errno => failed(errno),
        })?;
        let found = std::fs::symlink_metadata(path)
            .map_err(|source| OpenError::from_os(address, source))?;
        let file = SocketFile {
            path: path.to_owned(),
            device: found.dev(),
            inode: found.ino(),
        };
        listen(&socket, BACKLOG).map_err(failed)?;
        Ok(Self {
            socket,
            address: address.clone(),
            file: Some(file),
        })
    }

    /// Where it listens: with the port the system chose, if 0 was asked for.
    #[must_use]
    pub const fn local_addr(&self) -> &Address {
        &self.address
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// `TimedOut`, `Interrupted`, [`ChannelError::Open`].
    pub fn accept(&self, wait: &Wait<'_>) -> Result<Connection, ChannelError> {
        let mut waiter = Waiter::new(wait);
        loop {
            if let Some(connection) = self.try_accept()? {
                return Ok(connection);
            }
            waiter.wait(self.socket.as_fd(), PollFlags::IN)?;
        }
    }

    /// Takes a connection that waits already, or `None`.
    ///
    /// # Errors
    /// [`OpenError::Os`]: no descriptors or no memory left.
    pub fn try_accept(&self) -> Result<Option<Connection>, OpenError> {
        let os = |errno: Errno| OpenError::from_os(&self.address, errno.into());
        loop {
            match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    let tcp = self.file.is_none();
                    let peer = peer_name(&socket, &self.address);
                    // One that was reset already is not worth an error.
                    if let Ok(connection) = Connection::adopt(socket, peer, tcp) {
                        return Ok(Some(connection));
                    }
                }
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) if is_of_one_connection(errno) => {}
                Err(errno) => return Err(os(errno)),
            }
        }
    }
}

/// Whether an error of accept(2) is about the connection at hand, and the next may well be good.
fn is_of_one_connection(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::CONNABORTED
            | Errno::PROTO
            | Errno::PERM
            | Errno::NETDOWN
            | Errno::NETUNREACH
            | Errno::HOSTUNREACH
            | Errno::HOSTDOWN
            | Errno::NOPROTOOPT
            | Errno::NONET
    )
}

/// Why a unix socket's path is taken.
fn occupied(address: &Address, path: &Path) -> OpenError {
    let path = path.to_owned();
    match std::fs::symlink_metadata(&path) {
        Ok(found) if !found.file_type().is_socket() => return OpenError::NotASocket { path },
        _ => {}
    }
    let at_once = Wait::block("connection").within(std::time::Duration::ZERO);
    match Connection::connect(address, &at_once) {
        Err(ChannelError::Open(OpenError::Refused { .. })) => OpenError::StaleSocket { path },
        _ => OpenError::InUse {
            address: address.clone(),
        },
    }
}

fn peer_name(socket: &OwnedFd, local: &Address) -> String {
    let resolved = rustix::net::getpeername(socket)
        .ok()
        .flatten()
        .and_then(|any| SocketAddr::try_from(any).ok());
    resolved.map_or_else(|| local.to_string(), |address| address.to_string())
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
