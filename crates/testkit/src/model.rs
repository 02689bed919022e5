#![expect(
    unsafe_code,
    reason = "a cell that loom watches is shared between threads"
)]
//! Running models under loom, and a cell that finds accesses without order.

use loom::cell::UnsafeCell;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// Runs every interleaving of `model` with at most `preemptions` preemptions. Returns the outcomes.
///
/// # Panics
/// If `model` panics in any run, or if loom finds accesses that are not ordered.
pub fn explore<O: Ord + Send + 'static>(
    preemptions: usize,
    model: impl Fn() -> O + Sync + Send + 'static,
) -> BTreeSet<O> {
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 20_000;
    let outcomes = Arc::clone(&seen);
    builder.check(move || {
        let outcome = model();
        outcomes.lock().expect("no panic").insert(outcome);
    });
    std::mem::take(&mut seen.lock().expect("no panic"))
}

/// A cell without data. Loom reports a read or a write that is not ordered before or after another
/// write.
#[derive(Debug)]
pub struct Watched(UnsafeCell<()>);

// SAFETY: the cell holds no data. The models look for accesses that are not ordered.
unsafe impl Sync for Watched {}
// SAFETY: as above.
unsafe impl Send for Watched {}

impl Watched {
    /// A cell that no thread has accessed.
    #[must_use]
    pub fn new() -> Self {
        Self(UnsafeCell::new(()))
    }

    /// Reads the cell. Several threads may do so at once.
    pub fn read(&self) {
        self.0.with(|_| ());
    }

    /// Writes the cell, as a free would. No other access may run beside it.
    pub fn write(&self) {
        self.0.with_mut(|_| ());
    }
}

impl Default for Watched {
    fn default() -> Self {
        Self::new()
    }
}
