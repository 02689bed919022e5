//! A scripted source, against the library's destination.
//!
//! It offers a real VM: a paused one that ran the workload. In pre-copy it sends *wrong* bytes for
//! the pages that will be missing at the start. So a guest that reads such a page too early finds
//! an error.

use super::{Message, encoded, last_frame, say, say_alive, take, take_urgent};
use crate::support::{LIMIT, WorkloadVm, engine_of, kind_of};
use pageferry_addr::RamPage;
use pageferry_machine::{Device, Engine, VcpuState};
use pageferry_migration::wire::{
    self, ChannelKey, DestinationStage, DeviceEntry, Frame, FrameType, MAX_DATA_PAGES, MAX_RUNS,
    MissingRuns, PAGE_BYTES, Pass, Region, Role, RunKind, RunList, Setup, Side, SourceStage,
    SwitchOver, UrgentKind, urgent_reply_page, urgent_reply_zero,
};
use pageferry_testkit::handshake::{PLAIN, bulk, open};
use pageferry_transport::address::Address;
use pageferry_transport::channel::{ChannelError, Connection};
use pageferry_transport::handshake::{HandshakeError, Identity};
use std::sync::Arc;

/// A page of bytes that no page of the workload has.
pub(crate) const WRONG: [u8; PAGE_BYTES] = [0xa5; PAGE_BYTES];

/// A paused VM, and the pages that will be missing at the start.
pub(crate) struct Template {
    pub(crate) vm: WorkloadVm,
    states: Vec<VcpuState>,
    /// The devices that are announced: those of the VM, unless a test announces others.
    pub(crate) devices: Vec<DeviceEntry>,
    /// Their states.
    pub(crate) device_states: Vec<wire::DeviceState>,
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
        let device_states: Vec<_> = vm.running().devices.iter().map(saved).collect();
        let devices = device_states.iter().map(|device| DeviceEntry {
            name: device.name.clone(),
            version: device.version,
        });
        Self {
            devices: devices.collect(),
            device_states,
            vm,
            states,
            missing,
        }
    }

    /// Changes a model-specific register in the state of a vCPU of KVM.
    pub(crate) fn set_msr(&mut self, vcpu: u32, index: u32, data: u64) {
        /// The section of these registers (`machine/src/kvm/x86/state/codec.rs`).
        const MSRS: u16 = 9;
        let mut rest = &mut self.states[vcpu as usize].0[8..];
        loop {
            // The section's tag, a reserved word, and the number of its bytes.
            let (head, behind) = rest.split_at_mut(8);
            let tag = u16::from_le_bytes([head[0], head[1]]);
            let bytes = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
            let (section, others) = behind.split_at_mut(bytes as usize);
            if tag == MSRS {
                // Each is a `kvm_msr_entry`: the index, a reserved word, and the value.
                let entry = u64::from(index).to_le_bytes();
                let mut entries = section.chunks_exact_mut(16);
                let found = entries.find(|bytes| bytes[..8] == entry);
                let found = found.expect("the register travels");
                return found[8..].copy_from_slice(&data.to_le_bytes());
            }
            rest = others;
        }
    }

    pub(crate) fn setup(&self) -> Setup {
        let layout = self.vm.ram().layout();
        let regions = layout.regions().iter().map(|r| Region {
            slot: r.slot,
            gfn: r.gfn,
            pages: r.pages,
        });
        Setup {
            kind: kind_of(engine_of(&*self.vm.machine)),
            vcpus: self.states.len() as u32,
            memory_bytes: layout.bytes(),
            regions: regions.collect(),
            devices: self.devices.clone(),
            description: b"scripted".to_vec(),
            bulk_channels: 1,
            urgent_channels: 1,
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

    pub(crate) fn missing_frame(&self) -> Frame {
        let runs = self.missing.iter().map(|page| *page..page + 1);
        let mut frames = MissingRuns::frames(runs);
        let frame = Frame::Missing(frames.next().unwrap());
        assert!(frames.next().is_none());
        frame
    }

    pub(crate) fn switch_over(&self) -> Frame {
        Frame::SwitchOver(SwitchOver {
            missing_pages: self.missing.len() as u64,
            vcpus: self.vcpus(),
            devices: self.devices.len() as u32,
            stopped_at_ns: 1,
            paused: false,
        })
    }
}

/// The state of a device, as it travels.
fn saved(device: &Arc<dyn Device>) -> wire::DeviceState {
    wire::DeviceState {
        name: device.name().parse().unwrap(),
        version: device.version(),
        state: device.save().unwrap(),
    }
}

/// The urgent channel of a generation.
pub(crate) fn urgent(index: u16, generation: u32, incarnation: u32) -> ChannelKey {
    ChannelKey {
        role: Role::Urgent,
        ..bulk(index, generation, incarnation)
    }
}

/// The source's end of one session.
pub(crate) struct ScriptedSource<'a> {
    pub(crate) template: &'a Template,
    /// The size of the offered VM.
    pub(crate) memory_pages: u64,
    pub(crate) to: Address,
    pub(crate) identity: Identity,
    pub(crate) generation: u32,
    pub(crate) control: Connection,
    bulk: Option<Connection>,
    urgent: Option<Connection>,
    /// The frames sent on the bulk channel that is open.
    pub(crate) frames: u64,
    /// The missing pages that were not sent.
    pub(crate) unsent: Vec<u64>,
}

