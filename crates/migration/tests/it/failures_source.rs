//! Failures of a destination, seen by the source. Before `Go`, and when the destination says that
//! its copy was discarded, the source's VM runs on unharmed and can be migrated again.

use crate::alone::{LeakCheck, runs_in_child};
use crate::scripted::destination::ScriptedDestination;
use crate::scripted::{
    ALLOCATED, LONG, PATIENCE, SHORT, assert_failure, assert_sentence, encoded, ends_soon, kind,
    limits, limits_for, say, within_limit,
};
use crate::support::{WorkloadVm, kvm_usable, move_vm, tcp, unix};
use pageferry_machine::{Engine, MachineError};
use pageferry_migration::wire::{
    DestinationStage, ErrorCode, ErrorMessage, Frame, FrameHeader, FrameType, HEADER_BYTES,
    HELLO_BYTES, Hello, HelloReply, Role, Side, SourceStage, Status, Text, UrgentMessage,
};
use pageferry_migration::{
    Change, DestinationConfig, Route, SessionStatus, SourceConfig, SourceFailure, SourceReport,
    SourceSession, SourceVm, Switch, Unobserved, migrate,
};
use pageferry_testkit::handshake::{Destination as Host, PLAIN};
use pageferry_testkit::wait_until;
use pageferry_transport::channel::{Connection, Listener};
use pageferry_userfault::PageBitmap;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// A behaviour of a destination.
struct Case {
    name: &'static str,
    passes: u32,
    /// Acts as the destination. It may cancel the source's migration.
    script: fn(&mut ScriptedDestination<'_>, &SourceSession),
    kind: &'static str,
    /// A part of the expected message.
    says: &'static str,
}

pub(crate) fn config(passes: u32, limit: Duration) -> SourceConfig {
    SourceConfig {
        settings: Switch::AfterPasses(passes).into(),
        busy_limit: Duration::ZERO,
        setup_limit: limit,
        limits: limits(limit),
        ..SourceConfig::default()
    }
}

/// Ends a migration whose script has failed, so that the test ends too.
struct EndsOnPanic<'a>(&'a SourceSession);

impl Drop for EndsOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.cancel();
            self.0.give_up();
        }
    }
}

/// The outcome of a migration to a scripted destination, and its last status.
pub(crate) struct Attempt {
    pub(crate) outcome: Result<SourceReport, SourceFailure>,
    pub(crate) status: SessionStatus,
}

/// Migrates to a peer that listens on `address`.
fn attempt_at(
    vm: &WorkloadVm,
    address: &pageferry_transport::address::Address,
    config: &SourceConfig,
    script: impl FnOnce(&SourceSession) + Send,
) -> Attempt {
    let session = SourceSession::new().unwrap();
    let route = Route::To(address.clone());
    let outcome = std::thread::scope(|scope| {
        let scripted = scope.spawn(|| {
            let _ends = EndsOnPanic(&session);
            script(&session);
        });
        let outcome = ends_soon("migrate", || {
            migrate(
                &vm.running(),
                &route,
                b"test",
                config,
                &session,
                &Unobserved,
            )
        });
        scripted.join().unwrap();
        outcome
    });
    Attempt {
        outcome,
        status: session.status(),
    }
}

