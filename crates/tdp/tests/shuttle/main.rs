//! Whole flows of the MMU under a scheduler that decides every step (the `shuttle` crate): vCPUs that fault, store and check
//! what they load, beside notifiers, readers of the log, splitting and recovery, aging, and zaps of everything.
//!
//! ```sh
//! RUSTFLAGS="--cfg shuttle" cargo test -p pageferry-tdp --release --test shuttle
//! ```
//!
//! `PAGEFERRY_SHUTTLE_SECONDS` is the time for all scenarios together, 40 by default. A failure prints its schedule, which
//! `shuttle::replay` takes. Tables have two entries here, so that a tree has all its levels and few steps.
#![cfg(shuttle)]

#[path = "../guest/mod.rs"]
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
const SCENARIOS: u32 = 8;

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

#[test]
fn everything_zapped_under_moving_frames() {
    check::<Ept4>(2, 8, &[Role::Destroyer, Role::Notifier], true);
}

#[test]
fn everything_zapped_under_a_log() {
    check::<Sv48x4Svade>(2, 8, &[Role::Destroyer, Role::Logger], true);
}
