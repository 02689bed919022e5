//! The only wait for a migration. It answers requests to stop meanwhile.
//!
//! **Guarantee.** Each request to stop is answered once. Before the switch-over it cancels the
//! migration. After the switch-over the first request is answered that the rest follows, and the
//! second one abandons the migration. An answered request has no later effect.
//!
//! **Mechanism.** Signals and `quit` are counted. [`StopRequests`] remembers how many were
//! answered.

use super::state::Host;
use crate::exit::{Exit, Failure};
use crate::signals::Interrupts;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError};

/// A request to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Ctrl-C or SIGTERM.
    Signal,
    /// `quit` on the control socket: the VM must end.
    Quit,
}

/// The requests to stop that were not answered yet.
pub(crate) struct StopRequests<'a> {
    interrupts: &'a Interrupts,
    host: Option<&'a Host>,
    /// The numbers of signals and of `quit` requests that were answered.
    answered: (u32, u32),
}

impl<'a> StopRequests<'a> {
    /// Takes all requests since the process began. `quit` comes over the control socket of `host`.
    pub(crate) const fn new(interrupts: &'a Interrupts, host: Option<&'a Host>) -> Self {
        Self {
            interrupts,
            host,
            answered: (0, 0),
        }
    }

    fn received(&self) -> (u32, u32) {
        let quits = self.host.map_or(0, Host::quit_count);
        (self.interrupts.count(), quits)
    }

    /// Returns the next request. A `quit` answers the signals that came before it too.
    pub(crate) fn take(&mut self) -> Option<Stop> {
        let now = self.received();
        if now.1 > self.answered.1 {
            self.answered = (now.0, self.answered.1 + 1);
            Some(Stop::Quit)
        } else if now.0 > self.answered.0 {
            self.answered.0 += 1;
            Some(Stop::Signal)
        } else {
            None
        }
    }

    /// Forgets the requests that came so far.
    pub(crate) fn forget(&mut self) {
        self.answered = self.received();
    }

    /// Waits for the next request.
    pub(crate) fn wait_for_next(&mut self) {
        while self.take().is_none() {
            std::thread::sleep(Interrupts::POLL);
        }
    }
}

/// The answers to requests to stop in one migration.
pub(crate) struct Answers<'a> {
    /// Whether the guest may run at the destination already.
    pub(crate) switched_over: &'a dyn Fn() -> bool,
    /// Cancels the migration, and prints that.
    pub(crate) cancel: &'a dyn Fn(Stop),
    /// Prints that the first request after the switch-over lets the migration finish.
    pub(crate) finishing: &'a dyn Fn(),
}

/// The reason why a migration gave no outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoOutcome {
    /// The user did not wait for the end of post-copy.
    Abandoned,
    /// The migration's thread ended without an outcome.
    ThreadDied,
}

impl NoOutcome {
    /// The failure. `abandoned` describes the consequence of not waiting.
    pub(crate) fn failure(self, abandoned: &str) -> Failure {
        match self {
            Self::Abandoned => Failure::new(
                Exit::LinkLost,
                format!("abandoned after the switch-over: {abandoned}"),
            ),
            Self::ThreadDied => defect("ended without an outcome"),
        }
    }
}

/// The failure of a migration's thread that did not do its work, which is a defect.
fn defect(how: &str) -> Failure {
    Failure::new(
        Exit::Internal,
        format!("a defect of Pageferry: the migration's thread {how}"),
    )
}

/// Does the work of a migration's thread. A panic becomes a failure.
///
/// # Errors
/// The message of the panic.
pub(crate) fn catch_defect<T>(work: impl FnOnce() -> T) -> Result<T, Failure> {
    // Nothing that the work has changed is used after a panic, except what threads share. Locks
    // that are poisoned are taken all the same, and the VM's own state is behind its own threads.
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        defect(&format!("panicked: {}", text.unwrap_or_default()))
    })
}

/// The consequence for a source whose user did not wait for the end of post-copy.
pub(crate) const ABANDONED_AT_SOURCE: &str = "the VM waits at the destination for pages that \
     never come; it is not resumed here either";