/// Migrates to a scripted destination.
pub(crate) fn attempt(
    vm: &WorkloadVm,
    config: &SourceConfig,
    script: impl FnOnce(&mut ScriptedDestination<'_>, &SourceSession) + Send,
) -> Attempt {
    attempt_on(tcp(), vm, config, script)
}

/// Migrates to a scripted destination on this listener.
pub(crate) fn attempt_on(
    listener: Listener,
    vm: &WorkloadVm,
    config: &SourceConfig,
    script: impl FnOnce(&mut ScriptedDestination<'_>, &SourceSession) + Send,
) -> Attempt {
    let host = Host::on(listener, PLAIN, PATIENCE);
    attempt_at(vm, &host.address, config, |session| {
        script(&mut ScriptedDestination::accept(&host), session);
    })
}

/// Checks that the VM runs on unharmed.
fn assert_runs_on(vm: &WorkloadVm, name: &str) {
    assert!(!vm.threads.is_paused(), "{name}");
    let none = PageBitmap::new(vm.ram().pages() as usize);
    let log = vm.machine.harvest_dirty(&none, true);
    assert!(
        matches!(log, Err(MachineError::WrongState(_))),
        "{name}: the dirty log is left on"
    );
    vm.wait_progress(16);
    vm.assert_verifies();
    vm.threads.resume();
}

fn assert_failed(case: &Case, attempt: Attempt) {
    let failure = attempt.outcome.expect_err(case.name);
    assert_failure(case.name, &failure, SourceVm::Runs, case.kind, case.says);
}

/// Runs all cases with one VM.
fn run(engine: Engine, vcpus: u32, cases: &[Case]) {
    run_on(tcp, engine, vcpus, cases);
}

/// Runs all cases with one VM and such listeners.
fn run_on(listener: fn() -> Listener, engine: Engine, vcpus: u32, cases: &[Case]) {
    let _leaks = LeakCheck::start();
    let vm = WorkloadVm::booted(engine, vcpus, 8 * MIB);
    // Every page has data, so no socket's buffer takes them all.
    vm.wait_progress(vm.workload.memory_map().share_pages());
    for case in cases {
        let config = SourceConfig {
            limits: limits_for(case.kind),
            ..config(case.passes, limits_for(case.kind).silence)
        };
        assert_failed(case, attempt_on(listener(), &vm, &config, case.script));
        assert_runs_on(&vm, case.name);
    }
    // The VM can still be migrated.
    let moved = move_vm(vm, &SourceConfig::default(), DestinationConfig::default());
    moved.sent.unwrap();
    moved.received.unwrap();
    moved.destination.wait_progress(16);
    moved.destination.assert_verifies();
}

/// Accepts the first connection and receives its Hello.
fn hello(listener: &Listener) -> (Connection, Hello) {
    let connection = listener.accept(&within_limit("a source")).unwrap();
    let mut bytes = [0; HELLO_BYTES];
    connection
        .read_exact(&mut bytes, &within_limit("Hello"))
        .unwrap();
    (connection, Hello::decode(&bytes).unwrap())
}

/// Keeps the connection open until the source closes it.
pub(crate) fn hold(connection: &Connection) {
    let mut byte = [0];
    while connection
        .read_exact(&mut byte, &within_limit("the end"))
        .is_ok()
    {}
}

/// The answer to a Hello.
type Answer = fn(&Connection, &Hello);

fn refuse(connection: &Connection, hello: &Hello, status: Status) {
    say(
        connection,
        &HelloReply::refuse(hello.session, status).encode(),
    );
}

/// Says that it speaks another version.
fn other_version(connection: &Connection, hello: &Hello, version: u16) {
    let reply = HelloReply {
        version,
        ..HelloReply::refuse(hello.session, Status::VersionUnsupported)
    };
    say(connection, &reply.encode());
}

const HANDSHAKE: &[(&str, Answer, &str, &str)] = &[
    (
        "speaks HTTP",
        |c, _| say(c, b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        "Wire",
        "(HTTP?)",
    ),
    (
        "speaks SSH",
        |c, _| say(c, b"SSH-2.0-OpenSSH_9.7\r\n"),
        "Wire",
        "(SSH?)",
    ),
    ("garbage", |c, _| say(c, &[0x9e; 300]), "Wire", "9e 9e 9e"),
    (
        "closes at once",
        |c, _| c.shutdown(),
        "LinkLost",
        "closed the connection",
    ),
    (
        "closes after half a reply",
        |c, hello| {
            say(c, &HelloReply::accept(hello, [7; 16]).encode()[..30]);
            c.shutdown();
        },
        "LinkLost",
        "stopped after 30 of 64 bytes",
    ),
    ("never replies", |_, _| {}, "Timeout", "HelloReply"),
    (
        "a damaged reply",
        |c, hello| {
            let mut reply = HelloReply::accept(hello, [7; 16]).encode();
            reply[20] ^= 1;
            say(c, &reply);
        },
        "Wire",
        "checksum",
    ),
    (
        "accepts in another version",
        |c, hello| {
            let reply = HelloReply {
                version: 9,
                ..HelloReply::accept(hello, [7; 16])
            };
            say(c, &reply.encode());
        },
        "Wire",
        "versions 9 to 9",
    ),
    (
        "speaks version 1",
        |c, hello| other_version(c, hello, 1),
        "Refused",
        "version",
    ),
    (
        "speaks version 2",
        |c, hello| other_version(c, hello, 2),
        "Refused",
        "version",
    ),
    (
        "is busy",
        |c, hello| refuse(c, hello, Status::Busy),
        "Refused",
        "busy",
    ),
];

#[test]
fn the_vm_runs_on_after_a_failed_handshake() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    let on_tcp = HANDSHAKE.iter().map(|case| (tcp(), case));
    let on_unix = HANDSHAKE[..4].iter().map(|case| (unix(), case));
    for (listener, (name, answer, kind, says)) in on_tcp.chain(on_unix) {
        let config = config(1, limits_for(kind).connect);
        let tried = attempt_at(&vm, listener.local_addr(), &config, |_| {
            let (connection, hello) = hello(&listener);
            answer(&connection, &hello);
            hold(&connection);
        });
        let failure = tried.outcome.expect_err(name);
        assert_failure(name, &failure, SourceVm::Runs, kind, says);
        assert_runs_on(&vm, name);
    }
}

const SETUP: &[Case] = &[
    Case {
        name: "closes after Setup",
        passes: 1,
        script: |peer, _| {
            peer.take_setup();
            peer.close();
        },
        kind: "LinkLost",
        says: "closed the connection",
    },
    Case {
        name: "never answers Setup",
        passes: 1,
        script: |peer, _| {
            peer.take_setup();
            let Some(Frame::Error(why)) = peer.last_frame() else {
                panic!("an Error frame was due")
            };
            assert!(why.message().contains("in time"), "{}", why.message());
        },
        kind: "Timeout",
        says: "in time",
    },
    Case {
        name: "refuses the offer",
        passes: 1,
        script: |peer, _| {
            peer.take_setup();
            peer.send(&Frame::Error(ErrorMessage::new(
                ErrorCode::SetupRefused,
                "no room here",
            )));
            peer.last_frame();
        },
        kind: "PeerGaveUp",
        says: "no room here",
    },
    Case {
        name: "an Error frame with commands for a terminal",
        passes: 1,
        script: |peer, _| {
            peer.take_setup();
            let raw = b"\x1b[2J\nyour disk is empty";
            let mut frame = encoded(&Frame::Error(ErrorMessage::new(
                ErrorCode::Internal,
                &"y".repeat(raw.len()),
            )));
            frame[HEADER_BYTES..].copy_from_slice(raw);
            reseal(&mut frame);
            peer.send_bytes(&frame);
            peer.last_frame();
        },
        kind: "Wire",
        says: "field `message` holds 0x1b",
    },
    Case {
        name: "SetupAck, then an Error frame",
        passes: 1,
        script: |peer, _| {
            peer.acknowledge();
            peer.send(&Frame::Error(ErrorMessage::new(
                ErrorCode::Resources,
                "out of memory",
            )));
            peer.last_frame();
        },
        kind: "PeerGaveUp",
        says: "out of memory",
    },
    Case {
        name: "a frame that only sources send",
        passes: 1,
        script: |peer, _| {
            peer.take_setup();
            peer.send(&Frame::Complete);
            peer.last_frame();
        },
        kind: "Wire",
        says: "the destination never sends",
    },
    Case {
        name: "a frame out of turn",
        passes: 1,
        script: |peer, _| {
            peer.take_setup();
            peer.send(&Frame::Running { started_at_ns: 1 });
            let Some(Frame::Error(why)) = peer.last_frame() else {
                panic!("an Error frame was due")
            };
            assert_eq!(why.code(), ErrorCode::Protocol);
        },
        kind: "Protocol",
        says: "it sent Running",
    },
    Case {
        name: "a frame with flipped bits",
        passes: 1,
        script: |peer, _| {
            peer.take_setup();
            let mut bytes = encoded(&Frame::SetupAck { keeps: true });
            bytes[30] ^= 4;
            peer.send_bytes(&bytes);
            peer.last_frame();
        },
        kind: "Wire",
        says: "checksum",
    },
    Case {
        name: "cancels during set-up",
        passes: 1,
        script: |peer, _| {
            peer.acknowledge();
            peer.send(&Frame::Cancel);
            peer.last_frame();
        },
        kind: "PeerCancelled",
        says: "the peer cancelled",
    },
];

const PRECOPY: &[Case] = &[
    Case {
        name: "closes in pre-copy",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.take_frame();
            peer.close();
        },
        kind: "LinkLost",
        says: "connection",
    },
    Case {
        name: "closes the bulk channel only",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.take_frame();
            peer.bulk().shutdown();
            peer.last_frame();
        },
        kind: "LinkLost",
        says: "connection",
    },
    Case {
        name: "closes the urgent channel only",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.urgent().shutdown();
            peer.last_frame();
        },
        kind: "LinkLost",
        says: "connection",
    },
    Case {
        name: "a receipt for what was not sent",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.take_frame();
            peer.receipt(1 << 40);
            peer.last_frame();
        },
        kind: "Protocol",
        says: "its receipt is wrong: it is for 1099511627776 messages",
    },
    Case {
        name: "a receipt that goes back",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.take_frame();
            peer.take_frame();
            peer.receipt(2);
            peer.receipt(1);
            peer.last_frame();
        },
        kind: "Protocol",
        says: "its receipt is wrong: it is for 1 messages",
    },
    Case {
        name: "half a receipt",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.take_frame();
            say(peer.bulk(), &encoded(&Frame::Receipt { frames: 1 })[..20]);
            peer.bulk().shutdown_write();
            peer.last_frame();
        },
        kind: "LinkLost",
        says: "closed the connection",
    },
    Case {
        name: "requests a page before the hand-over",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.ask(3);
            peer.last_frame();
        },
        kind: "Protocol",
        says: "before the VM was handed over",
    },
    Case {
        name: "is ready twice",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.send(&ALLOCATED);
            peer.last_frame();
        },
        kind: "Protocol",
        says: "SetupProgress after it was ready",
    },
    Case {
        name: "sends no receipt",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.take_pass();
            peer.last_frame();
        },
        kind: "Timeout",
        says: "in time",
    },
];

