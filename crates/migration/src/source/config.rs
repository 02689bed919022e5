//! The source's configuration, and its report of a failed migration.

use crate::cpus::CpuList;
use crate::error::MigrationError;
use crate::limits::Limits;
use crate::settings::Settings;
use pageferry_transport::address::Address;
use pageferry_transport::channel::{Connection, Tls};
use pageferry_transport::handshake::PlainPolicy;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// The source's configuration.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// The end of pre-copy, and the limits of rates. [`SourceSession::set`] changes them during the
    /// migration.
    ///
    /// [`SourceSession::set`]: crate::SourceSession::set
    pub settings: Settings,
    /// The background push begins when the guest has requested no page for longer than this. With
    /// zero, it begins at the start of post-copy. More is for measurements of urgent pages without
    /// a push.
    pub push_after: Duration,
    /// Whether requested pages have a way of their own. Otherwise they follow, on the bulk
    /// channels, what was sent there before: first come, first served. That is for comparisons.
    pub preempt: bool,
    /// Whether the push begins with the pages that vCPUs will probably touch next. Otherwise it
    /// goes by address, as it does without [`Self::preempt`]. That is for comparisons.
    pub prefetch: bool,
    /// The time that the background push may keep the link busy beyond the least round trip. An
    /// urgent page waits about as long at most. After a time in which no vCPU asked, it may wait
    /// for an eighth of that time, up to a round trip or 5 ms. From [`SourceConfig::MIN_QUEUE`] to
    /// [`SourceConfig::MAX_QUEUE`]; other values count as the nearer of the two.
    pub queue: Duration,
    /// The number of bulk channels, 1 to [`SourceConfig::MAX_CHANNELS`].
    pub bulk_channels: u16,
    /// The number of urgent channels, 1 to [`SourceConfig::MAX_CHANNELS`].
    pub urgent_channels: u16,
    /// The CPUs of the migration's threads. `None`: all that the caller's thread may use.
    pub cpus: Option<CpuList>,
    /// The time for which the source retries while the destination is busy with another source.
    pub busy_limit: Duration,
    /// The longest silence of the destination while it builds its machine.
    pub setup_limit: Duration,
    /// The limits of silence.
    pub limits: Limits,
    /// How the source finds the pages that the guest changes while they are sent.
    pub tracking: Tracking,
    /// The certificates for TLS. `None`: without TLS.
    pub tls: Option<Tls>,
    /// Where channels without TLS may lead.
    pub plain: PlainPolicy,
}

impl SourceConfig {
    /// The default of [`Self::queue`].
    pub const QUEUE: Duration = Duration::from_micros(100);
    /// The least value of [`Self::queue`].
    pub const MIN_QUEUE: Duration = Duration::from_micros(50);
    /// The largest value of [`Self::queue`].
    pub const MAX_QUEUE: Duration = Duration::from_secs(1);
    /// The most channels of a kind.
    pub const MAX_CHANNELS: u16 = crate::wire::MAX_CHANNELS;
}

impl Default for SourceConfig {
    fn default() -> Self {
        Self {
            settings: Settings::default(),
            push_after: Duration::ZERO,
            preempt: true,
            prefetch: true,
            queue: Self::QUEUE,
            bulk_channels: 1,
            urgent_channels: 1,
            cpus: None,
            busy_limit: Duration::from_secs(30),
            setup_limit: Duration::from_secs(60),
            limits: Limits::default(),
            tracking: Tracking::Log,
            tls: None,
            plain: PlainPolicy::default(),
        }
    }
}

/// How a source finds the pages that the guest changes while they are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Tracking {
    /// By the machine's dirty log. A machine without one ([`Machine::has_dirty_log`]) gets
    /// [`Tracking::Hash`].
    ///
    /// [`Machine::has_dirty_log`]: pageferry_machine::Machine::has_dirty_log
    #[default]
    Log,
    /// By hashes of what was sent. All pages are missing at the switch-over, and the source
    /// confirms those that have not changed since. A destination that does not keep the bytes of
    /// missing pages gets [`Tracking::Log`], or no pre-copy from a machine without a log.
    Hash,
}

impl FromStr for Tracking {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "log" => Ok(Self::Log),
            "hash" => Ok(Self::Hash),
            _ => Err(format!("unknown tracking '{text}': expected log or hash")),
        }
    }
}

/// The way to the destination.
#[derive(Clone)]
#[non_exhaustive]
pub enum Route {
    /// Connect to this address.
    To(Address),
    /// The caller connects, for example through a tunnel.
    Caller(Arc<dyn Connect>),
}

impl Route {
    /// The host that a TCP connection goes to.
    pub(super) fn host(&self) -> Option<&str> {
        match self {
            Self::To(Address::Tcp { host, .. }) => Some(host),
            _ => None,
        }
    }
}

/// Opens connections to the destination. The handshake, and TLS if there is any, come on top.
pub trait Connect: Send + Sync {
    /// Opens one connection. It is called once for each channel and each attempt, on a thread of
    /// its own.
    ///
    /// # Errors
    /// The reason. The session retries after the VM is handed over, and fails before.
    fn connect(&self) -> std::io::Result<Connection>;
}

impl From<Address> for Route {
    fn from(address: Address) -> Self {
        Self::To(address)
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::To(address) => address.fmt(f),
            Self::Caller(_) => f.write_str("the caller's connections"),
        }
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The place of the VM after a failed migration. The set is closed: a caller must know the place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceVm {
    /// It runs on at the source, unchanged. A VM that its owner had paused stays paused there.
    Runs,
    /// The source handed it over, and has not heard that the destination discarded it. It is paused
    /// at the source with all its pages.
    GivenUp,
    /// The source handed it over, and an operator took it back. It runs at the source, unless it
    /// was paused at the switch-over.
    Forced,
}

impl fmt::Display for SourceVm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Runs => "the VM runs on at the source",
            Self::GivenUp => "the VM was handed over and stays paused at the source",
            Self::Forced => {
                "the VM was handed over, and runs at the source since an operator resumed it"
            }
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
