//! Shared by the tests of all crates: skips, bounded waiting, random numbers, stopping threads, bad
//! networks, and models under loom.
//!
//! **Guarantee.** A test that cannot run here says so. If it is required to run, it fails. No test
//! waits without a limit. Random numbers are the same in every run.
//!
//! **Mechanism.** [`skip()`] reports a missing resource. [`process::runs_in_child`] gives a test a
//! process of its own. The variable `PAGEFERRY_STRESS_SECONDS` sets the duration of a stress test.
//!
//! Networks are in two modules: [`two_hosts`] shapes a link of the kernel, [`shaper`] is a proxy
//! that injects faults. [`rv64`] has machine code for small guests. With the feature
//! `certificates`, there are certificates for TLS, and `handshake` has a destination. `firecracker`
//! is a double of Firecracker's side of a restore, and `cloud_hypervisor` one of both ends of a
//! migration: `double` has what they share. With the feature `qemu`, there are real machines of
//! QEMU, which run this project's programs.
//!
//! **Neighbours.** A development dependency: no crate needs it to build. It uses `std` and rustix,
//! `hosts` for shaped links and huge pages, `userfault` for the doubles, `transport` for
//! `handshake`, serde and serde_json, rcgen for certificates, and loom under `--cfg loom`.

#[cfg(feature = "certificates")]
pub mod certificates;
#[cfg(not(any(loom, shuttle)))]
pub mod cloud_hypervisor;
#[cfg(not(any(loom, shuttle)))]
pub mod double;
#[cfg(not(any(loom, shuttle)))]
pub mod firecracker;
mod guest_linux;
#[cfg(feature = "certificates")]
pub mod handshake;
mod huge_pages;
#[cfg(loom)]
pub mod model;
pub mod process;
#[cfg(feature = "qemu")]
pub mod qemu;
pub mod rv64;
pub mod shaper;
mod skip;
pub mod two_hosts;

pub use guest_linux::{guest_linux, guest_linux_cloud, guest_linux_x86_64, guest_shell};
pub use huge_pages::{AdvisedHugePages, HugePages};
pub use pageferry_hosts::netns;
pub use skip::skip;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest time for which a test waits for something that should happen at once. Test machines
/// are slow and shared, so this bound only prevents hanging.
pub const LIMIT: Duration = Duration::from_secs(300);

/// Waits until `ready` returns a value, and returns that value.
///
/// # Panics
/// After [`LIMIT`]. The message names `what`.
#[track_caller]
pub fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        let waited = start.elapsed();
        assert!(waited < LIMIT, "waited {waited:?} for {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Waits until `done` returns `true`.
///
/// # Panics
/// After [`LIMIT`]. The message names `what`.
#[track_caller]
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    wait_for(what, || done().then_some(()));
}

/// The duration of a stress test: `PAGEFERRY_STRESS_SECONDS`, or `default`.
///
/// # Panics
/// If the variable is not a whole number.
#[must_use]
pub fn stress_time(default: Duration) -> Duration {
    std::env::var("PAGEFERRY_STRESS_SECONDS").map_or(default, |text| {
        let seconds = text.parse();
        Duration::from_secs(seconds.unwrap_or_else(|_| {
            panic!("PAGEFERRY_STRESS_SECONDS is '{text}': expected a whole number of seconds")
        }))
    })
}

/// The seeds of a test of seeded cases: those below `default`, or what the environment variable
/// `variable` says: a number of seeds, or a range such as `300..600`.
///
/// # Panics
/// If the variable is neither.
#[must_use]
pub fn seeds(variable: &str, default: u64) -> Range<u64> {
    let Ok(text) = std::env::var(variable) else {
        return 0..default;
    };
    parse_seeds(&text)
        .unwrap_or_else(|| panic!("{variable} is '{text}': expected a number or a range, 300..600"))
}