/// Sends what is wrong in place of `Ready`, then confirms in the next generation that this copy is
/// discarded.
fn instead_of_ready(peer: &mut ScriptedDestination<'_>, wrong: &[u8]) {
    peer.set_up();
    peer.take_switch_over();
    peer.send_bytes(wrong);
    peer.control.shutdown_write();
    peer.discard_in_next_generation();
}

const SWITCH_OVER: &[Case] = &[
    Case {
        name: "closes after SwitchOver",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.take_switch_over();
            peer.close();
            peer.discard_in_next_generation();
        },
        kind: "LinkLost",
        says: "connection",
    },
    Case {
        name: "closes after SwitchOver, no pre-copy",
        passes: 0,
        script: |peer, _| {
            peer.set_up();
            let switch_over = peer.take_switch_over();
            assert_eq!(switch_over.missing_pages, peer.memory_pages);
            peer.close();
            peer.discard_in_next_generation();
        },
        kind: "LinkLost",
        says: "connection",
    },
    Case {
        name: "cannot load a state",
        passes: 1,
        script: |peer, _| {
            let why = ErrorMessage::new(ErrorCode::Machine, "no such register");
            instead_of_ready(peer, &encoded(&Frame::Error(why)));
        },
        kind: "PeerGaveUp",
        says: "no such register",
    },
    Case {
        name: "garbage instead of Ready",
        passes: 1,
        script: |peer, _| instead_of_ready(peer, &[0x5a; 64]),
        kind: "Wire",
        says: "frame magic",
    },
    Case {
        name: "half of Ready",
        passes: 1,
        script: |peer, _| instead_of_ready(peer, &encoded(&Frame::Ready)[..20]),
        kind: "LinkLost",
        says: "stopped after 20 of 32 bytes",
    },
    Case {
        name: "Running instead of Ready",
        passes: 1,
        script: |peer, _| {
            instead_of_ready(peer, &encoded(&Frame::Running { started_at_ns: 1 }));
        },
        kind: "Protocol",
        says: "it sent Running",
    },
    Case {
        name: "DrainAck instead of Ready",
        passes: 1,
        script: |peer, _| instead_of_ready(peer, &encoded(&Frame::DrainAck { missing: 0 })),
        kind: "Protocol",
        says: "it sent DrainAck",
    },
    Case {
        name: "cancels at switch-over",
        passes: 1,
        script: |peer, _| instead_of_ready(peer, &encoded(&Frame::Cancel)),
        kind: "PeerCancelled",
        says: "the peer cancelled",
    },
    Case {
        name: "never says Ready",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.take_switch_over();
            peer.discard_in_next_generation();
        },
        kind: "Timeout",
        says: "in time",
    },
    Case {
        name: "never says Ready, and never answers again",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.take_switch_over();
            assert_eq!(peer.take_resume(), SourceStage::Cancelled);
            // The source runs its guest already. It asks on for a while.
        },
        kind: "Timeout",
        says: "in time",
    },
];

