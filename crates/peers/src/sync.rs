//! The one place this crate takes atomics and locks from: the standard library. Its threads are
//! those of a measurement, so there is nothing here to run under a model checker.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock, RwLockReadGuard};
