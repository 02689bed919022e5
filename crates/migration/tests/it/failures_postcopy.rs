//! Failures after the destination has said that the guest runs there: the source keeps its VM
//! paused, for good, whatever the peer did.

use crate::failing::destination::Played;
use crate::failing::{
    Clean, LONG, Via, assert_sentence, kind, limit_for, listen, patient, soon, wait_until_over,
};
use crate::support::{Vm, kvm_usable, migrate_to};
use pageferry_addr::RamPage;
use pageferry_machine::Engine;
use pageferry_migration::wire::{DrainCounts, ErrorCode, ErrorMessage, Frame, UrgentMessage};
use pageferry_migration::{SourceConfig, SourceFailure, SourceReport, SourceVm};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// One thing a destination can do once it has said that it runs the guest.
struct Case {
    name: &'static str,
    play: fn(Played),
    kind: &'static str,
    says: &'static str,
}

fn config(passes: u32, limit: Duration) -> SourceConfig {
    SourceConfig {
        precopy_passes: passes,
        answer_limit: limit,
        ..SourceConfig::default()
    }
}

fn attempt(
    vm: &Vm,
    via: Via,
    config: &SourceConfig,
    play: fn(Played),
) -> Result<SourceReport, SourceFailure> {
    let listener = listen(via);
    std::thread::scope(|scope| {
        let over = Arc::new(AtomicBool::new(false));
        let player = scope.spawn({
            let (listener, over) = (&listener, Arc::clone(&over));
            move || {
                play(Played {
                    over,
                    ..Played::accept(listener)
                });
            }
        });
        let outcome = soon("migrate", || migrate_to(vm, listener.local_addr(), config));
        over.store(true, Ordering::Release);
        player.join().unwrap();
        outcome
    })
}

/// Nothing of it moves, and every page is still there.
fn assert_stands_still(vm: &Vm, name: &str) {
    assert!(vm.threads.is_paused(), "{name}");
    let before = vm.done(0);
    std::thread::sleep(Duration::from_millis(20));
    assert!(vm.threads.is_paused(), "{name}");
    assert_eq!(vm.done(0), before, "{name}: the source resumed it");
    vm.verify();
}

fn run(engine: Engine, via: Via, passes: u32, cases: &[Case]) {
    for case in cases {
        let _clean = Clean::slate();
        let vm = Vm::running(engine, 1, 8 * MIB);
        // Pages with data on every way: no socket's buffer takes them all.
        vm.wait_progress(vm.workload.layout().share_pages());
        let config = config(passes, limit_for(case.kind));
        let failure = attempt(&vm, via, &config, case.play).expect_err(case.name);
        eprintln!("{}: {failure}", case.name);
        assert_eq!(
            (failure.vm, kind(&failure.error)),
            (SourceVm::GivenUp, case.kind),
            "{}: {failure}",
            case.name
        );
        assert_sentence(&failure);
        assert!(
            failure.to_string().contains(case.says),
            "{}: {failure}",
            case.name
        );
        assert_stands_still(&vm, case.name);
    }
}

