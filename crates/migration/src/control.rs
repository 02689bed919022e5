//! The control channel of one generation, as its supervisor uses it.
//!
//! **Guarantee.** No call waits. A frame that arrives in pieces is decoded when it is complete.
//! Frames that the peer does not take yet are kept in order. So a supervisor hears its peer while
//! it has much to say, and says `Alive` in time on its other channels. What a peer makes this side
//! keep is bounded: an answer beyond [`MAX_ANSWERS`] is an error, and so is a first frame that is
//! longer than any that opens a session.

use crate::error::MigrationError;
use crate::limits::Silence;
use crate::outbox::Outbox;
use crate::protocol_error::ProtocolError;
use crate::report::Protected;
use crate::session::{ChannelId, Generation};
use crate::wire::{
    Frame, FrameHeader, FrameType, HEADER_BYTES, MAX_DEVICE_STATES_BYTES, Role, Side, WireError,
};
use pageferry_transport::channel::{ChannelError, Connection, Origin};
use pageferry_transport::sleep_on;
use rustix::event::{PollFd, PollFlags};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The bytes that one receive takes.
const RECEIVE_BYTES: usize = 64 << 10;
/// The most bytes that one call receives without a frame for its caller. More are left for the next
/// call, so that a peer that only says `Alive` holds nobody up.
const RECEIVE_LIMIT: usize = 16 * RECEIVE_BYTES;
/// The most bytes of answers that a peer leaves unread, beside those in the socket's buffers. No
/// peer that reads comes near.
pub(crate) const MAX_ANSWERS: usize = 256 << 10;
/// The longest wait of a side that has ended for the peer to read its last frame.
const LAST_FRAME_LIMIT: Duration = Duration::from_millis(200);

/// How long the loss of another channel waits for the peer's last word on the control channel.
const LAST_WORD_LIMIT: Duration = Duration::from_millis(200);

/// A channel that was lost before the hand-over, while the peer may have said why on the control
/// channel. A peer that ends a migration says why and closes all channels, and the networks of two
/// connections keep no order.
#[derive(Debug, Default)]
pub(crate) struct PendingLoss(Option<(Instant, Loss)>);

/// A channel of a generation, and the reason for its loss.
pub(crate) type Loss = (Generation, ChannelId, MigrationError);

impl PendingLoss {
    /// Keeps the first loss.
    pub(crate) fn keep(&mut self, loss: Loss) {
        self.0.get_or_insert((Instant::now(), loss));
    }

    /// Takes the loss, if the peer has not said why for long enough.
    pub(crate) fn take_due(&mut self) -> Option<Loss> {
        let due = self
            .0
            .take_if(|(since, _)| since.elapsed() >= LAST_WORD_LIMIT);
        due.map(|(_, loss)| loss)
    }
}

/// Counts the open channels that were lost, each once, whichever side notices the loss first. The
/// other side may say so on the control channel before this side's thread ends.
#[derive(Debug, Default)]
pub(crate) struct LostChannels {
    count: u64,
    /// Those that this side counted and has not closed yet.
    noticed: Vec<ChannelId>,
}

impl LostChannels {
    /// The channels lost so far, control channels included.
    pub(crate) const fn count(&self) -> u64 {
        self.count
    }

    /// The control channel is lost.
    pub(crate) const fn control_lost(&mut self) {
        self.count += 1;
    }

    /// This side notices the loss of an open channel.
    pub(crate) fn noticed(&mut self, id: ChannelId) {
        if !self.noticed.contains(&id) {
            self.noticed.push(id);
            self.count += 1;
        }
    }

    /// An open channel is closed, as one side has noticed its loss.
    pub(crate) fn closed(&mut self, id: ChannelId) {
        self.noticed(id);
        self.noticed.retain(|open| *open != id);
    }

    /// The channels of a generation end with it. The ids of the next are new.
    pub(crate) fn end_generation(&mut self) {
        self.noticed.clear();
    }
}

