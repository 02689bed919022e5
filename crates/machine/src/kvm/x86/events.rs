//! The stream of faults from userfaultfd.

use super::shared::VmShared;
use super::slots::KvmSlot;
use crate::translate::Translator;
use crate::{FaultEvent, FaultEvents, MachineError};
use pageferry_userfault::uffd::{Event, Userfaultfd};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The events of an armed machine.
pub(super) struct Events {
    shared: Arc<VmShared>,
    translator: Translator<KvmSlot>,
}

impl Events {
    /// The events of a machine that is armed.
    pub(super) fn new(shared: Arc<VmShared>) -> Self {
        Self {
            translator: shared.translator(),
            shared,
        }
    }

    fn uffd(&self) -> &Userfaultfd {
        &self.shared.faults.armed().expect("made by arming").uffd
    }
}

impl FaultEvents for Events {
    fn fd(&self) -> BorrowedFd<'_> {
        self.uffd().as_fd()
    }

    fn next(&mut self) -> Result<Option<FaultEvent>, MachineError> {
        loop {
            let event = self
                .uffd()
                .read_event()
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
                // No other event was requested.
                Some(_) => {}
            }
        }
    }
}
