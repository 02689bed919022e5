//! The caller opens the sockets: the connected streams of a source, the listener of a destination.

use crate::support::{WorkloadVm, listen, listen_on, try_receive_on};
use pageferry_machine::{Backing, Engine};
use pageferry_migration::{
    Connect, Destination, DestinationConfig, DestinationFailure, DestinationReport, Route,
    SourceConfig, SourceFailure, SourceReport, SourceSession, SourceVm, Switch, Unobserved,
    migrate,
};
use pageferry_testkit::shaper::{Plan, Shaper, Which};
use pageferry_testkit::wait_until;
use pageferry_transport::channel::{Connection, Listener};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

const MIB: u64 = 1 << 20;

/// Opens streams in the caller's way, and counts them.
struct Caller<F> {
    open: F,
    calls: AtomicU32,
    /// So many of the next calls fail.
    failures: AtomicU32,
}

impl<F> Caller<F> {
    fn new(open: F) -> Arc<Self> {
        Arc::new(Self {
            open,
            calls: AtomicU32::new(0),
            failures: AtomicU32::new(0),
        })
    }

    fn calls(&self) -> u32 {
        self.calls.load(Ordering::Relaxed)
    }
}

impl<F: Fn() -> std::io::Result<OwnedFd> + Send + Sync> Connect for Caller<F> {
    fn connect(&self) -> std::io::Result<Connection> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let less = |failures: u32| failures.checked_sub(1);
        let fails = self
            .failures
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        if fails.is_ok() {
            return Err(std::io::Error::other("the tunnel is down"));
        }
        Connection::adopt_fd((self.open)()?).map_err(std::io::Error::other)
    }
}

fn to_tcp(address: SocketAddr) -> impl Fn() -> std::io::Result<OwnedFd> {
    move || Ok(TcpStream::connect(address)?.into())
}

/// How a migration ended at its two ends.
struct Ends {
    sent: Result<SourceReport, SourceFailure>,
    received: Option<(WorkloadVm, Result<DestinationReport, DestinationFailure>)>,
}

/// Moves `vm` to `destination` over streams of the caller, while `act` runs.
fn moved(
    vm: &WorkloadVm,
    destination: &Arc<Destination>,
    caller: Arc<dyn Connect>,
    act: impl FnOnce(&SourceSession),
) -> Ends {
    let session = SourceSession::new().unwrap();
    let failed = AtomicBool::new(false);
    let stop = || failed.load(Ordering::Acquire);
    let config = SourceConfig {
        settings: Switch::AfterPasses(0).into(),
        bulk_channels: 2,
        ..SourceConfig::default()
    };
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| try_receive_on(Backing::Shmem, destination, &stop));
        let sender = scope.spawn(|| {
            let route = Route::Caller(caller);
            let running = vm.running();
            let sent = migrate(&running, &route, b"test", &config, &session, &Unobserved);
            failed.store(sent.is_err(), Ordering::Release);
            sent
        });
        act(&session);
        Ends {
            sent: sender.join().unwrap(),
            received: receiver.join().unwrap(),
        }
    })
}

/// A destination on a socket that this test opened.
fn adopted(socket: OwnedFd) -> Arc<Destination> {
    let listener = Listener::adopt_fd(socket).unwrap();
    listen_on(listener, DestinationConfig::default())
}

fn booted() -> WorkloadVm {
    let vm = WorkloadVm::booted(Engine::Soft, 2, 32 * MIB);
    vm.wait_progress(3000);
    vm
}

fn assert_whole(source: &WorkloadVm, ends: &Ends) {
    ends.sent.as_ref().unwrap();
    let (vm, received) = ends.received.as_ref().expect("a VM");
    received.as_ref().unwrap();
    assert!(source.threads.is_paused(), "the source never resumes it");
    vm.wait_progress(vm.workload.memory_map().share_pages());
    vm.assert_verifies();
}

/// A link through which post-copy takes a minute, unless the test makes it faster.
fn slow(to: SocketAddr) -> Shaper {
    let plan = Plan {
        rate: Some(500_000),
        ..Plan::default()
    };
    Shaper::start(to, plan).unwrap()
}

fn wait_for_handover(destination: &Destination) {
    wait_until("the hand-over", || destination.status().stage == "running");
}

#[test]
fn a_vm_moves_over_unix_streams_of_the_caller_to_an_adopted_listener() {
    let name = format!("pf-caller-{}", std::process::id());
    let path: PathBuf = std::env::temp_dir().join(name);
    let _ = std::fs::remove_file(&path);
    let destination = adopted(UnixListener::bind(&path).unwrap().into());
    let vm = booted();
    let there = path.clone();
    let caller = Caller::new(move || Ok(UnixStream::connect(&there)?.into()));
    let ends = moved(&vm, &destination, Arc::clone(&caller) as _, |_| {});
    assert_whole(&vm, &ends);
    // The control channel, two bulk channels and an urgent one.
    assert_eq!(caller.calls(), 4);
    drop(destination);
    // The file is its owner's.
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_session_recovers_through_the_callers_streams_after_a_cut() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let shaper = slow(listener.local_addr().unwrap());
    let destination = adopted(listener.into());
    let vm = booted();
    let caller = Caller::new(to_tcp(shaper.addr()));
    let ends = moved(&vm, &destination, Arc::clone(&caller) as _, |session| {
        wait_for_handover(&destination);
        for round in 0..2 {
            let before = session.status().generation;
            // The caller's way may fail for a while. It is asked again.
            caller.failures.store(round * 2, Ordering::Relaxed);
            shaper.reset(Which::All);
            wait_until("another generation", || {
                let status = session.status();
                status.generation > before && status.connected || status.stage == "completed"
            });
        }
        shaper.throttle(None);
    });
    assert_whole(&vm, &ends);
    assert!(ends.sent.unwrap().reconnects >= 1);
    assert!(caller.calls() > 4 + 2, "{}", caller.calls());
}

#[test]
fn a_session_changes_from_an_address_to_the_callers_streams() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let shaper = slow(to);
    let destination = adopted(listener.into());
    let vm = booted();
    let first = Caller::new(to_tcp(shaper.addr()));
    let second = Caller::new(to_tcp(to));
    let ends = moved(&vm, &destination, first, |session| {
        wait_for_handover(&destination);
        shaper.refuse(true);
        shaper.reset(Which::All);
        wait_until("the loss", || session.status().lost_for.is_some());
        session.recover(Route::Caller(Arc::clone(&second) as _));
    });
    assert_whole(&vm, &ends);
    assert!(second.calls() >= 4, "{}", second.calls());
}

#[test]
fn a_caller_that_cannot_connect_before_the_hand_over_keeps_the_vm() {
    let destination = listen(DestinationConfig::default());
    let vm = WorkloadVm::booted(Engine::Soft, 1, 4 * MIB);
    vm.wait_progress(50);
    let caller = Caller::new(|| Err(std::io::Error::other("no tunnel to this host")));
    let ends = moved(&vm, &destination, caller, |_| {});
    let failure = ends.sent.unwrap_err();
    assert_eq!(failure.vm, SourceVm::Runs);
    let text = failure.to_string();
    assert!(text.contains("no tunnel to this host"), "{text}");
    assert!(ends.received.is_none(), "it never heard an offer");
    vm.wait_progress(50);
    vm.assert_verifies();
}
