//! A scripted destination, against the library's source.

use super::{ALLOCATED, Message, encoded, last_frame, say, say_alive, take};
use crate::scripted::source::urgent;
use pageferry_addr::RamPage;
use pageferry_migration::wire::{
    ChannelKey, DestinationStage, Frame, FrameType, MissingRuns, Pass, Role, Side, SourceStage,
    SwitchOver, Text, UrgentMessage,
};
use pageferry_testkit::handshake::{Destination as Host, bulk};
use pageferry_transport::channel::Connection;
use std::collections::BTreeSet;

/// The destination's end of one session.
pub(crate) struct ScriptedDestination<'a> {
    host: &'a Host,
    pub(crate) generation: u32,
    pub(crate) control: Connection,
    bulk: Option<Connection>,
    urgent: Option<Connection>,
    pub(crate) memory_pages: u64,
    /// The missing pages that have not come.
    pub(crate) missing: BTreeSet<u64>,
    /// The number of missing pages at the switch-over.
    pub(crate) missing_at_start: u64,
    /// The frames received on the bulk channel that is open.
    pub(crate) frames: u64,
    /// The pages that were confirmed.
    pub(crate) confirmed: u32,
}

impl<'a> ScriptedDestination<'a> {
    /// Accepts a source.
    pub(crate) fn accept(host: &'a Host) -> Self {
        Self {
            host,
            generation: 1,
            control: host.take(ChannelKey::control(1)),
            bulk: None,
            urgent: None,
            memory_pages: 0,
            missing: BTreeSet::new(),
            missing_at_start: 0,
            frames: 0,
            confirmed: 0,
        }
    }

    /// Waits for the other channels of the generation.
    pub(crate) fn take_channels(&mut self) {
        self.take_bulk(1);
        self.take_urgent(1);
    }

    pub(crate) fn take_bulk(&mut self, incarnation: u32) {
        self.bulk = Some(self.host.take(bulk(0, self.generation, incarnation)));
        self.frames = 0;
    }

    pub(crate) fn take_urgent(&mut self, incarnation: u32) {
        self.urgent = Some(self.host.take(urgent(0, self.generation, incarnation)));
    }

    pub(crate) fn bulk(&self) -> &Connection {
        self.bulk.as_ref().expect("an open channel")
    }

    pub(crate) fn urgent(&self) -> &Connection {
        self.urgent.as_ref().expect("an open channel")
    }

    pub(crate) fn send(&self, frame: &Frame) {
        self.send_bytes(&encoded(frame));
    }

    pub(crate) fn send_bytes(&self, bytes: &[u8]) {
        say(&self.control, bytes);
    }

    pub(crate) fn take(&self) -> Frame {
        let taken = take(
            &self.control,
            Side::Source,
            Role::Control,
            self.memory_pages,
        );
        match taken.unwrap() {
            Message::Frame(frame) => frame,
            Message::Pages(_) => unreachable!("the header was checked"),
        }
    }

    pub(crate) fn expect(&self, due: FrameType) -> Frame {
        let frame = self.take();
        assert_eq!(frame.frame_type(), due, "{frame:?}");
        frame
    }

    /// Receives the offer.
    pub(crate) fn take_setup(&mut self) {
        let Frame::Setup(setup) = self.expect(FrameType::Setup) else {
            unreachable!()
        };
        self.memory_pages = setup.memory_pages();
    }

    /// Receives the offer and accepts it. The memory is not allocated yet.
    pub(crate) fn acknowledge(&mut self) {
        self.take_setup();
        self.send(&Frame::SetupAck { keeps: true });
        self.take_channels();
    }

    /// Receives the offer and accepts it.
    pub(crate) fn set_up(&mut self) {
        self.acknowledge();
        self.send(&ALLOCATED);
    }

    /// Receives one frame of pages, without a receipt.
    pub(crate) fn take_frame(&mut self) -> u64 {
        let taken = take(self.bulk(), Side::Source, Role::Bulk, self.memory_pages);
        let Message::Pages(list) = taken.unwrap() else {
            panic!("pages were due");
        };
        self.frames += 1;
        self.confirmed += list.confirmed_pages();
        for run in list.runs() {
            for page in run.first.0..run.end() {
                assert!(
                    self.missing_at_start == 0 || self.missing.remove(&page),
                    "page {page} came twice"
                );
            }
        }
        list.zero_pages() + u64::from(list.data_pages())
    }

    /// Sends the receipt of this number of frames.
    pub(crate) fn receipt(&self, frames: u64) {
        say(self.bulk(), &encoded(&Frame::Receipt { frames }));
    }

    /// Receives a whole pass, without receipts.
    pub(crate) fn take_pass(&mut self) -> Pass {
        let Frame::Pass(pass) = self.expect(FrameType::Pass) else {
            unreachable!()
        };
        self.take_pages_of(pass);
        pass
    }