impl<'a> ScriptedSource<'a> {
    /// Opens the control channel.
    pub(crate) fn connect(template: &'a Template, to: &Address) -> Self {
        let identity = Identity::random().unwrap();
        let control = open(to, &PLAIN, &identity, ChannelKey::control(1)).unwrap();
        Self {
            template,
            memory_pages: template.pages(),
            to: to.clone(),
            identity,
            generation: 1,
            control: control.connection,
            bulk: None,
            urgent: None,
            frames: 0,
            unsent: template.missing.clone(),
        }
    }

    pub(crate) fn dial(&self, key: ChannelKey) -> Result<Connection, HandshakeError> {
        open(&self.to, &PLAIN, &self.identity, key).map(|opened| opened.connection)
    }

    /// Opens the other channels of the generation.
    pub(crate) fn open_channels(&mut self) {
        self.replace_bulk(self.dial(bulk(0, self.generation, 1)).unwrap());
        self.urgent = Some(self.dial(urgent(0, self.generation, 1)).unwrap());
    }

    /// Takes another connection for the bulk channel.
    pub(crate) fn replace_bulk(&mut self, connection: Connection) {
        self.bulk = Some(connection);
        self.frames = 0;
    }

    /// Takes another connection for the urgent channel.
    pub(crate) fn replace_urgent(&mut self, connection: Connection) {
        self.urgent = Some(connection);
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

    pub(crate) fn send_bulk(&self, bytes: &[u8]) {
        say(self.bulk(), bytes);
    }

    pub(crate) fn send_urgent(&self, bytes: &[u8]) {
        say(self.urgent(), bytes);
    }

    /// Receives the next frame that is not about the allocation.
    pub(crate) fn take(&self) -> Result<Frame, ChannelError> {
        loop {
            match self.take_any()? {
                Frame::SetupProgress(_) => {}
                frame => return Ok(frame),
            }
        }
    }

    fn take_any(&self) -> Result<Frame, ChannelError> {
        match take(
            &self.control,
            Side::Destination,
            Role::Control,
            self.memory_pages,
        )? {
            Message::Frame(frame) => Ok(frame),
            Message::Pages(_) => unreachable!("the header was checked"),
        }
    }

    /// Waits until the destination has allocated its memory.
    pub(crate) fn until_allocated(&self) {
        loop {
            match self.take_any() {
                Ok(Frame::SetupProgress(progress)) if progress.ready => return,
                Ok(Frame::SetupProgress(_)) => {}
                other => panic!("SetupProgress was due, not {other:?}"),
            }
        }
    }

    pub(crate) fn expect(&self, due: FrameType) -> Frame {
        match self.take() {
            Ok(frame) if frame.frame_type() == due => frame,
            other => panic!("{due} was due, not {other:?}"),
        }
    }

    /// Sends the offer, opens the channels, and waits until the destination has its memory.
    pub(crate) fn set_up(&mut self) {
        self.send(&Frame::Setup(self.template.setup()));
        self.expect(FrameType::SetupAck);
        self.open_channels();
        self.until_allocated();
    }

    /// Sends a whole Pages frame.
    pub(crate) fn send_frame(&mut self, bytes: &[u8]) {
        self.send_bulk(bytes);
        self.frames += 1;
    }

    /// Waits for the receipts of all frames of the bulk channel.
    pub(crate) fn expect_receipts(&self) {
        let mut placed = 0;
        while placed < self.frames {
            let taken = take(
                self.bulk(),
                Side::Destination,
                Role::Bulk,
                self.memory_pages,
            );
            let Message::Frame(Frame::Receipt { frames }) = taken.unwrap() else {
                panic!("a receipt was due");
            };
            assert!(placed < frames && frames <= self.frames);
            placed = frames;
        }
    }

    /// Sends a whole pass and waits for its receipts. Pages that will be missing have wrong bytes.
    pub(crate) fn send_pass(&mut self) {
        let pages = self.template.pages();
        self.send(&Frame::Pass(Pass { pass: 1, pages }));
        let mut list = RunList::new(pages);
        let mut data = Vec::new();
        for page in 0..pages {
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
                self.send_frame(&pages_frame(&list, &data));
                (list, data) = (RunList::new(pages), Vec::new());
                list.push(RamPage(page), kind).unwrap();
            }
            if kind == RunKind::Data {
                data.extend_from_slice(&bytes);
            }
        }
        self.send_frame(&pages_frame(&list, &data));
        self.expect_receipts();
    }

