//! The destination's configuration, the offer of a source, and the report of a failed migration.

use crate::cpus::CpuList;
use crate::error::MigrationError;
use crate::limits::Limits;
use crate::wire::Kind;
use pageferry_machine::{ArmOptions, Delivery};
use pageferry_transport::channel::Tls;
use pageferry_transport::handshake::PlainPolicy;
use std::fmt;

/// The destination's configuration.
#[derive(Clone, Debug)]
pub struct DestinationConfig {
    /// The fault delivery. `None` takes the one that is fastest on this host.
    pub delivery: Option<Delivery>,
    /// The number of userfaultfds, where the delivery uses any: each serves an equal part of RAM.
    /// From 1 to one for each 2 MiB; see [`ArmOptions`].
    pub userfaultfds: u32,
    /// The number of threads that read each userfaultfd, 1 to [`ArmOptions::MAX_READERS`].
    pub fault_readers: u32,
    /// Whether to allocate all memory before the switch-over, so that no urgent page waits for the
    /// host's allocator. Otherwise pages that were never written take no memory.
    pub allocate: bool,
    /// The CPUs of the migration's threads. `None`: all that the caller's thread may use. vCPUs
    /// resolve most of their own faults, on their own CPUs.
    pub cpus: Option<CpuList>,
    /// The limits of silence.
    pub limits: Limits,
    /// The certificates for TLS. `None`: without TLS.
    pub tls: Option<Tls>,
    /// Where channels without TLS may come from.
    pub plain: PlainPolicy,
}

impl Default for DestinationConfig {
    fn default() -> Self {
        Self {
            delivery: None,
            userfaultfds: 1,
            fault_readers: 1,
            allocate: true,
            cpus: None,
            limits: Limits::default(),
            tls: None,
            plain: PlainPolicy::default(),
        }
    }
}

impl DestinationConfig {
    /// The options that arm the machine.
    #[must_use]
    pub fn arm_options(&self) -> ArmOptions {
        ArmOptions {
            delivery: self.delivery,
            userfaultfds: self.userfaultfds,
            readers: self.fault_readers,
        }
    }
}

/// The VM that a source offers. The data is foreign: only the bounds of the fields were checked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Offer {
    /// The kind of machine that it runs on, here too.
    pub kind: Kind,
    /// The number of vCPUs.
    pub vcpus: u32,
    /// The size of RAM in bytes.
    pub memory_bytes: u64,
    /// The description of the guest, in the format of the source's caller.
    pub guest: Vec<u8>,
}

impl Offer {
    pub(crate) fn of(setup: &crate::wire::Setup) -> Self {
        Self {
            kind: setup.kind.clone(),
            vcpus: setup.vcpus,
            memory_bytes: setup.memory_bytes,
            guest: setup.description.clone(),
        }
    }

    /// An offer, for tests of what a caller makes of one.
    #[must_use]
    pub const fn new(kind: Kind, vcpus: u32, memory_bytes: u64, guest: Vec<u8>) -> Self {
        Self {
            kind,
            vcpus,
            memory_bytes,
            guest,
        }
    }
}

/// The place of the VM after a failed migration. The set is closed: a caller must know the place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationVm {
    /// It never counted here, and the source resumes it. The caller drops this copy.
    Discarded,
    /// It was handed over to this side and is paused, whether it ran or not. It must not continue
    /// without its missing pages.
    PausedIncomplete {
        /// The number of missing pages.
        missing: u64,
        /// The number of vCPUs that sleep in the hypervisor on a missing page. They stand still,
        /// but have not left the guest. A hypervisor with shadow paging sleeps so while it reads a
        /// page table.
        asleep: usize,
    },
    /// It was handed over, and has ended with the VMM that had it. The source may still have it,
    /// paused.
    Gone,
}

impl fmt::Display for DestinationVm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Discarded => f.write_str("the VM was discarded here and stays at the source"),
            Self::Gone => f.write_str("the VM was handed over to this host, and does not run here"),
            Self::PausedIncomplete { missing, asleep: 0 } => write!(
                f,
                "the VM is paused here with {missing} pages missing; it cannot continue without them"
            ),
            Self::PausedIncomplete { missing, asleep } => write!(
                f,
                "the VM stands still here with {missing} pages missing; it cannot continue without them; {asleep} of its vCPUs sleep in the hypervisor on such pages"
            ),
        }
    }
}

/// A migration that failed, seen from the destination.
#[derive(Debug, thiserror::Error)]
#[error("{error}; {vm}")]
pub struct DestinationFailure {
    /// The place of the VM.
    pub vm: DestinationVm,
    /// The reason.
    #[source]
    pub error: MigrationError,
}
