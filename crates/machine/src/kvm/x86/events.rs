//! The streams of faults from userfaultfd, which arming makes.
//!
//! Streams of one userfaultfd share its queue: the kernel hands each event to one of them.

use super::userfault::{FaultPath, SetBits};
use crate::{ArmOptions, Backing, DeliveryInUse, FaultEvent, FaultEvents, MachineError};
use pageferry_userfault::PageBitmap;
use pageferry_userfault::uffd::{Event, EventReader, PageFault, Userfaultfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The number of events that one `read(2)` takes.
const BATCH: usize = 64;

/// One reader's events of an armed machine.
struct Events {
    faults: Arc<FaultPath>,
    /// The part of RAM whose userfaultfd it reads.
    part: usize,
    reader: EventReader,
}

/// Arms a machine with this delivery, and returns its streams; see
/// [`crate::Machine::arm_userfault`]. The options were checked.
pub(super) fn arm(
    faults: &Arc<FaultPath>,
    missing: &Arc<PageBitmap>,
    in_use: DeliveryInUse,
    options: &ArmOptions,
    set: SetBits<'_>,
) -> Result<Vec<Box<dyn FaultEvents>>, MachineError> {
    let (ram, userfaultfds) = (&faults.ram, options.userfaultfds);
    let forced = options.delivery.is_some();
    ram.gate.arm(missing, || {
        faults.arm(Arc::clone(missing), in_use, forced, userfaultfds, set)
    })?;
    if ram.backing() == Backing::Anonymous {
        let faults = Arc::downgrade(faults);
        ram.map.get_or_init(|| {
            Box::new(move |first, pages| {
                // If this fails, a fault thread does it when the touch sleeps.
                let _ = (faults.upgrade()).map(|faults| faults.install(first, pages));
            })
        });
    }
    let mut streams: Vec<Box<dyn FaultEvents>> = Vec::new();
    for part in 0..userfaultfds as usize {
        for _ in 0..options.readers {
            streams.push(Box::new(Events {
                faults: Arc::clone(faults),
                part,
                reader: EventReader::new(BATCH),
            }));
        }
    }
    Ok(streams)
}

/// The userfaultfd of a part of an armed machine.
fn uffd(faults: &FaultPath, part: usize) -> &Userfaultfd {
    let armed = faults.armed().expect("made by arming");
    armed.watch.userfaultfd(part)
}

impl FaultEvents for Events {
    fn fd(&self) -> BorrowedFd<'_> {
        uffd(&self.faults, self.part).as_fd()
    }

    fn next(&mut self) -> Result<Option<FaultEvent>, MachineError> {
        loop {
            let event = self
                .reader
                .try_next(uffd(&self.faults, self.part))
                .map_err(|e| MachineError::os("cannot read events of userfaultfd", e))?;
            let Some(event) = event else {
                return Ok(None);
            };
            let fault = page_fault(event)?;
            if let Some(page) = self.faults.ram.page_at_guest_hva(fault.address) {
                return Ok(Some(FaultEvent {
                    page,
                    write: fault.write,
                }));
            }
        }
    }
}

/// The page fault of an event. No other events are requested: nothing moves, unmaps or removes the
/// guest's mapping, and a forked child does not get it registered.
fn page_fault(event: Event) -> Result<PageFault, MachineError> {
    match event {
        Event::PageFault(fault) => Ok(fault),
        other => Err(MachineError::os(
            "userfaultfd sent an event that was not requested (expected page faults only)",
            io::Error::other(described(&other)),
        )),
    }
}

fn described(event: &Event) -> String {
    match event {
        Event::PageFault(fault) => format!("PageFault at {}", fault.address),
        Event::Fork { .. } => "Fork of a child process".into(),
        Event::Remap { from, to, len } => format!("Remap of {len} bytes from {from} to {to}"),
        Event::Remove { start, end } => format!("Remove of {start} to {end}"),
        Event::Unmap { start, end } => format!("Unmap of {start} to {end}"),
        _ => "one of an unknown kind".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_addr::Hva;
    use pageferry_userfault::uffd::Features;

    #[test]
    fn events_that_were_not_requested_are_refused_with_a_sentence() {
        let (start, end) = (Hva(0x1000), Hva(0x3000));
        let mut events = vec![
            Event::Remove { start, end },
            Event::Unmap { start, end },
            Event::Remap {
                from: start,
                to: end,
                len: 0x1000,
            },
        ];
        match Userfaultfd::open_user_mode_only(Features::empty()) {
            Ok(child) => events.push(Event::Fork { child }),
            Err(why) => {
                pageferry_testkit::skip("uffd", why);
            }
        }
        for event in events {
            let name = format!("{event:?}");
            let name = name.split(' ').next().unwrap();
            let said = page_fault(event).unwrap_err().to_string();
            assert!(said.contains("expected page faults only"), "{said}");
            assert!(said.contains(name), "{said}");
            assert!(!said.contains('{'), "{said}");
        }
    }
}
