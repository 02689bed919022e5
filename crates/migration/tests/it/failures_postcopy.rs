//! Failures after the destination has confirmed that the guest runs there. The source keeps its VM
//! paused after each.

use crate::scripted::destination::ScriptedDestination;
use crate::scripted::{
    LONG, LeakCheck, Via, assert_failure, ends_soon, limit_for, listen, wait_until_over,
    within_limit,
};
use crate::support::{WorkloadVm, kvm_usable, migrate_to};
use pageferry_addr::RamPage;
use pageferry_machine::Engine;
use pageferry_migration::wire::{DrainCounts, ErrorCode, ErrorMessage, Frame, UrgentMessage};
use pageferry_migration::{SourceConfig, SourceFailure, SourceReport, SourceVm};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// A behaviour of a destination that has confirmed that it runs the guest.
struct Case {
    name: &'static str,
    script: fn(ScriptedDestination),
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
    vm: &WorkloadVm,
    via: Via,
    config: &SourceConfig,
    script: impl FnOnce(ScriptedDestination) + Send,
) -> Result<SourceReport, SourceFailure> {
    let listener = listen(via);
    std::thread::scope(|scope| {
        let over = Arc::new(AtomicBool::new(false));
        let scripted = scope.spawn({
            let (listener, over) = (&listener, Arc::clone(&over));
            move || {
                script(ScriptedDestination {
                    over,
                    ..ScriptedDestination::accept(listener)
                });
            }
        });
        let outcome = ends_soon("migrate", || migrate_to(vm, listener.local_addr(), config));
        over.store(true, Ordering::Release);
        scripted.join().unwrap();
        outcome
    })
}

/// Checks that no vCPU runs and that every page is intact.
fn assert_stands_still(vm: &WorkloadVm, name: &str) {
    assert!(vm.threads.is_paused(), "{name}");
    let before = vm.done(0);
    std::thread::sleep(Duration::from_millis(20));
    assert!(vm.threads.is_paused(), "{name}");
    assert_eq!(vm.done(0), before, "{name}: the source resumed it");
    vm.assert_verifies();
}

fn run(engine: Engine, via: Via, passes: u32, cases: &[Case]) {
    for case in cases {
        let _leaks = LeakCheck::start();
        let vm = WorkloadVm::booted(engine, 1, 8 * MIB);
        // Every page has data, so no socket's buffer takes them all.
        vm.wait_progress(vm.workload.memory_map().share_pages());
        let config = config(passes, limit_for(case.kind));
        let failure = attempt(&vm, via, &config, case.script).expect_err(case.name);
        assert_failure(case.name, &failure, SourceVm::GivenUp, case.kind, case.says);
        assert_stands_still(&vm, case.name);
    }
}

