//! Ctrl-C in every phase: nothing stays behind, and before the switch-over the VM runs on.

use crate::support::link::Link;
use crate::support::peer::Peer;
use crate::support::{
    Destination, Dir, Process, Source, assert_runs_on, children_of, is_alive, pageferry, status,
};
use pageferry_testkit::{LIMIT, wait_for};
use rustix::process::Signal;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes per millisecond: so few that 32 MiB take two minutes on any host.
const SLOW: u64 = 256;

/// Waits until the current migration is in a phase whose name starts with `phase`.
fn wait_for_phase(socket: &std::path::Path, phase: &str) {
    wait_for(phase, || {
        status(socket)?["phase"]
            .as_str()?
            .starts_with(phase)
            .then_some(())
    });
}

#[test]
fn in_run_it_cancels_the_setup_and_then_ends_the_vm() {
    let source = Source::start("16M");
    let (shaken, handshake) = channel();
    let (address, server) = Peer::start(move |mut peer| {
        shaken.send(()).unwrap();
        peer.until_closed();
    });
    let migrate = source.migrate(&address);
    wait_for_phase(&source.socket, "setup");
    // The handshake must be over, so that the source waits for the peer.
    handshake.recv_timeout(LIMIT).unwrap();
    source.process.interrupt();
    migrate
        .end()
        .assert_failed(9, "the VM runs on at the source");
    server.join().unwrap();
    source.assert_unharmed();
}

#[test]
fn in_migrate_it_cancels_the_precopy() {
    let source = Source::start("16M");
    let (address, server) = Peer::start(|mut peer| {
        peer.set_up_and_take_no_page();
        peer.until_closed();
    });
    let migrate = source.migrate(&address);
    wait_for_phase(&source.socket, "pre-copy");
    migrate.interrupt();
    migrate
        .end()
        .assert_failed(9, "the VM runs on at the source");
    source.assert_unharmed();
    server.join().unwrap();
}

/// A destination that takes the VM over. Then it reads and says nothing until it is told to end, so
/// that the source cannot finish.
fn destination_that_stops_reading() -> (String, JoinHandle<()>, Sender<()>) {
    let (over, is_over) = channel();
    let (address, server) = Peer::start(move |mut peer| {
        peer.until_handed_over();
        is_over.recv_timeout(LIMIT).unwrap();
    });
    (address, server, over)
}

#[test]
fn after_the_switch_over_the_first_finishes_and_the_second_gives_up() {
    let source = Source::start("32M");
    let (address, server, over) = destination_that_stops_reading();
    // The guest writes all of its memory, so no page is zero. Then far more is missing than fits
    // the sockets' buffers.
    source.wait_until_all_is_written();
    let migrate = source.migrate_with(&address, &["--precopy-passes", "0"]);
    wait_for_phase(&source.socket, "post-copy");
    let Source {
        mut process,
        dir,
        socket,
    } = source;
    process.interrupt();
    process.wait_until_said("sending the rest of its memory first");
    std::thread::sleep(Duration::from_millis(200));
    assert!(process.is_running(), "it goes on sending");
    assert_eq!(status(&socket).unwrap()["state"], "leaving");
    process.interrupt();
    process
        .end()
        .assert_failed(10, "abandoned after the switch-over");
    over.send(()).unwrap();
    migrate.end().assert_failed(10, "abandoned");
    dir.assert_empty();
    server.join().unwrap();
}

#[test]
fn a_destination_that_waits_or_fills_ends_at_once() {
    for phase in ["waiting", "pre-copy"] {
        let source = Source::start("32M");
        let destination = Destination::start(&[]);
        let to = &destination.address;
        let link = Link::start(&destination.dir.path("link"), to, SLOW);
        let migrate = (phase == "pre-copy").then(|| {
            let migrate = source.migrate(&link.address());
            wait_for_phase(&destination.socket, phase);
            migrate
        });
        let interrupted = Instant::now();
        destination.process.interrupt();
        let ended = destination.process.end();
        assert_eq!(ended.code, Some(9), "{phase}: {ended:?}");
        assert!(interrupted.elapsed() < Duration::from_secs(60), "{phase}");
        if let Some(migrate) = migrate {
            migrate
                .end()
                .assert_failed(9, "the VM runs on at the source");
        }
        drop(link);
        destination.dir.assert_empty();
        source.assert_unharmed();
    }
}

