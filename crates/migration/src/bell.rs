//! A bell wakes a thread that sleeps in poll(2).

use crate::error::MigrationError;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// An eventfd. One thread waits for it, any thread rings it.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl Bell {
    pub(crate) fn new() -> Result<Self, MigrationError> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .map_err(|e| MigrationError::os("cannot create an eventfd", e))
    }

    /// Makes the descriptor readable.
    pub(crate) fn ring(&self) {
        // A full eventfd is readable too.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable until the next ring. Call this before looking for the reason to ring.
    pub(crate) fn hush(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
