//! Devices whose states travel: moves under load, and refusals before anything changes.

use crate::failures_source::config;
use crate::scripted::destination::ScriptedDestination;
use crate::scripted::source::{ScriptedSource, Template};
use crate::scripted::{LONG, PATIENCE, assert_sentence, encoded, ends_soon, kind, limits};
use crate::support::{
    LIMIT, WorkloadVm, address_of, engine_of, kvm_usable, listen, migrate_running, receive_as, tcp,
};
use pageferry_addr::RamPage;
use pageferry_guest::{MemoryMap, Touch, TouchAccess, TouchOrder, Toucher};
use pageferry_harness::isa_of;
use pageferry_machine::{AccessError, Apply, Device, Engine, GuestRam, MachineError};
use pageferry_migration::wire::{
    DeviceEntry, DeviceState, ErrorCode, Frame, FrameHeader, FrameType, HEADER_BYTES,
    MAX_DEVICE_STATE_BYTES, SourceStage, SwitchOver,
};
use pageferry_migration::{
    DestinationConfig, DestinationFailure, DestinationReport, DestinationVm, RunningVm,
    SourceConfig, SourceFailure, SourceReport, SourceVm, Switch,
};
use pageferry_testkit::handshake::{Destination as Host, PLAIN};
use pageferry_testkit::{sized, wait_until};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const MEMORY: u64 = 8 * MIB;
/// The numbers in one page of a ring.
const PER_PAGE: u64 = 512;

/// The part of a [`Ring`] that its thread shares.
struct Work {
    ram: Arc<GuestRam>,
    pages: Range<u64>,
    state: Mutex<State>,
    changed: Condvar,
    over: AtomicBool,
}

struct State {
    /// The numbers written so far, from 1.
    count: u64,
    runs: bool,
    trouble: Option<String>,
}

impl Work {
    fn slots(&self) -> u64 {
        (self.pages.end - self.pages.start) * PER_PAGE
    }

    /// The place of the `n`th number. Neighbours are on different pages.
    fn place(&self, n: u64) -> (RamPage, u64) {
        let slot = n % self.slots();
        let pages = self.pages.end - self.pages.start;
        (RamPage(self.pages.start + slot % pages), slot / pages * 8)
    }

    /// Writes the next number over the one that is due there.
    fn write_next(&self, count: u64) -> Result<(), String> {
        let (next, never) = (count + 1, || self.over.load(SeqCst));
        let mut old = [0; 8];
        let read = self.ram.read(self.place(next), &mut old, &never);
        read.map_err(|e| format!("number {next} is not read: {e}"))?;
        let due = next.saturating_sub(self.slots());
        if u64::from_le_bytes(old) != due {
            return Err(format!("{} in place of {due}", u64::from_le_bytes(old)));
        }
        let written = self
            .ram
            .write(self.place(next), &next.to_le_bytes(), &never);
        written.map_err(|e| format!("number {next} is not written: {e}"))
    }

    fn run(&self) {
        let mut state = self.state.lock().unwrap();
        while !self.over.load(SeqCst) {
            if !state.runs || state.trouble.is_some() {
                state = self.changed.wait(state).unwrap();
                continue;
            }
            match self.write_next(state.count) {
                Ok(()) => state.count += 1,
                Err(why) => state.trouble = Some(why),
            }
            drop(state);
            std::thread::sleep(Duration::from_micros(20));
            state = self.state.lock().unwrap();
        }
    }
}

/// A device that counts, and writes each number into a ring in guest memory, on a thread of its
/// own. Each time it finds the number of the round before. So a lost write or a lost state is
/// found.
struct Ring {
    name: &'static str,
    version: u32,
    work: Arc<Work>,
    thread: Option<JoinHandle<()>>,
    resumes: AtomicU32,
    pauses: AtomicU32,
    applied: Mutex<Option<u64>>,
    /// The failure to show.
    fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    Pause,
    Save,
    Long(usize),
}

impl Ring {
    fn new(ram: &Arc<GuestRam>, pages: Range<u64>, name: &'static str, version: u32) -> Self {
        let work = Arc::new(Work {
            ram: Arc::clone(ram),
            pages,
            state: Mutex::new(State {
                count: 0,
                runs: false,
                trouble: None,
            }),
            changed: Condvar::new(),
            over: AtomicBool::new(false),
        });
        let worker = Arc::clone(&work);
        Self {
            name,
            version,
            work,
            thread: Some(std::thread::spawn(move || worker.run())),
            resumes: AtomicU32::new(0),
            pauses: AtomicU32::new(0),
            applied: Mutex::new(None),
            fault: Fault::None,
        }
    }

