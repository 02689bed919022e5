//! The only source of atomics and locks in this crate: the standard library. The crate's threads
//! only measure, so no model checker runs them.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard};
