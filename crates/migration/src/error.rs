//! The reason for a failed migration. [`SourceFailure`](crate::SourceFailure) and
//! [`DestinationFailure`](crate::DestinationFailure) say where the VM is then.

use crate::cpus::CpuListError;
use crate::protocol_error::ProtocolError;
use crate::settings::SettingsError;
use crate::wire::{ErrorCode, ErrorMessage, Frame, Status, Text, WireError};
use pageferry_machine::MachineError;
use pageferry_transport::channel::{ChannelError, TlsError};
use pageferry_transport::handshake::HandshakeError;
use pageferry_userfault::OutOfMemory;
use std::io;

/// An error of a migration. Each message says what was wrong and, where possible, what would be
/// right.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrationError {
    /// No connection to the peer could be opened.
    #[error(transparent)]
    Channel(ChannelError),
    /// A connection ended in the middle of the migration.
    #[error("the connection to the peer was lost: {0}")]
    LinkLost(String),
    /// This side ended the migration without its peer.
    #[error("{why}{}", and_last_loss(last_loss.as_deref()))]
    GaveUp {
        /// The reason, for people.
        why: &'static str,
        /// The reason for the last loss of a channel, if one was lost.
        last_loss: Option<String>,
    },
    /// The peer's bytes are not Pageferry's wire format.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The peer's messages are valid, but it broke the protocol.
    #[error("the peer broke the protocol: {0}")]
    Protocol(#[from] ProtocolError),
    /// The destination refused the connection in the handshake.
    #[error("the destination refused the connection: {0}")]
    Refused(Status),
    /// The peer gave up and sent its reason.
    #[error("the peer gave up: {message}")]
    PeerGaveUp {
        /// The peer's reason, for programs.
        code: ErrorCode,
        /// The peer's reason, for people.
        message: String,
    },
    /// The destination discarded its copy of the VM, which never ran.
    #[error("the destination discarded its copy of the VM: {0}")]
    Discarded(String),
    /// The peer is not the other side of this session, or may not be talked to.
    #[error(transparent)]
    Handshake(HandshakeError),
    /// The offered VM does not fit the machine here.
    #[error("{0}")]
    Mismatch(String),
    /// A device of the VM cannot go along.
    #[error("device {device} {why}")]
    Device {
        /// The device.
        device: String,
        /// The reason: the rest of the sentence.
        why: String,
    },
    /// The operator's settings cannot be.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The machine failed.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The user of this side cancelled the migration.
    #[error("the migration was cancelled")]
    Cancelled,
    /// The peer's user cancelled the migration.
    #[error("the peer cancelled the migration")]
    PeerCancelled,
    /// The peer did not answer in time.
    #[error("the peer did not answer in time: waiting for {0}")]
    Timeout(&'static str),
    /// A system call failed.
    #[error("{what}: {source}")]
    Os {
        /// The operation that failed.
        what: &'static str,
        /// The error of the kernel.
        source: io::Error,
    },
    /// The threads of the migration cannot run on the CPUs of its configuration.
    #[error(transparent)]
    Cpus(#[from] CpuListError),
    /// There is no memory for the bits of the VM's pages.
    #[error("no memory for the bits of the VM's pages: {0}")]
    OutOfMemory(#[from] OutOfMemory),
    /// A bug in this program.
    #[error("internal error: {0}")]
    Internal(String),
}

fn and_last_loss(last_loss: Option<&str>) -> String {
    last_loss.map_or_else(String::new, |last| format!("; the last loss: {last}"))
}

impl MigrationError {
    /// The reason of a side that had no connection for longer than its limit.
    pub(crate) const NO_CONNECTION: &str = "there was no connection for too long";

    /// No descriptor is left.
    pub(crate) fn eventfd(source: io::Error) -> Self {
        Self::os("cannot create an eventfd", source)
    }

    pub(crate) fn os(what: &'static str, source: impl Into<io::Error>) -> Self {
        Self::Os {
            what,
            source: source.into(),
        }
    }

    /// The error for a frame that is not due.
    pub(crate) fn unexpected(expected: &'static str, found: &Frame) -> Self {
        let found = found.frame_type();
        ProtocolError::Unexpected { found, expected }.into()
    }

    /// The error for a peer that has given up.
    pub(crate) fn gave_up(reason: &ErrorMessage) -> Self {
        Self::PeerGaveUp {
            code: reason.code(),
            message: reason.message().to_owned(),
        }
    }

    /// The error for a destination that has discarded its copy.
    pub(crate) fn discarded(reason: &Text) -> Self {
        Self::Discarded(reason.as_str().to_owned())
    }

    /// The frame that tells the peer this error as the reason for the end of a generation.
    pub(crate) fn to_frame(&self) -> Frame {
        match self {
            Self::Cancelled => Frame::Cancel,
            error => Frame::Error(ErrorMessage::new(error.wire_code(), &error.to_string())),
        }
    }

    /// Whether the peer or this host fails, rather than the connection to the peer.
    pub(crate) fn is_fatal_here(&self) -> bool {
        matches!(
            self,
            Self::Machine(_)
                | Self::Device { .. }
                | Self::Os { .. }
                | Self::OutOfMemory(_)
                | Self::Internal(_)
        )
    }

    /// Whether a connection ended. Another failure may have caused that.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self, Self::LinkLost(_))
    }

    /// Whether the destination is busy with another source, so that a retry may succeed.
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

    /// The code of this error for the peer.
    pub(crate) fn wire_code(&self) -> ErrorCode {
        match self {
            Self::Wire(_) | Self::Protocol(_) => ErrorCode::Protocol,
            Self::Channel(ChannelError::Tls(error)) if error.is_damage() => ErrorCode::Protocol,
            Self::Mismatch(_) | Self::Machine(MachineError::Refused(_)) => ErrorCode::SetupRefused,
            Self::Machine(MachineError::Gone(_)) => ErrorCode::VmGone,
            Self::Machine(_) | Self::Device { .. } => ErrorCode::Machine,
            Self::Os { .. } | Self::OutOfMemory(_) => ErrorCode::Resources,
            Self::Timeout(_) => ErrorCode::Silence,
            _ => ErrorCode::Internal,
        }
    }
}

impl From<TlsError> for MigrationError {
    fn from(error: TlsError) -> Self {
        ChannelError::from(error).into()
    }
}

impl From<ChannelError> for MigrationError {
    fn from(error: ChannelError) -> Self {
        match error {
            // A message that ends early is not damaged: the connection was cut.
            ChannelError::Wire(error @ WireError::Truncated { .. }) => {
                Self::LinkLost(error.to_string())
            }
            ChannelError::Wire(error) => Self::Wire(error),
            ChannelError::Interrupted { .. } => Self::Cancelled,
            ChannelError::TimedOut { what, .. } => Self::Timeout(what),
            ChannelError::Lost { what, source } => Self::LinkLost(format!("{source} (at {what})")),
            ChannelError::Closed { .. } => Self::LinkLost(error.to_string()),
            error => Self::Channel(error),
        }
    }
}

impl From<HandshakeError> for MigrationError {
    fn from(error: HandshakeError) -> Self {
        match error {
            HandshakeError::Channel(error) => error.into(),
            HandshakeError::Wire(error) => error.into(),
            HandshakeError::Refused { status, .. } => Self::Refused(status),
            error => Self::Handshake(error),
        }
    }
}
