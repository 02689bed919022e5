#![expect(
    unsafe_code,
    reason = "passes on the contract of receiving into memory given by address"
)]
//! The two connections of a migration as its phases use them: frames in, frames out, one error
//! type.

use crate::address::Address;
use crate::channel::{ChannelError, Connection, Listener, Wait};
use crate::destination::DestinationConfig;
use crate::error::MigrationError;
use crate::handshake::{self, HandshakeError, Stranger};
use crate::source::SourceConfig;
use crate::wire::{
    self, ErrorCode, ErrorMessage, Frame, FrameHasher, FrameHeader, FrameType, HEADER_BYTES,
    RunList, SessionId, Side, URGENT_BYTES, UrgentMessage, WireError,
};
use pageferry_machine::Engine;
use std::fmt::Display;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

pub(crate) use crate::channel::RawSlice;

/// The longest a peer may take to accept an urgent page.
const URGENT_SEND_LIMIT: Duration = Duration::from_secs(30);
/// How long to look for the reason that a peer gave before it closed the connection.
pub(crate) const REASON_LIMIT: Duration = Duration::from_millis(50);
/// How long a side that gave up waits for the peer to read why.
const LAST_WORD_LIMIT: Duration = Duration::from_millis(200);
/// How long the source's urgent thread spins for the next request before it sleeps, in
/// microseconds. While a guest faults, requests come every few dozen; a sleeping hop would cost
/// each of them 70 more.
pub const URGENT_SPIN_MICROS: u32 = 100;
/// How long readers of the stream spin for the next byte, in microseconds: near switch-over each
/// sleeping hop would be part of the blackout, and in the push it would leave the sender waiting
/// for room.
pub(crate) const SWITCH_OVER_SPIN_MICROS: u32 = 100;
/// How long a request waits for room in the socket's buffer: there always is some, unless the
/// source does not read.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// A stop condition that never comes.
pub(crate) fn never() -> &'static dyn Fn() -> bool {
    &|| false
}

/// The wire's names of an engine and of the ISA of its guests.
pub(crate) fn wire_engine(engine: Engine) -> (wire::Engine, wire::Isa) {
    match engine {
        Engine::Kvm => (wire::Engine::Kvm, wire::Isa::X86_64),
        Engine::Soft => (wire::Engine::Soft, wire::Isa::Riscv64),
    }
}

/// The machine's name of the wire's engine.
pub(crate) fn machine_engine(engine: wire::Engine) -> Engine {
    match engine {
        wire::Engine::Kvm => Engine::Kvm,
        wire::Engine::Soft => Engine::Soft,
    }
}

impl From<ChannelError> for MigrationError {
    fn from(error: ChannelError) -> Self {
        match error {
            // A peer that stops within a message has not damaged it: the connection was cut.
            ChannelError::Wire(error @ WireError::Truncated { .. }) => {
                Self::LinkLost(error.to_string())
            }
            ChannelError::Wire(error) => Self::Wire(error),
            ChannelError::Interrupted { .. } => Self::Cancelled,
            ChannelError::TimedOut { what, .. } => Self::Timeout(what),
            ChannelError::Lost { what, source } => Self::LinkLost(format!("{source} (at {what})")),
            ChannelError::Closed { .. } | ChannelError::Torn { .. } => {
                Self::LinkLost(error.to_string())
            }
            ChannelError::Open(_) => Self::Channel(error),
        }
    }
}

impl From<HandshakeError> for MigrationError {
    fn from(error: HandshakeError) -> Self {
        match error {
            HandshakeError::Channel(error) => error.into(),
            HandshakeError::Wire(error) => error.into(),
            HandshakeError::Refused { status, .. } => Self::Refused(status),
        }
    }
}

/// What came on the stream.
pub(crate) enum Received {
    /// A Pages frame: its descriptors and data are still to be received.
    Pages(FrameHeader),
    /// Any other frame, whole.
    Frame(Frame),
}

/// The stream connection.
pub(crate) struct StreamLink {
    connection: Connection,
    from: Side,
    memory_pages: u64,
    spin_micros: u32,
    /// The longest a peer may take to accept one message.
    send_limit: Duration,
    /// Whether a message may have been sent in part: nothing after it would be understood.
    torn: bool,
    out: Vec<u8>,
    payload: Vec<u8>,
    /// The hasher of the Pages frame being received, fed with its descriptors.
    runs_hasher: Option<FrameHasher>,
}

