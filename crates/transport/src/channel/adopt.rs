//! Sockets that the caller opened.

use rustix::io::{FdFlags, fcntl_setfd, ioctl_fionbio};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, getpeername, getsockname, sockopt};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::connect::bound_packets;
use super::connection::peer_address;
use super::names::{address_of, name_of};
use super::{AdoptError, Connection, Listener};
use crate::address::Address;

impl Connection {
    /// Wraps a connected stream socket. Makes it non-blocking, for all its descriptors, and
    /// close-on-exec. Sets TCP_NODELAY if it is TCP.
    ///
    /// # Errors
    /// [`AdoptError`]. The descriptor is closed then.
    pub fn adopt_fd(socket: OwnedFd) -> Result<Self, AdoptError> {
        let tcp = prepare(&socket)?;
        if getpeername(&socket).is_err() {
            return Err(AdoptError::NotConnected);
        }
        let peer = match peer_address(&socket) {
            Some(address) => name_of(address),
            None => "a unix socket of the caller".to_owned(),
        };
        Ok(Self::adopt(socket, peer, tcp)?)
    }
}

impl Listener {
    /// Wraps a listening stream socket, such as one of systemd's socket activation. Makes it
    /// non-blocking and close-on-exec. The file of a unix socket stays when the listener is
    /// dropped.
    ///
    /// # Errors
    /// [`AdoptError`]. The descriptor is closed then.
    pub fn adopt_fd(socket: OwnedFd) -> Result<Self, AdoptError> {
        let tcp = prepare(&socket)?;
        if !sockopt::socket_acceptconn(&socket).map_err(std::io::Error::from)? {
            return Err(AdoptError::NotListening);
        }
        let bound = getsockname(&socket).map_err(std::io::Error::from)?;
        let address = if tcp {
            bound_packets(&socket);
            let bound = SocketAddr::try_from(bound).map_err(std::io::Error::from)?;
            address_of(bound)
        } else {
            let bound = SocketAddrUnix::try_from(bound).map_err(std::io::Error::from)?;
            Address::Unix(path_of(&bound))
        };
        Ok(Self::of_parts(socket, address))
    }
}

/// Checks that it is a stream socket, and sets its flags. Returns whether it is TCP.
fn prepare(socket: &OwnedFd) -> Result<bool, AdoptError> {
    let kind = sockopt::socket_type(socket).map_err(|_| AdoptError::NotAStream)?;
    let family = sockopt::socket_domain(socket).map_err(std::io::Error::from)?;
    let tcp = match family {
        AddressFamily::INET | AddressFamily::INET6 => true,
        AddressFamily::UNIX => false,
        _ => return Err(AdoptError::NotAStream),
    };
    if kind != SocketType::STREAM {
        return Err(AdoptError::NotAStream);
    }
    ioctl_fionbio(socket, true).map_err(std::io::Error::from)?;
    fcntl_setfd(socket, FdFlags::CLOEXEC).map_err(std::io::Error::from)?;
    Ok(tcp)
}

/// Returns the path of a unix socket. An abstract name begins with `@`, as in ss(8).
fn path_of(bound: &SocketAddrUnix) -> PathBuf {
    let bytes = match (bound.path_bytes(), bound.abstract_name()) {
        (Some(path), _) => path.to_owned(),
        (None, Some(name)) => [b"@", name].concat(),
        (None, None) => b"@".to_vec(),
    };
    PathBuf::from(std::ffi::OsStr::from_bytes(&bytes))
}
