//! The atomics that this engine shares with the kernel or with a signal handler. They are always
//! those of `core`: no model of either exists. Others come from [`crate::sync`].

pub(super) use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
