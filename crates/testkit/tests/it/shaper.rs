//! The shaper as a line: bytes, order, delay, rate, back-pressure, its end.

use crate::{Shaped, accept, assert_ended, assert_reset, connect, pass};
use pageferry_testkit::shaper::{Connection, Direction, Fault, Plan, Which};
use pageferry_testkit::{Random, skip, wait_until};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Bytes that a seed determines.
fn bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let words = std::iter::repeat_with(|| random.next().to_le_bytes());
    words.flatten().take(count).collect()
}

#[test]
fn bytes_pass_both_ways_at_once_and_the_ends_of_streams_too() {
    let shaped = Shaped::new(Plan::default());
    let (client, server) = shaped.connect();
    let (there, back) = (bytes(1, 6 << 20), bytes(2, 5 << 20));
    std::thread::scope(|scope| {
        for (mut stream, sent, wanted) in [(&client, &there, &back), (&server, &back, &there)] {
            scope.spawn(move || {
                stream.write_all(sent).expect("sent");
                stream.shutdown(Shutdown::Write).expect("an end");
            });
            scope.spawn(move || {
                let mut got = Vec::new();
                stream.read_to_end(&mut got).expect("received");
                assert!(got == *wanted);
            });
        }
    });
    wait_until("the end", || !shaped.shaper.connections()[0].open);
    let over = Connection {
        number: 0,
        forward: 6 << 20,
        backward: 5 << 20,
        open: false,
    };
    assert_eq!(shaped.shaper.connections(), [over]);
}

#[test]
fn connections_are_numbered_in_the_order_of_acceptance() {
    let shaped = Shaped::new(Plan::default());
    let pairs: Vec<_> = (0..3).map(|_| shaped.connect()).collect();
    pass(&pairs[1].0, &pairs[1].1, b"abc");
    pass(&pairs[2].1, &pairs[2].0, b"defg");
    let counts: Vec<_> = shaped.shaper.connections();
    let counts: Vec<_> = counts
        .iter()
        .map(|c| (c.number, c.forward, c.backward))
        .collect();
    assert_eq!(counts, [(0, 0, 0), (1, 3, 0), (2, 0, 4)]);
}

#[test]
fn delayed_bytes_keep_their_order_and_do_not_wait_for_each_other() {
    let delay = Duration::from_millis(80);
    let shaped = Shaped::new(Plan {
        seed: 7,
        delay,
        jitter: Duration::from_millis(20),
        ..Plan::default()
    });
    let (client, server) = shaped.connect();
    let start = Instant::now();
    for number in 0..20_u8 {
        (&client).write_all(&[number]).expect("sent");
        std::thread::sleep(Duration::from_millis(2));
    }
    client.shutdown(Shutdown::Write).expect("an end");
    let mut got = Vec::new();
    (&server).read_to_end(&mut got).expect("received");
    assert!(
        start.elapsed() >= delay + Duration::from_millis(38),
        "{:?}",
        start.elapsed()
    );
    assert!(got.iter().copied().eq(0..20), "{got:?}");
    shaped.shaper.delay(Duration::ZERO, Duration::ZERO);
    let start = Instant::now();
    pass(&server, &client, b"x");
    println!("without a delay: {:?}", start.elapsed());
}

#[test]
fn a_fault_of_delay_is_over_after_its_time() {
    let shaped = Shaped::new(Plan::default());
    let (client, server) = shaped.connect();
    pass(&client, &server, b"a");
    let lasts = Duration::from_millis(100);
    let start = Instant::now();
    shaped.shaper.inject(Fault::Delay { ms: 150, lasts });
    pass(&client, &server, b"b");
    assert!(start.elapsed() >= Duration::from_millis(150));
    // The quickest of several tries does not depend on other programs.
    let tries = (0..10).map(|_| {
        let start = Instant::now();
        pass(&client, &server, b"c");
        start.elapsed()
    });
    assert!(tries.min().expect("a try") < Duration::from_millis(100));
}

#[test]
fn the_rate_is_kept_and_connections_share_it() {
    let rate = 2_000_000;
    let shaped = Shaped::new(Plan {
        rate: Some(rate),
        ..Plan::default()
    });
    let pairs = [shaped.connect(), shaped.connect()];
    let counts = || {
        let all = shaped.shaper.connections();
        [all[0].forward, all[1].forward]
    };
    std::thread::scope(|scope| {
        for (client, server) in &pairs {
            scope.spawn(|| while (&*client).write_all(&[0; 65536]).is_ok() {});
            scope.spawn(|| while matches!((&*server).read(&mut [0; 65536]), Ok(1..)) {});
        }
        wait_until("both to run", || counts().iter().all(|count| *count > 0));
        // A busy machine can be too slow for the rate, and never too fast.
        let mut seen = Vec::new();
        let right = (0..6).any(|_| {
            let (start, before) = (Instant::now(), counts());
            std::thread::sleep(Duration::from_millis(600));
            let (after, time) = (counts(), start.elapsed().as_secs_f64());
            let flows = [0, 1].map(|n| (after[n] - before[n]) as f64 / time);
            let sum = flows[0] + flows[1];
            seen.push((sum / rate as f64, flows[0] / sum));
            sum / rate as f64 > 0.85 && (0.4..0.6).contains(&(flows[0] / sum))
        });
        shaped.shaper.reset(Which::All);
        assert!(seen.iter().all(|(part, _)| *part < 1.1), "{seen:?}");
        let slow = seen
            .iter()
            .all(|(part, share)| *part > 0.1 && (0.2..0.8).contains(share));
        assert!(right || slow, "{seen:?}");
    });
}

