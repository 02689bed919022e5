//! A source that is no source, loses single channels, or leaves after the last page: seen by the
//! destination.

use crate::alone::{LeakCheck, runs_in_child};
use crate::failures_destination::{
    Case, PROTOCOL, Received, Told, attempt_on, damaged, frame_of, header, told,
};
use crate::scripted::source::{ScriptedSource, Template, WRONG, pages_frame, urgent};
use crate::scripted::{
    LONG, SHORT, assert_loss, assert_sentence, encoded, ends_soon, first_channel, kind, limits,
};
use crate::support::{LIMIT, WorkloadVm, address_of, listen, listen_on, tcp, unix};
use pageferry_addr::RamPage;
use pageferry_machine::Engine;
use pageferry_migration::wire::{
    self, DestinationStage, ErrorCode, ErrorMessage, Frame, FrameType, Pass, Role, RunKind,
    RunList, SourceStage, urgent_reply_page,
};
use pageferry_migration::{Destination, DestinationConfig, DestinationVm, Limits, Unobserved};
use pageferry_testkit::handshake::bulk;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MIB: u64 = 1 << 20;

const BEFORE_SETUP: &[Case] = &[
    Case {
        name: "closes in the middle of Setup",
        script: |p| {
            let bytes = encoded(&Frame::Setup(p.template.setup()));
            p.send_bytes(&bytes[..40]);
            p.close();
        },
        kind: "LinkLost",
        says: "stopped after 40 of",
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
        script: |p| p.send(&Frame::Go),
        kind: "Protocol",
        says: "it sent Go where Setup was due",
        told: PROTOCOL,
    },
    Case {
        name: "pages first",
        script: |p| p.send_bytes(&frame_of(&[1], &WRONG)),
        kind: "Wire",
        says: "Pages",
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
        script: |p| p.send_bytes(&header(FrameType::Setup.number(), 1 << 30)),
        kind: "Wire",
        says: "exceeds its bound",
        told: PROTOCOL,
    },
];

fn template() -> Template {
    Template::new(Engine::Soft, 1, 8 * MIB)
}

#[test]
fn what_is_no_offer_is_refused_before_there_is_a_vm() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let template = template();
    for listener in [tcp, unix] {
        let destination = listen_on(listener(), DestinationConfig::default());
        for case in BEFORE_SETUP {
            let (accepted, told) = std::thread::scope(|scope| {
                let peer = scope.spawn(|| {
                    let to = address_of(&destination);
                    let mut source = ScriptedSource::connect(&template, &to);
                    (case.script)(&mut source);
                    told(&source)
                });
                let accepted = ends_soon(case.name, || destination.accept(&|| false));
                (accepted.err(), peer.join().unwrap())
            });
            let error = accepted.expect(case.name);
            assert_eq!(kind(&error), case.kind, "{}: {error}", case.name);
            assert_sentence(&error);
            assert!(error.to_string().contains(case.says), "{error}");
            assert_eq!(told, case.told, "{}", case.name);
        }
    }
}

/// One source says nothing, and one has closed. The destination takes the next, and tells the first
/// that it is busy.
#[test]
fn a_session_that_says_nothing_keeps_nobody_out() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let template = template();
    let (told, strangers) = channel();
    let told = Mutex::new(told);
    let stranger = move |stranger: &pageferry_migration::Stranger| {
        told.lock().unwrap().send(stranger.why.to_string()).unwrap();
    };
    let destination = Destination::listen(tcp(), DestinationConfig::default(), stranger);
    let destination = Arc::new(destination.unwrap());
    let to = address_of(&destination);
    let silent = ScriptedSource::connect(&template, &to);
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| destination.accept(&|| false).unwrap());
        ScriptedSource::connect(&template, &to).close();
        let why = strangers.recv_timeout(LIMIT).unwrap();
        assert!(why.contains("said nothing"), "{why}");
        let last = ScriptedSource::connect(&template, &to);
        last.send(&Frame::Setup(template.setup()));
        let offered = taken.join().unwrap();
        assert_eq!(offered.offer().memory_bytes, 8 * MIB);
        let Some(Frame::Error(why)) = silent.last_frame() else {
            panic!("an Error frame was due");
        };
        assert_eq!(why.code(), ErrorCode::Busy);
        offered.refuse("enough");
    });
}