    fn take_pages_of(&mut self, pass: Pass) {
        let mut pages = 0;
        while pages < pass.pages {
            pages += self.take_frame();
            say_alive(&self.control, self.bulk(), self.urgent());
        }
        assert_eq!(pages, pass.pages);
    }

    /// Receives everything up to SwitchOver, with receipts for passes.
    pub(crate) fn take_switch_over(&mut self) -> SwitchOver {
        loop {
            match self.take() {
                Frame::Pass(pass) => {
                    self.take_pages_of(pass);
                    self.receipt(self.frames);
                }
                Frame::Missing(runs) => self.missing.extend(runs.runs.into_iter().flatten()),
                Frame::SwitchOver(switch_over) => {
                    self.missing_at_start = self.missing.len() as u64;
                    assert_eq!(self.missing_at_start, switch_over.missing_pages);
                    return switch_over;
                }
                Frame::VcpuState(_) | Frame::DeviceState(_) => {}
                other => panic!("not {other:?} before SwitchOver"),
            }
        }
    }

    /// Runs the migration until the guest would run here.
    pub(crate) fn start(&mut self) {
        self.set_up();
        self.run_on();
    }

    /// Receives what is left up to the switch-over, and says that all is loaded.
    pub(crate) fn run_on(&mut self) {
        self.take_switch_over();
        self.send(&Frame::Ready);
        self.expect(FrameType::Go);
        self.send(&Frame::Running { started_at_ns: 1 });
    }

    /// Requests a page. If the source has sent it already, no answer follows.
    pub(crate) fn ask(&self, page: u64) {
        say(self.urgent(), &UrgentMessage::request(RamPage(page)));
    }

    /// Sends the receipt of this number of answers.
    pub(crate) fn urgent_receipt(&self, placed: u64) {
        say(self.urgent(), &UrgentMessage::receipt(placed));
    }

    /// Receives the push of all missing pages, with receipts.
    pub(crate) fn take_push(&mut self) {
        while !self.missing.is_empty() {
            self.take_frame();
            self.receipt(self.frames);
            say_alive(&self.control, self.bulk(), self.urgent());
        }
    }

    /// Confirms all pages, and hears Complete.
    pub(crate) fn complete(&mut self) {
        self.take_push();
        let missing = self.missing_at_start;
        assert_eq!(self.expect(FrameType::Drained), Frame::Drained { missing });
        self.send(&Frame::DrainAck { missing });
        assert_eq!(self.last_frame(), Some(Frame::Complete));
    }

    /// Waits until the source has opened the next generation. Returns what it says of itself.
    pub(crate) fn take_resume(&mut self) -> SourceStage {
        self.generation += 1;
        self.control = self.host.take(ChannelKey::control(self.generation));
        let Frame::Resume(stage) = self.expect(FrameType::Resume) else {
            unreachable!()
        };
        stage
    }

    /// Says which pages are missing, and that the guest is in this state here.
    pub(crate) fn send_resumed(&self, stage: DestinationStage) {
        let runs = self.missing.iter().map(|page| *page..page + 1);
        for frame in MissingRuns::frames(runs) {
            self.send(&Frame::Missing(frame));
        }
        self.send(&Frame::Resumed {
            stage,
            missing: self.missing.len() as u64,
        });
    }

    /// Resumes in the next generation, with a guest that runs here.
    pub(crate) fn recover(&mut self) {
        assert_eq!(self.take_resume(), SourceStage::HandedOver);
        self.send_resumed(DestinationStage::Running);
        self.take_channels();
    }

    /// Answers a source that has cancelled in the switch-over: this copy is discarded.
    pub(crate) fn discard_in_next_generation(&mut self) {
        assert_eq!(self.take_resume(), SourceStage::Cancelled);
        self.say_discarded();
    }

    /// Resumes with a copy that was discarded.
    pub(crate) fn say_discarded(&mut self) {
        self.send(&Frame::Resumed {
            stage: DestinationStage::Discarded,
            missing: 0,
        });
        self.expect(FrameType::DiscardHeard);
    }

    /// Says that the copy here was discarded, and waits until the source has heard it.
    pub(crate) fn discard(&self, why: &str) {
        self.send(&Frame::Discarded(Text::new(why)));
        self.expect(FrameType::DiscardHeard);
    }

    /// Closes all channels.
    pub(crate) fn close(&self) {
        self.control.shutdown();
        for channel in self.bulk.iter().chain(&self.urgent) {
            channel.shutdown();
        }
    }

    /// Returns the last frame of the source on the control channel.
    pub(crate) fn last_frame(&self) -> Option<Frame> {
        last_frame(&self.control, Side::Source, self.memory_pages)
    }
}
