//! `receive --activated`: the listening socket comes from a service manager.

use crate::support::{
    Dir, PAGEFERRY, Process, Source, assert_whole, held_link, pageferry, status, wait_for_handover,
};
use pageferry_testkit::shaper::Which;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

/// Starts `receive` as a service manager does.
fn activated(socket: OwnedFd, fds: &str, control: &str, dir: &Dir) -> Process {
    let command = activated_command(fds, control, dir);
    Process::spawn_reading(command, Stdio::from(socket))
}

/// A command that has the socket as descriptor 0. The shell moves it to 3, and keeps its process
/// id.
pub(crate) fn activated_command(fds: &str, control: &str, dir: &Dir) -> Command {
    let mut command = Command::new("sh");
    let script = format!(
        "exec 3<&0 0</dev/null; LISTEN_FDS={fds} LISTEN_PID=$$ exec {PAGEFERRY} receive \
         --activated --control {control} --dead-after 500ms"
    );
    command.args(["-c", &script]).env("TMPDIR", dir.path(""));
    command
}

#[test]
fn a_vm_moves_to_an_activated_socket_and_survives_a_cut() {
    let dir = Dir::new();
    let control = dir.path("vm");
    let there = control.to_str().unwrap();
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let destination = activated(socket.into(), "1", there, &dir);
    let said = destination.wait_until_said("listening on tcp:");
    assert_eq!(said, address.to_string());
    let shaper = held_link(&said);
    let source = Source::start("16M");
    source.wait_until_all_is_written();
    let more = ["--precopy-passes", "0", "--dead-after", "500ms"];
    let mut migrate = source.migrate_with(&shaper.addr().to_string(), &more);
    wait_for_handover(&mut migrate, &control);
    // The listener serves the next generation too.
    shaper.reset(Which::All);
    shaper.throttle(None);
    migrate.end().assert_ok();
    source.process.end().assert_ok();
    assert_whole(&control);
    let session = status(&control).unwrap()["session"].clone();
    assert!(session["reconnects"].as_u64().unwrap() >= 1, "{session}");
    pageferry(&["quit", "--vm", there]).assert_ok();
    destination.end().assert_ok();
    dir.assert_empty();
}

#[test]
fn a_socket_that_does_not_serve_is_a_usage_error() {
    let dir = Dir::new();
    let control = dir.path("vm");
    let start =
        |socket: OwnedFd, fds: &str| activated(socket, fds, control.to_str().unwrap(), &dir).end();
    let listener = || TcpListener::bind("127.0.0.1:0").unwrap();
    start(listener().into(), "2").assert_failed(2, "expects exactly one socket");
    let other = listener();
    let stream = std::net::TcpStream::connect(other.local_addr().unwrap()).unwrap();
    start(stream.into(), "1").assert_failed(2, "the activated socket: ");
    let none = ["receive", "--activated"];
    pageferry(&none).assert_failed(2, "no service manager handed a socket over");
    let both = ["receive", "--activated", "--listen", "127.0.0.1:0"];
    pageferry(&both).assert_failed(2, "cannot be used with");
    pageferry(&["receive"]).assert_failed(2, "required");
    let mut command = Command::new(PAGEFERRY);
    command.env("LISTEN_FDS", "1").env("LISTEN_PID", "1");
    let foreign = Process::start_by(command, &none, &dir).end();
    foreign.assert_failed(2, "for another process");
    dir.assert_empty();
}
