//! A check of the way to a destination leaves it ready, and without a report.

use crate::alone::{LeakCheck, runs_in_child};
use crate::failures_source::config;
use crate::scripted::{LONG, assert_sentence, ends_soon, within_limit};
use crate::support::{WorkloadVm, address_of, migrate_to, receive_on, tcp};
use pageferry_machine::{Backing, Engine};
use pageferry_migration::wire::{CREDENTIALS_BYTES, ChannelKey, HELLO_BYTES, Status};
use pageferry_migration::{
    Checked, Connect, Connection, Destination, DestinationConfig, Limits, MigrationError, Route,
    SourceConfig, check,
};
use pageferry_testkit::handshake::{PLAIN, bulk, open, socket_of};
use pageferry_testkit::wait_until;
use pageferry_transport::address::Address;
use pageferry_transport::channel::{ChannelError, Listener};
use pageferry_transport::handshake::{HandshakeError, Identity, Opened};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Connects to a unix socket, as a caller with a tunnel would.
struct Tunnel(Address);

impl Connect for Tunnel {
    fn connect(&self) -> std::io::Result<Connection> {
        let wait = within_limit("connection");
        Connection::connect(&self.0, &wait).map_err(std::io::Error::other)
    }
}

/// Many checks by every kind of route, while the destination accepts and before it does. Then it
/// takes a VM.
#[test]
fn a_checked_destination_is_ready_and_reports_nothing() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    let name = format!("pageferry-check-{}", std::process::id());
    let unix = Address::unix(&std::env::temp_dir().join(name)).unwrap();
    let strangers = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&strangers);
    let told = move |stranger: &pageferry_migration::Stranger| {
        kept.lock().unwrap().push(stranger.why.to_string());
    };
    let destination = Destination::listen(tcp(), DestinationConfig::default(), told).unwrap();
    let destination = Arc::new(destination);
    destination.listen_also(Listener::bind(&unix).unwrap());
    let at_tcp = destination.local_addrs().remove(0);
    let routes = [
        Route::To(at_tcp.clone()),
        Route::To(unix.clone()),
        Route::Caller(Arc::new(Tunnel(unix))),
    ];
    let check_all = || {
        for route in &routes {
            let checked = check(route, &config(1, LONG), &|| false);
            let Checked {
                tls,
                version,
                tls_name,
                ..
            } = checked.unwrap();
            assert_eq!((version, tls, tls_name), (7, false, None));
        }
    };
    // Nobody has called `accept` yet.
    check_all();
    let (over, accepted) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let outcome = destination.accept(&|| over.load(Ordering::Acquire));
            let cancelled = matches!(outcome, Err(MigrationError::Cancelled));
            accepted.store(1 + usize::from(!cancelled), Ordering::Release);
        });
        for _ in 0..4 {
            check_all();
        }
        assert_eq!(accepted.load(Ordering::Acquire), 0, "a check was accepted");
        over.store(true, Ordering::Release);
        wait_until("the end", || accepted.load(Ordering::Acquire) > 0);
    });
    assert_eq!(accepted.into_inner(), 1, "a check was accepted");
    assert_eq!(strangers.lock().unwrap().as_slice(), &[] as &[String]);
    assert_eq!(destination.status().stage, "none");
    let vm = WorkloadVm::booted(Engine::Soft, 1, 4 << 20);
    let (sent, (_there, received)) = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| receive_on(Backing::Shmem, &destination));
        let sent = migrate_to(&vm, &at_tcp, &SourceConfig::default());
        (sent, receiver.join().unwrap())
    });
    sent.unwrap();
    received.unwrap();
}

/// Connects like [`Tunnel`]. The connection of this number, from 0, is lost on the way: it leads
/// nowhere, or large packets do not pass.
struct Lossy {
    to: Address,
    made: AtomicUsize,
    lost: usize,
    how: Loss,
}

#[derive(Clone, Copy, PartialEq)]
enum Loss {
    None,
    NoWay,
    LargePackets,
}

impl Connect for Lossy {
    fn connect(&self) -> std::io::Result<Connection> {
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        match self.how {
            _ if number != self.lost => {}
            Loss::None => {}
            Loss::NoWay => return Err(std::io::Error::other("the way is closed")),
            Loss::LargePackets => return through_small_packets(&self.to),
        }
        let wait = within_limit("connection");
        Connection::connect(&self.to, &wait).map_err(std::io::Error::other)
    }
}

