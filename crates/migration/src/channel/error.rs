//! Errors of sockets.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::address::Address;
use crate::wire::WireError;

/// An operation on a connection failed. The connection stays usable only after
/// [`TimedOut`](Self::TimedOut) or [`Interrupted`](Self::Interrupted) before the first byte.
#[derive(Debug, thiserror::Error)]
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
    /// The operation did not complete within its limit.
    #[error("{what}: not complete after {} ms", after.as_millis())]
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
    /// A message of [`Connection::send_small`](super::Connection::send_small) was sent in part. The
    /// connection was shut down, since the peer would misread any later message.
    #[error("{what}: only {sent} of {len} bytes fitted; the connection was shut down")]
    Torn {
        /// The message.
        what: &'static str,
        /// The number of bytes sent.
        sent: usize,
        /// The length of the message in bytes.
        len: usize,
    },
    /// The peer stopped in the middle of a message ([`WireError::Truncated`]).
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A socket could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// A socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process listens on this address.
    #[error("{address} is in use by another process; choose another address or end that process")]
    InUse {
        /// The address.
        address: Address,
    },
    /// A unix socket without a listener.
    #[error("the socket {} belongs to a process that has ended; remove the file and retry", path.display())]
    StaleSocket {
        /// Its path.
        path: PathBuf,
    },
    /// The path exists and is not a socket.
    #[error("{} exists and is not a socket; choose another path", path.display())]
    NotASocket {
        /// Its path.
        path: PathBuf,
    },
    /// The user has no permission.
    #[error(
        "{address}: permission denied (ports below 1024 and foreign directories need privileges)"
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
