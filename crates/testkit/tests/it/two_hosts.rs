//! Two hosts: their link has the rate it should, addresses change, and nothing is left behind.

use pageferry_testkit::two_hosts::{Host, Link, Queue, Rate, TwoHosts};
use pageferry_testkit::{netns, two_hosts, wait_until};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A connection from host A to `address` of host B: both ends.
fn connect(hosts: &TwoHosts, address: Ipv4Addr) -> (TcpStream, TcpStream) {
    let listener = netns::within(hosts.name(Host::B), || TcpListener::bind((address, 0)));
    let listener = listener.expect("host B").expect("a port");
    let to: SocketAddr = listener.local_addr().expect("an address");
    let limit = Duration::from_secs(60);
    let sender = netns::within(hosts.name(Host::A), || {
        TcpStream::connect_timeout(&to, limit)
    });
    let sender = sender.expect("host A").expect("a connection");
    let (receiver, _) = listener.accept().expect("a connection");
    receiver.set_read_timeout(Some(limit)).expect("a timeout");
    (sender, receiver)
}

/// The bytes a second that each of `flows` connections gets, all at once, after a warm-up.
fn rates(hosts: &TwoHosts, flows: usize, time: Duration) -> Vec<f64> {
    let pairs: Vec<_> = (0..flows)
        .map(|_| connect(hosts, hosts.address(Host::B)))
        .collect();
    let end = Instant::now() + Duration::from_millis(300) + time;
    std::thread::scope(|scope| {
        let receivers: Vec<_> = pairs
            .into_iter()
            .map(|(mut sender, mut receiver)| {
                scope.spawn(move || while sender.write_all(&[1; 64 << 10]).is_ok() {});
                scope.spawn(move || {
                    let mut buffer = vec![0; 256 << 10];
                    let mut from: Option<(Instant, u64)> = None;
                    while Instant::now() < end {
                        let got = receiver.read(&mut buffer).expect("bytes") as u64;
                        match &mut from {
                            Some((_, bytes)) => *bytes += got,
                            None if Instant::now() + time > end => from = Some((Instant::now(), 0)),
                            None => {}
                        }
                    }
                    let (start, bytes) = from.expect("bytes after the warm-up");
                    bytes as f64 / start.elapsed().as_secs_f64()
                })
            })
            .collect();
        let joined = receivers.into_iter().map(|thread| thread.join());
        joined.map(|rate| rate.expect("no panic")).collect()
    })
}

/// Whether a rate differs from the wanted one by less than a part of it.
fn near(got: f64, wanted: Rate, part: f64) -> bool {
    let wanted = wanted.bytes_per_second() as f64;
    (got / wanted - 1.0).abs() < part
}

/// Measures until the rates are right, each time for longer. On a busy machine a short time is not
/// enough, but a wrong rate is wrong every time.
#[track_caller]
fn assert_rates(hosts: &TwoHosts, flows: usize, right: impl Fn(&[f64]) -> bool) {
    let mut seen = Vec::new();
    for milliseconds in [400, 800, 1600, 3200, 6400] {
        let got = rates(hosts, flows, Duration::from_millis(milliseconds));
        if right(&got) {
            return;
        }
        seen.push(got);
    }
    panic!("bytes a second of each flow, by try: {seen:.0?}");
}

#[test]
fn each_queue_has_the_rate_of_the_link() {
    let rate = Rate::mbit(200);
    let Some(hosts) = two_hosts::or_skip(&Link::new(rate)) else {
        return;
    };
    for queue in [Queue::OneFifo, Queue::Fair, Queue::PerFlow(rate)] {
        hosts.reshape(&Link::new(rate).queue(queue)).expect("tc");
        assert_rates(&hosts, 1, |got| near(got[0], rate, 0.1));
    }
}

