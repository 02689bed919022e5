//! The fault thread: faults that come on a userfaultfd rather than as exits.
//!
//! The toucher sleeps in the kernel, so this thread acts for it: a page that is there and only not
//! mapped is mapped, with those around it; a missing one is requested, and whoever brings it wakes
//! the toucher by installing it. While faults are open this thread spins on both descriptors, for
//! the same reason as a waiting vCPU does.

use super::core::Core;
use crate::channel::Spinner;
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use crate::sync::{AtomicBool, Ordering};
use pageferry_addr::{PageSize, RamPage};
use pageferry_machine::{FaultEvent, FaultEvents};
use pageferry_userfault::Claim;
use std::time::Duration;

/// How long the thread spins after the last event or reply before it sleeps.
const SPIN: Duration = Duration::from_micros(100);

/// Runs until `done`; an error ends the migration.
pub(super) fn fault_thread(core: &Core, mut events: Box<dyn FaultEvents>, done: &AtomicBool) {
    if let Err(error) = serve(core, events.as_mut(), done) {
        core.fail(error);
    }
}

fn serve(
    core: &Core,
    events: &mut dyn FaultEvents,
    done: &AtomicBool,
) -> Result<(), MigrationError> {
    crate::latency::prefer_short_slices();
    let mut spinner = Spinner::new(SPIN);
    while !done.load(Ordering::Acquire) {
        let mut busy = false;
        while let Some(event) = events.next()? {
            handle(core, event)?;
            busy = true;
        }
        // Replies are for vCPUs that exit; they read them themselves, and waking this thread beside
        // them would cost more than the reply. Unless somebody sleeps in the kernel: for
        // that one we read.
        let replies = core.stalls.any_open();
        if replies {
            busy |= core.pump()? > 0;
        }
        if busy {
            spinner = Spinner::new(SPIN);
        } else if !spinner.spin() {
            core.poll(events.fd(), replies)?;
        }
    }
    Ok(())
}

fn handle(core: &Core, event: FaultEvent) -> Result<(), MigrationError> {
    let at_ns = monotonic_ns();
    core.stalls.note_first(at_ns, event.page, None);
    // Before the claim: an arrival after it must find the open fault.
    core.stalls.open(event.page, at_ns);
    match core.states.claim(event.page) {
        Claim::Mine => core.request(event.page),
        Claim::Others => Ok(()),
        Claim::Present => {
            core.stalls.cancel(event.page);
            core.stalls.local();
            map_around(core, event.page)
        }
    }
}

/// Maps the present pages of the 2 MiB around `page`, run by run: a guest that starts with nothing
/// mapped takes a fault each 2 MiB instead of each page.
fn map_around(core: &Core, page: RamPage) -> Result<(), MigrationError> {
    let size = PageSize::Size2M.pages();
    let start = page.0 - page.0 % size;
    let end = (start + size).min(core.machine.ram().pages());
    core.install_present(start..end)
}
