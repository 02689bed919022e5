//! The fault threads: they handle faults that arrive on a userfaultfd, not as exits.
//!
//! The faulting thread sleeps in the kernel, so a fault thread acts for it. It maps a present page,
//! with the pages around it. It requests a missing page. The thread that installs that page wakes
//! the faulting thread. A huge page that is mapped whole has all its pieces requested (`pieces`).
//! While faults are open, a fault thread spins on its userfaultfd and on the urgent connection,
//! like a waiting vCPU.
//!
//! **Several fault threads.** Each has its own stream of events. They divide the work of faults;
//! any one of them may read the replies of all.
//! - A reply never waits for a sleeping reader: the thread that opened a fault reads replies, or
//!   polls the urgent connection, until the fault is closed. Only one thread reads at a time
//!   ([`Core::pump`]), and it places every reply that it finds.
//! - A second event for a page opens no second fault ([`super::stalls`]), and requests nothing
//!   ([`Claim::Others`]).
//! - Two threads may map the same present pages. Installing again changes nothing.

use super::core::Core;
use super::pieces::Pieces;
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use crate::sync::{AtomicBool, Ordering, fence};
use pageferry_addr::{PageSize, RamPage};
use pageferry_machine::{FaultEvent, FaultEvents};
use pageferry_transport::channel::Spinner;
use pageferry_userfault::Claim;
use std::time::Duration;

/// The spin time after the last event or reply, before the thread sleeps.
const SPIN: Duration = Duration::from_micros(100);

/// Runs until `done`. An error ends the migration.
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
    let mut pieces = Pieces::default();
    while !done.load(Ordering::Acquire) {
        let mut busy = false;
        while let Some(event) = events.next()? {
            handle_event(core, event, &mut pieces)?;
            busy = true;
        }
        busy |= pieces.advance(core)?;
        // A vCPU that exits reads its own replies. Waking this thread too would cost more than the
        // reply. Fault threads read replies only while a thread sleeps in the kernel.
        let replies = core.stalls.any_open();
        if replies {
            busy |= core.pump() > 0;
        }
        if busy {
            spinner = Spinner::new(SPIN);
        } else if !spinner.spin() {
            core.poll(events.fd(), replies);
        }
    }
    Ok(())
}

fn handle_event(core: &Core, event: FaultEvent, pieces: &mut Pieces) -> Result<(), MigrationError> {
    let at_ns = monotonic_ns();
    core.stalls.note_first(at_ns, event.page, None);
    // This comes before the claim: an arrival after the claim must find the open fault.
    let opened = core.stalls.open(event.page, at_ns);
    let whole = core.pages.mapped_with(event.page);
    if whole.len() > 1 {
        // A thread that brings the last piece must find the open fault, or this one no piece
        // missing.
        fence(Ordering::SeqCst);
        if core.pages.is_any_missing(whole.clone()) {
            pieces.add(whole);
            return Ok(());
        }
        if opened {
            core.stalls.cancel(event.page);
        }
        core.stalls.local();
        let first = RamPage(whole.start as u64);
        return core.persist(|| core.machine.install(first, whole.len() as u64));
    }
    match core.pages.states.claim(event.page) {
        Claim::Mine => {
            core.request(event.page, event.page.index());
            core.pump();
            Ok(())
        }
        Claim::Others => Ok(()),
        Claim::Present => {
            // The fault of another event is closed by the thread that installed the page.
            if opened {
                core.stalls.cancel(event.page);
            }
            core.stalls.local();
            // Its sleeper goes on before the pages around it are mapped, which may take 0.6 ms.
            core.persist(|| core.machine.install(event.page, 1))?;
            map_around(core, event.page)
        }
    }
}

/// Maps the present pages of the 2 MiB around `page`, run by run. So a guest that starts with
/// nothing mapped takes one fault per 2 MiB, not one per page.
fn map_around(core: &Core, page: RamPage) -> Result<(), MigrationError> {
    let size = PageSize::Size2M.pages();
    let start = page.0 - page.0 % size;
    let end = (start + size).min(core.machine.ram().pages());
    core.install_present(start..end)
}