    fn count(&self) -> u64 {
        let state = self.work.state.lock().unwrap();
        assert_eq!(state.trouble, None, "{}", self.name);
        state.count
    }

    fn wait_progress(&self, numbers: u64) {
        let goal = self.count() + numbers;
        wait_until("numbers of the device", || self.count() >= goal);
    }

    fn assert_untouched(&self, name: &str) {
        assert_eq!(*self.applied.lock().unwrap(), None, "{name}");
        assert_eq!((self.count(), self.resumes.load(SeqCst)), (0, 0), "{name}");
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.work.over.store(true, SeqCst);
        drop(self.work.state.lock());
        self.work.changed.notify_all();
        self.thread.take().map(JoinHandle::join);
    }
}

impl Device for Ring {
    fn name(&self) -> &str {
        self.name
    }

    fn version(&self) -> u32 {
        self.version
    }

    fn accepts(&self, version: u32) -> bool {
        version <= self.version
    }

    fn pause(&self) -> Result<(), MachineError> {
        self.pauses.fetch_add(1, SeqCst);
        self.work.state.lock().unwrap().runs = false;
        match self.fault {
            Fault::Pause => Err(MachineError::Device("its queue is stuck".into())),
            _ => Ok(()),
        }
    }

    fn resume(&self) {
        self.resumes.fetch_add(1, SeqCst);
        self.work.state.lock().unwrap().runs = true;
        self.work.changed.notify_all();
    }

    fn save(&self) -> Result<Vec<u8>, MachineError> {
        let late = self.work.ram.try_write(self.work.place(0), &[]);
        assert_eq!(late, Err(AccessError::Frozen), "memory is frozen first");
        match self.fault {
            Fault::Save => Err(MachineError::Device("its back end is gone".into())),
            Fault::Long(bytes) => Ok(vec![0; bytes]),
            _ => Ok(self.count().to_le_bytes().to_vec()),
        }
    }

    fn decode<'a>(&'a self, version: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
        assert!(self.accepts(version));
        let refused = || MachineError::Device(format!("{} bytes, expected 8", bytes.len()));
        let count = u64::from_le_bytes(bytes.try_into().map_err(|_| refused())?);
        Ok(Box::new(move || {
            self.work.state.lock().unwrap().count = count;
            *self.applied.lock().unwrap() = Some(count);
        }))
    }
}

/// A VM whose guest writes the first half of its data pages again and again, and its devices in the
/// second half.
struct End {
    vm: WorkloadVm,
    rings: Vec<Arc<Ring>>,
    devices: Vec<Arc<dyn Device>>,
}

fn data(engine: Engine) -> (MemoryMap, Range<u64>, Range<u64>) {
    let map = MemoryMap::new(isa_of(engine), 1, MEMORY).unwrap();
    let data = map.data();
    let middle = data.start + (data.end - data.start) / 2;
    (map, data.start..middle, middle..data.end)
}

