//! The reasons why there are no figures, with their exit codes.

use pageferry_hypervisor::VmError;
use pageferry_machine::MachineError;
use pageferry_testkit::qemu;
use std::io;
use tempfile::TempDir;

/// The reasons why there are no figures.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    /// The migration in it failed.
    #[error("a migration of the benchmark failed: {0}")]
    Migration(String),
    /// The machine failed.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The guest program does not fit this VM.
    #[error(transparent)]
    Guest(#[from] pageferry_guest::GuestError),
    /// A socket failed.
    #[error(transparent)]
    Channel(#[from] pageferry_transport::channel::ChannelError),
    /// The other process failed, or sent an unexpected line.
    #[error("the benchmark's other process: {0}")]
    Peer(String),
    /// QEMU failed.
    #[error(transparent)]
    Qemu(#[from] qemu::Error),
    /// A system call was refused.
    #[error("{what}: {source}")]
    Os {
        /// The operation that failed.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The hypervisor refused a call, or a guest did something that its program never does.
    #[error("{0}")]
    Hypervisor(String),
    /// A value is not where it should be: memory went to the wrong place, or a look-up did.
    #[error("wrong value: {0}")]
    WrongValue(String),
    /// These settings cannot be measured on any host, or a file cannot be read or written.
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

impl BenchError {
    /// The other process, or a part of this one that stands for it, failed.
    pub(crate) fn peer(why: impl std::fmt::Display) -> Self {
        Self::Peer(why.to_string())
    }

    /// A vCPU left its guest by an exit that the guest's program never causes.
    pub(crate) fn unexpected_exit(exit: &impl std::fmt::Debug) -> Self {
        Self::Hypervisor(format!("unexpected exit of the guest: {exit:?}"))
    }

    /// The exit code. The codes have the same meaning as those of `pageferry`.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::WrongValue(_) => 1,
            Self::Setting(_)
            | Self::Machine(MachineError::Layout(_) | MachineError::Readers(_)) => 2,
            Self::Machine(MachineError::EngineUnavailable(_)) => 3,
            Self::Machine(MachineError::NoDelivery(_) | MachineError::NoBacking(_)) => 4,
            Self::Cancelled => 9,
            Self::Stopped(_) | Self::Machine(MachineError::Guest { .. }) => 14,
            Self::Busy(_) => 15,
            _ => 12,
        }
    }
}

/// Says what the kernel refused.
pub(crate) fn os<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> BenchError + Copy {
    move |source| BenchError::Os {
        what,
        source: source.into(),
    }
}

/// A folder for files and sockets. Dropping it removes it.
pub(crate) fn scratch() -> Result<TempDir, BenchError> {
    tempfile::tempdir().map_err(os("cannot make a folder for files"))
}

impl From<pageferry_machine::AccessError> for BenchError {
    fn from(error: pageferry_machine::AccessError) -> Self {
        Self::Machine(error.into())
    }
}

impl From<VmError> for BenchError {
    fn from(error: VmError) -> Self {
        Self::Hypervisor(format!("the hypervisor refused a call: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_says_whose_fault_it_was() {
        let text = || "why".to_owned();
        for (error, code) in [
            (BenchError::WrongValue(text()), 1),
            (BenchError::Setting(text()), 2),
            (BenchError::Cancelled, 9),
            (BenchError::Peer(text()), 12),
            (BenchError::Stopped(text()), 14),
            (BenchError::Busy(text()), 15),
        ] {
            assert_eq!(error.exit_code(), code, "{error}");
        }
    }
}
