//! Atomics and threads: shuttle's or the real ones. Under shuttle, another thread may run at each
//! operation.

#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};
#[cfg(not(shuttle))]
pub(crate) use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

/// Lets another thread run.
pub(crate) fn point() {
    #[cfg(shuttle)]
    AtomicBool::new(false).load(Ordering::Relaxed);
}

/// A thread's random numbers.
pub(crate) struct Random(pageferry_testkit::Random);

impl Random {
    /// Under shuttle the scheduler gives the seed, so that a replay gets the same numbers.
    pub(crate) fn new(seed: u64) -> Self {
        #[cfg(shuttle)]
        let seed = seed ^ shuttle::rand::RngCore::next_u64(&mut shuttle::rand::thread_rng());
        Self(pageferry_testkit::Random::new(seed))
    }

    /// A number of `0..end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0.below(end)
    }

    /// True once in `n` calls on average.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}
