//! The main thread of a host: it waits for jobs and for the end.

use super::save::save;
use super::state::{Activity, Host, Jobs};
use super::wait::{Stop, StopRequests};
use crate::args::SaveArgs;
use crate::exit::{Exit, Failure};
use crate::output;
use crate::signals::Interrupts;
use pageferry_machine::{Reset, ResetKind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, PoisonError};

/// The end of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Ctrl-C or `quit`.
    Asked,
    /// Ctrl-C or `quit`, and the VM was saved to this directory.
    Saved(PathBuf),
    /// The VM was migrated. The sentence says where it is.
    Migrated(String),
    /// The guest ended itself.
    Reset(Reset),
}

impl Ended {
    /// Checks that a guest that ended itself did so as it should.
    ///
    /// # Errors
    /// [`Exit::Guest`] if the guest calls its end a failure.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        match self {
            Self::Reset(Reset { failure: true, .. }) => Err(Failure::new(
                Exit::Guest,
                "the guest ended itself because of a failure",
            )),
            // Linux asks for it after a panic too, and does not say so.
            Self::Reset(Reset {
                kind: ResetKind::Reboot,
                ..
            }) => Err(Failure::new(
                Exit::Guest,
                "the guest asked for a reboot, as it does after a panic, and this VM is started only once: run it again",
            )),
            _ => Ok(()),
        }
    }

    /// The end in words, unless the VM was migrated.
    pub(crate) const fn words(&self) -> Option<&'static str> {
        match self {
            Self::Asked => Some("the VM was ended"),
            Self::Migrated(_) | Self::Saved(_) => None,
            Self::Reset(Reset { kind, .. }) => Some(match kind {
                ResetKind::Shutdown => "the guest has shut down",
                ResetKind::Reboot => "the guest has ended itself by a reboot",
            }),
        }
    }
}

impl Host {
    /// Keeps the VM until it is migrated away or somebody asks for the end. Before that end, the VM
    /// is saved as `how` says.
    ///
    /// # Errors
    /// When the guest cannot run any further, or the user gave a migration up after the
    /// switch-over.
    pub(crate) fn keep(
        self: &Arc<Self>,
        jobs: &Jobs,
        interrupts: &Interrupts,
        how: &SaveArgs,
    ) -> Result<Ended, Failure> {
        let snapshot_to = how.snapshot_to.as_deref();
        let mut stops = StopRequests::new(interrupts, Some(self));
        loop {
            // A `quit` that cancelled a migration still ends the VM. For a signal, the cancellation
            // was the answer.
            let asked = match stops.take() {
                // A migration was asked for, and its job is about to come.
                Some(Stop::Hangup) => self.activity() == Activity::Here,
                Some(_) if snapshot_to.is_some() && self.activity() != Activity::Here => {
                    output::note("a migration was asked for first: ask again to end the VM");
                    false
                }
                stop => stop.is_some(),
            };
            if self.quits() || asked {
                match snapshot_to.filter(|_| self.activity() == Activity::Here) {
                    None => return Ok(Ended::Asked),
                    Some(directory) => match self.save(directory, how.raw, interrupts) {
                        Ok(()) => return Ok(Ended::Saved(directory.to_owned())),
                        Err(why) => output::note(&format!("{why}; the VM runs on")),
                    },
                }
                self.forget_quits();
                stops.forget();
            }
            if let Some(vm) = self.vm() {
                vm.check_guest()?;
                if let Some(reset) = vm.reset() {
                    return Ok(Ended::Reset(reset));
                }
            }
            match jobs.0.recv_timeout(Interrupts::POLL) {
                Ok(job) => {
                    if let Some(arrival) = self.leave(job, &mut stops)? {
                        return Ok(Ended::Migrated(arrival));
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                // The host itself holds a sender, so this cannot happen. If it did, the loop must
                // not spin.
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Interrupts::POLL),
            }
        }
    }

    /// Saves the VM. While it is written and afterwards, nobody changes or resumes it.
    fn save(&self, directory: &Path, raw: bool, interrupts: &Interrupts) -> Result<(), Failure> {
        let _busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(vm) = self.vm() else {
            return Err(Failure::new(Exit::Internal, "there is no VM"));
        };
        output::note(&format!("saving the VM to {}", directory.display()));
        self.set_activity(Activity::Left {
            to: format!("the snapshot {}", directory.display()),
        });
        let saved = save(&vm, directory, raw, interrupts);
        if saved.is_err() {
            self.set_activity(Activity::Here);
        }
        saved
    }
}
