//! Failures before the destination confirms that the guest runs there, and failures after which it
//! says that its copy never counted. After each, the source's VM runs on unharmed and can be
//! migrated again.

use crate::scripted::destination::ScriptedDestination;
use crate::scripted::{
    LONG, LeakCheck, SHORT, SOON, Via, assert_failure, assert_sentence, encoded, ends_soon, kind,
    limit_for, listen, wait_until_over, within_limit,
};
use crate::support::{WorkloadVm, kvm_usable, move_vm};
use pageferry_machine::{Engine, MachineError};
use pageferry_migration::channel::{Connection, Listener};
use pageferry_migration::wire::{
    DrainCounts, ErrorCode, ErrorMessage, Frame, FrameHeader, FrameType, HEADER_BYTES, HELLO_BYTES,
    Hello, HelloReply, Pass, Side, Status,
};
use pageferry_migration::{
    DestinationConfig, SourceConfig, SourceFailure, SourceReport, SourceVm, Unobserved, migrate,
};
use pageferry_userfault::PageBitmap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// A behaviour of a peer.
struct Case {
    name: &'static str,
    passes: u32,
    /// Acts as the destination. It may set the source's cancel flag, which is also set when the
    /// source has ended.
    script: fn(&Listener, &AtomicBool),
    kind: &'static str,
    /// A part of the expected message.
    says: &'static str,
}

fn config(passes: u32, limit: Duration) -> SourceConfig {
    SourceConfig {
        precopy_passes: passes,
        connect_limit: limit,
        busy_limit: Duration::ZERO,
        setup_limit: limit,
        answer_limit: limit,
        ..SourceConfig::default()
    }
}