/// A control channel.
pub(crate) struct ControlLink {
    connection: Arc<Connection>,
    pub(crate) generation: Generation,
    from: Side,
    memory_pages: u64,
    /// The bytes that DeviceState frames have brought so far, and the most that they may bring.
    device_bytes: (u64, u64),
    out: Outbox,
    scratch: Vec<u8>,
    input: Vec<u8>,
    decoded: usize,
    /// Whether the last receive stopped at its limit.
    more: bool,
    silence: Silence,
}

impl ControlLink {
    /// `from` is the peer's side. `memory_pages` is 0 before set-up.
    pub(crate) fn new(
        connection: Arc<Connection>,
        generation: Generation,
        from: Side,
        memory_pages: u64,
    ) -> Self {
        Self {
            connection,
            generation,
            from,
            memory_pages,
            device_bytes: (0, 0),
            out: Outbox::new("frame"),
            scratch: Vec::new(),
            input: Vec::new(),
            decoded: 0,
            more: false,
            silence: Silence::new(),
        }
    }

    /// Sets the VM's memory size, for the checks of received frames.
    pub(crate) fn set_memory_pages(&mut self, pages: u64) {
        self.memory_pages = pages;
    }

    /// Takes DeviceState frames from now on. Without this, their length is beyond its bound.
    pub(crate) fn expect_devices(&mut self) {
        self.device_bytes.1 = MAX_DEVICE_STATES_BYTES as u64;
    }

    pub(crate) fn peer(&self) -> &str {
        self.connection.peer()
    }

    /// What protects this channel, and whom it reaches.
    pub(crate) fn protection(&self) -> Protected {
        Protected {
            version: self.connection.version(),
            tls: self.connection.is_tls(),
            peer_name: self.connection.tls_name(),
        }
    }

    pub(crate) fn origin(&self) -> Origin {
        self.connection.origin()
    }

    pub(crate) fn connection(&self) -> Arc<Connection> {
        Arc::clone(&self.connection)
    }

    /// The connection, unless other threads have it too: then it is shut down.
    pub(crate) fn into_connection(self) -> Option<Connection> {
        Arc::try_unwrap(self.connection)
            .inspect_err(|shared| shared.shutdown())
            .ok()
    }

    /// Whether the next receive may find more than the descriptor shows.
    pub(crate) fn has_more(&self) -> bool {
        self.more
    }

    /// Whether bytes have arrived that no receive has taken.
    pub(crate) fn has_unread(&self) -> bool {
        self.more || self.connection.has_unread()
    }

    /// The bytes that the connection has not accepted.
    pub(crate) fn waiting(&self) -> usize {
        self.out.waiting()
    }

    /// Whether the peer has said nothing for longer than `patience`.
    pub(crate) fn is_silent(&self, patience: Duration) -> bool {
        // This side may have been late: then bytes wait.
        !self.more && self.silence.exceeds(patience) && !self.connection.has_unread()
    }

    /// Does not count the silence until now.
    pub(crate) fn forgive_silence(&mut self) {
        self.silence = Silence::new();
    }

    /// Whether a part of a frame has arrived.
    pub(crate) fn has_begun(&self) -> bool {
        self.decoded < self.input.len()
    }

    /// Queues a frame. [`Self::flush`] sends it.
    pub(crate) fn queue(&mut self, frame: &Frame) -> Result<(), MigrationError> {
        frame.encode(&mut self.scratch)?;
        self.out.push(&self.scratch);
        Ok(())
    }

    /// Sends a frame, or keeps it until the peer takes it.
    pub(crate) fn send(&mut self, frame: &Frame) -> Result<(), MigrationError> {
        self.queue(frame)?;
        self.flush()
    }

    /// As [`Self::send`], for a frame that the peer has caused.
    ///
    /// # Errors
    /// [`ProtocolError::Unread`] if the peer has left too many of them unread.
    pub(crate) fn answer(&mut self, frame: &Frame) -> Result<(), MigrationError> {
        if self.out.waiting() > MAX_ANSWERS {
            return Err(ProtocolError::Unread.into());
        }
        self.send(frame)
    }

