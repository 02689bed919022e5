//! Spinning that gives way when other threads need the core.
//!
//! A wake-up across cores takes about ten times as long as a spinning reader needs to see its
//! bytes. So a reader that expects an answer soon spins first. It may share its core with other
//! threads:
//!
//! - With the thread that it waits for. Then it must yield.
//! - With threads that compute. Then a yield costs one of their slices (milliseconds), and sleeping
//!   is better.
//!
//! The duration of a yield tells the two apart. After a long yield, the thread does not yield for a
//! while: it spins shortly and sleeps.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// The time for which a spinner neither yields nor sleeps. It is short, since both sides lose it in
/// each exchange if they share a core. The scheduler favours that for threads that wake each other.
const TIGHT: Duration = Duration::from_micros(2);
/// After a longer yield, the core counts as contended.
const LONG_YIELD: Duration = Duration::from_micros(60);
/// The time for which a core stays marked as contended.
const REMEMBER: Duration = Duration::from_millis(50);

thread_local! {
    static CONTENDED_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// One wait of a thread, with a spin budget.
#[derive(Clone, Copy, Debug)]
pub struct Spinner {
    since: Instant,
    budget: Duration,
}

impl Spinner {
    /// Starts a wait that may spin for `budget`.
    #[must_use]
    pub fn new(budget: Duration) -> Self {
        Self {
            since: Instant::now(),
            budget,
        }
    }

    /// Spins for one short round. Returns true if the caller should spin on, false if it should
    /// sleep.
    #[must_use]
    pub fn spin(&self) -> bool {
        let now = Instant::now();
        let waited = now - self.since;
        if waited < TIGHT.min(self.budget) {
            std::hint::spin_loop();
            return true;
        }
        let contended = CONTENDED_UNTIL.get().is_some_and(|until| now < until);
        if waited >= self.budget || contended {
            return false;
        }
        rustix::thread::sched_yield();
        if now.elapsed() > LONG_YIELD {
            CONTENDED_UNTIL.set(Some(Instant::now() + REMEMBER));
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_ends_with_its_budget() {
        let spinner = Spinner::new(Duration::from_micros(100));
        let mut rounds = 0;
        while spinner.spin() {
            rounds += 1;
            assert!(rounds < 10_000_000, "spins for ever");
        }
        assert!(spinner.since.elapsed() >= TIGHT);
        assert!(
            !Spinner::new(Duration::ZERO).spin(),
            "no budget, no spinning"
        );
    }
}
