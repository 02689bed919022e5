//! The only source of modelled atomics and locks: shuttle's in its models (`gate`, and the KVM
//! engine's `userfault::model`).

#[cfg(shuttle)]
pub(crate) use shuttle::{sync::atomic::AtomicU64, thread::yield_now};
#[cfg(not(shuttle))]
pub(crate) use std::{sync::atomic::AtomicU64, thread::yield_now};

/// Those of the KVM engine alone.
#[cfg(all(feature = "kvm", target_arch = "x86_64"))]
mod of_kvm {
    #[cfg(shuttle)]
    pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic::AtomicBool};
    #[cfg(not(shuttle))]
    pub(crate) use std::sync::{Mutex, MutexGuard, atomic::AtomicBool};
}
#[cfg(all(feature = "kvm", target_arch = "x86_64"))]
pub(crate) use of_kvm::{AtomicBool, Mutex, MutexGuard};