/// A way that carries the Hello and the Credentials of a source, and none of its large packets.
fn through_small_packets(to: &Address) -> std::io::Result<Connection> {
    let there = socket_of(to);
    let (near, mut here) = std::os::unix::net::UnixStream::pair()?;
    let (mut back, from_there) = (here.try_clone()?, there.try_clone()?);
    std::thread::spawn(move || std::io::copy(&mut &from_there, &mut back));
    std::thread::spawn(move || {
        for small in [HELLO_BYTES, CREDENTIALS_BYTES] {
            let mut small = vec![0; small];
            here.read_exact(&mut small)?;
            (&there).write_all(&small)?;
        }
        std::io::copy(&mut here, &mut std::io::sink())
    });
    Connection::adopt_fd(near.into()).map_err(std::io::Error::other)
}

/// A check opens as many channels as the migration would. Each of them counts.
#[test]
fn every_channel_of_the_migration_is_checked() {
    let told = |stranger: &pageferry_migration::Stranger| eprintln!("{}", stranger.why);
    let to = DestinationConfig {
        limits: Limits {
            hello: Duration::from_millis(300),
            ..Limits::default()
        },
        ..DestinationConfig::default()
    };
    let destination = Destination::listen(tcp(), to, told).unwrap();
    let to = destination.local_addrs().remove(0);
    let config = SourceConfig {
        bulk_channels: 3,
        urgent_channels: 2,
        ..config(1, LONG)
    };
    let all = 1 + 3 + 2;
    let checked = |lost, how| {
        let (to, made) = (to.clone(), AtomicUsize::new(0));
        let way = Arc::new(Lossy {
            to,
            made,
            lost,
            how,
        });
        let route = Route::Caller(Arc::clone(&way) as _);
        let checked = ends_soon("a check", || check(&route, &config, &|| false));
        (checked, way.made.load(Ordering::Relaxed))
    };
    let (fine, made) = checked(0, Loss::None);
    fine.unwrap();
    assert_eq!(made, all);
    for lost in 0..all {
        let error = checked(lost, Loss::NoWay).0.unwrap_err();
        assert!(error.to_string().contains("the way is closed"), "{error}");
    }
    for lost in [0, 1, all - 1] {
        let error = checked(lost, Loss::LargePackets).0.unwrap_err();
        assert_sentence(&error);
        let small = "small packets pass and large ones do not";
        assert!(error.to_string().contains(small), "{lost}: {error}");
    }
    // The destination is as before.
    checked(0, Loss::None).0.unwrap();
}

#[track_caller]
fn assert_refused(opened: Result<Opened, HandshakeError>, why: Status) {
    let refused = opened.unwrap_err();
    let as_due = matches!(refused, HandshakeError::Refused { status, .. } if status == why);
    assert!(as_due, "{refused} instead of {why}");
}

/// A channel of a session that waits is closed when it is proved. It serves nobody, and a session
/// of another number or another secret has none.
#[test]
fn a_channel_that_was_checked_serves_nothing_else() {
    let destination = crate::support::listen(DestinationConfig::default());
    let to = address_of(&destination);
    let identity = Identity::random().unwrap();
    let control = open(&to, &PLAIN, &identity, ChannelKey::control(1)).unwrap();
    let opened = open(&to, &PLAIN, &identity, bulk(0, 1, 1)).unwrap();
    let end = opened
        .connection
        .read_exact(&mut [0], &within_limit("the end"));
    assert!(matches!(end, Err(ChannelError::Closed { .. })), "{end:?}");
    let mut other = identity.clone();
    other.secret = Identity::random().unwrap().secret;
    assert_refused(open(&to, &PLAIN, &other, bulk(0, 1, 1)), Status::BadProof);
    let stranger = Identity::random().unwrap();
    assert_refused(
        open(&to, &PLAIN, &stranger, bulk(0, 1, 1)),
        Status::UnknownSession,
    );
    // A control channel of a later generation belongs to no session that waits.
    assert_refused(
        open(&to, &PLAIN, &identity, ChannelKey::control(2)),
        Status::UnknownSession,
    );
    drop(control);
}

#[test]
fn a_check_can_be_stopped_and_says_what_failed() {
    let listener = tcp();
    let route = Route::To(listener.local_addr().clone());
    let stopped = ends_soon("stopped", || check(&route, &config(1, LONG), &|| true));
    let error = stopped.unwrap_err();
    assert!(matches!(error, MigrationError::Cancelled), "{error}");
    drop(listener);
    let error = check(&route, &config(1, LONG), &|| false).unwrap_err();
    assert_sentence(&error);
    assert!(error.to_string().contains("nobody listens"), "{error}");
}