#[test]
fn a_slow_receiver_holds_back_the_sender() {
    let shaped = Shaped::new(Plan::default());
    let (client, server) = shaped.connect();
    client.set_nonblocking(true).expect("an option");
    let mut sent = 0;
    let mut last = Instant::now();
    while last.elapsed() < Duration::from_millis(150) {
        match (&client).write(&[7; 65536]) {
            Ok(count) => (sent, last) = (sent + count, Instant::now()),
            Err(why) => assert_eq!(why.kind(), ErrorKind::WouldBlock),
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    // The kernel chooses how much the test's own sockets hold: some megabytes.
    assert!(sent < 16 << 20, "{sent}");
    client.shutdown(Shutdown::Write).expect("an end");
    let mut got = Vec::new();
    (&server).read_to_end(&mut got).expect("received");
    assert_eq!(got.len(), sent);
}

#[test]
fn new_connections_go_to_the_new_target() {
    let shaped = Shaped::new(Plan::default());
    let (old_client, old_server) = shaped.connect();
    let other = TcpListener::bind("127.0.0.1:0").expect("a port");
    shaped
        .shaper
        .point_to(other.local_addr().expect("an address"));
    let client = connect(shaped.shaper.addr());
    let server = accept(&other);
    pass(&client, &server, b"new");
    pass(&old_client, &old_server, b"old");
}

#[test]
fn a_target_that_refuses_resets_the_connection() {
    let shaped = Shaped::new(Plan::default());
    let nobody = TcpListener::bind("127.0.0.1:0").expect("a port");
    shaped
        .shaper
        .point_to(nobody.local_addr().expect("an address"));
    drop(nobody);
    // The reset may come before the connection is reported.
    match TcpStream::connect(shaped.shaper.addr()) {
        Ok(client) => assert_reset(&client),
        Err(why) => assert_eq!(why.kind(), ErrorKind::ConnectionReset),
    }
}

#[test]
fn a_drop_ends_the_thread_at_once_and_resets_connections() {
    let shaped = Shaped::new(Plan {
        delay: Duration::from_secs(3600),
        ..Plan::default()
    });
    let (client, server) = shaped.connect();
    (&client).write_all(b"never").expect("sent");
    shaped.shaper.freeze(Which::All, Direction::Backward);
    let start = Instant::now();
    drop(shaped.shaper);
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_reset(&client);
    assert_reset(&server);
}

/// The CPU time that the thread of a shaper has used.
fn cpu_time(name: &str) -> Option<Duration> {
    let threads = std::fs::read_dir("/proc/self/task").ok()?.flatten();
    let mut paths = threads.map(|thread| thread.path());
    let is_it = |comm: String| comm.trim() == name;
    let path = paths.find(|path| std::fs::read_to_string(path.join("comm")).is_ok_and(is_it))?;
    let text = std::fs::read_to_string(path.join("schedstat")).ok()?;
    Some(Duration::from_nanos(text.split(' ').next()?.parse().ok()?))
}

#[test]
fn a_shaper_that_waits_uses_no_cpu_time() {
    let shaped = Shaped::new(Plan::default());
    let name = format!("shaper-{}", shaped.shaper.addr().port());
    let (half, half_server) = shaped.connect();
    half.shutdown(Shutdown::Write).expect("an end");
    assert_ended(&half_server);
    // One that hung up while it was frozen, both with and without bytes on the way.
    let (gone, _gone_server) = shaped.connect();
    let (full, full_server) = shaped.connect();
    full.set_nonblocking(true).expect("an option");
    while (&full).write(&[1; 65536]).is_ok() {}
    shaped.shaper.freeze(Which::All, Direction::Both);
    drop((gone, full, full_server));
    assert_idle(&name);
    // A throttled one that has much to send.
    shaped.shaper.heal();
    shaped.shaper.throttle(Some(1000));
    let (client, _server) = shaped.connect();
    client.set_nonblocking(true).expect("an option");
    while (&client).write(&[1; 65536]).is_ok() {}
    assert_idle(&name);
}

/// Checks that a thread hardly runs for a while.
#[track_caller]
fn assert_idle(name: &str) {
    let Some(before) = cpu_time(name) else {
        skip("schedstat", "the kernel does not say how long a thread ran");
        return;
    };
    std::thread::sleep(Duration::from_millis(300));
    let used = cpu_time(name).expect("as before") - before;
    assert!(used < Duration::from_millis(60), "{used:?}");
}
