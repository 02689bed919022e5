//! The one place where this engine's atomics come from.
//!
//! They are always core's: each of them is shared with the kernel or with a signal handler, and no
//! model of either exists.

pub(super) use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