const CASES: &[Case] = &[
    Case {
        name: "says Running and closes",
        play: |mut peer| {
            peer.set_up();
            peer.take_switch_over();
            peer.send(&Frame::Running { started_at_ns: 1 });
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
    },
    Case {
        name: "closes in mid post-copy",
        play: |mut peer| {
            peer.start();
            peer.ask(peer.missing[peer.missing.len() / 2]);
            peer.take();
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
    },
    Case {
        name: "gives up in mid post-copy and says why",
        play: |mut peer| {
            peer.start();
            peer.take();
            peer.send(&Frame::Error(ErrorMessage::new(
                ErrorCode::Protocol,
                "a page came twice",
            )));
        },
        kind: "PeerGaveUp",
        says: "a page came twice",
    },
    Case {
        name: "gives up, says why and ends the urgent connection while it is sent pages",
        play: |mut peer| {
            peer.start();
            peer.send(&Frame::Error(ErrorMessage::new(
                ErrorCode::Resources,
                "the disk is full",
            )));
            peer.urgent.shutdown();
            peer.last_word();
        },
        kind: "PeerGaveUp",
        says: "the disk is full",
    },
    Case {
        name: "is called off in post-copy",
        play: |mut peer| {
            peer.start();
            peer.take_whole_push();
            peer.send(&Frame::Cancel);
            peer.last_word();
        },
        kind: "PeerCancelled",
        says: "the peer cancelled",
    },
    Case {
        name: "stops reading in post-copy",
        play: |mut peer| {
            // Little enough in flight that the source notices.
            peer.stream.set_buffers(None, Some(4096)).unwrap();
            peer.start();
            // An end behind what is not read would not be seen.
            wait_until_over(&peer.over);
        },
        kind: "Timeout",
        says: "in time",
    },
    Case {
        name: "closes instead of DrainAck",
        play: |mut peer| {
            peer.start();
            peer.take_whole_push();
        },
        kind: "LinkLost",
        says: "closed the connection",
    },
    Case {
        name: "never says DrainAck",
        play: |mut peer| {
            peer.start();
            peer.take_whole_push();
            let Some(Frame::Error(_)) = peer.last_word() else {
                panic!("the destination is told")
            };
        },
        kind: "Timeout",
        says: "in time",
    },
    Case {
        name: "confirms fewer pages than were sent",
        play: |mut peer| {
            peer.start();
            let counts = peer.take_whole_push();
            assert_eq!((counts.background, counts.zero), peer.pushed);
            assert_eq!(counts.total(), Some(peer.missing.len() as u64));
            peer.send(&Frame::DrainAck(DrainCounts {
                background: counts.background - 1,
                ..counts
            }));
            peer.last_word();
        },
        kind: "Peer",
        says: "it confirmed",
    },
    Case {
        name: "confirms before the end",
        play: |mut peer| {
            peer.start();
            peer.send(&Frame::DrainAck(DrainCounts::default()));
            peer.take_whole_push();
            peer.last_word();
        },
        kind: "Peer",
        says: "it confirmed 0 urgent",
    },
    Case {
        name: "another frame instead of DrainAck",
        play: |mut peer| {
            peer.start();
            peer.take_whole_push();
            peer.send(&Frame::Running { started_at_ns: 2 });
            peer.last_word();
        },
        kind: "Peer",
        says: "DrainAck was due",
    },
    Case {
        name: "asks for a page outside memory",
        play: |mut peer| {
            peer.start();
            let outside = UrgentMessage::request(RamPage(peer.memory_pages));
            peer.urgent
                .write_all(&outside, &patient("request"))
                .unwrap();
            let Some(Frame::Error(_)) = peer.last_word() else {
                panic!("the destination is told")
            };
        },
        kind: "Wire",
        says: "outside 0 to 2047",
    },
    Case {
        name: "garbage on the urgent connection",
        play: |mut peer| {
            peer.start();
            peer.urgent
                .write_all(&[0xd1; 32], &patient("garbage"))
                .unwrap();
            let Some(Frame::Error(_)) = peer.last_word() else {
                panic!("the destination is told")
            };
        },
        kind: "Wire",
        says: "urgent request",
    },
    Case {
        name: "a request with flipped bits",
        play: |mut peer| {
            peer.start();
            let mut request = UrgentMessage::request(RamPage(7));
            request[8] ^= 1;
            peer.urgent
                .write_all(&request, &patient("request"))
                .unwrap();
            let Some(Frame::Error(_)) = peer.last_word() else {
                panic!("the destination is told")
            };
        },
        kind: "Wire",
        says: "checksum",
    },
    Case {
        name: "closes the urgent connection only",
        play: |mut peer| {
            peer.start();
            peer.urgent.shutdown();
            // What was not asked for may still come, but the end is never confirmed.
            let Some(Frame::Error(_)) = peer.last_word() else {
                panic!("the destination is told")
            };
        },
        kind: "LinkLost",
        says: "the urgent connection ended",
    },
];

#[test]
fn the_source_never_resumes_what_it_has_handed_over() {
    run(Engine::Soft, Via::Tcp, 0, CASES);
}

#[test]
fn the_source_never_resumes_what_it_has_handed_over_by_unix_sockets() {
    run(Engine::Soft, Via::Unix, 0, CASES);
}

#[test]
fn a_kvm_source_never_resumes_it_either() {
    if !kvm_usable("a_kvm_source_never_resumes_it_either") {
        return;
    }
    run(Engine::Kvm, Via::Tcp, 0, &CASES[..3]);
}

#[test]
fn a_destination_may_ask_twice_and_late() {
    for (via, passes) in [(Via::Tcp, 0), (Via::Unix, 1)] {
        let _clean = Clean::slate();
        let vm = Vm::running(Engine::Soft, 1, 8 * MIB);
        vm.wait_progress(64);
        let sent = attempt(&vm, via, &config(passes, LONG), |mut peer| {
            peer.start();
            let Some(last) = peer.missing.last().copied() else {
                return finish(&mut peer);
            };
            peer.ask(last);
            peer.ask(last);
            finish(&mut peer);
        });
        let sent = sent.unwrap();
        assert_eq!(
            sent.pages.urgent + sent.pages.background + sent.pages.zero,
            total_after(passes, &sent)
        );
        assert_stands_still(&vm, "completed");
    }
}

/// Confirms what the source says it sent and hears that it knows.
fn finish(peer: &mut Played) {
    let counts = peer.take_whole_push();
    assert!(counts.urgent <= 1, "a page was sent twice");
    assert_eq!((counts.background, counts.zero), peer.pushed);
    peer.send(&Frame::DrainAck(counts));
    assert_eq!(peer.last_word(), Some(Frame::Complete));
}

/// The pages sent, those that pre-copy sent as zero included.
fn total_after(passes: u32, sent: &SourceReport) -> u64 {
    let in_precopy: u64 = sent.passes.iter().map(|(pages, _)| pages).sum();
    assert_eq!(sent.passes.len() as u32, passes);
    sent.missing_at_start + in_precopy - sent.pages.precopy
}
