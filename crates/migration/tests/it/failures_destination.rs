//! Failures of a source. Before `Go`, the destination discards the VM, which never runs here. After
//! it, the generation ends, and the session goes on in the next one. The guest never sees a wrong
//! page.

use crate::alone::{LeakCheck, runs_in_child};
use crate::failures_source::hold;
use crate::scripted::source::{ScriptedSource, Template, WRONG, pages_frame, urgent};
use crate::scripted::{LONG, assert_loss, assert_sentence, ends_soon, kind, limits, limits_for};
use crate::support::{
    LIMIT, WorkloadVm, address_of, engine_of, kind_of, kvm_deliveries, kvm_usable, listen_on, tcp,
    unix,
};
use pageferry_addr::{Gfn, RamPage};
use pageferry_machine::{Delivery, Engine};
use pageferry_migration::wire::{
    self, ChannelKey, DestinationStage, ErrorCode, ErrorMessage, Frame, FrameHeader, FrameType,
    HEADER_BYTES, MissingRuns, PAGE_BYTES, RunKind, RunList, Setup, SourceStage, Status,
    SwitchOver, UrgentMessage, urgent_reply_page, urgent_reply_zero,
};
use pageferry_migration::{
    Destination, DestinationConfig, DestinationFailure, DestinationReport, DestinationVm, Limits,
    SessionStatus, Unobserved,
};
use pageferry_testkit::handshake::{PLAIN, bulk, open};
use pageferry_testkit::wait_until;
use pageferry_transport::channel::Listener;
use pageferry_transport::handshake::{HandshakeError, Identity};
use std::sync::atomic::{AtomicBool, Ordering};

const MIB: u64 = 1 << 20;

/// The last message of the destination to the source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Told {
    /// None, or the source could not receive it.
    Nothing,
    /// Any: which channel's silence is noticed first is not certain.
    Anything,
    /// An Error frame with this code.
    Why(ErrorCode),
}

/// A behaviour of a source.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) script: fn(&mut ScriptedSource<'_>),
    pub(crate) kind: &'static str,
    pub(crate) says: &'static str,
    pub(crate) told: Told,
}

pub(crate) struct Received {
    pub(crate) outcome: Result<DestinationReport, DestinationFailure>,
    pub(crate) status: SessionStatus,
    pub(crate) vm: WorkloadVm,
}

/// Ends a session whose script has failed, so that the test ends too.
struct EndsOnPanic<'a>(&'a Destination, &'a AtomicBool);

impl Drop for EndsOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.1.store(true, Ordering::Release);
            self.0.give_up();
        }
    }
}

pub(crate) fn attempt(
    template: &Template,
    delivery: Option<Delivery>,
    limits: Limits,
    script: impl FnOnce(&mut ScriptedSource<'_>, &WorkloadVm, &Destination) + Send,
) -> Received {
    attempt_on(tcp(), template, delivery, limits, script)
}

/// Receives from a scripted source on this listener.
pub(crate) fn attempt_on(
    listener: Listener,
    template: &Template,
    delivery: Option<Delivery>,
    limits: Limits,
    script: impl FnOnce(&mut ScriptedSource<'_>, &WorkloadVm, &Destination) + Send,
) -> Received {
    let config = DestinationConfig {
        delivery,
        allocate: false,
        limits,
        ..DestinationConfig::default()
    };
    let destination = listen_on(listener, config);
    let bytes = template.pages() * PAGE_BYTES as u64;
    let vm = WorkloadVm::empty(engine_of(&*template.vm.machine), template.vcpus(), bytes);
    let over = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        let peer = scope.spawn(|| {
            let _ends = EndsOnPanic(&destination, &over);
            let mut source = ScriptedSource::connect(template, &address_of(&destination));
            script(&mut source, &vm, &destination);
        });
        let stop = || over.load(Ordering::Acquire);
        let outcome = ends_soon("receive", || {
            let incoming = destination.accept(&stop).unwrap();
            incoming.receive(&vm.running(), &vm.resolver, &stop, &Unobserved)
        });
        peer.join().unwrap();
        outcome
    });
    Received {
        outcome,
        status: destination.status(),
        vm,
    }
}

