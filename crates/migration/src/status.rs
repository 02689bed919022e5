//! The status of a session, for other threads of its process.

use crate::report::Protected;
use crate::settings::Settings;
use crate::wire::ChannelId;
use pageferry_addr::PAGE_SIZE;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time over which rates are measured.
const WINDOW: Duration = Duration::from_secs(1);
/// The least time between two samples of a rate.
const SAMPLE_EVERY: Duration = Duration::from_millis(50);

/// The status of one side of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionStatus {
    /// The progress of the session, in one word of docs/migration-states.md. `none` before it
    /// begins.
    pub stage: &'static str,
    /// Whether the control channel is open.
    pub connected: bool,
    /// The address of the peer on the control channel.
    pub peer: Option<String>,
    /// What protects the channels: of the newest control channel. `None` before the first.
    pub protected: Option<Protected>,
    /// The generation of the channels.
    pub generation: u32,
    /// How often the control channel was lost.
    pub reconnects: u32,
    /// The channels that were open and were lost, of all roles. The channels that end with a lost
    /// control channel do not count.
    pub channels_lost: u64,
    /// The open bulk and urgent channels.
    pub channels: Vec<ChannelId>,
    /// Pages that the destination has not confirmed (source), or that are missing (destination).
    pub pages_left: u64,
    /// Pages that were sent and that have no receipt yet (source).
    pub pages_in_flight: u64,
    /// Bytes of pages that the destination has acknowledged (source), or that came (destination).
    pub page_bytes: u64,
    /// Whether the VM was paused by its owner when it was switched over. Its owner at the
    /// destination may have resumed it since. `false` before the switch-over.
    pub paused: bool,
    /// Bytes of pages acknowledged or received a second, over about the last second. 0 before the
    /// first measurement, and once the session is over.
    pub page_rate: u64,
    /// Bytes of pages that the guest dirtied a second during the last pre-copy pass (source). A
    /// page counts once a pass. `None` before the first pass is over.
    pub dirty_rate: Option<u64>,
    /// Pre-copy passes that have ended (source).
    pub passes: u32,
    /// Bytes of pages that the destination has acknowledged a second, during the last pre-copy pass
    /// that was long enough to tell (source). `None` before.
    pub link_rate: Option<u64>,
    /// The expected blackout, computed at the end of each pre-copy pass (source).
    pub blackout_forecast: Option<Duration>,
    /// Why pre-copy ended with many pages left, or goes on, for people (source).
    pub note: Option<String>,
    /// The operator's settings (source).
    pub settings: Option<Settings>,
    /// The time until no page is left. In pre-copy it is computed at the end of each pass, from the
    /// rates of the guest and of the link; `None` before, and while the operator chooses the
    /// switch-over. After the hand-over it holds if pages go on to be confirmed as fast as in the
    /// last second. Zero pages count as pages here. `None` without a connection, and while no page
    /// is confirmed.
    pub time_left: Option<Duration>,
    /// Threads that wait for missing pages now (destination).
    pub waiting_faults: u64,
    /// How long there has been no control channel, if there is none.
    pub lost_for: Option<Duration>,
    /// The reason why a channel was lost the last time.
    pub last_loss: Option<String>,
    /// Connections that were refused since the destination listens (destination).
    pub strangers: u64,
}

impl Default for SessionStatus {
    fn default() -> Self {
        Self {
            stage: "none",
            connected: false,
            peer: None,
            protected: None,
            generation: 0,
            reconnects: 0,
            channels_lost: 0,
            channels: Vec::new(),
            pages_left: 0,
            pages_in_flight: 0,
            page_bytes: 0,
            paused: false,
            page_rate: 0,
            dirty_rate: None,
            passes: 0,
            link_rate: None,
            blackout_forecast: None,
            note: None,
            settings: None,
            time_left: None,
            waiting_faults: 0,
            lost_for: None,
            last_loss: None,
            strangers: 0,
        }
    }
}

impl SessionStatus {
    /// The memory of [`SessionStatus::pages_left`], in bytes.
    #[must_use]
    pub const fn bytes_left(&self) -> u64 {
        self.pages_left.saturating_mul(PAGE_SIZE)
    }

    /// Whether the session is over. The other figures are then those of its end.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(
            self.stage,
            "completed"
                | "kept"
                | "returned"
                | "given-up"
                | "resumed-here"
                | "discarded"
                | "incomplete"
        )
    }

    /// Whether pages only go away: the VM is handed over.
    fn counts_down(&self) -> bool {
        matches!(
            self.stage,
            "handed-over" | "drained" | "running" | "complete" | "completed"
        )
    }
}

/// Samples of a value that grows, for its rate. A value that falls begins anew.
#[derive(Debug, Default)]
struct Growth(VecDeque<(Instant, u64)>);

