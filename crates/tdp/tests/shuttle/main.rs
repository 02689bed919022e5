//! Whole flows of the MMU under a scheduler that decides every step (the `shuttle` crate). vCPUs
//! fault, store, and check the values that they load. Beside them run notifiers, readers of the
//! log, splitting and recovery, aging, and zaps of everything.
//!
//! ```sh
//! RUSTFLAGS="--cfg shuttle" cargo test -p pageferry-tdp --profile stress --test shuttle
//! ```
//!
//! `PAGEFERRY_SHUTTLE_SECONDS` is the time for all scenarios together, 40 by default. A failure
//! prints its schedule, which `shuttle::replay` takes. Tables have two entries here, so that a tree
//! has all its levels and few steps. "failing seed" beside a test that passes only means that its
//! time was over. Shuttle knows sequential consistency only. The models of loom and ThreadSanitizer
//! check orderings.
//!
//! # Caught faults
//!
//! Each row breaks one rule. The last column has the number of schedules of the first scenario that
//! failed. A few thousand schedules of each run.
//!
//! | broken rule | found as | schedules |
//! |---|---|---|
//! | children of a table cut off are read, not exchanged for `FROZEN` | counts, tables left over | 8 |
//! | tables are freed after the flush, without a grace period | freed table reached | 680 |
//! | tables go without a flush | freed table reached, frame used that was taken | 38 |
//! | the check of a fault's ticket leaves out the sequence | frame used that was taken | 599 |
//! | ... leaves out the range in progress | frame used that was taken | 1 |
//! | ... looks at the fault's frame, not the large page | frame used that was taken | 1 |
//! | ... comes before the lock | frame used that was taken | 2344 |
//! | pages are recovered inside an invalidation | page mapped elsewhere | 2972 |
//! | a replaced root does not count as owed | frame used that was taken, page not in the log | 4126 |
//! | an old tree goes without `Flush::Roots` | link to a freed table | 1 |
//! | ... without a grace period | freed table reached | 3426 |
//! | aging leaves no trace of the permissions it takes | page not in the log | 460 |
//! | a fault waits for frozen entries | no end (break-before-make) | 549 |
//! | (W) the log is told before the entry is writable | page not in the log | 2429 |
//! | (W) the reader protects first, then takes bits | page not in the log | 1 |
//! | an entry is stored, not compared and exchanged | everything | 1 |
//! | other workers' debts are not flushed | page not in the log, frame used that was taken | 357 |
//! | a batch counts as closed before its flush | page not in the log, frame used that was taken | 4256 |
//! | a lost dirty bit owes no flush | page not in the log | 11 |
//!
//! Thousands of schedules of the matching scenario do not catch these faults:
//!
//! - Aging is counted before the change: three threads would have to meet.
//! - A walk passes over a link that became a leaf: only a zap beside a recovery could show it.
//! - An invalidation begins, or a root is swapped, without the exclusive side. The first turn of
//!   the zap takes that side anyway, and the flush covers the old tree.
#![cfg(shuttle)]

#[path = "../it/guest/mod.rs"]
mod guest;

use guest::{Length, Machine, Role};
use pageferry_tdp::format::{Arm64Ipa48, Ept4, Ept4NoAd, Format, Sv48x4Svade};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, Runner};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A page on each side of the root's middle has its own table on each level below.
const PAGES: u64 = 8;
const SCENARIOS: u32 = 9;

fn check<F: Format>(vcpus: usize, accesses: u64, roles: &'static [Role], small: bool) {
    let seconds = std::env::var("PAGEFERRY_SHUTTLE_SECONDS");
    let seconds: u64 = seconds.map_or(40, |s| s.parse().expect("a number of seconds"));
    let time = Duration::from_secs(seconds) / SCENARIOS / 2;
    let mut config = Config::new();
    config.max_time = Some(time);
    config.silence_warnings = true;
    config.stack_size = 1 << 17;
    let count = AtomicU64::new(0);
    let count: &'static AtomicU64 = Box::leak(Box::new(count));
    let run = move || {
        count.fetch_add(1, Ordering::Relaxed);
        Machine::<F>::run(vcpus, PAGES, roles, small, Length::Accesses(accesses));
    };
    let both = AssertUnwindSafe(|| {
        let random = Runner::new(RandomScheduler::new(usize::MAX), config.clone()).run(run);
        assert!(random > 0);
        Runner::new(PctScheduler::new(4, usize::MAX), config).run(run);
    });
    let ended = catch_unwind(both);
    let schedules = count.load(Ordering::Relaxed);
    println!("{}, {roles:?}: {schedules} schedules", F::NAME);
    if let Err(why) = ended {
        resume_unwind(why);
    }
}

#[test]
fn faults_and_moving_frames() {
    check::<Ept4>(2, 8, &[Role::Notifier], false);
}

#[test]
fn faults_and_a_log_by_dirty_bits() {
    check::<Ept4>(2, 8, &[Role::Logger, Role::Ager], false);
}

#[test]
fn faults_and_a_log_by_write_protection() {
    check::<Sv48x4Svade>(2, 8, &[Role::Logger, Role::Zapper], false);
}

#[test]
fn a_log_where_aging_takes_permissions() {
    check::<Ept4NoAd>(1, 16, &[Role::Logger, Role::Ager, Role::Ager], true);
}

#[test]
fn pages_that_change_size_under_moving_frames() {
    check::<Ept4>(1, 8, &[Role::Resizer, Role::Notifier, Role::Zapper], false);
}

#[test]
fn break_before_make() {
    check::<Arm64Ipa48<false>>(2, 8, &[Role::Resizer, Role::Notifier], false);
}

/// Splits leave entries frozen briefly, and the log's first pass meets them.
#[test]
fn break_before_make_under_a_log() {
    check::<Arm64Ipa48<false>>(1, 8, &[Role::LazyLogger, Role::Splitter], false);
}

#[test]
fn everything_zapped_under_moving_frames() {
    check::<Ept4>(2, 8, &[Role::Destroyer, Role::Notifier], true);
}

#[test]
fn everything_zapped_under_a_log() {
    check::<Sv48x4Svade>(2, 8, &[Role::Destroyer, Role::Logger], true);
}
