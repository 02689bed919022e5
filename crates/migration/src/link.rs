#![expect(
    unsafe_code,
    reason = "passes on the contract of receiving into memory given by address"
)]
//! The two connections of a migration, for its phases: they send and receive frames, with one error
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

/// The longest time in which a peer must accept an urgent page.
const URGENT_SEND_LIMIT: Duration = Duration::from_secs(30);
/// The longest search for the reason that a peer sent before it closed the connection.
pub(crate) const REASON_LIMIT: Duration = Duration::from_millis(50);
/// The longest wait of a side that gave up for the peer to read the reason.
const FINAL_FRAME_LIMIT: Duration = Duration::from_millis(200);
/// The spin time of the source's urgent thread before it sleeps, in microseconds. While a guest
/// faults, a request comes every few dozen microseconds. A wake-up would delay each by 70 more.
pub const URGENT_SPIN_MICROS: u32 = 100;
/// The spin time of readers of the stream, in microseconds. Near switch-over each wake-up would be
/// part of the blackout. In the background push, a sleeping reader would make the sender wait for
/// room.
pub(crate) const SWITCH_OVER_SPIN_MICROS: u32 = 100;
/// The longest wait of a request for room in the socket's buffer. There is room unless the source
/// does not read.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// A stop condition that is never true.
pub(crate) fn never() -> &'static dyn Fn() -> bool {
    &|| false
}

/// Returns the wire numbers of an engine and of its guests' ISA.
pub(crate) fn wire_engine(engine: Engine) -> (wire::Engine, wire::Isa) {
    match engine {
        Engine::Kvm => (wire::Engine::Kvm, wire::Isa::X86_64),
        Engine::Soft => (wire::Engine::Soft, wire::Isa::Riscv64),
    }
}

/// Returns the engine with this wire number.
pub(crate) fn machine_engine(engine: wire::Engine) -> Engine {
    match engine {
        wire::Engine::Kvm => Engine::Kvm,
        wire::Engine::Soft => Engine::Soft,
    }
}

impl From<ChannelError> for MigrationError {
    fn from(error: ChannelError) -> Self {
        match error {
            // A message that ends early is not damaged: the connection was cut.
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

/// A message of the stream.
pub(crate) enum Received {
    /// The header of a Pages frame. Its descriptors and data are not received yet.
    Pages(FrameHeader),
    /// A complete frame of another type.
    Frame(Frame),
}

/// The stream connection.
pub(crate) struct StreamLink {
    connection: Connection,
    from: Side,
    memory_pages: u64,
    spin_micros: u32,
    /// The longest time in which a peer must accept one message.
    send_limit: Duration,
    /// Whether a message may have been sent in part. The peer would not understand anything after
    /// it.
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

    /// Connects to a destination. Returns both connections after the handshake.
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

    /// Waits for a source. Returns both connections after the handshake.
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

    /// Sets the VM's memory size, for the checks of received frames.
    pub(crate) fn set_memory_pages(&mut self, pages: u64) {
        self.memory_pages = pages;
    }

    /// Sets the spin time of readers before they sleep.
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

    /// Sends frames in one write.
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

    /// Sends an encoded frame. If the peer does not accept it and `stop` returns true, the send
    /// fails. No frame may follow a failed send.
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

    /// Replaces the error of a failed send by the reason that the peer sent, if there is one. A
    /// peer that gives up sends its reason and closes.
    fn sent(&mut self, outcome: Result<(), ChannelError>) -> Result<(), MigrationError> {
        let Err(error) = outcome else { return Ok(()) };
        self.torn = true;
        let error = MigrationError::from(error);
        if !error.is_lost() {
            return Err(error);
        }
        // Frames that the peer sent before it gave up come first.
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

    /// Waits until a frame has begun to arrive or the peer has closed, for at most `limit`.
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

    /// Fails if the peer has sent something or has closed. Does not wait.
    pub(crate) fn check_silent(&mut self) -> Result<(), MigrationError> {
        if !self.wait_for_frame(Duration::ZERO, never())? {
            return Ok(());
        }
        let found = self.receive(REASON_LIMIT, never())?;
        Err(self.unexpected("nothing", &found))
    }

    /// Receives the next frame, which must not be a Pages frame.
    pub(crate) fn receive(
        &mut self,
        limit: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<Frame, MigrationError> {
        match self.receive_any(limit, stop)? {
            Received::Frame(frame) => Ok(frame),
            Received::Pages(_) => Err(MigrationError::Peer(
                "it sent Pages where they are not due".into(),
            )),
        }
    }

    /// Receives the next frame.
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
        // `decode` checked the length against the bound of the type.
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

    /// Receives the descriptors of a Pages frame.
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

    /// Takes the hasher of the last received descriptors. The caller feeds it the frame's data.
    ///
    /// # Panics
    /// If no descriptors were received.
    pub(crate) fn take_runs_hasher(&mut self) -> FrameHasher {
        self.runs_hasher
            .take()
            .expect("descriptors come before data")
    }

    /// Receives the data of a Pages frame into memory given by address.
    ///
    /// # Safety
    /// The contract of [`Connection::read_exact_raw`].
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

    /// Returns the error for a frame that is not due.
    pub(crate) fn unexpected(&self, expected: &str, found: &Frame) -> MigrationError {
        MigrationError::Peer(format!(
            "it sent {} where {expected} was due",
            found.frame_type()
        ))
    }

    /// Sends the reason why this side gives up. A peer that is gone does not need it.
    pub(crate) fn send_reason(&mut self, code: ErrorCode, message: &str) {
        let frame = Frame::Error(ErrorMessage::new(code, message));
        self.send_final(&frame);
    }

    pub(crate) fn send_error(&mut self, code: ErrorCode, error: &dyn Display) {
        self.send_reason(code, &error.to_string());
    }

    pub(crate) fn send_cancel(&mut self) {
        self.send_final(&Frame::Cancel);
    }

    fn send_final(&mut self, frame: &Frame) {
        if !self.torn && frame.encode(&mut self.out).is_ok() {
            let wait = Wait::block("final frame").within(FINAL_FRAME_LIMIT);
            let _ = self.connection.write_all(&self.out, &wait);
        }
    }

    /// Closes the connection so that the peer can still read the final frame. Closing with unread
    /// bytes would send a reset, which can overtake that frame.
    pub(crate) fn close_gracefully(&self) {
        self.connection.shutdown_write();
        let mut rest = [0; 4096];
        let deadline = std::time::Instant::now() + FINAL_FRAME_LIMIT;
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

    /// Sends a request. Several threads may call it at once.
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

    /// Returns the incoming requests, one after the other.
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

/// The requests on the urgent connection. Each receive takes all that have arrived.
pub(crate) struct Requests<'a> {
    link: &'a UrgentLink,
    memory_pages: u64,
    buffer: [u8; 64 * URGENT_BYTES],
    at: usize,
    filled: usize,
}

impl Requests<'_> {
    /// Waits for the next request as long as the connection lasts.
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
