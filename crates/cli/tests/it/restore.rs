//! `run --snapshot-to` and `restore`: VMs of ours that go to disk and come back lazily.

use crate::support::{
    Dir, PAGEFERRY, Process, assert_runs_on, assert_whole, pageferry, pages_done,
};
use pageferry_testkit::{skip, wait_until};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Whether userfaultfd is usable here.
fn usable() -> bool {
    use pageferry_userfault::uffd::{Features, Userfaultfd};
    let why = Userfaultfd::open(Features::EVENT_REMOVE).err();
    !why.is_some_and(|why| skip("uffd", format_args!("restore: {why}")))
}

fn engines() -> Vec<&'static str> {
    let kvm = pageferry_machine::kvm::probe_vm().err();
    let kvm = !kvm.is_some_and(|why| skip("kvm", format_args!("restore: {why}")));
    ["soft"].into_iter().chain(kvm.then_some("kvm")).collect()
}

/// Runs a command that owns a VM, whose control socket is `socket`.
fn start(dir: &Dir, socket: &Path, words: &[&str]) -> Process {
    let mut command = Command::new(PAGEFERRY);
    command.args(words).arg("--control").arg(socket);
    command.env("XDG_RUNTIME_DIR", dir.path(""));
    Process::spawn(command)
}

fn quit(socket: &Path) {
    pageferry(&["quit", "--vm", socket.to_str().unwrap()]).assert_ok();
}

/// Runs a VM of the test program, and saves it.
fn saved(dir: &Dir, engine: &str) -> (PathBuf, u64) {
    saved_to(dir, "snapshot", engine, &[])
}

fn saved_to(dir: &Dir, name: &str, engine: &str, more: &[&str]) -> (PathBuf, u64) {
    let (socket, snapshot) = (dir.path("first"), dir.path(name));
    let target = snapshot.to_str().unwrap();
    let run = ["run", "--memory", "32M", "--vcpus", "2", "--engine"];
    let flags = [engine, "--snapshot-to", target];
    let vm = start(dir, &socket, &[&run[..], &flags, more].concat());
    vm.wait_until_said("control socket");
    assert_runs_on(&socket);
    let done = pages_done(&socket);
    quit(&socket);
    let ended = vm.end();
    ended.assert_ok();
    assert_eq!(ended.stdout, format!("the VM was saved to {target}\n"));
    (snapshot, done)
}

#[test]
fn saved_vms_go_on_from_one_snapshot() {
    if !usable() {
        return;
    }
    for engine in engines() {
        let dir = Dir::new();
        let (snapshot, done) = saved(&dir, engine);
        let read = |name| std::fs::read(snapshot.join(name)).unwrap();
        let before = (read("memory"), read("state"));
        let snapshot = snapshot.to_str().unwrap();
        let sockets = ["a", "b"].map(|name| dir.path(name));
        let vms = sockets.each_ref().map(|socket| {
            let vm = start(&dir, socket, &["restore", snapshot]);
            vm.wait_until_said("control socket");
            vm
        });
        for socket in &sockets {
            assert!(pages_done(socket) >= done, "it goes on, and does not begin");
            assert_whole(socket);
            quit(socket);
        }
        for vm in vms {
            vm.end().assert_ok();
        }
        let left: Vec<_> = std::fs::read_dir(dir.path("pageferry"))
            .map(|entries| entries.map(|entry| entry.unwrap().path()).collect())
            .unwrap_or_default();
        assert!(left.is_empty(), "left behind: {left:?}");
        let path = Path::new(snapshot);
        let read = |name| std::fs::read(path.join(name)).unwrap();
        assert!(before == (read("memory"), read("state")), "it is only read");
    }
}

/// The next process in the same place removes what is left (`hostfs::Folder`).
#[test]
fn a_killed_restore_leaves_nothing_that_stays() {
    if !usable() {
        return;
    }
    let dir = Dir::new();
    let (snapshot, _) = saved(&dir, "soft");
    let socket = dir.path("vm");
    let vm = start(&dir, &socket, &["restore", snapshot.to_str().unwrap()]);
    vm.wait_until_said("control socket");
    vm.signal(rustix::process::Signal::KILL);
    let _ = vm.end();
    let left = std::fs::read_dir(dir.path("pageferry")).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    let goes = |name: &std::ffi::OsString| name.to_string_lossy().starts_with(".pageferry-");
    assert!(left.iter().all(goes) && left.len() == 1, "{left:?}");
}