/// The destination has its copy, and discards it.
const DISCARDED: &[Case] = &[
    Case {
        name: "discards the VM instead of Ready",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.take_switch_over();
            peer.discard("no more memory");
        },
        kind: "Discarded",
        says: "no more memory; the VM runs on",
    },
    Case {
        name: "discarded the VM while the source was not scheduled",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.take_switch_over();
            // Both frames have arrived when the source reads.
            let mut bytes = encoded(&Frame::Ready);
            bytes.extend(encoded(&Frame::Discarded(Text::new("no Go came"))));
            peer.send_bytes(&bytes);
            peer.expect(FrameType::Go);
            peer.expect(FrameType::DiscardHeard);
        },
        kind: "Discarded",
        says: "no Go came; the VM runs on",
    },
    Case {
        name: "discarded the VM while Go was under way",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.take_switch_over();
            peer.send(&Frame::Ready);
            peer.expect(FrameType::Go);
            peer.discard("no Go came");
        },
        kind: "Discarded",
        says: "no Go came; the VM runs on",
    },
    Case {
        name: "discarded the VM and does not read what is pushed",
        passes: 0,
        script: |peer, _| {
            peer.set_up();
            peer.take_switch_over();
            peer.send(&Frame::Ready);
            peer.expect(FrameType::Go);
            // The push fills the sockets, and nobody reads it.
            std::thread::sleep(Duration::from_millis(100));
            peer.discard("no Go came");
        },
        kind: "Discarded",
        says: "no Go came; the VM runs on",
    },
    Case {
        name: "discarded the VM, and its answer was cut off",
        passes: 1,
        script: |peer, _| {
            peer.set_up();
            peer.take_switch_over();
            peer.send(&Frame::Ready);
            peer.expect(FrameType::Go);
            peer.send_bytes(&encoded(&Frame::Discarded(Text::new("no Go came")))[..33]);
            peer.close();
            assert_eq!(peer.take_resume(), SourceStage::HandedOver);
            // Once more.
            peer.close();
            assert_eq!(peer.take_resume(), SourceStage::HandedOver);
            peer.say_discarded();
        },
        kind: "Discarded",
        says: "its reason was lost with a connection",
    },
];

