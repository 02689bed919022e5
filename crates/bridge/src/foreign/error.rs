//! The errors of the seams to other VMMs.

use pageferry_machine::MachineError;
use std::io;
use std::time::Duration;

/// An error between us and the process of another VMM.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmmError {
    /// The kernel refused a call.
    #[error("{what}: {source}")]
    Io {
        /// The attempt that failed.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Bytes that are not of Cloud Hypervisor's migration protocol.
    #[error("Cloud Hypervisor broke its migration protocol: {0}")]
    Wire(String),
    /// A command out of order.
    #[error("Cloud Hypervisor sent {found} where {expected} was due")]
    Order {
        /// The command that came.
        found: String,
        /// The commands that could have come.
        expected: &'static str,
    },
    /// It is silent.
    #[error("the VMM did not {what} within {} s", limit.as_secs())]
    Timeout {
        /// The action that was due.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// It has closed a connection.
    #[error("the VMM closed its connection while we waited for it to {0}")]
    Closed(&'static str),
    /// An error response, and what its API said.
    #[error("Cloud Hypervisor refused to {0}{1}; with -v its log has more")]
    Refused(&'static str, String),
    /// It gave up.
    #[error("Cloud Hypervisor abandoned the migration; with -v its log has more")]
    Abandoned,
    /// An answer of its API.
    #[error("the VMM's API answered {endpoint} by {status}{}", text(body))]
    Api {
        /// The method and the path.
        endpoint: &'static str,
        /// The HTTP status.
        status: u16,
        /// The body, shortened.
        body: String,
    },
    /// Bytes that are no answer of this API.
    #[error("the VMM's API answered {endpoint} by something else: {why}")]
    Http {
        /// The method and the path.
        endpoint: &'static str,
        /// The fault.
        why: String,
    },
    /// The state of the VM.
    #[error("the VM is {found}: expected {expected}")]
    VmState {
        /// Its state.
        found: String,
        /// The states that fit.
        expected: &'static str,
    },
    /// A version that does not serve.
    #[error("{0}")]
    Version(String),
    /// The VM's configuration.
    #[error("this VM cannot move: {0}")]
    Config(String),
    /// An offer that is no VM of this VMM.
    #[error("the offered VM does not fit: {0}")]
    Offer(String),
    /// The memory cannot move.
    #[error(transparent)]
    Memory(#[from] MachineError),
    /// Memory that is not shared.
    #[error("the VM's memory is not shared: start it with --memory shared=on")]
    NotShared,
    /// A memfd.
    #[error("the memfd of slot {slot}: {why}")]
    Memfd {
        /// The memory slot.
        slot: u32,
        /// The fault.
        why: String,
    },
    /// A root directory that is not ours.
    #[error("the VMM is in a jail: {0}")]
    Jail(String),
    /// A state file.
    #[error("the state file has {0} bytes: expected 1 to {max}", max = super::MAX_STATE_BYTES)]
    StateLength(u64),
    /// The handshake of a userfaultfd.
    #[error("the handshake of the VM's memory was refused: {0}")]
    Handshake(String),
    /// A page could not be placed in the VM's memory.
    #[error("a page cannot be placed in the VM's memory: {0}")]
    Place(String),
    /// A process that died has left a VM that cannot be taken over.
    #[error("the VM that a process left behind cannot be taken over: {0}")]
    Kept(String),
    /// The VM was handed over before.
    #[error("{0}")]
    Moved(String),
    /// The caller asked to stop.
    #[error("the move was stopped")]
    Stopped,
    /// The process of the VM has ended.
    #[error("the VMM has ended, and the VM with it")]
    Ended,
    /// The receiving process has ended.
    #[error("the VMM is gone after it asked for {asked} of {pages} pages, and so is the VM")]
    Gone {
        /// The pages that it asked for.
        asked: u64,
        /// All pages.
        pages: u64,
    },
}

impl VmmError {
    pub(crate) fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io {
            what: what.into(),
            source: source.into(),
        }
    }
}

/// The error of a machine for one of the VMM that has its VM.
impl From<VmmError> for MachineError {
    fn from(error: VmmError) -> Self {
        match error {
            VmmError::Ended => Self::Gone(error.to_string()),
            other => Self::engine(other),
        }
    }
}

fn text(body: &str) -> String {
    match body {
        "" => String::new(),
        body => format!(": {}", body.escape_debug()),
    }
}
