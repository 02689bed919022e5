//! The interpreter's atomics: always those of `core`, never loom's.
//!
//! The interpreter lays them over guest memory, which is a mapping of bytes and no object of a
//! model. It also reads the request word in a loop that no model checker could explore.

pub(super) use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