const CANCEL: &[Case] = &[
    Case {
        name: "cancelled during set-up",
        passes: 1,
        script: |peer, session| {
            peer.take_setup();
            session.cancel();
            assert_eq!(peer.last_frame(), Some(Frame::Cancel));
        },
        kind: "Cancelled",
        says: "was cancelled",
    },
    Case {
        name: "cancelled in pre-copy",
        passes: 3,
        script: |peer, session| {
            peer.set_up();
            peer.take_pass();
            // The guest writes so little that the first pass could be the last one.
            let on_command = Change {
                switch: Some(Switch::Manual),
                ..Change::default()
            };
            session.set(&on_command).unwrap();
            peer.receipt(peer.frames);
            session.cancel();
            assert_eq!(peer.last_frame(), Some(Frame::Cancel));
        },
        kind: "Cancelled",
        says: "was cancelled",
    },
    Case {
        name: "cancelled while a pass has no receipt",
        passes: 1,
        script: |peer, session| {
            peer.set_up();
            peer.take_pass();
            session.cancel();
            assert_eq!(peer.last_frame(), Some(Frame::Cancel));
        },
        kind: "Cancelled",
        says: "was cancelled",
    },
    Case {
        name: "cancelled while the destination does not read",
        passes: 1,
        script: |peer, session| {
            peer.set_up();
            peer.expect(FrameType::Pass);
            std::thread::sleep(Duration::from_millis(100));
            session.cancel();
            assert_eq!(peer.last_frame(), Some(Frame::Cancel));
        },
        kind: "Cancelled",
        says: "was cancelled",
    },
    Case {
        name: "cancelled in the switch-over, when Ready is under way",
        passes: 1,
        script: |peer, session| {
            peer.set_up();
            peer.take_switch_over();
            session.cancel();
            peer.expect(FrameType::Cancel);
            peer.send(&Frame::Ready);
            peer.discard("the source cancelled");
        },
        kind: "Cancelled",
        says: "was cancelled",
    },
    Case {
        name: "cancelled in the switch-over, and the connection is lost",
        passes: 1,
        script: |peer, session| {
            peer.set_up();
            peer.take_switch_over();
            session.cancel();
            peer.expect(FrameType::Cancel);
            peer.send(&Frame::Ready);
            peer.close();
            peer.discard_in_next_generation();
        },
        kind: "Cancelled",
        says: "was cancelled",
    },
];

