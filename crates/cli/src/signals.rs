#![expect(unsafe_code, reason = "installs signal handlers")]
//! Counters of SIGINT, SIGTERM and SIGHUP.
//!
//! SIGINT and SIGTERM ask a command to stop. So does SIGHUP, except for a process that owns a VM: a
//! terminal that closes must not end a VM. The handlers count the signals themselves: two that come
//! before any thread runs are two. Every wait polls the count.
//! SIGPIPE stays ignored, as the Rust runtime sets it: a vanished reader is an error of a write.

use crate::exit::{Exit, Failure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::register;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The number of times that the user asked to stop.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupts {
    count: Arc<AtomicU32>,
}

impl Interrupts {
    /// The interval at which a wait polls for interrupts.
    pub(crate) const POLL: Duration = Duration::from_millis(20);

    /// Handles the signals of this process. With `owns_vm`, SIGHUP has no effect.
    ///
    /// # Errors
    /// When the host refuses the handlers.
    pub(crate) fn install(owns_vm: bool) -> Result<Self, Failure> {
        let cannot = |e| Failure::os("cannot handle signals", e);
        let interrupts = Self::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            let counted = interrupts.clone();
            let counts = signal != SIGHUP || !owns_vm;
            let count = move || {
                if counts {
                    counted.add();
                }
            };
            // SAFETY: the handler is async-signal-safe (signal-safety(7)): it only adds to an
            // atomic that it owns. It neither allocates nor locks, and cannot panic.
            unsafe { register(signal, count) }.map_err(cannot)?;
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