const CASES: &[Case] = &[
    Case {
        name: "says Running and closes",
        script: |mut peer| {
            peer.set_up();
            peer.take_switch_over();
            peer.send(&Frame::Running { started_at_ns: 1 });
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
    },
    Case {
        name: "closes in mid post-copy",
        script: |mut peer| {
            peer.start();
            peer.ask(peer.missing[peer.missing.len() / 2]);
            peer.take();
        },
        kind: "LinkLost",
        says: "the connection to the peer was lost",
    },
    Case {
        name: "gives up in mid post-copy and says why",
        script: |mut peer| {
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
        script: |mut peer| {
            peer.start();
            peer.send(&Frame::Error(ErrorMessage::new(
                ErrorCode::Resources,
                "the disk is full",
            )));
            peer.urgent.shutdown();
            peer.last_frame();
        },
        kind: "PeerGaveUp",
        says: "the disk is full",
    },
    Case {
        name: "cancels in post-copy",
        script: |mut peer| {
            peer.start();
            peer.take_whole_push();
            peer.send(&Frame::Cancel);
            peer.last_frame();
        },
        kind: "PeerCancelled",
        says: "the peer cancelled",
    },
    Case {
        name: "stops reading in post-copy",
        script: |mut peer| {
            // A small buffer lets the source notice.
            peer.stream.set_buffers(None, Some(4096)).unwrap();
            peer.start();
            // The source would not see a close behind unread bytes.
            wait_until_over(&peer.over);
        },
        kind: "Timeout",
        says: "in time",
    },
    Case {
        name: "closes instead of DrainAck",
        script: |mut peer| {
            peer.start();
            peer.take_whole_push();
        },
        kind: "LinkLost",
        says: "closed the connection",
    },
    Case {
        name: "never says DrainAck",
        script: |mut peer| {
            peer.start();
            peer.take_whole_push();
            let Some(Frame::Error(_)) = peer.last_frame() else {
                panic!("an Error frame was due")
            };
        },
        kind: "Timeout",
        says: "in time",
    },
    Case {
        name: "confirms fewer pages than were sent",
        script: |mut peer| {
            peer.start();
            let counts = peer.take_whole_push();
            assert_eq!((counts.background, counts.zero), peer.pushed);
            assert_eq!(counts.total(), Some(peer.missing.len() as u64));
            peer.send(&Frame::DrainAck(DrainCounts {
                background: counts.background - 1,
                ..counts
            }));
            peer.last_frame();
        },
        kind: "Peer",
        says: "it confirmed",
    },
    Case {
        name: "confirms before the end",
        script: |mut peer| {
            peer.start();
            peer.send(&Frame::DrainAck(DrainCounts::default()));
            peer.take_whole_push();
            peer.last_frame();
        },
        kind: "Peer",
        says: "it confirmed 0 urgent",
    },
    Case {
        name: "another frame instead of DrainAck",
        script: |mut peer| {
            peer.start();
            peer.take_whole_push();
            peer.send(&Frame::Running { started_at_ns: 2 });
            peer.last_frame();
        },
        kind: "Peer",
        says: "DrainAck was due",
    },
    Case {
        name: "asks for a page outside memory",
        script: |mut peer| {
            peer.start();
            let outside = UrgentMessage::request(RamPage(peer.memory_pages));
            peer.urgent
                .write_all(&outside, &within_limit("request"))
                .unwrap();
            let Some(Frame::Error(_)) = peer.last_frame() else {
                panic!("an Error frame was due")
            };
        },
        kind: "Wire",
        says: "outside 0 to 2047",
    },
    Case {
        name: "garbage on the urgent connection",
        script: |mut peer| {
            peer.start();
            peer.urgent
                .write_all(&[0xd1; 32], &within_limit("garbage"))
                .unwrap();
            let Some(Frame::Error(_)) = peer.last_frame() else {
                panic!("an Error frame was due")
            };
        },
        kind: "Wire",
        says: "urgent request",
    },
    Case {
        name: "a request with flipped bits",
        script: |mut peer| {
            peer.start();
            let mut request = UrgentMessage::request(RamPage(7));
            request[8] ^= 1;
            peer.urgent
                .write_all(&request, &within_limit("request"))
                .unwrap();
            let Some(Frame::Error(_)) = peer.last_frame() else {
                panic!("an Error frame was due")
            };
        },
        kind: "Wire",
        says: "checksum",
    },
    Case {
        name: "closes the urgent connection only",
        script: |mut peer| {
            peer.start();
            peer.urgent.shutdown();
            // Unrequested pages may still arrive, but the end is never confirmed.
            let Some(Frame::Error(_)) = peer.last_frame() else {
                panic!("an Error frame was due")
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
        let _leaks = LeakCheck::start();
        let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
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

#[test]
fn a_long_wait_for_the_allocation_makes_another_pass() {
    for (late, passes) in [(false, 1), (true, 2)] {
        let _leaks = LeakCheck::start();
        let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
        vm.wait_progress(64);
        let sent = attempt(&vm, Via::Unix, &config(1, LONG), |mut peer| {
            peer.set_up_late(late);
            peer.run_on();
            finish(&mut peer);
        });
        assert_eq!(sent.unwrap().passes.len(), passes);
        assert_stands_still(&vm, "completed");
    }
}

/// Confirms the counts of the source and waits for Complete.
fn finish(peer: &mut ScriptedDestination) {
    let counts = peer.take_whole_push();
    assert!(counts.urgent <= 1, "a page was sent twice");
    assert_eq!((counts.background, counts.zero), peer.pushed);
    peer.send(&Frame::DrainAck(counts));
    assert_eq!(peer.last_frame(), Some(Frame::Complete));
}

/// Returns the number of pages sent, including those that pre-copy sent as zero.
fn total_after(passes: u32, sent: &SourceReport) -> u64 {
    let in_precopy: u64 = sent.passes.iter().map(|(pages, _)| pages).sum();
    assert_eq!(sent.passes.len() as u32, passes);
    sent.missing_at_start + in_precopy - sent.pages.precopy
}
