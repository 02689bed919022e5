//! Runs a model, and gathers its results.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// All possible results of `model`, with at most this many preemptions in one run.
pub(crate) fn explore<O: Ord + Send + 'static>(
    preemptions: usize,
    model: impl Fn() -> O + Sync + Send + 'static,
) -> BTreeSet<O> {
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 5000;
    let outcomes = Arc::clone(&seen);
    builder.check(move || {
        let outcome = model();
        outcomes.lock().unwrap().insert(outcome);
    });
    std::mem::take(&mut seen.lock().unwrap())
}
