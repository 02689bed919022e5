//! The only source of this engine's atomics.
//!
//! They are always those of `core`: each is shared with the kernel or with a signal handler, and no
//! model of either exists.

pub(super) use core::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};
