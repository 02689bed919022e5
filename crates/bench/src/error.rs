//! Why a benchmark has no figures.

/// Why a benchmark has no figures.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The migration in it failed.
    #[error("a migration of the benchmark failed: {0}")]
    Migration(String),
    /// The machine failed.
    #[error(transparent)]
    Machine(#[from] pageferry_machine::MachineError),
    /// The guest program cannot be planned so.
    #[error(transparent)]
    Guest(#[from] pageferry_guest::GuestError),
    /// A socket failed.
    #[error(transparent)]
    Channel(#[from] pageferry_migration::channel::ChannelError),
    /// The other process failed or said something else than expected.
    #[error("the benchmark's other process: {0}")]
    Peer(String),
    /// A system call was refused.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The hypervisor refused a call, or a guest did what its program does not.
    #[error("{0}")]
    Memslot(String),
    /// A guest's value is not where it should be: memory went to the wrong place.
    #[error("wrong memory: {0}")]
    WrongValue(String),
    /// This cannot be measured, here or anywhere: the setting must change.
    #[error("{0}")]
    Setting(String),
    /// A guest stopped before it had done its part.
    #[error("the guest stopped: {0}")]
    Stopped(String),
    /// Something did not happen in time, or too seldom for a figure, because other work has the
    /// cores.
    #[error("this host is too busy to measure: {0}; try again when it is idle")]
    Busy(String),
}
