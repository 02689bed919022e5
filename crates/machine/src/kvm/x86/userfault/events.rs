//! The stream of faults that come through userfaultfd.

use crate::kvm::x86::vm::VmShared;
use crate::{FaultEvent, FaultEvents, MachineError};
use pageferry_userfault::uffd::{Event, Userfaultfd};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The events of an armed machine.
pub(super) struct Events(Arc<VmShared>);

impl Events {
    /// The events of a machine that is armed.
    pub(super) fn new(shared: Arc<VmShared>) -> Self {
        Self(shared)
    }

    fn uffd(&self) -> &Userfaultfd {
        &self.0.faults.armed().expect("made by arming").uffd
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
                    if let Some(page) = self.0.ram.page_at_guest_hva(fault.address) {
                        return Ok(Some(FaultEvent {
                            page,
                            write: fault.write,
                        }));
                    }
                }
                // No other event was asked for.
                Some(_) => {}
            }
        }
    }
}
