//! Strangers cost a bounded number of descriptors and log lines, and keep no source out.

use crate::scripted::source::{ScriptedSource, Template};
use crate::scripted::{LONG, encoded, ends_soon, limits};
use crate::support::{WorkloadVm, address_of, listen, migrate_to, tcp, try_receive_on};
use pageferry_machine::{Backing, Engine};
use pageferry_migration::wire::{
    ChannelKey, DestinationStage, Frame, HEADER_BYTES, HELLO_BYTES, Hello, MissingRuns, SessionId,
    SourceStage,
};
use pageferry_migration::{
    Destination, DestinationConfig, Limits, MigrationError, Route, SourceConfig, Stranger, check,
};
use pageferry_testkit::certificates::{Authority, Validity};
use pageferry_testkit::handshake::{PLAIN, bulk, open, socket_of};
use pageferry_testkit::process::{descriptors, runs_in_child};
use pageferry_testkit::wait_until;
use pageferry_transport::address::Address;
use pageferry_transport::channel::Connection;
use pageferry_transport::handshake::{Identity, Protection};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

/// The most descriptors that strangers cost: places without a preamble, and silent sessions.
const PLACES: usize = 96 + 32;

fn vm() -> WorkloadVm {
    let vm = WorkloadVm::booted(Engine::Soft, 1, 4 * MIB);
    vm.wait_progress(50);
    vm
}

/// Opens a session and says nothing.
fn silent(to: &Address) -> Option<Connection> {
    let identity = Identity::random().unwrap();
    let opened = open(to, &PLAIN, &identity, ChannelKey::control(1));
    opened.ok().map(|opened| opened.connection)
}

/// Moves a VM to a destination while `strangers` acts, which gets its address, and whether to stop.
fn moves_beside(strangers: impl Fn(&Address, &AtomicBool) + Sync) {
    let destination = listen(DestinationConfig::default());
    let to = address_of(&destination);
    let source = vm();
    let over = AtomicBool::new(false);
    let stop = || over.load(Ordering::Acquire);
    let (sent, received) = std::thread::scope(|scope| {
        scope.spawn(|| strangers(&to, &over));
        std::thread::sleep(Duration::from_millis(100));
        let receiver = scope.spawn(|| try_receive_on(Backing::Shmem, &destination, &stop));
        let sent = ends_soon("migrate", || {
            migrate_to(&source, &to, &SourceConfig::default())
        });
        if sent.is_err() {
            over.store(true, Ordering::Release);
        }
        let received = receiver.join().unwrap();
        over.store(true, Ordering::Release);
        (sent, received)
    });
    sent.unwrap();
    let (vm, received) = received.expect("a source came");
    received.unwrap();
    vm.wait_progress(16);
    vm.assert_verifies();
}

#[test]
fn silent_sessions_have_few_descriptors_and_fail_no_migration() {
    if runs_in_child() {
        return;
    }
    moves_beside(|to, over| {
        let before = descriptors();
        let mut held = Vec::new();
        while held.len() < 400 && !over.load(Ordering::Acquire) {
            held.extend(silent(to));
        }
        // The moving VM has some of its own.
        let here = descriptors().saturating_sub(before + held.len());
        assert!(here <= PLACES + 64, "{here} descriptors");
        wait_until("the end", || over.load(Ordering::Acquire));
    });
}

#[test]
fn sessions_that_come_without_an_end_fail_no_migration() {
    moves_beside(|to, over| {
        let mut held = std::collections::VecDeque::new();
        while !over.load(Ordering::Acquire) {
            held.extend(silent(to));
            if held.len() > 200 {
                held.pop_front();
            }
        }
    });
}

#[test]
fn sessions_that_say_only_that_they_live_hold_nobody_up() {
    moves_beside(|to, over| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let alive = encoded(&Frame::Alive).repeat(1000);
                    let socket = silent(to).expect("there are places");
                    let wait = crate::scripted::within_limit("Alive");
                    while !over.load(Ordering::Acquire) && socket.write_all(&alive, &wait).is_ok() {
                    }
                });
            }
        });
    });
}