/// Puts the right checksum into an encoded frame.
fn reseal(frame: &mut [u8]) {
    let head = frame.first_chunk().unwrap();
    let header = FrameHeader::decode(head, Side::Destination, Role::Control);
    let mut hasher = header.unwrap().hasher();
    hasher.update(&frame[HEADER_BYTES..]);
    hasher.seal(frame);
}

#[test]
fn the_vm_runs_on_when_nobody_listens() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    let gone = tcp();
    let to = gone.local_addr().clone();
    drop(gone);
    let tried = attempt_at(&vm, &to, &config(1, LONG), |_| {});
    let failure = tried.outcome.unwrap_err();
    assert_failure(
        "refused",
        &failure,
        SourceVm::Runs,
        "Channel",
        &to.to_string(),
    );
    assert_runs_on(&vm, "refused");
}

#[test]
fn the_vm_runs_on_after_a_failed_setup() {
    if runs_in_child() {
        return;
    }
    run(Engine::Soft, 1, SETUP);
}

#[test]
fn the_vm_runs_on_after_a_failed_precopy() {
    if runs_in_child() {
        return;
    }
    run(Engine::Soft, 2, PRECOPY);
}

#[test]
fn the_vm_runs_on_after_a_failed_switch_over() {
    if runs_in_child() {
        return;
    }
    run(Engine::Soft, 2, SWITCH_OVER);
}

#[test]
fn the_vm_runs_on_after_failures_on_unix_sockets() {
    if runs_in_child() {
        return;
    }
    run_on(unix, Engine::Soft, 1, &SETUP[..1]);
    run_on(unix, Engine::Soft, 1, &DISCARDED[..3]);
    run_on(unix, Engine::Soft, 1, &CANCEL[3..]);
}

#[test]
fn a_cancel_ends_a_handshake_that_the_destination_does_not_answer() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    let listener = tcp();
    let tried = attempt_at(&vm, listener.local_addr(), &config(1, LONG), |session| {
        let (connection, _) = hello(&listener);
        session.cancel();
        hold(&connection);
    });
    let failure = tried.outcome.unwrap_err();
    let says = "was cancelled";
    assert_failure("handshake", &failure, SourceVm::Runs, "Cancelled", says);
    assert_runs_on(&vm, "cancelled in the handshake");
}

#[test]
fn the_vm_runs_on_if_the_destination_has_discarded_its_copy() {
    if runs_in_child() {
        return;
    }
    run(Engine::Soft, 2, DISCARDED);
}

#[test]
fn the_vm_runs_on_after_a_cancel_and_the_destination_is_told() {
    if runs_in_child() {
        return;
    }
    run(Engine::Soft, 2, CANCEL);
}

#[test]
fn a_kvm_vm_runs_on_too() {
    if runs_in_child() {
        return;
    }
    if !kvm_usable("a_kvm_vm_runs_on_too") {
        return;
    }
    run(Engine::Kvm, 2, &SWITCH_OVER[..8]);
    run(Engine::Kvm, 1, DISCARDED);
    run(Engine::Kvm, 1, CANCEL);
}