impl StreamLink {
    pub(crate) fn new(
        connection: Connection,
        from: Side,
        memory_pages: u64,
        send_limit: Duration,
    ) -> Self {
        Self {
            connection,
            from,
            memory_pages,
            spin_micros: 0,
            send_limit,
            torn: false,
            out: Vec::new(),
            payload: Vec::new(),
            runs_hasher: None,
        }
    }

    /// Connects to a destination: both connections, shaken hands.
    pub(crate) fn connect(
        to: &Address,
        config: &SourceConfig,
        memory_pages: u64,
        stop: &dyn Fn() -> bool,
    ) -> Result<(Self, UrgentLink), MigrationError> {
        let session =
            SessionId::random().map_err(|e| MigrationError::os("cannot make a session id", e))?;
        let pair = handshake::connect_pair(to, session, config.connect_limit, stop)?;
        Ok((
            Self::new(
                pair.stream,
                Side::Destination,
                memory_pages,
                config.answer_limit,
            ),
            UrgentLink::new(pair.urgent),
        ))
    }

    /// Waits for a source: both connections, shaken hands.
    pub(crate) fn accept(
        listener: &Listener,
        config: &DestinationConfig,
        stop: &dyn Fn() -> bool,
        stranger: &mut dyn FnMut(&Stranger),
    ) -> Result<(Self, UrgentLink), MigrationError> {
        let pair = handshake::accept_speaking(listener, stop, stranger)?;
        Ok((
            Self::new(pair.stream, Side::Source, 0, config.silence_limit),
            UrgentLink::new(pair.urgent),
        ))
    }

    /// Frames from now on are about a VM of this size.
    pub(crate) fn set_memory_pages(&mut self, pages: u64) {
        self.memory_pages = pages;
    }

    /// Readers spin this long for the next byte before they sleep.
    pub(crate) fn set_spin(&mut self, micros: u32) {
        self.spin_micros = micros;
    }

    pub(crate) fn shutdown(&self) {
        self.connection.shutdown();
    }

    pub(crate) fn send(&mut self, frame: &Frame) -> Result<(), MigrationError> {
        frame.encode(&mut self.out)?;
        let sent = self
            .connection
            .write_all(&self.out, &Wait::block("frame").within(self.send_limit));
        self.sent(sent)
    }

    /// Sends frames in one go.
    pub(crate) fn send_all(&mut self, frames: &[Frame]) -> Result<(), MigrationError> {
        let mut all = Vec::new();
        for frame in frames {
            frame.encode(&mut self.out)?;
            all.extend_from_slice(&self.out);
        }
        let sent = self
            .connection
            .write_all(&all, &Wait::block("frames").within(self.send_limit));
        self.sent(sent)
    }

