//! The failures of a conversation.

use super::wire::Code;
use pageferry_transport::wire::{Status, WireError};
use pageferry_transport::{ChannelError, HandshakeError, TlsError};
use std::io;

/// A request to a peer failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PeerError {
    /// The address is none of a peer's file.
    #[error("'{text}' is no address of a peer: {why}; expected pageferry://HOST:PORT/NAME")]
    Address {
        /// The address.
        text: String,
        /// The reason.
        why: String,
    },
    /// There is no connection.
    #[error(transparent)]
    Handshake(HandshakeError),
    /// The peer is no host that shares snapshots.
    #[error("the peer does not share snapshots: expected `pageferry pager share` there")]
    SharesNothing,
    /// The peer serves as many as it has room for.
    #[error("the peer serves as many connections as it has room for")]
    Busy,
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
    /// The peer breaks the protocol.
    #[error("the peer breaks the protocol: {0}")]
    Frame(#[from] WireError),
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

    /// The error for a pager. [`io::ErrorKind::TimedOut`] means that there is no connection.
    pub(crate) fn into_io(self) -> io::Error {
        let kind = match self {
            Self::Handshake(HandshakeError::Channel(_))
            | Self::Unreachable(_)
            | Self::Lost(_)
            | Self::Busy
            | Self::TimedOut => io::ErrorKind::TimedOut,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, self)
    }

    /// Whether another connection may open in a moment.
    pub(crate) const fn may_pass(&self) -> bool {
        match self {
            Self::Busy => true,
            Self::Handshake(why) => why.may_pass(),
            _ => false,
        }
    }
}

impl From<HandshakeError> for PeerError {
    fn from(error: HandshakeError) -> Self {
        match error {
            HandshakeError::Refused {
                status: Status::BadRole,
                ..
            } => Self::SharesNothing,
            HandshakeError::Refused {
                status: Status::Busy,
                ..
            } => Self::Busy,
            HandshakeError::Channel(ChannelError::TimedOut { .. }) => Self::TimedOut,
            error => Self::Handshake(error),
        }
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
