#![expect(unsafe_code, reason = "signal handlers")]
//! The two signals of this engine.
//!
//! **The kick.** A real-time signal whose handler does nothing. It is installed without
//! `SA_RESTART`, so it makes `KVM_RUN` return `EINTR`.
//!
//! **SIGBUS.** A vCPU touches a page with a poison marker:
//!
//! 1. KVM's look-up answers `-EHWPOISON`. KVM sends SIGBUS (`BUS_MCEERR_AR`, `si_addr` the host
//!    address) to the thread inside `KVM_RUN` (`kvm_send_hwpoison_signal` in
//!    `arch/x86/kvm/mmu/mmu.c`).
//! 2. `KVM_RUN` returns `EINTR`. The signal is delivered at that return, so before the next
//!    instruction of this thread.
//! 3. The handler stores the address in the cell that the thread has set for the length of its
//!    `KVM_RUN` ([`collect_sigbus`]). That is cheaper than `sigtimedwait`, which takes the
//!    process's signal lock twice.
//! 4. The handler passes a SIGBUS of any other thread or address to the earlier handler, which by
//!    default ends the process.

use super::sync::{AtomicU64, Ordering};
use crate::MachineError;
use libc::{c_int, c_void, siginfo_t};
use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::ptr::null_mut;
use std::sync::OnceLock;

/// The offset of the kick above `SIGRTMIN`. The first few are popular with libraries.
const KICK_OFFSET: c_int = 7;

/// The signal of a kick.
pub(super) fn kick_signal() -> c_int {
    libc::SIGRTMIN() + KICK_OFFSET
}

/// The cell in which the SIGBUS handler leaves the address of a touched poison marker for a thread
/// inside `KVM_RUN`.
#[derive(Debug)]
pub(super) struct PoisonCell {
    start: u64,
    end: u64,
    /// The address, or 0.
    hit: AtomicU64,
}

impl PoisonCell {
    /// A cell for addresses in `range`.
    pub(super) fn new(range: Range<u64>) -> Self {
        Self {
            start: range.start,
            end: range.end,
            hit: AtomicU64::new(0),
        }
    }

    /// Takes the address, if there is one.
    pub(super) fn take(&self) -> Option<u64> {
        // The handler ran on this thread. The plain load keeps the common case free of a locked
        // instruction.
        if self.hit.load(Ordering::Relaxed) == 0 {
            return None;
        }
        Some(self.hit.swap(0, Ordering::Relaxed))
    }
}

thread_local! {
    /// The cell of the `KVM_RUN` that this thread is in; null outside.
    static CURRENT: Cell<*const PoisonCell> = const { Cell::new(std::ptr::null()) };
}

/// Calls `f`. Meanwhile the handler stores the address of this thread's SIGBUS in `cell`, if that
/// covers the address.
pub(super) fn collect_sigbus<T>(cell: &PoisonCell, f: impl FnOnce() -> T) -> T {
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            CURRENT.set(std::ptr::null());
        }
    }
    CURRENT.set(cell);
    let _reset = Reset;
    f()
}

/// The SIGBUS handler before this one.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

extern "C" fn on_kick(_: c_int) {}

/// Safe in a signal handler: it uses only thread-local and atomic accesses. `CURRENT` needs neither
/// lazy initialization nor a destructor.
extern "C" fn on_sigbus(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let cell = CURRENT.try_with(Cell::get).unwrap_or(std::ptr::null());
    if !cell.is_null() {
        // SAFETY: the kernel passes a valid siginfo, and SIGBUS has an address.
        let address = unsafe { (*info).si_addr() } as u64;
        // SAFETY: the cell is this thread's, alive until `collect_sigbus` has reset the pointer.
        let cell = unsafe { &*cell };
        if (cell.start..cell.end).contains(&address) {
            cell.hit.store(address, Ordering::Relaxed);
            return;
        }
    }
    chain(signal, info, context);
}

/// Passes a foreign SIGBUS to the earlier handler.
fn chain(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.get();
    match previous.map_or(libc::SIG_DFL, |p| p.sa_sigaction) {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: plain system calls, both async-signal-safe. The signal is blocked while this
            // handler runs, so the default effect takes place when it returns. A SIGBUS of the CPU
            // must not be ignored: the instruction would repeat it for ever.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                libc::raise(signal);
            }
        }
        handler if previous.is_some_and(|p| p.sa_flags & libc::SA_SIGINFO != 0) => {
            // SAFETY: SA_SIGINFO says that the address is a handler of this type.
            let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: without SA_SIGINFO the address is a handler of this type.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

fn install(signal: c_int, handler: usize, flags: c_int) -> io::Result<()> {
    // SAFETY: sigaction consists of integers and pointers, for which zero is a value.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = flags | libc::SA_ONSTACK;
    // SAFETY: `action` is valid; the handlers installed here are async-signal-safe.
    let result = unsafe {
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(signal, &raw const action, null_mut())
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Installs both handlers, once per process.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn install_handlers() -> Result<(), MachineError> {
    static DONE: OnceLock<Result<(), i32>> = OnceLock::new();
    let attempt = || -> io::Result<()> {
        install(kick_signal(), on_kick as *const () as usize, 0)?;
        // SAFETY: as in `install`; a null action only queries.
        let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: `previous` is valid for writing.
        if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut previous) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // Set before our handler can run.
        let _ = PREVIOUS.set(previous);
        install(
            libc::SIGBUS,
            on_sigbus as *const () as usize,
            libc::SA_SIGINFO,
        )
    };
    DONE.get_or_init(|| attempt().map_err(|e| e.raw_os_error().unwrap_or(libc::EINVAL)))
        .map_err(|raw| {
            MachineError::os(
                "cannot install the signal handlers of the KVM engine",
                io::Error::from_raw_os_error(raw),
            )
        })
}

/// Unblocks both signals on this thread. A thread that blocked them would spin in `KVM_RUN`: a
/// pending signal keeps the guest from being entered, and only its delivery removes it.
pub(super) fn unblock() {
    // SAFETY: sigset_t is an array of integers; the calls get valid pointers.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, kick_signal());
        libc::sigaddset(&raw mut set, libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, null_mut());
    }
}

/// Sends the kick's signal to a thread of this process.
pub(super) fn send_kick(thread: c_int) {
    // SAFETY: a plain system call. A thread that has ended gives ESRCH. The caller makes sure that
    // no other thread has the id by then.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, kick_signal()) };
}
