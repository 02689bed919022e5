#![expect(unsafe_code, reason = "rustix has no locks of open files")]
//! Locks of whole files that belong to the open file (`F_OFD_SETLK` of `fcntl(2)`).
//!
//! Network file systems pass them on to their server, and QEMU takes the same kind.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// A kind of lock.
#[derive(Clone, Copy)]
pub(super) enum Lock {
    /// Other readers may have it too.
    Shared = libc::F_RDLCK as isize,
    /// Nobody else has any.
    Exclusive = libc::F_WRLCK as isize,
    /// None.
    Free = libc::F_UNLCK as isize,
}

/// Changes the lock of `file`. Returns whether no other open file was in the way.
///
/// # Errors
/// When the file system has no locks.
pub(super) fn lock(file: &File, lock: Lock) -> io::Result<bool> {
    let request = libc::flock {
        l_type: lock as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the request lives across the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) } {
        0 => Ok(true),
        _ => match io::Error::last_os_error() {
            e if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
            e => Err(e),
        },
    }
}
