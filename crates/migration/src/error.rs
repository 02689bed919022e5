//! Why a migration failed. What that means for the VM is said by
//! [`SourceFailure`](crate::SourceFailure) and [`DestinationFailure`](crate::DestinationFailure).

use crate::channel::ChannelError;
use crate::wire::{ErrorCode, Status, WireError};
use pageferry_machine::MachineError;
use std::io;

/// An error of a migration. Each says what was wrong and, where there is one, the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// The connections could not be made.
    #[error(transparent)]
    Channel(ChannelError),
    /// A connection ended, or was silent for too long, in the middle of the migration.
    #[error("the connection to the peer was lost: {0}")]
    LinkLost(String),
    /// What the peer sent is not Pageferry's wire format.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The peer keeps the format and breaks the protocol.
    #[error("the peer broke the protocol: {0}")]
    Peer(String),
    /// The destination refused in the handshake.
    #[error("the destination refused the connection: {0}")]
    Refused(Status),
    /// The peer gave up and said why.
    #[error("the peer gave up: {message}")]
    PeerGaveUp {
        /// Its reason for programs.
        code: ErrorCode,
        /// Its reason for people.
        message: String,
    },
    /// The offered VM and the machine here differ.
    #[error("{0}")]
    Mismatch(String),
    /// The machine failed.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// It was called off here.
    #[error("the migration was called off")]
    Cancelled,
    /// It was called off by the peer's user.
    #[error("the migration was called off at the other side")]
    PeerCancelled,
    /// The peer did not answer in time.
    #[error("the peer did not answer in time: waiting for {0}")]
    Timeout(&'static str),
    /// A system call was refused.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Our own mistake.
    #[error("internal error: {0}")]
    Internal(String),
}

impl MigrationError {
    pub(crate) fn os(what: &'static str, source: impl Into<io::Error>) -> Self {
        Self::Os {
            what,
            source: source.into(),
        }
    }

    /// Whether a connection ended, which may be the echo of a failure elsewhere.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self, Self::LinkLost(_))
    }

    /// Whether the destination serves somebody else now, so that trying again may succeed.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(
            self,
            Self::Refused(Status::Busy)
                | Self::PeerGaveUp {
                    code: ErrorCode::Busy,
                    ..
                }
        )
    }

    /// Whether the destination has said that its copy is no more and never counted.
    pub(crate) fn is_discarded_there(&self) -> bool {
        matches!(
            self,
            Self::PeerGaveUp {
                code: ErrorCode::Discarded,
                ..
            }
        )
    }

    /// What the peer is told.
    pub(crate) fn wire_code(&self) -> ErrorCode {
        match self {
            Self::Wire(_) | Self::Peer(_) => ErrorCode::Protocol,
            Self::Mismatch(_) => ErrorCode::SetupRefused,
            Self::Machine(_) => ErrorCode::Machine,
            Self::Os { .. } => ErrorCode::Resources,
            _ => ErrorCode::Internal,
        }
    }
}