pub(crate) fn told(source: &ScriptedSource<'_>) -> Told {
    match source.last_frame() {
        Some(Frame::Error(why)) => {
            assert_sentence(&why.message());
            Told::Why(why.code())
        }
        _ => Told::Nothing,
    }
}

/// Checks that each case ends with the VM discarded. It never ran.
pub(crate) fn discards(cases: &[Case]) {
    discards_on(tcp, cases);
}

fn discards_on(listener: fn() -> Listener, cases: &[Case]) {
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    for case in cases {
        let limits = limits_for(case.kind);
        let received = attempt_on(listener(), &template, None, limits, |p, _, _| {
            (case.script)(p);
            let told = told(p);
            let fits = told == case.told || case.told == Told::Anything;
            assert!(fits, "{}: {told:?}", case.name);
        });
        let failure = received.outcome.expect_err(case.name);
        eprintln!("{}: {failure}", case.name);
        assert_eq!(kind(&failure.error), case.kind, "{}: {failure}", case.name);
        assert!(
            failure.to_string().contains(case.says),
            "{}: {failure}",
            case.name
        );
        assert_eq!(failure.vm, DestinationVm::Discarded, "{}", case.name);
        assert_sentence(&failure);
        // A thread that never ran may not have begun yet.
        wait_until(case.name, || received.vm.threads.is_paused());
    }
}

/// Checks that each case costs a generation, and that the session completes in the next one.
pub(crate) fn recovers(template: &Template, delivery: Option<Delivery>, cases: &[Case]) {
    for case in cases {
        let received = attempt(template, delivery, limits(LONG), |p, _, destination| {
            p.start();
            (case.script)(p);
            let told = told(p);
            assert_eq!(told, case.told, "{}", case.name);
            // A new generation that comes first would hide it.
            wait_until("the loss", || destination.status().last_loss.is_some());
            p.recover();
            p.complete();
        });
        received
            .outcome
            .unwrap_or_else(|e| panic!("{}: {e}", case.name));
        assert_loss(case.name, received.status.last_loss.as_deref(), case.says);
        received
            .vm
            .wait_progress(2 * template.vm.workload.memory_map().share_pages());
        received.vm.assert_verifies();
    }
}

/// Returns the header of an invalid frame, without a valid checksum.
pub(crate) fn header(frame_type: u16, payload_len: u32) -> [u8; HEADER_BYTES] {
    let mut bytes = FrameHeader::unsealed(FrameType::SetupAck, payload_len, 0, 0).to_bytes();
    bytes[4..6].copy_from_slice(&frame_type.to_le_bytes());
    bytes
}

/// Returns a frame of `pages` with these bytes, without a bound on their numbers.
pub(crate) fn frame_of(pages: &[u64], bytes: &[u8; PAGE_BYTES]) -> Vec<u8> {
    let mut list = RunList::new(u64::MAX);
    for page in pages {
        list.push(RamPage(*page), RunKind::Data).unwrap();
    }
    pages_frame(&list, &bytes.repeat(pages.len()))
}

pub(crate) fn damaged(mut bytes: Vec<u8>, at: usize) -> Vec<u8> {
    bytes[at] ^= 0x10;
    bytes
}

fn offer(source: &ScriptedSource<'_>, change: fn(&mut Setup)) {
    let mut setup = source.template.setup();
    change(&mut setup);
    source.send(&Frame::Setup(setup));
}

pub(crate) const PROTOCOL: Told = Told::Why(ErrorCode::Protocol);
const REFUSED: Told = Told::Why(ErrorCode::SetupRefused);

