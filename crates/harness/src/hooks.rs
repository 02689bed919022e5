//! The hooks of a VM's vCPU threads.

use pageferry_addr::{Gpa, RamPage};
use pageferry_guest::{Doorbell, Event};
use pageferry_machine::{
    Access, DOORBELL_GPA, HookVerdict, Kicker, MachineError, Reset, VcpuHooks,
};
use pageferry_migration::Resolver;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// Resolves faults on missing pages.
pub trait Faults: Send + Sync {
    /// Resolves a vCPU's fault on the missing `page`. Runs on the vCPU's own thread.
    fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict;

    /// Wakes vCPUs that wait for a page, since a pause begins.
    fn pausing(&self) {}
}

impl Faults for Resolver {
    fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict {
        Self::memory_fault(self, vcpu, page, access, kicker)
    }

    fn pausing(&self) {
        Self::pausing(self);
    }
}

/// The hooks of one VM.
pub struct Hooks {
    faults: Option<Arc<dyn Faults>>,
    finished: AtomicU32,
    errors: AtomicU32,
    reset: OnceLock<Reset>,
}

impl Hooks {
    /// Returns hooks that resolve faults by `faults`. A VM without `faults` must have no missing
    /// pages.
    #[must_use]
    pub fn new(faults: Option<Arc<dyn Faults>>) -> Self {
        Self {
            faults,
            finished: AtomicU32::new(0),
            errors: AtomicU32::new(0),
            reset: OnceLock::new(),
        }
    }

    /// Returns the number of vCPUs whose program has ended.
    #[must_use]
    pub fn finished(&self) -> u32 {
        self.finished.load(Ordering::SeqCst)
    }

    /// Returns how the guest has ended itself, if it has.
    #[must_use]
    pub fn reset(&self) -> Option<Reset> {
        self.reset.get().copied()
    }

    /// Returns the number of errors that the guest has signalled, such as wrong pages.
    #[must_use]
    pub fn errors(&self) -> u32 {
        self.errors.load(Ordering::SeqCst)
    }
}

impl VcpuHooks for Hooks {
    fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict {
        match &self.faults {
            Some(faults) => faults.memory_fault(vcpu, page, access, kicker),
            None => HookVerdict::Resume,
        }
    }

    fn mmio_write(&self, _vcpu: u32, gpa: Gpa, value: u64) -> HookVerdict {
        let event = (gpa == DOORBELL_GPA)
            .then(|| u32::try_from(value).ok())
            .flatten()
            .and_then(|value| Doorbell::parse(value).ok())
            .map(|doorbell| doorbell.event);
        if event == Some(Event::Finished) {
            self.finished.fetch_add(1, Ordering::SeqCst);
            // A program that has ended would only signal again.
            return HookVerdict::Park;
        }
        // The guest also counts its errors on the vCPU's control page, which migrates with the VM.
        // A store that is no signal is an error too.
        self.errors.fetch_add(1, Ordering::SeqCst);
        HookVerdict::Resume
    }

    /// Keeps the first end.
    fn reset(&self, _vcpu: u32, reset: Reset) {
        let _ = self.reset.set(reset);
    }

    /// Does nothing: [`pageferry_machine::VcpuThreads::failures`] keeps the error, and waits check
    /// it.
    fn failed(&self, _vcpu: u32, _error: &MachineError) {}

    fn pausing(&self) {
        if let Some(faults) = &self.faults {
            faults.pausing();
        }
    }
}
