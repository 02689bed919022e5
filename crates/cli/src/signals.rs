#![expect(unsafe_code, reason = "installs signal handlers")]
//! Counters of SIGINT, SIGTERM and SIGHUP.
//!
//! SIGINT and SIGTERM ask a command to stop. So does SIGHUP, unless it was ignored when the command
//! started. The handlers count the signals themselves: two that come before any thread runs are
//! two. Every wait polls the count.
//!
//! A process that owns a VM takes SIGHUP as a *hang-up* if it was started on a terminal, and
//! otherwise it has no effect. A hang-up may come several times, by the kernel, a shell and the
//! terminal itself. So it is not counted, and is never the second request that gives a VM up.
//! SIGPIPE stays ignored, as the Rust runtime sets it: a vanished reader is an error of a write.

use crate::exit::{Exit, Failure};
use crate::procfs;
use pageferry_transport::sleep_on;
use rustix::event::{PollFd, PollFlags};
use rustix::process::getsid;
use rustix::stdio::stdin;
use rustix::termios::{isatty, tcgetsid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::low_level::register;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Lets a write beyond the limit of a file's size (`ulimit -f`) fail, with EFBIG. By default it
/// ends the process, and a VM with it.
///
/// # Errors
/// When the host refuses the handler.
pub(crate) fn outlive_large_files() -> Result<(), Failure> {
    // SAFETY: the handler does nothing, so it is async-signal-safe.
    unsafe { register(SIGXFSZ, || {}) }
        .map(drop)
        .map_err(|e| Failure::os("cannot handle signals", e))
}

/// The number of times that the user asked to stop.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupts {
    count: Arc<AtomicU32>,
    hung_up: Arc<AtomicBool>,
}

impl Interrupts {
    /// The interval at which a wait polls for interrupts.
    pub(crate) const POLL: Duration = Duration::from_millis(20);

    /// Handles the signals of this process, which may own a VM.
    ///
    /// # Errors
    /// When the host refuses the handlers or a thread.
    pub(crate) fn install(owns_vm: bool) -> Result<Self, Failure> {
        let cannot = |e| Failure::os("cannot handle signals", e);
        let interrupts = Self::default();
        let on_terminal = is_on_terminal();
        let hears_hangups = !is_ignored(SIGHUP);
        let heard = if hears_hangups {
            &[SIGINT, SIGTERM, SIGHUP][..]
        } else {
            &[SIGINT, SIGTERM]
        };
        for &signal in heard {
            let told = interrupts.clone();
            let tell = move || {
                if signal != SIGHUP || !owns_vm {
                    told.add();
                } else if on_terminal {
                    told.hang_up();
                }
            };
            // SAFETY: the handler is async-signal-safe (signal-safety(7)): it only changes an
            // atomic that it owns. It neither allocates nor locks, and cannot panic.
            unsafe { register(signal, tell) }.map_err(cannot)?;
        }
        if owns_vm && on_terminal && hears_hangups {
            let told = interrupts.clone();
            // The kernel sends SIGHUP to the foreground only.
            std::thread::Builder::new()
                .name("hang-up".into())
                .spawn(move || {
                    wait_for_hangup();
                    told.hang_up();
                })
                .map_err(cannot)?;
        }
        Ok(interrupts)
    }

    /// Counts another interrupt.
    pub(crate) fn add(&self) {
        self.count.fetch_add(1, Ordering::Release);
    }

    /// The number of interrupts so far.
    pub(crate) fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// Whether there was an interrupt.
    pub(crate) fn any(&self) -> bool {
        self.count() > 0
    }

    /// The terminal has closed.
    pub(crate) fn hang_up(&self) {
        self.hung_up.store(true, Ordering::Release);
    }

    /// Whether the terminal has closed, and that asks for the end.
    pub(crate) fn hung_up(&self) -> bool {
        self.hung_up.load(Ordering::Acquire)
    }

    /// Lets the process live on without its terminal.
    pub(crate) fn forget_hangup(&self) {
        self.hung_up.store(false, Ordering::Release);
    }

    /// # Errors
    /// [`Exit::Cancelled`] if there was an interrupt.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.any() {
            return Err(Failure::new(Exit::Cancelled, "cancelled"));
        }
        Ok(())
    }

    /// Polls `ready` until it returns a value. Returns `None` when `limit` has passed.
    ///
    /// # Errors
    /// An interrupt, or the error of `ready`.
    pub(crate) fn wait_for<T>(
        &self,
        limit: Duration,
        mut ready: impl FnMut() -> Result<Option<T>, Failure>,
    ) -> Result<Option<T>, Failure> {
        let deadline = Instant::now() + limit;
        loop {
            self.check()?;
            if let Some(value) = ready()? {
                return Ok(Some(value));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(Self::POLL);
        }
    }
}

/// Whether the process that started this one made it ignore `signal`, as `nohup` does.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    procfs::mask(&status, "SigIgn:").is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Whether standard input is the terminal of this session.
fn is_on_terminal() -> bool {
    isatty(stdin()) && tcgetsid(stdin()).is_ok_and(|session| getsid(None) == Ok(session))
}

/// Waits until the terminal on standard input has closed.
fn wait_for_hangup() {
    // Not every kind of terminal wakes a wait for this.
    let limit = Duration::from_secs(1);
    let closed = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
    loop {
        let input = stdin();
        let mut terminal = [PollFd::new(&input, PollFlags::empty())];
        sleep_on(&mut terminal, limit);
        if terminal[0].revents().intersects(closed) {
            return;
        }
    }
}
