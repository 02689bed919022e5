//! What is done about the exits of a VM's vCPUs.

use pageferry_addr::{Gpa, RamPage};
use pageferry_guest::{Doorbell, Event};
use pageferry_machine::{Access, DOORBELL_GPA, HookVerdict, Kicker, MachineError, VcpuHooks};
use pageferry_migration::Resolver;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Brings missing pages.
pub trait Faults: Send + Sync {
    /// Does what a vCPU needs that touched the missing `page`. Runs on the vCPU's own thread.
    fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict;

    /// Lets go of vCPUs that wait for a page, as all of them are to leave the guest.
    fn pausing(&self) {}

    /// Whether the bytes of `page` are still elsewhere.
    fn is_missing(&self, page: RamPage) -> bool {
        let _ = page;
        false
    }
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

    fn is_missing(&self, page: RamPage) -> bool {
        Self::is_missing(self, page)
    }
}

/// The hooks of one VM.
pub struct Hooks {
    faults: Option<Arc<dyn Faults>>,
    finished: AtomicU32,
}

impl Hooks {
    /// Missing pages are brought by `faults`. A VM without one never has missing pages.
    #[must_use]
    pub fn new(faults: Option<Arc<dyn Faults>>) -> Self {
        Self {
            faults,
            finished: AtomicU32::new(0),
        }
    }

    /// How many vCPUs' programs have ended.
    #[must_use]
    pub fn finished(&self) -> u32 {
        self.finished.load(Ordering::SeqCst)
    }

    /// Whether the bytes of `page` are still elsewhere.
    #[must_use]
    pub fn is_missing(&self, page: RamPage) -> bool {
        let faults = self.faults.as_ref();
        faults.is_some_and(|faults| faults.is_missing(page))
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
        let rung = (gpa == DOORBELL_GPA)
            .then(|| u32::try_from(value).ok())
            .flatten()
            .and_then(|value| Doorbell::parse(value).ok());
        match rung.map(|rung| rung.event) {
            // A program that has ended would only ring again.
            Some(Event::Finished) => {
                self.finished.fetch_add(1, Ordering::SeqCst);
                HookVerdict::Park
            }
            // Errors are counted on the vCPU's control page, which moves with the VM.
            Some(Event::Error(_)) | None => HookVerdict::Resume,
        }
    }

    /// Nothing: [`pageferry_machine::VcpuThreads::failures`] keeps the reason, and waits look
    /// there.
    fn failed(&self, _vcpu: u32, _error: &MachineError) {}

    fn pausing(&self) {
        if let Some(faults) = &self.faults {
            faults.pausing();
        }
    }
}
