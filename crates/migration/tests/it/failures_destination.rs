//! Failures of a source. Before the guest starts, the destination discards the VM. After that, it
//! pauses the VM and counts the missing pages. The guest never sees a wrong page.

use crate::scripted::source::{ScriptedSource, Template, WRONG, pages_frame};
use crate::scripted::{
    LONG, LeakCheck, Message, SHORT, SOON, Via, assert_sentence, encoded, ends_soon, kind,
    limit_for, listen,
};
use crate::support::{LIMIT, WorkloadVm, kvm_deliveries, kvm_usable};
use pageferry_addr::{Gfn, RamPage};
use pageferry_machine::{Delivery, Engine};
use pageferry_migration::wire::{
    self, DrainCounts, ErrorCode, ErrorMessage, Frame, FrameHeader, FrameType, HEADER_BYTES,
    MissingBitmap, PAGE_BYTES, Pass, RunKind, RunList, Setup, SwitchOver, UrgentMessage,
    urgent_reply_page, urgent_reply_zero,
};
use pageferry_migration::{
    DestinationConfig, DestinationFailure, DestinationReport, DestinationVm, Incoming,
    MigrationError, Unobserved,
};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// The last message of the destination to the source.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Told {
    /// None, or the source could not receive it.
    Nothing,
    /// An Error frame with this code.
    Why(ErrorCode),
}

/// A behaviour of a source.
struct Case {
    name: &'static str,
    script: fn(&mut ScriptedSource<'_>),
    kind: &'static str,
    says: &'static str,
    told: Told,
}

/// The result of a migration from a scripted source.
struct Received {
    /// The error of `accept`, or the result of `receive`.
    outcome: Result<Result<DestinationReport, DestinationFailure>, MigrationError>,
    vm: WorkloadVm,
    told: Told,
    /// The number of missing pages that the script did not send with right bytes.
    unsent: u64,
}

fn attempt(
    template: &Template,
    via: Via,
    delivery: Option<Delivery>,
    silence: Duration,
    script: impl Fn(&mut ScriptedSource<'_>) + Sync,
) -> Received {
    let listener = listen(via);
    let config = DestinationConfig {
        delivery,
        allocate: false,
        handshake_limit: silence,
        silence_limit: silence,
        ..DestinationConfig::default()
    };
    let vm = WorkloadVm::empty(
        template.vm.machine.engine(),
        template.vcpus(),
        template.pages() * PAGE_BYTES as u64,
    );
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let mut source = ScriptedSource::connect(template, listener.local_addr());
            script(&mut source);
            let told = match source.last_frame() {
                Some(Frame::Error(why)) => {
                    assert_sentence(&why.message());
                    Told::Why(why.code())
                }
                _ => Told::Nothing,
            };
            (told, source.unsent.len() as u64)
        });
        let until = Instant::now() + LIMIT;
        let late = || Instant::now() > until;
        let outcome = ends_soon("receive", || {
            Incoming::accept(&listener, config, &late, &mut |_| {})
                .map(|incoming| incoming.receive(&vm.running(), &vm.resolver, &late, &Unobserved))
        });
        let (told, unsent) = peer.join().unwrap();
        Received {
            outcome,
            vm,
            told,
            unsent,
        }
    })
}

fn assert_error(case: &Case, error: &MigrationError, told: Told) {
    eprintln!("{}: {error}", case.name);
    assert_eq!(kind(error), case.kind, "{}: {error}", case.name);
    assert_sentence(error);
    assert!(
        error.to_string().contains(case.says),
        "{}: {error}",
        case.name
    );
    assert_eq!(told, case.told, "{}", case.name);
}

/// Checks that no vCPU runs and that none has seen a wrong page, even if its owner resumes it.
fn assert_paused_unharmed(vm: &WorkloadVm, name: &str) {
    assert!(vm.threads.is_paused(), "{name}");
    let vcpus = 0..vm.workload.memory_map().vcpus();
    let done = || -> Vec<u64> { vcpus.clone().map(|vcpu| vm.done(vcpu)).collect() };
    let before = done();
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(done(), before, "{name}: it runs on");
    vm.threads.resume();
    std::thread::sleep(Duration::from_millis(10));
    vm.threads.pause(LIMIT).unwrap();
    for vcpu in vcpus {
        assert_eq!(
            vm.control(vcpu).first_error,
            None,
            "{name}: vCPU {vcpu} saw a wrong page"
        );
    }
    vm.assert_no_failure(name);
}

