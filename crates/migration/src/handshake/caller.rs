//! One caller of the destination, from its connection to its preamble.

use std::time::Instant;

use super::{HELLO_LIMIT, Stranger, StrangerError};
use crate::channel::{ChannelError, Connection};
use crate::wire::{HELLO_BYTES, Hello, HelloReply, SessionId, Status, WireError, check_magic};

/// A caller whose preamble is not complete, or to whom a refusal was sent.
pub(super) struct Caller {
    pub(super) connection: Connection,
    pub(super) since: Instant,
    bytes: [u8; HELLO_BYTES],
    filled: usize,
    /// A refusal was sent: what still comes is thrown away, so that closing does not reset the
    /// connection before the peer has read the answer.
    refused: bool,
}

/// What a look at a caller gave.
pub(super) enum Look {
    /// Nothing new.
    Waiting,
    /// It may be forgotten: it ended, after it had been refused.
    Gone,
    /// Its preamble is here and good.
    Says(Hello),
    /// It will not do. The answer is for those who would understand it.
    Bad(StrangerError, Option<HelloReply>),
}

impl Caller {
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

    /// Takes what has come. Bytes behind the preamble are left for the protocol.
    pub(super) fn look(&mut self) -> Look {
        if self.refused {
            return self.discard();
        }
        let room = &mut self.bytes[self.filled..];
        match self.connection.recv_pending(room, "Hello") {
            Ok(None) => return Look::Waiting,
            Ok(Some(more)) => self.filled += more,
            Err(ChannelError::Closed { .. }) if self.filled > 0 => {
                let error = WireError::Truncated {
                    what: "Hello",
                    needed: HELLO_BYTES as u64,
                    got: self.filled as u64,
                };
                return Look::Bad(error.into(), None);
            }
            Err(error) => return Look::Bad(error.into(), None),
        }
        if let Err(error) = check_magic(&self.bytes[..self.filled]) {
            return Look::Bad(error.into(), None);
        }
        if self.filled < HELLO_BYTES {
            return Look::Waiting;
        }
        match Hello::decode(&self.bytes) {
            Ok(hello) => Look::Says(hello),
            Err(error) => {
                let answer = HelloReply::refusal_of(&self.bytes, &error);
                Look::Bad(error.into(), answer)
            }
        }
    }

    fn discard(&self) -> Look {
        let mut bytes = [0; 256];
        match self.connection.recv_pending(&mut bytes, "end") {
            Ok(_) => Look::Waiting,
            Err(_) => Look::Gone,
        }
    }

    /// Sends a refusal and nothing more. The socket's buffer is empty, so the 64 bytes fit, or the
    /// connection is broken and nobody waits for them.
    pub(super) fn refuse(&mut self, answer: &HelloReply) {
        let at_once = crate::channel::Wait::block("HelloReply").within(std::time::Duration::ZERO);
        // The caller is being sent away: if it cannot be told why, it has left already.
        let _ = self.connection.send_small(&answer.encode(), &at_once);
        self.connection.shutdown_write();
        self.refused = true;
        self.since = Instant::now();
    }

    /// Refuses a good preamble that came at the wrong time.
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
