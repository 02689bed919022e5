//! The one place that chooses the source of atomics: `core`, or loom's model of it.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, fence};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, fence};

/// Atomics of statics. No model resets them, and they only spread threads over rows.
pub(crate) mod statics {
    pub(crate) use core::sync::atomic::AtomicUsize;
}
