//! The sleep of a thread that waits for descriptors.

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;
use std::time::Duration;

/// The longest sleep after a poll(2) that failed: nothing ends it earlier.
const BLIND: Duration = Duration::from_millis(20);

/// Sleeps until a descriptor is ready, a signal comes, or `nap` is over. The caller looks at all it
/// waits for, whatever ended the sleep.
///
/// poll(2) fails where the kernel lacks memory, and where the limit of descriptors is below their
/// number. Then this sleeps all the same: its caller must not spin.
pub fn sleep_on(fds: &mut [PollFd<'_>], nap: Duration) {
    // A nap that is too long for the kernel's clock has no end.
    let limit = Timespec::try_from(nap).ok();
    match poll(fds, limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(_) => std::thread::sleep(nap.min(BLIND)),
    }
}