impl End {
    /// A VM that waits for its state, with devices of these names and versions.
    fn empty(engine: Engine, names: &[(&'static str, u32)]) -> Self {
        Self::with(engine, names, |_| {})
    }

    fn with(engine: Engine, names: &[(&'static str, u32)], change: impl Fn(&mut Ring)) -> Self {
        let vm = WorkloadVm::empty(engine, 1, MEMORY);
        let (_, _, own) = data(engine);
        let rings: Vec<_> = (own.start..)
            .step_by(4)
            .zip(names)
            .map(|(first, (name, version))| {
                let mut ring = Ring::new(vm.machine.ram(), first..first + 4, name, *version);
                change(&mut ring);
                Arc::new(ring)
            })
            .collect();
        let devices = rings.iter().map(|ring| Arc::clone(ring) as _).collect();
        Self { vm, rings, devices }
    }

    /// Runs the guest and the devices.
    fn boot(self) -> Self {
        let engine = engine_of(&*self.vm.machine);
        let (map, busy, _) = data(engine);
        let touch = Touch {
            access: TouchAccess::Write,
            order: TouchOrder::Random,
            passes: 0,
        };
        let toucher = Toucher::new(map, vec![busy], touch).unwrap();
        self.vm.load(toucher.program()).unwrap();
        self.vm.threads.resume();
        self.rings.iter().for_each(|ring| ring.resume());
        self.wait_progress();
        self
    }

    fn wait_progress(&self) {
        self.rings.iter().for_each(|ring| ring.wait_progress(100));
    }

    fn running(&self) -> RunningVm<'_> {
        RunningVm {
            devices: &self.devices,
            ..self.vm.running()
        }
    }

    /// Checks that guest and devices run on after a failed migration.
    fn assert_runs_on(&self, name: &str) {
        assert!(!self.vm.threads.is_paused(), "{name}");
        self.wait_progress();
    }
}

type Sent = Result<SourceReport, SourceFailure>;
type Received = Result<DestinationReport, DestinationFailure>;

fn move_to(from: &End, to: &End, passes: u32) -> (Sent, Received) {
    let destination = listen(DestinationConfig::default());
    let config = SourceConfig {
        settings: Switch::AfterPasses(passes).into(),
        ..SourceConfig::default()
    };
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive_as(&to.running(), &to.vm.resolver, &destination));
        let sent = migrate_running(&from.running(), &address_of(&destination), &config);
        (sent, receiving.join().unwrap())
    })
}

const TWO: &[(&str, u32)] = &[("ring.0", 2), ("ring.1", 7)];

/// Moves a VM again and again.
fn moves(engine: Engine) {
    let mut here = End::empty(engine, TWO).boot();
    for turn in 0..sized(5, 20) {
        let there = End::empty(engine, TWO);
        let (sent, received) = here.vm.hurried(|| move_to(&here, &there, turn as u32 % 3));
        let sent = sent.unwrap();
        received.unwrap();
        assert_eq!((sent.devices.count, sent.devices.bytes), (2, 16));
        for (old, new) in here.rings.iter().zip(&there.rings) {
            assert_eq!(*new.applied.lock().unwrap(), Some(old.count()));
            assert_eq!(new.resumes.load(SeqCst), 1);
        }
        there.wait_progress();
        here = there;
    }
    // Every place of the rings is read once more.
    here.rings
        .iter()
        .for_each(|ring| ring.wait_progress(ring.work.slots()));
    here.vm.threads.pause(LIMIT).unwrap();
    assert_eq!(here.vm.errors(), 0);
}

#[test]
fn devices_move_again_and_again_under_load_and_lose_nothing() {
    moves(Engine::Soft);
    if kvm_usable("devices that move") {
        moves(Engine::Kvm);
    }
}

#[test]
fn what_was_typed_and_not_read_travels() {
    let with_console = |end: End| {
        let console = Arc::clone(end.vm.machine.console().unwrap());
        let devices = vec![Arc::clone(&console) as _];
        (End { devices, ..end }, console)
    };
    let (here, keys) = with_console(End::empty(Engine::Soft, &[]).boot());
    let (there, console) = with_console(End::empty(Engine::Soft, &[]));
    assert_eq!(keys.send(b"typed"), 5);
    let (sent, received) = move_to(&here, &there, 1);
    received.unwrap();
    assert_eq!(sent.unwrap().devices.count, 1);
    assert_eq!(console.save().unwrap(), b"typed");
    assert_eq!(keys.send(b"late"), 0, "the VM has left");
    assert_eq!(console.send(b" more"), 5);
}

#[test]
fn a_newer_device_takes_an_older_state() {
    let here = End::empty(Engine::Soft, &[("ring.0", 2)]).boot();
    let there = End::empty(Engine::Soft, &[("ring.0", 3)]);
    let (sent, received) = move_to(&here, &there, 0);
    sent.unwrap();
    received.unwrap();
    there.wait_progress();
}

