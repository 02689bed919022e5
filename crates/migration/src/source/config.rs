//! The source's configuration, and its report of a failed migration.

use crate::error::MigrationError;
use pageferry_machine::{Machine, VcpuThreads};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A VM with its vCPU threads.
#[derive(Clone, Copy)]
pub struct RunningVm<'a> {
    /// The machine.
    pub machine: &'a Arc<dyn Machine>,
    /// The threads of its vCPUs.
    pub threads: &'a VcpuThreads,
}

/// The source's configuration.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// The most pre-copy passes. With 0, all pages move in post-copy. The passes end early when few
    /// dirty pages are left. One more follows if the destination then still allocates memory, for
    /// longer than the last pass took.
    pub precopy_passes: u32,
    /// Whether the background push begins at the start of post-copy. Otherwise it begins when the
    /// guest has requested no page for [`SourceConfig::QUIET`]. That is for measurements of urgent
    /// pages without a push.
    pub push_background: bool,
    /// The limit for the connection and the handshake.
    pub connect_limit: Duration,
    /// The time for which the source retries while the destination is busy with another source.
    pub busy_limit: Duration,
    /// The longest silence of the destination while it builds its machine and allocates memory.
    pub setup_limit: Duration,
    /// The longest wait for the destination to accept or confirm any other message.
    pub answer_limit: Duration,
}

impl SourceConfig {
    /// The time without a request after which a delayed push begins.
    pub const QUIET: Duration = Duration::from_millis(300);
}

impl Default for SourceConfig {
    fn default() -> Self {
        Self {
            precopy_passes: 1,
            push_background: true,
            connect_limit: Duration::from_secs(10),
            busy_limit: Duration::from_secs(30),
            setup_limit: Duration::from_secs(60),
            answer_limit: Duration::from_secs(20),
        }
    }
}

/// The place of the VM after a failed migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceVm {
    /// It runs on at the source, unchanged.
    Runs,
    /// The destination confirmed that the VM runs there, and has not said that it discarded the VM.
    /// The VM is paused at the source, which never resumes it.
    GivenUp,
}

impl fmt::Display for SourceVm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Runs => "the VM runs on at the source",
            Self::GivenUp => "the VM was handed over and stays paused at the source",
        })
    }
}

/// A migration that failed, seen from the source.
#[derive(Debug, thiserror::Error)]
#[error("{error}; {vm}")]
pub struct SourceFailure {
    /// The place of the VM.
    pub vm: SourceVm,
    /// The reason.
    #[source]
    pub error: MigrationError,
}
