#![expect(unsafe_code, reason = "a signal handler restores the terminal")]
//! The terminal on standard input, while a guest has its keys.
//!
//! **Guarantee.** While a [`Terminal`] lives, each key arrives as a byte: Ctrl-C, Ctrl-Z, Ctrl-\
//! and Ctrl-S too. However the process ends or stops, the terminal then has its settings from
//! before. The exceptions are SIGKILL and SIGSTOP, which no process can catch. A process in the
//! background leaves the terminal alone, since it belongs to another one.
//!
//! **Mechanism.** Dropping the [`Terminal`] restores it, also when a panic unwinds. Each signal
//! that would end the process has a handler that restores the terminal first: SIGABRT is among
//! them, and with it `abort`. SIGTSTP restores it before the process stops. After SIGCONT,
//! [`refresh`] takes it again. Output processing stays on: each line of the command begins at the
//! left, also between lines of the guest.
//!
//! **Order.** A handler may run between any two steps of [`refresh`]. It clears `WANTED` or sets
//! `STOPPING` before it restores, and `refresh` looks at both after it has changed the settings.
//! All accesses are `SeqCst`, so at least one of the two restores last. [`refresh`] and the drop
//! exclude each other by a lock, which no handler takes.

use rustix::process::getpgrp;
use rustix::stdio::stdin;
use rustix::termios::{
    InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, isatty, tcgetattr,
    tcgetpgrp, tcsetattr,
};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::SeqCst};
use std::sync::{Mutex, Once, OnceLock, PoisonError};

/// Whether a [`Terminal`] lives.
static WANTED: AtomicBool = AtomicBool::new(false);
/// Whether the process is about to stop, or stands still.
static STOPPING: AtomicBool = AtomicBool::new(false);
/// Whether the terminal has our settings, and must be restored.
static TAKEN: AtomicBool = AtomicBool::new(false);
/// Whether somebody else may have changed the settings since.
static CHANGED: AtomicBool = AtomicBool::new(false);
/// The settings from before. They are never freed, since a handler may read them at any time.
static BEFORE: AtomicPtr<Termios> = AtomicPtr::new(null_mut());
/// Held while the settings change, except by handlers.
static CHANGING: Mutex<()> = Mutex::new(());

/// The terminal on standard input, which passes on each key.
#[derive(Debug)]
pub(crate) struct Terminal(());

impl Terminal {
    /// Takes the terminal, if standard input is one. In the background it is taken later, by
    /// [`refresh`].
    pub(crate) fn take() -> Option<Self> {
        static HANDLERS: Once = Once::new();
        if !isatty(stdin()) {
            return None;
        }
        HANDLERS.call_once(handle_signals);
        WANTED.store(true, SeqCst);
        refresh();
        Some(Self(()))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        WANTED.store(false, SeqCst);
        restore();
    }
}

/// Takes the terminal again after the process was stopped, or has come to the foreground. Does
/// nothing without a [`Terminal`].
pub(crate) fn refresh() {
    let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    let is_ours = TAKEN.load(SeqCst) && !CHANGED.load(SeqCst);
    if !WANTED.load(SeqCst) || is_ours || !in_foreground() {
        return;
    }
    CHANGED.store(false, SeqCst);
    let Ok(now) = tcgetattr(stdin()) else { return };
    if !passes_keys_on(&now) {
        BEFORE.store(Box::into_raw(Box::new(now.clone())), SeqCst);
    }
    TAKEN.store(true, SeqCst);
    let _ = tcsetattr(stdin(), OptionalActions::Now, &for_guest(now));
    if !WANTED.load(SeqCst) || STOPPING.load(SeqCst) {
        TAKEN.store(true, SeqCst);
        restore();
    }
}

/// Whether this process may use the terminal. One that is not its controlling terminal has no
/// foreground.
pub(crate) fn in_foreground() -> bool {
    tcgetpgrp(stdin()).map_or(true, |group| group == getpgrp())
}

fn passes_keys_on(settings: &Termios) -> bool {
    let lines = LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
    !settings.local_modes.intersects(lines)
}

