//! The only source of this engine's atomics.
//!
//! Those that the kernel or a signal handler shares are always those of `core`: no model of either
//! exists. The state of the fault path comes from shuttle in its model (`userfault::model`).

pub(super) use core::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};

/// For the fault path.
pub(super) mod modelled {
    #[cfg(shuttle)]
    pub(in crate::kvm::x86) use shuttle::sync::{Mutex, MutexGuard, atomic::AtomicBool};
    #[cfg(not(shuttle))]
    pub(in crate::kvm::x86) use std::sync::{Mutex, MutexGuard, atomic::AtomicBool};
}