#[test]
fn devices_that_do_not_fit_are_refused_before_the_guest_stops() {
    let here = End::empty(Engine::Soft, TWO).boot();
    for (theirs, says) in [
        (
            &[("ring.0", 2), ("ring.1", 6)][..],
            "its device ring.1 has version 7, and that of this machine has version 6 and does not",
        ),
        (
            &[("ring.0", 2)][..],
            "it has device ring.1 (version 7), which this machine lacks",
        ),
        (
            &[("ring.0", 2), ("ring.1", 7), ("more", 1)][..],
            "it lacks device more (version 1), which this machine has",
        ),
        (
            &[("ring.0", 2), ("ring.1", 7), ("ring.1", 7)][..],
            "this machine has device ring.1 twice",
        ),
    ] {
        let there = End::empty(Engine::Soft, theirs);
        let (sent, received) = move_to(&here, &there, 0);
        let (sent, received) = (sent.unwrap_err(), received.unwrap_err());
        assert_eq!((sent.vm, kind(&sent.error)), (SourceVm::Runs, "PeerGaveUp"));
        assert_eq!(received.vm, DestinationVm::Discarded);
        for text in [sent.to_string(), received.to_string()] {
            assert!(text.contains(says), "{text}");
            assert_sentence(&text);
        }
        assert!(here.rings.iter().all(|ring| ring.pauses.load(SeqCst) == 0));
        there
            .rings
            .iter()
            .for_each(|ring| ring.assert_untouched(says));
        here.assert_runs_on(says);
    }
}

#[test]
fn a_source_does_not_offer_devices_that_cannot_travel() {
    for (names, says) in [
        (&[("a", 1), ("a", 1)][..], "device a is there twice"),
        (&[("", 1)][..], "has a name that cannot travel"),
        (&[("two words", 1)][..], "device two words has a name"),
    ] {
        let here = End::empty(Engine::Soft, names).boot();
        // Nobody listens there, so it does not connect.
        let to = "127.0.0.1:1".parse().unwrap();
        let failure = migrate_running(&here.running(), &to, &SourceConfig::default()).unwrap_err();
        assert_eq!(
            (failure.vm, kind(&failure.error)),
            (SourceVm::Runs, "Device")
        );
        assert!(failure.to_string().contains(says), "{failure}");
        here.assert_runs_on(says);
    }
}

#[test]
fn a_device_that_fails_at_the_source_leaves_all_running_there() {
    for (fault, says) in [
        (
            Fault::Pause,
            "device ring.1 does not stop: its queue is stuck",
        ),
        (Fault::Save, "device ring.1 cannot be saved: its back end"),
        (
            Fault::Long(MAX_DEVICE_STATE_BYTES + 1),
            "device ring.1 has a state of 16777217 bytes, and 16777216 are the most",
        ),
    ] {
        let faulty = |ring: &mut Ring| {
            if ring.name == "ring.1" {
                ring.fault = fault;
            }
        };
        let here = End::with(Engine::Soft, TWO, faulty).boot();
        let there = End::empty(Engine::Soft, TWO);
        let (sent, received) = move_to(&here, &there, 1);
        let sent = sent.unwrap_err();
        assert_eq!((sent.vm, kind(&sent.error)), (SourceVm::Runs, "Device"));
        assert!(sent.to_string().contains(says), "{sent}");
        assert_sentence(&sent);
        assert_eq!(received.unwrap_err().vm, DestinationVm::Discarded);
        there
            .rings
            .iter()
            .for_each(|ring| ring.assert_untouched(says));
        here.assert_runs_on(says);
    }
}

#[test]
fn the_states_of_all_devices_together_are_bounded() {
    let five = [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 1)];
    let long = |ring: &mut Ring| ring.fault = Fault::Long(MAX_DEVICE_STATE_BYTES);
    let here = End::with(Engine::Soft, &five, long).boot();
    let there = End::empty(Engine::Soft, &five);
    let (sent, _) = move_to(&here, &there, 0);
    let sent = sent.unwrap_err();
    let says = "device d has a state of 16777216 bytes, and the states of all devices together";
    assert!(sent.to_string().contains(says), "{sent}");
    here.assert_runs_on(says);
}

/// Migrates to a scripted destination.
fn to_script(
    here: &End,
    script: impl FnOnce(&mut ScriptedDestination<'_>) + Send,
) -> SourceFailure {
    let host = Host::on(tcp(), PLAIN, PATIENCE);
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| script(&mut ScriptedDestination::accept(&host)));
        let sent = migrate_running(&here.running(), &host.address, &config(1, LONG));
        peer.join().unwrap();
        sent.unwrap_err()
    })
}

