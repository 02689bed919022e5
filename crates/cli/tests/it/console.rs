//! `pageferry console`: the console of a VM in another process.

use crate::support::terminal::Pty;
use crate::support::{Dir, PAGEFERRY, Process, Source, ask, pageferry, status};
use crate::terminal::{run_echo, running};
use pageferry_testkit::{LIMIT, wait_until};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

/// A VM that echoes keys, in the background.
fn background(dir: &Dir) -> String {
    let args = [run_echo(dir), vec!["--detach".to_owned()]].concat();
    pageferry(&args).assert_ok();
    dir.path("vm").to_str().unwrap().to_owned()
}

fn wait_for_the_end(socket: &str) {
    wait_until("the end of the VM", || !Path::new(socket).exists());
}

#[test]
fn a_user_attaches_types_and_detaches() {
    let dir = Dir::new();
    let socket = background(&dir);
    let before = Pty::new().settings();
    for round in ["one", "two"] {
        let pty = Pty::new();
        let console = pty.start(&["console", "--vm", &socket]);
        pty.wait_until_shown(b"ready");
        pty.wait_until_keys_are_passed_on();
        wait_until("the way out", || {
            console.said_on_stderr().contains("Ctrl-]")
        });
        pty.press(b"\x03\x1a\x13");
        pty.wait_until_shown(b"\x03\x1a\x13");
        pty.press(round.as_bytes());
        pty.wait_until_shown(round.as_bytes());
        pty.press(b"\x1d");
        console.end().assert_ok();
        assert_eq!(pty.settings(), before);
        assert_eq!(status(Path::new(&socket)).unwrap()["state"], "running");
    }
    // The text so far is shown to each who attaches, and the end of the VM ends all.
    let pty = Pty::new();
    let console = pty.start(&["console", "--vm", &socket]);
    pty.wait_until_shown(b"two");
    assert!(
        pty.shown()
            .starts_with(b"ready\x03\x1a\x13one\x03\x1a\x13two")
    );
    pty.wait_until_keys_are_passed_on();
    pty.press(b"q");
    let ended = console.end();
    ended.assert_ok();
    assert!(ended.stderr.contains("has ended"), "{ended:?}");
    assert_eq!(pty.settings(), before);
    wait_for_the_end(&socket);
}

#[test]
fn a_terminal_that_closes_detaches_and_the_vm_runs_on() {
    let dir = Dir::new();
    let socket = background(&dir);
    let pty = Pty::new();
    let (shell, pid) = pty.start_in_session(":", &["console", "--vm", &socket]);
    pty.wait_until_shown(b"ready");
    pty.close();
    wait_until("the command to end", || !crate::support::is_alive(pid));
    drop(shell);
    assert_eq!(status(Path::new(&socket)).unwrap()["state"], "running");
    pageferry(&["quit", "--vm", &socket]).assert_ok();
    wait_for_the_end(&socket);
}

#[test]
fn several_users_see_the_same_and_both_type_also_beside_the_terminal_of_run() {
    let dir = Dir::new();
    let (first, process) = running(&dir);
    let socket = dir.path("vm").to_str().unwrap().to_owned();
    let second = Pty::new();
    let console = second.start(&["console", "--vm", &socket]);
    second.wait_until_shown(b"ready");
    second.wait_until_keys_are_passed_on();
    for (pty, keys) in [(&first, b"abc"), (&second, b"cde"), (&first, b"ghi")] {
        pty.press(keys);
        first.wait_until_shown(keys);
        second.wait_until_shown(keys);
    }
    first.press(b"\x1d");
    process.end().assert_ok();
    console.end().assert_ok();
}

#[test]
fn a_script_types_and_reads() {
    let dir = Dir::new();
    let socket = background(&dir);
    let (keys, mut typed) = std::io::pipe().unwrap();
    let mut command = Command::new(PAGEFERRY);
    command.args(["console", "--vm", &socket]);
    let console = Process::spawn_reading(command, Stdio::from(keys));
    // No byte is special, and the end of the keys is not the end of the text.
    typed.write_all(b"a\x1db").unwrap();
    drop(typed);
    wait_until("the echo", || console.said().contains("a\x1db"));
    let mut stream = attach(&socket);
    stream.write_all(b"q").unwrap();
    let ended = console.end();
    ended.assert_ok();
    assert_eq!(ended.stdout, "readya\x1dbq");
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(text, "readya\x1dbq", "a client has all text up to the end");
    wait_for_the_end(&socket);
}

/// A client by the protocol. The result line was read.
fn attach(socket: &str) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(b"{\"command\":\"console\"}\n").unwrap();
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\n") {
        stream.read_exact(&mut byte).unwrap();
        line.extend(byte);
    }
    assert_eq!(line, b"{\"result\":{\"state\":\"attached\"}}\n");
    stream
}

#[test]
fn clients_that_neither_read_nor_leave_harm_nobody() {
    let dir = Dir::new();
    let socket = background(&dir);
    let silent: Vec<_> = (0..4).map(|_| attach(&socket)).collect();
    let fifth = ask(Path::new(&socket), "{\"command\":\"console\"}\n").unwrap();
    assert_eq!(fifth["error"]["kind"], "declined", "{fifth}");
    pageferry(&["console", "--vm", &socket]).assert_failed(17, "4 clients");
    // One of them types more than all queues hold, and reads nothing of the echo.
    let mut busy = &silent[0];
    busy.set_nonblocking(true).unwrap();
    let mut typed = 0;
    wait_until("a megabyte of keys", || {
        typed += busy.write(&[b'x'; 4096]).unwrap_or(0);
        typed >= 1 << 20
    });
    assert_eq!(status(Path::new(&socket)).unwrap()["state"], "running");
    pageferry(&["pause", "--vm", &socket]).assert_ok();
    pageferry(&["resume", "--vm", &socket]).assert_ok();
    drop(silent);
    // Their places are free again.
    wait_until("a place", || {
        let answer = ask(Path::new(&socket), "{\"command\":\"console\"}\n");
        answer.is_some_and(|answer| answer["result"]["state"] == "attached")
    });
    pageferry(&["quit", "--vm", &socket]).assert_ok();
    wait_for_the_end(&socket);
}

#[test]
fn a_vm_without_a_console_says_so() {
    let source = Source::start("16M");
    let socket = source.socket.to_str().unwrap();
    pageferry(&["console", "--vm", socket]).assert_failed(17, "has no console");
    pageferry(&["console", "--vm", "/no/such/vm"]).assert_failed(11, "/no/such/vm");
    // The connection stays of use for other requests.
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let requests = b"{\"command\":\"console\"}\n{\"command\":\"status\"}\n";
    stream.write_all(requests).unwrap();
    let mut lines = BufReader::new(stream).lines();
    assert!(lines.next().unwrap().unwrap().contains("declined"));
    assert!(lines.next().unwrap().unwrap().contains("running"));
    source.assert_unharmed();
}