#[test]
fn flows_of_a_fair_link_get_equal_shares_and_a_limited_flow_gets_its_limit() {
    let rate = Rate::mbit(200);
    let Some(hosts) = two_hosts::or_skip(&Link::new(rate).queue(Queue::Fair)) else {
        return;
    };
    assert_rates(&hosts, 4, |got| {
        let shares = got.iter().all(|flow| near(*flow, Rate::mbit(50), 0.25));
        shares && near(got.iter().sum(), rate, 0.1)
    });
    let most = Rate::mbit(40);
    let link = Link::new(rate).queue(Queue::PerFlow(most));
    hosts.reshape(&link).expect("tc");
    assert_rates(&hosts, 3, |got| {
        got.iter().all(|flow| near(*flow, most, 0.1))
    });
}

/// A busy machine may stop the program that changes the link, between any two of its calls.
#[test]
fn no_packet_passes_while_the_link_is_changed() {
    // Only the packets that ask for an address pass.
    let frozen = Link::new(Rate::mbit(100)).drops_above(28);
    let Some(hosts) = two_hosts::or_skip(&frozen) else {
        return;
    };
    let socket = |host| {
        let address = (hosts.address(host), 0);
        let bound = netns::within(hosts.name(host), || UdpSocket::bind(address));
        bound.expect("a host").expect("a port")
    };
    let (sender, receiver) = (socket(Host::A), socket(Host::B));
    receiver.set_nonblocking(true).expect("a socket");
    let (to, ends) = (receiver.local_addr().unwrap(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let sends = scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                // A full queue is an error here.
                let _ = sender.send_to(&[1; 100], to);
            }
        });
        for _ in 0..20 {
            hosts.reshape(&frozen).expect("tc");
        }
        ends.store(true, Ordering::Relaxed);
        sends.join().expect("no panic");
    });
    let got = receiver.recv(&mut [0; 200]).expect_err("a packet passed");
    assert_eq!(got.kind(), ErrorKind::WouldBlock);
    hosts.reshape(&Link::new(Rate::mbit(100))).expect("tc");
    wait_until("a packet that passes", || {
        let sent = sender.send_to(&[1; 100], to);
        sent.is_ok() && receiver.recv(&mut [0; 200]).is_ok()
    });
}

#[test]
fn addresses_change_and_the_link_is_unplugged_while_a_connection_lives() {
    let Some(hosts) = two_hosts::or_skip(&Link::new(Rate::mbit(1000))) else {
        return;
    };
    let first = hosts.address(Host::B);
    let second = Ipv4Addr::new(198, 18, 0, 77);
    let (mut sender, mut receiver) = connect(&hosts, first);
    let mut pass = |sender: &mut TcpStream| {
        sender.write_all(b"x").expect("sent");
        let mut byte = [0];
        receiver.read_exact(&mut byte).expect("received");
    };
    pass(&mut sender);
    hosts.add_address(Host::B, second).expect("ip");
    pass(&mut sender);
    drop(connect(&hosts, second));
    // Its own address goes and comes back: what was sent between arrives late.
    hosts.remove_address(Host::B, first).expect("ip");
    drop(connect(&hosts, second));
    sender.write_all(b"y").expect("sent");
    hosts.add_address(Host::B, first).expect("ip");
    pass(&mut sender);
    hosts.plug(false).expect("ip");
    sender.write_all(b"z").expect("sent");
    hosts.plug(true).expect("ip");
    pass(&mut sender);
}

fn exists(name: &str) -> bool {
    Path::new("/run/netns").join(name).exists()
}

#[test]
fn hosts_and_their_processes_are_gone_after_a_panic() {
    let Some(hosts) = two_hosts::or_skip(&Link::new(Rate::mbit(1000))) else {
        return;
    };
    let names = [Host::A, Host::B].map(|host| hosts.name(host).to_owned());
    let mut child = netns::command(&names[0], "sleep")
        .arg("600")
        .spawn()
        .expect("ip");
    let pid = child.id().to_string();
    let inside = PathBuf::from("/proc").join(&pid).join("ns/net");
    let own = std::fs::read_link("/proc/self/ns/net").expect("a namespace");
    wait_until("the child to be in its host", || {
        std::fs::read_link(&inside).is_ok_and(|there| there != own)
    });
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
        let _hosts = hosts;
        panic!("expected");
    }));
    assert!(failed.is_err());
    assert!(!names.iter().any(|name| exists(name)), "{names:?}");
    let status = child.wait().expect("a child");
    assert!(!status.success(), "{status}");
}

