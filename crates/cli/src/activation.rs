#![expect(
    unsafe_code,
    reason = "a descriptor that a process inherits is known by its number alone"
)]

//! The listening socket that a service manager hands over: systemd's socket activation.
//!
//! **Guarantee.** The socket belongs to this process by name (`LISTEN_PID`), and there is exactly
//! one (`LISTEN_FDS`). Everything else is a usage error in one sentence.
//!
//! **Mechanism.** The descriptor has the number 3 (sd_listen_fds(3)). It is duplicated, and itself
//! stays open until the process ends.

use crate::exit::{Exit, Failure};
use pageferry_migration::Listener;
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::getpid;
use std::os::fd::BorrowedFd;

/// The number of the first descriptor that a service manager hands over.
const FIRST: i32 = 3;

/// Takes the listening socket that the service manager handed over.
///
/// # Errors
/// When there is none, or it is not a listening stream socket.
pub(crate) fn listener() -> Result<Listener, Failure> {
    let variable = |name| std::env::var(name).ok();
    let own = getpid().as_raw_nonzero().to_string();
    check(variable("LISTEN_PID"), variable("LISTEN_FDS"), &own)?;
    let cannot = |e: Errno| Failure::os("cannot take the activated socket", e);
    // SAFETY: nobody closes this descriptor while it is duplicated: the service manager handed it
    // over, and nothing in this process owns it. If there is none of this number, the call fails.
    // If it is another file of this process, that stays open, and is refused below as no listener.
    let inherited = unsafe { BorrowedFd::borrow_raw(FIRST) };
    let socket = fcntl_dupfd_cloexec(inherited, FIRST).map_err(cannot)?;
    Listener::adopt_fd(socket)
        .map_err(|e| Failure::new(Exit::Usage, format!("the activated socket: {e}")))
}

/// Checks that one socket was handed over, to this process.
fn check(pid: Option<String>, fds: Option<String>, own: &str) -> Result<(), Failure> {
    let refuse = |why: String| Err(Failure::new(Exit::Usage, why));
    match (pid, fds) {
        (Some(pid), Some(fds)) if pid == own && fds == "1" => Ok(()),
        (Some(pid), Some(_)) if pid != own => refuse(format!(
            "LISTEN_PID is '{pid}': the activated socket is for another process than {own}"
        )),
        (Some(_), Some(fds)) => refuse(format!(
            "LISTEN_FDS is '{fds}': --activated expects exactly one socket"
        )),
        _ => refuse(
            "no service manager handed a socket over: --activated expects LISTEN_FDS and \
             LISTEN_PID"
                .to_owned(),
        ),
    }
}
