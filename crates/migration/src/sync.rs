//! The one place where atomics come from. Nothing here is modelled by loom: the lock-free kernels
//! that migration relies on (page states, waiters) are `userfault`'s and are modelled there.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
