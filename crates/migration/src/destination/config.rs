//! What the destination is told, what it is offered, and what it answers when a migration fails.

use crate::error::MigrationError;
use pageferry_machine::{Delivery, Engine};
use std::fmt;
use std::time::Duration;

/// How to receive.
#[derive(Clone, Debug)]
pub struct DestinationConfig {
    /// How faults are delivered; the machine's best way if not given.
    pub delivery: Option<Delivery>,
    /// Allocate all memory in set-up, so that no urgent page waits for the host's allocator.
    /// Without it pages that were never written take no memory.
    pub allocate: bool,
    /// The longest wait for a peer in the handshake.
    pub handshake_limit: Duration,
    /// The longest silence of a source that has more to send.
    pub silence_limit: Duration,
}

impl Default for DestinationConfig {
    fn default() -> Self {
        Self {
            delivery: None,
            allocate: true,
            handshake_limit: Duration::from_secs(5),
            silence_limit: Duration::from_secs(20),
        }
    }
}

/// The VM that a source offers. Foreign data: every field was checked against its bounds only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The engine it runs on and must run on here.
    pub engine: Engine,
    /// How many vCPUs.
    pub vcpus: u32,
    /// How much RAM, in bytes.
    pub memory_bytes: u64,
    /// What runs in it, in the words of the source's caller.
    pub guest: Vec<u8>,
}

/// Where the VM is after a migration that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationVm {
    /// It never counted here: the source runs it on. Drop it.
    Discarded,
    /// It ran here and is paused: `missing` pages are not here, and without them it must not go on.
    PausedIncomplete {
        /// How many pages have not arrived.
        missing: u64,
    },
}

impl fmt::Display for DestinationVm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Discarded => f.write_str("the VM was discarded here and stays at the source"),
            Self::PausedIncomplete { missing } => write!(
                f,
                "the VM is paused here with {missing} pages missing; it is not run on with wrong pages"
            ),
        }
    }
}

/// A migration that failed, seen from the destination.
#[derive(Debug, thiserror::Error)]
#[error("{error}; {vm}")]
pub struct DestinationFailure {
    /// Where the VM is now.
    pub vm: DestinationVm,
    /// Why it failed.
    #[source]
    pub error: MigrationError,
}
