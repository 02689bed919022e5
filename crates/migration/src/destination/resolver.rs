//! What a vCPU does when it touches a missing page: the fault path of the destination.
//!
//! On the vCPU's own thread: claim the page (one compare-exchange; a second faulter of the same
//! page sends nothing), send the request (one write), then wait: read replies if nobody else does,
//! spin for a while, sleep. No lock is shared with another vCPU, and no other thread is woken
//! before the request is on the wire.

use super::core::Core;
use crate::channel::Spinner;
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use pageferry_addr::RamPage;
use pageferry_machine::{Access, HookVerdict, Kicker};
use pageferry_userfault::Claim;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How long a vCPU spins for its page before it sleeps. A reply takes about 10 us from a source
/// that spins too; sleeping and being woken on another core costs about 70 us. See [`Spinner`].
pub const FAULT_SPIN: Duration = Duration::from_micros(100);

/// Resolves the faults of a receiving VM's vCPUs. The owner of the VM forwards
/// [`VcpuHooks::memory_fault`](pageferry_machine::VcpuHooks::memory_fault) and
/// [`VcpuHooks::pausing`](pageferry_machine::VcpuHooks::pausing) to it.
#[derive(Default)]
pub struct Resolver {
    core: OnceLock<Arc<Core>>,
}

impl Resolver {
    /// A resolver for a VM that is about to receive a migration.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Joins it to the migration. A VM receives one migration in its life.
    pub(super) fn attach(&self, core: Arc<Core>) -> Result<(), MigrationError> {
        self.core
            .set(core)
            .map_err(|_| MigrationError::Internal("this VM has received a migration before".into()))
    }

    /// Ends the urgent connection of a migration that came to nothing.
    pub(super) fn hang_up(&self) {
        if let Some(core) = self.core.get() {
            core.link.shutdown();
        }
    }

    /// Brings `page`, waiting as long as it takes. Returns [`HookVerdict::Resume`] when the page is
    /// there or `kicker` is kicked, and [`HookVerdict::Park`] when the migration has failed.
    pub fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        _access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict {
        let Some(core) = self.core.get() else {
            // No migration, so no page is missing: a fault that raced the end of one.
            return HookVerdict::Resume;
        };
        let at_ns = monotonic_ns();
        core.stalls.note_first(at_ns, page, Some(vcpu));
        let verdict = match bring(core, vcpu, page, kicker) {
            Ok(Brought::WasThere) => {
                core.stalls.local();
                return HookVerdict::Resume;
            }
            Ok(Brought::Arrived) => HookVerdict::Resume,
            Ok(Brought::Kicked) => return HookVerdict::Resume,
            // While the source ends the connections, a vCPU may still look for a reply although its
            // page has just come by the stream.
            Err(error) if error.is_lost() && !core.states.is_missing(page) => HookVerdict::Resume,
            Err(error) => {
                core.fail(error);
                HookVerdict::Park
            }
        };
        core.stalls.vcpu_waited(vcpu, page, at_ns);
        verdict
    }

    /// A pause is under way: vCPUs that sleep for a page look at their kickers.
    pub fn pausing(&self) {
        if let Some(core) = self.core.get() {
            core.wake_all();
        }
    }

    /// Whether `page` has not arrived yet. VMM threads ask before they touch guest memory.
    #[must_use]
    pub fn is_missing(&self, page: RamPage) -> bool {
        self.core
            .get()
            .is_some_and(|core| core.states.is_missing(page))
    }
}

enum Brought {
    WasThere,
    Arrived,
    Kicked,
}

fn bring(
    core: &Core,
    vcpu: u32,
    page: RamPage,
    kicker: &dyn Kicker,
) -> Result<Brought, MigrationError> {
    match core.states.claim(page) {
        Claim::Present => {
            // It arrived between the fault and here, or was never missing and only not mapped.
            core.machine.install(page, 1)?;
            return Ok(Brought::WasThere);
        }
        Claim::Mine => core.request(page)?,
        Claim::Others => {}
    }
    core.register(vcpu as usize);
    let mut spinner = Spinner::new(FAULT_SPIN);
    loop {
        if !core.states.is_missing(page) {
            return Ok(Brought::Arrived);
        }
        if core.has_failed() {
            return Err(MigrationError::Internal("the migration has failed".into()));
        }
        if kicker.is_kicked() {
            return Ok(Brought::Kicked);
        }
        if core.pump()? > 0 {
            continue;
        }
        if !spinner.spin() {
            core.sleep(vcpu as usize, page, || {
                !core.states.is_missing(page) || core.has_failed() || kicker.is_kicked()
            })?;
            spinner = Spinner::new(FAULT_SPIN);
        }
    }
}
