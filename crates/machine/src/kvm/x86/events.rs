//! The streams of faults from userfaultfd.
//!
//! Streams of one userfaultfd share its queue: the kernel hands each event to one of them.

use super::shared::VmShared;
use super::slots::KvmSlot;
use crate::translate::Translator;
use crate::{FaultEvent, FaultEvents, MachineError};
use pageferry_userfault::uffd::{Event, EventReader, Userfaultfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The number of events that one `read(2)` takes.
const BATCH: usize = 64;

/// One reader's events of an armed machine.
pub(super) struct Events {
    shared: Arc<VmShared>,
    /// The part of RAM whose userfaultfd it reads.
    part: usize,
    reader: EventReader,
    translator: Translator<KvmSlot>,
}

impl Events {
    /// The events of a part of an armed machine.
    pub(super) fn new(shared: Arc<VmShared>, part: usize) -> Self {
        Self {
            translator: shared.translator(),
            reader: EventReader::new(BATCH),
            part,
            shared,
        }
    }
}

/// The userfaultfd of a part of an armed machine.
fn uffd(shared: &VmShared, part: usize) -> &Userfaultfd {
    let armed = shared.faults.armed().expect("made by arming");
    armed.watch.userfaultfd(part)
}

impl FaultEvents for Events {
    fn fd(&self) -> BorrowedFd<'_> {
        uffd(&self.shared, self.part).as_fd()
    }

    fn next(&mut self) -> Result<Option<FaultEvent>, MachineError> {
        loop {
            let event = self
                .reader
                .try_next(uffd(&self.shared, self.part))
                .map_err(|e| MachineError::os("cannot read events of userfaultfd", e))?;
            match event {
                None => return Ok(None),
                Some(Event::PageFault(fault)) => {
                    if let Some(page) = self.translator.page_at_hva(fault.address) {
                        return Ok(Some(FaultEvent {
                            page,
                            write: fault.write,
                        }));
                    }
                }
                Some(other) => {
                    return Err(MachineError::os(
                        "userfaultfd sent an event that was not requested",
                        io::Error::other(format!("{other:?}")),
                    ));
                }
            }
        }
    }
}
