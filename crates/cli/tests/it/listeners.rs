//! A hostile peer costs each process that listens at most 64 threads, 256 descriptors and
//! 64 MiB, the memory of VMs apart. An honest peer gets through beside it.

use crate::support::{Destination, Dir, Process, Source, ask};
use pageferry_pager::stores::peer::talk::Talk;
use pageferry_pager::stores::peer::wire::{Kind, MAX_BODY, Request};
use pageferry_testkit::LIMIT;
use pageferry_testkit::handshake::{PLAIN, open};
use pageferry_transport::address::Address;
use pageferry_transport::handshake::Identity;
use pageferry_transport::wire::{ChannelKey, Role};
use pageferry_transport::{Connection, Stream};
use rustix::process::Signal;
use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const THREADS: u64 = 64;
const DESCRIPTORS: u64 = 256;
const BYTES: u64 = 64 << 20;

/// Threads, descriptors, and bytes of memory that no file backs.
type Cost = [u64; 3];

fn cost(pid: u32) -> Cost {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let of = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_whitespace().next());
        number
            .and_then(|number| number.parse::<u64>().ok())
            .unwrap()
    };
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .count();
    [of("Threads:"), descriptors as u64, of("RssAnon:") << 10]
}

/// Looks at a process while `attack` acts, which keeps what it returns. Then `honest` must pass
/// beside that. Asserts the bounds on what came on top.
fn costs<T>(
    what: &str,
    process: &Process,
    attack: impl FnOnce() -> T + Send,
    honest: impl FnOnce() + Send,
) {
    let pid = process.pid();
    let before = cost(pid);
    let most = std::thread::scope(|scope| {
        let acts = scope.spawn(|| {
            let held = attack();
            std::thread::sleep(Duration::from_millis(200));
            honest();
            drop(held);
        });
        let mut most = before;
        while !acts.is_finished() {
            let now = cost(pid);
            most = std::array::from_fn(|at| most[at].max(now[at]));
            std::thread::sleep(Duration::from_millis(5));
        }
        most
    });
    let [threads, descriptors, bytes] = std::array::from_fn(|at| most[at] - before[at]);
    eprintln!(
        "{what}: {threads} threads, {descriptors} descriptors, {} KiB",
        bytes >> 10
    );
    assert!(threads <= THREADS, "{what}: {threads} threads");
    assert!(
        descriptors <= DESCRIPTORS,
        "{what}: {descriptors} descriptors"
    );
    assert!(bytes <= BYTES, "{what}: {bytes} bytes");
}

/// Strangers that say nothing, and some that say a part.
fn strangers(to: &Address) -> Vec<TcpStream> {
    let connect = |at: u32| {
        let mut socket = TcpStream::connect(to.authority()).unwrap();
        if at % 2 == 1 {
            // It may be closed already.
            let _ = socket.write_all(b"PGFE");
        }
        socket
    };
    (0..400).map(connect).collect()
}

/// Opens channels of sessions, as many as are taken.
fn channels(to: &Address, sessions: usize, keys: &[ChannelKey]) -> Vec<Connection> {
    let mut held = Vec::new();
    for _ in 0..sessions {
        let identity = Identity::random().unwrap();
        for &key in keys {
            let opened = open(to, &PLAIN, &identity, key);
            held.extend(opened.ok().map(|opened| opened.connection));
        }
    }
    assert!(held.len() > 20, "{} were taken", held.len());
    held
}

fn key(role: Role, index: u16) -> ChannelKey {
    ChannelKey {
        role,
        index,
        ..ChannelKey::control(1)
    }
}

#[test]
fn a_destination_costs_little() {
    let destination = Destination::start_on_tcp(&[]);
    let to: Address = destination.address.parse().unwrap();
    let source = Source::start("16M");
    let attack = || (strangers(&to), channels(&to, 300, &[key(Role::Control, 0)]));
    let checks = || {
        let checked = source.migrate_with(&destination.address, &["--check"]);
        checked.end().assert_ok();
    };
    costs("receive", &destination.process, attack, checks);
    source.assert_unharmed();
}

#[test]
fn the_far_end_of_a_tunnel_costs_little() {
    let dir = Dir::new();
    let connect = format!("unix:{}", dir.path("vmm").display());
    let args = ["tunnel", "--accept", "127.0.0.1:0", "--connect", &connect];
    let far = Process::start(&args, &dir);
    let at = far.wait_until_said("listening at ");
    let to: Address = at.split(',').next().unwrap().parse().unwrap();
    let keys: Vec<_> = (0..17).map(|index| key(Role::Tunnel, index)).collect();
    let attack = || {
        let many = channels(&to, 4, &keys);
        // Beyond the bounds of one host, they hear `busy`.
        (strangers(&to), many, channels(&to, 200, &keys[..5]))
    };
    costs("tunnel", &far, attack, || {});
    // It would wait for sessions that say nothing.
    far.signal(Signal::KILL);
    far.end();
}

#[test]
fn a_host_that_shares_costs_little() {
    let dir = Dir::new();
    let memory = dir.path("memory");
    std::fs::write(&memory, vec![7; 64 << 20]).unwrap();
    let named = format!("memory={}", memory.display());
    let args = ["pager", "share", "--listen", "127.0.0.1:0", &named];
    let share = Process::start(&args, &dir);
    let to: Address = share.wait_until_said("sharing at ").parse().unwrap();
    let read = |connection: Connection| {
        let mut talk = Talk::new(Stream::new(Arc::new(connection), LIMIT));
        talk.open("memory").ok()?;
        // More than buffers hold, and none of it is read.
        for number in 2..20 {
            let request = Request {
                kind: Kind::Read,
                number,
                offset: 0,
                len: MAX_BODY,
            };
            talk.stream().write_all(&request.encode()).ok()?;
        }
        Some(talk)
    };
    let attack = || {
        let readers = channels(&to, 100, &[key(Role::Share, 0)]);
        let readers: Vec<_> = readers.into_iter().filter_map(read).collect();
        assert!(readers.len() > 20, "{} readers", readers.len());
        (strangers(&to), readers)
    };
    costs("share", &share, attack, || {});
    share.interrupt();
    share.end().assert_ok();
}

#[test]
fn the_sockets_of_a_vm_cost_little() {
    let host = Destination::start_on_tcp(&["--metrics", "127.0.0.1:0"]);
    let said = host.process.wait_until_said("metrics on http://");
    let (metrics, _) = said.split_once("/metrics").unwrap();
    let to: Address = metrics.parse().unwrap();
    let clients = |path: &Path| -> Vec<UnixStream> {
        let connect = |at: u32| {
            let mut socket = UnixStream::connect(path).ok()?;
            let request = [&b"{\"command\":"[..], b"", b"{\"command\":\"status\"}\n"];
            let _ = socket.write_all(request[at as usize % 3]);
            Some(socket)
        };
        (0..200).filter_map(connect).collect()
    };
    let attack = || (strangers(&to), clients(&host.socket));
    let asks = || {
        let answer = ask(&host.socket, "{\"command\":\"status\"}\n");
        assert!(answer.is_some_and(|answer| answer["result"].is_object()));
    };
    costs("control and metrics", &host.process, attack, asks);
}