fn attempt(
    vm: &WorkloadVm,
    via: Via,
    config: &SourceConfig,
    script: impl FnOnce(&Listener, &AtomicBool) + Send,
) -> Result<SourceReport, SourceFailure> {
    let listener = listen(via);
    let cancel = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let scripted = scope.spawn(|| script(&listener, &cancel));
        let to = listener.local_addr();
        let outcome = ends_soon("migrate", || {
            migrate(&vm.running(), to, b"test", config, &cancel, &Unobserved)
        });
        cancel.store(true, Ordering::Release);
        scripted.join().unwrap();
        outcome
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

fn assert_failed(case: &Case, outcome: Result<SourceReport, SourceFailure>) {
    let failure = outcome.expect_err(case.name);
    assert_failure(case.name, &failure, SourceVm::Runs, case.kind, case.says);
}

/// Runs all cases with one VM.
fn run(engine: Engine, vcpus: u32, via: Via, cases: &[Case]) {
    let _leaks = LeakCheck::start();
    let vm = WorkloadVm::booted(engine, vcpus, 8 * MIB);
    vm.wait_progress(16);
    for case in cases {
        let config = config(case.passes, limit_for(case.kind));
        assert_failed(case, attempt(&vm, via, &config, case.script));
        assert_runs_on(&vm, case.name);
    }
    // The VM can still be migrated.
    let moved = move_vm(vm, &SourceConfig::default(), DestinationConfig::default());
    moved.sent.unwrap();
    moved.received.unwrap();
    moved.destination.wait_progress(16);
    moved.destination.assert_verifies();
}

/// Accepts the first connection.
fn first(listener: &Listener) -> Connection {
    listener.accept(&within_limit("a source")).unwrap()
}

/// Accepts the first connection and receives its Hello.
fn hello(listener: &Listener) -> (Connection, Hello) {
    let connection = first(listener);
    let mut bytes = [0; HELLO_BYTES];
    connection
        .read_exact(&mut bytes, &within_limit("Hello"))
        .unwrap();
    (connection, Hello::decode(&bytes).unwrap())
}

fn say(connection: &Connection, bytes: &[u8]) {
    connection
        .write_all(bytes, &within_limit("what is said"))
        .unwrap();
}

/// Keeps the connection open until the source closes it.
fn hold(connection: &Connection) {
    let mut byte = [0];
    while connection
        .read_exact(&mut byte, &within_limit("the end"))
        .is_ok()
    {}
}

/// Answers a Hello with a refusal.
fn refuse(listener: &Listener, status: Status) {
    let (connection, hello) = hello(listener);
    say(
        &connection,
        &HelloReply::refuse(hello.session, status).encode(),
    );
    hold(&connection);
}

/// Returns a valid reply with another version.
fn other_version(hello: &Hello, version: u16) -> [u8; HELLO_BYTES] {
    HelloReply {
        version,
        ..HelloReply::accept(hello)
    }
    .encode()
}

const HANDSHAKE: &[Case] = &[
    Case {
        name: "speaks HTTP",
        passes: 1,
        script: |listener, _| {
            let connection = first(listener);
            say(&connection, b"HTTP/1.1 400 Bad Request\r\n\r\n");
            hold(&connection);
        },
        kind: "Wire",
        says: "(HTTP?)",
    },
    Case {
        name: "speaks SSH at once",
        passes: 1,
        script: |listener, _| {
            let connection = first(listener);
            say(&connection, b"SSH-2.0-OpenSSH_9.7\r\n");
            hold(&connection);
        },
        kind: "Wire",
        says: "(SSH?)",
    },
    Case {
        name: "garbage",
        passes: 1,
        script: |listener, _| {
            let connection = first(listener);
            say(&connection, &[0x9e; 300]);
            hold(&connection);
        },
        kind: "Wire",
        says: "9e 9e 9e",
    },
    Case {
        name: "closes at once",
        passes: 1,
        script: |listener, _| drop(hello(listener)),
        kind: "LinkLost",
        says: "closed the connection",
    },
    Case {
        name: "closes after half a reply",
        passes: 1,
        script: |listener, _| {
            let (connection, hello) = hello(listener);
            say(&connection, &HelloReply::accept(&hello).encode()[..30]);
        },
        kind: "LinkLost",
        says: "stopped after 30 of 64 bytes",
    },
    Case {
        name: "never replies",
        passes: 1,
        script: |listener, _| hold(&first(listener)),
        kind: "Timeout",
        says: "HelloReply",
    },
    Case {
        name: "a damaged reply",
        passes: 1,
        script: |listener, _| {
            let (connection, hello) = hello(listener);
            let mut reply = HelloReply::accept(&hello).encode();
            reply[20] ^= 1;
            say(&connection, &reply);
            hold(&connection);
        },
        kind: "Wire",
        says: "checksum",
    },
    Case {
        name: "accepts in another version",
        passes: 1,
        script: |listener, _| {
            let (connection, hello) = hello(listener);
            say(&connection, &other_version(&hello, 9));
            hold(&connection);
        },
        kind: "Wire",
        says: "versions 9 to 9",
    },
    Case {
        name: "refuses our version",
        passes: 1,
        script: |listener, _| refuse(listener, Status::VersionUnsupported),
        kind: "Refused",
        says: "version",
    },
    Case {
        name: "is busy",
        passes: 1,
        script: |listener, _| refuse(listener, Status::Busy),
        kind: "Refused",
        says: "busy",
    },
    Case {
        name: "takes the stream and closes before the urgent connection",
        passes: 1,
        script: |listener, _| {
            let (stream, first_hello) = hello(listener);
            say(&stream, &HelloReply::accept(&first_hello).encode());
            drop(hello(listener));
            hold(&stream);
        },
        kind: "LinkLost",
        says: "closed the connection",
    },
];

const SETUP: &[Case] = &[
    Case {
        name: "closes after Setup",
        passes: 1,
        script: |listener, _| ScriptedDestination::accept(listener).take_setup(),
        kind: "LinkLost",
        says: "closed the connection",
    },
    Case {
        name: "never answers Setup",
        passes: 1,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
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
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
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
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
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
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
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
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
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
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.take_setup();
            peer.send(&Frame::Running { started_at_ns: 1 });
            let Some(Frame::Error(why)) = peer.last_frame() else {
                panic!("an Error frame was due")
            };
            assert_eq!(why.code(), ErrorCode::Protocol);
        },
        kind: "Peer",
        says: "SetupAck was due",
    },
    Case {
        name: "a frame with flipped bits",
        passes: 1,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.take_setup();
            let mut bytes = encoded(&Frame::SetupAck);
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
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
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
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            peer.take();
        },
        kind: "LinkLost",
        says: "connection",
    },
    Case {
        name: "acknowledges fewer pages than were sent",
        passes: 1,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            let pass = peer.take_pass();
            peer.send(&Frame::PassAck(Pass {
                pages: pass.pages - 1,
                ..pass
            }));
            peer.last_frame();
        },
        kind: "Peer",
        says: "2047",
    },
    Case {
        name: "acknowledges another pass",
        passes: 2,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            let pass = peer.take_pass();
            peer.send(&Frame::PassAck(Pass { pass: 7, ..pass }));
            peer.last_frame();
        },
        kind: "Peer",
        says: "pass 7",
    },
    Case {
        name: "acknowledges more pages than there are",
        passes: 1,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            let pass = peer.take_pass();
            peer.send(&Frame::PassAck(Pass {
                pages: u64::MAX,
                ..pass
            }));
            peer.last_frame();
        },
        kind: "Wire",
        says: "PassAck",
    },
    Case {
        name: "never acknowledges",
        passes: 1,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            peer.take_pass();
            peer.last_frame();
        },
        kind: "Timeout",
        says: "in time",
    },
];

