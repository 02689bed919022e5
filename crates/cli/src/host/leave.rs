//! A VM leaves: the migration in its source's process.

use super::state::{Activity, Host, Job};
use super::wait::{
    ABANDONED_AT_SOURCE, Answers, NoOutcome, Stop, StopRequests, catch_defect, wait_for_outcome,
};
use super::watch::{Watch, has_switched_over};
use crate::exit::{Exit, Failure};
use crate::output;
use crate::report::{Conditions, Report, Sent};
use crate::sampler::Sampler;
use crate::signals::Interrupts;
use crate::vm::Vm;
use pageferry_migration::{
    Route, SessionStatus, SourceConfig, SourceFailure, SourceReport, SourceSession, SourceVm,
};
use pageferry_transport::address::Address;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

/// A migration's outcome: the report, or the failure and the place of the VM.
type Outcome = Result<SourceReport, (SourceVm, Failure)>;

impl Host {
    /// Runs a migration to its end. Returns the sentence that says where the VM is, or `None` if it
    /// is still here.
    ///
    /// # Errors
    /// When the VM is neither here nor whole elsewhere.
    pub(super) fn leave(
        self: &Arc<Self>,
        job: Job,
        stops: &mut StopRequests<'_>,
    ) -> Result<Option<String>, Failure> {
        let Some(vm) = self.vm() else {
            self.set_activity(Activity::Waiting);
            return Ok(None);
        };
        let to = job.to.to_string();
        output::note(&format!("migrating to {to}"));
        let sampler = Sampler::start(&vm, || true);
        let mut abandoned = false;
        let outcome = match start(self, &vm, &job) {
            Ok(outcome) => self
                .wait(&outcome, &job.session, stops)
                .unwrap_or_else(|none| {
                    abandoned = none == NoOutcome::Abandoned;
                    Err((SourceVm::GivenUp, none.failure(ABANDONED_AT_SOURCE)))
                }),
            // Nothing has happened to the VM.
            Err(failure) => Err((SourceVm::Runs, failure)),
        };
        let samples = sampler.samples();
        drop(sampler);
        match outcome {
            Ok(sent) => {
                self.set_activity(Activity::Left { to: to.clone() });
                let report = Report {
                    engine: vm.engine().name().into(),
                    vcpus: vm.vcpus(),
                    memory_bytes: vm.memory_bytes(),
                    sent: Some(Sent::new(&sent, vm.backing(), samples)),
                    received: None,
                    verified: None,
                    guest_view: None,
                    conditions: Conditions::here(format!("to {to}")).with(&job.config.settings),
                };
                let arrival = report.arrival(&to);
                let _ = job.done.send(Ok(report));
                Ok(Some(arrival))
            }
            Err((SourceVm::Runs, mut failure)) => {
                self.set_activity(Activity::Here);
                if failure.exit == Exit::Cancelled && self.quits() {
                    failure.message = CANCELLED_BY_QUIT.into();
                }
                output::note(&format!("the migration to {to} failed: {failure}"));
                let _ = job.done.send(Err(failure));
                Ok(None)
            }
            Err((SourceVm::Forced, failure)) => {
                self.set_activity(Activity::Here);
                output::note(&format!("the migration to {to} ended: {failure}"));
                let _ = job.done.send(Err(failure));
                Ok(None)
            }
            Err((SourceVm::GivenUp, failure)) => {
                // The user sent these requests before it was possible to know of this end. They
                // must not drop the only whole copy.
                stops.forget();
                self.set_activity(Activity::GivenUp { to });
                let _ = job
                    .done
                    .send(Err(Failure::new(failure.exit, failure.message.clone())));
                if !abandoned {
                    output::note(&format!(
                        "{failure}; the VM and all its pages are kept, paused, until `pageferry quit` or Ctrl-C"
                    ));
                    while stops.take_on_purpose().is_none() {
                        // `abandon --resume-here` runs the copy here.
                        if self.activity() == Activity::Here {
                            return Ok(None);
                        }
                        std::thread::sleep(Interrupts::POLL);
                    }
                }
                Err(failure)
            }
        }
    }

    fn wait(
        &self,
        outcome: &Receiver<Outcome>,
        session: &SourceSession,
        stops: &mut StopRequests<'_>,
    ) -> Result<Outcome, NoOutcome> {
        let answers = Answers {
            switched_over: &|| matches!(self.activity(), Activity::Leaving(phase) if has_switched_over(phase)),
            cancel: &|stop| {
                output::note(match stop {
                    Stop::Signal | Stop::Hangup if self.is_paused() == Some(true) => {
                        "cancelling the migration; the VM stays here, paused"
                    }
                    Stop::Signal | Stop::Hangup => "cancelling the migration; the VM runs on here",
                    Stop::Quit => "cancelling the migration; then the VM ends, as `quit` asks",
                });
                session.cancel();
            },
            finishing: &|| output::note(FINISHING),
            // This copy is the only one.
            hangup_cancels: false,
        };
        wait_for_outcome(outcome, stops, &answers)
    }
}

/// The answer to a requester whose migration `quit` cancelled.
const CANCELLED_BY_QUIT: &str =
    "the migration was cancelled, as `quit` asks for the end of the VM: it ends at the source";

