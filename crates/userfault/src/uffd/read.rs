//! [`EventReader`]: reading events in batches, and waiting for them.
//!
//! **Guarantee.** No event is lost or reordered, but for one rule. In a batch, events of changed
//! mappings come before page faults. When a change has been read, the kernel no longer refuses
//! calls for its sake. So a thread that resolves a fault of the same batch must know the change.
//!
//! **Mechanism.** One `read(2)` of as many messages as fit. A wait spins on such reads first, and
//! then sleeps in `poll(2)`.
#![expect(unsafe_code, reason = "adopts the descriptors that fork events carry")]

use super::Userfaultfd;
use super::abi;
use super::event::{Event, Message};
use super::sys;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

/// The error of reading events. Events that were read with it are not lost: the next call returns
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// A system call failed.
    #[error("{call} of a userfaultfd failed: {errno}")]
    Failed {
        /// The call that failed.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
    /// The kernel returned a part of a message.
    #[error("a read of a userfaultfd returned {bytes} bytes: expected a multiple of 32")]
    Short {
        /// The number of bytes.
        bytes: usize,
    },
    /// The kernel sent a message that this crate does not know. It does so only for features that
    /// this crate does not know either.
    #[error(
        "a userfaultfd sent event {event:#04x}: expected one from 0x12 (page fault) to 0x16 (unmap)"
    )]
    UnknownEvent {
        /// The kernel's number of the event.
        event: u8,
    },
}

impl From<ReadError> for std::io::Error {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Failed { errno, .. } => errno.into(),
            malformed => Self::new(std::io::ErrorKind::InvalidData, malformed),
        }
    }
}

/// The ways in which [`EventReader::next`] waits. The default sleeps until an event comes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wait<'a> {
    /// The time for which it reads again and again before it sleeps. A fault that comes meanwhile
    /// is served sooner, and the time costs a CPU.
    pub spin: Duration,
    /// The longest time of the whole wait, or `None` for no limit.
    pub limit: Option<Duration>,
    /// A descriptor that ends the sleep when it becomes readable, such as an eventfd or a pipe.
    pub stop: Option<BorrowedFd<'a>>,
}

/// Reads events of a userfaultfd, many of them by one `read(2)`.
///
/// The reader holds events that it has read and not yet returned. The kernel regards them as read,
/// so dropping the reader loses them. Use one reader with one userfaultfd.
#[derive(Debug)]
pub struct EventReader {
    buffer: Box<[[u8; abi::MSG_BYTES]]>,
    events: VecDeque<Event>,
}

impl EventReader {
    /// A reader that takes up to `messages` messages, of 32 bytes each, by one `read(2)`.
    ///
    /// # Panics
    /// If `messages` is 0.
    #[must_use]
    pub fn new(messages: usize) -> Self {
        assert!(messages > 0, "a read of no message: expected at least one");
        Self {
            buffer: vec![[0; abi::MSG_BYTES]; messages].into(),
            events: VecDeque::new(),
        }
    }

    /// Returns the next event, or `None` if none waits. It never blocks.
    ///
    /// It calls `read(2)` only when all events of the last read were returned.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::empty(), |uffd| {
    /// let mut reader = EventReader::new(64);
    /// while let Some(event) = reader.try_next(&uffd)? {
    ///     println!("{event:?}");
    /// }
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn try_next(&mut self, uffd: &Userfaultfd) -> Result<Option<Event>, ReadError> {
        if self.events.is_empty() {
            self.refill(uffd)?;
        }
        Ok(self.events.pop_front())
    }

    /// Returns the next event, and waits for it as `wait` says. It returns `None` when the limit
    /// has passed or `wait.stop` is readable. An event that waits already comes first in any case.
    ///
    /// ```
    /// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/uffd/example.rs"));
    /// # fn main() { example(Features::MISSING_SHMEM, |uffd| {
    /// # let memory = private(1)?;
    /// # let (stopped, stop) = rustix::pipe::pipe()?;
    /// # // SAFETY: the thread below touches the page, and this thread resolves its faults.
    /// # unsafe { uffd.register(memory, PAGE, RegisterMode::MISSING)? };
    /// let guest = std::thread::spawn(move || {
    ///     let byte = read(memory); // touches a missing page
    ///     drop(stop); // the reader sees the end of the pipe
    ///     byte
    /// });
    /// let mut reader = EventReader::new(64);
    /// let (spin, stop) = (Duration::from_micros(50), Some(stopped.as_fd()));
    /// let wait = Wait { spin, limit: None, stop };
    /// while let Some(event) = reader.next(&uffd, wait)? {
    ///     let Event::PageFault(fault) = event else { panic!("no such feature was requested") };
    ///     uffd.copy(fault.address, &[7; 4096], Wake::Now)?;
    /// }
    /// assert_eq!(guest.join().unwrap(), 7);
    /// # Ok(()) }) }
    /// ```
    ///
    /// # Errors
    /// [`ReadError`].
    pub fn next(&mut self, uffd: &Userfaultfd, wait: Wait<'_>) -> Result<Option<Event>, ReadError> {
        let mut start = None;
        loop {
            if let Some(event) = self.try_next(uffd)? {
                return Ok(Some(event));
            }
            let waited = start.get_or_insert_with(Instant::now).elapsed();
            let left = wait.limit.map(|limit| limit.saturating_sub(waited));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            if waited < wait.spin {
                std::hint::spin_loop();
            } else if sleep(uffd, wait.stop, left)? {
                return Ok(None);
            }
        }
    }

