//! Figures of moves between doubles: the pause, and page faults a second.

use crate::ch::{Hosts, PAGES, serve};
use pageferry_migration::{DestinationConfig, Listener, Route, Switch};
use pageferry_testkit::cloud_hypervisor::Quirk;
use pageferry_testkit::netns::within;
use pageferry_testkit::shaper::{Plan, Shaper};
use pageferry_testkit::two_hosts::{Host, Link, Rate, or_skip};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// The time from the pause at the sender to the run at the receiver.
fn pause(hosts: &mut Hosts) -> Duration {
    let paused = hosts.source.status().at;
    let ran = hosts.target.verify();
    assert_eq!(ran.wrong, 0, "{:?}", ran.first_wrong);
    ran.at - paused
}

/// A move on one host, by the doubles alone: the pause without us.
fn local() -> Option<Duration> {
    let mut hosts = Hosts::start(Quirk::Right, Quirk::Right)?;
    std::thread::sleep(Duration::from_millis(300));
    hosts.move_locally();
    Some(pause(&mut hosts))
}

/// A move over a link of 1 Gbit/s, with pre-copy.
fn bridged() -> Option<Duration> {
    let link = or_skip(&Link::new(Rate::mbit(1000)))?;
    let mut hosts = Hosts::start(Quirk::Right, Quirk::Right)?;
    hosts.switch = Switch::Auto;
    std::thread::sleep(Duration::from_millis(300));
    let listen = || {
        let listener = Listener::bind(&"198.18.0.2:0".parse().unwrap()).unwrap();
        let config = DestinationConfig {
            plain: pageferry_migration::PlainPolicy::Anywhere,
            ..DestinationConfig::default()
        };
        pageferry_migration::Destination::listen(listener, config, |_| ()).unwrap()
    };
    hosts.destination = Arc::new(within(link.name(Host::B), listen).unwrap());
    let route = hosts.route();
    let moved = within(link.name(Host::A), || hosts.migrate(&route, |_| ())).unwrap();
    let sent = moved.sent.unwrap();
    println!(
        "  {:?}, {} missing at the pause",
        sent.pages, sent.missing_at_start
    );
    let arrived = moved.received.unwrap();
    let started = arrived.0.started;
    serve(arrived).unwrap();
    let paused = hosts.source.status().at;
    let ran = hosts.target.status().at;
    let us = |from: Duration, to: Duration| to.saturating_sub(from).as_micros();
    println!(
        "  state here {} us, sent {} us, go {} us, runs {} us",
        us(paused, sent.last_stop),
        us(sent.last_stop, sent.sent_at),
        us(sent.sent_at, started),
        us(started, ran)
    );
    Some(pause(&mut hosts))
}

#[test]
#[ignore = "measures: run with --release and --nocapture"]
fn the_pause_is_that_of_a_local_move() {
    for _ in 0..5 {
        let (Some(local), Some(bridged)) = (local(), bridged()) else {
            return;
        };
        let ratio = bridged.as_secs_f64() / local.as_secs_f64();
        println!("local {local:?}, bridged {bridged:?}: {ratio:.2}");
    }
}

/// With 1 ms each way, one page a round trip would be 500 a second.
#[test]
#[ignore = "measures: run with --release and --nocapture"]
fn page_faults_do_not_wait_for_a_round_trip_each() {
    for _ in 0..5 {
        let Some(mut hosts) = Hosts::start(Quirk::Right, Quirk::Right) else {
            return;
        };
        let to = hosts.destination.local_addrs()[0].to_string();
        let to: SocketAddr = to.trim_start_matches("tcp:").parse().unwrap();
        let plan = Plan {
            delay: Duration::from_millis(1),
            ..Plan::default()
        };
        let shaper = Shaper::start(to, plan).unwrap();
        let route = Route::To(shaper.addr().to_string().parse().unwrap());
        let moved = hosts.migrate(&route, |_| ());
        moved.sent.unwrap();
        serve(moved.received.unwrap()).unwrap();
        let status = hosts.target.status();
        let rate = PAGES as f64 / status.served.unwrap().as_secs_f64();
        println!(
            "{rate:.0} pages/s, {} faults, in {:?}",
            status.faults, status.served
        );
    }
}
