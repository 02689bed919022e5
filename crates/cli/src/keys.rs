//! Keys on their way from standard input to a guest.
//!
//! **Guarantee.** Ctrl-] is heard at once, also while the guest takes no keys. Then at most
//! [`MOST_WAITING`] bytes wait, and further keys are dropped. If standard input is no terminal, no
//! byte is special and none is dropped: it is read no faster than the guest takes it.
//!
//! **Mechanism.** One thread reads when there is something to read, and looks around at intervals.
//! A process in the background does not read, since that would stop it.

use crate::signals::Interrupts;
use crate::terminal;
use pageferry_transport::sleep_on;
use rustix::event::{PollFd, PollFlags};
use rustix::io::{Errno, read};
use rustix::stdio::stdin;
use rustix::termios::isatty;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

/// Ctrl-].
const LEAVE: u8 = 0x1d;
/// The most bytes that wait for the guest. It has a queue of 64 KiB itself.
const MOST_WAITING: usize = 4096;

/// The outcome of a look at standard input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passed {
    /// Keys, or none, were passed on.
    On,
    /// The user has pressed Ctrl-] this many times.
    Left(usize),
    /// All was passed on, and there is no more.
    Ended,
}

/// What the user types.
pub(crate) struct Keys {
    from: BorrowedFd<'static>,
    is_terminal: bool,
    has_ended: bool,
    /// Read, and not yet taken.
    waiting: VecDeque<u8>,
}

impl Keys {
    /// Reads standard input.
    pub(crate) fn new() -> Self {
        Self::of(stdin(), isatty(stdin()))
    }

    const fn of(from: BorrowedFd<'static>, is_terminal: bool) -> Self {
        Self {
            from,
            is_terminal,
            has_ended: false,
            waiting: VecDeque::new(),
        }
    }

    /// Whether a user types them.
    pub(crate) const fn is_terminal(&self) -> bool {
        self.is_terminal
    }

    /// Waits for keys, at most [`Interrupts::POLL`], and passes them on. `send` returns the number
    /// of bytes that it took.
    pub(crate) fn pass_on(&mut self, send: &mut dyn FnMut(&[u8]) -> usize) -> Passed {
        if self.is_terminal {
            terminal::refresh();
        }
        let may_read = match self.is_terminal {
            true => terminal::in_foreground(),
            false => self.waiting.is_empty(),
        };
        let left = match may_read && !self.has_ended {
            true => self.read(),
            false => {
                if !self.waiting.is_empty() || !may_read {
                    std::thread::sleep(Interrupts::POLL);
                }
                0
            }
        };
        while !self.waiting.is_empty() {
            let taken = send(self.waiting.as_slices().0);
            self.waiting.drain(..taken);
            if taken == 0 {
                break;
            }
        }
        if left > 0 {
            Passed::Left(left)
        } else if self.has_ended && self.waiting.is_empty() {
            Passed::Ended
        } else {
            Passed::On
        }
    }

    /// Reads what is there, after a short wait at most. Returns how often Ctrl-] is among it.
    fn read(&mut self) -> usize {
        let mut from = [PollFd::new(&self.from, PollFlags::IN)];
        sleep_on(&mut from, Interrupts::POLL);
        if from[0].revents().is_empty() {
            return 0;
        }
        let mut bytes = [0; 1024];
        let read = match read(self.from, &mut bytes) {
            Ok(read) => read,
            Err(Errno::INTR | Errno::AGAIN) => return 0,
            // A terminal that has closed.
            Err(_) => 0,
        };
        self.has_ended = read == 0;
        let typed = &bytes[..read];
        let leaves = |key: &u8| self.is_terminal && *key == LEAVE;
        let leave = typed.iter().position(leaves);
        let times = typed.iter().filter(|key| leaves(key)).count();
        // What was typed behind it is for nobody.
        let mut keys = &typed[..leave.unwrap_or(read)];
        if self.is_terminal {
            let room = MOST_WAITING.saturating_sub(self.waiting.len());
            keys = &keys[..keys.len().min(room)];
        }
        self.waiting.extend(keys);
        times
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{PipeWriter, Write, pipe};
    use std::os::fd::{AsFd, OwnedFd};

    /// Keys of a pipe, which stays open as long as the test program.
    fn keys(is_terminal: bool) -> (PipeWriter, Keys) {
        let (from, to) = pipe().unwrap();
        let from: &'static OwnedFd = Box::leak(Box::new(from.into()));
        (to, Keys::of(from.as_fd(), is_terminal))
    }

    #[test]
    fn ctrl_bracket_leaves_a_terminal_and_is_a_byte_elsewhere() {
        for (is_terminal, expected) in [
            (true, (Passed::Left(2), &b"ab"[..])),
            (false, (Passed::On, b"ab\x1dc\x1d")),
        ] {
            let (mut to, mut keys) = keys(is_terminal);
            to.write_all(b"ab\x1dc\x1d").unwrap();
            let mut sent = Vec::new();
            let passed = keys.pass_on(&mut |bytes| {
                sent.extend(bytes);
                bytes.len()
            });
            assert_eq!((passed, sent.as_slice()), expected);
        }
    }

    #[test]
    fn a_guest_that_takes_no_keys_keeps_nobody_from_leaving() {
        let (mut to, mut keys) = keys(true);
        for _ in 0..10 {
            to.write_all(&[b'x'; 1000]).unwrap();
            assert_eq!(keys.pass_on(&mut |_| 0), Passed::On);
        }
        assert_eq!(keys.waiting.len(), MOST_WAITING, "no more are kept");
        to.write_all(&[LEAVE]).unwrap();
        assert_eq!(keys.pass_on(&mut |_| 0), Passed::Left(1));
    }

    #[test]
    fn no_byte_of_a_pipe_is_lost_before_its_end() {
        let (mut to, mut keys) = keys(false);
        let all: Vec<u8> = (0..20_000_u32).map(|at| at as u8).collect();
        to.write_all(&all).unwrap();
        drop(to);
        let mut sent: Vec<u8> = Vec::new();
        let mut turn = 0;
        let mut send = |bytes: &[u8]| {
            turn += 1;
            let taken = if turn % 2 == 0 {
                bytes.len().min(700)
            } else {
                0
            };
            sent.extend(&bytes[..taken]);
            taken
        };
        while keys.pass_on(&mut send) != Passed::Ended {}
        assert_eq!(sent, all);
    }
}
