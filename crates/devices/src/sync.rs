//! The only source of locks, threads and bells: those of the system, or shuttle's in the model of a
//! device's worker (`tests/shuttle`).

#[cfg(shuttle)]
pub(crate) use self::model::Bell;
#[cfg(not(shuttle))]
pub(crate) use self::system::Bell;
#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::{Condvar, Mutex, MutexGuard, atomic::AtomicBool},
    thread,
};
#[cfg(not(shuttle))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard, atomic::AtomicBool},
    thread,
};

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// An eventfd that wakes nobody yet.
fn silent() -> io::Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Ok(eventfd(0, flags)?)
}

#[cfg(not(shuttle))]
mod system {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    /// Wakes one thread. A ring before the wait counts.
    pub(crate) struct Bell(OwnedFd);

    impl Bell {
        pub(crate) fn new() -> io::Result<Self> {
            silent().map(Self)
        }

        pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }

        pub(crate) fn ring(&self) {
            // It fails only when the counter is full, and then the thread is awake.
            let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
        }

        /// Waits for a ring, for `input`, or for `limit`. It may return early. Returns whether
        /// `input` has failed.
        pub(crate) fn wait(&self, input: Option<&OwnedFd>, limit: Option<Duration>) -> bool {
            let mut polled = vec![PollFd::new(&self.0, PollFlags::IN)];
            polled.extend(input.map(|input| PollFd::new(input, PollFlags::IN)));
            let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
            let _ = poll(&mut polled, limit.as_ref()); // EINTR: the caller looks once more.
            let _ = rustix::io::read(&self.0, &mut [0; 8]);
            let failed = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
            let input = polled.get(1);
            input.is_some_and(|input| input.revents().intersects(failed))
        }
    }
}

#[cfg(shuttle)]
mod model {
    use super::*;

    /// A bell as in `system`. An input brings nothing, and a limit may pass at any time.
    pub(crate) struct Bell {
        rung: Mutex<bool>,
        changed: Condvar,
        /// Nobody waits for it: no engine is in the model.
        fd: OwnedFd,
    }

    impl Bell {
        pub(crate) fn new() -> io::Result<Self> {
            Ok(Self {
                rung: Mutex::new(false),
                changed: Condvar::new(),
                fd: silent()?,
            })
        }

        pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
            self.fd.as_fd()
        }

        pub(crate) fn ring(&self) {
            *self.rung.lock().unwrap() = true;
            self.changed.notify_one();
        }

        pub(crate) fn wait(&self, _: Option<&OwnedFd>, limit: Option<Duration>) -> bool {
            thread::yield_now();
            let mut rung = self.rung.lock().unwrap();
            while !*rung && limit.is_none() {
                rung = self.changed.wait(rung).unwrap();
            }
            *rung = false;
            false
        }
    }
}
