//! One direction of a stream: what the sender keeps, and what the receiver has not passed on.
//!
//! **Guarantee.** The receiver passes on each byte once, in order, and the end behind the last
//! byte. The sender keeps a byte until the receiver has passed it on.
//!
//! **Mechanism.** Bytes have numbers, so a record means the same on every connection, however late
//! it comes. The sender sends again what was under way on a connection that is lost. The receiver
//! drops what it has, and keeps what came too early.

use super::record::{Delivered, Ending};
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};

/// A connection between the tunnels, by a number that is never used twice in a session.
pub(super) type Link = u64;

/// A message of the other side that no correct tunnel sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FlowError {
    /// Bytes that were never sent are said to be delivered.
    #[error("it has got {until} bytes of a stream of which {sent} were sent")]
    NeverSent {
        /// The bytes said to be delivered.
        until: u64,
        /// The bytes sent.
        sent: u64,
    },
    /// The end is said to be delivered before it was sent.
    #[error("it has got the end of a stream that has none yet")]
    NoEnd,
    /// Bytes come behind the end, or the end moves.
    #[error("a stream of {end} bytes has bytes up to {until}")]
    BehindEnd {
        /// The end.
        end: u64,
        /// Where the bytes end.
        until: u64,
    },
    /// More bytes come than this side keeps.
    #[error("bytes up to {until} came while {least} were awaited: the window is {window} bytes")]
    Window {
        /// Where the bytes end.
        until: u64,
        /// The first byte that this side awaits.
        least: u64,
        /// The window.
        window: u64,
    },
}

/// Bytes that the sender keeps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Piece {
    at: u64,
    bytes: Bytes,
    /// The connection on which it is under way.
    on: Option<Link>,
    urgent: bool,
}

/// The sender's side of one direction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Outflow {
    kept: VecDeque<Piece>,
    /// All pieces before this place are under way.
    first_unsent: usize,
    /// The bytes in `kept`, and those of them that are not under way.
    bytes: u64,
    unsent: u64,
    /// The bytes that the VMM has written so far.
    until: u64,
    end: Option<Ending>,
    end_on: Option<Link>,
    /// Whether the other side needs nothing more.
    over: bool,
}

/// A part of a direction that is sent now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The position of its first byte.
    pub(super) at: u64,
    /// Its bytes.
    pub(super) bytes: Bytes,
    /// The end behind them.
    pub(super) end: Option<Ending>,
}

impl Outflow {
    /// Adds bytes of the VMM.
    pub(super) fn push(&mut self, bytes: Bytes, urgent: bool) {
        debug_assert!(self.end.is_none(), "nothing follows the end");
        let length = bytes.len() as u64;
        if self.over || length == 0 {
            return;
        }
        self.kept.push_back(Piece {
            at: self.until,
            bytes,
            on: None,
            urgent,
        });
        self.until += length;
        self.bytes += length;
        self.unsent += length;
    }

    /// The VMM sends nothing more.
    pub(super) fn finish(&mut self, end: Ending) {
        self.end.get_or_insert(end);
    }

    /// The bytes that are kept.
    pub(super) const fn kept(&self) -> u64 {
        self.bytes
    }

    /// The bytes that are not under way.
    pub(super) const fn unsent(&self) -> u64 {
        self.unsent
    }

    /// The bytes that the VMM has written.
    pub(super) const fn until(&self) -> u64 {
        self.until
    }

    /// Whether the VMM may write more.
    pub(super) const fn is_open(&self) -> bool {
        self.end.is_none() && !self.over
    }

    /// Whether the other side needs nothing more of this direction.
    pub(super) const fn is_over(&self) -> bool {
        self.over
    }

    /// Whether the other side takes no more, though there is no end yet.
    pub(super) const fn is_unwanted(&self) -> bool {
        self.over && self.end.is_none()
    }

    /// Whether bytes that are not under way are urgent. `None` if there is nothing to send.
    pub(super) fn next_is_urgent(&self) -> Option<bool> {
        if self.over {
            return None;
        }
        let waiting = self.kept.iter().skip(self.first_unsent);
        let piece = waiting.into_iter().find(|piece| piece.on.is_none());
        match piece {
            Some(piece) => Some(piece.urgent),
            // An end alone is short.
            None if self.end.is_some() && self.end_on.is_none() => Some(true),
            None => None,
        }
    }

