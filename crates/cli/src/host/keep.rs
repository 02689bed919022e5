//! The main thread of a host: it waits for jobs and for the end.

use super::state::{Host, Jobs};
use super::wait::StopRequests;
use crate::exit::Failure;
use crate::signals::Interrupts;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;

/// The end of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Ctrl-C or `quit`.
    Asked,
    /// The VM was migrated to this address.
    Migrated(String),
}

impl Host {
    /// Keeps the VM until it is migrated away or somebody asks for the end.
    ///
    /// # Errors
    /// When the guest cannot run any further, or the user gave a migration up after the
    /// switch-over.
    pub(crate) fn keep(
        self: &Arc<Self>,
        jobs: &Jobs,
        interrupts: &Interrupts,
    ) -> Result<Ended, Failure> {
        let mut stops = StopRequests::new(interrupts, Some(self));
        loop {
            // A `quit` that cancelled a migration still ends the VM. For a signal, the cancellation
            // was the answer.
            if self.quits() || stops.take().is_some() {
                return Ok(Ended::Asked);
            }
            if let Some(vm) = self.vm() {
                vm.check_guest()?;
            }
            match jobs.0.recv_timeout(Interrupts::POLL) {
                Ok(job) => {
                    if let Some(to) = self.leave(job, &mut stops)? {
                        return Ok(Ended::Migrated(to));
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                // The host itself holds a sender, so this cannot happen. If it did, the loop must
                // not spin.
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Interrupts::POLL),
            }
        }
    }
}
