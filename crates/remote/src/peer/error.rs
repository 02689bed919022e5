//! The failures of a conversation.

use super::wire::{Code, FrameError, VERSION};
use pageferry_transport::tls::{FirstBytes, TlsError};
use std::io;

/// A request to a peer failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The address is none of a peer's file.
    #[error("'{0}' is no address of a peer: expected pageferry://HOST:PORT/NAME")]
    Address(String),
    /// Plain TCP would leave this host.
    #[error(
        "{0} is another host, and there are no certificates: give them, or allow plain TCP to \
         other hosts"
    )]
    Plain(std::net::SocketAddr),
    /// There is no connection.
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    /// The connection was tried a moment ago.
    #[error("the peer could not be reached a moment ago: {0}")]
    Unreachable(String),
    /// The connection is lost.
    #[error("the connection is lost: {0}")]
    Lost(io::Error),
    /// The time for the request is over.
    #[error("the peer did not answer in time")]
    TimedOut,
    /// TLS failed.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The peer speaks another protocol.
    #[error("the peer does not share snapshots: it began with {first}{}", first.guess())]
    Stranger {
        /// Its first bytes.
        first: FirstBytes,
    },
    /// The peer has another version.
    #[error("the peer has version {0} of the protocol, this side has {VERSION}: update the older")]
    Version(u16),
    /// The peer breaks the protocol.
    #[error("the peer breaks the protocol: {0}")]
    Frame(#[from] FrameError),
    /// The peer has a reason.
    #[error("the peer says: {sentence}")]
    Refused {
        /// Its kind.
        code: Code,
        /// In its words.
        sentence: String,
    },
}

impl PeerError {
    /// Whether the peer gave an answer, and the connection goes on.
    pub(crate) const fn is_answer(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }
}

impl From<io::Error> for PeerError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::TimedOut {
            return Self::TimedOut;
        }
        match error.downcast::<TlsError>() {
            Ok(error) => Self::Tls(error),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let why = "the peer closed it";
                Self::Lost(io::Error::new(io::ErrorKind::UnexpectedEof, why))
            }
            Err(error) => Self::Lost(error),
        }
    }
}
