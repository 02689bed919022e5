//! A check of the way to a destination leaves it ready, and without a report.

use crate::alone::{LeakCheck, runs_in_child};
use crate::failures_source::config;
use crate::scripted::{LONG, assert_sentence, ends_soon};
use crate::support::{WorkloadVm, migrate_to, receive_on, tcp};
use pageferry_machine::{Backing, Engine};
use pageferry_migration::address::Address;
use pageferry_migration::channel::Listener;
use pageferry_migration::{
    Checked, Connect, Connection, Destination, DestinationConfig, MigrationError, Route,
    SourceConfig, check,
};
use pageferry_testkit::wait_until;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Connects to a unix socket, as a caller with a tunnel would.
struct Tunnel(Address);

impl Connect for Tunnel {
    fn connect(&self) -> std::io::Result<Connection> {
        let wait = crate::scripted::within_limit("connection");
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
                version, tls_name, ..
            } = checked.unwrap();
            assert_eq!((version, tls_name), (5, None));
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