const MISFITS: &[Case] = &[
    Case {
        name: "another engine",
        script: |p| {
            offer(p, |setup| {
                setup.kind = kind_of(Engine::Kvm);
            });
        },
        kind: "Mismatch",
        says: "engine is kvm, this machine's is soft",
        told: REFUSED,
    },
    Case {
        name: "another instruction set",
        script: |p| offer(p, |setup| setup.kind.isa = "arm64".parse().unwrap()),
        kind: "Mismatch",
        says: "instruction set is arm64, this machine's is riscv64",
        told: REFUSED,
    },
    Case {
        name: "another format of vCPU states",
        script: |p| {
            offer(p, |setup| {
                setup.kind.state_format = "soft-riscv64/9".parse().unwrap();
            });
        },
        kind: "Mismatch",
        says: "format of vCPU states is soft-riscv64/9, this machine's is soft-riscv64/1",
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
            p.send_bulk(&frame_of(&[1], &WRONG)[..HEADER_BYTES + 3]);
            p.bulk().shutdown_write();
        },
        kind: "LinkLost",
        says: "stopped after 3 of 16 bytes",
        told: Told::Nothing,
    },
    Case {
        name: "closes within a page",
        script: |p| {
            p.set_up();
            p.send_bulk(&frame_of(&[1], &WRONG)[..2000]);
            p.bulk().shutdown_write();
        },
        kind: "LinkLost",
        says: "of 4096 bytes",
        told: Told::Nothing,
    },
    Case {
        name: "stops within a page",
        script: |p| {
            p.set_up();
            p.send_bulk(&frame_of(&[1], &WRONG)[..2000]);
        },
        kind: "Timeout",
        says: "in time",
        told: Told::Anything,
    },
    Case {
        name: "falls silent",
        script: |p| p.set_up(),
        kind: "Timeout",
        says: "in time",
        told: Told::Anything,
    },
    Case {
        name: "closes the control channel alone",
        script: |p| {
            p.set_up();
            p.control.shutdown();
        },
        kind: "LinkLost",
        says: "closed the connection",
        told: Told::Nothing,
    },
    Case {
        name: "closes the urgent channel alone",
        script: |p| {
            p.set_up();
            p.urgent().shutdown();
        },
        kind: "LinkLost",
        says: "closed the connection",
        told: Told::Nothing,
    },
    Case {
        name: "a page outside memory",
        script: |p| {
            p.set_up();
            p.send_bulk(&frame_of(&[p.template.pages()], &WRONG));
        },
        kind: "Wire",
        says: "outside 0 to 2047",
        told: PROTOCOL,
    },
    Case {
        name: "a run that leaves memory",
        script: |p| {
            p.set_up();
            p.send_bulk(&frame_of(
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
            p.send_bulk(&damaged(frame_of(&[1, 2], &WRONG), 5000));
        },
        kind: "Wire",
        says: "checksum",
        told: PROTOCOL,
    },
    Case {
        name: "a damaged descriptor",
        script: |p| {
            p.set_up();
            p.send_bulk(&damaged(frame_of(&[1, 2], &WRONG), HEADER_BYTES));
        },
        kind: "Wire",
        says: "descriptors: checksum",
        told: PROTOCOL,
    },
    Case {
        name: "too long a frame",
        script: |p| {
            p.set_up();
            p.send_bulk(&header(FrameType::Pages.number(), u32::MAX));
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
        kind: "Protocol",
        says: "it sent Setup where",
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
        told: Told::Nothing,
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
        told: Told::Nothing,
    },
];

/// The right SwitchOver, but with these counts.
fn switch_over(template: &Template, missing_pages: u64, vcpus: u32) -> Frame {
    let Frame::SwitchOver(right) = template.switch_over() else {
        unreachable!()
    };
    Frame::SwitchOver(SwitchOver {
        missing_pages,
        vcpus,
        ..right
    })
}

const SWITCH_OVER: &[Case] = &[
    Case {
        name: "another number of missing pages than named",
        script: |p| {
            p.set_up();
            p.send_states();
            p.send(&switch_over(
                p.template,
                p.template.missing.len() as u64 + 1,
                1,
            ));
        },
        kind: "Protocol",
        says: "missing pages where",
        told: PROTOCOL,
    },
    Case {
        name: "no states",
        script: |p| {
            p.set_up();
            p.send(&p.template.missing_frame());
            p.send(&p.template.switch_over());
        },
        kind: "Protocol",
        says: "announced 1 vCPU states, sent 0",
        told: PROTOCOL,
    },
    Case {
        name: "the same state twice",
        script: |p| {
            p.set_up();
            p.send_states();
            p.send(&p.template.state(0));
        },
        kind: "Protocol",
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
        kind: "Protocol",
        says: "state of vCPU 1",
        told: PROTOCOL,
    },
    Case {
        name: "another number of vCPUs than offered",
        script: |p| {
            p.set_up();
            p.send_states();
            p.send(&switch_over(p.template, p.template.missing.len() as u64, 2));
        },
        kind: "Protocol",
        says: "announced 2 vCPU states",
        told: PROTOCOL,
    },
    Case {
        name: "a state that is none",
        script: |p| {
            p.set_up();
            p.send(&p.template.missing_frame());
            p.send(&Frame::VcpuState(wire::VcpuState {
                vcpu: 0,
                state: vec![0x42; 100],
            }));
            p.send_device_states();
            p.send(&p.template.switch_over());
        },
        kind: "Machine",
        says: "the magic of an RV64 hart",
        told: Told::Why(ErrorCode::Machine),
    },
    Case {
        name: "a state with an impossible value",
        script: |p| {
            p.set_up();
            p.send(&p.template.missing_frame());
            let Frame::VcpuState(mut state) = p.template.state(0) else {
                unreachable!()
            };
            state.state[12] = 3;
            p.send(&Frame::VcpuState(state));
            p.send_device_states();
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
            let pages = p.template.pages();
            for frame in MissingRuns::frames(std::iter::once(pages..pages + 1)) {
                p.send(&Frame::Missing(frame));
            }
        },
        kind: "Wire",
        says: "outside 0 to 2047",
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

/// Failures after `Go`. In each, a vCPU waits for a page.
const POSTCOPY: &[Case] = &[
    Case {
        name: "closes all",
        script: |p| {
            let page = p.request();
            p.answer(page);
            // The next request shows that the answered page has arrived.
            p.request();
            p.close();
        },
        kind: "",
        says: "connection",
        told: Told::Nothing,
    },
    Case {
        name: "closes the control channel alone",
        script: |p| {
            p.request();
            p.control.shutdown();
            // The destination notices, and closes the others.
            hold(p.bulk());
        },
        kind: "",
        says: "connection",
        told: Told::Nothing,
    },
    Case {
        name: "damaged page data",
        script: |p| {
            let page = p.request();
            p.send_bulk(&damaged(frame_of(&[page], &WRONG), 3000));
        },
        kind: "",
        says: "Pages: checksum",
        told: PROTOCOL,
    },
    Case {
        name: "a damaged reply",
        script: |p| {
            let page = p.request();
            p.send_urgent(&urgent_reply_page(RamPage(page), &p.template.page(page)));
            p.send_urgent(&WRONG);
        },
        kind: "",
        says: "urgent page: checksum",
        told: PROTOCOL,
    },
    Case {
        name: "a page twice on the bulk channel",
        script: |p| {
            let page = p.another(p.request());
            p.push(page);
            p.send_bulk(&p.frame_of(page));
        },
        kind: "",
        says: "not missing, or sent it twice",
        told: PROTOCOL,
    },
    Case {
        name: "a page on the bulk channel, then on the urgent one",
        script: |p| {
            let page = p.another(p.request());
            p.push(page);
            p.expect_receipts();
            p.send_urgent(&urgent_reply_zero(RamPage(page)));
        },
        kind: "",
        says: "not missing, or sent it twice",
        told: PROTOCOL,
    },
    Case {
        name: "a page on the urgent channel, then on the bulk one",
        script: |p| {
            let page = p.request();
            p.answer(page);
            p.expect_urgent_receipt(1);
            p.send_bulk(&frame_of(&[page], &WRONG));
        },
        kind: "",
        says: "not missing, or sent it twice",
        told: PROTOCOL,
    },
    Case {
        name: "a page that was never missing",
        script: |p| {
            let page = p.template.vm.workload.memory_map().code_page();
            p.send_bulk(&frame_of(&[page.0], &WRONG));
        },
        kind: "",
        says: "not missing",
        told: PROTOCOL,
    },
    Case {
        name: "a run of missing and present pages",
        script: |p| {
            let page = p.request();
            p.send_bulk(&frame_of(&[page - 1, page], &WRONG));
        },
        kind: "",
        says: "one of the 2 from there",
        told: PROTOCOL,
    },
    Case {
        name: "a reply outside memory",
        script: |p| p.send_urgent(&urgent_reply_zero(RamPage(p.template.pages()))),
        kind: "",
        says: "outside 0 to 2047",
        told: PROTOCOL,
    },
    Case {
        name: "a request from the source",
        script: |p| p.send_urgent(&UrgentMessage::request(RamPage(3))),
        kind: "",
        says: "urgent",
        told: PROTOCOL,
    },
    Case {
        name: "too long a frame",
        script: |p| p.send_bulk(&header(FrameType::Pages.number(), u32::MAX)),
        kind: "",
        says: "exceeds its bound",
        told: PROTOCOL,
    },
    Case {
        name: "SwitchOver again",
        script: |p| p.send(&p.template.switch_over()),
        kind: "",
        says: "it sent SwitchOver",
        told: PROTOCOL,
    },
    Case {
        name: "drained with pages missing",
        script: |p| {
            let missing = p.template.missing.len() as u64;
            p.send(&Frame::Drained { missing });
        },
        kind: "",
        says: "receipts for missing pages",
        told: PROTOCOL,
    },
    Case {
        name: "drained of another number of pages",
        script: |p| p.send(&Frame::Drained { missing: 1 }),
        kind: "",
        says: "it announced 1 missing pages",
        told: PROTOCOL,
    },
    Case {
        name: "cancels after Go",
        script: |p| p.send(&Frame::Cancel),
        kind: "",
        says: "a message of another state",
        told: PROTOCOL,
    },
];

#[test]
fn a_vm_that_does_not_fit_is_refused() {
    if runs_in_child() {
        return;
    }
    discards(MISFITS);
}

#[test]
fn a_failure_in_precopy_discards_the_vm() {
    if runs_in_child() {
        return;
    }
    discards(PRECOPY);
}

#[test]
fn a_failure_on_unix_sockets_discards_the_vm() {
    if runs_in_child() {
        return;
    }
    discards_on(unix, &PRECOPY[..6]);
}

#[test]
fn a_failure_in_switch_over_discards_the_vm() {
    if runs_in_child() {
        return;
    }
    discards(SWITCH_OVER);
}

#[test]
fn a_source_that_breaks_the_protocol_costs_a_generation_only() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    recovers(&template, None, POSTCOPY);
}

#[test]
fn it_costs_a_kvm_vm_a_generation_only_by_every_delivery() {
    if runs_in_child() {
        return;
    }
    const NAME: &str = "it_costs_a_kvm_vm_a_generation_only_by_every_delivery";
    if !kvm_usable(NAME) {
        return;
    }
    let deliveries = kvm_deliveries(NAME);
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Kvm, 1, 8 * MIB);
    for delivery in deliveries {
        recovers(&template, Some(delivery), &POSTCOPY[..4]);
    }
}

/// A VM that is ready does not run without `Go`, after any cut.
#[test]
fn a_vm_never_runs_before_go() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    for cancelled in [false, true] {
        let received = attempt(&template, None, limits(LONG), |p, vm, _| {
            p.until_ready();
            for cut in 0..3 {
                assert!(vm.threads.is_paused(), "cut {cut}");
                p.close();
                if cut < 2 {
                    let (stage, missing) = p.resume(SourceStage::HandedOver);
                    assert_eq!(stage, DestinationStage::Ready);
                    assert_eq!(missing, p.unsent);
                }
            }
            assert!(vm.threads.is_paused());
            let said = if cancelled {
                SourceStage::Cancelled
            } else {
                SourceStage::HandedOver
            };
            let (stage, _) = p.resume(said);
            if cancelled {
                assert_eq!(stage, DestinationStage::Discarded);
                return p.send(&Frame::DiscardHeard);
            }
            p.open_channels();
            p.go();
            p.complete();
        });
        assert_eq!(received.outcome.is_err(), cancelled);
        assert_eq!(received.vm.threads.is_paused(), cancelled);
    }
}

/// A destination that discards keeps its answer until the source has heard it.
#[test]
fn a_discarded_copy_is_remembered_until_the_source_knows() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = attempt(&template, None, limits(LONG), |p, _, destination| {
        p.until_ready();
        p.close();
        wait_until("the loss", || !destination.status().connected);
        destination.give_up();
        wait_until("the end", || destination.status().stage == "discarded");
        for _ in 0..2 {
            let (stage, _) = p.resume(SourceStage::HandedOver);
            assert_eq!(stage, DestinationStage::Discarded);
        }
        p.send(&Frame::DiscardHeard);
    });
    let failure = received.outcome.unwrap_err();
    assert_eq!(failure.vm, DestinationVm::Discarded);
    assert!(received.vm.threads.is_paused());
}

