//! The errors of machines.

use crate::{ArmOptions, Delivery, LayoutError};
use std::error::Error;
use std::io;
use std::time::Duration;

/// An error of an engine. Each message says what was wrong and names a remedy where there is one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// The sizes of the machine are out of range.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The host cannot run this engine. The text has the reason.
    #[error("{0}")]
    EngineUnavailable(String),
    /// The host lacks a feature of the vCPUs. The text has its leaf, register and bits.
    #[error("{0}")]
    Cpu(String),
    /// The kernel refused a system call.
    #[error("{what}: {source}")]
    Os {
        /// The attempt that failed.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// An error of the engine's own kind. See [`MachineError::engine`].
    #[error("{0}")]
    Engine(#[source] Box<dyn Error + Send + Sync>),
    /// Another VMM was to take the VM, and refuses it. See [`MachineError::refused`].
    #[error("{0}")]
    Refused(#[source] Box<dyn Error + Send + Sync>),
    /// Another VMM had the VM. It has ended, and the VM with it. The text has the reason.
    #[error("{0}")]
    Gone(String),
    /// The engine cannot run the guest any further.
    #[error("vCPU {vcpu} stopped: {why}")]
    Guest {
        /// The vCPU.
        vcpu: u32,
        /// The reason.
        why: String,
    },
    /// The bytes are no vCPU state.
    #[error("the vCPU state is not usable: {0}")]
    BadState(String),
    /// A device cannot stop, or the bytes are no state of it. The text has the reason.
    #[error("{0}")]
    Device(String),
    /// A fault delivery that this machine does not have.
    #[error("fault delivery '{0}' is not available on this machine")]
    NoDelivery(Delivery),
    /// No reader of fault events, or too many.
    #[error(
        "cannot read a userfaultfd's events with {0} readers: expected 1 to {most}",
        most = ArmOptions::MAX_READERS
    )]
    Readers(u32),
    /// No userfaultfd, or too many.
    #[error(
        "cannot serve this RAM by {wanted} userfaultfds: expected 1 to {most} (each serves whole \
         host pages, at least 2 MiB, and {limit} is the limit)",
        limit = ArmOptions::MAX_USERFAULTFDS
    )]
    Userfaultfds {
        /// The wanted number.
        wanted: u32,
        /// The most that this RAM allows.
        most: u32,
    },
    /// The host lacks a kind of memory. The text has the reason and the remedy.
    #[error("{0}")]
    NoBacking(String),
    /// Memory of the VMM that cannot be guest memory. The text has the region and the reason.
    #[error("guest memory cannot be adopted: {0}")]
    Adopt(String),
    /// A call that does not fit the machine's present state.
    #[error("{0}")]
    WrongState(&'static str),
    /// There is no memory for the bits of the machine's pages.
    #[error("no memory for the bits of the machine's pages: {0}")]
    OutOfMemory(#[from] pageferry_userfault::OutOfMemory),
    /// The VMM cannot access guest memory.
    #[error(transparent)]
    Access(#[from] crate::AccessError),
    /// A wait exceeded its limit.
    #[error("{what} took longer than {} ms", limit.as_millis())]
    Timeout {
        /// The action that took too long.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
}

impl MachineError {
    /// Wraps an error of the engine's own kind, for implementers of [`Machine`](crate::Machine) and
    /// [`Vcpu`](crate::Vcpu). Its text becomes the message. The error itself is the
    /// [source](Error::source), so a caller that knows its type gets it back.
    ///
    /// ```
    /// use pageferry_machine::MachineError;
    /// use std::error::Error;
    ///
    /// #[derive(Debug, PartialEq)]
    /// struct NoBankLeft(u8);
    ///
    /// impl Error for NoBankLeft {}
    ///
    /// impl std::fmt::Display for NoBankLeft {
    ///     fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
    ///         write!(f, "all {} memory banks are taken: remove one first", self.0)
    ///     }
    /// }
    ///
    /// let error = MachineError::engine(NoBankLeft(4));
    /// assert_eq!(error.to_string(), "all 4 memory banks are taken: remove one first");
    /// let source = error.source().and_then(|source| source.downcast_ref());
    /// assert_eq!(source, Some(&NoBankLeft(4)));
    /// ```
    pub fn engine(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Engine(source.into())
    }

    /// Wraps the reason why another VMM does not take the VM. The peer of a migration hears a
    /// refusal.
    pub fn refused(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Refused(source.into())
    }

    /// Wraps the kernel's answer to `what`.
    pub fn os(what: &'static str, source: impl Into<io::Error>) -> Self {
        Self::Os {
            what,
            source: source.into(),
        }
    }
}
