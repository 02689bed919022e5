//! `run --kernel`: kernels of the user. These are a few instructions with a kernel's header.

use crate::support::terminal::Pty;
use crate::support::{Dir, Ended, PAGEFERRY, Process, pageferry, status};
use pageferry_testkit::rv64::{
    A1, DBCN, SRST, ZERO, add, addi, and, beq, bltu, bne, call, image, ld, li, sd,
};
use pageferry_testkit::{guest_linux, guest_shell, wait_until};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// `pageferry`, which finds the guest that the tests run. `None` if there is none.
fn with_guest(words: &[&str]) -> Option<Ended> {
    let [kernel, _] = guest_linux()?;
    let folder = kernel.parent().expect("a file is in a folder");
    let mut command = Command::new(PAGEFERRY);
    command.args(words).env("PAGEFERRY_GUEST_LINUX", folder);
    Some(Process::spawn(command).end())
}

/// A saved register.
const S1: u32 = 9;
const S2: u32 = 18;
const S3: u32 = 19;
const T0: u32 = 5;
const T1: u32 = 6;
const T2: u32 = 7;

pub(crate) fn print(text: &str) -> Vec<u32> {
    let byte = |byte: u8| call(DBCN, 2, &[byte.into()]);
    text.bytes().flat_map(byte).collect()
}

pub(crate) fn end(failure: bool) -> Vec<u32> {
    call(SRST, 0, &[0, failure.into()])
}

/// A kernel that rewrites 1 MiB for ever, and checks on each page that no write is lost. It prints
/// a dot in each 1024th round. It ends when a key comes, and with a failure when a page is wrong.
pub(crate) fn counting() -> Vec<u8> {
    let bytes = |code: &[u32]| 4 * code.len() as i32;
    let bad = end(true);
    let page = [
        vec![ld(T1, T0), beq(T1, S1, 4 + bytes(&bad))],
        bad,
        vec![addi(T1, T1, 1), sd(T1, T0)],
        li(T2, 4096).to_vec(),
        vec![add(T0, T0, T2)],
    ]
    .concat();
    let dot = print(".");
    let round = [
        vec![addi(T0, S2, 0)],
        page.clone(),
        vec![bltu(T0, S3, -bytes(&page))],
        vec![addi(S1, S1, 1)],
        li(T1, 1023).to_vec(),
        vec![and(T1, T1, S1), bne(T1, ZERO, 4 + bytes(&dot))],
        dot,
        call(DBCN, 1, &[1, 0x3f_0000, 0]),
    ]
    .concat();
    let code = [
        li(S2, 0x40_0000).to_vec(),
        li(S3, 0x50_0000).to_vec(),
        li(S1, 0).to_vec(),
        round.clone(),
        vec![beq(A1, ZERO, -bytes(&round))],
        print("bye\n"),
        end(false),
    ]
    .concat();
    image(&code)
}

/// `run --kernel` of a file with these bytes, and more flags. Its console is its standard output.
fn run(dir: &Dir, kernel: &[u8], more: &[&str]) -> Process {
    let file = dir.path("kernel");
    std::fs::write(&file, kernel).unwrap();
    let socket = dir.path("vm");
    let mut command = Command::new(PAGEFERRY);
    command.args(["run", "--memory", "16M", "--vcpus", "2", "--control"]);
    command.arg(&socket).arg("--kernel").arg(&file).args(more);
    Process::spawn(command)
}

#[test]
fn a_kernel_writes_to_the_console_and_shuts_down() {
    let dir = Dir::new();
    let hello = [print("hello, world\n"), end(false)].concat();
    let ended = run(&dir, &image(&hello), &[]).end();
    ended.assert_ok();
    assert_eq!(ended.stdout, "hello, world\n");
    assert!(
        ended.stderr.contains("the guest has shut down"),
        "{ended:?}"
    );
}

#[test]
fn a_console_can_be_a_file() {
    let dir = Dir::new();
    let hello = [print("hello, file\n"), end(false)].concat();
    let file = dir.path("console");
    let ended = run(&dir, &image(&hello), &["--console", file.to_str().unwrap()]).end();
    ended.assert_ok();
    assert_eq!(ended.stdout, "");
    assert_eq!(std::fs::read_to_string(file).unwrap(), "hello, file\n");
}

#[test]
fn a_guest_that_fails_is_a_failure() {
    let dir = Dir::new();
    run(&dir, &image(&end(true)), &[])
        .end()
        .assert_failed(14, "failure");
}

/// A script that takes 0 for the end of the work must not take a reboot for it.
#[test]
fn a_guest_that_reboots_has_not_shut_down() {
    // Cold and warm (SBI, "System Reset Extension").
    for kind in [1, 2] {
        let dir = Dir::new();
        let reboot = call(SRST, 0, &[kind, 0]);
        run(&dir, &image(&reboot), &[])
            .end()
            .assert_failed(14, "asked for a reboot");
    }
}

