//! The sockets of a session: connections to the other end, and the VMM's streams.

use super::end::End;
use super::flow::Link;
use super::record::{Decoder, Ending, MAX_PAYLOAD, Record};
use bytes::{Buf, Bytes, BytesMut};
use pageferry_migration::{ChannelError, Connection, Governor, Silence, WireError};
use rustix::event::PollFlags;
use rustix::net::Shutdown;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The bytes that may wait for room in a socket to the other end.
const QUEUED: usize = MAX_PAYLOAD;
/// The most bytes that are read from one socket before the others have their turn.
const TURN: usize = 1 << 20;
/// The least bytes of which the governor is told: a page, as of its own frames.
const LEAST_TOLD: u64 = 4096;
/// The room for received bytes.
const BUFFER: usize = 128 << 10;

/// A connection to the other end.
pub(super) struct LinkIo {
    pub(super) number: Link,
    /// Its place: 0 is for urgent data.
    pub(super) index: u16,
    connection: Connection,
    decoder: Decoder,
    out: BytesMut,
    /// Whether TLS has bytes for which the socket had no room.
    unflushed: bool,
    governor: Governor,
    /// The records with urgent data, on any connection, of which the governor knows.
    urgent: u64,
    /// For each record with data and without a receipt, whether the governor was told of it. Small
    /// records count with a later one: by themselves they would tell it that this side had little
    /// to send.
    told: VecDeque<bool>,
    /// The bytes of which it was not told.
    untold: u64,
    /// The records with data that the other end has not yet said to have.
    receipts: u64,
    silence: Silence,
    epoch: Instant,
}

/// Why a connection is of no more use.
pub(super) enum Lost {
    /// It ended, or is damaged.
    Link(String),
    /// The other end does not keep to the protocol: the session cannot go on.
    Session(String),
}

impl From<ChannelError> for Lost {
    fn from(error: ChannelError) -> Self {
        Self::Link(error.to_string())
    }
}

impl From<WireError> for Lost {
    /// Damaged bytes say nothing about the other end: what they carried is sent again.
    fn from(error: WireError) -> Self {
        Self::Link(error.to_string())
    }
}

impl LinkIo {
    pub(super) fn new(
        number: Link,
        index: u16,
        connection: Connection,
        queue: Duration,
        epoch: Instant,
    ) -> Self {
        Self {
            number,
            index,
            connection,
            decoder: Decoder::default(),
            out: BytesMut::new(),
            unflushed: false,
            told: VecDeque::new(),
            untold: 0,
            governor: Governor::new(queue, 1),
            urgent: 0,
            receipts: 0,
            silence: Silence::new(),
            epoch,
        }
    }

    pub(super) const fn connection(&self) -> &Connection {
        &self.connection
    }

    pub(super) fn shutdown(&self) {
        self.connection.shutdown();
    }

    /// The measured rate, in bytes a second.
    pub(super) fn rate(&self) -> u64 {
        self.governor.rate()
    }

    /// Whether the other end says nothing for longer than `patience`.
    pub(super) fn is_silent(&self, patience: Duration) -> bool {
        // This side may have been late: then bytes wait.
        self.silence.exceeds(patience) && !self.connection.has_unread()
    }

    /// The events to wait for.
    pub(super) fn events(&self) -> PollFlags {
        match self.is_flushed() {
            true => PollFlags::IN,
            false => PollFlags::IN | PollFlags::OUT,
        }
    }

    /// Gives the records that have come to `end`. Returns whether any bytes came.
    pub(super) fn receive(&mut self, end: &mut End, buffer: &mut Vec<u8>) -> Result<bool, Lost> {
        buffer.resize(BUFFER, 0);
        let mut taken = 0;
        while taken < TURN {
            let Some(got) = self.connection.recv_pending(buffer, "tunnel record")? else {
                break;
            };
            taken += got;
            self.silence = Silence::new();
            self.decoder.push(&buffer[..got]);
            while let Some(record) = self.decoder.take()? {
                if let Record::Received { records, .. } = record {
                    self.receipts_came(records);
                }
                let taken = end.record(self.number, record);
                taken.map_err(|error| Lost::Session(error.to_string()))?;
            }
        }
        Ok(taken > 0)
    }

    fn receipts_came(&mut self, records: u64) {
        let new = records.saturating_sub(self.receipts);
        self.receipts = self.receipts.max(records);
        let new = usize::try_from(new)
            .unwrap_or(usize::MAX)
            .min(self.told.len());
        let frames = self.told.drain(..new).filter(|told| *told).count();
        let now = self.now();
        self.governor.receipts(now, 0, frames as u64);
    }

