//! The VM's clock, which the `time` CSR of every vCPU shows.

use crate::hart::TIMEBASE_HZ;
use crate::sync::{AtomicU64, Ordering};
use std::time::Instant;

const NANOS_PER_TICK: u128 = 1_000_000_000 / TIMEBASE_HZ as u128;

/// Ticks of [`TIMEBASE_HZ`] since the VM was created, plus an offset.
pub(crate) struct Clock {
    start: Instant,
    /// Added to the ticks since `start`, wrapping.
    offset: AtomicU64,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self {
            start: Instant::now(),
            offset: AtomicU64::new(0),
        }
    }

    fn since_start(&self) -> u64 {
        (self.start.elapsed().as_nanos() / NANOS_PER_TICK) as u64
    }

    pub(crate) fn ticks(&self) -> u64 {
        self.since_start()
            .wrapping_add(self.offset.load(Ordering::Relaxed))
    }

    /// Moves the clock forward to `ticks`. It never moves back.
    pub(crate) fn advance_to(&self, ticks: u64) {
        let since_start = self.since_start();
        let behind = |offset: u64| {
            let now = since_start.wrapping_add(offset);
            (ticks > now).then(|| ticks.wrapping_sub(since_start))
        };
        let _ = self
            .offset
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, behind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_set_forward_only() {
        let clock = Clock::new();
        clock.advance_to(1 << 40);
        let then = clock.ticks();
        assert!(then >= 1 << 40);
        clock.advance_to(5);
        assert!(clock.ticks() >= then);
    }
}
