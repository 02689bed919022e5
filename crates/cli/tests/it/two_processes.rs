//! `run`, `receive` and `migrate`: the move between two terminals.

use crate::support::{
    Destination, Process, Source, assert_runs_on, assert_whole, pageferry, status,
};
use pageferry_testkit::wait_for;

#[test]
fn a_vm_moves_and_runs_on_at_the_destination() {
    let source = Source::start("32M");
    let destination = Destination::start(&["--json"]);
    let migrated = source.migrate(&destination.address).end();
    migrated.assert_ok();
    let json = migrated.json();
    assert_eq!(json["engine"], "soft");
    assert_eq!(json["blackout_kind"], "upper-bound");
    assert!(json["pages"]["precopy"].as_u64().unwrap() > 0, "{json}");

    let ran = source.process.end();
    ran.assert_ok();
    assert!(
        ran.stdout
            .contains(&format!("the VM runs at {} now", destination.address)),
        "{ran:?}"
    );
    source.dir.assert_empty();

    assert_whole(&destination.socket);
    pageferry(&["quit", "--vm", destination.socket.to_str().unwrap()]).assert_ok();
    let received = destination.process.end();
    received.assert_ok();
    assert_eq!(received.json()["delivery"], "exit");
    destination.dir.assert_empty();
}

#[test]
fn a_vm_moves_on_from_where_it_came() {
    let source = Source::start("16M");
    let first = Destination::start(&[]);
    let second = Destination::start(&["--sparse"]);
    source.migrate(&first.address).end().assert_ok();
    assert_runs_on(&first.socket);
    let onward = [
        "migrate",
        "--vm",
        first.socket.to_str().unwrap(),
        "--to",
        &second.address,
    ];
    let moved = Process::start(&onward, &first.dir).end();
    moved.assert_ok();
    assert!(moved.stdout.contains("blackout"), "{moved:?}");
    first.process.end().assert_ok();
    assert_whole(&second.socket);
    second.process.interrupt();
    second.process.end().assert_ok();
    second.dir.assert_empty();
}

#[test]
fn a_port_of_the_systems_choice_is_told() {
    let dir = crate::support::Dir::new();
    let socket = dir.path("vm");
    let process = Process::start(
        &[
            "receive",
            "--listen",
            "127.0.0.1:0",
            "--control",
            socket.to_str().unwrap(),
        ],
        &dir,
    );
    wait_for("the destination", || status(&socket));
    // Printed at once, while the process still listens.
    let port = process.wait_until_said("listening on tcp:127.0.0.1:");
    assert_ne!(port.parse::<u16>().unwrap(), 0);
    std::net::TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    process.interrupt();
    let ended = process.end();
    assert_eq!(ended.code, Some(9), "{ended:?}");
    assert_eq!(ended.stdout, format!("listening on tcp:127.0.0.1:{port}\n"));
    dir.assert_empty();
}

#[test]
fn a_destination_that_waits_can_be_asked_to_end() {
    let destination = Destination::start(&[]);
    assert_eq!(status(&destination.socket).unwrap()["state"], "waiting");
    let socket = destination.socket.to_str().unwrap();
    for command in ["pause", "resume", "verify"] {
        pageferry(&[command, "--vm", socket]).assert_failed(11, "there is no VM here yet");
    }
    pageferry(&["quit", "--vm", socket]).assert_ok();
    destination.process.end().assert_ok();
    destination.dir.assert_empty();
}
