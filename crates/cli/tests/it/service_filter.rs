//! Under systemd's `SystemCallFilter=@system-service`, a VM runs, moves and is looked after.

use crate::activation::activated_command;
use crate::support::certificates::{Authority, Now, SideFlags};
use crate::support::service_filter::{filtered, filtered_without, restrict};
use crate::support::terminal::Pty;
use crate::support::{
    Destination, Dir, PAGEFERRY, Process, Source, assert_whole, held_link, status,
    wait_for_handover,
};
use crate::terminal::{is_stopped, run_echo};
use pageferry_testkit::shaper::Which;
use pageferry_testkit::{wait_for, wait_until};
use rustix::process::Signal;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

/// Runs a command under the filter to its end, which is a success.
#[track_caller]
fn assert_runs(words: &str, dir: &Dir) {
    let args: Vec<&str> = words.split(' ').collect();
    let ended = Process::start_by(filtered(), &args, dir).end();
    assert_eq!(ended.code, Some(0), "{words}: {ended:?}");
}

#[test]
fn the_filter_kills_at_a_call_that_it_lacks() {
    let mut command = Command::new(PAGEFERRY);
    let ended = restrict(&mut command).arg("--version").status().unwrap();
    assert!(ended.success(), "{ended}");
    let mut command = Command::new("sh");
    // chroot(2) is of `@mount`, which services lack.
    command.args(["-c", "exec chroot / true"]);
    let killed = restrict(&mut command).status().unwrap();
    assert_eq!(killed.signal(), Some(libc::SIGSYS), "{killed}");
}

#[test]
fn a_vm_moves_over_tls_and_every_command_works() {
    let authority = Authority::new("test");
    let (here, there) = (
        authority.issue(&["here"], Now),
        authority.issue(&["there"], Now),
    );
    let metrics = Dir::new();
    let at = format!("unix:{}", metrics.path("metrics").display());
    let mut flags = there.flags("here");
    flags.extend(["--metrics".to_owned(), at]);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let destination = Destination::start_by(filtered(), "127.0.0.1:0", &flags);
    let shaper = held_link(&destination.address);
    let source = Source::start_by(filtered(), "soft", "16M");
    source.wait_until_all_is_written();
    let (vm, to) = (source.socket.display(), shaper.addr());
    let tls = here.flags("there").join(" ");
    for words in [
        "pause",
        "resume",
        "verify",
        "status --json",
        "watch --for 1s",
    ] {
        assert_runs(&format!("{words} --vm {vm}"), &source.dir);
    }
    let migrate = format!("migrate --vm {vm} --to {to} {tls}");
    assert_runs(&format!("{migrate} --check"), &source.dir);
    let args = format!("{migrate} --precopy-passes 0 --channels 2 --cpus 0");
    let args: Vec<&str> = args.split(' ').collect();
    let mut migrate = Process::start_by(filtered(), &args, &source.dir);
    wait_for_handover(&mut migrate, &destination.socket);
    let control = destination.socket.display();
    assert_runs(
        &format!("recover --vm {control} --listen 127.0.0.1:0"),
        &source.dir,
    );
    assert_runs(&format!("set --vm {vm} --max-bandwidth 100M"), &source.dir);
    shaper.reset(Which::All);
    shaper.throttle(None);
    migrate.end().assert_ok();
    source.process.end().assert_ok();
    assert_whole(&destination.socket);
    assert_runs(&format!("quit --vm {control}"), &source.dir);
    destination.process.end().assert_ok();
}

#[test]
fn a_vm_moves_to_an_activated_socket_on_every_backing() {
    for backing in ["shmem", "anonymous"] {
        let dir = Dir::new();
        let control = dir.path("vm");
        let there = control.to_str().unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap().to_string();
        let mut command = activated_command("1", there, &dir);
        restrict(&mut command);
        let destination =
            Process::spawn_reading(command, Stdio::from(std::os::fd::OwnedFd::from(socket)));
        destination.wait_until_said("listening on tcp:");
        let (dir_here, here) = (Dir::new(), dir.path("here"));
        let here = here.to_str().unwrap();
        let words = format!(
            "run --engine soft --vcpus 2 --memory 16M --backing {backing} --control {here}"
        );
        let source =
            Process::start_by(filtered(), &words.split(' ').collect::<Vec<_>>(), &dir_here);
        wait_for("the VM", || {
            status(&dir.path("here")).filter(|status| status["state"] == "running")
        });
        assert_runs(&format!("migrate --vm {here} --to {address}"), &dir_here);
        source.end().assert_ok();
        assert_whole(&control);
        assert_runs(&format!("quit --vm {there}"), &dir_here);
        destination.end().assert_ok();
        dir.assert_empty();
    }
}

