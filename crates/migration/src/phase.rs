//! The phases of a migration: the one list that progress, reports, logs and plots name.

use std::fmt;
use std::io;

/// The phase that a migration is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The two sides connect and agree on capabilities. The destination builds its machine and
    /// allocates memory.
    Setup,
    /// The source sends pages while the guest runs there. Passes count from 1.
    Precopy {
        /// The number of the pass over the pages.
        pass: u32,
    },
    /// The blackout: no vCPU runs on either side. The source sends the missing bitmap and the vCPU
    /// states.
    SwitchOver,
    /// The guest runs at the destination. Missing pages arrive on request and in the background.
    Postcopy,
    /// All pages have arrived. Both sides confirm it.
    Completion,
    /// The migration succeeded.
    Completed,
    /// The migration failed. The error says where the VM is.
    Failed,
}

impl Phase {
    /// The name in progress, reports, logs and plots. It does not include the pass.
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

/// Receives the progress of a migration. The migration's own threads call it, so it must not block.
pub trait Observer: Send + Sync {
    /// `phase` begins.
    fn phase(&self, phase: Phase);

    /// `done` of `total` pages are done in this phase.
    fn progress(&self, phase: Phase, done: u64, total: u64);

    /// The destination has allocated `done` of its `total` pages. This runs in parallel with any
    /// phase.
    fn allocated(&self, done: u64, total: u64) {
        let _ = (done, total);
    }

    /// The source is about to hand the VM over: right after this, it sends `Go`. `record` and
    /// `missing`, the number of missing pages, let another process [go on](crate::go_on) if this
    /// one dies. The record has the session's secret. The guest stands still meanwhile.
    ///
    /// # Errors
    /// When that cannot be noted. The VM is not handed over then, and runs on.
    fn handing_over(&self, record: &[u8], missing: u64) -> io::Result<()> {
        let _ = (record, missing);
        Ok(())
    }

    /// The destination has said that it runs the VM, or has all of it: from now on it never gives
    /// the VM back. This may be called again.
    fn runs_there(&self) {}

    /// The source has to say something to people: one sentence.
    fn note(&self, text: &str) {
        let _ = text;
    }
}

/// An observer that ignores everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unobserved;

impl Observer for Unobserved {
    fn phase(&self, _: Phase) {}
    fn progress(&self, _: Phase, _: u64, _: u64) {}
}
