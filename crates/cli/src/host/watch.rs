//! The observer of a migration.

use super::state::{Activity, Host};
use crate::progress::Feed;
use pageferry_migration::{Observer, Phase};
use std::sync::Arc;

/// Passes a migration's phases to the host's activity and to those who watch.
pub(crate) struct Watch {
    /// The host with the activity.
    pub(crate) host: Arc<Host>,
    /// Converts a phase to an activity.
    pub(crate) activity: fn(Phase) -> Activity,
    /// The feed for those who watch.
    pub(crate) feed: Arc<Feed>,
}

impl Observer for Watch {
    fn phase(&self, phase: Phase) {
        // The migration's result reports the end.
        if !matches!(phase, Phase::Completed | Phase::Failed) {
            self.host.set_activity((self.activity)(phase));
        }
        self.feed.phase(phase);
    }

    fn progress(&self, phase: Phase, done: u64, total: u64) {
        self.feed.progress(phase, done, total);
    }

    fn allocated(&self, done: u64, total: u64) {
        self.host
            .set_allocated(Some(done * pageferry_addr::PAGE_SIZE));
        self.feed.allocated(done, total);
    }

    fn note(&self, text: &str) {
        Observer::note(&*self.feed, text);
    }
}

/// Whether the guest may run at the destination in this phase.
pub(crate) fn has_switched_over(phase: Phase) -> bool {
    matches!(
        phase,
        Phase::Postcopy | Phase::Completion | Phase::Completed
    )
}