impl Growth {
    fn see(&mut self, now: Instant, value: u64) {
        if self.0.back().is_some_and(|&(_, last)| value < last) {
            self.0.clear();
        }
        if let Some(&(last, _)) = self.0.back()
            && now.saturating_duration_since(last) < SAMPLE_EVERY
        {
            return;
        }
        self.0.push_back((now, value));
        // The first sample that stays is at least as old as the window.
        while self
            .0
            .get(1)
            .is_some_and(|&(at, _)| now.saturating_duration_since(at) >= WINDOW)
        {
            self.0.pop_front();
        }
    }

    /// The growth a second. `None` before the second sample.
    fn a_second(&self) -> Option<f64> {
        let (&(from, least), &(to, most)) = (self.0.front()?, self.0.back()?);
        let took = to.saturating_duration_since(from).as_secs_f64();
        (took > 0.0).then(|| (most - least) as f64 / took)
    }
}

/// The status, and the samples of its rates.
#[derive(Debug, Default)]
struct Published {
    status: SessionStatus,
    bytes: Growth,
    /// Of the pages that are done: `u64::MAX` less those that are left.
    done: Growth,
}

impl Published {
    fn write(&mut self, mut status: SessionStatus, now: Instant) {
        self.bytes.see(now, status.page_bytes);
        if status.counts_down() {
            self.done.see(now, u64::MAX - status.pages_left);
        } else {
            self.done = Growth::default();
        }
        if !status.is_over() {
            status.page_rate = self.bytes.a_second().unwrap_or(0.0) as u64;
        }
        let left = status.pages_left as f64;
        status.time_left = match self.done.a_second() {
            _ if status.counts_down() && status.pages_left == 0 => Some(Duration::ZERO),
            Some(rate) if rate > 0.0 && status.lost_for.is_none() && !status.is_over() => {
                Duration::try_from_secs_f64(left / rate).ok()
            }
            _ if status.stage == "pre-copy" => status.time_left,
            _ => None,
        };
        self.status = status;
    }
}

/// The place where a supervisor publishes its status.
#[derive(Debug, Default)]
pub(crate) struct Board(Mutex<Published>);

impl Board {
    /// Publishes a status. Its rates and its time left are computed here.
    pub(crate) fn write(&self, status: SessionStatus) {
        let mut published = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        published.write(status, Instant::now());
    }

    /// Publishes ahead of the rest whether the VM was paused by its owner: a panic in the
    /// switch-over must not undo that.
    pub(crate) fn set_paused(&self, paused: bool) {
        let mut published = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        published.status.paused = paused;
    }

    pub(crate) fn read(&self) -> SessionStatus {
        let published = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        published.status.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(stage: &'static str, pages_left: u64, page_bytes: u64) -> SessionStatus {
        SessionStatus {
            stage,
            pages_left,
            page_bytes,
            ..SessionStatus::default()
        }
    }

    #[test]
    fn an_owners_pause_is_told_before_the_stage_changes() {
        let board = Board::default();
        board.write(status("pre-copy", 1000, 0));
        board.set_paused(true);
        let told = board.read();
        assert_eq!(
            (told.stage, told.pages_left, told.paused),
            ("pre-copy", 1000, true)
        );
    }

    #[test]
    fn rates_are_those_of_the_last_second() {
        let mut published = Published::default();
        let began = Instant::now();
        let mut at = |ms: u64, status| {
            published.write(status, began + Duration::from_millis(ms));
            published.status.clone()
        };
        let first = at(0, status("pre-copy", 1000, 0));
        assert_eq!((first.page_rate, first.time_left), (0, None));
        let fast = at(100, status("pre-copy", 500, 1 << 20));
        assert_eq!(fast.page_rate, 10 << 20);
        assert_eq!(fast.time_left, None, "no pass has ended");
        let mut passed = status("pre-copy", 500, 1 << 20);
        passed.time_left = Some(Duration::from_secs(7));
        assert_eq!(at(150, passed.clone()).time_left, passed.time_left);
        at(200, status("handed-over", 1000, 1 << 20));
        for step in 1..=20 {
            at(
                200 + 100 * step,
                status("handed-over", 1000 - 10 * step, (1 << 20) + (step << 16)),
            );
        }
        let steady = at(2250, status("handed-over", 795, (1 << 20) + (41 << 15)));
        assert_eq!(steady.page_rate, 10 << 16, "old samples do not count");
        assert_eq!(steady.time_left, Some(Duration::from_secs_f64(7.95)));
        let mut lost = status("handed-over", 795, (1 << 20) + (41 << 15));
        lost.lost_for = Some(Duration::from_millis(1));
        assert_eq!(at(2300, lost.clone()).time_left, None);
        lost.lost_for = None;
        let still = at(9000, lost);
        assert_eq!((still.page_rate, still.time_left), (0, None));
        let over = at(9100, status("completed", 0, 5 << 20));
        assert_eq!((over.page_rate, over.time_left), (0, Some(Duration::ZERO)));
        let failed = at(9200, status("given-up", 5, 5 << 20));
        assert_eq!(failed.time_left, None);
    }
}