    fn now(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Sends what `end` has for this connection, as far as the socket has room. Returns whether
    /// anything was sent.
    pub(super) fn send(&mut self, end: &mut End) -> Result<bool, Lost> {
        let mut sent = false;
        if self.urgent != end.urgent() {
            self.urgent = end.urgent();
            self.governor.asked(self.now());
        }
        loop {
            while self.out.len() < QUEUED {
                let room = self.governor.room(0);
                let limit = room.and_then(|room| usize::try_from(room).ok());
                let Some(record) = end.next(self.number, limit.unwrap_or(0)) else {
                    break;
                };
                let payload = record.payload();
                self.out.extend_from_slice(&record.header(&payload));
                self.out.extend_from_slice(&payload);
                if matches!(record, Record::Data { .. }) {
                    self.tell(payload.len() as u64);
                }
            }
            if self.out.is_empty() {
                self.unflushed = !self.connection.flush_pending("tunnel record")?;
                return Ok(sent);
            }
            let taken = self.connection.try_send(&self.out, "tunnel record")?;
            if taken == 0 {
                return Ok(sent);
            }
            self.out.advance(taken);
            sent = true;
        }
    }

    /// Tells the governor of a record with data.
    fn tell(&mut self, bytes: u64) {
        self.untold += bytes;
        let tells = self.untold >= LEAST_TOLD;
        if tells {
            let now = self.now();
            self.governor.sent(now, 0, self.untold);
        }
        self.told.push_back(tells);
        if tells {
            self.untold = 0;
        }
    }

    /// Whether all that was queued has left this process.
    pub(super) fn is_flushed(&self) -> bool {
        self.out.is_empty() && !self.unflushed
    }
}

/// A stream of the VMM.
pub(super) struct Local {
    pub(super) stream: u32,
    connection: Option<Connection>,
    reads: bool,
    writes: bool,
    /// Whether the socket had no room for what waits.
    blocked: bool,
}

impl Local {
    pub(super) const fn new(stream: u32, connection: Connection) -> Self {
        Self {
            stream,
            connection: Some(connection),
            reads: true,
            writes: true,
            blocked: false,
        }
    }

    /// The socket and the events to wait for, if there are any.
    pub(super) fn waits(&self, end: &End) -> Option<(&Connection, PollFlags)> {
        let mut events = PollFlags::empty();
        if self.reads && (end.wants(self.stream) > 0 || end.is_unwanted(self.stream)) {
            events |= PollFlags::IN;
        }
        if self.writes && self.blocked {
            events |= PollFlags::OUT;
        }
        let connection = self.connection.as_ref()?;
        (!events.is_empty()).then_some((connection, events))
    }

    /// Whether the VMM may send more.
    pub(super) const fn reads(&self) -> bool {
        self.reads
    }

    /// Whether the VMM has sent what was not read.
    pub(super) fn has_unread(&self) -> bool {
        let connection = self.connection.as_ref().filter(|_| self.reads);
        connection.is_some_and(Connection::has_unread)
    }

    /// Whether the VMM's socket is closed.
    pub(super) const fn is_closed(&self) -> bool {
        self.connection.is_none()
    }

    /// Moves bytes in both directions without waiting. Returns whether any moved.
    pub(super) fn serve(&mut self, end: &mut End, buffer: &mut Vec<u8>) -> bool {
        let Some(connection) = self.connection.take() else {
            return false;
        };
        let read = self.read(&connection, end, buffer);
        let wrote = self.write(&connection, end);
        if self.reads || self.writes {
            self.connection = Some(connection);
        }
        read || wrote
    }

    fn read(&mut self, connection: &Connection, end: &mut End, buffer: &mut Vec<u8>) -> bool {
        let mut moved = false;
        while self.reads {
            if end.is_unwanted(self.stream) {
                // The VMM hears of it when it writes. A socket that is closed needs no word.
                let _ = rustix::net::shutdown(connection, Shutdown::Read);
                self.finish(end, Ending::Finished);
                break;
            }
            let wants = end.wants(self.stream);
            if wants == 0 {
                break;
            }
            buffer.resize(BUFFER.max(wants), 0);
            match connection.recv_pending(&mut buffer[..wants], "stream") {
                Ok(None) => break,
                Ok(Some(got)) => {
                    moved = true;
                    end.bytes(self.stream, Bytes::copy_from_slice(&buffer[..got]));
                }
                Err(ChannelError::Closed { .. }) => self.finish(end, Ending::Finished),
                Err(_) => self.finish(end, Ending::Broken),
            }
        }
        moved
    }

    fn finish(&mut self, end: &mut End, how: Ending) {
        self.reads = false;
        end.finished(self.stream, how);
    }

    fn write(&mut self, connection: &Connection, end: &mut End) -> bool {
        let mut moved = false;
        self.blocked = false;
        while self.writes {
            if let Some(front) = end.front(self.stream) {
                match connection.try_send(front, "stream") {
                    Ok(0) => {
                        self.blocked = true;
                        break;
                    }
                    Ok(taken) => {
                        moved = true;
                        end.wrote(self.stream, taken);
                    }
                    Err(_) => {
                        self.writes = false;
                        end.stopped(self.stream);
                    }
                }
                continue;
            }
            let Some(ending) = end.next_end(self.stream) else {
                break;
            };
            self.writes = false;
            end.ended(self.stream);
            moved = true;
            match ending {
                Ending::Finished => connection.shutdown_write(),
                // A stream that broke ends in both directions.
                Ending::Broken if self.reads => self.finish(end, Ending::Finished),
                Ending::Broken => {}
            }
        }
        moved
    }
}