/// The destination acknowledges before it has allocated memory. Then pages may come, but a
/// switch-over may not.
#[test]
fn a_vm_is_acknowledged_before_its_memory_is_allocated() {
    if runs_in_child() {
        return;
    }
    const MEMORY: u64 = 2 << 30;
    let _leaks = LeakCheck::start();
    let template = template();
    let vm = WorkloadVm::empty(Engine::Soft, 1, MEMORY);
    // The allocation has a low priority. Beside a thread that computes on the only core it hardly
    // goes on, and no pause of the host changes its share.
    let mut core = CpuSet::new();
    let cores = sched_getaffinity(None).unwrap();
    core.set((0..CpuSet::MAX_CPU).find(|cpu| cores.is_set(*cpu)).unwrap());
    sched_setaffinity(None, &core).unwrap();
    let script = Arc::new(());
    let runs = Arc::downgrade(&script);
    let pages = vm.ram().pages();
    let destination = listen(DestinationConfig::default());
    let assert_incomplete = |due: &str| {
        let allocated = vm.ram().next_allocated(RamPage(0), 1).unwrap();
        assert!(
            allocated != Some(0..pages),
            "{due} waited for the allocation"
        );
    };
    std::thread::scope(|scope| {
        scope.spawn(|| while runs.strong_count() > 0 {});
        let peer = scope.spawn(|| {
            let _script = script;
            let mut source = ScriptedSource::connect(&template, &address_of(&destination));
            source.memory_pages = pages;
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
            source.open_channels();
            source.send(&Frame::Pass(Pass { pass: 1, pages: 1 }));
            // The last page is the last in the order of allocation.
            let mut list = RunList::new(pages);
            list.push(RamPage(pages - 1), RunKind::Data).unwrap();
            source.send_frame(&pages_frame(&list, &WRONG));
            source.expect_receipts();
            assert_incomplete("a receipt");
            source.send_states();
            source.send(&template.switch_over());
            told(&source)
        });
        let incoming = destination.accept(&|| false).unwrap();
        let received = ends_soon("receive", || {
            incoming.receive(&vm.running(), &vm.resolver, &|| false, &Unobserved)
        });
        let failure = received.unwrap_err();
        assert_eq!(failure.vm, DestinationVm::Discarded);
        let says = "before this side was ready";
        assert!(failure.to_string().contains(says), "{failure}");
        assert_eq!(peer.join().unwrap(), PROTOCOL);
    });
}

/// Checks that the guest visits every page here, and that every page is right.
fn assert_arrived(name: &str, received: Received) {
    let report = received.outcome.unwrap_or_else(|e| panic!("{name}: {e}"));
    assert!(report.missing_at_start > 0);
    let share = received.vm.workload.memory_map().share_pages();
    received.vm.wait_progress(2 * share);
    received.vm.assert_verifies();
}

/// Opens a channel again when the destination has ended it.
fn reopen(p: &mut ScriptedSource<'_>, role: Role, placed: u64) {
    let ended = Frame::ChannelEnded {
        channel: first_channel(role, 1),
        placed,
    };
    assert_eq!(p.expect(FrameType::ChannelEnded), ended);
    if role == Role::Urgent {
        p.replace_urgent(p.dial(urgent(0, 1, 2)).unwrap());
    } else {
        p.replace_bulk(p.dial(bulk(0, 1, 2)).unwrap());
    }
}

