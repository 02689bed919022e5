//! The reasons why a benchmark has no figures.

use pageferry_hypervisor::VmError;

/// The reasons why a benchmark has no figures.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The migration in it failed.
    #[error("a migration of the benchmark failed: {0}")]
    Migration(String),
    /// The machine failed.
    #[error(transparent)]
    Machine(#[from] pageferry_machine::MachineError),
    /// The guest program does not fit this VM.
    #[error(transparent)]
    Guest(#[from] pageferry_guest::GuestError),
    /// A socket failed.
    #[error(transparent)]
    Channel(#[from] pageferry_migration::channel::ChannelError),
    /// The other process failed, or sent an unexpected line.
    #[error("the benchmark's other process: {0}")]
    Peer(String),
    /// A system call was refused.
    #[error("{what}: {source}")]
    Os {
        /// The operation that failed.
        what: &'static str,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The hypervisor refused a call, or a guest did something that its program never does.
    #[error("{0}")]
    Hypervisor(String),
    /// A guest's value is not where it should be: memory went to the wrong place.
    #[error("wrong memory: {0}")]
    WrongValue(String),
    /// These settings cannot be measured on any host.
    #[error("{0}")]
    Setting(String),
    /// A guest stopped before the end of its program.
    #[error("the guest stopped: {0}")]
    Stopped(String),
    /// The machine cannot have two hosts, or one of their tools failed.
    #[error("two hosts on this machine: {0}")]
    Hosts(#[from] pageferry_hosts::Error),
    /// The user asked to stop.
    #[error("cancelled")]
    Cancelled,
    /// Other work has the cores: something happened too late, or too seldom for a figure.
    #[error("this host is too busy to measure: {0}; try again when it is idle")]
    Busy(String),
}

impl From<pageferry_machine::AccessError> for BenchError {
    fn from(error: pageferry_machine::AccessError) -> Self {
        Self::Machine(error.into())
    }
}

impl BenchError {
    /// A vCPU left its guest by an exit that the guest's program never causes.
    pub(crate) fn unexpected_exit(exit: &impl std::fmt::Debug) -> Self {
        Self::Hypervisor(format!("unexpected exit of the guest: {exit:?}"))
    }
}

impl From<VmError> for BenchError {
    fn from(error: VmError) -> Self {
        Self::Hypervisor(format!("the hypervisor refused a call: {error}"))
    }
}