/// One says nothing for a while, in the middle of its preamble. The others come later.
#[test]
fn a_slow_handshake_outlives_a_crowd() {
    let destination = listen(DestinationConfig::default());
    let to = address_of(&destination);
    let hello = Hello::ours(ChannelKey::control(1), SessionId([7; 16])).encode();
    let mut slow = socket_of(&to);
    let began = Instant::now();
    slow.write_all(&hello[..20]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let crowd: Vec<TcpStream> = (0..400).map(|_| socket_of(&to)).collect();
    wait_until("a crowd", || destination.status().strangers >= 200);
    eprintln!("a crowd after {:?}", began.elapsed());
    slow.write_all(&hello[20..]).unwrap();
    let mut reply = [0; HELLO_BYTES];
    slow.read_exact(&mut reply).unwrap();
    // And a late source that says at once what it wants.
    assert!(silent(&to).is_some());
    drop(crowd);
}

/// Channels of a session come into a crowd that says nothing.
#[test]
fn a_crowd_keeps_no_session_from_its_destination() {
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let received = crate::failures_destination::attempt_on(
        tcp(),
        &template,
        None,
        limits(LONG),
        |source, _, destination| {
            source.start();
            let to = address_of(destination);
            let crowd: Vec<TcpStream> = (0..200).map(|_| socket_of(&to)).collect();
            source.control.shutdown();
            let (stage, _) = source.resume(SourceStage::HandedOver);
            assert_eq!(stage, DestinationStage::Running);
            source.open_channels();
            source.complete();
            drop(crowd);
        },
    );
    received.outcome.unwrap();
}

/// As a crowd does to it: the first connections lose their places before the peer says anything.
#[test]
fn an_opening_that_ends_without_a_reason_is_tried_again() {
    let destination = listen(DestinationConfig::default());
    let to = address_of(&destination).authority();
    let between = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let here: Address = between.local_addr().unwrap().to_string().parse().unwrap();
    // It ends with the process of the test.
    std::thread::spawn(move || {
        for near in between.incoming().skip(3).flatten() {
            let far = TcpStream::connect(&to).unwrap();
            for (mut from, mut into) in [(&near, &far), (&far, &near)]
                .map(|(from, into)| (from.try_clone().unwrap(), into.try_clone().unwrap()))
            {
                std::thread::spawn(move || std::io::copy(&mut from, &mut into));
            }
        }
    });
    let config = |retry| SourceConfig {
        limits: Limits {
            retry,
            ..Limits::default()
        },
        ..SourceConfig::default()
    };
    let once = config(Duration::ZERO);
    let error = check(&Route::To(here.clone()), &once, &|| false).unwrap_err();
    assert!(matches!(error, MigrationError::LinkLost(_)), "{error:?}");
    check(&Route::To(here), &config(LONG), &|| false).unwrap();
}

#[test]
fn strangers_are_reported_at_a_bounded_rate_and_counted() {
    const STRANGERS: u64 = 400;
    let reports = Arc::new(Mutex::new((0u64, 0u64)));
    let reported = Arc::clone(&reports);
    let stranger = move |stranger: &Stranger| {
        let mut reports = reported.lock().unwrap();
        reports.0 += 1;
        reports.1 += stranger.left_out;
    };
    let began = Instant::now();
    let destination = Destination::listen(tcp(), DestinationConfig::default(), stranger).unwrap();
    let to = address_of(&destination);
    for _ in 0..STRANGERS {
        let mut socket = socket_of(&to);
        socket.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        // It is closed or reset.
        let _ = socket.read(&mut [0]);
    }
    wait_until("all to be counted", || {
        destination.status().strangers == STRANGERS
    });
    let (said, left_out) = *reports.lock().unwrap();
    assert!(
        said >= 32 && said <= 33 + began.elapsed().as_secs(),
        "{said}"
    );
    assert!(said + left_out <= STRANGERS);
    // The next one that is reported tells how many were not.
    std::thread::sleep(Duration::from_millis(1100));
    let mut socket = socket_of(&to);
    socket.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    wait_until("a report", || {
        let (said, left_out) = *reports.lock().unwrap();
        said + left_out == STRANGERS + 1
    });
}

/// Each source that is turned away needs a while to read why. The next one does not wait for it.
#[test]
fn turning_away_takes_no_time() {
    const SOURCES: u32 = 200;
    let destination = listen(DestinationConfig::default());
    let to = address_of(&destination);
    let began = Instant::now();
    let sources: Vec<Connection> = (0..SOURCES)
        .map(|_| {
            let source = silent(&to).expect("there is a place");
            crate::scripted::say(&source, &encoded(&Frame::Go));
            let error = destination.accept(&|| false).err().unwrap();
            assert!(matches!(error, MigrationError::Protocol(_)), "{error}");
            source
        })
        .collect();
    // 200 ms each would be 40 s.
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
    // The last ones can still read it.
    let last = crate::scripted::last_frame(
        sources.last().unwrap(),
        pageferry_migration::wire::Side::Destination,
        1,
    );
    assert!(matches!(last, Some(Frame::Error(_))), "{last:?}");
}

/// Says the header of a frame that no source says first. It is refused by it, before its bytes are
/// kept.
fn refuses_a_long_first_frame(config: DestinationConfig, protection: &Protection) {
    let destination = listen(config);
    let to = address_of(&destination);
    let runs = (0..100_000).map(|n| 1000 * n..1000 * n + 500);
    let missing = MissingRuns::frames(runs).next().unwrap();
    let bytes = encoded(&Frame::Missing(missing));
    assert!(bytes.len() > 200 << 10);
    let identity = Identity::random().unwrap();
    let source = open(&to, protection, &identity, ChannelKey::control(1)).unwrap();
    crate::scripted::say(&source.connection, &bytes[..HEADER_BYTES]);
    let error = destination.accept(&|| false).err().unwrap();
    assert!(matches!(error, MigrationError::Wire(_)), "{error}");
}

#[test]
fn a_first_frame_has_the_length_of_an_offer() {
    refuses_a_long_first_frame(DestinationConfig::default(), &PLAIN);
}

#[test]
fn a_first_frame_under_tls_has_the_length_of_an_offer() {
    let authority = Authority::new("test");
    let issue = || authority.issue(&["localhost"], Validity::Now);
    let (here, there) = (issue(), issue());
    let config = DestinationConfig {
        tls: Some(there.files(Some("localhost")).into()),
        ..DestinationConfig::default()
    };
    refuses_a_long_first_frame(config, &here.protection(Some("localhost")));
}

/// A source that has the destination opens channels that nobody takes yet.
#[test]
fn channels_that_are_opened_again_and_again_have_few_descriptors() {
    if runs_in_child() {
        return;
    }
    let template = Template::new(Engine::Soft, 1, 8 * MIB);
    let destination = listen(DestinationConfig::default());
    let source = ScriptedSource::connect(&template, &address_of(&destination));
    source.send(&Frame::Setup(template.setup()));
    let incoming = destination.accept(&|| false).unwrap();
    let before = descriptors();
    let held: Vec<Connection> = (1..=300)
        .map(|incarnation| source.dial(bulk(0, 1, incarnation)).unwrap())
        .collect();
    let here = descriptors() - before - held.len();
    assert!(here <= 2, "{here} descriptors");
    drop(held);
    let held: Vec<Connection> = (2..=300)
        .map(|generation| source.dial(ChannelKey::control(generation)).unwrap())
        .collect();
    let here = (descriptors() - before).saturating_sub(held.len());
    assert!(here <= 4, "{here} descriptors");
    drop(incoming);
}
