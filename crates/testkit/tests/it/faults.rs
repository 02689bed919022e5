//! Faults on command: each does what it says and nothing else.

use crate::{LIMIT, Shaped, assert_ended, assert_reset, assert_silent, connect, pass};
use pageferry_testkit::shaper::{Cut, Direction, End, Fault, Plan, Which};
use pageferry_testkit::wait_until;
use rustix::net::sockopt::set_socket_linger;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

#[test]
fn one_frozen_direction_lets_the_other_pass_and_loses_nothing() {
    let shaped = Shaped::new(Plan::default());
    let (client, server) = shaped.connect();
    let (other, other_server) = shaped.connect();
    pass(&client, &server, b"before");
    shaped.shaper.freeze(Which::Number(0), Direction::Forward);
    (&client).write_all(b"during").expect("sent");
    assert_silent(&server);
    pass(&server, &client, b"back");
    pass(&other, &other_server, b"other");
    shaped.shaper.thaw(Which::Number(0), Direction::Forward);
    let mut got = [0; 6];
    (&server).read_exact(&mut got).expect("received");
    assert_eq!(&got, b"during");
}

#[test]
fn a_freeze_of_all_covers_new_connections_and_ends_by_itself() {
    let shaped = Shaped::new(Plan::default());
    let lasts = Duration::from_millis(200);
    let start = Instant::now();
    shaped.shaper.inject(Fault::FreezeAll { lasts });
    // A shorter one does not shorten it.
    let lasts = Duration::from_millis(1);
    shaped.shaper.inject(Fault::FreezeAll { lasts });
    let (client, server) = shaped.connect();
    pass(&client, &server, b"late");
    assert!(start.elapsed() >= Duration::from_millis(200));
}

#[test]
fn a_half_closed_direction_ends_after_its_bytes_and_the_other_goes_on() {
    let shaped = Shaped::new(Plan {
        delay: Duration::from_millis(30),
        ..Plan::default()
    });
    for way in [Direction::Forward, Direction::Backward] {
        let (client, server) = shaped.connect();
        let (from, to) = match way {
            Direction::Forward => (&client, &server),
            _ => (&server, &client),
        };
        pass(to, from, b"ready");
        (&*from).write_all(b"first").expect("sent");
        // The shaper reads the bytes now, or else they are lost too.
        std::thread::sleep(Duration::from_millis(15));
        shaped.shaper.half_close(Which::Newest, way);
        (&*from).write_all(b"lost").expect("sent");
        let mut got = Vec::new();
        (&*to).read_to_end(&mut got).expect("an end");
        assert!(b"first".starts_with(&got), "{got:?}");
        (&*from).write_all(b"lost too").expect("sent");
        pass(to, from, b"back");
        assert!(shaped.shaper.connections().last().expect("one").open);
    }
}

#[test]
fn a_close_is_seen_by_both_sides_as_the_end_and_a_reset_as_a_reset() {
    let shaped = Shaped::new(Plan::default());
    let (client, server) = shaped.connect();
    let (second, second_server) = shaped.connect();
    pass(&client, &server, b"x");
    pass(&second, &second_server, b"x");
    shaped.shaper.close(Which::Number(0));
    assert_ended(&client);
    assert_ended(&server);
    shaped.shaper.reset(Which::Open(17));
    assert_reset(&second);
    assert_reset(&second_server);
    assert!(!shaped.shaper.connections().iter().any(|one| one.open));
    // There is none to choose.
    shaped.shaper.reset(Which::Open(3));
    shaped.shaper.reset(Which::Newest);
}

#[test]
fn a_reset_of_one_side_reaches_the_other_after_the_bytes() {
    for server_goes_on in [false, true] {
        let shaped = Shaped::new(Plan::default());
        let (client, server) = shaped.connect();
        pass(&client, &server, b"ready");
        shaped
            .shaper
            .delay(Duration::from_millis(40), Duration::ZERO);
        (&client).write_all(b"last words").expect("sent");
        let read = || shaped.shaper.connections()[0].forward;
        wait_until("the bytes", || read() > 5);
        set_socket_linger(&client, Some(Duration::ZERO)).expect("an option");
        drop(client);
        if server_goes_on {
            while (&server).write_all(b"to nobody").is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        } else {
            let mut got = [0; 10];
            (&server).read_exact(&mut got).expect("received");
            assert_eq!(&got, b"last words");
            assert_reset(&server);
        }
        wait_until("the end", || !shaped.shaper.connections()[0].open);
    }
}

