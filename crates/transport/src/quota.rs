//! A bound on what a peer makes this side say to people.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The reports that may follow each other at once.
const BURST: u32 = 32;
/// The interval in which one more is allowed.
const REFILL: Duration = Duration::from_secs(1);

/// Bounds reports on peers: 32 at once, and then one a second. The others are counted. Any thread
/// may ask at any time.
#[derive(Debug)]
pub struct Quota(Mutex<State>);

#[derive(Debug)]
struct State {
    left: u32,
    refilled: Instant,
    left_out: u64,
}

impl Default for Quota {
    fn default() -> Self {
        Self::new()
    }
}

impl Quota {
    /// Nothing was reported yet.
    #[must_use]
    pub fn new() -> Self {
        Self(Mutex::new(State {
            left: BURST,
            refilled: Instant::now(),
            left_out: 0,
        }))
    }

    /// Returns whether one more report is allowed: then with the number of those that were left out
    /// since the last.
    pub fn take(&self) -> Option<u64> {
        self.take_at(Instant::now())
    }

    fn take_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = now.saturating_duration_since(state.refilled);
        let more = u32::try_from(passed.as_secs() / REFILL.as_secs()).unwrap_or(u32::MAX);
        if more > 0 {
            state.left = state.left.saturating_add(more).min(BURST);
            state.refilled = now;
        }
        if state.left == 0 {
            state.left_out += 1;
            return None;
        }
        state.left -= 1;
        Some(std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_said_once_a_second_and_counted() {
        let quota = Quota::new();
        let began = Instant::now();
        for _ in 0..BURST {
            assert_eq!(quota.take_at(began), Some(0));
        }
        for _ in 0..1000 {
            assert_eq!(quota.take_at(began), None);
        }
        let later = began + REFILL + Duration::from_millis(1);
        assert_eq!(quota.take_at(later), Some(1000));
        assert_eq!(quota.take_at(later), None);
        let much_later = later + 100 * REFILL;
        let said = (0..1000).filter(|_| quota.take_at(much_later).is_some());
        assert_eq!(said.count(), BURST as usize);
    }
}