/// Checks that each case ends with the VM discarded. It never ran, or (`ran`) only for a moment
/// that does not count.
fn discards(via: Via, ran: bool, cases: &[Case]) {
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    for case in cases {
        let received = attempt(&template, via, None, limit_for(case.kind), case.script);
        let failure = received.outcome.unwrap().expect_err(case.name);
        assert_error(case, &failure.error, received.told);
        assert_eq!(failure.vm, DestinationVm::Discarded, "{}", case.name);
        assert_sentence(&failure);
        if ran {
            assert_paused_unharmed(&received.vm, case.name);
        }
        // A thread that never ran may not have begun yet. A running one never parks by itself.
        let until = Instant::now() + SOON;
        while !received.vm.threads.is_paused() {
            assert!(Instant::now() < until, "{}: it runs", case.name);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Checks that each case ends with the VM paused and the unsent pages missing.
fn pauses(template: &Template, via: Via, delivery: Option<Delivery>, cases: &[Case]) {
    for case in cases {
        let received = attempt(template, via, delivery, limit_for(case.kind), case.script);
        let failure = received.outcome.unwrap().expect_err(case.name);
        assert_error(case, &failure.error, received.told);
        let missing = received.unsent;
        assert_eq!(
            failure.vm,
            DestinationVm::PausedIncomplete { missing, asleep: 0 },
            "{}",
            case.name
        );
        assert_sentence(&failure);
        let counted = (0..template.pages()).filter(|page| received.vm.is_missing(RamPage(*page)));
        assert_eq!(counted.count() as u64, missing, "{}", case.name);
        assert_paused_unharmed(&received.vm, case.name);
    }
}

/// Returns the header of an invalid frame, without a valid checksum.
fn header(frame_type: u16, payload_len: u32) -> [u8; HEADER_BYTES] {
    let mut bytes = FrameHeader::unsealed(FrameType::SetupAck, payload_len, 0, 0).to_bytes();
    bytes[4..6].copy_from_slice(&frame_type.to_le_bytes());
    bytes
}

/// Returns a frame of `pages` with these bytes, without a bound on their numbers.
fn frame_of(pages: &[u64], bytes: &[u8; PAGE_BYTES]) -> Vec<u8> {
    let mut list = RunList::new(u64::MAX);
    for page in pages {
        list.push(RamPage(*page), RunKind::Data).unwrap();
    }
    pages_frame(&list, &bytes.repeat(pages.len()))
}

fn damaged(mut bytes: Vec<u8>, at: usize) -> Vec<u8> {
    bytes[at] ^= 0x10;
    bytes
}

fn offer(source: &ScriptedSource<'_>, change: fn(&mut Setup)) {
    let mut setup = source.template.setup();
    change(&mut setup);
    source.send(&Frame::Setup(setup));
}

const PROTOCOL: Told = Told::Why(ErrorCode::Protocol);
const REFUSED: Told = Told::Why(ErrorCode::SetupRefused);
const GIVEN_UP: Told = Told::Why(ErrorCode::Internal);
const DISCARDED: Told = Told::Why(ErrorCode::Discarded);

const BEFORE_SETUP: &[Case] = &[
    Case {
        name: "closes in the middle of Setup",
        script: |p| {
            let bytes = encoded(&Frame::Setup(p.template.setup()));
            p.send_bytes(&bytes[..40]);
            p.close();
        },
        kind: "LinkLost",
        says: "the peer stopped after 8 of",
        told: Told::Nothing,
    },
    Case {
        name: "garbage",
        script: |p| p.send_bytes(&[0x77; 100]),
        kind: "Wire",
        says: "frame magic",
        told: PROTOCOL,
    },
    Case {
        name: "another frame first",
        script: |p| p.send(&Frame::RunningAck),
        kind: "Peer",
        says: "it sent RunningAck where Setup was due",
        told: PROTOCOL,
    },
    Case {
        name: "pages first",
        script: |p| p.send_bytes(&frame_of(&[1], &WRONG)),
        kind: "Peer",
        says: "it sent Pages where they are not due",
        told: PROTOCOL,
    },
    Case {
        name: "a damaged Setup",
        script: |p| p.send_bytes(&damaged(encoded(&Frame::Setup(p.template.setup())), 50)),
        kind: "Wire",
        says: "checksum",
        told: PROTOCOL,
    },
    Case {
        name: "a Setup too long to be one",
        script: |p| p.send_bytes(&header(1, 1 << 30)),
        kind: "Wire",
        says: "exceeds its bound",
        told: PROTOCOL,
    },
    Case {
        name: "cancels at once",
        script: |p| p.send(&Frame::Cancel),
        kind: "PeerCancelled",
        says: "the peer cancelled",
        told: GIVEN_UP,
    },
];

const MISFITS: &[Case] = &[
    Case {
        name: "another engine",
        script: |p| {
            offer(p, |setup| {
                setup.engine = wire::Engine::Kvm;
                setup.isa = wire::Isa::X86_64;
            });
        },
        kind: "Mismatch",
        says: "engine is kvm, this machine's is soft",
        told: REFUSED,
    },
    Case {
        name: "another instruction set",
        script: |p| offer(p, |setup| setup.isa = wire::Isa::X86_64),
        kind: "Mismatch",
        says: "instruction set",
        told: REFUSED,
    },
    Case {
        name: "more vCPUs",
        script: |p| offer(p, |setup| setup.vcpus += 1),
        kind: "Mismatch",
        says: "2 vCPUs, this machine has 1",
        told: REFUSED,
    },
    Case {
        name: "more memory",
        script: |p| {
            offer(p, |setup| {
                setup.memory_bytes += PAGE_BYTES as u64;
                setup.regions.last_mut().unwrap().pages += 1;
            });
        },
        kind: "Mismatch",
        says: "8392704 bytes of memory, this machine has 8388608",
        told: REFUSED,
    },
    Case {
        name: "memory elsewhere",
        script: |p| {
            offer(p, |setup| {
                let last = setup.regions.last_mut().unwrap();
                last.gfn = Gfn(last.gfn.0 + 512);
            });
        },
        kind: "Mismatch",
        says: "memory regions differ",
        told: REFUSED,
    },
    Case {
        name: "another format of states",
        script: |p| offer(p, |setup| setup.state_format = 77),
        kind: "Mismatch",
        says: "format 77, this side knows 1",
        told: REFUSED,
    },
];

const PRECOPY: &[Case] = &[
    Case {
        name: "closes after Setup",
        script: |p| {
            p.set_up();
            p.close();
        },
        kind: "LinkLost",
        says: "closed the connection",
        told: Told::Nothing,
    },
    Case {
        name: "closes within the descriptors",
        script: |p| {
            p.set_up();
            p.send_bytes(&frame_of(&[1], &WRONG)[..HEADER_BYTES + 3]);
            p.close();
        },
        kind: "LinkLost",
        says: "stopped after 3 of 16 bytes",
        told: Told::Nothing,
    },
    Case {
        name: "closes within a page",
        script: |p| {
            p.set_up();
            p.send_bytes(&frame_of(&[1], &WRONG)[..2000]);
            p.close();
        },
        kind: "LinkLost",
        says: "of 4096 bytes",
        told: Told::Nothing,
    },
    Case {
        name: "stops within a page",
        script: |p| {
            p.set_up();
            p.send_bytes(&frame_of(&[1], &WRONG)[..2000]);
        },
        kind: "Timeout",
        says: "page data",
        told: GIVEN_UP,
    },
    Case {
        name: "falls silent",
        script: |p| p.set_up(),
        kind: "Timeout",
        says: "in time",
        told: GIVEN_UP,
    },
    Case {
        name: "a page outside memory",
        script: |p| {
            p.set_up();
            p.send_bytes(&frame_of(&[p.template.pages()], &WRONG));
        },
        kind: "Wire",
        says: "outside 0 to 2047",
        told: PROTOCOL,
    },
    Case {
        name: "a run that leaves memory",
        script: |p| {
            p.set_up();
            p.send_bytes(&frame_of(
                &[p.template.pages() - 1, p.template.pages()],
                &WRONG,
            ));
        },
        kind: "Wire",
        says: "`run.pages` is 2, outside 1 to 1",
        told: PROTOCOL,
    },
    Case {
        name: "damaged page data",
        script: |p| {
            p.set_up();
            p.send_bytes(&damaged(frame_of(&[1, 2], &WRONG), 5000));
        },
        kind: "Wire",
        says: "checksum",
        told: PROTOCOL,
    },
    Case {
        name: "a damaged descriptor",
        script: |p| {
            p.set_up();
            p.send_bytes(&damaged(frame_of(&[1, 2], &WRONG), HEADER_BYTES));
        },
        kind: "Wire",
        says: "descriptors: checksum",
        told: PROTOCOL,
    },
    Case {
        name: "a pass of other pages than were sent",
        script: |p| {
            p.set_up();
            p.send_bytes(&frame_of(&[1, 2], &WRONG));
            p.send(&Frame::PassEnd(Pass { pass: 1, pages: 3 }));
        },
        kind: "Peer",
        says: "a pass of 3 pages but sent 2",
        told: PROTOCOL,
    },
    Case {
        name: "too long a frame",
        script: |p| {
            p.set_up();
            p.send_bytes(&header(FrameType::Pages.number(), u32::MAX));
        },
        kind: "Wire",
        says: "a length of 4294967295 exceeds its bound",
        told: PROTOCOL,
    },
    Case {
        name: "an unknown frame",
        script: |p| {
            p.set_up();
            p.send_bytes(&header(0x3333, 0));
        },
        kind: "Wire",
        says: "unknown frame type 13107",
        told: PROTOCOL,
    },
    Case {
        name: "a frame that only destinations send",
        script: |p| {
            p.set_up();
            p.send(&Frame::Running { started_at_ns: 1 });
        },
        kind: "Wire",
        says: "the source never sends",
        told: PROTOCOL,
    },
    Case {
        name: "a second Setup",
        script: |p| {
            p.set_up();
            p.send(&Frame::Setup(p.template.setup()));
        },
        kind: "Peer",
        says: "it sent Setup where SwitchOver was due",
        told: PROTOCOL,
    },
    Case {
        name: "gives up and says why",
        script: |p| {
            p.set_up();
            p.send(&Frame::Error(ErrorMessage::new(
                ErrorCode::Machine,
                "the dirty log broke",
            )));
        },
        kind: "PeerGaveUp",
        says: "the dirty log broke",
        told: GIVEN_UP,
    },
    Case {
        name: "cancels in pre-copy",
        script: |p| {
            p.set_up();
            p.send_pass();
            p.send(&Frame::Cancel);
        },
        kind: "PeerCancelled",
        says: "the peer cancelled",
        told: GIVEN_UP,
    },
];

/// Returns a SwitchOver with these counts.
fn switch_over(missing_pages: u64, vcpus: u32) -> Frame {
    Frame::SwitchOver(SwitchOver {
        missing_pages,
        vcpus,
        stopped_at_ns: 1,
    })
}

const SWITCH_OVER: &[Case] = &[
    Case {
        name: "another number of missing pages than named",
        script: |p| {
            p.set_up();
            p.send_states();
            p.send(&switch_over(p.template.missing.len() as u64 + 1, 1));
        },
        kind: "Peer",
        says: "missing pages but named",
        told: PROTOCOL,
    },
    Case {
        name: "no states",
        script: |p| {
            p.set_up();
            p.send(&p.template.bitmap());
            p.send(&p.template.switch_over());
        },
        kind: "Peer",
        says: "0 states for 1 vCPUs",
        told: PROTOCOL,
    },
    Case {
        name: "the same state twice",
        script: |p| {
            p.set_up();
            p.send_states();
            p.send(&p.template.state(0));
        },
        kind: "Peer",
        says: "state of vCPU 0",
        told: PROTOCOL,
    },
    Case {
        name: "the state of a vCPU there is not",
        script: |p| {
            p.set_up();
            let Frame::VcpuState(state) = p.template.state(0) else {
                unreachable!()
            };
            p.send(&Frame::VcpuState(wire::VcpuState { vcpu: 1, ..state }));
        },
        kind: "Peer",
        says: "state of vCPU 1",
        told: PROTOCOL,
    },
    Case {
        name: "another number of vCPUs than offered",
        script: |p| {
            p.set_up();
            p.send_states();
            p.send(&switch_over(p.template.missing.len() as u64, 2));
        },
        kind: "Peer",
        says: "vCPUs",
        told: PROTOCOL,
    },
    Case {
        name: "a state that is none",
        script: |p| {
            p.set_up();
            p.send(&p.template.bitmap());
            p.send(&Frame::VcpuState(wire::VcpuState {
                vcpu: 0,
                state: vec![0x42; 100],
            }));
            p.send(&p.template.switch_over());
        },
        kind: "Machine",
        says: "100 bytes",
        told: Told::Why(ErrorCode::Machine),
    },
    Case {
        name: "a state with an impossible value",
        script: |p| {
            p.set_up();
            p.send(&p.template.bitmap());
            let Frame::VcpuState(mut state) = p.template.state(0) else {
                unreachable!()
            };
            state.state[12] = 3;
            p.send(&Frame::VcpuState(state));
            p.send(&p.template.switch_over());
        },
        kind: "Machine",
        says: "privilege mode",
        told: Told::Why(ErrorCode::Machine),
    },
    Case {
        name: "missing pages outside memory",
        script: |p| {
            p.set_up();
            p.send(&Frame::MissingBitmap(MissingBitmap {
                first_word: p.template.pages() / 64,
                words: vec![1],
            }));
        },
        kind: "Wire",
        says: "first_word",
        told: PROTOCOL,
    },
    Case {
        name: "closes before SwitchOver",
        script: |p| {
            p.set_up();
            p.send_states();
            p.close();
        },
        kind: "LinkLost",
        says: "closed the connection",
        told: Told::Nothing,
    },
];

/// Failures after the guest has started here, without RunningAck.
const UNACKNOWLEDGED: &[Case] = &[
    Case {
        name: "closes instead of RunningAck",
        script: |p| {
            p.until_running();
            p.close();
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
        told: Told::Nothing,
    },
    Case {
        name: "never says RunningAck",
        script: |p| p.until_running(),
        kind: "Timeout",
        says: "in time",
        told: DISCARDED,
    },
    Case {
        name: "resumed its own and says so",
        script: |p| {
            p.until_running();
            p.send(&Frame::Error(ErrorMessage::new(
                ErrorCode::Internal,
                "no answer in time",
            )));
        },
        kind: "PeerGaveUp",
        says: "no answer in time",
        told: DISCARDED,
    },
    Case {
        name: "pages instead of RunningAck",
        script: |p| {
            p.until_running();
            p.send_bytes(&p.frame_of(p.template.missing[0]));
        },
        kind: "Peer",
        says: "it sent Pages where they are not due",
        told: DISCARDED,
    },
];

/// The source has waited too long and resumed its guest, before this side started the guest.
const CALLED_OFF: &[Case] = &[Case {
    name: "said why before the guest could start",
    script: |p| {
        p.set_up();
        p.send_states();
        // In one write, so that both frames have arrived when the first is read.
        let mut bytes = encoded(&p.template.switch_over());
        bytes.extend(encoded(&Frame::Error(ErrorMessage::new(
            ErrorCode::Internal,
            "no answer in time",
        ))));
        p.send_bytes(&bytes);
        let message = p.take().unwrap();
        assert!(
            matches!(&message, Message::Frame(Frame::Error(why)) if why.code() == ErrorCode::Discarded),
            "not Running: {message:?}"
        );
    },
    kind: "PeerGaveUp",
    says: "no answer in time",
    told: Told::Nothing,
}];

/// Failures on every engine. In each, a vCPU waits for a page.
const POSTCOPY: &[Case] = &[
    Case {
        name: "closes both connections",
        script: |p| {
            p.start();
            // All vCPUs wait. The next request shows that the answered page has arrived.
            let page = p.request();
            (1..p.template.vcpus()).for_each(|_| _ = p.request());
            p.answer(page);
            p.request();
            p.close();
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
        told: Told::Nothing,
    },
    Case {
        name: "closes the stream only",
        script: |p| {
            p.start();
            p.request();
            p.stream.shutdown();
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
        told: Told::Nothing,
    },
    Case {
        name: "closes the urgent connection only",
        script: |p| {
            p.start();
            p.request();
            p.urgent.shutdown();
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
        told: GIVEN_UP,
    },
    Case {
        name: "falls silent",
        script: |p| {
            p.start();
            p.request();
        },
        kind: "Timeout",
        says: "in time",
        told: GIVEN_UP,
    },
    Case {
        name: "damaged page data on the stream",
        script: |p| {
            p.start();
            let page = p.request();
            p.send_bytes(&damaged(frame_of(&[page], &WRONG), 3000));
        },
        kind: "Wire",
        says: "Pages: checksum",
        told: PROTOCOL,
    },
    Case {
        name: "a damaged reply to a request",
        script: |p| {
            p.start();
            let page = p.request();
            p.send_urgent(&urgent_reply_page(RamPage(page), &p.template.page(page)));
            p.send_urgent(&WRONG);
        },
        kind: "Wire",
        says: "urgent page: checksum",
        told: PROTOCOL,
    },
];

/// More such failures, for one engine.
const POSTCOPY_MORE: &[Case] = &[
    Case {
        name: "closes within a page",
        script: |p| {
            p.start();
            let page = p.request();
            p.send_bytes(&frame_of(&[page], &WRONG)[..3000]);
            p.close();
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
        told: Told::Nothing,
    },
    Case {
        name: "closes within a reply",
        script: |p| {
            p.start();
            let page = p.request();
            p.send_urgent(&urgent_reply_page(RamPage(page), &WRONG));
            p.send_urgent(&WRONG[..1000]);
            p.urgent.shutdown();
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
        told: GIVEN_UP,
    },
    Case {
        name: "a page twice on the stream",
        script: |p| {
            p.start();
            let waited_for = p.request();
            let page = p.another(waited_for);
            p.push(page);
            p.send_bytes(&p.frame_of(page));
        },
        kind: "Peer",
        says: "not missing, or sent it twice",
        told: PROTOCOL,
    },
    Case {
        name: "a page on the stream, then on the urgent connection",
        script: |p| {
            p.start();
            let waited_for = p.request();
            let page = p.another(waited_for);
            p.push(page);
            // Before the first copy is placed, either of the two may be the second.
            std::thread::sleep(Duration::from_millis(50));
            p.send_urgent(&urgent_reply_zero(RamPage(page)));
        },
        kind: "Peer",
        says: "not missing, or sent it twice",
        told: PROTOCOL,
    },
    Case {
        name: "a page on the urgent connection, then on the stream",
        script: |p| {
            p.start();
            let page = p.request();
            p.answer(page);
            p.request();
            p.send_bytes(&frame_of(&[page], &WRONG));
        },
        kind: "Peer",
        says: "not missing, or sent it twice",
        told: PROTOCOL,
    },
    Case {
        name: "a page that was never missing, on the stream",
        script: |p| {
            p.start();
            p.request();
            p.send_bytes(&frame_of(
                &[p.template.vm.workload.memory_map().code_page().0],
                &WRONG,
            ));
        },
        kind: "Peer",
        says: "not missing",
        told: PROTOCOL,
    },
    Case {
        name: "a page that was never missing, on the urgent connection",
        script: |p| {
            p.start();
            p.request();
            let page = p.template.vm.workload.memory_map().code_page();
            p.send_urgent(&urgent_reply_page(page, &WRONG));
            p.send_urgent(&WRONG);
        },
        kind: "Peer",
        says: "not missing",
        told: PROTOCOL,
    },
    Case {
        name: "a run of missing and present pages",
        script: |p| {
            p.start();
            let page = p.request();
            p.send_bytes(&frame_of(&[page - 1, page], &WRONG));
        },
        kind: "Peer",
        says: "one of the 2 from there",
        told: PROTOCOL,
    },
    Case {
        name: "a page outside memory on the stream",
        script: |p| {
            p.start();
            p.request();
            p.send_bytes(&frame_of(&[p.template.pages()], &WRONG));
        },
        kind: "Wire",
        says: "outside 0 to 2047",
        told: PROTOCOL,
    },
    Case {
        name: "a page outside memory on the urgent connection",
        script: |p| {
            p.start();
            p.request();
            p.send_urgent(&urgent_reply_zero(RamPage(p.template.pages())));
        },
        kind: "Wire",
        says: "outside 0 to 2047",
        told: PROTOCOL,
    },
    Case {
        name: "garbage on the urgent connection",
        script: |p| {
            p.start();
            p.request();
            p.send_urgent(&[0xee; 16]);
        },
        kind: "Wire",
        says: "urgent reply",
        told: PROTOCOL,
    },
    Case {
        name: "a request from the source",
        script: |p| {
            p.start();
            let page = p.request();
            p.send_urgent(&UrgentMessage::request(RamPage(page)));
        },
        kind: "Wire",
        says: "urgent reply: field `kind`",
        told: PROTOCOL,
    },
    Case {
        name: "says that nothing more comes, and closes",
        script: |p| {
            p.start();
            p.request();
            p.send_urgent(&UrgentMessage::end());
            p.urgent.shutdown();
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
        told: GIVEN_UP,
    },
    Case {
        name: "too long a frame",
        script: |p| {
            p.start();
            p.send_bytes(&header(FrameType::Pages.number(), u32::MAX));
        },
        kind: "Wire",
        says: "exceeds its bound",
        told: PROTOCOL,
    },
    Case {
        name: "an unknown frame",
        script: |p| {
            p.start();
            p.send_bytes(&header(999, 0));
        },
        kind: "Wire",
        says: "unknown frame type 999",
        told: PROTOCOL,
    },
    Case {
        name: "SwitchOver again",
        script: |p| {
            p.start();
            p.send(&p.template.switch_over());
        },
        kind: "Peer",
        says: "it sent SwitchOver where DrainEnd was due",
        told: PROTOCOL,
    },
    Case {
        name: "gives up and says why",
        script: |p| {
            p.start();
            p.send(&Frame::Error(ErrorMessage::new(
                ErrorCode::Resources,
                "killed",
            )));
        },
        kind: "PeerGaveUp",
        says: "killed",
        told: GIVEN_UP,
    },
    Case {
        name: "cancels in post-copy",
        script: |p| {
            p.start();
            p.send(&Frame::Cancel);
        },
        kind: "PeerCancelled",
        says: "the peer cancelled",
        told: GIVEN_UP,
    },
    Case {
        name: "ends with pages missing",
        script: |p| {
            p.start();
            p.request();
            p.send(&Frame::DrainEnd(DrainCounts {
                urgent: p.unsent.len() as u64,
                ..p.sent
            }));
        },
        kind: "Timeout",
        says: "the last pages",
        told: GIVEN_UP,
    },
    Case {
        name: "ends with a damaged last reply",
        script: |p| {
            p.start();
            let page = p.request();
            p.send_urgent(&damaged(urgent_reply_zero(RamPage(page)).to_vec(), 5));
            p.send(&Frame::DrainEnd(DrainCounts {
                urgent: p.unsent.len() as u64,
                ..p.sent
            }));
        },
        kind: "Wire",
        says: "urgent reply: checksum",
        told: PROTOCOL,
    },
    Case {
        name: "ends with counts that are not those of what came",
        script: |p| {
            p.start();
            p.push_rest();
            p.send(&Frame::DrainEnd(DrainCounts {
                urgent: p.sent.urgent + 1,
                ..p.sent
            }));
        },
        kind: "Peer",
        says: "it announced 1 urgent",
        told: PROTOCOL,
    },
    Case {
        name: "closes instead of DrainEnd, every page sent",
        script: |p| {
            p.start();
            p.push_rest();
            p.close();
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
        told: Told::Nothing,
    },
];

#[test]
fn what_is_no_offer_is_refused_before_there_is_a_vm() {
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    for via in [Via::Tcp, Via::Unix] {
        for case in BEFORE_SETUP {
            let received = attempt(&template, via, None, limit_for(case.kind), case.script);
            let error = received.outcome.expect_err(case.name);
            assert_error(case, &error, received.told);
        }
    }
}

/// A stranger whose connections were both accepted sends nothing, or closes. The destination takes
/// the next source.
#[test]
fn a_session_that_says_nothing_keeps_nobody_out() {
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let listener = listen(Via::Tcp);
    let to = listener.local_addr().clone();
    std::thread::scope(|scope| {
        let (told, strangers) = std::sync::mpsc::channel();
        let destination = scope.spawn(move || {
            let config = DestinationConfig::default();
            let until = Instant::now() + LIMIT;
            let late = || Instant::now() > until;
            Incoming::accept(&listener, config, &late, &mut |stranger| {
                told.send(stranger.why.to_string()).unwrap();
            })
            .unwrap()
        });
        let _silent = ScriptedSource::connect(&template, &to);
        ScriptedSource::connect(&template, &to).close();
        for _ in 0..2 {
            let why = strangers.recv_timeout(LIMIT).unwrap();
            assert!(why.contains("no message followed"), "{why}");
        }
        let last = ScriptedSource::connect(&template, &to);
        last.send(&Frame::Setup(template.setup()));
        let offered = destination.join().unwrap();
        assert_eq!(offered.offer().memory_bytes, 8 * MIB);
        offered.refuse("enough");
    });
}

/// The destination acknowledges before it has allocated memory. Then pages may come, but a
/// switch-over may not.
#[test]
fn the_vm_is_acknowledged_before_its_memory_is_allocated() {
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    const MEMORY: u64 = 6 << 30;
    let listener = listen(Via::Tcp);
    let to = listener.local_addr().clone();
    let vm = WorkloadVm::empty(Engine::Soft, 1, MEMORY);
    let assert_incomplete = |due: &str| {
        let allocated = vm.ram().next_allocated(RamPage(0)).unwrap();
        let all = 0..vm.ram().pages();
        assert!(allocated != Some(all), "{due} waited for the allocation");
    };
    std::thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let mut source = ScriptedSource::connect(&template, &to);
            source.memory_pages = vm.ram().pages();
            let mut setup = template.setup();
            setup.memory_bytes = MEMORY;
            let regions = vm.ram().layout().regions().iter().map(|r| wire::Region {
                slot: r.slot,
                gfn: r.gfn,
                pages: r.pages,
            });
            setup.regions = regions.collect();
            source.send(&Frame::Setup(setup));
            source.expect(FrameType::SetupAck);
            assert_incomplete("SetupAck");
            // The last page is the last in the order of allocation.
            let page = vm.ram().pages() - 1;
            let mut list = RunList::new(vm.ram().pages());
            list.push(RamPage(page), RunKind::Data).unwrap();
            source.send_bytes(&pages_frame(&list, &WRONG));
            source.send(&Frame::PassEnd(Pass { pass: 1, pages: 1 }));
            source.expect(FrameType::PassAck);
            assert_incomplete("PassAck");
            source.send(&template.switch_over());
            source.last_frame()
        });
        let config = DestinationConfig::default();
        let until = Instant::now() + LIMIT;
        let late = || Instant::now() > until;
        let incoming = Incoming::accept(&listener, config, &late, &mut |_| {}).unwrap();
        let failure = incoming
            .receive(&vm.running(), &vm.resolver, &late, &Unobserved)
            .unwrap_err();
        assert_eq!(kind(&failure.error), "Peer", "{failure}");
        assert!(
            failure.to_string().contains("before this side was ready"),
            "{failure}"
        );
        let Some(Frame::Error(why)) = peer.join().unwrap() else {
            panic!("an Error frame was due")
        };
        assert_eq!(why.code(), ErrorCode::Protocol);
    });
}

#[test]
fn a_vm_that_does_not_fit_is_refused() {
    discards(Via::Tcp, false, MISFITS);
}

#[test]
fn a_failure_in_precopy_discards_the_vm() {
    discards(Via::Tcp, false, PRECOPY);
    discards(Via::Unix, false, PRECOPY);
}

#[test]
fn a_failure_in_switch_over_discards_the_vm() {
    discards(Via::Tcp, false, SWITCH_OVER);
}

#[test]
fn a_start_that_the_source_does_not_acknowledge_does_not_count() {
    discards(Via::Tcp, true, UNACKNOWLEDGED);
    discards(Via::Unix, true, UNACKNOWLEDGED);
}

#[test]
fn a_guest_that_the_source_has_resumed_is_not_started() {
    discards(Via::Tcp, false, CALLED_OFF);
    discards(Via::Unix, false, CALLED_OFF);
}

#[test]
fn a_failure_in_postcopy_pauses_the_vm() {
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    pauses(&template, Via::Tcp, None, POSTCOPY);
    pauses(&template, Via::Tcp, None, POSTCOPY_MORE);
}

#[test]
fn a_failure_in_postcopy_on_unix_sockets_pauses_the_vm() {
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 2, 8 * MIB);
    pauses(&template, Via::Unix, None, POSTCOPY);
}

#[test]
fn a_failure_in_postcopy_pauses_a_kvm_vm_by_every_delivery() {
    const NAME: &str = "a_failure_in_postcopy_pauses_a_kvm_vm_by_every_delivery";
    if !kvm_usable(NAME) {
        return;
    }
    let deliveries = kvm_deliveries(NAME);
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Kvm, 2, 8 * MIB);
    for delivery in deliveries {
        eprintln!("by {delivery}");
        pauses(&template, Via::Tcp, Some(delivery), POSTCOPY);
    }
}

/// Checks that the guest visits every page here and that every page is right.
fn assert_arrived(name: &str, received: Received) {
    let report = received
        .outcome
        .unwrap()
        .unwrap_or_else(|failure| panic!("{name}: {failure}"));
    assert_eq!(received.unsent, 0, "{name}");
    assert!(report.missing_at_start > 0);
    let share = received.vm.workload.memory_map().share_pages();
    received.vm.wait_progress(2 * share);
    received.vm.assert_verifies();
}

#[test]
fn what_comes_after_every_page_was_confirmed_does_not_stop_the_guest() {
    type End = fn(&mut ScriptedSource<'_>);
    let ends: [(&str, End); 6] = [
        ("Complete", |p| p.send(&Frame::Complete)),
        ("closes", |p| p.close()),
        ("half of Complete", |p| {
            p.send_bytes(&encoded(&Frame::Complete)[..9]);
            p.close();
        }),
        ("garbage", |p| p.send_bytes(&[0x31; 64])),
        ("an Error frame", |p| {
            p.send(&Frame::Error(ErrorMessage::new(
                ErrorCode::Internal,
                "the answer came too late",
            )));
        }),
        ("silence", |_| {}),
    ];
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    for (name, end) in ends {
        let limit = if name == "silence" { SHORT } else { LONG };
        let received = attempt(&template, Via::Tcp, None, limit, |p| {
            p.start();
            p.push_rest();
            p.send(&Frame::DrainEnd(p.sent));
            p.expect(FrameType::DrainAck);
            end(p);
        });
        assert_arrived(name, received);
    }
}

#[test]
fn a_page_nobody_asked_for_is_as_welcome_as_any() {
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = attempt(&template, Via::Tcp, None, LONG, |p| {
        p.start();
        let waited_for = p.request();
        for _ in 0..3 {
            let page = p.another(waited_for);
            p.answer(page);
        }
        p.answer(waited_for);
        p.push_rest();
        p.send(&Frame::DrainEnd(p.sent));
        p.expect(FrameType::DrainAck);
        p.send(&Frame::Complete);
    });
    assert_arrived("unasked", received);
}

#[test]
fn the_counts_must_hold_although_every_page_came() {
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = attempt(&template, Via::Tcp, None, LONG, |p| {
        p.start();
        p.push_rest();
        p.send(&Frame::DrainEnd(DrainCounts::default()));
    });
    let failure = received.outcome.unwrap().unwrap_err();
    assert_eq!(
        failure.vm,
        DestinationVm::PausedIncomplete {
            missing: 0,
            asleep: 0
        }
    );
    assert_eq!(kind(&failure.error), "Peer");
}
