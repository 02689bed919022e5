//! A destination played by hand, against the library's source.

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{READY, Took, encoded, last_word, patient, take};
use pageferry_addr::RamPage;
use pageferry_migration::channel::{Connection, Listener};
use pageferry_migration::handshake::accept_pair;
use pageferry_migration::wire::{
    DrainCounts, Frame, MissingBitmap, Pass, Side, SwitchOver, UrgentMessage,
};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Both connections of one migration.
pub(crate) struct Played {
    pub(crate) stream: Connection,
    pub(crate) urgent: Connection,
    pub(crate) memory_pages: u64,
    /// The pages that the bitmap named.
    pub(crate) missing: Vec<u64>,
    /// Pages that came on the stream after switch-over: with bytes, and as zero.
    pub(crate) pushed: (u64, u64),
    /// Set by the test when the source has ended.
    pub(crate) over: Arc<AtomicBool>,
}

impl Played {
    /// Accepts a source, as Pageferry does.
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
        self.stream.write_all(bytes, &patient("frame")).unwrap();
    }

    pub(crate) fn take(&self) -> Took {
        take(&self.stream, Side::Source, self.memory_pages).unwrap()
    }

    /// Takes the offer.
    pub(crate) fn take_setup(&mut self) {
        let Took::Frame(Frame::Setup(setup)) = self.take() else {
            panic!("Setup comes first")
        };
        self.memory_pages = setup.memory_pages();
    }

    /// Takes the offer and accepts it.
    pub(crate) fn set_up(&mut self) {
        self.take_setup();
        self.send(&Frame::SetupAck);
        self.send(&READY);
    }

    /// Takes everything up to the end of a pass, unconfirmed.
    pub(crate) fn take_pass(&self) -> Pass {
        loop {
            match self.take() {
                Took::Pages(_) => {}
                Took::Frame(Frame::PassEnd(pass)) => return pass,
                Took::Frame(other) => panic!("a pass, not {other:?}"),
            }
        }
    }

    /// Takes everything up to SwitchOver, confirming passes.
    pub(crate) fn take_switch_over(&mut self) -> SwitchOver {
        loop {
            match self.take() {
                Took::Frame(Frame::PassEnd(pass)) => self.send(&Frame::PassAck(pass)),
                Took::Frame(Frame::MissingBitmap(bitmap)) => self.note_missing(&bitmap),
                Took::Frame(Frame::SwitchOver(switch_over)) => {
                    assert_eq!(self.missing.len() as u64, switch_over.missing_pages);
                    return switch_over;
                }
                Took::Pages(_) | Took::Frame(Frame::VcpuState(_)) => {}
                Took::Frame(other) => panic!("not {other:?} before SwitchOver"),
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

    /// Everything up to the moment the guest would run here, said and heard.
    pub(crate) fn start(&mut self) {
        self.set_up();
        self.take_switch_over();
        self.send(&Frame::Running { started_at_ns: 1 });
        let Took::Frame(Frame::RunningAck) = self.take() else {
            panic!("RunningAck is due")
        };
    }

    /// Asks for a page. If it is on its way on the stream already, no answer comes.
    pub(crate) fn ask(&self, page: u64) {
        self.urgent
            .write_all(&UrgentMessage::request(RamPage(page)), &patient("request"))
            .unwrap();
    }

    /// Takes the push up to and with DrainEnd.
    pub(crate) fn take_whole_push(&mut self) -> DrainCounts {
        loop {
            match self.take() {
                Took::Pages(list) => {
                    self.pushed.0 += u64::from(list.data_pages());
                    self.pushed.1 += list.zero_pages();
                }
                Took::Frame(Frame::DrainEnd(counts)) => return counts,
                Took::Frame(other) => panic!("DrainEnd was due, not {other:?}"),
            }
        }
    }

    /// Ends both connections.
    pub(crate) fn close(&self) {
        self.stream.shutdown();
        self.urgent.shutdown();
    }

    /// Whether the source has ended the stream, without reading what it sent before.
    pub(crate) fn has_ended(&self) -> bool {
        let mut fd = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        poll(&mut fd, Some(&Timespec::default())).unwrap() > 0
    }

    /// What the source says last.
    pub(crate) fn last_word(&self) -> Option<Frame> {
        last_word(&self.stream, Side::Source, self.memory_pages)
    }
}