/// The answer to the first request to stop after the switch-over.
pub(crate) const FINISHING: &str =
    "the VM is at the destination already: sending the rest of its memory first (again: give up)";

/// Starts the migration on a separate thread, so that the user can give it up.
fn start(host: &Arc<Host>, vm: &Arc<Vm>, job: &Job) -> Result<Receiver<Outcome>, Failure> {
    let watch = Watch {
        host: Arc::clone(host),
        activity: Activity::Leaving,
        feed: Arc::clone(&job.feed),
    };
    send_away(vm, &job.to, job.config.clone(), &job.session, watch)
}

/// The failure in words. A VM that its owner has paused does not run on.
pub(super) fn explain(failure: SourceFailure, vm: &Vm) -> Failure {
    let stays = match failure.vm {
        SourceVm::Runs => "the VM stays paused at the source, as it was",
        SourceVm::Forced => {
            "the VM was handed over, and is at the source again, paused as it was, since an operator \
             took it back"
        }
        SourceVm::GivenUp => return failure.into(),
    };
    let words = format!("{}; {stays}", failure.error);
    let said = Failure::from(failure);
    match vm.threads().is_paused() {
        true => Failure::new(said.exit, words),
        false => said,
    }
}

/// The place of the VM after a defect ended its migration at `stage`. A VM that cannot be elsewhere
/// runs on, unless its owner has `paused` it.
fn after_defect(
    stage: &str,
    paused: bool,
    defect: Failure,
    run_on: impl FnOnce(),
) -> (SourceVm, Failure) {
    let stays = match paused {
        true => "the VM stays paused here, as it was",
        false => "the VM runs on here",
    };
    match stage {
        // A stage is published after its actions, and `Go` is an action of the stage after
        // switch-over. So the destination was not told to run the VM.
        "none" | "setup" | "pre-copy" | "cancelling" | "kept" | "returned" => {
            run_on();
            (SourceVm::Runs, defect.and(stays))
        }
        "resumed-here" => (SourceVm::Forced, defect.and(stays)),
        // It may run at the destination.
        _ => (SourceVm::GivenUp, defect),
    }
}

/// Migrates `vm` on a separate thread, which sends the outcome.
///
/// # Errors
/// When the host has no room for a thread.
pub(crate) fn send_away(
    vm: &Arc<Vm>,
    to: &Address,
    config: SourceConfig,
    session: &Arc<SourceSession>,
    observer: impl pageferry_migration::Observer + 'static,
) -> Result<Receiver<Outcome>, Failure> {
    let (sender, outcome) = channel();
    let (vm, route, session) = (Arc::clone(vm), Route::To(to.clone()), Arc::clone(session));
    std::thread::Builder::new()
        .name("migration".into())
        .spawn(move || {
            let guest = vm.guest().to_bytes();
            let result = catch_defect(|| {
                pageferry_migration::migrate(
                    &vm.running(),
                    &route,
                    &guest,
                    &config,
                    &session,
                    &observer,
                )
            });
            let outcome = match result {
                Ok(result) => result.map_err(|failure| (failure.vm, explain(failure, &vm))),
                Err(defect) => {
                    let SessionStatus { stage, paused, .. } = session.status();
                    // From the switch-over on, it is the migration that has paused the VM.
                    let pause = session.before_switch_over(|| vm.threads().is_paused());
                    let paused = pause.unwrap_or(paused);
                    let run_on = || vm.run_on(paused);
                    Err(after_defect(stage, paused, defect, run_on))
                }
            };
            // The receiver is gone only if the process is ending.
            let _ = sender.send(outcome);
        })
        .map_err(|e| Failure::os("cannot start the migration's thread", e))?;
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn a_panic_is_a_defect_and_a_vm_that_is_only_here_runs_on() {
        let defect = || catch_defect(|| -> () { panic!("page {} of nothing", 7) }).unwrap_err();
        for (stage, place) in [
            ("none", SourceVm::Runs),
            ("setup", SourceVm::Runs),
            ("pre-copy", SourceVm::Runs),
            ("cancelling", SourceVm::Runs),
            ("switch-over", SourceVm::GivenUp),
            ("handed-over", SourceVm::GivenUp),
            ("drained", SourceVm::GivenUp),
            ("completed", SourceVm::GivenUp),
            ("given-up", SourceVm::GivenUp),
            ("resumed-here", SourceVm::Forced),
        ] {
            let runs = Cell::new(false);
            let (vm, failure) = after_defect(stage, false, defect(), || runs.set(true));
            assert_eq!(
                (vm, runs.get()),
                (place, place == SourceVm::Runs),
                "{stage}"
            );
            assert_eq!(failure.exit, Exit::Internal, "{stage}");
            let why = failure.to_string();
            assert!(why.contains("a defect of Pageferry"), "{why}");
            assert!(why.contains("panicked: page 7 of nothing"), "{why}");
            assert_eq!(
                why.contains("the VM runs on here"),
                place != SourceVm::GivenUp
            );
            let (same, failure) = after_defect(stage, true, defect(), || ());
            let why = failure.to_string();
            assert_eq!(same, place, "{stage}");
            assert!(!why.contains("runs on"), "{why}");
            assert_eq!(
                why.contains("the VM stays paused here"),
                place != SourceVm::GivenUp
            );
        }
    }
}
