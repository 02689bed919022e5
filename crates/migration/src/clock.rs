//! The host's monotonic clock, which all processes of one host share.

use rustix::time::{ClockId, clock_gettime};
use std::time::Instant;

/// `CLOCK_MONOTONIC` in nanoseconds. Only processes of one host may compare these times.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Converts `instant` to the scale of [`monotonic_ns`].
#[must_use]
pub fn instant_ns(instant: Instant) -> u64 {
    let ago = u64::try_from(instant.elapsed().as_nanos()).unwrap_or(u64::MAX);
    monotonic_ns().saturating_sub(ago)
}