/// The kernel does not notice, and its console goes on at the destination.
#[test]
fn a_kernel_moves_and_hears_keys_at_the_destination() {
    for precopy in ["0", "1"] {
        let dir = Dir::new();
        let source = run(&dir, &counting(), &[]);
        source.wait_until_said("runs on soft");
        let (keys, mut typed) = std::io::pipe().unwrap();
        let there = Dir::new();
        let mut command = Command::new(PAGEFERRY);
        command.args(["receive", "--listen", "127.0.0.1:0", "--console", "-"]);
        command.arg("--control").arg(there.path("vm"));
        let destination = Process::spawn_reading(command, Stdio::from(keys));
        let address = destination.wait_until_said("listening on ");
        let socket = dir.path("vm");
        wait_until("text at the source", || source.said().contains('.'));
        let moved = [
            "migrate",
            "--precopy-passes",
            precopy,
            "--vm",
            socket.to_str().unwrap(),
            "--to",
            &address,
        ];
        pageferry(&moved).assert_ok();
        let left = source.end();
        left.assert_ok();
        assert!(left.stdout.starts_with('.'), "{left:?}");
        let socket = there.path("vm");
        let told = status(&socket).unwrap();
        assert!(told["guest"].is_null(), "{told}");
        pageferry(&["verify", "--vm", socket.to_str().unwrap()]).assert_failed(17, "Linux");
        wait_until("text at the destination", || {
            destination.said().contains('.')
        });
        typed.write_all(b"q").unwrap();
        let ended = destination.end();
        ended.assert_ok();
        assert!(ended.stdout.contains("bye"), "{ended:?}");
        assert!(
            ended.stderr.contains("the guest has shut down"),
            "{ended:?}"
        );
    }
}

#[test]
fn what_is_no_kernel_is_refused_in_a_sentence() {
    let dir = Dir::new();
    let kernel = counting();
    let refused = |bytes: &[u8], more: &[&str], part: &str| {
        run(&dir, bytes, more).end().assert_failed(2, part);
    };
    refused(b"", &[], "0 bytes");
    refused(&vec![7; 4096], &[], "no Linux kernel");
    refused(&kernel, &["--engine", "kvm"], "soft engine");
    let mut long = kernel.clone();
    long.resize(16 << 20, 0);
    refused(&long, &[], "choose a larger --memory");
    long.resize(15 << 20, 0);
    refused(&long, &[], "are too few");
    refused(&kernel, &["--cmdline", &"x".repeat(1024)], "1024 bytes");
    let empty = dir.path("initrd");
    std::fs::write(&empty, b"").unwrap();
    refused(
        &kernel,
        &["--initrd", empty.to_str().unwrap()],
        "initrd is empty",
    );
    refused(&kernel, &["--initrd", "/no/such/file"], "/no/such/file");
    let file = ["--console", "/no/such/folder/file"];
    refused(&kernel, &file, "/no/such/folder/file");
    let socket = dir.path("vm");
    let alone = [
        "run",
        "--control",
        socket.to_str().unwrap(),
        "--cmdline",
        "x",
    ];
    assert_eq!(pageferry(&alone).code, Some(2), "without a kernel");
}

/// What the first process of the Linux guest finds on so many vCPUs: its lines of results. `work`
/// chooses what it does.
fn results(files: &[PathBuf; 2], vcpus: &str, work: &str) -> Vec<String> {
    let dir = Dir::new();
    let [kernel, initrd] = files;
    let mut command = Command::new(PAGEFERRY);
    command.args(["run", "--memory", "128M", "--vcpus", vcpus, "--control"]);
    command.arg(dir.path("vm")).arg("--kernel").arg(kernel);
    command.arg("--initrd").arg(initrd);
    let line = format!("console=hvc0 panic=-1 quiet {work}");
    command.args(["--cmdline", &line]);
    let ended = Process::spawn(command).end();
    ended.assert_ok();
    let lines = ended.stdout.lines().map(str::trim_end);
    let lines = lines.filter(|line| line.starts_with("PF ") && !line.starts_with("PF up "));
    lines.map(str::to_owned).collect()
}

/// A real kernel with processes of its own. The results are those of the same guest in QEMU.
#[test]
fn linux_boots_on_one_to_sixteen_vcpus() {
    let Some(files) = guest_linux() else {
        return;
    };
    let expected = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../lab/guest-linux/check.expected"
    );
    let expected = std::fs::read_to_string(expected).unwrap();
    for vcpus in ["1", "2", "4", "16"] {
        assert_eq!(
            results(&files, vcpus, "pf=check"),
            expected.lines().collect::<Vec<_>>(),
            "{vcpus} vCPUs"
        );
    }
}

/// It has no first process, so it panics, and asks for a reboot.
#[test]
fn a_kernel_that_panics_has_not_shut_down() {
    let Some([kernel, _]) = guest_linux() else {
        return;
    };
    let dir = Dir::new();
    let mut command = Command::new(PAGEFERRY);
    command.args(["run", "--memory", "64M", "--vcpus", "1", "--control"]);
    command.arg(dir.path("vm")).arg("--kernel").arg(kernel);
    command.args(["--cmdline", "console=hvc0 quiet panic=-1"]);
    let ended = Process::spawn(command).end();
    ended.assert_failed(14, "after a panic");
    assert!(ended.stdout.contains("Kernel panic"), "{ended:?}");
}