    /// As [`Self::send`], and waits until the peer has taken most of it: for frames that are too
    /// many to be kept.
    ///
    /// # Errors
    /// [`MigrationError::Timeout`] if the peer takes nothing for as long as `patience`.
    pub(crate) fn send_slowly(
        &mut self,
        frame: &Frame,
        patience: Duration,
    ) -> Result<(), MigrationError> {
        self.send(frame)?;
        let began = Instant::now();
        while self.out.waiting() > MAX_ANSWERS {
            if self.out.silence().min(began.elapsed()) > patience {
                return Err(MigrationError::Timeout(
                    "the control channel to take a frame",
                ));
            }
            let nap = Duration::from_millis(10);
            sleep_on(&mut [PollFd::new(self, PollFlags::OUT)], nap);
            self.flush()?;
        }
        Ok(())
    }

    /// Sends as much as the peer takes now.
    pub(crate) fn flush(&mut self) -> Result<(), MigrationError> {
        self.out.flush(&self.connection)
    }

    /// Says `Alive` if nothing was said for `interval`.
    pub(crate) fn keep_alive(&mut self, interval: Duration) -> Result<(), MigrationError> {
        if self.out.silence() < interval || !self.out.is_empty() {
            return self.flush();
        }
        self.send(&Frame::Alive)
    }

    /// Returns the next frame that has arrived, except `Alive`.
    pub(crate) fn receive(&mut self) -> Result<Option<Frame>, MigrationError> {
        let mut received = 0;
        self.more = false;
        loop {
            if let Some(frame) = self.decode()? {
                if frame == Frame::Alive {
                    continue;
                }
                return Ok(Some(frame));
            }
            if received >= RECEIVE_LIMIT {
                self.more = true;
                return Ok(None);
            }
            self.input.drain(..self.decoded);
            self.decoded = 0;
            let filled = self.input.len();
            self.input.resize(filled + RECEIVE_BYTES, 0);
            let got = self
                .connection
                .recv_pending(&mut self.input[filled..], "frame");
            self.input
                .truncate(filled + got.as_ref().ok().copied().flatten().unwrap_or(0));
            match got {
                Ok(None) => return Ok(None),
                Ok(Some(got)) => received += got,
                Err(ChannelError::Closed { .. }) if filled > 0 => {
                    let got = filled as u64;
                    let error = WireError::Truncated {
                        what: "frame",
                        needed: self.needed(),
                        got,
                    };
                    return Err(MigrationError::LinkLost(error.to_string()));
                }
                Err(error) => return Err(error.into()),
            }
            self.silence = Silence::new();
        }
    }

    /// The length of the frame that has arrived in part, as far as it is known.
    fn needed(&self) -> u64 {
        let head = self.input.first_chunk::<HEADER_BYTES>();
        let header = head.and_then(|head| FrameHeader::decode(head, self.from, Role::Control).ok());
        let payload = header.map_or(0, |header| header.payload_len);
        HEADER_BYTES as u64 + u64::from(payload)
    }

    fn decode(&mut self) -> Result<Option<Frame>, MigrationError> {
        let bytes = &self.input[self.decoded..];
        let Some(head) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = FrameHeader::decode(head, self.from, Role::Control)?;
        // Before set-up, nobody knows the peer.
        if self.memory_pages == 0 && header.payload_len > FrameType::Setup.payload_bounds().1 {
            return Err(WireError::TooLong {
                what: header.frame_type.name(),
                len: header.payload_len.into(),
                max: FrameType::Setup.payload_bounds().1.into(),
            }
            .into());
        }
        let (brought, max) = self.device_bytes;
        let mut device_bytes = brought;
        if header.frame_type == FrameType::DeviceState {
            device_bytes += u64::from(header.payload_len);
            if device_bytes > max {
                let what = "all DeviceState frames";
                let len = device_bytes;
                return Err(WireError::TooLong { what, len, max }.into());
            }
        }
        let end = HEADER_BYTES + header.payload_len as usize;
        let Some(payload) = bytes.get(HEADER_BYTES..end) else {
            return Ok(None);
        };
        let frame = Frame::decode(&header, payload, self.memory_pages)?;
        self.decoded += end;
        self.device_bytes.0 = device_bytes;
        Ok(Some(frame))
    }