const SWITCH_OVER: &[Case] = &[
    Case {
        name: "closes after SwitchOver",
        passes: 1,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            peer.take_switch_over();
        },
        kind: "LinkLost",
        says: "closed the connection",
    },
    Case {
        name: "closes after SwitchOver, no pre-copy",
        passes: 0,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            let switch_over = peer.take_switch_over();
            assert_eq!(switch_over.missing_pages, peer.memory_pages);
        },
        kind: "LinkLost",
        says: "closed the connection",
    },
    Case {
        name: "cannot load a state",
        passes: 1,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            peer.take_switch_over();
            peer.send(&Frame::Error(ErrorMessage::new(
                ErrorCode::Machine,
                "no such register",
            )));
            peer.last_frame();
        },
        kind: "PeerGaveUp",
        says: "no such register",
    },
    Case {
        name: "garbage instead of Running",
        passes: 1,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            peer.take_switch_over();
            peer.send_bytes(&[0x5a; 64]);
            peer.last_frame();
        },
        kind: "Wire",
        says: "frame magic",
    },
    Case {
        name: "half of Running",
        passes: 1,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            peer.take_switch_over();
            peer.send_bytes(&encoded(&Frame::Running { started_at_ns: 1 })[..20]);
        },
        kind: "LinkLost",
        says: "stopped after 20 of 32 bytes",
    },
    Case {
        name: "never says Running",
        passes: 1,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            peer.take_switch_over();
            let Some(Frame::Error(_)) = peer.last_frame() else {
                panic!("an Error frame was due")
            };
        },
        kind: "Timeout",
        says: "in time",
    },
    Case {
        name: "cancels at switch-over",
        passes: 1,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            peer.take_switch_over();
            peer.send(&Frame::Cancel);
            peer.last_frame();
        },
        kind: "PeerCancelled",
        says: "the peer cancelled",
    },
];

/// The last frame of a destination that did not receive RunningAck in time.
fn discarded() -> Frame {
    Frame::Error(ErrorMessage::new(
        ErrorCode::Discarded,
        "no acknowledgement in time",
    ))
}

/// The destination has confirmed that the guest runs there, and then discards it.
const DISCARDED: &[Case] = &[
    Case {
        name: "discarded the VM while the source was not scheduled",
        passes: 1,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            peer.take_switch_over();
            // Both frames have arrived when the source reads.
            let mut bytes = encoded(&Frame::Running { started_at_ns: 1 });
            bytes.extend(encoded(&discarded()));
            peer.send_bytes(&bytes);
            peer.close();
        },
        kind: "PeerGaveUp",
        says: "no acknowledgement in time; the VM runs on",
    },
    Case {
        name: "discarded the VM while RunningAck was under way",
        passes: 1,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.start();
            peer.send(&discarded());
            peer.stream.shutdown_write();
            // Reads to the end like Pageferry, so that no reset overtakes the frame.
            peer.last_frame();
        },
        kind: "PeerGaveUp",
        says: "no acknowledgement in time; the VM runs on",
    },
    Case {
        name: "discarded the VM after the whole push",
        passes: 0,
        script: |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.start();
            peer.take_whole_push();
            peer.send(&discarded());
            peer.last_frame();
        },
        kind: "PeerGaveUp",
        says: "no acknowledgement in time; the VM runs on",
    },
];

