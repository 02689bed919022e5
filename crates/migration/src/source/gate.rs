//! The gate before the background push.
//!
//! **Guarantee.** A bulk thread that looks at the gate after a request was claimed, and before its
//! answer is in the socket, finds it closed. It opens when the last answer is in the socket, or
//! when the thread that held the claim ends.
//!
//! **Mechanism.** A count of claimed pages. A bulk thread that finds the gate closed looks again a
//! little later, so nobody has to wake it. It may have looked just before the claim. Then one frame
//! goes ahead of the answer. The time of the last claim tells the governor of the push whether
//! anybody asks.
//!
//! **Neighbours.** `urgent` closes and opens it, `bulk` looks at it.

use crate::clock::monotonic_ns;
use crate::sync::{AtomicU64, Ordering};

/// The claimed pages of requests that are not in the socket yet.
#[derive(Debug)]
pub(super) struct UrgentGate {
    waiting: AtomicU64,
    asked: AtomicU64,
}

impl UrgentGate {
    pub(super) fn new() -> Self {
        Self {
            waiting: AtomicU64::new(0),
            asked: AtomicU64::new(0),
        }
    }

    /// Notes a claimed page that is to be answered, until the result is dropped: the answer is in
    /// the socket then, or none will come.
    pub(super) fn to_answer(&self) -> Due<'_> {
        // Neither orders anything: the ledger says who sends a page.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.asked.store(monotonic_ns(), Ordering::Relaxed);
        Due(self)
    }

    /// Whether a request waits for its answer.
    pub(super) fn is_closed(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// The time of the last claim, by the clock of [`monotonic_ns`].
    pub(super) fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }
}

/// A page that is to be answered. A thread that ends in any way, also by a panic, drops it.
#[must_use = "the gate opens when it is dropped"]
pub(super) struct Due<'a>(&'a UrgentGate);

impl Drop for Due<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_panics_leaves_the_gate_open() {
        let gate = UrgentGate::new();
        std::thread::scope(|scope| {
            let lost = scope.spawn(|| {
                let _due = [gate.to_answer(), gate.to_answer()];
                assert!(gate.is_closed());
                std::panic::resume_unwind(Box::new(()));
            });
            assert!(lost.join().is_err());
        });
        assert!(!gate.is_closed());
    }
}
