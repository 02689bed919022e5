//! The errors of the seams to Firecracker.

use crate::ch::ChError;
use pageferry_machine::MachineError;
use std::io;
use std::time::Duration;

/// An error between us and a Firecracker process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FcError {
    /// The kernel refused a call.
    #[error("{what}: {source}")]
    Io {
        /// The attempt that failed.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It is silent.
    #[error("Firecracker did not {what} within {} s", limit.as_secs())]
    Timeout {
        /// The action that was due.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// It has closed a connection.
    #[error("Firecracker closed its connection while we waited for it to {0}")]
    Closed(&'static str),
    /// An answer of its API.
    #[error("the API of Firecracker answered {endpoint} by {status}: {}", body.escape_debug())]
    Api {
        /// The endpoint.
        endpoint: &'static str,
        /// The HTTP status.
        status: u16,
        /// The body, shortened.
        body: String,
    },
    /// Bytes that are no answer of this API.
    #[error("the API of Firecracker answered {endpoint} by something else: {why}")]
    Http {
        /// The endpoint.
        endpoint: &'static str,
        /// The fault.
        why: String,
    },
    /// The state of the VM.
    #[error("the VM is '{found}': expected {expected}")]
    VmState {
        /// Its state.
        found: String,
        /// The states that fit.
        expected: &'static str,
    },
    /// The VM's configuration.
    #[error("this VM cannot move: {0}")]
    Config(String),
    /// Its root directory is not ours.
    #[error("Firecracker is in a jail: {0}")]
    Jail(String),
    /// Its state file.
    #[error("the state file has {0} bytes: expected 1 to {max}", max = super::MAX_STATE_BYTES)]
    StateLength(u64),
    /// The handshake of its userfaultfd.
    #[error("the handshake of Firecracker's memory was refused: {0}")]
    Handshake(String),
    /// A page could not be placed in its memory.
    #[error("a page cannot be placed in Firecracker's memory: {0}")]
    Place(String),
    /// The memory cannot move.
    #[error(transparent)]
    Memory(#[from] MachineError),
    /// An offer that is no VM of Firecracker.
    #[error("the offered VM is none of Firecracker: {0}")]
    Offer(String),
}

impl FcError {
    pub(super) fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io {
            what: what.into(),
            source: source.into(),
        }
    }
}

/// The error of code that both seams share.
impl From<ChError> for FcError {
    fn from(error: ChError) -> Self {
        match error {
            ChError::Io { what, source } => Self::Io { what, source },
            other => Self::io("cannot meet Firecracker", io::Error::other(other)),
        }
    }
}
