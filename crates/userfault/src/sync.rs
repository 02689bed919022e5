//! The one place that chooses the source of atomics: `core`, or a model of it by loom or shuttle.

#[cfg(not(any(loom, shuttle)))]
pub(crate) use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