/// Waits for the outcome of a migration and answers requests to stop.
///
/// # Errors
/// [`NoOutcome`] has the reason.
pub(crate) fn wait_for_outcome<T>(
    outcome: &Receiver<T>,
    stops: &mut StopRequests<'_>,
    answers: &Answers<'_>,
) -> Result<T, NoOutcome> {
    let mut finishing = false;
    loop {
        match outcome.recv_timeout(Interrupts::POLL) {
            Ok(outcome) => return Ok(outcome),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(NoOutcome::ThreadDied),
        }
        let Some(stop) = stops.take() else { continue };
        if !(answers.switched_over)() {
            // One cancellation answers all of them: none may end a VM that runs on.
            stops.forget();
            (answers.cancel)(stop);
        } else if finishing {
            return Err(NoOutcome::Abandoned);
        } else {
            finishing = true;
            (answers.finishing)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::mpsc::channel;

    #[test]
    fn a_request_is_answered_once() {
        let (host, _jobs) = Host::new();
        let interrupts = Interrupts::default();
        let mut stops = StopRequests::new(&interrupts, Some(&host));
        assert_eq!(stops.take(), None);
        interrupts.add();
        assert_eq!(stops.take(), Some(Stop::Signal));
        assert_eq!(stops.take(), None);
        interrupts.add();
        host.ask_to_quit();
        assert_eq!(stops.take(), Some(Stop::Quit));
        assert_eq!(stops.take(), None);
    }

    #[test]
    fn two_signals_at_once_count_as_two_after_the_switch_over() {
        let interrupts = Interrupts::default();
        let mut stops = StopRequests::new(&interrupts, None);
        let (_sender, outcome) = channel::<()>();
        let told = Cell::new(0);
        interrupts.add();
        interrupts.add();
        let answers = Answers {
            switched_over: &|| true,
            cancel: &|_| unreachable!("it is too late"),
            finishing: &|| told.set(told.get() + 1),
        };
        let ended = wait_for_outcome(&outcome, &mut stops, &answers);
        assert_eq!((ended, told.get()), (Err(NoOutcome::Abandoned), 1));
    }

    #[test]
    fn two_signals_at_once_cancel_once_and_leave_none_behind() {
        let interrupts = Interrupts::default();
        let mut stops = StopRequests::new(&interrupts, None);
        let (sender, outcome) = channel();
        let told = Cell::new(0);
        interrupts.add();
        interrupts.add();
        let answers = Answers {
            switched_over: &|| false,
            cancel: &|_| {
                told.set(told.get() + 1);
                sender.send(()).unwrap();
            },
            finishing: &|| unreachable!("it was cancelled"),
        };
        assert_eq!(wait_for_outcome(&outcome, &mut stops, &answers), Ok(()));
        assert_eq!((told.get(), stops.take()), (1, None));
    }

    #[test]
    fn the_second_request_after_the_switch_over_abandons() {
        let interrupts = Interrupts::default();
        let mut stops = StopRequests::new(&interrupts, None);
        let (_sender, outcome) = channel::<()>();
        let (over, told) = (Cell::new(false), Cell::new(0));
        interrupts.add();
        let answers = Answers {
            switched_over: &|| over.get(),
            cancel: &|_| {
                over.set(true);
                interrupts.add();
            },
            finishing: &|| {
                told.set(told.get() + 1);
                interrupts.add();
            },
        };
        let ended = wait_for_outcome(&outcome, &mut stops, &answers);
        assert_eq!((ended, told.get()), (Err(NoOutcome::Abandoned), 1));
    }

    #[test]
    fn a_thread_that_died_is_told_from_one_that_works() {
        let interrupts = Interrupts::default();
        let mut stops = StopRequests::new(&interrupts, None);
        let (sender, outcome) = channel::<()>();
        drop(sender);
        let answers = Answers {
            switched_over: &|| true,
            cancel: &|_| {},
            finishing: &|| {},
        };
        let ended = wait_for_outcome(&outcome, &mut stops, &answers);
        assert_eq!(ended, Err(NoOutcome::ThreadDied));
    }
}
