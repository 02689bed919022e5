//! `--detach`: commands that go on in the background.

use crate::support::terminal::Pty;
use crate::support::{Destination, Dir, Process, assert_whole, is_alive, pageferry, status};
use crate::terminal::run_echo;
use pageferry_testkit::wait_until;
use std::path::Path;

/// The process of the VM at this socket.
fn pid(socket: &Path) -> u32 {
    let status = status(socket).expect("the VM is ready when the command ends");
    status["pid"].as_u64().unwrap() as u32
}

/// A session of its own, without a terminal, and no stream of its caller.
#[track_caller]
fn assert_is_on_its_own(pid: u32) {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // Behind the name: state, parent, group, session, terminal.
    let fields: Vec<_> = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .collect();
    assert_eq!(fields[3], pid.to_string(), "its session");
    assert_eq!(fields[4], "0", "its terminal");
    for stream in 0..3 {
        let target = std::fs::read_link(format!("/proc/{pid}/fd/{stream}")).unwrap();
        assert_eq!(target, Path::new("/dev/null"), "{stream}");
    }
}

fn quit(socket: &Path, pid: u32) {
    pageferry(&["quit", "--vm", socket.to_str().unwrap()]).assert_ok();
    wait_until("the end of the process", || !is_alive(pid));
    assert!(!socket.exists());
}

#[test]
fn a_vm_runs_on_in_the_background() {
    let dir = Dir::new();
    let run = [
        "run", "--engine", "soft", "--memory", "16M", "--detach", "--name", "web",
    ];
    let ended = Process::start(&run, &dir).end();
    ended.assert_ok();
    assert_eq!(ended.stdout, "web\n");
    let socket = dir.path("pageferry").join("web");
    let pid = pid(&socket);
    assert_is_on_its_own(pid);
    assert_whole(&socket);
    // The name is taken, and the failure is that of the command.
    Process::start(&run, &dir)
        .end()
        .assert_failed(5, "another VM listens there");
    quit(&socket, pid);
    dir.assert_empty();
}

#[test]
fn a_vm_moves_to_a_destination_in_the_background_and_is_not_lost_with_its_terminal() {
    let (here, there) = (Dir::new(), Dir::new());
    let socket = there.path("vm");
    let receive = [
        "receive",
        "--detach",
        "--listen",
        "127.0.0.1:0",
        "--control",
    ];
    let receive = [&receive[..], &[socket.to_str().unwrap()]].concat();
    let ended = Process::start(&receive, &there).end();
    ended.assert_ok();
    let mut lines = ended.stdout.lines();
    let address = lines
        .next()
        .unwrap()
        .strip_prefix("listening on tcp:")
        .unwrap();
    assert_eq!(lines.next(), socket.to_str());
    assert_eq!(lines.next(), None);
    let destination = pid(&socket);
    assert_is_on_its_own(destination);
    let pty = Pty::new();
    let source = here.path("vm").to_str().unwrap().to_owned();
    let run = [
        "run",
        "--detach",
        "--engine",
        "soft",
        "--memory",
        "16M",
        "--control",
        &source,
    ];
    let (shell, _) = pty.start_in_session(":", &run);
    pty.wait_until_shown(b"ended 0");
    pty.close();
    drop(shell);
    let source_pid = pid(Path::new(&source));
    assert_is_on_its_own(source_pid);
    pageferry(&["migrate", "--vm", &source, "--to", address]).assert_ok();
    wait_until("the end of the source", || !is_alive(source_pid));
    assert_whole(&socket);
    quit(&socket, destination);
}

#[test]
fn a_log_file_stays_open() {
    let dir = Dir::new();
    let log = dir.path("log");
    let script = "exec \"$@\" 2>\"$0\"";
    let socket = dir.path("vm");
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", script])
        .arg(&log)
        .arg(crate::support::PAGEFERRY);
    let args = [
        "run",
        "--detach",
        "--engine",
        "soft",
        "--memory",
        "16M",
        "--control",
    ];
    command.args(args).arg(&socket);
    Process::spawn(command).end().assert_ok();
    quit(&socket, pid(&socket));
    let text = std::fs::read_to_string(log).unwrap();
    assert!(text.contains("the VM was ended"), "{text}");
}

#[test]
fn what_cannot_go_to_the_background_is_refused() {
    let dir = Dir::new();
    let kernel = [
        run_echo(&dir),
        ["--detach", "--console", "-"].map(str::to_owned).to_vec(),
    ];
    pageferry(&kernel.concat()).assert_failed(2, "pageferry console");
    let missing = [
        "run",
        "--detach",
        "--memory",
        "16M",
        "--control",
        "/no/such/folder/vm",
    ];
    pageferry(&missing).assert_failed(5, "/no/such/folder/vm");
    for more in ["--activated", "--json"] {
        let receive = ["receive", "--listen", "127.0.0.1:0", "--detach", more];
        assert_eq!(pageferry(&receive).code, Some(2), "{more}");
    }
    let taken = Destination::start(&[]);
    let receive = ["receive", "--detach", "--listen", &taken.address];
    pageferry(&receive).assert_failed(5, "");
}