/// The settings with which each key is a byte. Those of output stay.
fn for_guest(mut settings: Termios) -> Termios {
    settings.input_modes.remove(
        InputModes::BRKINT
            | InputModes::ICRNL
            | InputModes::INLCR
            | InputModes::IGNCR
            | InputModes::INPCK
            | InputModes::ISTRIP
            | InputModes::PARMRK
            | InputModes::IXON
            | InputModes::IXOFF,
    );
    settings.local_modes.remove(
        LocalModes::ECHO
            | LocalModes::ECHONL
            | LocalModes::ICANON
            | LocalModes::ISIG
            | LocalModes::IEXTEN,
    );
    settings.special_codes[SpecialCodeIndex::VMIN] = 1;
    settings.special_codes[SpecialCodeIndex::VTIME] = 0;
    settings
}

/// Gives the terminal its settings from before. Handlers call it: it makes system calls only.
fn restore() {
    if !TAKEN.swap(false, SeqCst) || !in_foreground() {
        return;
    }
    let before = BEFORE.load(SeqCst);
    // SAFETY: the pointer is null or comes from `Box::into_raw`, and is never freed.
    if let Some(before) = unsafe { before.as_ref() } {
        let _ = tcsetattr(stdin(), OptionalActions::Now, before);
    }
}

/// The handlers of SIGSEGV and SIGBUS from before: those of Rust, which explain a stack overflow.
static FAULTS: [OnceLock<libc::sigaction>; 2] = [OnceLock::new(), OnceLock::new()];

/// The place in [`FAULTS`] of the signals that have one.
const fn of_fault(signal: libc::c_int) -> Option<usize> {
    match signal {
        libc::SIGSEGV => Some(0),
        libc::SIGBUS => Some(1),
        _ => None,
    }
}

/// Handles each signal that has its default effect now, and faults.
fn handle_signals() {
    for signal in 1..=64 {
        let handler: extern "C" fn(_, _, _) = match signal {
            libc::SIGKILL | libc::SIGSTOP | libc::SIGTTIN | libc::SIGTTOU => continue,
            libc::SIGCHLD | libc::SIGURG | libc::SIGWINCH => continue,
            libc::SIGTSTP => on_stop,
            libc::SIGCONT => on_continue,
            _ => on_end,
        };
        let mut before = MaybeUninit::uninit();
        // SAFETY: a null action only asks for the present one, for which there is room.
        if unsafe { libc::sigaction(signal, null(), before.as_mut_ptr()) } != 0 {
            // The C library keeps two signals for itself.
            continue;
        }
        // SAFETY: the call has succeeded, so it has written the action.
        let before: libc::sigaction = unsafe { before.assume_init() };
        match of_fault(signal) {
            Some(at) => drop(FAULTS[at].set(before)),
            None if before.sa_sigaction == libc::SIG_DFL => {}
            None => continue,
        }
        // SAFETY: sigaction consists of integers and pointers, for which zero is a value.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        // SAFETY: the action is valid, and the handler makes only calls that are safe in a handler.
        let _ = unsafe { libc::sigaction(signal, &raw const action, null_mut()) };
    }
}

/// Restores the terminal, and lets the signal have the effect that it had before.
extern "C" fn on_end(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    WANTED.store(false, SeqCst);
    restore();
    // SAFETY: zero is a value of sigaction, and means the default effect.
    let default = unsafe { std::mem::zeroed() };
    let before = of_fault(signal).and_then(|at| FAULTS[at].get());
    // SAFETY: the action was in force before, or is the default. The call is safe in a handler.
    unsafe { libc::sigaction(signal, before.unwrap_or(&default), null_mut()) };
    // SAFETY: the kernel passes a valid pointer, since the handler has SA_SIGINFO.
    let code = unsafe { (*info).si_code };
    let faults = match signal {
        libc::SIGSEGV | libc::SIGILL | libc::SIGFPE => true,
        libc::SIGBUS => code != libc::BUS_MCEERR_AO,
        _ => false,
    };
    // The instruction that faulted is about to fault again. Any other signal must be sent again: it
    // is delivered when this handler returns.
    if code <= 0 || !faults {
        // SAFETY: the call is safe in a handler.
        unsafe { libc::raise(signal) };
    }
}