/// One channel is lost, even within a page. The session goes on in the same generation, and
/// requests that were not answered are repeated.
#[test]
fn a_channel_that_is_lost_alone_is_opened_again() {
    if runs_in_child() {
        return;
    }
    type Script = fn(&mut ScriptedSource<'_>, u64);
    let cases: [(&str, Script); 3] = [
        ("the urgent channel", |p, page| {
            p.urgent().shutdown();
            reopen(p, Role::Urgent, 0);
            assert_eq!(p.request(), page);
        }),
        ("the urgent channel within a reply", |p, page| {
            p.send_urgent(&urgent_reply_page(RamPage(page), &WRONG));
            p.send_urgent(&WRONG[..1000]);
            p.urgent().shutdown_write();
            reopen(p, Role::Urgent, 0);
            assert_eq!(p.request(), page);
        }),
        ("the bulk channel within a page", |p, page| {
            p.send_bulk(&frame_of(&[page], &WRONG)[..3000]);
            p.bulk().shutdown_write();
            reopen(p, Role::Bulk, p.frames);
        }),
    ];
    let _leaks = LeakCheck::start();
    let template = template();
    for listener in [tcp, unix] {
        for (name, script) in cases {
            let received = attempt_on(listener(), &template, None, limits(LONG), |p, _, _| {
                p.start();
                let page = p.request();
                script(p, page);
                p.complete();
            });
            let status = &received.status;
            assert_eq!((status.generation, status.reconnects), (1, 0), "{name}");
            assert_eq!(status.channels_lost, 1, "{name}");
            assert_loss(name, status.last_loss.as_deref(), "connection");
            assert_arrived(name, received);
        }
    }
}

/// The source notices it first. It counts here too.
#[test]
fn a_channel_that_the_source_closes_alone_is_opened_again() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let received = attempt_on(tcp(), &template(), None, limits(LONG), |p, _, _| {
        p.start();
        let page = p.request();
        p.send(&Frame::CloseChannel(first_channel(Role::Urgent, 1)));
        reopen(p, Role::Urgent, 0);
        assert_eq!(p.request(), page);
        p.complete();
    });
    assert_eq!(received.status.channels_lost, 1);
    assert_arrived("closed by the source", received);
}

#[test]
fn a_source_that_falls_silent_after_go_costs_a_generation_only() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let limits = Limits {
        dead_after: SHORT,
        ..limits(LONG)
    };
    let received = attempt_on(tcp(), &template(), None, limits, |p, _, _| {
        p.start();
        p.request();
        assert_ne!(told(p), Told::Nothing);
        p.recover();
        p.complete();
    });
    assert_loss("silent", received.status.last_loss.as_deref(), "in time");
    assert_arrived("silent", received);
}

#[test]
fn what_comes_after_every_page_was_confirmed_does_not_stop_the_guest() {
    if runs_in_child() {
        return;
    }
    type End = fn(&mut ScriptedSource<'_>);
    let ends: [(&str, End); 6] = [
        ("closes", |p| p.close()),
        ("half of Complete", |p| {
            p.send_bytes(&encoded(&Frame::Complete)[..9]);
            p.close();
        }),
        ("garbage", |p| p.send_bytes(&[0x31; 64])),
        ("an Error frame", |p| {
            let why = ErrorMessage::new(ErrorCode::Internal, "the answer came too late");
            p.send(&Frame::Error(why));
        }),
        ("silence", |_| {}),
        ("comes back", |p| {
            p.close();
            let (stage, missing) = p.resume(SourceStage::Drained);
            assert_eq!((stage, missing), (DestinationStage::Complete, Vec::new()));
            p.send(&Frame::Complete);
        }),
    ];
    let _leaks = LeakCheck::start();
    let template = template();
    for (name, end) in ends {
        let limits = Limits {
            dead_after: if name == "silence" { SHORT } else { LONG },
            // The longest wait for a source that stays away.
            connect: Duration::from_millis(300)
                + if name == "comes back" {
                    LONG
                } else {
                    Duration::ZERO
                },
            ..limits(LONG)
        };
        let received = attempt_on(tcp(), &template, None, limits, |p, _, _| {
            p.start();
            p.push_rest();
            let missing = p.template.missing.len() as u64;
            p.send(&Frame::Drained { missing });
            p.expect(FrameType::DrainAck);
            end(p);
            p.last_frame();
        });
        assert_eq!(received.status.stage, "completed", "{name}");
        assert_arrived(name, received);
    }
}

#[test]
fn a_page_nobody_asked_for_is_as_welcome_as_any() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let received = attempt_on(tcp(), &template(), None, limits(LONG), |p, _, _| {
        p.start();
        let waited_for = p.request();
        for _ in 0..3 {
            let page = p.another(waited_for);
            p.answer(page);
        }
        p.answer(waited_for);
        p.complete();
    });
    assert_eq!(received.status.reconnects, 0);
    assert_arrived("unasked", received);
}
