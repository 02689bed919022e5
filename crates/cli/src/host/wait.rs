//! The one place that waits for a migration and answers requests to stop meanwhile.
//!
//! **Guarantee.** Each request to stop is answered once. Before the switch-over it cancels the
//! migration. After the switch-over the first one is told that the rest follows, and the second one
//! abandons the migration. A request that was answered has no later effect.
//!
//! **Mechanism.** Signals and `quit` are counted. [`StopRequests`] remembers how many were
//! answered.

use super::Host;
use crate::exit::{Exit, Failure};
use crate::signals::Interrupts;
use std::sync::mpsc::{Receiver, RecvTimeoutError};

/// A request to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Ctrl-C or SIGTERM.
    Signal,
    /// `quit` on the control socket: the VM is to end.
    Quit,
}

/// The requests to stop that were not answered yet.
pub(crate) struct StopRequests<'a> {
    interrupts: &'a Interrupts,
    host: Option<&'a Host>,
    /// How many signals and how many `quit` were answered.
    answered: (u32, u32),
}

impl<'a> StopRequests<'a> {
    /// All requests since the process began. `host` is the one whose control socket takes `quit`.
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

    /// Whether a request came since the last call; all that came are answered by that.
    pub(crate) fn take(&mut self) -> Option<Stop> {
        let (before, now) = (self.answered, self.received());
        self.answered = now;
        if now.1 > before.1 {
            Some(Stop::Quit)
        } else if now.0 > before.0 {
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

/// How requests to stop are answered in one migration.
pub(crate) struct Answers<'a> {
    /// Whether the guest may run at the destination already.
    pub(crate) switched_over: &'a dyn Fn() -> bool,
    /// Cancels the migration, and says so.
    pub(crate) cancel: &'a dyn Fn(Stop),
    /// Says that the first request after the switch-over lets the migration finish.
    pub(crate) finishing: &'a dyn Fn(),
}

/// Why a migration gave no outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoOutcome {
    /// The user did not wait for the end of post-copy.
    Abandoned,
    /// The migration's thread ended without an outcome.
    ThreadDied,
}

impl NoOutcome {
    /// The failure, where `abandoned` says what it means that the user did not wait.
    pub(crate) fn failure(self, abandoned: &str) -> Failure {
        match self {
            Self::Abandoned => Failure::new(
                Exit::LinkLost,
                format!("abandoned after the switch-over: {abandoned}"),
            ),
            Self::ThreadDied => Failure::new(
                Exit::Internal,
                "the migration's thread ended without an outcome",
            ),
        }
    }
}

/// What it means for a source that its user did not wait for the end of post-copy.
pub(crate) const ABANDONED_AT_SOURCE: &str = "the destination pauses the VM, as pages are missing \
     there; it is not resumed here either";

/// Waits for the outcome of a migration and answers requests to stop.
///
/// # Errors
/// [`NoOutcome`] says why there is none.
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
