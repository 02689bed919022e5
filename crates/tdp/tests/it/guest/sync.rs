//! Atomics and threads: shuttle's, whose every operation is a point at which another thread may go
//! on, or the real ones.

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

/// Lets another thread go on, here.
pub(crate) fn point() {
    #[cfg(shuttle)]
    AtomicBool::new(false).load(Ordering::Relaxed);
}

/// The random numbers of one thread.
pub(crate) struct Random(pageferry_testkit::Random);

impl Random {
    /// Under shuttle the scheduler gives the seed, so that a replay gets the same numbers.
    pub(crate) fn new(seed: u64) -> Self {
        #[cfg(shuttle)]
        let seed = seed ^ shuttle::rand::RngCore::next_u64(&mut shuttle::rand::thread_rng());
        Self(pageferry_testkit::Random::new(seed))
    }

    /// One of `0..end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0.below(end)
    }

    /// Once in `n` times.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}
