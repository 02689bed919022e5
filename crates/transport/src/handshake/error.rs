//! The reasons why a handshake fails, at either side.

use std::io;
use std::time::Duration;

use crate::channel::{ChannelError, TlsError};
use crate::wire::{Status, WireError};

/// The reason why the source could not open a channel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The connection could not be opened, or ended.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The peer's bytes are not a preamble, or do not fit this side.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The destination refused.
    #[error("refused: {status} (the destination speaks version {version})")]
    Refused {
        /// The destination's reason.
        status: Status,
        /// The newest protocol version that the destination speaks.
        version: u16,
    },
    /// The destination's proof is wrong: it is not the one that has the session.
    #[error("the peer does not know the secret of this session: it is not its destination")]
    BadProof,
    /// The peer is on another host, and this side may not talk to it without TLS.
    #[error(
        "plain TCP to {peer} would show the VM to everyone on the path: configure TLS, or allow it"
    )]
    PlainForbidden {
        /// The address of the peer.
        peer: String,
    },
    /// The first messages passed, and the `path_check` did not.
    #[error(
        "{peer}: small packets pass and large ones do not; make the MTU of both hosts fit the path, \
         or let the path answer with ICMP \"fragmentation needed\""
    )]
    LargePacketsLost {
        /// The address of the peer.
        peer: String,
    },
    /// The caller could not open a connection.
    #[error("no connection from the caller: {0}")]
    Caller(io::Error),
}

impl HandshakeError {
    /// Whether another attempt may pass: the connection ended before the peer gave a reason. So it
    /// is when a peer makes room in a crowd.
    #[must_use]
    pub const fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Channel(
                ChannelError::Closed { .. }
                    | ChannelError::Lost { .. }
                    | ChannelError::Tls(TlsError::Ended)
            )
        )
    }
}

impl From<TlsError> for HandshakeError {
    fn from(error: TlsError) -> Self {
        Self::Channel(error.into())
    }
}

/// A stranger: a connection that the destination did not accept as a channel.
#[derive(Debug)]
#[non_exhaustive]
pub struct Stranger {
    /// The address of the peer.
    pub peer: String,
    /// The reason.
    pub why: StrangerError,
    /// The strangers before this one that were not reported, since there were too many.
    pub left_out: u64,
}

impl Stranger {
    /// A stranger that was turned away for this reason.
    #[must_use]
    pub const fn new(peer: String, why: StrangerError) -> Self {
        Self {
            peer,
            why,
            left_out: 0,
        }
    }
}

/// The reason why the destination did not accept a connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StrangerError {
    /// The preamble is not Pageferry's, or does not fit this side.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The connection ended without a preamble, or broke, or TLS failed.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The preamble took too long.
    #[error("no preamble within {} ms", after.as_millis())]
    Silent {
        /// The limit.
        after: Duration,
    },
    /// The credentials came, and nothing of the `path_check` behind them.
    #[error(
        "its small packets arrive and its large ones do not: make the MTU of both hosts fit the path"
    )]
    LargePacketsLost,
    /// There were too many connections, and this one made room for another.
    #[error("too many connections that had said nothing, and this one made room")]
    Crowded,
    /// The preamble was valid, and the destination refused it.
    #[error("{0}")]
    Refused(Status),
    /// The peer uses TLS, and this side does not.
    #[error("the peer uses TLS, and this side does not: configure TLS at both or at neither")]
    SpeaksTls,
    /// The peer does not use TLS, and this side requires it.
    #[error("the peer does not use TLS, and this side requires it")]
    SpeaksPlain,
    /// The channel opened a session, and its source said nothing.
    #[error("it opened a session and said nothing")]
    SilentSession,
    /// This host cannot accept a connection.
    #[error("{0}")]
    NotAccepted(String),
    /// There were no random numbers for the challenge.
    #[error("no random numbers for the challenge: {0}")]
    NoRandom(io::Error),
}