/// Restores the terminal, and stops.
extern "C" fn on_stop(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    STOPPING.store(true, SeqCst);
    restore();
    // SAFETY: the call is safe in a handler. It stops this thread before it returns.
    unsafe { libc::raise(libc::SIGSTOP) };
    STOPPING.store(false, SeqCst);
}

extern "C" fn on_continue(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // The shell had the terminal meanwhile.
    CHANGED.store(true, SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use std::hint::black_box;
    use std::os::fd::OwnedFd;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    /// The variable that tells a child of the test how to end.
    const END: &str = "PAGEFERRY_TEST_END";

    /// A terminal: the user's side, and the line.
    fn terminal() -> (OwnedFd, OwnedFd) {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let user = openpt(flags).unwrap();
        grantpt(&user).unwrap();
        unlockpt(&user).unwrap();
        let path = ptsname(&user, Vec::new()).unwrap();
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
        let flags = flags | rustix::fs::OFlags::CLOEXEC;
        let line = rustix::fs::open(&*path, flags, rustix::fs::Mode::empty()).unwrap();
        (user, line)
    }

    fn deeper(level: u64) -> u64 {
        let room = black_box([level; 512]);
        match level {
            u64::MAX => 0,
            _ => black_box(deeper(level + 1)) + room[0],
        }
    }

    /// Ends this process while it has the terminal.
    fn end(how: &str) {
        let _terminal = Terminal::take().unwrap();
        assert!(passes_keys_on(&tcgetattr(stdin()).unwrap()));
        let private = MapFlags::PRIVATE;
        match how {
            "panic" => panic!("as the test wants"),
            "abort" => std::process::abort(),
            "overflow" => drop(deeper(0)),
            "fault" => {
                // SAFETY: a new mapping. The access to it faults, which is the purpose.
                unsafe {
                    let page = mmap_anonymous(null_mut(), 4096, ProtFlags::empty(), private);
                    page.unwrap().cast::<u8>().read_volatile();
                }
            }
            "bus" => {
                let empty = rustix::fs::memfd_create("empty", rustix::fs::MemfdFlags::CLOEXEC);
                // SAFETY: a new mapping. The access behind the file's end is the purpose.
                unsafe {
                    let page = mmap(
                        null_mut(),
                        4096,
                        ProtFlags::READ,
                        private,
                        empty.unwrap(),
                        0,
                    );
                    page.unwrap().cast::<u8>().read_volatile();
                }
            }
            _ => {}
        }
    }

    #[test]
    fn the_terminal_is_restored_when_the_process_dies() {
        if let Ok(how) = std::env::var(END) {
            return end(&how);
        }
        let ends = [
            ("return", None),
            ("panic", None),
            ("abort", Some(libc::SIGABRT)),
            ("overflow", Some(libc::SIGABRT)),
            ("fault", Some(libc::SIGSEGV)),
            ("bus", Some(libc::SIGBUS)),
        ];
        for (how, signal) in ends {
            let (user, line) = terminal();
            let before = tcgetattr(&user).unwrap();
            let name = "terminal::tests::the_terminal_is_restored_when_the_process_dies";
            let ended = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name, "--nocapture"])
                .env(END, how)
                .stdin(Stdio::from(line.try_clone().unwrap()))
                .output()
                .unwrap();
            assert_eq!(ended.status.signal(), signal, "{how}: {ended:?}");
            assert_eq!(ended.status.success(), how == "return", "{how}: {ended:?}");
            let after = tcgetattr(&user).unwrap();
            assert_eq!(format!("{after:?}"), format!("{before:?}"), "{how}");
            let stderr = String::from_utf8_lossy(&ended.stderr);
            assert_eq!(
                stderr.contains("overflowed its stack"),
                how == "overflow",
                "{stderr}"
            );
        }
    }
}
