//! The two parts of a VM: the part that its vCPUs share, and the part that one thread at a time
//! changes.
//!
//! **Guarantee.** A vCPU's fault path uses [`VmState`] and the vCPU's reader of the slots, and
//! takes no lock of the VM. [`Changes`] is one mutex around everything that calls of the VM change.
//! The end of a [`Turn`] frees the tables that calls cut off.
//!
//! **Neighbours.** `revoke.rs` proves how a change reaches the vCPUs.

use crate::clock::Clock;
use crate::config::VmConfig;
use crate::hart::Reservations;
use crate::platform::{Format, Harts, Worker};
use core::ops::{Deref, DerefMut};
use pageferry_addr::GfnRange;
use pageferry_tdp::Mmu;
use pageferry_tdp::ring::Resetter;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};

/// The state that all vCPUs of a VM share. It does not depend on the scheme of slots.
pub(crate) struct VmState {
    pub(crate) mmu: Arc<Mmu<Format, Harts>>,
    pub(crate) clock: Clock,
    pub(crate) reservations: Reservations,
    pub(crate) vmm_stores: StoreLock,
}

/// The lock of stores of the VMM, whose value says whether any page was ever tracked. See
/// `stores.rs`.
#[derive(Default)]
pub(crate) struct StoreLock(pub(crate) RwLock<bool>);

impl StoreLock {
    /// Waits until the VMM's stores under way are over.
    pub(crate) fn wait(&self) {
        drop(self.0.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Makes all later stores of the VMM look at the tracked pages, and waits for those under way.
    pub(crate) fn track(&self) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

impl VmState {
    pub(crate) fn new(config: &VmConfig) -> Self {
        let Ok(mmu) = Mmu::new(Harts::default()) else {
            unreachable!("the platform aborts where there is no memory");
        };
        Self {
            mmu,
            clock: Clock::new(),
            reservations: Reservations::of(config.lr_sc, config.max_vcpus),
            vmm_stores: StoreLock::default(),
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

impl<M> Writer<M> {
    /// Frees the tables that were cut off, unless a fault may still use them.
    fn free_tables(&mut self) {
        // A grace period takes two advances of the epoch. Each call makes one, unless a guard
        // prevents it.
        for _ in 0..2 {
            if self.worker.reclaim() == 0 {
                break;
            }
        }
    }
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

    /// Waits for the thread's turn. It ignores poisoning: if an earlier writer panicked, each of
    /// its steps has left the VM in a state from which every later call works.
    pub(crate) fn lock(&self) -> Turn<'_, M> {
        Turn(self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends a turn at once, which frees tables. If another thread has its turn, that thread does.
    pub(crate) fn free_tables(&self) {
        match self.0.try_lock() {
            Ok(writer) => drop(Turn(writer)),
            Err(TryLockError::Poisoned(writer)) => drop(Turn(writer.into_inner())),
            Err(TryLockError::WouldBlock) => {}
        }
    }
}

/// One thread's turn to change a VM. At its end, it frees the tables that the thread cut off.
///
/// Usually this frees all of them: every fault that could use them ended before the flush. But a
/// later fault can still prevent it. So a vCPU also calls [`Changes::free_tables`] when its faults
/// have ended and its thread may sleep.
///
/// One case is left out: that vCPU may find another thread at the very end of its turn. Then the
/// tables wait for the next turn. `pageferry-tdp` bounds their number.
pub(crate) struct Turn<'a, M>(MutexGuard<'a, Writer<M>>);

impl<M> Deref for Turn<'_, M> {
    type Target = Writer<M>;

    fn deref(&self) -> &Writer<M> {
        &self.0
    }
}

impl<M> DerefMut for Turn<'_, M> {
    fn deref_mut(&mut self) -> &mut Writer<M> {
        &mut self.0
    }
}

impl<M> Drop for Turn<'_, M> {
    fn drop(&mut self) {
        self.0.free_tables();
    }
}
