//! The only source of modelled atomics and locks: shuttle's in its models (`gate`, and the KVM
//! engine's `userfault::model`).

#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64},
    },
    thread::yield_now,
};
#[cfg(not(shuttle))]
pub(crate) use std::{
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64},
    },
    thread::yield_now,
};
