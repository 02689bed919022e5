//! The time limits of a session.

use crate::handshake::HELLO_LIMIT;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The time limits of a session. Each measures silence: the time for which a peer that is due to
/// send says nothing at all. A slow peer that goes on sending exceeds none of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest silence of a channel before the VM is handed over. The migration then fails, and
    /// the VM runs on at the source.
    pub silence: Duration,
    /// The longest silence of a channel after the VM is handed over. The channel then counts as
    /// lost, and the source opens another. At least 100 ms.
    pub dead_after: Duration,
    /// The time without a working control channel after which a side gives up. `None`: never.
    pub give_up_after: Option<Duration>,
    /// The limit for opening a channel, from the first packet to the end of the handshake. A side
    /// that only has to tell its peer the end waits as long for its return: a destination with
    /// every page, and a source that has cancelled.
    pub connect: Duration,
    /// The limit of a destination for a preamble, from the connection on: 5 s unless set. A source
    /// that opens a session has twice this time for its first word.
    pub hello: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            silence: Duration::from_secs(20),
            dead_after: Duration::from_secs(2),
            give_up_after: None,
            connect: Duration::from_secs(10),
            hello: HELLO_LIMIT,
        }
    }
}

impl Limits {
    /// The shortest `dead_after`: a busy host may not schedule a thread for this long.
    pub const MIN_DEAD_AFTER: Duration = Duration::from_millis(100);

    /// The interval in which a side says something on each channel: a quarter of the least
    /// patience, as that of the other side is not known here.
    pub(crate) const INTERVAL: Duration = Duration::from_millis(25);
}

/// The longest silence that a channel may have now. It changes when the VM is handed over.
#[derive(Debug)]
pub(crate) struct Patience(AtomicU64);

impl Patience {
    pub(crate) fn new(limit: Duration) -> Self {
        let patience = Self(AtomicU64::new(0));
        patience.set(limit);
        patience
    }

    pub(crate) fn set(&self, limit: Duration) {
        let ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        self.0.store(ms, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
}
