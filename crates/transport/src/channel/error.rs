//! Errors of sockets.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::TlsError;
use crate::address::Address;
use crate::wire::WireError;

/// An operation on a connection failed. The connection stays usable only after
/// [`TimedOut`](Self::TimedOut) or [`Interrupted`](Self::Interrupted) before the first byte.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The peer closed the connection between two messages, or this side shut it down.
    #[error("the peer closed the connection (waiting for {what})")]
    Closed {
        /// The awaited message.
        what: &'static str,
    },
    /// The connection broke: it was reset, or the peer is no longer reachable.
    #[error("the connection was lost at {what}: {source}")]
    Lost {
        /// The message that was sent or received.
        what: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
    /// No byte moved for as long as the limit.
    #[error("{what}: no progress for {} ms", after.as_millis())]
    TimedOut {
        /// The message that was sent or received.
        what: &'static str,
        /// The limit.
        after: Duration,
    },
    /// The caller's `stop` returned true.
    #[error("{what}: cancelled")]
    Interrupted {
        /// The message that was sent or received.
        what: &'static str,
    },
    /// TLS failed, or refused the peer.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The peer stopped in the middle of a message ([`WireError::Truncated`]).
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A socket could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
}

impl ChannelError {
    /// Returns the variant for an error of a socket, or of the TLS on it.
    pub(super) fn from_io(what: &'static str, source: io::Error) -> Self {
        match source.downcast::<TlsError>() {
            Ok(error) => Self::Tls(error),
            Err(source) => Self::Lost { what, source },
        }
    }
}

/// A descriptor that the caller handed in cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdoptError {
    /// It is not a stream socket.
    #[error("the descriptor is not a stream socket: expected TCP or a unix stream socket")]
    NotAStream,
    /// It is a stream socket, but is not connected.
    #[error("the socket is not connected: expected one that is connected to the peer")]
    NotConnected,
    /// It is a stream socket, but does not listen.
    #[error("the socket does not listen: expected one after listen(2)")]
    NotListening,
    /// Another error.
    #[error("the descriptor cannot be used: {0}")]
    Os(#[from] io::Error),
}

/// A socket could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Another process listens on this address.
    #[error("{address} is in use by another process; choose another address or end that process")]
    InUse {
        /// The address.
        address: Address,
    },
    /// The path exists and is not a socket.
    #[error("{} exists and is not a socket; choose another path", path.display())]
    NotASocket {
        /// Its path.
        path: PathBuf,
    },
    /// The user has no permission.
    #[error(
        "{address}: permission denied (ports below 1024, sockets and directories of other users need privileges, and a firewall of this host may refuse)"
    )]
    Denied {
        /// The address.
        address: Address,
    },
    /// The path of a unix socket does not exist.
    #[error("{}: no such socket, or its directory does not exist", path.display())]
    NoSuchPath {
        /// The path.
        path: PathBuf,
    },
    /// No process listens on this address.
    #[error("{address} refused the connection: nobody listens there")]
    Refused {
        /// The address.
        address: Address,
    },
    /// Nothing came back from this address.
    #[error(
        "{address} does not answer: nothing came back for {} ms; check the address, its route, and firewalls that drop packets",
        after.as_millis()
    )]
    NoAnswer {
        /// The address.
        address: Address,
        /// The limit.
        after: Duration,
    },
    /// The host's name was not found.
    #[error("the host `{host}` was not found: {source}")]
    Unresolved {
        /// The name.
        host: String,
        /// The error of the resolver.
        source: io::Error,
    },
    /// The port is 0.
    #[error(
        "cannot connect to {address}: port 0 is for listening on a port that the system chooses"
    )]
    PortZero {
        /// The address.
        address: Address,
    },
    /// Another error.
    #[error("{address}: {source}")]
    Os {
        /// The address.
        address: Address,
        /// The error of the kernel.
        source: io::Error,
    },
}

impl OpenError {
    /// Returns the variant for an error of `connect` or `bind`, from its error number alone.
    pub(super) fn from_os(address: &Address, source: io::Error) -> Self {
        let address = address.clone();
        match (source.kind(), &address) {
            (io::ErrorKind::AddrInUse, _) => Self::InUse { address },
            (io::ErrorKind::PermissionDenied, _) => Self::Denied { address },
            (io::ErrorKind::ConnectionRefused, _) => Self::Refused { address },
            (io::ErrorKind::NotFound, Address::Unix(path)) => {
                Self::NoSuchPath { path: path.clone() }
            }
            _ => Self::Os { address, source },
        }
    }
}