    /// Takes the next at most `room` bytes to send on `link`.
    pub(super) fn next(&mut self, link: Link, room: usize) -> Option<Part> {
        self.next_is_urgent()?;
        while let Some(piece) = self.kept.get(self.first_unsent)
            && piece.on.is_some()
        {
            self.first_unsent += 1;
        }
        let place = self.first_unsent;
        let Some(piece) = self.kept.get_mut(place) else {
            self.end_on = Some(link);
            return Some(Part {
                at: self.until,
                bytes: Bytes::new(),
                end: self.end,
            });
        };
        if room == 0 {
            return None;
        }
        if piece.bytes.len() > room {
            let mut rest = piece.clone();
            rest.at += room as u64;
            rest.bytes = piece.bytes.split_off(room);
            self.kept.insert(place + 1, rest);
        }
        let piece = &mut self.kept[place];
        piece.on = Some(link);
        let (at, bytes) = (piece.at, piece.bytes.clone());
        self.unsent -= bytes.len() as u64;
        let last = at + bytes.len() as u64 == self.until;
        let end = self.end.filter(|_| last);
        if end.is_some() {
            self.end_on = Some(link);
        }
        Some(Part { at, bytes, end })
    }

    /// What was under way on a connection that is lost is sent again.
    pub(super) fn lost(&mut self, link: Link) {
        for (place, piece) in self.kept.iter_mut().enumerate() {
            if piece.on == Some(link) {
                piece.on = None;
                self.unsent += piece.bytes.len() as u64;
                self.first_unsent = self.first_unsent.min(place);
            }
        }
        if self.end_on == Some(link) {
            self.end_on = None;
        }
    }

    /// The other side has passed bytes on.
    ///
    /// # Errors
    /// [`FlowError`] if it cannot have.
    pub(super) fn delivered(&mut self, told: &Delivered) -> Result<(), FlowError> {
        if told.until > self.until {
            return Err(FlowError::NeverSent {
                until: told.until,
                sent: self.until,
            });
        }
        if told.ended && (self.end.is_none() || told.until < self.until) && !self.over {
            return Err(FlowError::NoEnd);
        }
        while let Some(piece) = self.kept.front_mut()
            && piece.at < told.until
        {
            let length = piece.bytes.len() as u64;
            let gone = length.min(told.until - piece.at);
            self.bytes -= gone;
            if piece.on.is_none() {
                self.unsent -= gone;
            }
            if gone < length {
                piece.at += gone;
                // Bytes of a piece that is under way stay so.
                bytes::Buf::advance(&mut piece.bytes, gone as usize);
                break;
            }
            self.kept.pop_front();
            self.first_unsent = self.first_unsent.saturating_sub(1);
        }
        if told.ended || told.stopped {
            self.abandon();
        }
        Ok(())
    }

    /// Nobody needs the rest.
    pub(super) fn abandon(&mut self) {
        self.over = true;
        self.kept.clear();
        (self.bytes, self.unsent, self.first_unsent) = (0, 0, 0);
    }
}

/// The receiver's side of one direction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Inflow {
    /// In order, not yet taken by the VMM.
    ready: VecDeque<Bytes>,
    /// Bytes that came before earlier ones, by their position.
    early: BTreeMap<u64, Bytes>,
    /// The length of all of them.
    early_bytes: u64,
    /// The bytes that the VMM has taken, and those that are here in order.
    written: u64,
    expected: u64,
    end: Option<(u64, Ending)>,
    /// Whether the VMM has got the end.
    ended: bool,
    stopped: bool,
    /// Whether the other side has to hear of a change.
    due: bool,
}

