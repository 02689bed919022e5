//! One direction of a connection: the bytes on their way and what holds them.
//!
//! **Guarantee.** A pipe holds at most [`CAPACITY`] bytes and keeps their order.
//!
//! **Mechanism.** Each read gets a mark with the time at which its bytes are due. The end of the
//! stream is a mark too, so it does not overtake bytes.
//!
//! **Neighbours.** [`super::pair`] has two pipes for each connection.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The most bytes in one pipe.
pub(super) const CAPACITY: usize = 256 << 10;

/// The most marks in one pipe: many small reads can be delayed at once.
const MARKS: usize = 8192;

/// A state that ends by itself, or by a command.
#[derive(Clone, Copy, Debug)]
pub(super) enum Hold {
    No,
    Until(Instant),
    Forever,
}

impl Hold {
    /// A hold for `lasts`, or for ever. It never ends earlier than this one.
    pub(super) fn extended(self, now: Instant, lasts: Option<Duration>) -> Self {
        match (self, lasts) {
            (Self::Forever, _) | (_, None) => Self::Forever,
            (Self::Until(until), Some(lasts)) => Self::Until(until.max(now + lasts)),
            (Self::No, Some(lasts)) => Self::Until(now + lasts),
        }
    }

    pub(super) fn holds(self, now: Instant) -> bool {
        match self {
            Self::No => false,
            Self::Until(until) => now < until,
            Self::Forever => true,
        }
    }

    /// When it ends by itself, if it holds.
    pub(super) fn end(self, now: Instant) -> Option<Instant> {
        match self {
            Self::Until(until) if now < until => Some(until),
            _ => None,
        }
    }
}

/// The outcome of one step of a pipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The pipe goes on.
    On,
    /// The connection is to be reset.
    Reset,
    /// The connection is to be closed.
    Close,
    /// The receiving socket is broken.
    Broken,
}

/// An item that is due at a time.
#[derive(Clone, Copy, Debug)]
enum Item {
    Bytes(usize),
    Fin,
    Rst,
}

/// One direction.
#[derive(Debug)]
pub(super) struct Pipe {
    bytes: VecDeque<u8>,
    marks: VecDeque<(Instant, Item)>,
    last_due: Instant,
    /// Nothing more can be read.
    pub(super) source_ended: bool,
    /// Reading will find that the source was reset, even if it only says that the stream ended.
    pub(super) source_broken: bool,
    /// The receiver has FIN, or is gone.
    pub(super) finished: bool,
    /// Further bytes are read and dropped.
    discards: bool,
    pub(super) frozen: Hold,
    pub(super) delivered: u64,
    /// After how many bytes the connection ends, and how.
    pub(super) cut: Option<(u64, Step)>,
}

impl Pipe {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            bytes: VecDeque::new(),
            marks: VecDeque::new(),
            last_due: now,
            source_ended: false,
            source_broken: false,
            finished: false,
            discards: false,
            frozen: Hold::No,
            delivered: 0,
            cut: None,
        }
    }

    pub(super) fn wants_read(&self) -> bool {
        !self.source_ended
            && (self.discards || (self.bytes.len() < CAPACITY && self.marks.len() < MARKS))
    }

    /// When the next bytes are due, if there are any.
    pub(super) fn due(&self) -> Option<Instant> {
        self.marks.front().map(|(due, _)| *due)
    }

    fn push(&mut self, due: Instant, item: Item) {
        self.last_due = self.last_due.max(due);
        match (self.marks.back_mut(), item) {
            (Some((last, Item::Bytes(length))), Item::Bytes(more)) if *last == self.last_due => {
                *length += more;
            }
            _ => self.marks.push_back((self.last_due, item)),
        }
    }

    /// Ends the stream after the bytes that are in the pipe.
    pub(super) fn half_close(&mut self, now: Instant) {
        if !self.discards && !self.source_ended {
            self.push(now, Item::Fin);
            self.discards = true;
        }
    }

    /// The receiver is gone: drops what is in the pipe and what follows.
    pub(super) fn abandon(&mut self) {
        self.bytes.clear();
        self.marks.clear();
        self.discards = true;
        self.finished = true;
    }

    /// Passes on that the source was reset, though its stream had ended before.
    pub(super) fn source_reset(&mut self, now: Instant) {
        self.source_broken = true;
        if self.source_ended {
            self.push(now, Item::Rst);
        }
    }

    /// Reads once, if there is room. Bytes are due at `due`.
    pub(super) fn read(&mut self, mut from: &TcpStream, scratch: &mut [u8], due: Instant) {
        if !self.wants_read() {
            return;
        }
        let room = match self.discards {
            true => scratch.len(),
            false => scratch.len().min(CAPACITY - self.bytes.len()),
        };
        match from.read(&mut scratch[..room]) {
            Ok(0) => {
                self.source_ended = true;
                if self.source_broken {
                    self.push(due, Item::Rst);
                } else if !self.discards {
                    self.push(due, Item::Fin);
                }
            }
            Ok(_) if self.discards => {}
            Ok(count) => {
                self.bytes.extend(&scratch[..count]);
                self.push(due, Item::Bytes(count));
            }
            Err(why) if retries(why.kind()) => {}
            Err(_) => {
                self.source_ended = true;
                self.push(due, Item::Rst);
            }
        }
    }

    /// Writes what is due, at most `most` bytes. Returns how many it wrote.
    pub(super) fn write(&mut self, mut to: &TcpStream, most: usize, now: Instant) -> (usize, Step) {
        let mut written = 0;
        loop {
            let left = self
                .cut
                .map_or(u64::MAX, |(at, _)| at.saturating_sub(self.delivered));
            if let Some((_, step)) = self.cut
                && left == 0
            {
                return (written, step);
            }
            let Some((due, item)) = self.marks.front_mut() else {
                return (written, Step::On);
            };
            if *due > now {
                return (written, Step::On);
            }
            let length = match item {
                Item::Bytes(length) => length,
                Item::Rst => return (written, Step::Reset),
                Item::Fin => {
                    // A receiver that is gone needs no FIN.
                    let _ = to.shutdown(std::net::Shutdown::Write);
                    self.finished = true;
                    self.marks.pop_front();
                    continue;
                }
            };
            let (bytes, _) = self.bytes.as_slices();
            let left = usize::try_from(left).unwrap_or(usize::MAX);
            let count = bytes.len().min(*length).min(most - written).min(left);
            if count == 0 {
                return (written, Step::On);
            }
            match to.write(&bytes[..count]) {
                Ok(count) => {
                    self.bytes.drain(..count);
                    *length -= count;
                    if *length == 0 {
                        self.marks.pop_front();
                    }
                    written += count;
                    self.delivered += count as u64;
                }
                Err(why) if retries(why.kind()) => return (written, Step::On),
                Err(_) => return (written, Step::Broken),
            }
        }
    }
}

/// Whether a call can succeed later.
fn retries(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
