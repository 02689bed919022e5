//! The only wait for a migration. It answers requests to stop meanwhile.
//!
//! **Guarantee.** Each request to stop is answered once. Before the switch-over it cancels the
//! migration. After the switch-over the first request is answered that the rest follows, and the
//! second one abandons the migration. An answered request has no later effect. A terminal that
//! closes throws no VM away: it only cancels a migration at a destination that does not run yet.
//!
//! **Mechanism.** Signals and `quit` are counted. [`StopRequests`] remembers how many were
//! answered.

use super::state::Host;
use crate::exit::{Exit, Failure};
use crate::output;
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
    /// The terminal of the process has closed.
    Hangup,
}

/// The requests to stop that were not answered yet.
pub(crate) struct StopRequests<'a> {
    interrupts: &'a Interrupts,
    host: Option<&'a Host>,
    /// The numbers of signals and of `quit` requests that were answered.
    answered: (u32, u32),
    hangup_answered: bool,
}

impl<'a> StopRequests<'a> {
    /// Takes all requests since the process began. `quit` comes over the control socket of `host`.
    pub(crate) const fn new(interrupts: &'a Interrupts, host: Option<&'a Host>) -> Self {
        Self {
            interrupts,
            host,
            answered: (0, 0),
            hangup_answered: false,
        }
    }

    /// The signals among the requests.
    pub(crate) const fn interrupts(&self) -> &'a Interrupts {
        self.interrupts
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
        } else if self.interrupts.hung_up() && !self.hangup_answered {
            self.hangup_answered = true;
            Some(Stop::Hangup)
        } else {
            None
        }
    }

    /// Forgets the requests that came so far.
    pub(crate) fn forget(&mut self) {
        self.answered = self.received();
    }

    /// As [`StopRequests::take`], for a process that keeps the VM though its terminal closes.
    pub(crate) fn take_on_purpose(&mut self) -> Option<Stop> {
        match self.take() {
            Some(Stop::Hangup) => {
                self.forget_hangup();
                None
            }
            stop => stop,
        }
    }

    /// Keeps the VM though the terminal has closed, unless that happens again.
    fn forget_hangup(&mut self) {
        self.hangup_answered = false;
        self.interrupts.forget_hangup();
    }

    /// Waits for the next request that does not come from a closed terminal.
    pub(crate) fn wait_for_next(&mut self) {
        while self.take_on_purpose().is_none() {
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
    /// Whether a closed terminal cancels the migration before the switch-over: at a destination,
    /// whose copy is not the only one.
    pub(crate) hangup_cancels: bool,
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
        let over = (answers.switched_over)();
        if stop == Stop::Hangup && (over || !answers.hangup_cancels) {
            stops.forget_hangup();
            output::note("the terminal was closed: the migration goes on, and so does the VM");
        } else if !over {
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
            hangup_cancels: false,
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
            hangup_cancels: false,
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
            hangup_cancels: false,
        };
        let ended = wait_for_outcome(&outcome, &mut stops, &answers);
        assert_eq!((ended, told.get()), (Err(NoOutcome::Abandoned), 1));
    }

    /// A closed terminal is told several times: by the kernel, by the shell and by the terminal.
    #[test]
    fn a_closed_terminal_abandons_nothing() {
        for (over, cancels) in [(true, true), (true, false), (false, false), (false, true)] {
            let interrupts = Interrupts::default();
            let mut stops = StopRequests::new(&interrupts, None);
            let (sender, outcome) = channel();
            let cancelled = Cell::new(0);
            let answers = Answers {
                switched_over: &|| over,
                cancel: &|stop| {
                    assert_eq!(stop, Stop::Hangup);
                    cancelled.set(cancelled.get() + 1);
                },
                finishing: &|| panic!("nobody asked for that"),
                hangup_cancels: cancels,
            };
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for _ in 0..5 {
                        interrupts.hang_up();
                        std::thread::sleep(2 * Interrupts::POLL);
                    }
                    sender.send(()).unwrap();
                });
                assert_eq!(wait_for_outcome(&outcome, &mut stops, &answers), Ok(()));
            });
            assert_eq!(cancelled.get(), u32::from(!over && cancels), "once");
            // Only what was answered by a cancellation asks for the end of the process.
            if cancelled.get() == 0 {
                let mut later = StopRequests::new(&interrupts, None);
                assert_eq!(later.take_on_purpose(), None);
                assert!(!interrupts.hung_up());
            } else {
                assert!(interrupts.hung_up());
            }
        }
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
            hangup_cancels: false,
        };
        let ended = wait_for_outcome(&outcome, &mut stops, &answers);
        assert_eq!(ended, Err(NoOutcome::ThreadDied));
    }
}