    /// Sends a frame that is encoded already, unless `stop` returns true while the peer does not
    /// take it: then, as after every error of sending, no frame follows it.
    pub(crate) fn send_vectored(
        &mut self,
        slices: &[IoSlice<'_>],
        stop: &dyn Fn() -> bool,
    ) -> Result<(), MigrationError> {
        let wait = Wait::block("Pages frame")
            .within(self.send_limit)
            .unless(stop);
        let sent = self.connection.write_all_vectored(slices, &wait);
        self.sent(sent)
    }

    /// What an outcome of sending means. A peer that gives up says why and closes: the reason is
    /// what counts, not that the rest could not be sent.
    fn sent(&mut self, outcome: Result<(), ChannelError>) -> Result<(), MigrationError> {
        let Err(error) = outcome else { return Ok(()) };
        self.torn = true;
        let error = MigrationError::from(error);
        if !error.is_lost() {
            return Err(error);
        }
        // What the peer said before it gave up comes first.
        loop {
            match self.receive_any(REASON_LIMIT, never()) {
                Ok(Received::Frame(_)) => {}
                Err(
                    reason @ (MigrationError::PeerGaveUp { .. } | MigrationError::PeerCancelled),
                ) => return Err(reason),
                Ok(Received::Pages(_)) | Err(_) => return Err(error),
            }
        }
    }

    /// Waits until a frame has begun to come, or the peer has ended, for at most `limit`.
    pub(crate) fn wait_for_frame(
        &self,
        limit: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<bool, MigrationError> {
        let wait = Wait::block("frame").within(limit).unless(stop);
        match self.connection.wait_readable(&wait) {
            Err(ChannelError::TimedOut { .. }) => Ok(false),
            Err(error) => Err(error.into()),
            Ok(()) => Ok(true),
        }
    }

    /// Fails if the peer has spoken or ended although nothing is due from it. Does not wait.
    pub(crate) fn check_silent(&mut self) -> Result<(), MigrationError> {
        if !self.wait_for_frame(Duration::ZERO, never())? {
            return Ok(());
        }
        let found = self.receive(REASON_LIMIT, never())?;
        Err(self.unexpected("nothing", &found))
    }

    /// The next frame, which must not be of pages.
    pub(crate) fn receive(
        &mut self,
        limit: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<Frame, MigrationError> {
        match self.receive_any(limit, stop)? {
            Received::Frame(frame) => Ok(frame),
            Received::Pages(_) => Err(MigrationError::Peer(
                "it sent pages where none belong".into(),
            )),
        }
    }

    /// The next frame.
    pub(crate) fn receive_any(
        &mut self,
        limit: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<Received, MigrationError> {
        let wait = Wait::block("frame")
            .within(limit)
            .unless(stop)
            .spinning(self.spin_micros);
        let mut head = [0; HEADER_BYTES];
        self.connection.read_exact(&mut head, &wait)?;
        let header = FrameHeader::decode(&head, self.from)?;
        if header.frame_type == FrameType::Pages {
            return Ok(Received::Pages(header));
        }
        // Bounded by the type's own limit, which `decode` checked.
        self.payload.resize(header.payload_len as usize, 0);
        if !self.payload.is_empty() {
            self.connection
                .read_exact(&mut self.payload, &wait.mid_message())?;
        }
        match Frame::decode(&header, &self.payload, self.memory_pages)? {
            Frame::Error(error) => Err(MigrationError::PeerGaveUp {
                code: error.code(),
                message: error.message().to_owned(),
            }),
            Frame::Cancel => Err(MigrationError::PeerCancelled),
            frame => Ok(Received::Frame(frame)),
        }
    }

    /// The descriptors of a Pages frame.
    pub(crate) fn receive_runs(
        &mut self,
        header: &FrameHeader,
        memory_pages: u64,
        limit: Duration,
    ) -> Result<RunList, MigrationError> {
        let len = RunList::descriptors_len(header)?;
        self.payload.resize(len, 0);
        let wait = Wait::block("page descriptors").within(limit).mid_message();
        self.connection.read_exact(&mut self.payload, &wait)?;
        let list = RunList::decode(header, &self.payload, memory_pages)?;
        let mut hasher = header.hasher();
        hasher.update(&self.payload);
        self.runs_hasher = Some(hasher);
        Ok(list)
    }

    /// The hasher of the frame whose descriptors were received last, to be fed with its data.
    ///
    /// # Panics
    /// If none was received.
    pub(crate) fn take_runs_hasher(&mut self) -> FrameHasher {
        self.runs_hasher
            .take()
            .expect("descriptors come before data")
    }

    /// Receives the data of a Pages frame into memory given by address.
    ///
    /// # Safety
    /// As [`Connection::read_exact_raw`].
    pub(crate) unsafe fn receive_raw(
        &self,
        pieces: &[RawSlice],
        limit: Duration,
    ) -> Result<(), MigrationError> {
        let wait = Wait::block("page data").within(limit).mid_message();
        // SAFETY: the caller's contract.
        unsafe { self.connection.read_exact_raw(pieces, &wait)? };
        Ok(())
    }

    /// Receives the data of a Pages frame into a buffer.
    pub(crate) fn receive_exact(
        &self,
        buffer: &mut [u8],
        limit: Duration,
    ) -> Result<(), MigrationError> {
        if buffer.is_empty() {
            return Ok(());
        }
        let wait = Wait::block("page data").within(limit).mid_message();
        Ok(self.connection.read_exact(buffer, &wait)?)
    }

    /// The error for a frame that does not belong here.
    pub(crate) fn unexpected(&self, expected: &str, found: &Frame) -> MigrationError {
        MigrationError::Peer(format!(
            "{expected} was due, and it sent {}",
            found.frame_type()
        ))
    }

    /// Tells the peer why this side gives up. It may be gone: then nobody wants to know.
    pub(crate) fn say(&mut self, code: ErrorCode, message: &str) {
        let frame = Frame::Error(ErrorMessage::new(code, message));
        self.say_frame(&frame);
    }

    pub(crate) fn say_error(&mut self, code: ErrorCode, error: &dyn Display) {
        self.say(code, &error.to_string());
    }

    pub(crate) fn say_cancel(&mut self) {
        self.say_frame(&Frame::Cancel);
    }

    fn say_frame(&mut self, frame: &Frame) {
        if !self.torn && frame.encode(&mut self.out).is_ok() {
            let wait = Wait::block("last word").within(LAST_WORD_LIMIT);
            let _ = self.connection.write_all(&self.out, &wait);
        }
    }

    /// Ends the connection so that the peer can still read the last word: what it sent and nobody
    /// read would otherwise turn into a reset that overtakes it.
    pub(crate) fn close_after_word(&self) {
        self.connection.shutdown_write();
        let mut rest = [0; 4096];
        let deadline = std::time::Instant::now() + LAST_WORD_LIMIT;
        while std::time::Instant::now() < deadline {
            match self.connection.recv_pending(&mut rest, "end") {
                Ok(Some(_)) => {}
                Ok(None) => {
                    let _ = self
                        .connection
                        .wait_readable(&Wait::block("end").within(Duration::from_millis(20)));
                }
                Err(_) => break,
            }
        }
        self.connection.shutdown();
    }
}

/// The urgent connection.
pub(crate) struct UrgentLink {
    connection: Connection,
}

impl UrgentLink {
    fn new(connection: Connection) -> Self {
        Self { connection }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    pub(crate) fn shutdown(&self) {
        self.connection.shutdown();
    }

    pub(crate) fn send(&self, slices: &[IoSlice<'_>]) -> Result<(), MigrationError> {
        Ok(self.connection.write_all_vectored(
            slices,
            &Wait::block("urgent reply").within(URGENT_SEND_LIMIT),
        )?)
    }

    /// Sends a request; several threads may do so at once.
    pub(crate) fn send_small(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        Ok(self
            .connection
            .send_small(bytes, &Wait::block("urgent request").within(REQUEST_LIMIT))?)
    }

    pub(crate) fn receive_pending(
        &self,
        buffer: &mut [u8],
    ) -> Result<Option<usize>, MigrationError> {
        Ok(self.connection.recv_pending(buffer, "urgent reply")?)
    }

    /// The requests that come, one after the other.
    pub(crate) fn requests(&self, memory_pages: u64) -> Requests<'_> {
        Requests {
            link: self,
            memory_pages,
            buffer: [0; 64 * URGENT_BYTES],
            at: 0,
            filled: 0,
        }
    }
}

/// Requests on the urgent connection, received as many at a time as have come.
pub(crate) struct Requests<'a> {
    link: &'a UrgentLink,
    memory_pages: u64,
    buffer: [u8; 64 * URGENT_BYTES],
    at: usize,
    filled: usize,
}

impl Requests<'_> {
    /// The next request; waits as long as the connection lasts.
    pub(crate) fn next(&mut self) -> Result<UrgentMessage, MigrationError> {
        loop {
            if let Some(bytes) = self.buffer[self.at..self.filled].first_chunk::<URGENT_BYTES>() {
                let message = UrgentMessage::decode(bytes, Side::Destination, self.memory_pages)?;
                self.at += URGENT_BYTES;
                return Ok(message);
            }
            self.buffer.copy_within(self.at..self.filled, 0);
            self.filled -= self.at;
            self.at = 0;
            let connection = &self.link.connection;
            match connection.recv_pending(&mut self.buffer[self.filled..], "urgent request")? {
                Some(got) => self.filled += got,
                None => connection
                    .wait_readable(&Wait::block("urgent request").spinning(URGENT_SPIN_MICROS))?,
            }
        }
    }
}
