//! Failures of a destination that runs the guest. The source never resumes its VM for one: it opens
//! channels again, and the session completes.

use crate::alone::{LeakCheck, runs_in_child};
use crate::failures_source::{attempt, attempt_on, config};
use crate::scripted::destination::ScriptedDestination;
use crate::scripted::{
    ALLOCATED, LONG, SHORT, assert_failure, assert_loss, encoded, first_channel, say, take_urgent,
    within_limit,
};
use crate::support::{WorkloadVm, address_of, listen, migrate_to, receive_on, tcp, unix};
use pageferry_addr::RamPage;
use pageferry_machine::{Backing, Engine};
use pageferry_migration::wire::{
    DestinationStage, ErrorCode, ErrorMessage, Frame, FrameType, PAGE_BYTES, Role, Side,
    SourceStage, UrgentKind, UrgentMessage,
};
use pageferry_migration::{
    DestinationConfig, Limits, SourceConfig, SourceSession, SourceVm, Switch,
};
use pageferry_testkit::shaper::{Plan, Shaper};
use pageferry_testkit::wait_until;
use pageferry_transport::address::Address;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A behaviour of a destination that runs the guest. The source then leaves the generation.
struct Case {
    name: &'static str,
    script: fn(&mut ScriptedDestination<'_>),
    says: &'static str,
}

const CASES: &[Case] = &[
    Case {
        name: "closes all",
        script: |peer| {
            peer.ask(*peer.missing.last().unwrap());
            peer.take_frame();
            peer.close();
        },
        says: "the connection to the peer was lost",
    },
    Case {
        name: "gives a reason",
        script: |peer| {
            let why = ErrorMessage::new(ErrorCode::Protocol, "a page came twice");
            peer.send(&Frame::Error(why));
        },
        says: "a page came twice",
    },
    Case {
        name: "cancels, which is too late",
        script: |peer| peer.send(&Frame::Cancel),
        says: "the peer cancelled",
    },
    Case {
        name: "garbage on the control channel",
        script: |peer| peer.send_bytes(&[0x5a; 64]),
        says: "frame magic",
    },
    Case {
        name: "ends in the middle of a frame",
        script: |peer| {
            peer.send_bytes(&encoded(&Frame::Alive)[..20]);
            peer.control.shutdown_write();
        },
        says: "stopped after 20 of 32 bytes",
    },
    Case {
        name: "SetupAck again",
        script: |peer| peer.send(&Frame::SetupAck { keeps: true }),
        says: "it sent SetupAck",
    },
    Case {
        name: "Ready again",
        script: |peer| peer.send(&Frame::Ready),
        says: "it sent Ready",
    },
    Case {
        name: "Resumed where nothing was resumed",
        script: |peer| peer.send_resumed(DestinationStage::Running),
        says: "it sent Missing",
    },
    Case {
        name: "confirms before the end",
        script: |peer| {
            peer.send(&Frame::DrainAck {
                missing: peer.missing_at_start,
            });
        },
        says: "it sent DrainAck",
    },
    Case {
        name: "a receipt for what was not sent",
        script: |peer| peer.receipt(1 << 40),
        says: "its receipt is wrong",
    },
    Case {
        name: "a receipt that goes back",
        script: |peer| {
            peer.take_frame();
            peer.receipt(1);
            peer.take_frame();
            peer.receipt(2);
            peer.receipt(1);
        },
        says: "it is for 1 messages, where 2 to",
    },
    Case {
        name: "a receipt for answers that were not sent",
        script: |peer| peer.urgent_receipt(3),
        says: "its receipt is wrong",
    },
    Case {
        name: "garbage on a bulk channel",
        script: |peer| say(peer.bulk(), &[0x5a; 64]),
        says: "frame magic",
    },
    Case {
        name: "a request outside memory",
        script: |peer| peer.ask(peer.memory_pages),
        says: "outside 0 to 2047",
    },
    Case {
        name: "a request with flipped bits",
        script: |peer| {
            let mut request = UrgentMessage::request(RamPage(7));
            request[8] ^= 1;
            say(peer.urgent(), &request);
        },
        says: "checksum",
    },
];

fn full_vm() -> WorkloadVm {
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    // Every page has data, so no socket's buffer takes them all.
    vm.wait_progress(vm.workload.memory_map().share_pages());
    vm
}

#[test]
fn a_destination_that_breaks_the_protocol_costs_a_generation_only() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    for case in CASES {
        let vm = full_vm();
        let tried = attempt(&vm, &config(0, LONG), |peer, _| {
            peer.start();
            (case.script)(peer);
            peer.recover();
            assert!(vm.threads.is_paused(), "{}", case.name);
            peer.complete();
        });
        tried.outcome.expect(case.name);
        assert_loss(case.name, tried.status.last_loss.as_deref(), case.says);
        assert_eq!(tried.status.generation, 2, "{}", case.name);
        assert!(vm.threads.is_paused(), "{}", case.name);
        vm.assert_verifies();
    }
}

