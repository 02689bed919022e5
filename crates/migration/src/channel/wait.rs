//! How an operation waits: by spinning or by sleeping, for how long, and who may call it off.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use super::{ChannelError, Spinner};

/// How often a sleeping wait asks `stop`.
const STOP_CHECK: Duration = Duration::from_millis(50);
/// How many empty tries of a spinning reader come between two looks at `stop`.
const TRIES_PER_CHECK: u32 = 16;

/// How a reader waits for its next byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitPolicy {
    /// Sleep at once. Costs nothing and wakes late (about 70 us across cores on a virtual machine).
    Block,
    /// Try again and again for this long since the last byte, then sleep. Wakes early (about 7 us)
    /// and occupies a core meanwhile.
    Spin {
        /// How long, in microseconds.
        for_micros: u32,
    },
}

/// The rules of one kind of operation; each operation starts its limit anew.
///
/// ```
/// use pageferry_migration::channel::Wait;
/// use std::time::Duration;
/// let stop = || false;
/// let wait = Wait::block("frame header").within(Duration::from_secs(5)).unless(&stop);
/// let urgent = Wait::block("urgent reply").spinning(200);
/// # let _ = (wait, urgent);
/// ```
#[derive(Clone, Copy)]
pub struct Wait<'a> {
    pub(super) what: &'static str,
    pub(super) policy: WaitPolicy,
    pub(super) limit: Option<Duration>,
    pub(super) stop: Option<&'a dyn Fn() -> bool>,
    pub(super) mid_message: bool,
}

impl<'a> Wait<'a> {
    /// Sleeps without a limit; `what` names what is moved, for errors.
    #[must_use]
    pub const fn block(what: &'static str) -> Self {
        Self {
            what,
            policy: WaitPolicy::Block,
            limit: None,
            stop: None,
            mid_message: false,
        }
    }

    /// The same, with this policy. Only readers spin; a writer whose socket is full always sleeps.
    #[must_use]
    pub const fn with_policy(mut self, policy: WaitPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// The same, spinning for `for_micros` microseconds since the last byte.
    #[must_use]
    pub const fn spinning(self, for_micros: u32) -> Self {
        self.with_policy(WaitPolicy::Spin { for_micros })
    }

    /// The same, with a limit for the whole operation, counted from its start.
    #[must_use]
    pub const fn within(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }

    /// The same, with what is left of its limit after `spent`.
    #[must_use]
    pub(crate) fn less(mut self, spent: Duration) -> Self {
        self.limit = self.limit.map(|limit| limit.saturating_sub(spent));
        self
    }

    /// The same, called off within 50 ms once `stop` returns true.
    #[must_use]
    pub const fn unless(mut self, stop: &'a dyn Fn() -> bool) -> Self {
        self.stop = Some(stop);
        self
    }

    /// The same, for what continues a message: a peer that ends before its first byte has truncated
    /// the message, it did not end between two.
    #[must_use]
    pub const fn mid_message(mut self) -> Self {
        self.mid_message = true;
        self
    }
}

impl core::fmt::Debug for Wait<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Wait")
            .field("what", &self.what)
            .field("policy", &self.policy)
            .field("limit", &self.limit)
            .field("mid_message", &self.mid_message)
            .finish_non_exhaustive()
    }
}

/// The state of one operation's waiting. Costs no system call and reads no clock until the first
/// wait.
pub(super) struct Waiter<'a> {
    wait: &'a Wait<'a>,
    started: Option<Instant>,
    spinner: Option<Spinner>,
    tries: u32,
}

impl<'a> Waiter<'a> {
    pub(super) const fn new(wait: &'a Wait<'a>) -> Self {
        Self {
            wait,
            started: None,
            spinner: None,
            tries: 0,
        }
    }

    /// Bytes were moved: the spinning time starts anew.
    pub(super) const fn progressed(&mut self) {
        self.spinner = None;
    }

    /// Returns when it is worth to try again.
    pub(super) fn wait(
        &mut self,
        fd: BorrowedFd<'_>,
        events: PollFlags,
    ) -> Result<(), ChannelError> {
        let now = Instant::now();
        let started = *self.started.get_or_insert(now);
        if let Some(limit) = self.wait.limit
            && now - started >= limit
        {
            return Err(ChannelError::TimedOut {
                what: self.wait.what,
                after: limit,
            });
        }
        if let WaitPolicy::Spin { for_micros } = self.wait.policy
            && events.contains(PollFlags::IN)
            && self
                .spinner
                .get_or_insert_with(|| Spinner::new(Duration::from_micros(for_micros.into())))
                .spin()
        {
            self.tries = self.tries.wrapping_add(1);
            if self.tries.is_multiple_of(TRIES_PER_CHECK) {
                self.check_stop()?;
            }
            return Ok(());
        }
        self.check_stop()?;
        let left = self.wait.limit.map(|limit| limit - (now - started));
        let pause = match (left, self.wait.stop) {
            (Some(left), Some(_)) => Some(left.min(STOP_CHECK)),
            (None, Some(_)) => Some(STOP_CHECK),
            (left, None) => left,
        };
        // A limit too long for the kernel's clock is no limit.
        let pause = pause.and_then(|pause| Timespec::try_from(pause).ok());
        match poll(&mut [PollFd::from_borrowed_fd(fd, events)], pause.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(ChannelError::Lost {
                what: self.wait.what,
                source: errno.into(),
            }),
        }
    }

    fn check_stop(&self) -> Result<(), ChannelError> {
        match self.wait.stop {
            Some(stop) if stop() => Err(ChannelError::Interrupted {
                what: self.wait.what,
            }),
            _ => Ok(()),
        }
    }
}
