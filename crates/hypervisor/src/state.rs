//! The two parts of a VM: the part that its vCPUs share, and the part that one thread at a time
//! changes.
//!
//! **Guarantee.** A vCPU's fault path uses [`VmState`] and the vCPU's reader of the slots, and
//! takes no lock of the VM. [`Changes`] is one mutex around everything that calls of the VM change.
//!
//! **Neighbours.** `revoke.rs` proves how a change reaches the vCPUs.

use crate::clock::Clock;
use crate::hart::Reservations;
use crate::platform::{Format, Harts, Worker};
use pageferry_addr::GfnRange;
use pageferry_tdp::Mmu;
use pageferry_tdp::ring::Resetter;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The state that all vCPUs of a VM share. It does not depend on the scheme of slots.
pub(crate) struct VmState {
    pub(crate) mmu: Arc<Mmu<Format, Harts>>,
    pub(crate) clock: Clock,
    pub(crate) reservations: Reservations,
}

impl VmState {
    pub(crate) fn new() -> Self {
        let Ok(mmu) = Mmu::new(Harts::default()) else {
            unreachable!("the platform aborts where there is no memory");
        };
        Self {
            mmu,
            clock: Clock::new(),
            reservations: Reservations::new(),
        }
    }
}

/// The state that one thread at a time changes. `M` keeps the slots.
pub(crate) struct Writer<M> {
    pub(crate) slots: M,
    /// For each possible id: whether a vCPU has it.
    pub(crate) used: Vec<bool>,
    pub(crate) worker: Worker,
    /// The resetting ends of the vCPUs' dirty rings.
    pub(crate) rings: Vec<Resetter>,
    /// Scratch space of notifier calls, kept so that they need not allocate.
    pub(crate) ranges: Vec<GfnRange>,
}

/// The [`Writer`] of a VM under its mutex. No vCPU takes it inside its gate.
pub(crate) struct Changes<M>(Mutex<Writer<M>>);

impl<M> Changes<M> {
    pub(crate) fn new(slots: M, max_vcpus: u32, worker: Worker) -> Self {
        Self(Mutex::new(Writer {
            slots,
            used: vec![false; max_vcpus as usize],
            worker,
            rings: Vec::new(),
            ranges: Vec::new(),
        }))
    }

    /// Locks the mutex. It ignores poisoning: if an earlier writer panicked, each of its steps has
    /// left the VM in a state from which every later call works.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Writer<M>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
