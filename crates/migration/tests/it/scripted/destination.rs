//! A scripted destination, against the library's source.

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Message, READY, encoded, last_frame, take, within_limit};
use pageferry_addr::RamPage;
use pageferry_migration::channel::{Connection, Listener};
use pageferry_migration::handshake::accept_pair;
use pageferry_migration::wire::{
    DrainCounts, Frame, MissingBitmap, Pass, Side, SwitchOver, UrgentMessage,
};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Both connections of one migration.
pub(crate) struct ScriptedDestination {
    pub(crate) stream: Connection,
    pub(crate) urgent: Connection,
    pub(crate) memory_pages: u64,
    /// The pages of the missing bitmap.
    pub(crate) missing: Vec<u64>,
    /// The pages received on the stream after switch-over: with bytes, and as zero.
    pub(crate) pushed: (u64, u64),
    /// Set by the test when the source has ended.
    pub(crate) over: Arc<AtomicBool>,
}

impl ScriptedDestination {
    /// Accepts a source.
    pub(crate) fn accept(listener: &Listener) -> Self {
        let pair = accept_pair(listener, Some(super::PATIENCE), &|| false, &mut |_| {}).unwrap();
        Self {
            stream: pair.stream,
            urgent: pair.urgent,
            memory_pages: 0,
            missing: Vec::new(),
            pushed: (0, 0),
            over: Arc::default(),
        }
    }

    pub(crate) fn send(&self, frame: &Frame) {
        self.send_bytes(&encoded(frame));
    }

    pub(crate) fn send_bytes(&self, bytes: &[u8]) {
        self.stream
            .write_all(bytes, &within_limit("frame"))
            .unwrap();
    }

    pub(crate) fn take(&self) -> Message {
        take(&self.stream, Side::Source, self.memory_pages).unwrap()
    }

    /// Receives the offer.
    pub(crate) fn take_setup(&mut self) {
        let Message::Frame(Frame::Setup(setup)) = self.take() else {
            panic!("Setup comes first")
        };
        self.memory_pages = setup.memory_pages();
    }

    /// Receives the offer and accepts it.
    pub(crate) fn set_up(&mut self) {
        self.take_setup();
        self.send(&Frame::SetupAck);
        self.send(&READY);
    }

    /// Accepts the offer, and is ready at the end of the first pass. If `late`, it is ready only
    /// after it has waited for longer than the pass took.
    pub(crate) fn set_up_late(&mut self, late: bool) {
        self.take_setup();
        let began = Instant::now();
        self.send(&Frame::SetupAck);
        let pass = self.take_pass();
        if !late {
            self.send(&READY);
        }
        self.send(&Frame::PassAck(pass));
        if late {
            std::thread::sleep(2 * began.elapsed() + Duration::from_secs(1));
            self.send(&READY);
        }
    }

    /// Receives everything up to the end of a pass, without an acknowledgement.
    pub(crate) fn take_pass(&self) -> Pass {
        loop {
            match self.take() {
                Message::Pages(_) => {}
                Message::Frame(Frame::PassEnd(pass)) => return pass,
                Message::Frame(other) => panic!("a pass, not {other:?}"),
            }
        }
    }

    /// Receives everything up to SwitchOver, and acknowledges passes.
    pub(crate) fn take_switch_over(&mut self) -> SwitchOver {
        loop {
            match self.take() {
                Message::Frame(Frame::PassEnd(pass)) => self.send(&Frame::PassAck(pass)),
                Message::Frame(Frame::MissingBitmap(bitmap)) => self.note_missing(&bitmap),
                Message::Frame(Frame::SwitchOver(switch_over)) => {
                    assert_eq!(self.missing.len() as u64, switch_over.missing_pages);
                    return switch_over;
                }
                Message::Pages(_) | Message::Frame(Frame::VcpuState(_)) => {}
                Message::Frame(other) => panic!("not {other:?} before SwitchOver"),
            }
        }
    }

    fn note_missing(&mut self, bitmap: &MissingBitmap) {
        for (word, bits) in (bitmap.first_word..).zip(&bitmap.words) {
            self.missing.extend(
                (0..64)
                    .filter(|bit| bits >> bit & 1 != 0)
                    .map(|bit| 64 * word + bit),
            );
        }
    }

    /// Runs the migration until the guest would run here: up to RunningAck.
    pub(crate) fn start(&mut self) {
        self.set_up();
        self.run_on();
    }

    /// Receives what is left up to the switch-over, and says that the guest runs.
    pub(crate) fn run_on(&mut self) {
        self.take_switch_over();
        self.send(&Frame::Running { started_at_ns: 1 });
        let Message::Frame(Frame::RunningAck) = self.take() else {
            panic!("RunningAck is due")
        };
    }

    /// Requests a page. If the source has sent it on the stream already, no answer follows.
    pub(crate) fn ask(&self, page: u64) {
        self.urgent
            .write_all(
                &UrgentMessage::request(RamPage(page)),
                &within_limit("request"),
            )
            .unwrap();
    }

    /// Receives the background push up to and including DrainEnd.
    pub(crate) fn take_whole_push(&mut self) -> DrainCounts {
        loop {
            match self.take() {
                Message::Pages(list) => {
                    self.pushed.0 += u64::from(list.data_pages());
                    self.pushed.1 += list.zero_pages();
                }
                Message::Frame(Frame::DrainEnd(counts)) => return counts,
                Message::Frame(other) => panic!("DrainEnd was due, not {other:?}"),
            }
        }
    }

    /// Closes both connections.
    pub(crate) fn close(&self) {
        self.stream.shutdown();
        self.urgent.shutdown();
    }

    /// Whether the source has closed the stream. Reads nothing.
    pub(crate) fn has_ended(&self) -> bool {
        let mut fd = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        poll(&mut fd, Some(&Timespec::default())).unwrap() > 0
    }

    /// Returns the last frame of the source.
    pub(crate) fn last_frame(&self) -> Option<Frame> {
        last_frame(&self.stream, Side::Source, self.memory_pages)
    }
}