/// The second snapshot has pages that were never touched between the two.
#[test]
fn a_restored_vm_is_saved_again_and_moves_away() {
    if !usable() {
        return;
    }
    for engine in engines() {
        let dir = Dir::new();
        let (first, _) = saved(&dir, engine);
        let (second, socket) = (dir.path("second"), dir.path("vm"));
        let recording = dir.path("recording");
        let words = |from: &Path, more: &[&str]| {
            let words = [&["restore", from.to_str().unwrap()][..], more].concat();
            words.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        let run = |words: &[String]| {
            let words: Vec<_> = words.iter().map(String::as_str).collect();
            start(&dir, &socket, &words)
        };
        let more = [
            "--snapshot-to",
            second.to_str().unwrap(),
            "--record",
            recording.to_str().unwrap(),
        ];
        let vm = run(&words(&first, &more));
        vm.wait_until_said("control socket");
        assert_runs_on(&socket);
        vm.interrupt();
        vm.end().assert_ok();
        assert!(recording.exists());

        let replay = ["--replay", recording.to_str().unwrap()];
        let vm = run(&words(&first, &replay));
        vm.wait_until_said("control socket");
        quit(&socket);
        vm.end().assert_ok();

        let vm = run(&words(&second, &[]));
        vm.wait_until_said("control socket");
        assert_runs_on(&socket);
        let there = dir.path("there");
        let destination = start(&dir, &there, &["receive", "--listen", "127.0.0.1:0"]);
        let address = destination.wait_until_said("listening on ");
        let from = socket.to_str().unwrap();
        pageferry(&["migrate", "--vm", from, "--to", address.trim()]).assert_ok();
        vm.end().assert_ok();
        assert_whole(&there);
        quit(&there);
        destination.end().assert_ok();
    }
}

#[test]
fn a_snapshot_that_cannot_be_written_costs_no_vm() {
    let dir = Dir::new();
    let (socket, target) = (dir.path("vm"), dir.path("snapshot"));
    let run = [
        "run",
        "--memory",
        "32M",
        "--engine",
        "soft",
        "--snapshot-to",
    ];
    let vm = start(
        &dir,
        &socket,
        &[&run[..], &[target.to_str().unwrap()]].concat(),
    );
    vm.wait_until_said("control socket");
    // Another one took the place meanwhile.
    let fresh = dir.path("snapshot.new");
    std::fs::create_dir(&fresh).unwrap();
    quit(&socket);
    vm.wait_until_said("the VM runs on");
    assert_whole(&socket);
    std::fs::create_dir(&target).unwrap();
    std::fs::remove_dir(&fresh).unwrap();
    vm.interrupt();
    wait_until("a second refusal", || {
        vm.said_on_stderr().matches("the VM runs on").count() == 2
    });
    assert!(!fresh.exists(), "nothing is left");
    assert_whole(&socket);
    std::fs::remove_dir(&target).unwrap();
    quit(&socket);
    vm.end().assert_ok();
    assert!(target.join("memory").exists());

    let again = [&run[..], &[target.to_str().unwrap()]].concat();
    pageferry(&again).assert_failed(2, "there already");
    let nowhere = [&run[..], &["/nowhere/snapshot"]].concat();
    pageferry(&nowhere).assert_failed(2, "cannot make");
}

#[test]
fn damaged_snapshots_are_refused() {
    if !usable() {
        return;
    }
    let dir = Dir::new();
    let (snapshot, _) = saved(&dir, "soft");
    let restore = ["restore", snapshot.to_str().unwrap()];
    let state = std::fs::read(snapshot.join("state")).unwrap();
    let mut bad = state.clone();
    bad[300] ^= 1;
    for (bytes, part) in [
        (&bad[..], "checksum"),
        (&state[..200], "cut off"),
        (b"x", "no saved VM"),
        (&[b"PFSAVED\x01", &state[8..]].concat(), "another version"),
    ] {
        std::fs::write(snapshot.join("state"), bytes).unwrap();
        pageferry(&restore).assert_failed(7, part);
    }
    std::fs::write(snapshot.join("state"), &state).unwrap();
    let memory = std::fs::File::options()
        .write(true)
        .open(snapshot.join("memory"))
        .unwrap();
    memory.set_len(1 << 20).unwrap();
    pageferry(&restore).assert_failed(7, "is truncated");
    std::fs::remove_file(snapshot.join("memory")).unwrap();
    pageferry(&restore).assert_failed(2, "memory");
    std::fs::remove_file(snapshot.join("state")).unwrap();
    pageferry(&restore).assert_failed(2, "state");
}

/// Each is found before the VM runs.
#[test]
fn a_state_runs_with_its_own_memory_only() {
    if !usable() {
        return;
    }
    let dir = Dir::new();
    for raw in [&[][..], &["--raw"]] {
        let [one, two] = ["one", "two"].map(|name| {
            let name = format!("{name}{}", raw.len());
            saved_to(&dir, &name, "soft", raw).0
        });
        let restore = ["restore", one.to_str().unwrap()];
        let memory = one.join("memory");
        let good = std::fs::read(&memory).unwrap();
        let of_two = std::fs::read(two.join("memory")).unwrap();
        std::fs::write(&memory, &of_two).unwrap();
        pageferry(&restore).assert_failed(7, "it is not the memory that the file state");
        let longer = [&good[..], &[0; 4096]].concat();
        let mut others = vec![vec![0; good.len()], longer];
        if !raw.is_empty() {
            let at = good.iter().rposition(|byte| *byte != 0).unwrap();
            others.push(good.clone());
            others[2][at] ^= 4;
        }
        for other in others {
            std::fs::write(&memory, other).unwrap();
            pageferry(&restore).assert_failed(7, "cannot restore from");
        }
        std::fs::write(&memory, &good).unwrap();
        let socket = dir.path("vm");
        let vm = start(&dir, &socket, &restore);
        vm.wait_until_said("control socket");
        assert_whole(&socket);
        quit(&socket);
        vm.end().assert_ok();
    }
}

/// A chunk is checked when it is read: its page never comes.
#[test]
fn a_damaged_chunk_of_a_saved_vm_never_becomes_memory() {
    if !usable() {
        return;
    }
    let dir = Dir::new();
    let (snapshot, _) = saved(&dir, "soft");
    let memory = snapshot.join("memory");
    let mut bytes = std::fs::read(&memory).unwrap();
    let verify = ["snapshot", "verify", memory.to_str().unwrap()];
    pageferry(&verify).assert_ok();
    // The first chunk has the program.
    bytes[100] ^= 4;
    std::fs::write(&memory, &bytes).unwrap();
    pageferry(&verify).assert_failed(7, "chunk 0");
    let socket = dir.path("vm");
    let words = [
        "restore",
        snapshot.to_str().unwrap(),
        "--background",
        "idle",
    ];
    let vm = start(&dir, &socket, &words);
    vm.wait_until_said("checksum is wrong");
    vm.signal(rustix::process::Signal::KILL);
    let _ = vm.end();
}

/// The memory comes from a pager of its own, which may die.
#[test]
fn a_vm_outlives_the_pager_that_the_user_names() {
    if !usable() {
        return;
    }
    let dir = Dir::new();
    let (snapshot, _) = saved(&dir, "soft");
    let (memory, socket) = (snapshot.join("memory"), dir.path("pager.sock"));
    let pager = |memory: &Path, more: &[&str]| {
        let mut command = Command::new(PAGEFERRY);
        command.args(["pager", "run", "--socket"]).arg(&socket);
        command.arg("--memory").arg(memory).args(more);
        Process::spawn(command)
    };
    let control = dir.path("vm");
    let words = [
        "restore",
        snapshot.to_str().unwrap(),
        "--pager",
        socket.to_str().unwrap(),
    ];
    let other = dir.path("other");
    std::fs::write(&other, vec![0xff; 32 << 20]).unwrap();
    let wrong = pager(&other, &[]);
    wrong.wait_until_said("waiting for a VMM");
    pageferry(&words).assert_failed(7, "run it with --packed");
    let _ = wrong.end();
    let first = pager(&memory, &["--packed"]);
    first.wait_until_said("waiting for a VMM");
    let vm = start(&dir, &control, &words);
    vm.wait_until_said("control socket");
    first.signal(rustix::process::Signal::KILL);
    let _ = first.end();
    let second = pager(&memory, &["--packed"]);
    second.wait_until_said("serving process");
    assert_whole(&control);
    quit(&control);
    vm.end().assert_ok();
    second.end().assert_ok();
    pageferry(&words).assert_failed(5, "no pager");
}

#[test]
fn linux_goes_on_after_a_restore() {
    use crate::support::terminal::Pty;
    let Some([kernel, initrd]) = pageferry_testkit::guest_shell() else {
        return;
    };
    if !usable() {
        return;
    }
    let dir = Dir::new();
    let (socket, snapshot) = (dir.path("vm"), dir.path("snapshot"));
    let (socket, snapshot) = (socket.to_str().unwrap(), snapshot.to_str().unwrap());
    let (pty, prompt) = (Pty::new(), b"guest:~# ");
    let run = [
        "run",
        "--kernel",
        kernel.to_str().unwrap(),
        "--initrd",
        initrd.to_str().unwrap(),
        "--memory",
        "64M",
        "--vcpus",
        "2",
        "--cmdline",
        "console=hvc0 quiet",
        "--control",
        socket,
        "--snapshot-to",
        snapshot,
    ];
    let vm = pty.start(&run);
    pty.wait_until_shown(prompt);
    pty.press(b"n=6; echo six-$n\r");
    pty.wait_until_shown(b"six-6");
    quit(Path::new(socket));
    vm.end().assert_ok();

    let pty = Pty::new();
    let vm = pty.start(&["restore", snapshot, "--control", socket]);
    pty.wait_until_keys_are_passed_on();
    pty.press(b"echo seven-$((n + 1))\r");
    pty.wait_until_shown(b"seven-7");
    pty.press(b"seq 1000 | md5sum\r");
    pty.wait_until_shown(b"53d025127ae99ab79e8502aae2d9bea6");
    pty.press(b"poweroff\r");
    let ended = vm.end();
    ended.assert_ok();
    assert!(
        ended.stderr.contains("the guest has shut down"),
        "{ended:?}"
    );
}

/// The guest writes a block that no sample has, and so do those that go on from it.
#[test]
fn a_restored_guest_s_writes_keep_a_second_one_from_its_disk() {
    use crate::support::terminal::Pty;
    let Some([kernel, initrd]) = pageferry_testkit::guest_shell() else {
        return;
    };
    if !usable() {
        return;
    }
    let dir = Dir::new();
    let path = |name: &str| dir.path(name).to_str().unwrap().to_owned();
    let (socket, snapshot, disk) = (path("vm"), path("snapshot"), path("disk"));
    let file = std::fs::File::create(&disk).unwrap();
    file.set_len(256 << 20).unwrap();
    let files = [kernel, initrd].map(|file| file.to_str().unwrap().to_owned());
    let run = [
        &[
            "run", "--kernel", &files[0], "--initrd", &files[1], "--memory", "64M",
        ][..],
        &[
            "--cmdline",
            "console=hvc0 quiet",
            "--snapshot-to",
            &snapshot,
        ],
    ]
    .concat();
    let more = ["--control", &socket, "--disk", &disk];
    let write = |pty: &Pty, word: &str| {
        let line = format!("echo {word} | dd of=/dev/vda bs=512 seek=300\r");
        pty.press(line.as_bytes());
        pty.press(format!("sync; echo {word}-$((1 + 1))\r").as_bytes());
        pty.wait_until_shown(format!("{word}-2").as_bytes());
    };
    let pty = Pty::new();
    let vm = pty.start(&[&run[..], &more].concat());
    pty.wait_until_shown(b"guest:~# ");
    pty.press(b"mknod /dev/vda b 254 0\r");
    write(&pty, "one");
    quit(Path::new(&socket));
    vm.end().assert_ok();
    std::fs::copy(&disk, path("copy")).unwrap();

    let restore = [&["restore", &snapshot][..], &more].concat();
    let pty = Pty::new();
    let vm = pty.start(&restore);
    pty.wait_until_keys_are_passed_on();
    write(&pty, "two");
    quit(Path::new(&socket));
    vm.end().assert_ok();
    pageferry(&restore).assert_failed(8, "a guest has written it");
    let copy = path("copy");
    let restore = ["restore", &snapshot, "--control", &socket, "--disk", &copy];
    let pty = Pty::new();
    let vm = pty.start(&restore);
    pty.wait_until_keys_are_passed_on();
    write(&pty, "three");
    quit(Path::new(&socket));
    vm.end().assert_ok();
}
