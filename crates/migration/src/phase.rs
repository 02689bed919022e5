//! The phases of a migration: the one list that progress, reports, logs and plots name.

use std::fmt;

/// Where a migration is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Connections, capabilities, the destination's machine and its memory.
    Setup,
    /// The guest runs at the source while pages are sent; passes count from 1.
    Precopy {
        /// Which pass over the pages.
        pass: u32,
    },
    /// No vCPU runs anywhere: the missing bitmap and the vCPU states move. The blackout.
    SwitchOver,
    /// The guest runs at the destination; missing pages arrive on request and in the background.
    Postcopy,
    /// All pages have arrived; both ends confirm it.
    Completion,
    /// Over, well.
    Completed,
    /// Over, not well: what that means for the VM is in the error.
    Failed,
}

impl Phase {
    /// The name used everywhere; passes are not part of it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Setup => "setup",
            Self::Precopy { .. } => "pre-copy",
            Self::SwitchOver => "switch-over",
            Self::Postcopy => "post-copy",
            Self::Completion => "completion",
            Self::Completed => "completed",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Precopy { pass } => write!(f, "pre-copy pass {pass}"),
            _ => f.write_str(self.name()),
        }
    }
}

/// Is told how a migration goes. Called from the migration's own threads; must not block.
pub trait Observer: Send + Sync {
    /// A phase begins.
    fn phase(&self, phase: Phase);

    /// Pages are done in this phase, of `total`.
    fn progress(&self, phase: Phase, done: u64, total: u64);

    /// The destination has allocated `done` of its `total` pages, beside whatever the phase is.
    fn allocated(&self, done: u64, total: u64) {
        let _ = (done, total);
    }
}

/// An observer that ignores everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unobserved;

impl Observer for Unobserved {
    fn phase(&self, _: Phase) {}
    fn progress(&self, _: Phase, _: u64, _: u64) {}
}