/// A variable of the shell is there only if the shell itself has moved.
#[test]
fn a_user_works_in_a_shell_and_takes_it_along() {
    let Some([kernel, shell]) = guest_shell() else {
        return;
    };
    let (here, there) = (Dir::new(), Dir::new());
    let [socket, arrived, listen] =
        [&here, &there, &there].map(|dir| dir.path("vm").display().to_string());
    let listen = format!("unix:{listen}.in");
    let mut args = vec![
        "run",
        "--memory",
        "64M",
        "--vcpus",
        "2",
        "--control",
        &socket,
    ];
    args.extend(["--cmdline", "console=hvc0 quiet", "--kernel"]);
    args.extend([
        kernel.to_str().unwrap(),
        "--initrd",
        shell.to_str().unwrap(),
    ]);
    let pty = Pty::new();
    let source = pty.start(&args);
    let prompt = b"guest:~# ";
    pty.wait_until_shown(prompt);
    // Each answer differs from the keys that the terminal shows.
    pty.press(b"n=6; sh -c \"echo six-$n; exec sleep 1000\"\r");
    pty.wait_until_shown(b"six-6");
    // Ctrl-C ends what runs in the guest, and nothing else.
    pty.press(b"\x03");
    pty.press(b"echo seven-$((n + 1))\r");
    pty.wait_until_shown(b"seven-7");

    let far = Pty::new();
    let receive = [
        "receive",
        "--listen",
        &listen,
        "--console",
        "-",
        "--control",
        &arrived,
    ];
    let destination = far.start(&receive);
    far.wait_until_shown(b"listening on ");
    pageferry(&["migrate", "--vm", &socket, "--to", &listen]).assert_ok();
    source.end().assert_ok();
    far.wait_until_keys_are_passed_on();
    far.press(b"echo eight-$((n + 2))\r");
    far.wait_until_shown(b"eight-8");
    far.press(b"seq 1000 | md5sum\r");
    far.wait_until_shown(b"53d025127ae99ab79e8502aae2d9bea6");
    far.press(b"poweroff\r");
    let ended = destination.end();
    ended.assert_ok();
    assert!(
        ended.stderr.contains("the guest has shut down"),
        "{ended:?}"
    );
}

/// The guest's own checks decide, since nobody else knows what its pages hold.
#[test]
fn a_demo_moves_linux_under_load() {
    for passes in ["0", "2"] {
        let demo = [
            "demo",
            "--guest",
            "linux",
            "--vcpus",
            "4",
            "--memory",
            "128M",
            "--precopy-passes",
            passes,
            "--json",
        ];
        let Some(ended) = with_guest(&demo) else {
            return;
        };
        ended.assert_ok();
        let report = ended.json();
        assert!(report["verified"].is_null(), "{report}");
        let view = &report["guest_view"];
        assert_eq!(view["faults"], serde_json::json!([]), "{view}");
        for key in ["pages_checked_there", "md5_rounds"] {
            assert!(view[key].as_u64() > Some(0), "{key} in {view}");
        }
        for time in ["before", "during", "after"] {
            let gap = view["largest_gap_ms"][time].as_f64();
            assert!(gap > Some(0.9), "{time} in {view}");
        }
    }
}

#[test]
fn a_demo_of_linux_without_a_guest_says_how_to_build_one() {
    let demo = ["demo", "--guest", "linux"];
    pageferry(&[&demo[..], &["--kernel", "/no/a", "--initrd", "/no/b"]].concat())
        .assert_failed(2, "cargo xtask guest-linux");
    let dir = Dir::new();
    let file = dir.path("file");
    std::fs::write(&file, "no kernel").unwrap();
    let file = file.to_str().unwrap();
    let named = [&demo[..], &["--kernel", file, "--initrd", file]].concat();
    pageferry(&named).assert_failed(2, "9 bytes");
    pageferry(&[&named[..], &["--engine", "kvm"]].concat()).assert_failed(2, "soft");
}

/// The kernel's own torture tests, and storms of processes, mappings and written code.
#[test]
#[ignore = "takes minutes: `.ci/slow` runs it"]
fn linux_withstands_torture() {
    let Some(files) = guest_linux() else {
        return;
    };
    let seconds = std::env::var("PAGEFERRY_TORTURE_SECONDS").unwrap_or_else(|_| "60".into());
    let work = |work: &str| results(&files, "4", &format!("pf={work} pf_seconds={seconds}"));
    let torture = [
        "PF torture rcutorture 1",
        "PF torture locktorture 1",
        "PF done",
    ];
    assert_eq!(work("torture"), torture);
    let storm = work("storm");
    println!("{storm:?}");
    for kind in ["execs", "maps", "codes"] {
        let start = format!("PF storm {kind} ");
        let count = storm.iter().find_map(|line| line.strip_prefix(&start));
        assert!(count.is_some_and(|count| count != "0"), "{storm:?}");
    }
    assert_eq!(storm.last().map(String::as_str), Some("PF done"));
    assert!(!storm.iter().any(|line| line.contains("FAIL")), "{storm:?}");
}