/// A channel that does not fit the session is refused, and the session is unharmed.
#[test]
fn channels_that_do_not_fit_the_session_are_refused() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = attempt(&template, None, limits(LONG), |p, _, _| {
        p.start();
        p.resume(SourceStage::HandedOver);
        p.open_channels();
        for (key, due) in [
            (bulk(1, 2, 1), Status::TooManyChannels),
            (urgent(1, 2, 1), Status::TooManyChannels),
            (bulk(0, 2, 1), Status::ChannelTaken),
            (urgent(0, 1, 2), Status::OldGeneration),
            (bulk(0, 3, 1), Status::FutureGeneration),
            (urgent(0, 2, 1), Status::ChannelTaken),
            (ChannelKey::control(2), Status::ChannelTaken),
            (ChannelKey::control(1), Status::OldGeneration),
        ] {
            match p.dial(key) {
                Err(HandshakeError::Refused { status, .. }) => assert_eq!(status, due, "{key}"),
                other => panic!("{key}: {other:?}"),
            }
        }
        let stranger = Identity::random().unwrap();
        for key in [ChannelKey::control(1), ChannelKey::control(3)] {
            open(&p.to, &PLAIN, &stranger, key).unwrap_err();
        }
        p.complete();
    });
    received.outcome.unwrap();
    assert_eq!(received.status.reconnects, 1);
    received.vm.threads.pause(LIMIT).unwrap();
    received.vm.assert_verifies();
}

