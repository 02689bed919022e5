//! The time limits of a session.

use pageferry_transport::handshake::HELLO_LIMIT;
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The time limits of a session. Each measures silence: the time for which a peer that is due to
/// send says nothing at all. A slow peer that goes on sending exceeds none of them. A side does not
/// count the time for which its own host let it not run.
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
    /// The time for which an opening is tried again that ended without a reason, as when a crowd of
    /// strangers takes its place: 5 s unless set.
    pub retry: Duration,
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
            retry: Duration::from_secs(5),
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

/// The silence of a peer on a channel, in the time for which this side ran.
///
/// A thread looks several times in 100 ms. So if more time has passed since its last look, the host
/// has not let it run. The peer may have had no better luck.
#[derive(Debug)]
pub struct Silence {
    heard: Instant,
    looked: Cell<Instant>,
    counted: Cell<Duration>,
}

impl Silence {
    /// The most that counts between two looks.
    const LOOK: Duration = Duration::from_millis(4 * Limits::INTERVAL.as_millis() as u64);

    /// Silence from now on.
    #[expect(clippy::new_without_default, reason = "it begins when it is made")]
    #[must_use]
    pub fn new() -> Self {
        let now = Instant::now();
        Self {
            heard: now,
            looked: Cell::new(now),
            counted: Cell::new(Duration::ZERO),
        }
    }

    /// The time at which the peer was last heard.
    #[must_use]
    pub const fn since(&self) -> Instant {
        self.heard
    }

    /// Whether the silence is longer than `patience`.
    pub fn exceeds(&self, patience: Duration) -> bool {
        let now = Instant::now();
        let passed = now.duration_since(self.looked.replace(now));
        self.counted
            .set(self.counted.get() + passed.min(Self::LOOK));
        self.counted.get() > patience
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_this_side_did_not_run_is_no_silence() {
        let silence = Silence::new();
        let patience = 2 * Silence::LOOK;
        for looks in 1..=2 {
            std::thread::sleep(2 * Silence::LOOK);
            assert!(!silence.exceeds(patience), "after {looks} looks");
        }
        std::thread::sleep(Silence::LOOK / 4);
        assert!(silence.exceeds(patience));
    }
}
