//! Output that cannot be written, or that nobody takes: it neither ends nor stops a VM, and each
//! command beside a VM ends with its exit code.

use crate::support::{
    Dir, PAGEFERRY, Process, Source, assert_whole, held_link, pageferry, status, wait_for_handover,
    wait_until_all_is_written,
};
use crate::terminal::run_echo;
use pageferry_testkit::shaper::Which;
use pageferry_testkit::wait_for;
use rustix::fs::OFlags;
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};

/// A pipe that is full. Nobody reads it as long as the first end lives.
fn full_pipe() -> (OwnedFd, OwnedFd) {
    let (reader, writer) = std::io::pipe().unwrap();
    let flags = rustix::fs::fcntl_getfl(&writer).unwrap();
    rustix::fs::fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&writer, &[b'.'; 4096]).is_ok() {}
    while rustix::io::write(&writer, b".").is_ok() {}
    rustix::fs::fcntl_setfl(&writer, flags).unwrap();
    (reader.into(), writer.into())
}

/// A pipe whose reader has gone.
fn broken_pipe() -> OwnedFd {
    std::io::pipe().unwrap().1.into()
}

fn full_disk() -> OwnedFd {
    File::options()
        .write(true)
        .open("/dev/full")
        .unwrap()
        .into()
}

/// A terminal that has been closed.
fn closed_terminal() -> OwnedFd {
    let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    let name = ptsname(&ours, Vec::new()).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let theirs = rustix::fs::open(name.as_c_str(), flags, rustix::fs::Mode::empty()).unwrap();
    drop(ours);
    assert_eq!(rustix::io::write(&theirs, b"x"), Err(rustix::io::Errno::IO));
    theirs
}

/// `pageferry`, whose descriptors `which` (a redirection of the shell) are `to`.
fn with<S: AsRef<OsStr>>(which: &str, to: &OwnedFd, args: &[S], dir: &Dir) -> Process {
    let mut command = Command::new("sh");
    let script = format!("exec \"$@\" {which} 0</dev/null");
    command
        .args(["-c", &script, "sh", PAGEFERRY])
        .args(args)
        .env("TMPDIR", dir.path(""));
    Process::spawn_reading(command, Stdio::from(to.try_clone().unwrap()))
}

fn lost_lines(socket: &Path) -> u64 {
    status(socket).unwrap()["lost_lines"].as_u64().unwrap()
}

/// A VM moves over connections that break, between processes whose stdout and stderr are `to`.
#[track_caller]
fn assert_moves(to: &OwnedFd) {
    let dir = Dir::new();
    let paths = ["source", "destination", "in"].map(|name| dir.path(name));
    let [here, there, listen] = paths.each_ref().map(|path| path.to_str().unwrap());
    let both = "1>&0 2>&0";
    let words = format!("run --engine soft --vcpus 2 --memory 16M --log debug --control {here}");
    let source = with(both, to, &words.split(' ').collect::<Vec<_>>(), &dir);
    let words = format!(
        "receive --listen 127.0.0.1:0 --log debug --control {there} --metrics unix:{listen}"
    );
    let destination = with(both, to, &words.split(' ').collect::<Vec<_>>(), &dir);
    wait_until_all_is_written(&paths[0]);
    // Its address is in no output that this test can read.
    let address = wait_for("the destination's port", || listening(destination.pid()));
    let shaper = held_link(&address);
    let shaped = shaper.addr().to_string();
    let words = format!("migrate --vm {here} --to {shaped} --precopy-passes 0 --channels 2");
    let mut migrate = Process::start(&words.split(' ').collect::<Vec<_>>(), &dir);
    wait_for_handover(&mut migrate, &paths[1]);
    shaper.reset(Which::All);
    shaper.throttle(None);
    migrate.end().assert_ok();
    assert_whole(&paths[1]);
    let arrived = status(&paths[1]).unwrap();
    let reconnects = arrived["session"]["reconnects"].as_u64().unwrap();
    assert!(reconnects >= 1, "{arrived}");
    assert_eq!(arrived["defects"], 0);
    // A stranger is told of, and the acceptor goes on. Its queue may have room for some lines.
    for _ in 0..5 {
        pageferry(&["migrate", "--check", "--vm", there, "--to", &address]);
    }
    pageferry(&["quit", "--vm", there]).assert_ok();
    let code = destination.end().code;
    // The table of the migration went nowhere. A reader that has gone is no failure.
    assert!(matches!(code, Some(0 | 12)), "{code:?}");
    source.end();
    dir.assert_empty();
}

/// The address on which the process listens.
fn listening(pid: u32) -> Option<String> {
    let own: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .ok()?
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter_map(|link| {
            Some(
                link.to_str()?
                    .strip_prefix("socket:[")?
                    .strip_suffix(']')?
                    .into(),
            )
        })
        .collect();
    let table = std::fs::read_to_string("/proc/net/tcp").ok()?;
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // State 0A is LISTEN (`include/net/tcp_states.h`); the tenth field is the inode.
        let listens = fields[3] == "0A" && own.iter().any(|inode| inode == fields[9]);
        let port = u16::from_str_radix(fields[1].split_once(':')?.1, 16).ok()?;
        listens.then(|| format!("127.0.0.1:{port}"))
    })
}

#[test]
fn a_vm_moves_while_nobody_takes_any_output() {
    let (_reader, writer) = full_pipe();
    assert_moves(&writer);
}