    /// Sends the missing pages and the states that SwitchOver needs.
    pub(crate) fn send_states(&self) {
        self.send(&self.template.missing_frame());
        for vcpu in 0..self.template.vcpus() {
            self.send(&self.template.state(vcpu));
        }
        self.send_device_states();
    }

    pub(crate) fn send_device_states(&self) {
        for device in &self.template.device_states {
            self.send(&Frame::DeviceState(device.clone()));
        }
    }

    /// Runs the migration until `Go` is due.
    pub(crate) fn until_ready(&mut self) {
        self.set_up();
        self.send_pass();
        self.send_states();
        self.send(&self.template.switch_over());
        self.expect(FrameType::Ready);
    }

    /// Runs the migration until post-copy.
    pub(crate) fn start(&mut self) {
        self.until_ready();
        self.go();
    }

    pub(crate) fn go(&self) {
        self.send(&Frame::Go);
        self.expect(FrameType::Running);
    }

    /// Opens the control channel of the next generation. Returns the destination's answer, and the
    /// pages that it calls missing.
    pub(crate) fn resume(&mut self, stage: SourceStage) -> (DestinationStage, Vec<u64>) {
        self.generation += 1;
        self.control = self.dial(ChannelKey::control(self.generation)).unwrap();
        self.send(&Frame::Resume(stage));
        let mut named = Vec::new();
        loop {
            match self.take() {
                Ok(Frame::Missing(runs)) => named.extend(runs.runs.into_iter().flatten()),
                Ok(Frame::Resumed { stage, missing }) => {
                    assert_eq!(missing, named.len() as u64);
                    return (stage, named);
                }
                other => panic!("Resumed was due, not {other:?}"),
            }
        }
    }

    /// Opens a new generation for a guest that runs, after the destination has left the old one.
    /// The destination must lack what was not sent.
    pub(crate) fn recover(&mut self) {
        let (stage, missing) = self.resume(SourceStage::HandedOver);
        assert_eq!(stage, DestinationStage::Running);
        assert_eq!(missing, self.unsent, "the missing pages are those not sent");
        self.open_channels();
    }

    /// Sends the rest and ends the session.
    pub(crate) fn complete(&mut self) {
        self.push_rest();
        self.send(&Frame::Drained {
            missing: self.template.missing.len() as u64,
        });
        self.expect(FrameType::DrainAck);
        self.send(&Frame::Complete);
        // The destination ends first. So it does not take the end of the channels for a loss.
        assert_eq!(self.last_frame(), None);
    }

    /// Receives the next request.
    pub(crate) fn request(&self) -> u64 {
        loop {
            let message = take_urgent(self.urgent(), Side::Destination, self.template.pages());
            if message.kind != UrgentKind::Request {
                continue;
            }
            let page = message.page.0;
            assert!(
                self.unsent.contains(&page),
                "page {page} has arrived already"
            );
            return page;
        }
    }

    /// Waits for the receipt of `placed` replies.
    pub(crate) fn expect_urgent_receipt(&self, placed: u64) {
        loop {
            let message = take_urgent(self.urgent(), Side::Destination, self.template.pages());
            if message.kind == UrgentKind::Receipt && message.placed >= placed {
                return assert_eq!(message.placed, placed);
            }
        }
    }

    /// Returns an unsent missing page other than `but`. No vCPU waits for it if the only vCPU waits
    /// for `but`.
    pub(crate) fn another(&self, but: u64) -> u64 {
        *self.unsent.iter().rev().find(|page| **page != but).unwrap()
    }

    fn mark_sent(&mut self, page: u64) {
        self.unsent.retain(|unsent| *unsent != page);
    }

    /// Sends a page on the urgent channel.
    pub(crate) fn answer(&mut self, page: u64) {
        let bytes = self.template.page(page);
        if bytes == [0; PAGE_BYTES] {
            self.send_urgent(&urgent_reply_zero(RamPage(page)));
        } else {
            self.send_urgent(&urgent_reply_page(RamPage(page), &bytes));
            self.send_urgent(&bytes);
        }
        self.mark_sent(page);
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

    /// Sends a page on the bulk channel.
    pub(crate) fn push(&mut self, page: u64) {
        self.send_frame(&self.frame_of(page));
        self.mark_sent(page);
    }

    /// Sends all pages that are left, and waits for their receipts.
    pub(crate) fn push_rest(&mut self) {
        // No more at once than the receipts that fit into a socket's buffer.
        while !self.unsent.is_empty() {
            for page in self.unsent.iter().take(64).copied().collect::<Vec<_>>() {
                self.push(page);
            }
            self.expect_receipts();
            say_alive(&self.control, self.bulk(), self.urgent());
        }
    }

    /// Closes all channels.
    pub(crate) fn close(&self) {
        self.control.shutdown();
        for channel in self.bulk.iter().chain(&self.urgent) {
            channel.shutdown();
        }
    }

    /// Returns the last frame of the destination on the control channel.
    pub(crate) fn last_frame(&self) -> Option<Frame> {
        last_frame(&self.control, Side::Destination, self.memory_pages)
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
