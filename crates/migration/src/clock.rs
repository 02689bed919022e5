//! The host's monotonic clock, which all processes of one host share.

use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// The time of `CLOCK_MONOTONIC`. Only processes of one host may compare such times. Those in
/// reports are of this clock.
#[must_use]
pub fn monotonic() -> Duration {
    Duration::from_nanos(monotonic_ns())
}

/// [`monotonic`] in nanoseconds, for the paths of faults.
pub(crate) fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Converts a past `instant` to the scale of [`monotonic`].
pub(crate) fn monotonic_at(instant: Instant) -> Duration {
    monotonic().saturating_sub(instant.elapsed())
}
