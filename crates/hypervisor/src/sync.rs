//! The one place that chooses where atomics come from: `core`/`std`, or loom's model of them.
//!
//! Guest memory itself is accessed with `core`'s atomics in `access`: loom has no model of foreign
//! memory, and no protocol of this crate rests on the order of guest accesses among themselves.

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

/// Under the model time does not exist: giving the other threads a turn is all a sleep means.
#[cfg(loom)]
pub(crate) fn sleep(_: std::time::Duration) {
    yield_now();
}
