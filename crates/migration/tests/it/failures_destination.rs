//! What a source can do wrong, and what the destination makes of it: before the start the VM is
//! discarded, after it paused, with its missing pages counted, and a guest that never sees a wrong
//! page.

use crate::failing::source::{Played, Template, WRONG, pages_frame};
use crate::failing::{
    Clean, LONG, SHORT, SOON, Took, Via, assert_sentence, encoded, kind, last_word, limit_for,
    listen, soon,
};
use crate::support::{LIMIT, Vm, kvm_usable};
use pageferry_addr::{Gfn, RamPage};
use pageferry_machine::{Delivery, Engine};
use pageferry_migration::wire::{
    self, DrainCounts, ErrorCode, ErrorMessage, Frame, FrameHeader, FrameType, HEADER_BYTES,
    MissingBitmap, PAGE_BYTES, Pass, RunKind, RunList, Setup, Side, SwitchOver, UrgentMessage,
    urgent_reply_page, urgent_reply_zero,
};
use pageferry_migration::{
    DestinationConfig, DestinationFailure, DestinationReport, DestinationVm, Incoming,
    MigrationError, Unobserved,
};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// What the destination says to the source in the end.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Told {
    /// Nothing that could still be heard.
    Nothing,
    /// An Error frame with this code.
    Why(ErrorCode),
}

