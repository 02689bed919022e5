//! The fault path of the destination, for a vCPU that touches a missing page.
//!
//! The vCPU's own thread does this:
//!
//! 1. It claims the page by one atomic read-modify-write. A second vCPU that faults on the page
//!    sends nothing.
//! 2. It sends the request by one write.
//! 3. It waits. It reads replies unless another thread does, spins for a while, and then sleeps.
//!
//! It shares no lock with another vCPU. No other thread has to wake before the request is sent.

use super::core::Core;
use crate::channel::Spinner;
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use pageferry_addr::RamPage;
use pageferry_machine::{Access, HookVerdict, Kicker};
use pageferry_userfault::Claim;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The spin time of a vCPU before it sleeps. A reply of a spinning source takes about 10 us. A
/// wake-up on another core takes about 70 us. See [`Spinner`].
pub const FAULT_SPIN: Duration = Duration::from_micros(100);

/// Resolves the faults of a receiving VM's vCPUs. The owner of the VM forwards
/// [`VcpuHooks::memory_fault`](pageferry_machine::VcpuHooks::memory_fault) and
/// [`VcpuHooks::pausing`](pageferry_machine::VcpuHooks::pausing) to it.
#[derive(Default)]
pub struct Resolver {
    core: OnceLock<Arc<Core>>,
}

impl Resolver {
    /// Returns a resolver for a VM that is about to receive a migration.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Attaches it to the migration. A VM receives at most one migration.
    pub(super) fn attach(&self, core: Arc<Core>) -> Result<(), MigrationError> {
        self.core
            .set(core)
            .map_err(|_| MigrationError::Internal("this VM has received a migration before".into()))
    }

    /// Ends the urgent connection of a failed migration.
    pub(super) fn disconnect(&self) {
        if let Some(core) = self.core.get() {
            core.link.shutdown();
        }
    }

    /// Waits until `page` has arrived. Returns [`HookVerdict::Resume`] when the page is present or
    /// `kicker` is kicked, and [`HookVerdict::Park`] when the migration has failed.
    pub fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        _access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict {
        let Some(core) = self.core.get() else {
            // Without a migration no page is missing. The fault raced with its end.
            return HookVerdict::Resume;
        };
        let at_ns = monotonic_ns();
        core.stalls.note_first(at_ns, page, Some(vcpu));
        let verdict = match resolve(core, vcpu, page, kicker) {
            Ok(Outcome::Present) => {
                core.stalls.local();
                return HookVerdict::Resume;
            }
            Ok(Outcome::Arrived) => HookVerdict::Resume,
            Ok(Outcome::Kicked) => return HookVerdict::Resume,
            // A vCPU may still read replies while the source closes the connections, although its
            // page has just arrived on the stream.
            Err(error) if error.is_lost() && !core.states.is_missing(page) => HookVerdict::Resume,
            Err(error) => {
                core.fail(error);
                HookVerdict::Park
            }
        };
        core.stalls.vcpu_waited(vcpu, page, at_ns);
        verdict
    }

    /// Wakes vCPUs that sleep for a page, so that they check their kickers. Called when a pause
    /// begins.
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

enum Outcome {
    Present,
    Arrived,
    Kicked,
}

fn resolve(
    core: &Core,
    vcpu: u32,
    page: RamPage,
    kicker: &dyn Kicker,
) -> Result<Outcome, MigrationError> {
    match core.states.claim(page) {
        Claim::Present => {
            // It arrived after the fault, or was never missing and only not mapped.
            core.machine.install(page, 1)?;
            return Ok(Outcome::Present);
        }
        Claim::Mine => core.request(page)?,
        Claim::Others => {}
    }
    core.register(vcpu as usize);
    let mut spinner = Spinner::new(FAULT_SPIN);
    loop {
        if !core.states.is_missing(page) {
            return Ok(Outcome::Arrived);
        }
        if core.has_failed() {
            return Err(MigrationError::Internal("the migration has failed".into()));
        }
        if kicker.is_kicked() {
            return Ok(Outcome::Kicked);
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