    /// The events to poll for.
    pub(crate) fn interest(&self) -> PollFlags {
        if self.out.is_sent() {
            PollFlags::IN
        } else {
            PollFlags::IN | PollFlags::OUT
        }
    }

    pub(crate) fn shutdown(&self) {
        self.connection.shutdown();
    }

    /// Sends what is queued, and closes so that the peer can still read it. Closing with unread
    /// bytes would send a reset, which can overtake the last frame.
    pub(crate) fn close_gracefully(&mut self) {
        let deadline = Instant::now() + LAST_FRAME_LIMIT;
        let nap = Duration::from_millis(1);
        while Instant::now() < deadline && self.flush().is_ok() {
            if self.interest() == PollFlags::IN {
                break;
            }
            std::thread::sleep(nap);
        }
        self.connection.shutdown_write();
        let mut rest = [0; 4096];
        while Instant::now() < deadline {
            match self.connection.recv_pending(&mut rest, "end") {
                Ok(Some(_)) => {}
                Ok(None) => std::thread::sleep(nap),
                Err(_) => break,
            }
        }
        self.connection.shutdown();
    }
}

impl AsFd for ControlLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::MissingRuns;

    fn link() -> (ControlLink, Connection) {
        let (near, far) = Connection::pair().unwrap();
        let pages = 1 << 20;
        let link = ControlLink::new(Arc::new(near), 1, Side::Destination, pages);
        (link, far)
    }

    /// A frame of many runs.
    fn long() -> Frame {
        let runs = (0..60_000).map(|n| 2 * n..2 * n + 1);
        Frame::Missing(MissingRuns::frames(runs).next().unwrap())
    }

    /// This side was late, as on a busy host, and the peer was not.
    #[test]
    fn a_peer_whose_bytes_wait_to_be_received_is_not_silent() {
        let (mut link, far) = link();
        let patience = Duration::from_millis(5);
        let wait = pageferry_transport::channel::Wait::block("Alive");
        let mut bytes = Vec::new();
        Frame::Alive.encode(&mut bytes).unwrap();
        far.write_all(&bytes, &wait).unwrap();
        std::thread::sleep(4 * patience);
        assert!(!link.is_silent(patience));
        assert!(matches!(link.receive(), Ok(None)));
        std::thread::sleep(4 * patience);
        assert!(link.is_silent(patience));
    }

    #[test]
    fn frames_that_are_sent_slowly_wait_for_a_peer_that_does_not_read() {
        let (mut link, _far) = link();
        let patience = Duration::from_millis(300);
        let mut bytes = Vec::new();
        long().encode(&mut bytes).unwrap();
        let error = loop {
            let began = Instant::now();
            let sent = link.send_slowly(&long(), patience);
            assert!(link.waiting() <= MAX_ANSWERS + bytes.len());
            if let Err(error) = sent {
                assert!(began.elapsed() >= patience);
                break error;
            }
        };
        assert!(matches!(error, MigrationError::Timeout(_)), "{error}");
    }

    #[test]
    fn frames_that_are_sent_slowly_arrive_whole_at_a_slow_peer() {
        let (mut link, far) = link();
        let mut bytes = Vec::new();
        long().encode(&mut bytes).unwrap();
        let reader = std::thread::spawn(move || {
            let wait =
                pageferry_transport::channel::Wait::block("frames").within(Duration::from_secs(60));
            let mut received = vec![0; 8 * bytes.len()];
            for some in received.chunks_mut(32 << 10) {
                std::thread::sleep(Duration::from_millis(1));
                far.read_exact(some, &wait).unwrap();
            }
            assert!(received.chunks(bytes.len()).all(|frame| frame == bytes));
        });
        for _ in 0..8 {
            link.send_slowly(&long(), Duration::from_secs(60)).unwrap();
        }
        while link.waiting() > 0 {
            link.flush().unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        reader.join().unwrap();
    }
}
