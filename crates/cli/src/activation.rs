//! The listening socket that a service manager hands over: systemd's socket activation.
//!
//! **Guarantee.** The socket belongs to this process by name (`LISTEN_PID`), and there is exactly
//! one (`LISTEN_FDS`). Everything else is a usage error in one sentence.
//!
//! **Mechanism.** The descriptor has the number 3 (sd_listen_fds(3)). pidfd_getfd(2) duplicates it
//! without unsafe code. The first descriptor stays open until the process ends.

use crate::exit::{Exit, Failure};
use pageferry_migration::Listener;
use rustix::io::Errno;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};

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
    let this = pidfd_open(getpid(), PidfdFlags::empty()).map_err(cannot)?;
    let socket = pidfd_getfd(&this, FIRST, PidfdGetfdFlags::empty()).map_err(cannot)?;
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
