//! A scripted source, against the library's destination.
//!
//! It offers a real VM: a paused one that ran the workload. In pre-copy it sends *wrong* bytes for
//! the pages that will be missing at the start. So a guest that reads such a page too early finds
//! an error.

use super::{Message, encoded, last_frame, take, within_limit};
use crate::support::{LIMIT, WorkloadVm};
use pageferry_addr::RamPage;
use pageferry_machine::{Engine, VcpuState};
use pageferry_migration::STATE_FORMAT;
use pageferry_migration::address::Address;
use pageferry_migration::channel::{ChannelError, Connection};
use pageferry_migration::handshake::connect_pair;
use pageferry_migration::wire::{
    self, DrainCounts, Frame, FrameType, MAX_DATA_PAGES, MAX_RUNS, MissingBitmap, PAGE_BYTES, Pass,
    Region, RunKind, RunList, SessionId, Setup, Side, SwitchOver, URGENT_BYTES, UrgentMessage,
    urgent_reply_page, urgent_reply_zero,
};

/// A page of bytes that no page of the workload has.
pub(crate) const WRONG: [u8; PAGE_BYTES] = [0xa5; PAGE_BYTES];

/// A paused VM, and the pages that will be missing at the start.
pub(crate) struct Template {
    pub(crate) vm: WorkloadVm,
    states: Vec<VcpuState>,
    pub(crate) missing: Vec<u64>,
}

impl Template {
    /// Returns a VM that ran for a while. Every third data page will be missing.
    pub(crate) fn new(engine: Engine, vcpus: u32, memory_bytes: u64) -> Self {
        let vm = WorkloadVm::booted(engine, vcpus, memory_bytes);
        vm.wait_progress(64);
        vm.threads.pause(LIMIT).unwrap();
        let states = vm.threads.save().unwrap();
        let missing = vm.workload.memory_map().data().step_by(3).collect();
        Self {
            vm,
            states,
            missing,
        }
    }

    pub(crate) fn setup(&self) -> Setup {
        let layout = self.vm.ram().layout();
        let (engine, isa) = match self.vm.machine.engine() {
            Engine::Kvm => (wire::Engine::Kvm, wire::Isa::X86_64),
            Engine::Soft => (wire::Engine::Soft, wire::Isa::Riscv64),
        };
        let regions = layout.regions().iter().map(|r| Region {
            slot: r.slot,
            gfn: r.gfn,
            pages: r.pages,
        });
        Setup {
            engine,
            isa,
            state_format: STATE_FORMAT,
            vcpus: self.states.len() as u32,
            memory_bytes: layout.bytes(),
            regions: regions.collect(),
            description: b"scripted".to_vec(),
        }
    }

