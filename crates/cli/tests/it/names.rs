//! VMs by their names: sockets in the user's directory, and commands that find them there.

use crate::support::{Dir, Process};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;

fn vm(dir: &Dir, more: &[&str]) -> Process {
    let args = ["run", "--engine", "soft", "--memory", "16M", "--vcpus", "1"];
    let vm = Process::start(&[&args, more].concat(), dir);
    vm.wait_until_said("control socket ");
    vm
}

#[test]
fn the_only_vm_needs_no_name_and_several_do() {
    let dir = Dir::new();
    let run = |args: &[&str]| Process::start(args, &dir).end();
    run(&["status"]).assert_failed(11, "start one with `pageferry run`");
    let listed = run(&["list"]);
    listed.assert_ok();
    assert!(listed.stdout.contains("no VM"), "{}", listed.stdout);

    let first = vm(&dir, &["--name", "web"]);
    run(&["status"]).assert_ok();
    run(&["verify", "--vm", "web"]).assert_ok();
    let taken = run(&[
        "run", "--engine", "soft", "--memory", "16M", "--name", "web",
    ]);
    taken.assert_failed(5, "another VM listens there");

    let second = vm(&dir, &[]);
    run(&["status"]).assert_failed(11, "choose one by --vm, of vm-");
    let listed = run(&["list", "--json"]);
    listed.assert_ok();
    let vms = listed.json()["vms"].clone();
    let names: Vec<_> = vms
        .as_array()
        .unwrap()
        .iter()
        .map(|vm| vm["name"].clone())
        .collect();
    assert_eq!(
        names,
        [
            Value::from(format!("vm-{}", second.pid())),
            Value::from("web")
        ]
    );
    assert_eq!(vms[1]["status"]["state"], "running");

    run(&["quit", "--vm", "web"]).assert_ok();
    first.end().assert_ok();
    // The other is the only one again.
    run(&["quit"]).assert_ok();
    second.end().assert_ok();
}

/// A process that was killed leaves its socket behind. It counts as no VM, and its name is free.
#[test]
fn a_killed_vm_is_not_listed_and_its_name_is_free() {
    let dir = Dir::new();
    let killed = vm(&dir, &["--name", "web"]);
    killed.signal(rustix::process::Signal::KILL);
    assert_eq!(killed.end().code, None);
    let listed = Process::start(&["list"], &dir).end();
    assert!(!listed.stdout.contains("web"), "{}", listed.stdout);
    let again = vm(&dir, &["--name", "web"]);
    Process::start(&["quit", "--vm", "web"], &dir)
        .end()
        .assert_ok();
    again.end().assert_ok();
}

#[test]
fn a_directory_that_others_may_write_to_takes_no_socket() {
    let dir = Dir::new();
    let sockets = dir.path("pageferry");
    std::fs::create_dir(&sockets).unwrap();
    std::fs::set_permissions(&sockets, std::fs::Permissions::from_mode(0o777)).unwrap();
    let args = ["run", "--engine", "soft", "--memory", "16M"];
    Process::start(&args, &dir).end().assert_failed(
        5,
        "with mode 777: expected this user and mode 700; name a socket by --control",
    );
    // A destination goes on without a socket that nobody asked for.
    let receive = Process::start(&["receive", "--listen", "127.0.0.1:0"], &dir);
    receive.wait_until_said("no control socket: ");
    receive.wait_until_said("listening on tcp:");
    receive.interrupt();
    receive.end();
}