#[test]
fn a_lie_about_a_channel_that_ended_costs_a_generation_only() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let vm = full_vm();
    let tried = attempt(&vm, &config(0, LONG), |peer, _| {
        peer.start();
        let channel = first_channel(Role::Bulk, 1);
        let placed = 1 << 40;
        peer.send(&Frame::ChannelEnded { channel, placed });
        assert_eq!(peer.take_resume(), SourceStage::HandedOver);
        peer.send_resumed(DestinationStage::Running);
        // The source has counted this channel up already.
        peer.take_bulk(2);
        peer.take_urgent(1);
        peer.complete();
    });
    tried.outcome.unwrap();
    let says = "its receipt is wrong";
    assert_loss("lie", tried.status.last_loss.as_deref(), says);
    vm.assert_verifies();
}

/// Whichever side notices it first.
#[test]
fn a_lost_channel_counts_once() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let channel = first_channel(Role::Urgent, 1);
    for source_is_first in [false, true] {
        let vm = full_vm();
        let tried = attempt(&vm, &config(0, LONG), |peer, _| {
            peer.start();
            if source_is_first {
                peer.urgent().shutdown();
                let closed = peer.expect(FrameType::CloseChannel);
                assert_eq!(closed, Frame::CloseChannel(channel));
            }
            peer.send(&Frame::ChannelEnded { channel, placed: 0 });
            peer.expect(FrameType::Again);
            peer.take_urgent(2);
            peer.complete();
        });
        let report = tried.outcome.unwrap();
        assert_eq!(report.channels_lost, 1, "{source_is_first}");
        assert_eq!(tried.status.channels_lost, 1, "{source_is_first}");
        vm.assert_verifies();
    }
}

#[test]
fn a_missing_set_that_takes_back_pages_is_refused() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    for (more, says) in [(0, "that it has confirmed"), (1, "missing pages where")] {
        let vm = full_vm();
        let tried = attempt(&vm, &config(0, LONG), |peer, _| {
            peer.start();
            let page = *peer.missing.last().unwrap();
            let all = peer.missing.clone();
            peer.ask(page);
            // Unless the push was first.
            while peer.missing.contains(&page) {
                peer.take_frame();
                peer.receipt(peer.frames);
                if peer.missing.len() == 1 {
                    break;
                }
            }
            peer.close();
            assert_eq!(peer.take_resume(), SourceStage::HandedOver);
            let right = std::mem::replace(&mut peer.missing, all);
            if more == 0 {
                peer.send_resumed(DestinationStage::Running);
            } else {
                peer.send(&Frame::Resumed {
                    stage: DestinationStage::Running,
                    missing: 1,
                });
            }
            peer.missing = right;
            peer.recover();
            peer.complete();
        });
        tried.outcome.expect(says);
        assert_loss(says, tried.status.last_loss.as_deref(), says);
        vm.assert_verifies();
    }
}

#[test]
fn a_wrong_count_at_the_end_is_refused() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let vm = full_vm();
    let tried = attempt(&vm, &config(0, LONG), |peer, _| {
        peer.start();
        peer.take_push();
        peer.expect(FrameType::Drained);
        peer.send(&Frame::DrainAck { missing: 1 });
        assert_eq!(peer.take_resume(), SourceStage::Drained);
        peer.send_resumed(DestinationStage::Running);
        peer.complete();
    });
    tried.outcome.unwrap();
    assert_loss("count", tried.status.last_loss.as_deref(), "missing pages");
}

/// The reason is the operator, or the limit, and the last loss. It is no loss that was overcome.
#[test]
fn a_source_that_gives_up_leaves_its_vm_paused_and_says_why() {
    if runs_in_child() {
        return;
    }
    type Script = fn(&mut ScriptedDestination<'_>, &SourceSession);
    let cases: [(Script, &str); 3] = [
        (
            |_, session| session.give_up(),
            "the operator gave the migration up; the VM was handed over",
        ),
        (
            |peer, session| {
                peer.send_bytes(&[0x5a; 64]);
                peer.recover();
                peer.send(&Frame::Cancel);
                peer.take_resume();
                session.give_up();
                // This side's close would be a later loss.
                wait_until("the end", || session.status().is_over());
            },
            "gave the migration up; the last loss: the peer cancelled the migration; the VM",
        ),
        (
            |peer, _| peer.close(),
            "no connection for too long; the last loss: the connection to the peer was lost",
        ),
    ];
    let _leaks = LeakCheck::start();
    for (script, says) in cases {
        let vm = full_vm();
        let mut config = config(0, LONG);
        if says.starts_with("no connection") {
            config.limits.give_up_after = Some(SHORT);
        }
        let tried = attempt(&vm, &config, |peer, session| {
            peer.start();
            script(peer, session);
        });
        let failure = tried.outcome.unwrap_err();
        assert_failure(says, &failure, SourceVm::GivenUp, "GaveUp", says);
        assert!(vm.threads.is_paused());
        vm.assert_verifies();
    }
}

#[test]
fn a_destination_that_stops_reading_costs_a_generation_only() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    for listener in [tcp(), unix()] {
        let vm = full_vm();
        let mut config = config(0, LONG);
        config.limits.dead_after = SHORT;
        let tried = attempt_on(listener, &vm, &config, |peer, _| {
            peer.start();
            // Nobody reads the push.
            peer.recover();
            peer.complete();
        });
        tried.outcome.unwrap();
        assert_loss("stops", tried.status.last_loss.as_deref(), "in time");
        assert!(vm.threads.is_paused());
        vm.assert_verifies();
    }
}