const CANCEL: &[Case] = &[
    Case {
        name: "cancelled while the destination has not answered",
        passes: 1,
        script: |listener, cancel| {
            let (connection, _) = hello(listener);
            cancel.store(true, Ordering::Relaxed);
            hold(&connection);
        },
        kind: "Cancelled",
        says: "was cancelled",
    },
    Case {
        name: "cancelled during set-up",
        passes: 1,
        script: |listener, cancel| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.take_setup();
            cancel.store(true, Ordering::Relaxed);
            assert_eq!(peer.last_frame(), Some(Frame::Cancel));
        },
        kind: "Cancelled",
        says: "was cancelled",
    },
    Case {
        name: "cancelled in pre-copy",
        passes: 3,
        script: |listener, cancel| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            let pass = peer.take_pass();
            // First this: a source that had closed would answer it with a reset, and Cancel be lost.
            peer.send(&Frame::PassAck(pass));
            cancel.store(true, Ordering::Relaxed);
            assert_eq!(peer.last_frame(), Some(Frame::Cancel));
        },
        kind: "Cancelled",
        says: "was cancelled",
    },
    Case {
        name: "cancelled while a pass is not acknowledged",
        passes: 1,
        script: |listener, cancel| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            peer.take_pass();
            cancel.store(true, Ordering::Relaxed);
            assert_eq!(peer.last_frame(), Some(Frame::Cancel));
        },
        kind: "Cancelled",
        says: "was cancelled",
    },
];

/// Puts the right checksum into an encoded frame.
fn reseal(frame: &mut [u8]) {
    let header = FrameHeader::decode(frame.first_chunk().unwrap(), Side::Destination);
    let mut hasher = header.unwrap().hasher();
    hasher.update(&frame[HEADER_BYTES..]);
    hasher.seal(frame);
}

#[test]
fn the_vm_runs_on_when_nobody_listens() {
    let _leaks = LeakCheck::start();
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    for via in [Via::Tcp, Via::Unix] {
        let gone = listen(via);
        let to = gone.local_addr().clone();
        drop(gone);
        let cancel = AtomicBool::new(false);
        let outcome = ends_soon("refused", || {
            migrate(
                &vm.running(),
                &to,
                b"test",
                &config(1, LONG),
                &cancel,
                &Unobserved,
            )
        });
        let failure = outcome.unwrap_err();
        assert_eq!(
            (failure.vm, kind(&failure.error)),
            (SourceVm::Runs, "Channel")
        );
        assert_sentence(&failure);
        let place = to.to_string();
        assert!(
            failure
                .to_string()
                .contains(place.trim_start_matches("unix:")),
            "{failure}"
        );
        assert_runs_on(&vm, "refused");
    }
}

#[test]
fn the_vm_runs_on_after_a_failed_handshake() {
    run(Engine::Soft, 1, Via::Tcp, HANDSHAKE);
}

#[test]
fn the_vm_runs_on_after_a_failed_handshake_on_a_unix_socket() {
    run(Engine::Soft, 1, Via::Unix, HANDSHAKE);
}

#[test]
fn the_vm_runs_on_after_a_failed_setup() {
    run(Engine::Soft, 1, Via::Tcp, SETUP);
}

#[test]
fn the_vm_runs_on_after_a_failed_precopy() {
    run(Engine::Soft, 2, Via::Tcp, PRECOPY);
    run(Engine::Soft, 1, Via::Unix, PRECOPY);
}

#[test]
fn the_vm_runs_on_after_a_failed_switch_over() {
    run(Engine::Soft, 2, Via::Tcp, SWITCH_OVER);
    run(Engine::Soft, 1, Via::Unix, SWITCH_OVER);
}

#[test]
fn the_vm_runs_on_if_the_destination_has_discarded_what_it_started() {
    run(Engine::Soft, 2, Via::Tcp, DISCARDED);
    run(Engine::Soft, 1, Via::Unix, DISCARDED);
}

#[test]
fn the_vm_runs_on_after_a_cancel_and_the_destination_is_told() {
    run(Engine::Soft, 2, Via::Tcp, CANCEL);
}

#[test]
fn a_kvm_vm_runs_on_too() {
    if !kvm_usable("a_kvm_vm_runs_on_too") {
        return;
    }
    run(Engine::Kvm, 2, Via::Tcp, PRECOPY);
    run(Engine::Kvm, 2, Via::Unix, SWITCH_OVER);
    run(Engine::Kvm, 1, Via::Tcp, DISCARDED);
    run(Engine::Kvm, 1, Via::Tcp, CANCEL);
}