    pub(crate) fn page(&self, page: u64) -> [u8; PAGE_BYTES] {
        let mut bytes = [0; PAGE_BYTES];
        self.vm.ram().try_read(RamPage(page), &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn pages(&self) -> u64 {
        self.vm.ram().pages()
    }

    pub(crate) fn vcpus(&self) -> u32 {
        self.states.len() as u32
    }

    pub(crate) fn state(&self, vcpu: u32) -> Frame {
        Frame::VcpuState(wire::VcpuState {
            vcpu,
            state: self.states[vcpu as usize].0.clone(),
        })
    }

    pub(crate) fn bitmap(&self) -> Frame {
        let mut words = vec![0; self.pages().div_ceil(64) as usize];
        for page in &self.missing {
            words[(page / 64) as usize] |= 1 << (page % 64);
        }
        Frame::MissingBitmap(MissingBitmap {
            first_word: 0,
            words,
        })
    }

    pub(crate) fn switch_over(&self) -> Frame {
        Frame::SwitchOver(SwitchOver {
            missing_pages: self.missing.len() as u64,
            vcpus: self.vcpus(),
            stopped_at_ns: 1,
        })
    }
}

/// Both connections of one migration.
pub(crate) struct ScriptedSource<'a> {
    pub(crate) template: &'a Template,
    /// The size of the offered VM.
    pub(crate) memory_pages: u64,
    pub(crate) stream: Connection,
    pub(crate) urgent: Connection,
    /// The missing pages sent since the start, by the way they were sent.
    pub(crate) sent: DrainCounts,
    /// The missing pages that were not sent.
    pub(crate) unsent: Vec<u64>,
}

impl<'a> ScriptedSource<'a> {
    pub(crate) fn connect(template: &'a Template, to: &Address) -> Self {
        let session = SessionId::random().unwrap();
        let pair = connect_pair(to, session, super::PATIENCE, &|| false).unwrap();
        Self {
            template,
            memory_pages: template.pages(),
            stream: pair.stream,
            urgent: pair.urgent,
            sent: DrainCounts::default(),
            unsent: template.missing.clone(),
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

    pub(crate) fn take(&self) -> Result<Message, ChannelError> {
        loop {
            let message = take(&self.stream, Side::Destination, self.memory_pages)?;
            if !matches!(message, Message::Frame(Frame::SetupProgress(_))) {
                return Ok(message);
            }
        }
    }

    /// Waits until the destination has allocated its memory.
    pub(crate) fn until_ready(&self) {
        loop {
            match take(&self.stream, Side::Destination, self.memory_pages) {
                Ok(Message::Frame(Frame::SetupProgress(progress))) if progress.ready => return,
                Ok(Message::Frame(Frame::SetupProgress(_))) => {}
                other => panic!("SetupProgress was due, not {other:?}"),
            }
        }
    }

    pub(crate) fn expect(&self, due: FrameType) {
        match self.take() {
            Ok(Message::Frame(frame)) if frame.frame_type() == due => {}
            other => panic!("{due} was due, not {other:?}"),
        }
    }

    /// Sends the offer, and waits until the destination accepts it and is ready.
    pub(crate) fn set_up(&self) {
        self.send(&Frame::Setup(self.template.setup()));
        self.expect(FrameType::SetupAck);
        self.until_ready();
    }

    /// Sends a whole pass and waits for its acknowledgement. Pages that will be missing have wrong
    /// bytes.
    pub(crate) fn send_pass(&self) {
        let mut list = RunList::new(self.template.pages());
        let mut data = Vec::new();
        for page in 0..self.template.pages() {
            let bytes = if self.template.missing.contains(&page) {
                WRONG
            } else {
                self.template.page(page)
            };
            let kind = if bytes == [0; PAGE_BYTES] {
                RunKind::Zero
            } else {
                RunKind::Data
            };
            if list.push(RamPage(page), kind).is_err() {
                self.send_bytes(&pages_frame(&list, &data));
                (list, data) = (RunList::new(self.template.pages()), Vec::new());
                list.push(RamPage(page), kind).unwrap();
            }
            if kind == RunKind::Data {
                data.extend_from_slice(&bytes);
            }
        }
        self.send_bytes(&pages_frame(&list, &data));
        self.send(&Frame::PassEnd(Pass {
            pass: 1,
            pages: self.template.pages(),
        }));
        self.expect(FrameType::PassAck);
    }

    /// Sends the bitmap and the states that SwitchOver needs.
    pub(crate) fn send_states(&self) {
        self.send(&self.template.bitmap());
        for vcpu in 0..self.template.vcpus() {
            self.send(&self.template.state(vcpu));
        }
    }

    /// Runs the migration until the guest has started, without RunningAck.
    pub(crate) fn until_running(&self) {
        self.set_up();
        self.send_pass();
        self.send_states();
        self.send(&self.template.switch_over());
        self.expect(FrameType::Running);
    }

    /// Runs the migration until post-copy.
    pub(crate) fn start(&self) {
        self.until_running();
        self.send(&Frame::RunningAck);
    }

    /// Receives the next request.
    pub(crate) fn request(&self) -> u64 {
        let mut bytes = [0; URGENT_BYTES];
        self.urgent
            .read_exact(&mut bytes, &within_limit("request"))
            .unwrap();
        let message =
            UrgentMessage::decode(&bytes, Side::Destination, self.template.pages()).unwrap();
        assert!(
            self.unsent.contains(&message.page.0),
            "{:?} has arrived already",
            message.page
        );
        message.page.0
    }

    /// Returns an unsent missing page other than `but`. No vCPU waits for it if the only vCPU waits
    /// for `but`.
    pub(crate) fn another(&self, but: u64) -> u64 {
        *self.unsent.iter().rev().find(|page| **page != but).unwrap()
    }

    fn mark_sent(&mut self, page: u64) {
        self.unsent.retain(|unsent| *unsent != page);
    }

    /// Sends a page on the urgent connection.
    pub(crate) fn answer(&mut self, page: u64) {
        let bytes = self.template.page(page);
        if bytes == [0; PAGE_BYTES] {
            self.send_urgent(&urgent_reply_zero(RamPage(page)));
        } else {
            self.send_urgent(&urgent_reply_page(RamPage(page), &bytes));
            self.send_urgent(&bytes);
        }
        self.sent.urgent += 1;
        self.mark_sent(page);
    }

    pub(crate) fn send_urgent(&self, bytes: &[u8]) {
        self.urgent
            .write_all(bytes, &within_limit("reply"))
            .unwrap();
    }

    /// Returns a frame of one page with its right bytes.
    pub(crate) fn frame_of(&self, page: u64) -> Vec<u8> {
        let bytes = self.template.page(page);
        let mut list = RunList::new(self.template.pages());
        if bytes == [0; PAGE_BYTES] {
            list.push(RamPage(page), RunKind::Zero).unwrap();
            return pages_frame(&list, &[]);
        }
        list.push(RamPage(page), RunKind::Data).unwrap();
        pages_frame(&list, &bytes)
    }

    /// Sends a page on the stream.
    pub(crate) fn push(&mut self, page: u64) {
        self.send_bytes(&self.frame_of(page));
        if self.template.page(page) == [0; PAGE_BYTES] {
            self.sent.zero += 1;
        } else {
            self.sent.background += 1;
        }
        self.mark_sent(page);
    }

    pub(crate) fn push_rest(&mut self) {
        while let Some(page) = self.unsent.first().copied() {
            self.push(page);
        }
    }

    /// Closes both connections.
    pub(crate) fn close(&self) {
        self.stream.shutdown();
        self.urgent.shutdown();
    }

    /// Returns the last frame of the destination.
    pub(crate) fn last_frame(&self) -> Option<Frame> {
        last_frame(&self.stream, Side::Destination, self.memory_pages)
    }
}

/// Returns a Pages frame with these bytes.
pub(crate) fn pages_frame(list: &RunList, data: &[u8]) -> Vec<u8> {
    assert!(list.runs().len() <= MAX_RUNS && data.len() <= MAX_DATA_PAGES * PAGE_BYTES);
    let mut bytes = Vec::new();
    let mut hasher = list.encode_head(&mut bytes);
    hasher.update(data);
    hasher.seal(&mut bytes);
    bytes.extend_from_slice(data);
    bytes
}
