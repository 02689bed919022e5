#![expect(unsafe_code, reason = "a signal and its handler")]
//! The signal of a kick: a real-time signal whose handler does nothing.
//!
//! The handler is installed without `SA_RESTART`, so the signal makes `KVM_RUN` return `EINTR`.

use crate::MachineError;
use libc::c_int;
use std::io;
use std::ptr::null_mut;
use std::sync::OnceLock;

/// The offset of the kick above `SIGRTMIN`. The first few are popular with libraries.
const KICK_OFFSET: c_int = 7;

/// The signal of a kick.
pub(super) fn kick_signal() -> c_int {
    libc::SIGRTMIN() + KICK_OFFSET
}

extern "C" fn on_kick(_: c_int) {}

/// Installs the handler, once per process.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn install_handler() -> Result<(), MachineError> {
    static DONE: OnceLock<Result<(), i32>> = OnceLock::new();
    let attempt = || -> io::Result<()> {
        // SAFETY: sigaction consists of integers and pointers, for which zero is a value.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_kick as *const () as usize;
        action.sa_flags = libc::SA_ONSTACK;
        // SAFETY: `action` is valid; a handler that does nothing is async-signal-safe.
        let result = unsafe {
            libc::sigemptyset(&raw mut action.sa_mask);
            libc::sigaction(kick_signal(), &raw const action, null_mut())
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    DONE.get_or_init(|| attempt().map_err(|e| e.raw_os_error().unwrap_or(libc::EINVAL)))
        .map_err(|raw| {
            MachineError::os(
                "cannot install the signal handler of the KVM engine",
                io::Error::from_raw_os_error(raw),
            )
        })
}

/// Unblocks the signal on this thread. A thread that blocked it would spin in `KVM_RUN`: a pending
/// signal keeps the guest from being entered, and only its delivery removes it.
pub(super) fn unblock() {
    // SAFETY: sigset_t is an array of integers; the calls get valid pointers.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, kick_signal());
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, null_mut());
    }
}

/// Sends the kick's signal to a thread of this process.
pub(super) fn send_kick(thread: c_int) {
    // SAFETY: a plain system call. A thread that has ended gives ESRCH. The caller makes sure that
    // no other thread has the id by then.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, kick_signal()) };
}
