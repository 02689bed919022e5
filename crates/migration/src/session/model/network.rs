//! The network: connections, and the messages that are on their way.

use super::super::{Generation, ToDestination, ToSource};

/// The pages of the model, one bit each.
pub(super) type PageSet = u8;

/// Which connection: control has no channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key {
    pub generation: Generation,
    /// The lane's index and the incarnation.
    pub channel: Option<(usize, u32)>,
}

/// One of the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Place {
    Source,
    Destination,
}

/// The state of one end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Side {
    /// The source dials and has no answer. The destination has not accepted.
    Waiting,
    /// It reads and writes.
    Open,
    /// It is closed, but its reader has not ended. Only a model without a rule has this.
    Ghost,
    /// It is closed, and its reader has ended.
    Closed,
}

/// A message on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Message {
    ToDestination(ToDestination),
    /// All that the destination needs to run the guest.
    SwitchOver,
    /// `Resumed` has the missing pages in front of it.
    ToSource(ToSource, PageSet),
    Page(usize),
    Request(usize),
    /// The number of messages of this connection whose pages are in place.
    Receipt(u64),
}

/// A connection, from the first attempt to open it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Connection {
    pub key: Key,
    pub source: Side,
    pub destination: Side,
    pub to_destination: Vec<Message>,
    pub to_source: Vec<Message>,
    /// The messages with pages that the source has sent.
    pub sent: u64,
    /// The messages whose pages the destination has placed.
    pub placed: u64,
}

impl Connection {
    pub(super) fn new(key: Key, source: Side, destination: Side) -> Self {
        Self {
            key,
            source,
            destination,
            to_destination: Vec::new(),
            to_source: Vec::new(),
            sent: 0,
            placed: 0,
        }
    }

    /// Sends a message to the destination. It is lost if the destination has closed.
    pub(super) fn send_to_destination(&mut self, message: Message) {
        if self.destination != Side::Closed {
            self.to_destination.push(message);
        }
    }

    /// Sends a message to the source. A later receipt takes the place of one on its way: what the
    /// source can know is the same.
    pub(super) fn send_to_source(&mut self, message: Message) {
        if self.source == Side::Closed {
            return;
        }
        if let (Message::Receipt(_), Some(last @ Message::Receipt(_))) =
            (message, self.to_source.last_mut())
        {
            *last = message;
        } else {
            self.to_source.push(message);
        }
    }

    /// Closes the source's end. `ghost` keeps a reader that still has something to read.
    pub(super) fn close_source(&mut self, ghost: bool) {
        let open = matches!(self.source, Side::Open | Side::Ghost);
        self.source = if ghost && open && !self.to_source.is_empty() {
            Side::Ghost
        } else {
            self.to_source.clear();
            Side::Closed
        };
    }

    /// Closes the destination's end. `ghost` keeps a reader that still has something to read.
    pub(super) fn close_destination(&mut self, ghost: bool) {
        let open = matches!(self.destination, Side::Open | Side::Ghost);
        self.destination = if ghost && open && !self.to_destination.is_empty() {
            Side::Ghost
        } else {
            self.to_destination.clear();
            Side::Closed
        };
    }

    /// Ends readers that have nothing left to read.
    pub(super) fn settle(&mut self) {
        if self.source == Side::Ghost && self.to_source.is_empty() {
            self.source = Side::Closed;
        }
        if self.destination == Side::Ghost && self.to_destination.is_empty() {
            self.destination = Side::Closed;
        }
    }
}
