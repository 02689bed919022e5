//! The gate before the background push.
//!
//! **Guarantee.** A bulk thread that looks at the gate after a request was claimed, and before its
//! answer is in the socket, finds it closed. It opens when the last answer is in the socket, or
//! when the thread that held the claim ends.
//!
//! **Mechanism.** A count of claimed pages. A bulk thread that finds the gate closed looks again a
//! little later, so nobody has to wake it. It may have looked just before the claim. Then one frame
//! goes ahead of the answer.
//!
//! **Neighbours.** `urgent` closes and opens it, `bulk` looks at it.

use crate::sync::{AtomicU64, Ordering};

/// The claimed pages of requests that are not in the socket yet.
#[derive(Debug)]
pub(super) struct Gate(AtomicU64);

impl Gate {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Notes claimed pages that are to be answered.
    pub(super) fn to_answer(&self, pages: usize) {
        // The count orders nothing: the ledger says who sends a page.
        self.0.fetch_add(pages as u64, Ordering::Relaxed);
    }

    /// Notes that the answers with these pages are in the socket, or that none will come.
    pub(super) fn answered(&self, pages: usize) {
        self.0.fetch_sub(pages as u64, Ordering::Relaxed);
    }

    /// Whether a request waits for its answer.
    pub(super) fn is_closed(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}
