#![expect(unsafe_code, reason = "a signal and its handler")]
//! Kicks that make a thread leave `KVM_RUN`: a signal whose handler does nothing.
//!
//! A kick just before the system call is lost. So a thread kicks a vCPU until it is out.

use std::sync::OnceLock;

/// The offset of the signal above `SIGRTMIN`. Libraries often use the first few.
const OFFSET: i32 = 9;

extern "C" fn nothing(_: libc::c_int) {}

/// Installs the handler once in the life of the process.
pub(crate) fn install() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        // SAFETY: sigaction consists of integers and pointers, for which zero is a value.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = nothing as *const () as usize;
        // SAFETY: `action` is valid; a handler that does nothing is async-signal-safe.
        let result = unsafe {
            libc::sigaction(
                libc::SIGRTMIN() + OFFSET,
                &raw const action,
                std::ptr::null_mut(),
            )
        };
        assert_eq!(result, 0, "the kick's signal");
    });
}

/// The kernel's id of this thread.
pub(crate) fn own_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

/// Sends the signal to a thread of this process. A thread that has ended is no error.
pub(crate) fn kick(thread: i32) {
    // SAFETY: a plain system call.
    unsafe {
        libc::syscall(
            libc::SYS_tgkill,
            libc::getpid(),
            thread,
            libc::SIGRTMIN() + OFFSET,
        );
    }
}