#[test]
fn a_guest_has_a_console_in_the_terminal_and_in_the_background() {
    let dir = Dir::new();
    let on = |pty: &Pty, args: &[String]| {
        let mut command = filtered();
        command.args(args);
        Process::spawn_on(command, pty.stream(), pty.stream())
    };
    let pty = Pty::new();
    let process = on(&pty, &run_echo(&dir));
    pty.wait_until_shown(b"ready");
    pty.wait_until_keys_are_passed_on();
    process.signal(Signal::TSTP);
    wait_until("the command to stop", || is_stopped(process.pid()));
    process.signal(Signal::CONT);
    pty.wait_until_keys_are_passed_on();
    pty.press(b"\x1d");
    process.end().assert_ok();

    let args = [run_echo(&dir), vec!["--detach".to_owned()]].concat();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    Process::start_by(filtered(), &args, &dir).end().assert_ok();
    let pty = Pty::new();
    let control = dir.path("vm").to_str().unwrap().to_owned();
    let console = on(&pty, &["console".into(), "--vm".into(), control]);
    pty.wait_until_shown(b"ready");
    pty.wait_until_keys_are_passed_on();
    pty.press(b"q");
    console.end().assert_ok();
    wait_until("the end of the VM", || !dir.path("vm").exists());
}

#[test]
fn a_demo_runs() {
    let dir = Dir::new();
    assert_runs("demo --engine soft --vcpus 2 --memory 32M", &dir);
    dir.assert_empty();
}

/// The findings of `probe`, which ends with 0.
#[track_caller]
fn findings(command: Command) -> serde_json::Value {
    let ended = Process::start_by(command, &["probe", "--json"], &Dir::new()).end();
    ended.assert_ok();
    ended.json()["findings"].clone()
}

#[test]
fn probe_finds_nothing_wrong_with_the_filter() {
    let found = findings(filtered())["system-calls"].clone();
    assert_eq!(found["state"], "good", "{found}");
}

/// Some of these would end the other trials, and `probe`, if it made them itself.
#[test]
fn probe_names_the_calls_that_a_filter_lacks() {
    let calls = [
        ("memfd_create", libc::SYS_memfd_create),
        ("userfaultfd", libc::SYS_userfaultfd),
        ("membarrier", libc::SYS_membarrier),
        ("fallocate", libc::SYS_fallocate),
        ("lseek", libc::SYS_lseek),
        ("sched_setaffinity", libc::SYS_sched_setaffinity),
        ("sendmsg", libc::SYS_sendmsg),
        ("setsockopt", libc::SYS_setsockopt),
        ("accept4", libc::SYS_accept4),
    ];
    for (name, number) in calls {
        let all = findings(filtered_without(&[number], None));
        let found = &all["system-calls"];
        assert_eq!(found["state"], "missing", "{found}");
        assert_eq!(
            found["found"],
            format!("a filter kills the process at {name}")
        );
        assert_eq!(all["userfaultfd"]["state"], "missing", "{all}");
    }
    let two = [libc::SYS_userfaultfd, libc::SYS_membarrier];
    let found = findings(filtered_without(&two, None))["system-calls"].clone();
    let says = "a filter kills the process at userfaultfd, membarrier";
    assert_eq!(found["found"], says, "{found}");
    // A filter that refuses leaves the other trials alone.
    for errno in [libc::EPERM, libc::ENOSYS] {
        let refusing = filtered_without(&two, Some(errno.unsigned_abs()));
        let all = findings(refusing);
        let found = &all["system-calls"];
        assert_eq!(found["state"], "limited", "{found}");
        let says = "a filter or an old kernel refuses userfaultfd, membarrier";
        assert_eq!(found["found"], says, "{found}");
        assert_eq!(all["memory"]["state"], "good", "{all}");
    }
}