#[test]
fn a_side_that_is_gone_after_its_end_resets_the_other_that_still_sends() {
    let shaped = Shaped::new(Plan::default());
    let (client, server) = shaped.connect();
    client.shutdown(Shutdown::Write).expect("an end");
    assert_ended(&server);
    pass(&server, &client, b"still");
    drop(client);
    let start = Instant::now();
    while (&server).write_all(b"to nobody").is_ok() {
        assert!(start.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(2));
    }
    wait_until("the end", || !shaped.shaper.connections()[0].open);
}

#[test]
fn refused_connections_fail_at_once_and_open_ones_live() {
    let shaped = Shaped::new(Plan::default());
    let (client, server) = shaped.connect();
    let refused = || {
        let tried = TcpStream::connect_timeout(&shaped.shaper.addr(), LIMIT);
        tried.is_err_and(|why| why.kind() == ErrorKind::ConnectionRefused)
    };
    for _ in 0..3 {
        shaped.shaper.refuse(true);
        assert!(refused());
        pass(&client, &server, b"lives");
        shaped.shaper.refuse(false);
        let (client, server) = shaped.connect();
        pass(&client, &server, b"new");
    }
    let lasts = Duration::from_millis(150);
    let start = Instant::now();
    shaped.shaper.inject(Fault::Refuse { lasts });
    wait_until("the refusal", refused);
    wait_until("its end", || !refused());
    assert!(start.elapsed() >= lasts);
}

#[test]
fn a_cut_lets_exactly_so_many_bytes_arrive() {
    let cut = |number, after, end| Cut {
        number,
        direction: Direction::Forward,
        after,
        end,
    };
    let shaped = Shaped::new(Plan {
        cuts: vec![
            cut(Some(1), 100_001, End::Close),
            cut(Some(2), 3, End::Reset),
        ],
        ..Plan::default()
    });
    let (_first, _first_server) = shaped.connect();
    let (client, server) = shaped.connect();
    let mut got = Vec::new();
    std::thread::scope(|scope| {
        // It fails in the end.
        scope.spawn(|| while (&client).write_all(&[5; 10_000]).is_ok() {});
        (&server).read_to_end(&mut got).expect("an end");
    });
    assert_eq!(got.len(), 100_001);
    let (client, server) = shaped.connect();
    (&client).write_all(b"abcdef").expect("sent");
    let mut got = [0; 16];
    while (&server).read(&mut got).is_ok_and(|count| count > 0) {}
    assert_reset(&client);
    let all = shaped.shaper.connections();
    let all: Vec<_> = all.iter().map(|one| (one.forward, one.open)).collect();
    assert_eq!(all, [(0, true), (100_001, false), (3, false)]);
    // By command, and at once if the bytes have passed.
    let (client, server) = shaped.connect();
    shaped
        .shaper
        .cut_after(Which::Newest, Direction::Backward, 2, End::Close);
    pass(&server, &client, b"12");
    assert_ended(&client);
    let (client, server) = shaped.connect();
    pass(&client, &server, b"123");
    shaped
        .shaper
        .cut_after(Which::Newest, Direction::Forward, 1, End::Reset);
    assert_reset(&client);
}

#[test]
fn a_fault_of_the_rate_is_over_after_its_time() {
    let shaped = Shaped::new(Plan::default());
    let (client, server) = shaped.connect();
    let lasts = Duration::from_millis(200);
    let start = Instant::now();
    shaped.shaper.inject(Fault::Throttle { rate: 1000, lasts });
    // It would take ten seconds.
    pass(&client, &server, &[1; 10_000]);
    assert!(start.elapsed() >= lasts && start.elapsed() < Duration::from_secs(8));
    drop(connect(shaped.shaper.addr()));
}