/// A page that is requested twice, or after it was pushed, is sent once.
#[test]
fn a_destination_may_ask_twice_and_late() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    for listener in [tcp(), unix()] {
        let vm = full_vm();
        let config = SourceConfig {
            // The peer's first request comes sooner.
            push_after: Duration::from_secs(1),
            ..config(0, LONG)
        };
        let tried = attempt_on(listener, &vm, &config, |peer, _| {
            peer.start();
            let last = *peer.missing.last().unwrap();
            peer.ask(last);
            peer.ask(last);
            let head = take_urgent(peer.urgent(), Side::Source, peer.memory_pages);
            assert_eq!((head.kind, head.page), (UrgentKind::Page, RamPage(last)));
            let body = &mut [0; PAGE_BYTES];
            peer.urgent()
                .read_exact(body, &within_limit("page"))
                .unwrap();
            peer.missing.remove(&last);
            peer.urgent_receipt(1);
            // The push begins when nobody has requested a page for a while.
            let all = peer.missing.clone();
            peer.take_frame();
            peer.receipt(peer.frames);
            let pushed = all.difference(&peer.missing).next();
            peer.ask(*pushed.unwrap());
            peer.complete();
        });
        let sent = tried.outcome.unwrap();
        assert_eq!(sent.pages.urgent, 1);
        assert_eq!(sent.reconnects, 0);
        vm.assert_verifies();
    }
}

#[test]
fn a_long_wait_for_the_allocation_makes_another_pass() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    for late in [false, true] {
        let vm = full_vm();
        let tried = attempt(&vm, &config(1, LONG), |peer, _| {
            // Before the source begins the pass.
            let began = Instant::now();
            peer.acknowledge();
            if !late {
                peer.send(&ALLOCATED);
            }
            peer.take_pass();
            peer.receipt(peer.frames);
            if late {
                std::thread::sleep(3 * began.elapsed() + Duration::from_millis(100));
                peer.send(&ALLOCATED);
            }
            peer.run_on();
            peer.complete();
        });
        let sent = tried.outcome.unwrap();
        assert_eq!(sent.passes.len(), 1 + usize::from(late));
        vm.assert_verifies();
    }
}

/// Time limits measure silence, never totals.
#[test]
fn a_slow_and_healthy_link_completes() {
    let source = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    source.wait_progress(64);
    source.threads.pause(LONG).unwrap();
    let limits = Limits {
        dead_after: Duration::from_secs(4),
        ..Limits::default()
    };
    let destination = listen(DestinationConfig {
        limits: limits.clone(),
        allocate: false,
        ..DestinationConfig::default()
    });
    let Address::Tcp { port, .. } = address_of(&destination) else {
        panic!("a TCP address");
    };
    let to = (std::net::Ipv4Addr::LOCALHOST, port).into();
    let plan = Plan {
        rate: Some(60_000),
        ..Plan::default()
    };
    let shaper = Shaper::start(to, plan).unwrap();
    let config = SourceConfig {
        settings: Switch::AfterPasses(0).into(),
        limits,
        ..SourceConfig::default()
    };
    let (sent, (vm, received)) = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| receive_on(Backing::Shmem, &destination));
        let address = Address::Tcp {
            host: "127.0.0.1".into(),
            port: shaper.addr().port(),
        };
        let sent = migrate_to(&source, &address, &config);
        (sent, receiver.join().unwrap())
    });
    let sent = sent.unwrap();
    received.unwrap();
    eprintln!("{:?} in {} ms", sent.pages, sent.total.as_millis());
    assert!(sent.total > config.limits.dead_after);
    assert_eq!(sent.reconnects, 0);
    vm.threads.resume();
    vm.wait_progress(16);
    vm.assert_verifies();
}