/// One thing a source can do.
struct Case {
    name: &'static str,
    play: fn(&mut Played<'_>),
    kind: &'static str,
    says: &'static str,
    told: Told,
}

/// What became of a migration whose source was played.
struct Received {
    /// Refused before there was a VM, or what `receive` says.
    outcome: Result<Result<DestinationReport, DestinationFailure>, MigrationError>,
    vm: Vm,
    told: Told,
    /// Missing pages that were not sent, as they should have been, when the play was over.
    unsent: u64,
}

fn attempt(
    template: &Template,
    via: Via,
    delivery: Option<Delivery>,
    silence: Duration,
    play: impl Fn(&mut Played<'_>) + Sync,
) -> Received {
    let listener = listen(via);
    let config = DestinationConfig {
        delivery,
        allocate: false,
        handshake_limit: silence,
        silence_limit: silence,
    };
    let vm = Vm::empty(
        template.vm.machine.engine(),
        template.vcpus(),
        template.pages() * PAGE_BYTES as u64,
    );
    std::thread::scope(|scope| {
        let player = scope.spawn(|| {
            let mut played = Played::connect(template, listener.local_addr());
            play(&mut played);
            let told = match played.last_word() {
                Some(Frame::Error(why)) => {
                    assert_sentence(&why.message());
                    Told::Why(why.code())
                }
                _ => Told::Nothing,
            };
            (told, played.unsent.len() as u64)
        });
        let until = Instant::now() + LIMIT;
        let late = || Instant::now() > until;
        let outcome = soon("receive", || {
            Incoming::accept(&listener, config, &late, &mut |_| {}).map(|incoming| {
                incoming.receive(&vm.as_running(), &vm.resolver, &late, &Unobserved)
            })
        });
        let (told, unsent) = player.join().unwrap();
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

/// No vCPU moves, and none has seen a wrong page: not even if its owner lets it go on.
fn assert_paused_unharmed(vm: &Vm, name: &str) {
    assert!(vm.threads.is_paused(), "{name}");
    let vcpus = 0..vm.workload.layout().vcpus();
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
    assert_eq!(
        vm.hooks.doorbells.load(std::sync::atomic::Ordering::SeqCst),
        0,
        "{name}"
    );
    assert!(
        vm.threads.failures().is_empty(),
        "{name}: {:?}",
        vm.threads.failures()
    );
}

/// Each case ends with the VM discarded: it never ran, or (`ran`) for a moment that does not count.
fn discards(via: Via, ran: bool, cases: &[Case]) {
    let _clean = Clean::slate();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    for case in cases {
        let received = attempt(&template, via, None, limit_for(case.kind), case.play);
        let failure = received.outcome.unwrap().expect_err(case.name);
        assert_error(case, &failure.error, received.told);
        assert_eq!(failure.vm, DestinationVm::Discarded, "{}", case.name);
        assert_sentence(&failure);
        if ran {
            assert_paused_unharmed(&received.vm, case.name);
        }
        // A thread that never ran may not even have begun; one that runs never parks by itself.
        let until = Instant::now() + SOON;
        while !received.vm.threads.is_paused() {
            assert!(Instant::now() < until, "{}: it runs", case.name);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Each case ends with the VM paused and the unsent pages missing.
fn pauses(template: &Template, via: Via, delivery: Option<Delivery>, cases: &[Case]) {
    for case in cases {
        let received = attempt(template, via, delivery, limit_for(case.kind), case.play);
        let failure = received.outcome.unwrap().expect_err(case.name);
        assert_error(case, &failure.error, received.told);
        let missing = received.unsent;
        assert_eq!(
            failure.vm,
            DestinationVm::PausedIncomplete { missing },
            "{}",
            case.name
        );
        assert_sentence(&failure);
        let counted =
            (0..template.pages()).filter(|page| received.vm.resolver.is_missing(RamPage(*page)));
        assert_eq!(counted.count() as u64, missing, "{}", case.name);
        assert_paused_unharmed(&received.vm, case.name);
    }
}

/// A header of a frame that cannot be, with no checksum that fits.
fn header(frame_type: u16, payload_len: u32) -> [u8; HEADER_BYTES] {
    let mut bytes = FrameHeader::unsealed(FrameType::SetupAck, payload_len, 0, 0).to_bytes();
    bytes[4..6].copy_from_slice(&frame_type.to_le_bytes());
    bytes
}

/// A frame of `pages`, all with these bytes, for a memory as large as it takes.
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

fn offer(played: &Played<'_>, change: fn(&mut Setup)) {
    let mut setup = played.template.setup();
    change(&mut setup);
    played.send(&Frame::Setup(setup));
}

const PROTOCOL: Told = Told::Why(ErrorCode::Protocol);
const REFUSED: Told = Told::Why(ErrorCode::SetupRefused);
const GIVEN_UP: Told = Told::Why(ErrorCode::Internal);
const DISCARDED: Told = Told::Why(ErrorCode::Discarded);

const BEFORE_SETUP: &[Case] = &[
    Case {
        name: "closes in the middle of Setup",
        play: |p| {
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
        play: |p| p.send_bytes(&[0x77; 100]),
        kind: "Wire",
        says: "frame magic",
        told: PROTOCOL,
    },
    Case {
        name: "another frame first",
        play: |p| p.send(&Frame::RunningAck),
        kind: "Peer",
        says: "it sent RunningAck where Setup was due",
        told: PROTOCOL,
    },
    Case {
        name: "pages first",
        play: |p| p.send_bytes(&frame_of(&[1], &WRONG)),
        kind: "Peer",
        says: "it sent Pages where they are not due",
        told: PROTOCOL,
    },
    Case {
        name: "a damaged Setup",
        play: |p| p.send_bytes(&damaged(encoded(&Frame::Setup(p.template.setup())), 50)),
        kind: "Wire",
        says: "checksum",
        told: PROTOCOL,
    },
    Case {
        name: "a Setup too long to be one",
        play: |p| p.send_bytes(&header(1, 1 << 30)),
        kind: "Wire",
        says: "exceeds its bound",
        told: PROTOCOL,
    },
    Case {
        name: "called off at once",
        play: |p| p.send(&Frame::Cancel),
        kind: "PeerCancelled",
        says: "the peer cancelled",
        told: GIVEN_UP,
    },
];

const MISFITS: &[Case] = &[
    Case {
        name: "another engine",
        play: |p| {
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
        play: |p| offer(p, |setup| setup.isa = wire::Isa::X86_64),
        kind: "Mismatch",
        says: "instruction set",
        told: REFUSED,
    },
    Case {
        name: "more vCPUs",
        play: |p| offer(p, |setup| setup.vcpus += 1),
        kind: "Mismatch",
        says: "2 vCPUs, this machine has 1",
        told: REFUSED,
    },
    Case {
        name: "more memory",
        play: |p| {
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
        play: |p| {
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
        play: |p| offer(p, |setup| setup.state_format = 77),
        kind: "Mismatch",
        says: "format 77, this side knows 1",
        told: REFUSED,
    },
];

const PRECOPY: &[Case] = &[
    Case {
        name: "closes after Setup",
        play: |p| {
            p.set_up();
            p.close();
        },
        kind: "LinkLost",
        says: "closed the connection",
        told: Told::Nothing,
    },
    Case {
        name: "closes within the descriptors",
        play: |p| {
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
        play: |p| {
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
        play: |p| {
            p.set_up();
            p.send_bytes(&frame_of(&[1], &WRONG)[..2000]);
        },
        kind: "Timeout",
        says: "page data",
        told: GIVEN_UP,
    },
    Case {
        name: "falls silent",
        play: |p| p.set_up(),
        kind: "Timeout",
        says: "in time",
        told: GIVEN_UP,
    },
    Case {
        name: "a page outside memory",
        play: |p| {
            p.set_up();
            p.send_bytes(&frame_of(&[p.template.pages()], &WRONG));
        },
        kind: "Wire",
        says: "outside 0 to 2047",
        told: PROTOCOL,
    },
    Case {
        name: "a run that leaves memory",
        play: |p| {
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
        play: |p| {
            p.set_up();
            p.send_bytes(&damaged(frame_of(&[1, 2], &WRONG), 5000));
        },
        kind: "Wire",
        says: "checksum",
        told: PROTOCOL,
    },
    Case {
        name: "a damaged descriptor",
        play: |p| {
            p.set_up();
            p.send_bytes(&damaged(frame_of(&[1, 2], &WRONG), HEADER_BYTES));
        },
        kind: "Wire",
        says: "descriptors: checksum",
        told: PROTOCOL,
    },
    Case {
        name: "a pass of other pages than were sent",
        play: |p| {
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
        play: |p| {
            p.set_up();
            p.send_bytes(&header(FrameType::Pages.number(), u32::MAX));
        },
        kind: "Wire",
        says: "a length of 4294967295 exceeds its bound",
        told: PROTOCOL,
    },
    Case {
        name: "an unknown frame",
        play: |p| {
            p.set_up();
            p.send_bytes(&header(0x3333, 0));
        },
        kind: "Wire",
        says: "unknown frame type 13107",
        told: PROTOCOL,
    },
    Case {
        name: "a frame that only destinations send",
        play: |p| {
            p.set_up();
            p.send(&Frame::Running { started_at_ns: 1 });
        },
        kind: "Wire",
        says: "the source never sends",
        told: PROTOCOL,
    },
    Case {
        name: "a second Setup",
        play: |p| {
            p.set_up();
            p.send(&Frame::Setup(p.template.setup()));
        },
        kind: "Peer",
        says: "it sent Setup where SwitchOver was due",
        told: PROTOCOL,
    },
    Case {
        name: "gives up and says why",
        play: |p| {
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
        name: "called off in pre-copy",
        play: |p| {
            p.set_up();
            p.send_pass();
            p.send(&Frame::Cancel);
        },
        kind: "PeerCancelled",
        says: "the peer cancelled",
        told: GIVEN_UP,
    },
];

/// SwitchOver with other numbers than the truth.
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
            p.set_up();
            p.send_states();
            p.close();
        },
        kind: "LinkLost",
        says: "closed the connection",
        told: Told::Nothing,
    },
];

/// After the guest has started here, before the source has said that it knows.
const UNACKNOWLEDGED: &[Case] = &[
    Case {
        name: "closes instead of RunningAck",
        play: |p| {
            p.until_running();
            p.close();
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
        told: Told::Nothing,
    },
    Case {
        name: "never says RunningAck",
        play: |p| p.until_running(),
        kind: "Timeout",
        says: "in time",
        told: DISCARDED,
    },
    Case {
        name: "resumed its own and says so",
        play: |p| {
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
        play: |p| {
            p.until_running();
            p.send_bytes(&p.frame_of(p.template.missing[0]));
        },
        kind: "Peer",
        says: "it sent Pages where they are not due",
        told: DISCARDED,
    },
];

/// The source has waited too long and resumed its own guest, while this side was kept from starting
/// its.
const CALLED_OFF: &[Case] = &[Case {
    name: "said why before the guest could start",
    play: |p| {
        p.set_up();
        p.send_states();
        // In one piece, so that both are there when the first is read.
        let mut bytes = encoded(&p.template.switch_over());
        bytes.extend(encoded(&Frame::Error(ErrorMessage::new(
            ErrorCode::Internal,
            "no answer in time",
        ))));
        p.send_bytes(&bytes);
        let took = p.take().unwrap();
        assert!(
            matches!(&took, Took::Frame(Frame::Error(why)) if why.code() == ErrorCode::Discarded),
            "not Running: {took:?}"
        );
    },
    kind: "PeerGaveUp",
    says: "no answer in time",
    told: Told::Nothing,
}];

/// Failures that need no particular engine; some vCPU waits for a page in each.
const POSTCOPY: &[Case] = &[
    Case {
        name: "closes both connections",
        play: |p| {
            p.start();
            // All vCPUs wait; the one that is answered is there when it asks again.
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
            p.start();
            p.request();
        },
        kind: "Timeout",
        says: "in time",
        told: GIVEN_UP,
    },
    Case {
        name: "damaged page data on the stream",
        play: |p| {
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
        play: |p| {
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

/// More of them, for one engine.
const POSTCOPY_MORE: &[Case] = &[
    Case {
        name: "closes within a page",
        play: |p| {
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
            p.start();
            let waited_for = p.request();
            let page = p.another(waited_for);
            p.push(page);
            // Until it has been placed, either of the two may come to be the second.
            std::thread::sleep(Duration::from_millis(50));
            p.send_urgent(&urgent_reply_zero(RamPage(page)));
        },
        kind: "Peer",
        says: "not missing, or sent it twice",
        told: PROTOCOL,
    },
    Case {
        name: "a page on the urgent connection, then on the stream",
        play: |p| {
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
        play: |p| {
            p.start();
            p.request();
            p.send_bytes(&frame_of(
                &[p.template.vm.workload.layout().code_page().0],
                &WRONG,
            ));
        },
        kind: "Peer",
        says: "not missing",
        told: PROTOCOL,
    },
    Case {
        name: "a page that was never missing, on the urgent connection",
        play: |p| {
            p.start();
            p.request();
            let page = p.template.vm.workload.layout().code_page();
            p.send_urgent(&urgent_reply_page(page, &WRONG));
            p.send_urgent(&WRONG);
        },
        kind: "Peer",
        says: "not missing",
        told: PROTOCOL,
    },
    Case {
        name: "a run of missing and present pages",
        play: |p| {
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
            p.start();
            p.send_bytes(&header(FrameType::Pages.number(), u32::MAX));
        },
        kind: "Wire",
        says: "exceeds its bound",
        told: PROTOCOL,
    },
    Case {
        name: "an unknown frame",
        play: |p| {
            p.start();
            p.send_bytes(&header(999, 0));
        },
        kind: "Wire",
        says: "unknown frame type 999",
        told: PROTOCOL,
    },
    Case {
        name: "SwitchOver again",
        play: |p| {
            p.start();
            p.send(&p.template.switch_over());
        },
        kind: "Peer",
        says: "it sent SwitchOver where DrainEnd was due",
        told: PROTOCOL,
    },
    Case {
        name: "gives up and says why",
        play: |p| {
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
        name: "called off in post-copy",
        play: |p| {
            p.start();
            p.send(&Frame::Cancel);
        },
        kind: "PeerCancelled",
        says: "the peer cancelled",
        told: GIVEN_UP,
    },
    Case {
        name: "ends with pages missing",
        play: |p| {
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
        play: |p| {
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
        play: |p| {
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
        play: |p| {
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
    let _clean = Clean::slate();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    for via in [Via::Tcp, Via::Unix] {
        for case in BEFORE_SETUP {
            let received = attempt(&template, via, None, limit_for(case.kind), case.play);
            let error = received.outcome.expect_err(case.name);
            assert_error(case, &error, received.told);
        }
    }
}

/// Both of its connections were accepted: it says nothing, or ends, and the next source is taken.
#[test]
fn a_session_that_says_nothing_keeps_nobody_out() {
    let _clean = Clean::slate();
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
        let _silent = Played::connect(&template, &to);
        Played::connect(&template, &to).close();
        for _ in 0..2 {
            let why = strangers.recv_timeout(LIMIT).unwrap();
            assert!(why.contains("no message followed"), "{why}");
        }
        let last = Played::connect(&template, &to);
        last.send(&Frame::Setup(template.setup()));
        let offered = destination.join().unwrap();
        assert_eq!(offered.offer().memory_bytes, 8 * MIB);
        offered.refuse("enough");
    });
}

/// The destination acknowledges before it has allocated: pages may come, a switch-over may not.
#[test]
fn the_vm_is_acknowledged_before_its_memory_is_allocated() {
    let _clean = Clean::slate();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    const MEMORY: u64 = 6 << 30;
    let listener = listen(Via::Tcp);
    let to = listener.local_addr().clone();
    let vm = Vm::empty(Engine::Soft, 1, MEMORY);
    std::thread::scope(|scope| {
        let player = scope.spawn(|| {
            let played = Played::connect(&template, &to);
            let mut setup = template.setup();
            setup.memory_bytes = MEMORY;
            let regions = vm.ram().layout().regions().iter().map(|r| wire::Region {
                slot: r.slot,
                gfn: r.gfn,
                pages: r.pages,
            });
            setup.regions = regions.collect();
            played.send(&Frame::Setup(setup));
            played.expect(FrameType::SetupAck);
            // Its memory comes last in the order of allocation.
            let page = vm.ram().pages() - 1;
            let mut list = RunList::new(vm.ram().pages());
            list.push(RamPage(page), RunKind::Data).unwrap();
            played.send_bytes(&pages_frame(&list, &WRONG));
            played.send(&Frame::PassEnd(Pass { pass: 1, pages: 1 }));
            // Far less than the time in which this much memory is allocated.
            played.expect(FrameType::PassAck);
            played.send(&template.switch_over());
            last_word(&played.stream, Side::Destination, vm.ram().pages())
        });
        let config = DestinationConfig::default();
        let until = Instant::now() + LIMIT;
        let late = || Instant::now() > until;
        let incoming = Incoming::accept(&listener, config, &late, &mut |_| {}).unwrap();
        let failure = incoming
            .receive(&vm.as_running(), &vm.resolver, &late, &Unobserved)
            .unwrap_err();
        assert_eq!(kind(&failure.error), "Peer", "{failure}");
        assert!(
            failure.to_string().contains("before this side was ready"),
            "{failure}"
        );
        let Some(Frame::Error(why)) = player.join().unwrap() else {
            panic!("the destination says why")
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
    let _clean = Clean::slate();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    pauses(&template, Via::Tcp, None, POSTCOPY);
    pauses(&template, Via::Tcp, None, POSTCOPY_MORE);
}

#[test]
fn a_failure_in_postcopy_on_unix_sockets_pauses_the_vm() {
    let _clean = Clean::slate();
    let template = Template::new(Engine::Soft, 2, 8 * MIB);
    pauses(&template, Via::Unix, None, POSTCOPY);
}

#[test]
fn a_failure_in_postcopy_pauses_a_kvm_vm_by_every_delivery() {
    if !kvm_usable("a_failure_in_postcopy_pauses_a_kvm_vm_by_every_delivery") {
        return;
    }
    let _clean = Clean::slate();
    let template = Template::new(Engine::Kvm, 2, 8 * MIB);
    for delivery in [Delivery::Minor, Delivery::Missing, Delivery::Poison] {
        eprintln!("by {delivery}");
        pauses(&template, Via::Tcp, Some(delivery), POSTCOPY);
    }
}

/// The guest finishes its work here and every page is right.
fn assert_arrived(name: &str, received: Received) {
    let report = received
        .outcome
        .unwrap()
        .unwrap_or_else(|failure| panic!("{name}: {failure}"));
    assert_eq!(received.unsent, 0, "{name}");
    assert!(report.missing_at_start > 0);
    let share = received.vm.workload.layout().share_pages();
    received.vm.wait_progress(2 * share);
    received.vm.verify();
}

#[test]
fn what_comes_after_every_page_was_confirmed_does_not_stop_the_guest() {
    type End = fn(&mut Played<'_>);
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
    let _clean = Clean::slate();
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
    let _clean = Clean::slate();
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
    let _clean = Clean::slate();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = attempt(&template, Via::Tcp, None, LONG, |p| {
        p.start();
        p.push_rest();
        p.send(&Frame::DrainEnd(DrainCounts::default()));
    });
    let failure = received.outcome.unwrap().unwrap_err();
    assert_eq!(failure.vm, DestinationVm::PausedIncomplete { missing: 0 });
    assert_eq!(kind(&failure.error), "Peer");
}
