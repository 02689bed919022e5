//! Atomics and threads: shuttle's, whose every operation is a point at which another thread may go on, or the real ones.

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

/// Numbers as good as random (xorshift64*, S. Vigna 2016).
pub(crate) struct Random(u64);

impl Random {
    /// Under shuttle the scheduler gives the seed, so that what it replays is the same.
    pub(crate) fn new(seed: u64) -> Self {
        #[cfg(shuttle)]
        let seed = seed ^ shuttle::rand::RngCore::next_u64(&mut shuttle::rand::thread_rng());
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// One of `0..end`.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % end
    }

    /// Once in `n` times.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}
