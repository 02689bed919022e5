//! The one place that chooses where atomics come from: `core`, or the model of loom or shuttle.

#[cfg(not(any(loom, shuttle)))]
pub(crate) use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};

/// How an announcement is read that a fence follows. ThreadSanitizer knows no fences (`--cfg pageferry_tsan`): for it the
/// load itself acquires.
pub(crate) const SCAN: Ordering = if cfg!(pageferry_tsan) {
    Ordering::Acquire
} else {
    Ordering::Relaxed
};