#[test]
fn a_source_that_takes_its_vm_back_resumes_its_devices() {
    let here = End::empty(Engine::Soft, TWO).boot();
    type Script = fn(&mut ScriptedDestination<'_>);
    let scripts: [(&str, Script); 2] = [
        ("lost before Ready", |peer| {
            peer.set_up();
            assert_eq!(peer.take_switch_over().devices, 2);
            peer.close();
            assert_eq!(peer.take_resume(), SourceStage::Cancelled);
            peer.say_discarded();
        }),
        ("discarded after Go", |peer| {
            peer.set_up();
            peer.take_switch_over();
            peer.send(&Frame::Ready);
            peer.expect(FrameType::Go);
            peer.discard("the test says so");
        }),
    ];
    for (name, script) in scripts {
        assert_eq!(to_script(&here, script).vm, SourceVm::Runs, "{name}");
        here.assert_runs_on(name);
    }
    let there = End::empty(Engine::Soft, TWO);
    let (sent, received) = move_to(&here, &there, 1);
    sent.unwrap();
    received.unwrap();
    there.wait_progress();
}

fn entry(name: &str, version: u32) -> DeviceEntry {
    DeviceEntry {
        name: name.parse().unwrap(),
        version,
    }
}

fn state(name: &str, version: u32, state: &[u8]) -> Frame {
    Frame::DeviceState(DeviceState {
        name: name.parse().unwrap(),
        version,
        state: state.to_vec(),
    })
}

const EIGHT: &[u8] = &[8; 8];

/// A behaviour of a source behind its vCPU states, and the failure of the destination.
struct Case {
    name: &'static str,
    script: fn(&mut ScriptedSource<'_>),
    kind: &'static str,
    says: &'static str,
}

const CASES: &[Case] = &[
    Case {
        name: "none",
        script: |p| p.send(&p.template.switch_over()),
        kind: "Protocol",
        says: "announced 2 device states, sent 0, and the VM has 2",
    },
    Case {
        name: "one is lacking",
        script: |p| {
            p.send(&state("ring.1", 7, EIGHT));
            p.send(&p.template.switch_over());
        },
        kind: "Protocol",
        says: "announced 2 device states, sent 1, and the VM has 2",
    },
    Case {
        name: "another number in SwitchOver",
        script: |p| {
            p.send(&state("ring.0", 2, EIGHT));
            p.send(&state("ring.1", 7, EIGHT));
            let Frame::SwitchOver(all) = p.template.switch_over() else {
                unreachable!()
            };
            let devices = 1;
            p.send(&Frame::SwitchOver(SwitchOver { devices, ..all }));
        },
        kind: "Protocol",
        says: "announced 1 device states, sent 2",
    },
    Case {
        name: "twice",
        script: |p| {
            p.send(&state("ring.0", 2, EIGHT));
            p.send(&state("ring.0", 2, EIGHT));
        },
        kind: "Protocol",
        says: "unexpected state of device ring.0 (version 2)",
    },
    Case {
        name: "an unknown name",
        script: |p| p.send(&state("ring.2", 2, EIGHT)),
        kind: "Protocol",
        says: "unexpected state of device ring.2",
    },
    Case {
        name: "another version than announced",
        script: |p| p.send(&state("ring.1", 6, EIGHT)),
        kind: "Protocol",
        says: "unexpected state of device ring.1 (version 6)",
    },
    Case {
        name: "a state that the last device refuses",
        script: |p| {
            p.send(&state("ring.0", 2, EIGHT));
            p.send(&state("ring.1", 7, &[7; 7]));
            p.send(&p.template.switch_over());
        },
        kind: "Device",
        says: "device ring.1 refuses its state: 7 bytes, expected 8",
    },
    Case {
        name: "a damaged byte",
        script: |p| {
            let mut bytes = encoded(&state("ring.0", 2, EIGHT));
            bytes[HEADER_BYTES + 10] ^= 1;
            p.send_bytes(&bytes);
        },
        kind: "Wire",
        says: "DeviceState: checksum",
    },
    Case {
        name: "too long a frame",
        script: |p| p.send_bytes(&head(16 << 20 | 65)),
        kind: "Wire",
        says: "DeviceState: a length of 16777281 exceeds its bound of 16777280",
    },
    Case {
        name: "a source that dies within a state",
        script: |p| {
            p.send(&state("ring.0", 2, EIGHT));
            let bytes = encoded(&state("ring.1", 7, EIGHT));
            p.send_bytes(&bytes[..bytes.len() - 1]);
            p.close();
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
    },
    Case {
        name: "a source that dies behind the states",
        script: |p| {
            p.send(&state("ring.0", 2, EIGHT));
            p.send(&state("ring.1", 7, EIGHT));
            p.close();
        },
        kind: "LinkLost",
        says: "closed the connection",
    },
    Case {
        name: "a source that cancels when all is ready",
        script: |p| {
            p.send(&state("ring.0", 2, EIGHT));
            p.send(&state("ring.1", 7, EIGHT));
            p.send(&p.template.switch_over());
            p.expect(FrameType::Ready);
            p.send(&Frame::Cancel);
            p.expect(FrameType::Discarded);
            p.send(&Frame::DiscardHeard);
        },
        kind: "PeerCancelled",
        says: "the peer cancelled",
    },
];

/// The header of a DeviceState frame.
fn head(payload_len: u32) -> [u8; HEADER_BYTES] {
    FrameHeader::unsealed(FrameType::DeviceState, payload_len, 7, 6).to_bytes()
}

/// Receives from a scripted source.
fn from_script(
    template: &Template,
    there: &End,
    script: impl FnOnce(&mut ScriptedSource<'_>) + Send,
) -> Received {
    let destination = listen(DestinationConfig {
        allocate: false,
        limits: limits(LONG),
        ..DestinationConfig::default()
    });
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let mut source = ScriptedSource::connect(template, &address_of(&destination));
            script(&mut source);
            source.last_frame()
        });
        let received = ends_soon("receive", || {
            receive_as(&there.running(), &there.vm.resolver, &destination)
        });
        if let Some(Frame::Error(error)) = peer.join().unwrap() {
            assert_ne!(error.code(), ErrorCode::Internal, "{}", error.message());
        }
        received
    })
}

