//! The errors of the seams to Cloud Hypervisor.

use super::wire::WireError;
use pageferry_machine::MachineError;
use std::io;
use std::time::Duration;

/// An error between us and a Cloud Hypervisor process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChError {
    /// The kernel refused a call.
    #[error("{what}: {source}")]
    Io {
        /// The attempt that failed.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Bytes that are not of its migration protocol.
    #[error("Cloud Hypervisor broke its migration protocol: {0}")]
    Wire(#[from] WireError),
    /// A command out of order.
    #[error("Cloud Hypervisor sent {found} where {expected} was due")]
    Order {
        /// The command that came.
        found: String,
        /// The commands that could have come.
        expected: &'static str,
    },
    /// It is silent.
    #[error("Cloud Hypervisor did not {what} within {} s", limit.as_secs())]
    Timeout {
        /// The action that was due.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// A connection has ended.
    #[error("Cloud Hypervisor closed its connection while we waited for it to {0}")]
    Closed(&'static str),
    /// An error response.
    #[error("Cloud Hypervisor refused to {0}: its log has the reason")]
    Refused(&'static str),
    /// It gave up.
    #[error("Cloud Hypervisor abandoned the migration: its log has the reason")]
    Abandoned,
    /// An answer of its API.
    #[error(
        "the API of Cloud Hypervisor answered {endpoint} by {status}{}",
        text(body)
    )]
    Api {
        /// The endpoint.
        endpoint: String,
        /// The HTTP status.
        status: u16,
        /// The body, shortened.
        body: String,
    },
    /// Bytes that are no answer of an API.
    #[error("the API of Cloud Hypervisor answered by no HTTP response: {0}")]
    Http(String),
    /// The state of the VM.
    #[error("the VM is {0}: expected Running or Paused")]
    VmState(String),
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
    /// The memory cannot move.
    #[error(transparent)]
    Memory(#[from] MachineError),
    /// An offer that is no VM of Cloud Hypervisor.
    #[error("the offered VM is none of Cloud Hypervisor: {0}")]
    Offer(String),
    /// A process that died has left a VM that cannot be taken over.
    #[error("the VM that a process left behind cannot be taken over: {0}")]
    Kept(String),
    /// The caller asked to stop.
    #[error("the move was stopped")]
    Stopped,
    /// The receiving process has ended.
    #[error(
        "the receiving Cloud Hypervisor is gone after it asked for {asked} of {pages} pages, and \
         so is the VM"
    )]
    Gone {
        /// The pages that it asked for.
        asked: u64,
        /// All pages.
        pages: u64,
    },
}

impl ChError {
    pub(super) fn io(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Io {
            what: what.into(),
            source: source.into(),
        }
    }
}

fn text(body: &str) -> String {
    match body {
        "" => String::new(),
        body => format!(": {}", body.escape_debug()),
    }
}
