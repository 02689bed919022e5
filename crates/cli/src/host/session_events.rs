//! The events of a session, found by comparing its status with an earlier one.

use crate::control::protocol::SessionEvent;
use pageferry_migration::SessionStatus;
use std::time::{Duration, Instant};

/// The interval between two reports of the rates.
const RATES_EVERY: Duration = Duration::from_secs(1);

/// The part of a session's status that was seen last.
#[derive(Debug, Default)]
pub(super) struct SessionEvents {
    stage: Option<&'static str>,
    /// The newest generation that was connected.
    generation: u32,
    connected: bool,
    /// The pre-copy passes that had ended.
    passes: u32,
    /// The time of the last report of the rates, or of the first look.
    rates_at: Option<Instant>,
}

impl SessionEvents {
    /// Returns the rates and the time left, once a second while the session lasts.
    pub(super) fn rates(&mut self, status: &SessionStatus) -> Option<SessionEvent> {
        if status.stage == "none" || status.is_over() {
            return None;
        }
        let last = self.rates_at.get_or_insert_with(Instant::now);
        if last.elapsed() < RATES_EVERY {
            return None;
        }
        *last = Instant::now();
        Some(SessionEvent::Rates {
            bytes_left: status.bytes_left(),
            page_bytes: status.page_bytes,
            page_rate: status.page_rate,
            dirty_rate: status.dirty_rate,
            time_left_ms: status.time_left.map(super::recovery::ms),
        })
    }

    /// Returns what happened since the last call. A loss that was repaired meanwhile is seen by the
    /// generation.
    pub(super) fn see(&mut self, status: &SessionStatus) -> Vec<SessionEvent> {
        let mut events = Vec::new();
        if status.stage == "none" {
            return events;
        }
        let newer = status.generation != self.generation;
        if self.connected && (newer || !status.connected) && !status.is_over() {
            self.connected = false;
            events.push(SessionEvent::Lost {
                generation: self.generation,
                why: status.last_loss.clone(),
            });
        }
        if !self.connected && status.connected {
            if self.generation > 0 {
                events.push(SessionEvent::Reconnected {
                    generation: status.generation,
                    peer: status.peer.clone(),
                });
            }
            (self.connected, self.generation) = (true, status.generation);
        }
        if self.passes != status.passes {
            self.passes = status.passes;
            events.push(SessionEvent::PassEnded {
                passes: status.passes,
                bytes_left: status.bytes_left(),
                dirty_rate: status.dirty_rate,
                link_rate: status.link_rate,
                time_left_ms: status.time_left.map(super::recovery::ms),
                blackout_forecast_us: status.blackout_forecast.map(super::recovery::us),
            });
        }
        if self.stage != Some(status.stage) {
            self.stage = Some(status.stage);
            events.push(SessionEvent::Stage(status.stage.into()));
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(stage: &'static str, generation: u32, connected: bool) -> SessionStatus {
        let mut status = SessionStatus::default();
        status.stage = stage;
        status.generation = generation;
        status.connected = connected;
        status.last_loss = Some("why".into());
        status
    }

    fn stage(name: &str) -> SessionEvent {
        SessionEvent::Stage(name.into())
    }

    #[test]
    fn losses_and_stages_are_seen_once() {
        let mut events = SessionEvents::default();
        let lost = |generation| SessionEvent::Lost {
            generation,
            why: Some("why".into()),
        };
        let reconnected = |generation| SessionEvent::Reconnected {
            generation,
            peer: None,
        };
        assert_eq!(events.see(&status("none", 0, false)), []);
        assert_eq!(events.see(&status("setup", 1, false)), [stage("setup")]);
        assert_eq!(events.see(&status("setup", 1, true)), []);
        let handed_over = |generation, connected| status("handed-over", generation, connected);
        assert_eq!(events.see(&handed_over(1, true)), [stage("handed-over")]);
        assert_eq!(events.see(&handed_over(2, false)), [lost(1)]);
        assert_eq!(events.see(&handed_over(3, false)), []);
        assert_eq!(events.see(&handed_over(4, true)), [reconnected(4)]);
        // Repaired between two looks.
        let both = [lost(4), reconnected(5)];
        assert_eq!(events.see(&handed_over(5, true)), both);
        let mut passed = handed_over(5, true);
        passed.passes = 2;
        let seen = events.see(&passed);
        assert!(
            matches!(seen[..], [SessionEvent::PassEnded { passes: 2, .. }]),
            "{seen:?}"
        );
        let mut end = status("completed", 5, false);
        end.passes = 2;
        assert_eq!(events.see(&end), [stage("completed")]);
        assert_eq!(events.see(&end), []);
    }
}