/// `count` of `all` seeds, which rotate by [`rotation`]. All of them in the slow tests. Or what the
/// environment variable `variable` says: a number of seeds, or a range such as `300..600`.
///
/// # Panics
/// If the variable is neither, or if `count` is 0 or more than `all`.
#[must_use]
pub fn rotating_seeds(variable: &str, count: u64, all: u64) -> Range<u64> {
    assert!((1..=all).contains(&count), "{count} of {all} seeds");
    if std::env::var_os(variable).is_some() {
        return seeds(variable, count);
    }
    let start = sized(rotation() % (all / count) * count, 0);
    start..start + sized(count, all)
}

/// The size of a test: `quick`, or `whole` in the slow tests, which set `PAGEFERRY_WHOLE`.
#[must_use]
pub fn sized(quick: u64, whole: u64) -> u64 {
    match std::env::var_os("PAGEFERRY_WHOLE") {
        Some(_) => whole,
        None => quick,
    }
}

/// A number that differs from commit to commit: `PAGEFERRY_ROTATION`, which `cargo xtask test` sets
/// and prints, or 0.
///
/// # Panics
/// If the variable is not a whole number.
#[must_use]
pub fn rotation() -> u64 {
    std::env::var("PAGEFERRY_ROTATION").map_or(0, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("PAGEFERRY_ROTATION is '{text}': expected a whole number"))
    })
}

fn parse_seeds(text: &str) -> Option<Range<u64>> {
    let (start, end) = text.split_once("..").unwrap_or(("0", text));
    Some(start.parse().ok()?..end.parse().ok()?)
}

/// Random numbers by xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift
/// generators, scrambled", 2016): the same sequence for the same seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A sequence that starts from `seed`, which may be any number.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        // The state must not be zero. An odd factor keeps different seeds apart.
        let state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self(if state == 0 {
            0x9e37_79b9_7f4a_7c15
        } else {
            state
        })
    }

    /// The next number.
    pub const fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit`.
    ///
    /// # Panics
    /// If `limit` is zero.
    pub const fn below(&mut self, limit: u64) -> u64 {
        assert!(limit > 0, "no number is below zero");
        // The upper bits are better. The bias does not matter to a test.
        ((self.next() as u128 * limit as u128) >> 64) as u64
    }
}

/// A signal that tells the threads of a test to end. With [`Stop::on_drop`] a panic of the test
/// gives it too.
#[derive(Debug, Default)]
pub struct Stop(AtomicBool);

impl Stop {
    /// A signal that has not been given.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Gives the signal.
    pub fn stop(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether the signal was given.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Returns a value that gives the signal when it is dropped, also by a panic.
    #[must_use = "dropping it at once stops the threads at once"]
    pub const fn on_drop(&self) -> StopOnDrop<'_> {
        StopOnDrop(self)
    }
}

/// Gives a [`Stop`] when it is dropped.
#[derive(Debug)]
pub struct StopOnDrop<'a>(&'a Stop);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_repeat_and_stay_below_the_limit() {
        for seed in [0, 1, u64::MAX] {
            let (mut a, mut b) = (Random::new(seed), Random::new(seed));
            let mut seen = [false; 7];
            for _ in 0..200 {
                let number = a.below(7);
                assert_eq!(number, b.below(7));
                seen[number as usize] = true;
            }
            assert!(seen.iter().all(|seen| *seen), "{seed}: {seen:?}");
        }
    }

    #[test]
    fn seeds_are_a_number_or_a_range() {
        assert_eq!(parse_seeds("8"), Some(0..8));
        assert_eq!(parse_seeds("3..8"), Some(3..8));
        for wrong in ["", "x", "1..", "..2", "1..2..3"] {
            assert_eq!(parse_seeds(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_panic_stops_the_threads() {
        let stop = Stop::new();
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _guard = stop.on_drop();
            panic!("expected");
        }));
        assert!(failed.is_err() && stop.is_stopped());
    }

    #[test]
    fn waiting_returns_what_came() {
        let mut left = 3;
        let got = wait_for("three looks", || {
            left -= 1;
            (left == 0).then_some("here")
        });
        assert_eq!(got, "here");
    }
}
