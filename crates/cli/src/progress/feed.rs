//! Updates on their way from a worker to its viewers.

use pageferry_migration::{Observer, Phase, SessionStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// An update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Update {
    /// A phase of a migration began.
    Phase(Phase),
    /// A step of a command that is not a phase began.
    Step(String),
    /// The current phase or step has come this far.
    Progress {
        /// Units done.
        done: u64,
        /// The total number of units.
        total: u64,
    },
    /// Meanwhile, the destination has allocated memory for this many pages.
    Allocated {
        /// Pages done.
        done: u64,
        /// The total number of pages.
        total: u64,
    },
    /// A separate line.
    Note(String),
}

/// How fast a migration goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rates {
    /// Bytes of pages a second.
    pub(crate) bytes: u64,
    /// The time until no page is left, if it is known.
    pub(crate) left: Option<Duration>,
}

impl Rates {
    /// The rates of a session. `None` while there are none.
    pub(crate) fn of(status: &SessionStatus) -> Option<Self> {
        (status.page_rate > 0 && !status.is_over()).then_some(Self {
            bytes: status.page_rate,
            left: status.time_left,
        })
    }
}

/// Asked for the rates by whoever shows them.
type Gauge = Box<dyn Fn() -> Option<Rates> + Send>;

/// A queue of updates that nobody waits on.
#[derive(Default)]
pub(crate) struct Feed {
    updates: Mutex<Vec<Update>>,
    gauge: Mutex<Option<Gauge>>,
}

impl Feed {
    /// The most updates kept for a reader that does not come.
    const MAX: usize = 1024;

    /// An empty feed.
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Update>> {
        self.updates.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an update. Progress replaces progress that no reader has taken yet.
    pub(crate) fn put(&self, update: Update) {
        let mut updates = self.lock();
        if matches!(
            (updates.last(), &update),
            (Some(Update::Progress { .. }), Update::Progress { .. })
                | (Some(Update::Allocated { .. }), Update::Allocated { .. })
        ) {
            updates.pop();
        }
        if updates.len() < Self::MAX {
            updates.push(update);
        }
    }

    /// Begins a step.
    pub(crate) fn step(&self, name: impl Into<String>) {
        self.put(Update::Step(name.into()));
    }

    /// Reports the progress of the step.
    pub(crate) fn at(&self, done: u64, total: u64) {
        self.put(Update::Progress { done, total });
    }

    /// Adds a line.
    pub(crate) fn note(&self, text: impl Into<String>) {
        self.put(Update::Note(text.into()));
    }

    /// Shows the rates that `gauge` returns, from now on.
    pub(crate) fn measure(&self, gauge: impl Fn() -> Option<Rates> + Send + 'static) {
        *self.gauge.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(gauge));
    }

    /// The rates now.
    pub(crate) fn rates(&self) -> Option<Rates> {
        let gauge = self.gauge.lock().unwrap_or_else(PoisonError::into_inner);
        gauge.as_ref().and_then(|gauge| gauge())
    }

    /// Takes all updates.
    pub(crate) fn take(&self) -> Vec<Update> {
        std::mem::take(&mut *self.lock())
    }
}

impl Observer for Feed {
    fn phase(&self, phase: Phase) {
        self.put(Update::Phase(phase));
    }

    fn progress(&self, _: Phase, done: u64, total: u64) {
        self.at(done, total);
    }

    fn allocated(&self, done: u64, total: u64) {
        self.put(Update::Allocated { done, total });
    }

    fn note(&self, text: &str) {
        self.put(Update::Note(text.into()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_replaced_and_phases_are_kept() {
        let feed = Feed::new();
        feed.phase(Phase::Setup);
        for done in 0..5000 {
            feed.progress(Phase::Setup, done, 5000);
        }
        feed.phase(Phase::SwitchOver);
        let last = Update::Progress {
            done: 4999,
            total: 5000,
        };
        assert_eq!(
            feed.take(),
            [
                Update::Phase(Phase::Setup),
                last,
                Update::Phase(Phase::SwitchOver)
            ]
        );
        assert_eq!(feed.take(), []);
    }

    #[test]
    fn a_feed_nobody_reads_does_not_grow_for_ever() {
        let feed = Feed::new();
        (0..10_000).for_each(|i| feed.note(format!("{i}")));
        assert_eq!(feed.take().len(), Feed::MAX);
    }
}