impl Inflow {
    /// Takes bytes that have come.
    ///
    /// # Errors
    /// [`FlowError`] if no correct sender sends them.
    pub(super) fn take(&mut self, part: Part, window: u64) -> Result<(), FlowError> {
        let Part { at, bytes, end } = part;
        let until = at + bytes.len() as u64;
        let highest = self.early.last_key_value();
        let highest = highest.map_or(self.expected, |(at, bytes)| at + bytes.len() as u64);
        match (self.end, end) {
            (Some((end, _)), _) if until > end => {
                return Err(FlowError::BehindEnd { end, until });
            }
            (Some((first, _)), Some(_)) if first != until => {
                return Err(FlowError::BehindEnd { end: first, until });
            }
            (None, Some(_)) if highest.max(self.expected) > until => {
                return Err(FlowError::BehindEnd {
                    end: until,
                    until: highest,
                });
            }
            (None, Some(ending)) => self.end = Some((until, ending)),
            _ => {}
        }
        // What came again is said again: the other side may not have heard it.
        if until <= self.expected {
            self.due = true;
        }
        if self.stopped {
            self.due = true;
            return Ok(());
        }
        let early = self.early_bytes + bytes.len() as u64;
        if until > self.written.saturating_add(window) || at > self.expected && early > window {
            return Err(FlowError::Window {
                until,
                least: self.written,
                window,
            });
        }
        if at > self.expected {
            let known = self.early.get(&at).map_or(0, Bytes::len);
            if bytes.len() > known {
                self.early_bytes += (bytes.len() - known) as u64;
                self.early.insert(at, bytes);
            }
            return Ok(());
        }
        self.append(at, bytes);
        while let Some(early) = self.early.first_entry()
            && *early.key() <= self.expected
        {
            let (at, bytes) = early.remove_entry();
            self.early_bytes -= bytes.len() as u64;
            self.append(at, bytes);
        }
        Ok(())
    }

    /// Adds what is new in bytes that begin at or before the expected position.
    fn append(&mut self, at: u64, mut bytes: Bytes) {
        let known = (self.expected - at) as usize;
        if known < bytes.len() {
            let new = bytes.split_off(known);
            self.expected += new.len() as u64;
            self.ready.push_back(new);
        }
    }

    /// The bytes that the VMM should take next.
    pub(super) fn front(&self) -> Option<&Bytes> {
        self.ready.front()
    }

    /// Whether bytes or an end are here that the VMM has not taken.
    pub(super) fn has_more(&self) -> bool {
        !self.stopped && (!self.ready.is_empty() || self.next_end().is_some())
    }

    /// The end, once the VMM has taken all bytes before it and not the end.
    pub(super) fn next_end(&self) -> Option<Ending> {
        let (end, ending) = self.end?;
        (!self.ended && !self.stopped && self.written == end).then_some(ending)
    }

    /// The VMM has taken bytes.
    pub(super) fn wrote(&mut self, mut bytes: usize) {
        self.written += bytes as u64;
        self.due = true;
        while let Some(front) = self.ready.front_mut()
            && bytes > 0
        {
            let taken = bytes.min(front.len());
            bytes::Buf::advance(front, taken);
            bytes -= taken;
            if front.is_empty() {
                self.ready.pop_front();
            }
        }
    }

    /// The VMM has got the end.
    pub(super) fn ended(&mut self) {
        (self.ended, self.due) = (true, true);
    }

    /// The VMM takes no more.
    pub(super) fn stop(&mut self) {
        if !self.ended {
            (self.stopped, self.due) = (true, true);
            self.ready.clear();
            self.early.clear();
            (self.early_bytes, self.expected) = (0, self.written);
        }
    }

    /// Whether nothing more comes that the VMM would take.
    pub(super) const fn is_over(&self) -> bool {
        self.ended || self.stopped
    }

    /// The bytes that the VMM has taken.
    pub(super) const fn written(&self) -> u64 {
        self.written
    }

    /// The bytes that are here and that the VMM has not taken.
    pub(super) const fn held(&self) -> u64 {
        self.expected - self.written + self.early_bytes
    }

    /// The other side has to hear what was delivered: a connection that may have said it is lost.
    pub(super) const fn say_again(&mut self) {
        self.due = true;
    }

    /// Takes what the other side has to hear.
    pub(super) fn take_due(&mut self, stream: u32) -> Option<Delivered> {
        std::mem::take(&mut self.due).then_some(Delivered {
            stream,
            until: self.written,
            ended: self.ended,
            stopped: self.stopped,
        })
    }
}
