//! The interpreter's atomics: always the real ones of `core`, never loom's.
//!
//! They are laid over guest memory, which is bytes of a mapping and no object of a model, and the
//! request word is read in a loop that no model checker could explore.

pub(super) use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
