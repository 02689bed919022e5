//! A bell wakes a thread that sleeps in poll(2), and the sleep itself.

use crate::error::MigrationError;
use rustix::event::{EventfdFlags, PollFd, Timespec, eventfd, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// The longest sleep after a poll(2) that failed: nothing ends it earlier.
const BLIND: Duration = Duration::from_millis(20);

/// Sleeps until a descriptor is ready, a signal comes, or `nap` is over. The caller looks at all it
/// waits for, whatever ended the sleep.
///
/// poll(2) fails where the kernel lacks memory, and where the limit of descriptors is below their
/// number. Then this sleeps all the same: its caller must not spin.
pub(crate) fn sleep_on(fds: &mut [PollFd<'_>], nap: Duration) {
    // A nap that is too long for the kernel's clock has no end.
    let limit = Timespec::try_from(nap).ok();
    match poll(fds, limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(_) => std::thread::sleep(nap.min(BLIND)),
    }
}

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
