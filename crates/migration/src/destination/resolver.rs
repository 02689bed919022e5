//! The fault path of the destination, for a vCPU or a VMM thread that touches a missing page.
//!
//! The thread itself does this:
//!
//! 1. It claims the page by one atomic read-modify-write. A second thread that faults on the page
//!    sends nothing.
//! 2. It queues the request, and sends it unless another thread does.
//! 3. It waits. It reads replies unless another thread does, spins for a while unless more threads
//!    wait than there are cores, and then sleeps.
//!
//! It shares no lock with another vCPU. No other thread has to wake before the request is sent.
//!
//! A VMM thread comes through [`GuestRam::read`](pageferry_machine::GuestRam::read) and
//! [`GuestRam::write`](pageferry_machine::GuestRam::write). It may claim several pages before it
//! waits.

use super::core::Core;
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use crate::sync::Ordering;
use pageferry_addr::RamPage;
use pageferry_machine::{Access, AccessError, Fetch, HookVerdict, Kicker};
use pageferry_transport::channel::Spinner;
use pageferry_userfault::Claim;
use std::sync::{Arc, OnceLock, Weak};
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

    /// Attaches it to the migration, also for the VMM's own accesses. A VM receives at most one
    /// migration.
    pub(super) fn attach(&self, core: Arc<Core>) -> Result<(), MigrationError> {
        let source: Weak<dyn Fetch> = Arc::downgrade(&(Arc::clone(&core) as Arc<dyn Fetch>));
        core.machine.ram().attach(source)?;
        self.core
            .set(core)
            .map_err(|_| MigrationError::Internal("this VM has received a migration before".into()))
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
            Ok(Fetched::Present) => {
                core.stalls.local();
                return HookVerdict::Resume;
            }
            Ok(Fetched::Arrived) => HookVerdict::Resume,
            Ok(Fetched::Kicked) => return HookVerdict::Resume,
            Err(error) => {
                core.fail(error);
                HookVerdict::Park
            }
        };
        core.stalls.vcpu_waited(vcpu, page, at_ns);
        verdict
    }

    /// Wakes threads that sleep for a page, so that they check their kickers. Called when a pause
    /// begins.
    pub fn pausing(&self) {
        if let Some(core) = self.core.get() {
            core.sleepers.wake_all();
        }
    }
}

impl Fetch for Core {
    fn fetch(
        &self,
        first: RamPage,
        pages: u64,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), AccessError> {
        let each = || (first.0..first.0 + pages).map(RamPage);
        for page in each() {
            if self.pages.states.claim(page) == Claim::Mine && !self.is_over() {
                self.request(page, 0);
            }
        }
        self.sleepers.with_vmm_slot(|slot| {
            for page in each() {
                match wait(self, slot, page, stop) {
                    Ok(Fetched::Kicked) => return Err(AccessError::Stopped(page)),
                    Ok(_) => {}
                    Err(error) => {
                        let why = match &error {
                            MigrationError::Internal(why) => why.clone(),
                            error => error.to_string(),
                        };
                        self.fail(error);
                        return Err(AccessError::Lost { page, why });
                    }
                }
            }
            Ok(())
        })
    }
}

enum Fetched {
    Present,
    Arrived,
    Kicked,
}

fn resolve(
    core: &Core,
    vcpu: u32,
    page: RamPage,
    kicker: &dyn Kicker,
) -> Result<Fetched, MigrationError> {
    match core.pages.states.claim(page) {
        Claim::Present => {
            // It arrived after the fault, or was never missing and only not mapped.
            core.persist(|| core.machine.install(page, 1))?;
            return Ok(Fetched::Present);
        }
        Claim::Mine => core.request(page, vcpu as usize),
        Claim::Others => {}
    }
    core.sleepers.register(vcpu as usize);
    let stop = || kicker.is_kicked();
    wait(core, Some(vcpu as usize), page, &stop)
}

/// Counts a waiting thread.
struct Waiting<'a>(&'a Core);

impl<'a> Waiting<'a> {
    fn new(core: &'a Core) -> Self {
        core.sleepers.waiting.fetch_add(1, Ordering::Relaxed);
        Self(core)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.sleepers.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Waits on the thread that owns `slot` until `page` is present.
fn wait(
    core: &Core,
    slot: Option<usize>,
    page: RamPage,
    stop: &dyn Fn() -> bool,
) -> Result<Fetched, MigrationError> {
    let _waiting = Waiting::new(core);
    let mut spinner = Spinner::new(FAULT_SPIN);
    loop {
        if !core.pages.states.is_missing(page) {
            return Ok(Fetched::Arrived);
        }
        core.check_goes_on()?;
        if stop() {
            return Ok(Fetched::Kicked);
        }
        if core.pump() > 0 {
            continue;
        }
        if core.sleepers.is_crowded() || !spinner.spin() {
            core.sleep(slot, page, || {
                !core.pages.states.is_missing(page) || core.is_over() || stop()
            });
            spinner = Spinner::new(FAULT_SPIN);
        }
    }
}
