//! The waiting of an operation: spin or sleep, the limit, and the interruption.

use rustix::event::{PollFd, PollFlags};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use super::{ChannelError, Spinner};
use crate::nap::sleep_on;

/// The interval at which a sleeping wait calls `stop`.
const STOP_CHECK: Duration = Duration::from_millis(50);
/// The number of empty tries of a spinning reader between two calls of `stop`.
const TRIES_PER_CHECK: u32 = 16;

/// The way in which a reader waits for its next byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitPolicy {
    /// Sleep at once. Uses no core, but wakes late (about 70 us across cores on a virtual machine).
    Block,
    /// Spin for this long after the last byte, then sleep. Sees bytes early (about 7 us), but
    /// occupies a core.
    Spin {
        /// The spin time in microseconds.
        for_micros: u32,
    },
}

/// The rules for the waits of an operation. The limit measures silence: it counts anew from the
/// start of each operation and from every byte that moves.
///
/// ```
/// use pageferry_transport::channel::Wait;
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
    /// The end of all operations with this limit, and the time until then at their start.
    pub(super) deadline: Option<(Instant, Duration)>,
    pub(super) stop: Option<&'a dyn Fn() -> bool>,
    pub(super) mid_message: bool,
}

impl<'a> Wait<'a> {
    /// Sleeps without a limit. `what` names the message, for errors.
    #[must_use]
    pub const fn block(what: &'static str) -> Self {
        Self {
            what,
            policy: WaitPolicy::Block,
            limit: None,
            deadline: None,
            stop: None,
            mid_message: false,
        }
    }

    /// Sets the policy. Only readers spin. A writer whose socket is full always sleeps.
    #[must_use]
    pub const fn with_policy(mut self, policy: WaitPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Spins for `for_micros` microseconds after the last byte.
    #[must_use]
    pub const fn spinning(self, for_micros: u32) -> Self {
        self.with_policy(WaitPolicy::Spin { for_micros })
    }

    /// Sets the longest time without progress. Every byte that moves starts it anew.
    #[must_use]
    pub const fn within(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Sets the end of several operations together, which took `all` at their start. Bytes that
    /// move do not postpone it.
    #[must_use]
    pub const fn until(mut self, deadline: Instant, all: Duration) -> Self {
        self.deadline = Some((deadline, all));
        self
    }

    /// Interrupts the operation within 50 ms once `stop` returns true.
    #[must_use]
    pub const fn unless(mut self, stop: &'a dyn Fn() -> bool) -> Self {
        self.stop = Some(stop);
        self
    }

    /// Marks the rest of a message. If the peer closes before the first byte of this rest, it has
    /// truncated the message.
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

/// The state of one operation's waits. It makes no system call and reads no clock before the first
/// wait.
pub(super) struct Waiter<'a> {
    wait: &'a Wait<'a>,
    silent_since: Option<Instant>,
    spinner: Option<Spinner>,
    tries: u32,
}

impl<'a> Waiter<'a> {
    pub(super) const fn new(wait: &'a Wait<'a>) -> Self {
        Self {
            wait,
            silent_since: None,
            spinner: None,
            tries: 0,
        }
    }

    /// Starts the limit and the spin time anew, after bytes were moved.
    pub(super) const fn progressed(&mut self) {
        self.silent_since = None;
        self.spinner = None;
    }

    /// Returns when the operation should retry.
    pub(super) fn wait(
        &mut self,
        fd: BorrowedFd<'_>,
        events: PollFlags,
    ) -> Result<(), ChannelError> {
        let now = Instant::now();
        let silent_since = *self.silent_since.get_or_insert(now);
        if let Some(limit) = self.wait.limit
            && now - silent_since >= limit
        {
            return Err(ChannelError::TimedOut {
                what: self.wait.what,
                after: limit,
            });
        }
        if let Some((deadline, all)) = self.wait.deadline
            && now >= deadline
        {
            return Err(ChannelError::TimedOut {
                what: self.wait.what,
                after: all,
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
        let until_silent = self.wait.limit.map(|limit| limit - (now - silent_since));
        let until_deadline = (self.wait.deadline).map(|(deadline, _)| deadline - now);
        let left = until_silent.into_iter().chain(until_deadline).min();
        let pause = match (left, self.wait.stop) {
            (Some(left), Some(_)) => Some(left.min(STOP_CHECK)),
            (None, Some(_)) => Some(STOP_CHECK),
            (left, None) => left,
        };
        // The longest counts as none.
        let pause = pause.unwrap_or(Duration::MAX);
        sleep_on(&mut [PollFd::from_borrowed_fd(fd, events)], pause);
        Ok(())
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
