//! The one place where atomics and modelled locks come from: `std`, or shuttle's model of it.
//! The models of `ledger` and `source` run on shuttle. Migration also relies on the lock-free page
//! states and waiters of `userfault`, which have models there.

#[cfg(shuttle)]
pub(crate) use shuttle::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering, fence},
    mpsc,
};
#[cfg(not(shuttle))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering, fence},
    mpsc,
};