/// The numbers of channels count up from 1, and a source chooses them.
#[test]
fn the_last_generation_and_incarnation_are_like_any_other() {
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = attempt(&template, None, limits(LONG), |p, _, destination| {
        p.start();
        p.generation = u32::MAX - 1;
        let (stage, missing) = p.resume(SourceStage::HandedOver);
        assert_eq!((stage, &missing), (DestinationStage::Running, &p.unsent));
        for incarnation in [u32::MAX - 1, u32::MAX] {
            p.replace_bulk(p.dial(bulk(0, u32::MAX, incarnation)).unwrap());
            p.replace_urgent(p.dial(urgent(0, u32::MAX, incarnation)).unwrap());
        }
        p.push(p.unsent[0]);
        p.expect_receipts();
        // No later generation can follow. The guest runs on until an operator ends the session.
        p.control.shutdown();
        wait_until("the loss", || !destination.status().connected);
        assert_eq!(destination.status().stage, "running");
        assert_eq!(destination.status().channels, []);
        destination.give_up();
    });
    let failure = received.outcome.unwrap_err();
    let missing = template.missing.len() as u64 - 1;
    let paused = DestinationVm::PausedIncomplete { missing, asleep: 0 };
    assert_eq!(failure.vm, paused);
}

/// What comes of it later would be written to memory that the guest uses.
#[test]
fn a_frame_that_switch_over_overtakes_is_refused() {
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    for (name, head_first) in [("begun before", true), ("begun behind", false)] {
        let received = attempt(&template, None, limits(LONG), |p, _, _| {
            p.set_up();
            p.send_pass();
            let here = |page: &u64| !template.missing.contains(page);
            let data = template.vm.workload.memory_map().data();
            let page = data
                .filter(here)
                .find(|page| template.page(*page) != [0; PAGE_BYTES]);
            let frame = p.frame_of(page.expect("a page of data"));
            let head = &frame[..frame.len() - PAGE_BYTES];
            if head_first {
                p.send_bulk(head);
                // The reader takes it up meanwhile. If it does so later, it refuses the frame.
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
            p.send_states();
            p.send(&template.switch_over());
            if !head_first {
                p.expect(FrameType::Ready);
                p.send_bulk(head);
            }
            // The rest of the frame never comes. Behind SwitchOver, the page is not missing.
            assert_eq!(told(p), Told::Why(ErrorCode::Protocol), "{name}");
            if head_first {
                return;
            }
            let (stage, missing) = p.resume(SourceStage::HandedOver);
            assert_eq!((stage, &missing), (DestinationStage::Ready, &p.unsent));
            p.open_channels();
            p.go();
            p.complete();
        });
        if head_first {
            let failure = received.outcome.unwrap_err();
            assert_eq!(failure.vm, DestinationVm::Discarded, "{name}");
            assert!(failure.to_string().contains("SwitchOver"), "{failure}");
        } else {
            received.outcome.unwrap();
            received.vm.wait_progress(64);
            received.vm.assert_verifies();
        }
    }
}

/// KVM itself writes the clock page of a guest, and looks for it when the register is set. The page
/// may be missing then, or be here and not mapped yet.
#[test]
fn a_kvm_vm_whose_clock_page_is_missing_is_ready_all_the_same() {
    const SYSTEM_TIMES: [u32; 2] = [0x12, 0x4b56_4d01];
    let test = "a_kvm_vm_whose_clock_page_is_missing_is_ready_all_the_same";
    if !kvm_usable(test) {
        return;
    }
    for delivery in kvm_deliveries(test) {
        for is_missing in [true, false] {
            let mut template = Template::new(Engine::Kvm, 2, 8 * MIB);
            let stacks = [0, 1].map(|vcpu| template.vm.workload.memory_map().stack_page(vcpu).0);
            for (vcpu, stack) in (0..).zip(stacks) {
                for index in SYSTEM_TIMES {
                    template.set_msr(vcpu, index, (stack * PAGE_BYTES as u64) | 1);
                }
            }
            if is_missing {
                template.missing.splice(0..0, stacks);
            }
            let received = attempt(&template, Some(delivery), limits(LONG), |p, _, _| {
                p.start();
                p.complete();
            });
            received.outcome.unwrap();
            received.vm.wait_progress(64);
            for stack in stacks {
                let mut version = [0; 4];
                let ram = received.vm.ram();
                ram.try_read(RamPage(stack), &mut version).unwrap();
                assert_ne!(
                    u32::from_le_bytes(version),
                    0,
                    "{delivery}: KVM keeps no clock"
                );
            }
            received.vm.assert_no_failure("the guest runs");
        }
    }
}
