//! Listening sockets.

use pageferry_hostfs::{ListenError, Owner, SocketFile, listen_at};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, accept_with, bind, listen, sockopt};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use super::connect::stream_socket;
use super::connection::peer_address;
use super::names::{address_of, name_of, resolve};
use super::wait::Waiter;
use super::{ChannelError, Connection, OpenError, Wait};
use crate::address::Address;

/// The most connections that wait to be accepted. The kernel keeps them, and a crowd of strangers
/// must not fill this before they are accepted: a further source would try again after a second.
const BACKLOG: i32 = 512;

/// A listening socket. A unix socket has its owner's mode from the start. Dropping the listener
/// removes the file if it is still this listener's.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    address: Address,
    /// Removes the file when it is dropped.
    file: Option<SocketFile>,
}

impl Listener {
    /// Returns a listener without a file of its own.
    pub(super) const fn of_parts(socket: OwnedFd, address: Address) -> Self {
        Self {
            socket,
            address,
            file: None,
        }
    }

    /// Listens on `address`. Of a host's addresses it takes the first that works.
    ///
    /// # Errors
    /// [`OpenError`]. A unix socket of a dead process and one in use give different errors.
    pub fn bind(address: &Address) -> Result<Self, OpenError> {
        Self::bind_for(address, &Owner::default())
    }

    /// As [`Self::bind`]. A unix socket is made for `owner`.
    ///
    /// # Errors
    /// As [`Self::bind`], also if this process may not give the socket away.
    pub fn bind_for(address: &Address, owner: &Owner) -> Result<Self, OpenError> {
        match address {
            Address::Unix(path) => Self::bind_unix(address, path, owner),
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
        // This allows a port whose last connections are in TIME_WAIT, but not a port in use.
        sockopt::set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &resolved)?;
        listen(&socket, BACKLOG)?;
        let bound = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
        Ok(Self {
            socket,
            address: address_of(bound),
            file: None,
        })
    }

    fn bind_unix(address: &Address, path: &Path, owner: &Owner) -> Result<Self, OpenError> {
        let (socket, file) = listen_at(path, owner).map_err(|why| match why {
            ListenError::InUse(_) => OpenError::InUse {
                address: address.clone(),
            },
            ListenError::NoSocket(path) => OpenError::NotASocket { path },
            ListenError::Refused { why, .. } => OpenError::from_os(address, why),
            ListenError::TooLong(_) => OpenError::from_os(address, Errno::NAMETOOLONG.into()),
            why => OpenError::from_os(address, std::io::Error::other(why)),
        })?;
        Ok(Self {
            socket: socket.into(),
            address: address.clone(),
            file: Some(file),
        })
    }

    /// The address it listens on. If port 0 was requested, this has the port that the system chose.
    #[must_use]
    pub const fn local_addr(&self) -> &Address {
        &self.address
    }

    /// Whether somebody who dials its address finds it: another process may have removed the file
    /// of a unix socket, or made one of its own there.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        self.file.as_ref().is_none_or(SocketFile::is_in_place)
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

    /// Takes a waiting connection. Returns `None` if there is none.
    ///
    /// # Errors
    /// [`OpenError::Os`] if no descriptors or no memory are left.
    pub fn try_accept(&self) -> Result<Option<Connection>, OpenError> {
        let os = |errno: Errno| OpenError::from_os(&self.address, errno.into());
        loop {
            match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => {
                    let tcp = matches!(self.address, Address::Tcp { .. });
                    let peer = peer_name(&socket, &self.address);
                    // A connection that was reset already is dropped without an error.
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

/// Whether an error of accept(2) concerns only the connection at hand.
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

/// Returns the name of a peer, for people.
fn peer_name(socket: &OwnedFd, local: &Address) -> String {
    peer_address(socket).map_or_else(|| local.to_string(), name_of)
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
