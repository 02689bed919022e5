//! Interleavings of the MMU's kernel: one entry and the threads that change it, a table and its
//! users when it is freed.
//!
//! The format has two levels, with tables of two entries. A vCPU in its guest holds its gate, and
//! the platform's flush takes each gate once. Freed tables and host pages that were given away are
//! cells that loom watches. So loom reports accesses that are not ordered, not only stale values.
//! There are three preemptions, and two in the models of aging and of an invalidation beside a fast
//! zap. All but those take a second or less.
//!
//! The models that fail when a rule is broken (tried by hand, each model by its name below):
//! - entries of a table that was cut off are read and not frozen: `a_fault_beside_a_zap_..`,
//!   `a_fault_beside_a_recovery_..`;
//! - a store for the compare-exchange in `Session::change`: `two_faults_..`,
//!   `a_fault_beside_a_zap_..`, `a_fault_beside_a_recovery_..`, `a_split_beside_the_hardware_..`;
//! - no grace period in `Worker::reclaim`, or one epoch of it:
//!   `a_table_is_not_freed_before_who_walks_it_..`, `a_fault_beside_a_zap_..`; none in
//!   `OldRoot::dismantle`: `a_tree_is_not_freed_..`;
//! - no flush in `Batch::settle`: `a_table_is_not_freed_before_hardware_..`, and all models of
//!   pages that are lost or given away;
//! - the flush before the change: all models of stores, `a_fault_beside_an_invalidation_..`,
//!   `who_protects_pays_..`;
//! - the report to the log before the change: `no_store_is_lost_that_a_fast_fault_allows`;
//! - the ticket checked before the lock, or not at all, or without the range:
//!   `a_fault_beside_an_invalidation_..`;
//! - roots swapped without the exclusive side: `a_fault_beside_a_fast_zap_..`; a swap that is not
//!   counted as owed, or no `Flush::Roots`: `an_invalidation_beside_a_fast_zap_..`;
//! - a fault that waits for a frozen entry: `a_split_by_break_before_make_..` (it never ends);
//! - a sweep of markers without moving the invalidation sequence on before, or with moving it
//!   after: `no_marker_of_an_old_..`;
//! - a link followed without acquire: `a_page_is_there_..`; an exchange without release and
//!   acquire: that and `who_protects_pays_..`;
//! - aged permissions counted before the change, not at all, or without release:
//!   `who_protects_pays_for_who_ages`.

mod faults;
mod format;
mod freed;
mod logs;
mod machine;
mod sizes;
mod vm;
mod zaps;

use pageferry_testkit::model::explore;
use std::collections::BTreeSet;

/// All possible results of `model`. It runs twice, with its threads in either order. Loom remembers
/// only the last access of an atomic. So a thread that loads before it exchanges can hide another
/// thread's earlier load, and one order alone explores less than it seems to.
fn explore_orders<O: Ord + std::fmt::Debug + Send + 'static>(
    model: impl Fn(bool) -> O + Copy + Sync + Send + 'static,
) -> BTreeSet<O> {
    explore_preempting(3, model)
}

fn explore_preempting<O: Ord + std::fmt::Debug + Send + 'static>(
    preemptions: usize,
    model: impl Fn(bool) -> O + Copy + Sync + Send + 'static,
) -> BTreeSet<O> {
    let mut seen = explore(preemptions, move || model(false));
    seen.append(&mut explore(preemptions, move || model(true)));
    println!("{seen:?}");
    seen
}
