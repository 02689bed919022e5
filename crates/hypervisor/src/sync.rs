//! The one place that chooses the atomics: those of `core` and `std`, or loom's model of them.
//!
//! `hart` accesses guest memory with `core`'s atomics: loom has no model of foreign memory, and no
//! protocol of this crate depends on the order among guest accesses.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
    thread::{sleep, yield_now},
};

#[cfg(loom)]
pub(crate) use loom::{
    hint::spin_loop,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    thread::yield_now,
};

/// A model has no time, so a sleep only yields to the other threads.
#[cfg(loom)]
pub(crate) fn sleep(_: std::time::Duration) {
    yield_now();
}