#[test]
fn a_link_that_stays_broken_is_given_up_and_the_vm_stays_paused() {
    let source = Source::start("32M");
    let destination = Destination::start(&["--give-up-after", "1s"]);
    let link = Link::start(&destination.dir.path("link"), &destination.address, SLOW);
    source.wait_until_all_is_written();
    let migrate = source.migrate_with(
        &link.address(),
        &["--precopy-passes", "0", "--give-up-after", "1s"],
    );
    wait_for_phase(&destination.socket, "post-copy");
    link.cut();
    wait_for("the VM to be incomplete", || {
        (status(&destination.socket)?["state"] == "incomplete").then_some(())
    });
    migrate
        .end()
        .assert_failed(10, "stays paused at the source");
    // The source's copy is kept, paused, until somebody ends it.
    wait_for("the source to give the VM up", || {
        (status(&source.socket)?["state"] == "given-up").then_some(())
    });
    source.process.interrupt();
    source
        .process
        .end()
        .assert_failed(10, "stays paused at the source");
    source.dir.assert_empty();

    let incomplete = status(&destination.socket).unwrap();
    assert!(incomplete["missing"].as_u64().unwrap() > 0);
    assert_eq!(incomplete["delivery"], "exit");
    assert_eq!(
        incomplete["delivery_because"],
        "it is the only one of the soft engine"
    );
    let resume = pageferry(&["resume", "--vm", destination.socket.to_str().unwrap()]);
    resume.assert_failed(17, "must not run without them");
    let before = status(&destination.socket).unwrap()["guest"].clone();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(
        status(&destination.socket).unwrap()["guest"],
        before,
        "it is not run on"
    );
    drop(link);
    destination.process.interrupt();
    destination.process.end().assert_failed(10, "pages missing");
    destination.dir.assert_empty();
}

#[test]
fn a_destination_in_postcopy_takes_all_of_it_in_first() {
    let source = Source::start("32M");
    let destination = Destination::start(&[]);
    let link = Link::start(&destination.dir.path("link"), &destination.address, SLOW);
    source.wait_until_all_is_written();
    let migrate = source.migrate_with(&link.address(), &["--precopy-passes", "0"]);
    wait_for_phase(&destination.socket, "post-copy");
    destination.process.interrupt();
    destination
        .process
        .wait_until_said("it ends when all of it is here");
    link.set_rate(1 << 20);
    migrate.end().assert_ok();
    source.process.end().assert_ok();
    destination.process.end().assert_ok();
    drop(link);
    destination.dir.assert_empty();
    source.dir.assert_empty();
}

#[test]
fn quit_over_the_control_socket_is_the_same() {
    let source = Source::start("16M");
    let socket = source.socket.to_str().unwrap();
    pageferry(&["quit", "--vm", socket]).assert_ok();
    source.process.end().assert_ok();
    source.dir.assert_empty();
}

/// Starts a demo, stops it after `delay` with `signal`, and returns its exit code once nothing is
/// left.
fn stop_a_demo(delay: u64, signal: Signal) -> Option<i32> {
    let dir = Dir::new();
    let args = [
        "demo", "--engine", "soft", "--vcpus", "2", "--memory", "64M",
    ];
    let demo = Process::start(&args, &dir);
    std::thread::sleep(Duration::from_millis(delay));
    let children = children_of(demo.pid());
    demo.signal(signal);
    let ended = demo.end();
    wait_for("the child to be gone", || {
        (!children.iter().any(|&pid| is_alive(pid))).then_some(())
    });
    if signal != Signal::KILL {
        dir.assert_empty();
    }
    ended.code
}

#[test]
fn a_demo_can_be_stopped_at_any_time() {
    for delay in [0, 20, 100, 300, 600, 700, 800, 900, 1000, 1200, 1500] {
        let code = stop_a_demo(delay, Signal::INT);
        // No code: the signal came before the handlers were installed.
        assert!(
            matches!(code, Some(0 | 9) | None),
            "after {delay} ms: {code:?}"
        );
    }
    stop_in_its_midst(300, Signal::TERM, Some(9));
}

/// Stops a demo with `signal`. It must end with `code`, unless the demo had not started yet or had
/// ended already. Then another one is stopped later or earlier.
fn stop_in_its_midst(mut delay: u64, signal: Signal, code: Option<i32>) {
    let mut ends = 0;
    loop {
        let now = stop_a_demo(delay, signal);
        if now == code {
            return;
        }
        assert!(
            matches!(now, None | Some(0)),
            "after {delay} ms and {signal:?}: {now:?}"
        );
        delay = if now.is_none() { delay * 2 } else { delay / 2 };
        ends += 1;
        assert!(
            ends < 10,
            "after {delay} ms and {signal:?} never {code:?}, {now:?} at last"
        );
    }
}

#[test]
fn a_demo_that_is_killed_takes_its_child_along() {
    for delay in [200, 700] {
        stop_in_its_midst(delay, Signal::KILL, None);
    }
}

#[test]
fn a_reader_that_went_away_is_no_failure() {
    let source = Source::start("16M");
    let mut command = std::process::Command::new("sh");
    let line = format!("\"$0\" status --vm {} | true", source.socket.display());
    command.args(["-c", &line, env!("CARGO_BIN_EXE_pageferry")]);
    Process::spawn(command).end().assert_ok();
    assert_runs_on(&source.socket);
    source.assert_unharmed();
}

