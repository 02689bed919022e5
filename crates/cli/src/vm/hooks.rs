//! What is done about the exits of a VM's vCPUs.

use pageferry_addr::{Gpa, RamPage};
use pageferry_guest::{Doorbell, Event};
use pageferry_machine::{Access, DOORBELL_GPA, HookVerdict, Kicker, MachineError, VcpuHooks};
use pageferry_migration::Resolver;
use std::sync::Arc;

/// The hooks of one VM.
pub(super) struct Hooks {
    resolver: Option<Arc<Resolver>>,
}

impl Hooks {
    /// Missing pages are fetched by `resolver`; a VM without one never has missing pages.
    pub(super) fn new(resolver: Option<Arc<Resolver>>) -> Self {
        Self { resolver }
    }

    /// Whether the bytes of `page` are still elsewhere.
    pub(super) fn is_missing(&self, page: RamPage) -> bool {
        self.resolver
            .as_ref()
            .is_some_and(|resolver| resolver.is_missing(page))
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
        match &self.resolver {
            Some(resolver) => resolver.memory_fault(vcpu, page, access, kicker),
            None => HookVerdict::Resume,
        }
    }

    fn mmio_write(&self, _vcpu: u32, gpa: Gpa, value: u64) -> HookVerdict {
        let rung = (gpa == DOORBELL_GPA)
            .then(|| u32::try_from(value).ok())
            .flatten()
            .and_then(|value| Doorbell::parse(value).ok());
        match rung.map(|bell| bell.event) {
            // It would only ring again.
            Some(Event::Finished) => HookVerdict::Park,
            // Errors are counted on the vCPU's control page, which moves with the VM.
            Some(Event::Error(_)) | None => HookVerdict::Resume,
        }
    }

    /// Nothing: [`pageferry_machine::VcpuThreads::failures`] keeps the reason, and waits look there.
    fn failed(&self, _vcpu: u32, _error: &MachineError) {}

    fn pausing(&self) {
        if let Some(resolver) = &self.resolver {
            resolver.pausing();
        }
    }
}
