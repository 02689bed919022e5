//! `--disk` and `--net`: what is refused, and when. `linux_moves` has the rest.

use crate::linux::counting;
use crate::support::{Destination, Dir, PAGEFERRY, Process, Source, pageferry, status};
use pageferry_testkit::wait_for;
use std::path::Path;
use std::process::Command;

#[test]
fn devices_are_for_linux() {
    let says = "give --disk and --net to a Linux (--kernel)";
    let run = ["run", "--memory", "32M", "--disk", "/dev/null"];
    pageferry(&run).assert_failed(2, says);
    pageferry(&["run", "--memory", "32M", "--net", "tap0"]).assert_failed(2, says);
    let receive = [
        "receive",
        "--listen",
        "127.0.0.1:0",
        "--for",
        "ch:/no/socket",
    ];
    pageferry(&[&receive[..], &["--net", "tap0"]].concat()).assert_failed(2, says);
}

#[test]
fn values_are_checked() {
    for (flag, value, says) in [
        ("--disk", "", "a file's name"),
        ("--disk", ",readonly", "expected a file's name"),
        ("--net", "tap0,mac=1", "expected as 02:00:00:00:00:01"),
        ("--net", "tap0,up", "unknown option up, expected mac="),
    ] {
        pageferry(&["run", flag, value]).assert_failed(2, says);
    }
}

/// Before a VM comes.
#[test]
fn a_destination_says_at_once_that_it_cannot_open_a_disk() {
    let dir = Dir::new();
    let odd = dir.path("odd");
    std::fs::write(&odd, [0; 1000]).unwrap();
    for (disk, says) in [
        (dir.path("none"), "No such file"),
        (dir.path(""), "Is a directory"),
        (odd, "has 1000 bytes, expected a multiple of 512"),
    ] {
        let disk = disk.to_str().unwrap();
        let receive = ["receive", "--listen", "127.0.0.1:0", "--disk", disk];
        pageferry(&receive).assert_failed(2, says);
    }
}

/// Before the guest stops.
#[test]
fn a_vm_without_disks_is_refused_by_a_destination_that_has_one() {
    let dir = Dir::new();
    let disk = dir.path("disk");
    std::fs::write(&disk, [0; 512]).unwrap();
    let vm = Source::start_on("soft", "32M");
    let there = Destination::start_on_tcp(&["--disk", disk.to_str().unwrap()]);
    let moved = vm.migrate(&there.address).end();
    moved.assert_failed(8, "the VM has no virtio devices");
    vm.assert_unharmed();
}

/// Runs a command that owns a VM, until the VM runs.
fn start(words: &[&str], socket: &Path) -> Process {
    let mut command = Command::new(PAGEFERRY);
    command.args(words).arg("--control").arg(socket);
    let process = Process::spawn(command);
    wait_for("the VM", || {
        status(socket).filter(|status| status["state"] == "running")
    });
    process
}

/// The kernel is a few instructions, and does not look at its disk.
#[test]
fn a_vm_of_the_soft_engine_goes_on_only_where_its_disk_is() {
    let dir = Dir::new();
    let path = |name: &str| dir.path(name).to_str().unwrap().to_owned();
    let (kernel, disk, other) = (path("kernel"), path("disk"), path("other"));
    std::fs::write(&kernel, counting()).unwrap();
    std::fs::write(&disk, [0; 4096]).unwrap();
    std::fs::write(&other, [0; 512]).unwrap();
    let (socket, saved, console) = (dir.path("vm"), path("saved"), path("console"));
    let run = [
        &["run", "--memory", "16M", "--kernel", &kernel][..],
        &[
            "--disk",
            &disk,
            "--console",
            &console,
            "--snapshot-to",
            &saved,
        ],
    ]
    .concat();
    let vm = start(&run, &socket);
    pageferry(&[
        "run", "--memory", "16M", "--kernel", &kernel, "--disk", &disk,
    ])
    .assert_failed(2, "another process has locked it");
    let migrate = |address: &str| {
        let socket = socket.to_str().unwrap();
        pageferry(&["migrate", "--vm", socket, "--to", address])
    };
    let read_only = format!("{disk},readonly");
    for devices in [&[][..], &["--disk", &other], &["--disk", &read_only]] {
        let there = Destination::start_on_tcp(devices);
        migrate(&there.address).assert_failed(8, "the VM has other devices");
        assert_eq!(status(&socket).unwrap()["state"], "running");
    }
    pageferry(&["quit", "--vm", socket.to_str().unwrap()]).assert_ok();
    vm.end().assert_ok();
    pageferry(&["restore", &saved]).assert_failed(8, "the VM has other devices");
    let vm = start(&["restore", &saved, "--disk", &disk], &socket);
    let there = Destination::start_on_tcp(&["--disk", &disk]);
    migrate(&there.address).assert_ok();
    vm.end().assert_ok();
    wait_for("the VM", || {
        status(&there.socket).filter(|status| status["state"] == "running")
    });
    pageferry(&["quit", "--vm", there.socket.to_str().unwrap()]).assert_ok();
    there.process.end().assert_ok();
}

/// The kernel is a few instructions: the disk has changed by other hands.
#[test]
fn a_saved_vm_runs_only_on_its_disk_as_it_was() {
    let dir = Dir::new();
    let path = |name: &str| dir.path(name).to_str().unwrap().to_owned();
    let (kernel, disk, saved) = (path("kernel"), path("disk"), path("saved"));
    std::fs::write(&kernel, counting()).unwrap();
    std::fs::write(&disk, [7; 4096]).unwrap();
    let (socket, console) = (dir.path("vm"), path("console"));
    let run = [
        "run", "--memory", "16M", "--kernel", &kernel, "--disk", &disk,
    ];
    let more = ["--console", &console, "--snapshot-to", &saved];
    let quit = |vm: Process| {
        pageferry(&["quit", "--vm", socket.to_str().unwrap()]).assert_ok();
        vm.end().assert_ok();
    };
    quit(start(&[&run[..], &more].concat(), &socket));

    // A copy has other times only, also one that was touched.
    let copy = path("copy");
    std::fs::copy(&disk, &copy).unwrap();
    let restore = ["restore", &saved, "--disk", &copy];
    quit(start(&restore, &socket));
    // Other bytes, with the time put back.
    let modified = std::fs::metadata(&disk).unwrap().modified().unwrap();
    let file = std::fs::File::options().write(true).open(&copy).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[8], 3000).unwrap();
    file.set_modified(modified).unwrap();
    pageferry(&restore).assert_failed(8, "it has other bytes");
    quit(start(
        &[&restore[..], &["--changed-disk"]].concat(),
        &socket,
    ));

    let (name, flags) = ("user.pageferry.writer", rustix::fs::XattrFlags::empty());
    match rustix::fs::setxattr(&disk, name, &[1; 16], flags) {
        Ok(()) => pageferry(&["restore", &saved, "--disk", &disk])
            .assert_failed(8, "a guest has written it"),
        Err(why) => drop(pageferry_testkit::skip("xattr", why)),
    }
}
