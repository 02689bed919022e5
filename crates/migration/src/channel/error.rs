//! What can go wrong with a socket.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::address::Address;
use crate::wire::WireError;

/// An operation on a connection failed. After any but [`TimedOut`](Self::TimedOut) and
/// [`Interrupted`](Self::Interrupted) before the first byte, the connection is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// The peer closed the connection between two messages (or it was shut down here).
    #[error("the peer closed the connection (waiting for {what})")]
    Closed {
        /// What was waited for.
        what: &'static str,
    },
    /// The connection broke: reset, or no way to the peer any more.
    #[error("the connection was lost at {what}: {source}")]
    Lost {
        /// What was being sent or received.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The operation was not complete within its limit.
    #[error("{what}: not complete after {} ms", after.as_millis())]
    TimedOut {
        /// What was being sent or received.
        what: &'static str,
        /// The limit.
        after: Duration,
    },
    /// The caller's `stop` said so.
    #[error("{what}: called off")]
    Interrupted {
        /// What was being sent or received.
        what: &'static str,
    },
    /// A message that several threads may send without a lock was only sent in part; the connection
    /// was shut down, as what follows would be garbage.
    #[error("{what}: only {sent} of {len} bytes fitted; the connection was shut down")]
    Torn {
        /// What was being sent.
        what: &'static str,
        /// How many bytes were sent.
        sent: usize,
        /// How many there were.
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
    /// Somebody listens there already.
    #[error("{address} is in use by another process; choose another address, or end that process")]
    InUse {
        /// The address.
        address: Address,
    },
    /// A unix socket that nobody listens on any more.
    #[error("the socket {} was left behind by a process that has ended; remove the file and try again", path.display())]
    StaleSocket {
        /// Its path.
        path: PathBuf,
    },
    /// Something that is not a socket is in the way.
    #[error("{} exists and is not a socket; choose another path", path.display())]
    NotASocket {
        /// Its path.
        path: PathBuf,
    },
    /// This user may not.
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
    /// Nobody listens there.
    #[error("{address} refused the connection: nobody listens there")]
    Refused {
        /// The address.
        address: Address,
    },
    /// The host's name means nothing.
    #[error("the host `{host}` was not found: {source}")]
    Unresolved {
        /// The name.
        host: String,
        /// The resolver's answer.
        source: io::Error,
    },
    /// Port 0 is for listening only.
    #[error(
        "{address} cannot be connected to: port 0 is for listening on a port of the system's choice"
    )]
    PortZero {
        /// The address.
        address: Address,
    },
    /// Anything else.
    #[error("{address}: {source}")]
    Os {
        /// The address.
        address: Address,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl OpenError {
    /// The variant for an error of `connect` or `bind` that needs no closer look.
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