#[test]
fn hosts_of_a_process_that_is_gone_are_removed_by_the_next_start() {
    let Some(hosts) = two_hosts::or_skip(&Link::new(Rate::mbit(1000))) else {
        return;
    };
    // The maximum of process ids is below this one. Another run may remove it at any moment.
    let mut stale = String::new();
    let mut tries = 0;
    wait_until("a stale host", || {
        tries += 1;
        stale = format!("pageferry-99999999-{}-{tries}", std::process::id());
        let made = Command::new("ip").args(["netns", "add", &stale]).output();
        made.expect("ip").status.success()
    });
    assert!(two_hosts::or_skip(&Link::new(Rate::mbit(1000))).is_some());
    assert!(!exists(&stale));
    assert!(exists(hosts.name(Host::A)), "hosts of a live process stay");
}

#[test]
fn packets_are_lost_in_bursts() {
    let link = Link::new(Rate::mbit(100)).delayed(Duration::from_millis(1), Duration::ZERO);
    let Some(hosts) = two_hosts::or_skip(&link.losing(10, 50)) else {
        return;
    };
    let [sender, receiver] = sockets(&hosts);
    let to = receiver.local_addr().unwrap();
    let mut runs = Vec::new();
    for number in 0..170_u32 {
        sender.send_to(&number.to_le_bytes(), to).expect("sent");
        std::thread::sleep(Duration::from_millis(1));
    }
    receiver
        .set_read_timeout(Some(Duration::from_secs(1)))
        .expect("a limit");
    let mut next = 0;
    let mut got = [0; 4];
    while receiver.recv(&mut got).is_ok() {
        let number = u32::from_le_bytes(got);
        if number > next {
            runs.push(number - next);
        }
        next = number + 1;
    }
    // A packet of another protocol may be in a burst.
    assert!((3..=4).contains(&runs.len()), "{runs:?}");
    assert!(runs.iter().all(|run| (8..=10).contains(run)), "{runs:?}");
}

/// A UDP socket on each host.
fn sockets(hosts: &TwoHosts) -> [UdpSocket; 2] {
    [Host::A, Host::B].map(|host| {
        let address = (hosts.address(host), 0);
        let bound = netns::within(hosts.name(host), || UdpSocket::bind(address));
        let socket = bound.expect("a host").expect("a port");
        let longest = Some(Duration::from_secs(10));
        socket.set_read_timeout(longest).expect("a limit");
        socket
    })
}

#[test]
fn packets_take_the_delay_and_some_jitter_and_keep_their_order() {
    let [delay, jitter] = [2, 3].map(Duration::from_millis);
    let link = Link::new(Rate::mbit(100)).delayed(delay, jitter);
    let Some(hosts) = two_hosts::or_skip(&link) else {
        return;
    };
    let [sender, receiver] = sockets(&hosts);
    let to = receiver.local_addr().unwrap();
    let mut took = Vec::new();
    // The first waits for an address, too.
    for number in 0..=100_u32 {
        let sent = Instant::now();
        sender.send_to(&number.to_le_bytes(), to).expect("sent");
        let mut got = [0; 4];
        receiver.recv(&mut got).expect("a packet");
        assert_eq!(u32::from_le_bytes(got), number);
        took.push(sent.elapsed());
    }
    let took = &mut took[1..];
    took.sort_unstable();
    assert!(took[0] >= delay, "{took:?}");
    assert!(took[0] < delay + jitter / 2, "{took:?}");
    assert!(took[90] > delay + jitter / 2, "{took:?}");
    for number in 0..100_u32 {
        sender.send_to(&number.to_le_bytes(), to).expect("sent");
    }
    for number in 0..100_u32 {
        let mut got = [0; 4];
        receiver.recv(&mut got).expect("a packet");
        assert_eq!(u32::from_le_bytes(got), number);
    }
}