    /// Makes one `read(2)`, when all events have been returned.
    fn refill(&mut self, uffd: &Userfaultfd) -> Result<(), ReadError> {
        let bytes = read(uffd, &mut self.buffer)?;
        decode(&self.buffer.as_flattened()[..bytes], |message| {
            self.events.push_back(match message {
                Message::PageFault(fault) => Event::PageFault(fault),
                Message::Fork(raw) => Event::Fork {
                    // SAFETY: the message was just read, and `decode` passes each on once.
                    child: Userfaultfd::from_parts(unsafe { sys::adopt(raw) }, uffd.features()),
                },
                Message::Remap { from, to, len } => Event::Remap { from, to, len },
                Message::Remove { start, end } => Event::Remove { start, end },
                Message::Unmap { start, end } => Event::Unmap { start, end },
            });
        })
    }
}

/// Makes one `read(2)`. Returns the number of bytes, 0 if no event waits.
pub(super) fn read(
    uffd: &Userfaultfd,
    buffer: &mut [[u8; abi::MSG_BYTES]],
) -> Result<usize, ReadError> {
    match rustix::io::retry_on_intr(|| rustix::io::read(uffd, buffer.as_flattened_mut())) {
        Ok(bytes) => Ok(bytes),
        Err(Errno::AGAIN) => Ok(0),
        Err(errno) => Err(ReadError::Failed {
            call: "read",
            errno,
        }),
    }
}

/// Decodes a batch. Events of changed mappings come first.
fn decode(bytes: &[u8], mut each: impl FnMut(Message)) -> Result<(), ReadError> {
    let (messages, rest) = bytes.as_chunks::<{ abi::MSG_BYTES }>();
    let mut result = Ok(());
    for faults in [false, true] {
        for message in messages {
            if (message[0] == abi::EVENT_PAGEFAULT) == faults {
                match Message::decode(message) {
                    Ok(message) => each(message),
                    Err(event) => result = Err(ReadError::UnknownEvent { event }),
                }
            }
        }
    }
    if !rest.is_empty() {
        result = Err(ReadError::Short { bytes: bytes.len() });
    }
    result
}

/// Sleeps until an event waits, `stop` is readable, or `left` has passed. Returns whether `stop` is
/// readable.
fn sleep(
    uffd: &Userfaultfd,
    stop: Option<BorrowedFd<'_>>,
    left: Option<Duration>,
) -> Result<bool, ReadError> {
    // A longer sleep than the kernel can express has no end.
    let timeout = left.and_then(|left| Timespec::try_from(left).ok());
    let watched = stop.unwrap_or(uffd.as_fd());
    let mut fds = [
        PollFd::new(uffd, PollFlags::IN),
        PollFd::new(&watched, PollFlags::IN),
    ];
    let count = 1 + usize::from(stop.is_some());
    match poll(&mut fds[..count], timeout.as_ref()) {
        Ok(_) => Ok(stop.is_some() && !fds[1].revents().is_empty()),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(ReadError::Failed {
            call: "poll",
            errno,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_addr::Hva;

    fn batch(events: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; events.len() * abi::MSG_BYTES];
        for (index, event) in events.iter().enumerate() {
            bytes[index * abi::MSG_BYTES] = *event;
            bytes[index * abi::MSG_BYTES + abi::MSG_ARG] = index as u8;
        }
        bytes
    }

    fn decoded(bytes: &[u8]) -> (Vec<Message>, Result<(), ReadError>) {
        let mut messages = Vec::new();
        let result = decode(bytes, |message| messages.push(message));
        (messages, result)
    }

    #[test]
    fn changes_come_before_the_faults_of_their_batch_and_else_nothing_changes_places() {
        let (fault, fork, remove, unmap) = (0x12, 0x13, 0x15, 0x16);
        let (messages, result) = decoded(&batch(&[fault, unmap, fault, fork, remove]));
        assert_eq!(result, Ok(()));
        let (end, start) = (Hva(0), |index| Hva(index));
        assert_eq!(
            messages[..3],
            [
                Message::Unmap {
                    start: start(1),
                    end
                },
                Message::Fork(3),
                Message::Remove {
                    start: start(4),
                    end
                },
            ]
        );
        // The argument of a fault begins with its flags: 0 for none, and 2 for a protected page.
        let protected = |message: &Message| match message {
            Message::PageFault(fault) => fault.write_protected,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            (protected(&messages[3]), protected(&messages[4])),
            (false, true)
        );
    }

    #[test]
    fn an_unknown_event_is_an_error_and_the_other_events_stay() {
        let (messages, result) = decoded(&batch(&[0x12, 0x17, 0x13]));
        assert_eq!(messages.len(), 2);
        let error = result.unwrap_err();
        assert_eq!(error, ReadError::UnknownEvent { event: 0x17 });
        assert!(error.to_string().contains("event 0x17"), "{error}");
    }

    #[test]
    fn a_part_of_a_message_is_an_error_and_the_whole_messages_stay() {
        let bytes = batch(&[0x12, 0x12]);
        let (messages, result) = decoded(&bytes[..40]);
        assert_eq!(messages.len(), 1);
        assert_eq!(result, Err(ReadError::Short { bytes: 40 }));
        assert_eq!(decoded(&[]), (vec![], Ok(())));
    }
}