#[test]
fn a_cancel_before_the_start_connects_to_nobody() {
    let _leaks = LeakCheck::start();
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    let listener = listen(Via::Tcp);
    let cancel = AtomicBool::new(true);
    let outcome = ends_soon("cancelled before", || {
        migrate(
            &vm.running(),
            listener.local_addr(),
            b"test",
            &config(1, LONG),
            &cancel,
            &Unobserved,
        )
    });
    let failure = outcome.unwrap_err();
    assert_eq!(
        (failure.vm, kind(&failure.error)),
        (SourceVm::Runs, "Cancelled")
    );
    assert_runs_on(&vm, "cancelled before");
}

/// Returns a VM with so much data that no socket's buffer takes it.
fn full_vm() -> WorkloadVm {
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    vm.wait_progress(vm.workload.memory_map().share_pages());
    vm
}

#[test]
fn the_vm_runs_on_when_the_destination_stops_reading() {
    let _leaks = LeakCheck::start();
    let vm = full_vm();
    let outcome = attempt(&vm, Via::Unix, &config(1, SHORT), |listener, over| {
        let mut peer = ScriptedDestination::accept(listener);
        peer.set_up();
        peer.take();
        wait_until_over(over);
    });
    let failure = outcome.unwrap_err();
    assert_eq!(
        (failure.vm, kind(&failure.error)),
        (SourceVm::Runs, "Timeout"),
        "{failure}"
    );
    assert_sentence(&failure);
    assert_runs_on(&vm, "stops reading");
}

#[test]
fn a_cancel_is_heard_while_the_destination_does_not_read() {
    let _leaks = LeakCheck::start();
    let vm = full_vm();
    // The limits are long: only the cancel ends the migration.
    let outcome = attempt(
        &vm,
        Via::Unix,
        &SourceConfig::default(),
        |listener, cancel| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            peer.take();
            std::thread::sleep(Duration::from_millis(300));
            cancel.store(true, Ordering::Relaxed);
            let began = Instant::now();
            while !peer.has_ended() {
                assert!(began.elapsed() < SOON, "the cancel was not heard");
                std::thread::sleep(Duration::from_millis(5));
            }
        },
    );
    let failure = outcome.unwrap_err();
    assert_eq!(
        (failure.vm, kind(&failure.error)),
        (SourceVm::Runs, "Cancelled"),
        "{failure}"
    );
    assert_runs_on(&vm, "cancelled while stalled");
}

#[test]
fn the_reason_is_told_even_if_the_destination_gives_up_while_it_is_sent_pages() {
    for via in [Via::Tcp, Via::Unix] {
        let _leaks = LeakCheck::start();
        let vm = full_vm();
        let outcome = attempt(&vm, via, &config(1, LONG), |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            peer.take();
            peer.send(&Frame::Error(ErrorMessage::new(
                ErrorCode::Resources,
                "the disk is full",
            )));
        });
        let failure = outcome.unwrap_err();
        assert_eq!(
            (failure.vm, kind(&failure.error)),
            (SourceVm::Runs, "PeerGaveUp"),
            "{failure}"
        );
        assert!(
            failure.to_string().contains("the disk is full"),
            "{failure}"
        );
        assert_runs_on(&vm, "told while sending");
    }
}

#[test]
fn every_kind_of_frame_is_refused_where_it_is_not_due() {
    let _leaks = LeakCheck::start();
    let vm = WorkloadVm::booted(Engine::Soft, 1, 8 * MIB);
    for wrong in [
        Frame::SetupAck,
        Frame::PassAck(Pass { pass: 1, pages: 1 }),
        Frame::DrainAck(DrainCounts::default()),
    ] {
        let outcome = attempt(&vm, Via::Tcp, &config(0, LONG), |listener, _| {
            let mut peer = ScriptedDestination::accept(listener);
            peer.set_up();
            peer.take_switch_over();
            peer.send(&wrong);
            peer.last_frame();
        });
        let failure = outcome.unwrap_err();
        assert_eq!(
            (failure.vm, kind(&failure.error)),
            (SourceVm::Runs, "Peer"),
            "{failure}"
        );
        assert_sentence(&failure);
        assert!(
            failure.to_string().contains(FrameType::Running.name()),
            "{failure}"
        );
        assert_runs_on(&vm, "a wrong frame");
    }
}
