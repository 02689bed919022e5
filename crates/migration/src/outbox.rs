//! Bytes on their way to a peer that may not take them yet.

use crate::error::MigrationError;
use pageferry_transport::channel::Connection;
use std::time::{Duration, Instant};

/// Messages in their order. No call waits.
pub(crate) struct Outbox {
    what: &'static str,
    bytes: Vec<u8>,
    sent: usize,
    /// Whether TLS has bytes that the peer does not take yet.
    pending: bool,
    said: Instant,
}

impl Outbox {
    /// `what` names the messages, for errors.
    pub(crate) fn new(what: &'static str) -> Self {
        Self {
            what,
            bytes: Vec::new(),
            sent: 0,
            pending: false,
            said: Instant::now(),
        }
    }

    /// Adds a message. [`Self::flush`] sends it.
    pub(crate) fn push(&mut self, message: &[u8]) {
        // A peer that reads slowly may never let this be empty.
        if self.sent > self.bytes.len() / 2 {
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
        self.bytes.extend_from_slice(message);
    }

    /// The bytes that the connection has not accepted.
    pub(crate) fn waiting(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Whether the connection has accepted all messages.
    pub(crate) fn is_empty(&self) -> bool {
        self.sent == self.bytes.len()
    }

    /// Whether everything has left this process.
    pub(crate) fn is_sent(&self) -> bool {
        self.is_empty() && !self.pending
    }

    /// The time since the peer took something.
    pub(crate) fn silence(&self) -> Duration {
        self.said.elapsed()
    }

    /// Sends as much as the peer takes now.
    pub(crate) fn flush(&mut self, connection: &Connection) -> Result<(), MigrationError> {
        while !self.is_empty() {
            let taken = connection.try_send(&self.bytes[self.sent..], self.what)?;
            if taken == 0 {
                return Ok(());
            }
            self.sent += taken;
            self.said = Instant::now();
        }
        self.bytes.clear();
        self.sent = 0;
        self.pending = !connection.flush_pending(self.what)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A peer that reads slowly never lets the outbox be empty.
    #[test]
    fn bytes_that_were_sent_are_not_kept() {
        const MESSAGE: [u8; 4096] = [7; 4096];
        let (here, there) = Connection::pair().unwrap();
        let mut out = Outbox::new("message");
        // The socket takes no more.
        while out.waiting() < 256 * MESSAGE.len() {
            out.push(&MESSAGE);
            out.flush(&here).unwrap();
        }
        let mut read = [0; MESSAGE.len()];
        for _ in 0..10_000 {
            while out.waiting() < 256 * MESSAGE.len() {
                out.push(&MESSAGE);
            }
            let mut got = 0;
            while got < read.len() {
                let room = &mut read[got..];
                got += there.recv_pending(room, "message").unwrap().unwrap_or(0);
                out.flush(&here).unwrap();
            }
            assert!(!out.is_empty());
        }
        assert!(out.bytes.len() < 4 << 20, "{} bytes", out.bytes.len());
    }
}
