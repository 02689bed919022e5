//! A barrier of threads that run at once.

use std::hint;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// The number of spins before a waiting thread yields its core.
const SPINS: u32 = 1 << 12;

/// A barrier. Threads spin, because a wake-up takes longer than many of the measured times. It has
/// a cache line of its own.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Meeting {
    threads: usize,
    arrived: AtomicUsize,
    /// Whether a thread has left for good.
    over: AtomicBool,
}

impl Meeting {
    pub(crate) const fn new(threads: usize) -> Self {
        Self {
            threads,
            arrived: AtomicUsize::new(0),
            over: AtomicBool::new(false),
        }
    }

    /// Arrives for the `round`th time, counted from 1. Waits until the other threads have arrived
    /// as often, or one has left for good.
    pub(crate) fn meet(&self, round: usize) {
        self.arrived.fetch_add(1, Ordering::AcqRel);
        let all = self.threads * round;
        let mut spins = 0;
        while self.arrived.load(Ordering::Acquire) < all && !self.over.load(Ordering::Relaxed) {
            spins += 1;
            if spins < SPINS {
                hint::spin_loop();
            } else {
                spins = 0;
                thread::yield_now();
            }
        }
    }

    /// Leaves for good when the result is dropped, even by a panic.
    pub(crate) const fn leaving(&self) -> Leaving<'_> {
        Leaving(self)
    }
}

/// A thread that will leave.
pub(crate) struct Leaving<'a>(&'a Meeting);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}
