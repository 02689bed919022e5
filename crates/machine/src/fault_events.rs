//! Faults that arrive on a file descriptor.

use crate::MachineError;
use pageferry_addr::RamPage;
use std::os::fd::BorrowedFd;

/// A fault that userfaultfd reported. A thread sleeps in the kernel until the page is installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultEvent {
    /// The page.
    pub page: RamPage,
    /// Whether the access was a write.
    pub write: bool,
}

/// A stream of faults that arrive on a file descriptor rather than as exits, for one thread.
///
/// Streams may share the descriptor: an event makes it readable for all, and one takes it.
pub trait FaultEvents: Send {
    /// Readable when an event waits. Events that were read but not yet taken do not make it
    /// readable, so a caller takes all events before it sleeps.
    fn fd(&self) -> BorrowedFd<'_>;

    /// Takes the next event, or `None` when there is none now. Never blocks.
    ///
    /// # Errors
    /// When the kernel refuses the read, or sends an event that was not requested.
    fn next(&mut self) -> Result<Option<FaultEvent>, MachineError>;
}