/// A Ctrl-C that cancelled one migration does not end the VM when a later one fails in post-copy.
#[test]
fn a_ctrl_c_of_long_ago_does_not_drop_the_only_whole_copy() {
    let mut source = Source::start("16M");
    let (address, server) = Peer::start(|mut peer| {
        peer.set_up_and_take_no_page();
        peer.until_closed();
    });
    let first = source.migrate(&address);
    wait_for_phase(&source.socket, "pre-copy");
    source.process.interrupt();
    first.end().assert_failed(9, "the VM runs on at the source");
    server.join().unwrap();
    assert_runs_on(&source.socket);

    let (address, server) = Peer::start(|mut peer| {
        peer.until_handed_over();
    });
    source
        .migrate_with(&address, &["--give-up-after", "1s"])
        .end()
        .assert_failed(10, "stays paused at the source");
    server.join().unwrap();
    wait_for("the source to give the VM up", || {
        (status(&source.socket)?["state"] == "given-up").then_some(())
    });
    std::thread::sleep(Duration::from_millis(200));
    assert!(source.process.is_running(), "it keeps the only whole copy");
    source.process.interrupt();
    source.process.end().assert_failed(10, "stays paused");
    source.dir.assert_empty();
}

/// A Ctrl-C that was answered while the VM arrived does not end the part of the VM that is here.
#[test]
fn a_ctrl_c_in_postcopy_does_not_drop_what_arrived() {
    let source = Source::start("32M");
    let mut destination = Destination::start(&[]);
    let link = Link::start(&destination.dir.path("link"), &destination.address, SLOW);
    source.wait_until_all_is_written();
    let migrate = source.migrate_with(&link.address(), &["--precopy-passes", "0"]);
    wait_for_phase(&destination.socket, "post-copy");
    destination.process.interrupt();
    destination
        .process
        .wait_until_said("it ends when all of it is here");
    link.cut();
    for vm in [&destination.socket, &source.socket] {
        pageferry(&["abandon", "--vm", vm.to_str().unwrap()]).assert_ok();
    }
    migrate.end().assert_failed(10, "stays paused");
    wait_for("the VM to be incomplete", || {
        (status(&destination.socket)?["state"] == "incomplete").then_some(())
    });
    destination.process.wait_until_said("it stays here until");
    std::thread::sleep(Duration::from_millis(200));
    assert!(destination.process.is_running(), "it stays here");
    destination.process.interrupt();
    destination.process.end().assert_failed(10, "pages missing");
    source.process.interrupt();
    source.process.end().assert_failed(10, "stays paused");
}

#[test]
fn quit_in_precopy_says_that_the_vm_ends() {
    let source = Source::start("16M");
    let (address, server) = Peer::start(|mut peer| {
        peer.set_up_and_take_no_page();
        peer.until_closed();
    });
    let migrate = source.migrate(&address);
    wait_for_phase(&source.socket, "pre-copy");
    pageferry(&["quit", "--vm", source.socket.to_str().unwrap()]).assert_ok();
    let migrated = migrate.end();
    migrated.assert_failed(9, "it ends at the source");
    assert!(!migrated.stderr.contains("runs on"), "{migrated:?}");
    let ended = source.process.end();
    ended.assert_ok();
    assert!(ended.stderr.contains("then the VM ends"), "{ended:?}");
    assert!(!ended.stderr.contains("runs on here"), "{ended:?}");
    source.dir.assert_empty();
    server.join().unwrap();
}

#[test]
fn the_second_in_migrate_stops_watching_and_says_so() {
    let source = Source::start("32M");
    let (address, server, over) = destination_that_stops_reading();
    source.wait_until_all_is_written();
    let migrate = source.migrate_with(&address, &["--precopy-passes", "0"]);
    wait_for_phase(&source.socket, "post-copy");
    migrate.interrupt();
    migrate.wait_until_said("again: stop watching");
    migrate.interrupt();
    migrate.end().assert_failed(9, "stopped watching");
    source.process.interrupt();
    source
        .process
        .wait_until_said("sending the rest of its memory first");
    source.process.interrupt();
    source
        .process
        .end()
        .assert_failed(10, "abandoned after the switch-over");
    over.send(()).unwrap();
    server.join().unwrap();
}

#[test]
fn a_terminal_that_closes_does_not_end_a_vm() {
    let mut source = Source::start("16M");
    let mut destination = Destination::start(&[]);
    for _ in 0..2 {
        source.process.signal(Signal::HUP);
        destination.process.signal(Signal::HUP);
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(source.process.is_running() && destination.process.is_running());
    source.migrate(&destination.address).end().assert_ok();
    source.process.end().assert_ok();
    destination.process.signal(Signal::HUP);
    std::thread::sleep(Duration::from_millis(100));
    assert_runs_on(&destination.socket);
    destination.process.interrupt();
    destination.process.end().assert_ok();
}
