//! What the source is told, and what it answers when a migration fails.

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
    /// Its vCPUs.
    pub threads: &'a VcpuThreads,
}

/// How to migrate.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// The most passes over the pages while the guest still runs; with 0 every page is fetched in
    /// post-copy. Passes end early when hardly anything is left.
    pub precopy_passes: u32,
    /// Whether missing pages are pushed in the background from the start of post-copy. Without it
    /// the push waits until the guest has asked for nothing for [`SourceConfig::QUIET`]: for
    /// measurements of urgent pages beside an idle background.
    pub push_background: bool,
    /// The longest wait for the connection and the handshake.
    pub connect_limit: Duration,
    /// How long to try again while the destination is busy with somebody else.
    pub busy_limit: Duration,
    /// The longest silence of the destination while it builds its machine and allocates memory.
    pub setup_limit: Duration,
    /// The longest wait for the destination to take or confirm anything else.
    pub answer_limit: Duration,
}

impl SourceConfig {
    /// How long a guest that asks for no page keeps a push waiting that is not to begin at once.
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

/// Where the VM is after a migration that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceVm {
    /// It runs on here, as if nothing had happened.
    Runs,
    /// The destination had confirmed that it runs there, and has not said that it discarded it. It
    /// is paused here and never resumed by us.
    GivenUp,
}

impl fmt::Display for SourceVm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Runs => "the VM runs on at the source",
            Self::GivenUp => "the VM had been handed over, and stays paused at the source",
        })
    }
}

/// A migration that failed, seen from the source.
#[derive(Debug, thiserror::Error)]
#[error("{error}; {vm}")]
pub struct SourceFailure {
    /// Where the VM is now.
    pub vm: SourceVm,
    /// Why it failed.
    #[source]
    pub error: MigrationError,
}