fn template(devices: &[(&str, u32)]) -> Template {
    let mut template = Template::new(Engine::Soft, 1, MEMORY);
    template.devices = devices.iter().map(|(n, v)| entry(n, *v)).collect();
    template.device_states.clear();
    template
}

#[test]
fn states_that_were_not_announced_or_do_not_fit_change_no_device() {
    let template = template(TWO);
    for case in CASES {
        let there = End::empty(Engine::Soft, TWO);
        let received = from_script(&template, &there, |p| {
            p.set_up();
            p.send_states();
            (case.script)(p);
        });
        let failure = received.expect_err(case.name);
        eprintln!("{}: {failure}", case.name);
        assert_eq!(kind(&failure.error), case.kind, "{}: {failure}", case.name);
        assert!(
            failure.to_string().contains(case.says),
            "{}: {failure}",
            case.name
        );
        assert_eq!(failure.vm, DestinationVm::Discarded, "{}", case.name);
        assert_sentence(&failure);
        there
            .rings
            .iter()
            .for_each(|ring| ring.assert_untouched(case.name));
    }
}

/// The length is refused before a byte of the payload has come.
#[test]
fn the_length_of_all_states_is_checked_before_they_come() {
    let five = [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 1)];
    let long = vec![0; MAX_DEVICE_STATE_BYTES];
    for (announced, sent, says) in [
        (
            &five[..],
            3,
            "all DeviceState frames: a length of 67108867 exceeds its bound of 67108864",
        ),
        (
            &[],
            0,
            "all DeviceState frames: a length of 16777216 exceeds its bound of 0",
        ),
    ] {
        let there = End::empty(Engine::Soft, announced);
        let received = from_script(&template(announced), &there, |p| {
            p.set_up();
            p.send_states();
            for (name, version) in &announced[..sent] {
                p.send(&state(name, *version, &long));
            }
            p.send_bytes(&head(16 << 20));
        });
        let failure = received.unwrap_err();
        assert_eq!(kind(&failure.error), "Wire", "{failure}");
        assert!(failure.to_string().contains(says), "{failure}");
        there
            .rings
            .iter()
            .for_each(|ring| ring.assert_untouched(says));
    }
}

#[test]
fn a_device_that_is_announced_twice_is_refused() {
    let there = End::empty(Engine::Soft, &[("a", 1)]);
    let received = from_script(&template(&[("a", 1), ("a", 1)]), &there, |p| {
        p.send(&Frame::Setup(p.template.setup()));
    });
    let failure = received.unwrap_err();
    assert!(
        failure.to_string().contains("it has device a twice"),
        "{failure}"
    );
    there.rings[0].assert_untouched("twice");
}