#[test]
fn a_vm_moves_while_the_disk_of_its_log_is_full() {
    assert_moves(&full_disk());
}

#[test]
fn a_vm_moves_after_the_reader_of_its_log_has_gone() {
    assert_moves(&broken_pipe());
}

#[test]
fn a_vm_moves_after_its_terminal_was_closed() {
    assert_moves(&closed_terminal());
}

#[test]
fn lost_lines_are_counted_and_told_once_output_works_again() {
    let dir = Dir::new();
    let (reader, writer) = full_pipe();
    let socket = dir.path("vm");
    let control = socket.to_str().unwrap();
    let words = format!("run --engine soft --vcpus 1 --memory 16M --control {control}");
    let process = with("2>&0", &writer, &words.split(' ').collect::<Vec<_>>(), &dir);
    drop(writer);
    wait_for("the VM", || status(&socket));
    // Each failed migration is a line or two. The queue has room for 256 KiB.
    let long = format!("unix:/{}", "x".repeat(60));
    let request = format!("{{\"command\":\"migrate\",\"to\":\"{long}\"}}\n");
    wait_for("the queue to be full", || {
        for _ in 0..100 {
            crate::support::ask(&socket, &request)?;
        }
        (lost_lines(&socket) > 0).then_some(())
    });
    let mut text = String::new();
    let reading = std::thread::spawn(move || {
        std::io::Read::read_to_string(&mut File::from(reader), &mut text).unwrap();
        text
    });
    pageferry(&["quit", "--vm", control]).assert_ok();
    process.end().assert_ok();
    let text = reading.join().unwrap();
    let told = text.lines().filter_map(|line| {
        let line = line.strip_prefix("pageferry: ")?;
        line.strip_suffix(" lines of diagnostics were lost")?
            .parse::<u64>()
            .ok()
    });
    assert!(told.sum::<u64>() > 0, "no count in {} bytes", text.len());
    dir.assert_empty();
}

#[test]
fn a_command_whose_reader_has_gone_has_done_its_work() {
    let source = Source::start("16M");
    let vm = source.socket.to_str().unwrap();
    for words in [
        "status",
        "status --json",
        "watch",
        "watch --json",
        "pause",
        "resume",
    ] {
        let mut args: Vec<&str> = words.split(' ').collect();
        args.extend(["--vm", vm]);
        let ended = with("1>&0", &broken_pipe(), &args, &source.dir).end();
        ended.assert_ok();
        assert_eq!(ended.stderr, "", "{words}");
    }
    source.assert_unharmed();
}

#[test]
fn a_result_that_cannot_be_written_is_a_failure_in_one_sentence() {
    let source = Source::start("16M");
    let vm = source.socket.to_str().unwrap();
    for words in [
        "status",
        "status --json",
        "watch",
        "watch --json --for 60s",
        "verify",
    ] {
        let mut args: Vec<&str> = words.split(' ').collect();
        args.extend(["--vm", vm]);
        let ended = with("1>&0", &full_disk(), &args, &source.dir).end();
        ended.assert_failed(12, "cannot write the result to stdout");
        // Without a word where stderr fails, too.
        let ended = with("1>&0 2>&0", &full_disk(), &args, &source.dir).end();
        assert_eq!(ended.code, Some(12), "{words}");
    }
    source.assert_unharmed();
}

#[test]
fn a_command_that_waits_for_its_reader_can_be_cancelled() {
    let source = Source::start("16M");
    let vm = source.socket.to_str().unwrap();
    let (_reader, writer) = full_pipe();
    for words in ["status", "watch", "watch --json"] {
        let mut args: Vec<&str> = words.split(' ').collect();
        args.extend(["--vm", vm]);
        let mut process = with("1>&0", &writer, &args, &source.dir);
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert!(process.is_running(), "{words} has a reader");
        process.signal(Signal::TERM);
        process.end().assert_failed(9, "cancelled");
    }
    source.assert_unharmed();
}

#[test]
fn a_console_waits_for_its_reader_and_can_be_cancelled() {
    let dir = Dir::new();
    let args = [run_echo(&dir), vec!["--detach".to_owned()]].concat();
    pageferry(&args).assert_ok();
    let socket = dir.path("vm");
    let args = ["console", "--vm", socket.to_str().unwrap()];
    let (_reader, writer) = full_pipe();
    let mut process = with("1>&0", &writer, &args, &dir);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(process.is_running(), "it has a reader");
    process.signal(Signal::TERM);
    process.end().assert_failed(9, "cancelled");
    // A reader that has gone ends it, and a disk that is full is a failure.
    with("1>&0", &broken_pipe(), &args, &dir).end().assert_ok();
    let ended = with("1>&0", &full_disk(), &args, &dir).end();
    ended.assert_failed(12, "cannot write the result to stdout");
    assert_eq!(status(&socket).unwrap()["state"], "running");
    pageferry(&["quit", "--vm", args[2]]).assert_ok();
    wait_for("the end of the VM", || (!socket.exists()).then_some(()));
}

#[test]
fn a_console_on_a_terminal_that_was_closed_is_no_failure() {
    let dir = Dir::new();
    let process = with("1>&0", &closed_terminal(), &run_echo(&dir), &dir);
    let told = || {
        process
            .said_on_stderr()
            .contains("text of the console is dropped")
    };
    wait_for("the failed write", || told().then_some(()));
    let socket = dir.path("vm");
    pageferry(&["quit", "--vm", socket.to_str().unwrap()]).assert_ok();
    process.end().assert_ok();
}