#[test]
fn a_cancel_before_the_start_moves_nothing() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    let listener = tcp();
    let session = SourceSession::new().unwrap();
    session.cancel();
    let route = Route::To(listener.local_addr().clone());
    let outcome = ends_soon("cancelled before", || {
        let config = config(1, LONG);
        migrate(
            &vm.running(),
            &route,
            b"test",
            &config,
            &session,
            &Unobserved,
        )
    });
    let failure = outcome.unwrap_err();
    let says = "was cancelled";
    assert_failure("before", &failure, SourceVm::Runs, "Cancelled", says);
    assert_runs_on(&vm, "cancelled before");
}

#[test]
fn the_vm_runs_on_when_the_destination_stops_reading() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    vm.wait_progress(vm.workload.memory_map().share_pages());
    let tried = attempt(&vm, &config(1, SHORT), |peer, _| {
        peer.set_up();
        assert!(matches!(peer.last_frame(), Some(Frame::Error(_))));
    });
    let failure = tried.outcome.unwrap_err();
    assert_failure("stops", &failure, SourceVm::Runs, "Timeout", "in time");
    assert_runs_on(&vm, "stops reading");
}

/// One channel only carries nothing: that is a silence, and no wish of a user.
#[test]
fn a_channel_that_falls_silent_within_a_frame_is_not_a_cancellation() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    vm.wait_progress(vm.workload.memory_map().share_pages());
    let tried = attempt(&vm, &config(1, SHORT), |peer, session| {
        peer.set_up();
        let alive = encoded(&Frame::Alive);
        let until = std::time::Instant::now() + pageferry_testkit::LIMIT;
        while !session.status().is_over() && std::time::Instant::now() < until {
            // The source may have left meanwhile.
            let _ = peer.control.try_send(&alive, "Alive");
            let _ = peer.urgent().try_send(&UrgentMessage::alive(), "Alive");
            std::thread::sleep(SHORT / 8);
        }
    });
    let failure = tried.outcome.unwrap_err();
    assert_failure(
        "silent",
        &failure,
        SourceVm::Runs,
        "Timeout",
        "bulk channel",
    );
    assert_eq!(tried.status.channels_lost, 1);
    assert_runs_on(&vm, "one silent channel");
}

#[test]
fn the_reason_is_told_even_if_the_destination_gives_up_while_it_is_sent_pages() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    vm.wait_progress(vm.workload.memory_map().share_pages());
    let tried = attempt(&vm, &config(1, LONG), |peer, _| {
        peer.set_up();
        peer.take_frame();
        let why = ErrorMessage::new(ErrorCode::Resources, "the disk is full");
        peer.send(&Frame::Error(why));
        peer.last_frame();
    });
    let failure = tried.outcome.unwrap_err();
    let says = "the disk is full";
    assert_failure("full", &failure, SourceVm::Runs, "PeerGaveUp", says);
    assert_runs_on(&vm, "told while sending");
}

/// The destination's last words may come late: until then the source's VM stands still.
#[test]
fn a_source_that_has_said_go_waits_for_the_destinations_word() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    let threads = &vm.threads;
    let mut config = config(0, LONG);
    config.limits.dead_after = SHORT;
    let tried = attempt(&vm, &config, |peer, session| {
        peer.set_up();
        peer.take_switch_over();
        peer.send(&Frame::Ready);
        peer.expect(FrameType::Go);
        // Every loss, and a silence of more than its limit.
        for _ in 0..2 {
            peer.close();
            assert_eq!(peer.take_resume(), SourceStage::HandedOver);
            assert!(threads.is_paused());
        }
        assert_eq!(peer.take_resume(), SourceStage::HandedOver);
        session.cancel();
        wait_until("the status", || session.status().stage == "handed-over");
        assert!(threads.is_paused(), "a cancel comes too late");
        peer.send(&Frame::Resumed {
            stage: DestinationStage::Discarded,
            missing: 0,
        });
        peer.expect(FrameType::DiscardHeard);
    });
    let failure = tried.outcome.unwrap_err();
    assert_eq!(failure.vm, SourceVm::Runs);
    assert_sentence(&failure);
    assert_eq!(tried.status.stage, "returned");
    assert!(tried.status.reconnects >= 3, "{:?}", tried.status);
    assert_eq!(kind(&failure.error), "Discarded", "{failure}");
    assert_runs_on(&vm, "returned");
}
