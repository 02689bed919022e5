//! Spinning that gets out of the way when the processor is wanted.
//!
//! A wake-up across cores costs about ten times what a spinning reader needs to see its bytes, so a
//! reader that expects an answer soon does not sleep at once. But it may share its core with the
//! very thread it waits for: then it must yield. And it may share it with threads that compute:
//! then a yield costs one of their slices (milliseconds), where a sleeper would be woken as soon as
//! its bytes come. Which of the two it is shows in how long a yield takes; a thread that found its
//! core contended does not yield for a while, spins shortly and sleeps.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// For this long a spinner neither yields nor sleeps. Short: where both ends share a core, which
/// the scheduler favours for threads that wake each other, this is lost at either end of each
/// exchange.
const TIGHT: Duration = Duration::from_micros(2);
/// A yield that took longer was somebody else's work.
const LONG_YIELD: Duration = Duration::from_micros(60);
/// For how long a core stays known as contended.
const REMEMBER: Duration = Duration::from_millis(50);

thread_local! {
    static CONTENDED_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// One wait of a thread.
#[derive(Clone, Copy, Debug)]
pub struct Spinner {
    since: Instant,
    budget: Duration,
}

impl Spinner {
    /// A wait that begins now and may spin for `budget`.
    #[must_use]
    pub fn new(budget: Duration) -> Self {
        Self {
            since: Instant::now(),
            budget,
        }
    }

    /// One round of waiting: returns soon, true as long as spinning is worth it, false when it is
    /// time to sleep.
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
