//! A pending connection at the destination, from its accept(2) to its complete preamble.

use std::time::Instant;

use super::{HELLO_LIMIT, Stranger, StrangerError};
use crate::channel::{ChannelError, Connection};
use crate::wire::{HELLO_BYTES, Hello, HelloReply, SessionId, Status, WireError, check_magic};

/// A connection whose preamble is not complete, or to which a refusal was sent.
pub(super) struct PendingPeer {
    pub(super) connection: Connection,
    pub(super) since: Instant,
    bytes: [u8; HELLO_BYTES],
    filled: usize,
    /// A refusal was sent. Later bytes are read and dropped: closing with unread bytes would reset
    /// the connection before the peer has read the refusal.
    refused: bool,
}

/// The state of a pending connection after a read.
pub(super) enum HelloState {
    /// The preamble is not complete.
    Waiting,
    /// The connection was refused, and then ended.
    Closed,
    /// The preamble is complete and valid.
    Complete(Hello),
    /// The preamble is not acceptable. The answer is for a peer that would understand it.
    Rejected(StrangerError, Option<HelloReply>),
}

impl PendingPeer {
    pub(super) fn new(connection: Connection) -> Self {
        Self {
            connection,
            since: Instant::now(),
            bytes: [0; HELLO_BYTES],
            filled: 0,
            refused: false,
        }
    }

    pub(super) const fn is_refused(&self) -> bool {
        self.refused
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= HELLO_LIMIT
    }

    /// Reads the bytes that have arrived. Bytes after the preamble stay in the socket.
    pub(super) fn read_hello(&mut self) -> HelloState {
        if self.refused {
            return self.discard();
        }
        let room = &mut self.bytes[self.filled..];
        match self.connection.recv_pending(room, "Hello") {
            Ok(None) => return HelloState::Waiting,
            Ok(Some(more)) => self.filled += more,
            Err(ChannelError::Closed { .. }) if self.filled > 0 => {
                let error = WireError::Truncated {
                    what: "Hello",
                    needed: HELLO_BYTES as u64,
                    got: self.filled as u64,
                };
                return HelloState::Rejected(error.into(), None);
            }
            Err(error) => return HelloState::Rejected(error.into(), None),
        }
        if let Err(error) = check_magic(&self.bytes[..self.filled]) {
            return HelloState::Rejected(error.into(), None);
        }
        if self.filled < HELLO_BYTES {
            return HelloState::Waiting;
        }
        match Hello::decode(&self.bytes) {
            Ok(hello) => HelloState::Complete(hello),
            Err(error) => {
                let answer = HelloReply::refusal_of(&self.bytes, &error);
                HelloState::Rejected(error.into(), answer)
            }
        }
    }

    fn discard(&self) -> HelloState {
        let mut bytes = [0; 256];
        match self.connection.recv_pending(&mut bytes, "end") {
            Ok(_) => HelloState::Waiting,
            Err(_) => HelloState::Closed,
        }
    }

    /// Sends a refusal as the last message. The socket's buffer is empty, so the 64 bytes fit
    /// unless the connection is broken.
    pub(super) fn refuse(&mut self, answer: &HelloReply) {
        let at_once = crate::channel::Wait::block("HelloReply").within(std::time::Duration::ZERO);
        // If the send fails, the peer has left already.
        let _ = self.connection.send_small(&answer.encode(), &at_once);
        self.connection.shutdown_write();
        self.refused = true;
        self.since = Instant::now();
    }

    /// Refuses a valid preamble that came at the wrong time.
    pub(super) fn refuse_as(&mut self, session: SessionId, status: Status) -> Stranger {
        self.refuse(&HelloReply::refuse(session, status));
        self.stranger(StrangerError::Refused(status))
    }

    pub(super) fn stranger(&self, why: StrangerError) -> Stranger {
        Stranger {
            peer: self.connection.peer().to_owned(),
            why,
        }
    }
}
