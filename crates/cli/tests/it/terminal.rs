//! The terminal of a guest's console: who has the keys, and how it is left.

use crate::linux::{end, print};
use crate::support::terminal::Pty;
use crate::support::{Destination, Dir, Process, assert_whole, is_alive, pageferry, status};
use pageferry_testkit::rv64::{
    A0, A1, A6, A7, DBCN, ECALL, ZERO, beq, bne, call, image, ld, li, sd,
};
use pageferry_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::OutputModes;
use std::time::Duration;

/// A saved register.
const S2: u32 = 18;
const T0: u32 = 5;

/// A kernel that says "ready", and then each byte that it hears. It shuts down after a `q`, and
/// fails after an `f`.
pub(crate) fn echo() -> Vec<u8> {
    let bytes = |code: &[u32]| 4 * code.len() as i32;
    let hear = [vec![sd(ZERO, S2)], call(DBCN, 1, &[1, 0x40_0000, 0])].concat();
    let mut listen = hear.clone();
    listen.push(beq(A1, ZERO, -bytes(&hear)));
    let say = [
        vec![ld(A0, S2)],
        li(A6, 2).to_vec(),
        li(A7, DBCN).to_vec(),
        vec![ECALL],
    ]
    .concat();
    let after = |key: u8, what: Vec<u32>| {
        let skip = bne(A0, T0, 4 + bytes(&what));
        [
            vec![ld(A0, S2)],
            li(T0, key.into()).to_vec(),
            vec![skip],
            what,
        ]
        .concat()
    };
    let round = [listen, say, after(b'q', end(false)), after(b'f', end(true))].concat();
    let again = beq(ZERO, ZERO, -bytes(&round));
    let code = [
        li(S2, 0x40_0000).to_vec(),
        print("ready"),
        round,
        vec![again],
    ]
    .concat();
    image(&code)
}

/// The arguments of `run` for the kernel [`echo`].
pub(crate) fn run_echo(dir: &Dir) -> Vec<String> {
    let file = dir.path("kernel");
    std::fs::write(&file, echo()).unwrap();
    let path = |name| dir.path(name).to_str().unwrap().to_owned();
    let run = ["run", "--memory", "16M", "--vcpus", "1", "--kernel"];
    let mut args: Vec<_> = run.map(str::to_owned).into();
    args.extend([path("kernel"), "--control".into(), path("vm")]);
    args
}

/// `run` of the kernel [`echo`] on a new terminal, when the guest has the keys.
pub(crate) fn running(dir: &Dir) -> (Pty, Process) {
    let pty = Pty::new();
    let process = pty.start(&run_echo(dir));
    pty.wait_until_shown(b"ready");
    pty.wait_until_keys_are_passed_on();
    (pty, process)
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Whether this process ignores `signal`.
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = u64::from_str_radix(mask.unwrap().trim(), 16).unwrap();
    mask >> (signal.as_raw() - 1) & 1 == 1
}

#[test]
fn every_key_but_one_goes_to_the_guest() {
    let dir = Dir::new();
    let (pty, mut process) = running(&dir);
    wait_until("the way out", || {
        process.said_on_stderr().contains("Ctrl-]")
    });
    // Ctrl-C, Ctrl-Z, Ctrl-\, Ctrl-S, Ctrl-Q, Ctrl-D, Ctrl-V and Enter.
    let keys = b"\x03\x1a\x1c\x13\x11\x04\x16\rx";
    pty.press(keys);
    pty.wait_until_shown(keys);
    assert!(process.is_running());
    pty.press(b"z\x1d");
    let ended = process.end();
    ended.assert_ok();
    assert!(ended.stderr.contains("the VM was ended"), "{ended:?}");
    assert!(!dir.path("vm").exists());
}

#[test]
fn a_line_of_the_command_begins_at_the_left() {
    let dir = Dir::new();
    let (pty, process) = running(&dir);
    let output = pty.settings().output();
    assert!(output.contains(OutputModes::OPOST | OutputModes::ONLCR));
    pty.press(b"\n");
    pty.wait_until_shown(b"\r\n");
    pty.press(b"q");
    process.end().assert_ok();
}

/// However the command ends, whoever has the terminal next finds it as it was.
#[test]
fn the_terminal_is_as_before_after_each_end() {
    let before = Pty::new().settings();
    type End = fn(&Pty, &Process);
    let ends: [(&str, End); 4] = [
        ("the guest shuts down", |pty, _| pty.press(b"q")),
        ("the guest fails", |pty, _| pty.press(b"f")),
        ("the user leaves", |pty, _| pty.press(b"\x1d")),
        ("an interrupt", |_, process| process.interrupt()),
    ];
    for (what, end) in ends {
        let dir = Dir::new();
        let (pty, process) = running(&dir);
        end(&pty, &process);
        process.end();
        assert_eq!(pty.settings(), before, "{what}");
    }
    let signals = [
        Signal::TERM,
        Signal::QUIT,
        Signal::ABORT,
        Signal::SEGV,
        Signal::BUS,
        Signal::ILL,
        Signal::FPE,
        Signal::TRAP,
        Signal::SYS,
        Signal::USR1,
        Signal::USR2,
        Signal::ALARM,
        Signal::VTALARM,
        Signal::PROF,
        Signal::XCPU,
        Signal::IO,
        Signal::POWER,
        Signal::STKFLT,
    ];
    // The tests may have been started with some ignored, and a child ignores these too.
    for signal in signals.into_iter().filter(|signal| !is_ignored(*signal)) {
        let dir = Dir::new();
        let (pty, mut process) = running(&dir);
        process.signal(signal);
        if signal == Signal::SEGV || signal == Signal::BUS {
            // The handler of Rust does not end the process the first time.
            wait_until("the end", || {
                process.signal(signal);
                !process.is_running()
            });
        }
        let ended = process.end();
        assert_eq!(pty.settings(), before, "{signal:?}");
        let by_signal = signal != Signal::TERM;
        assert_eq!(ended.code.is_none(), by_signal, "{signal:?}: {ended:?}");
    }
}

#[test]
fn a_command_that_fails_before_its_guest_runs_leaves_the_terminal_as_it_was() {
    let dir = Dir::new();
    let pty = Pty::new();
    let before = pty.settings();
    let args = run_echo(&dir);
    let mut long = echo();
    long.resize(15 << 20, 0);
    std::fs::write(dir.path("kernel"), long).unwrap();
    pty.start(&args).end().assert_failed(2, "are too few");
    assert_eq!(pty.settings(), before);
}

#[test]
fn a_command_that_stops_gives_the_terminal_back_and_takes_it_again() {
    let dir = Dir::new();
    let before = Pty::new().settings();
    let (pty, process) = running(&dir);
    for _ in 0..3 {
        process.signal(Signal::TSTP);
        wait_until("the command to stop", || is_stopped(process.pid()));
        assert_eq!(pty.settings(), before);
        process.signal(Signal::CONT);
        pty.wait_until_keys_are_passed_on();
    }
    // A shell sets the terminal as it likes after SIGSTOP.
    process.signal(Signal::STOP);
    wait_until("the command to stop", || is_stopped(process.pid()));
    pty.set_like(&Pty::new());
    process.signal(Signal::CONT);
    pty.wait_until_keys_are_passed_on();
    pty.press(b"q");
    process.end().assert_ok();
    assert_eq!(pty.settings(), before);
}

pub(crate) fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(')')
        .unwrap()
        .1
        .trim_start()
        .starts_with('T')
}

#[test]
fn a_closed_terminal_leaves_no_vm_behind() {
    let dir = Dir::new();
    let receive = |dir: &Dir| {
        let address = format!("unix:{}", dir.path("in").display());
        let control = dir.path("vm").to_str().unwrap().to_owned();
        ["receive", "--listen", &address, "--control", &control]
            .map(str::to_owned)
            .to_vec()
    };
    let program = |dir: &Dir| {
        let control = dir.path("vm").to_str().unwrap().to_owned();
        [
            "run",
            "--engine",
            "soft",
            "--memory",
            "16M",
            "--control",
            &control,
        ]
        .map(str::to_owned)
        .to_vec()
    };
    for args in [run_echo(&dir), receive(&dir), program(&dir)] {
        let pty = Pty::new();
        let (shell, pid) = pty.start_in_session(":", &args);
        wait_until("the VM's socket", || status(&dir.path("vm")).is_some());
        pty.close();
        wait_until("the end of the command", || !is_alive(pid));
        assert!(!dir.path("vm").exists(), "{args:?}");
        drop(shell);
    }
}

/// The source has the only copy, so it goes on. Neither side throws the VM away.
#[test]
fn a_terminal_that_closes_in_a_migration_throws_no_vm_away() {
    let dir = Dir::new();
    let destination = Destination::start(&[]);
    let socket = dir.path("vm");
    let control = socket.to_str().unwrap();
    let run = [
        "run",
        "--engine",
        "soft",
        "--memory",
        "16M",
        "--control",
        control,
    ];
    let pty = Pty::new();
    let (shell, pid) = pty.start_in_session(":", &run);
    wait_until("the VM", || {
        status(&socket).is_some_and(|status| status["state"] == "running")
    });
    let to = &destination.address;
    let migrate = ["migrate", "--switch", "manual", "--vm", control, "--to", to];
    let migration = Process::start(&migrate, &dir);
    wait_until("the migration", || {
        status(&socket).is_some_and(|status| status["session"]["stage"] == "pre-copy")
    });
    pty.close();
    // By the shell too, and again.
    signal(pid, Signal::HUP);
    std::thread::sleep(Duration::from_millis(1500));
    signal(pid, Signal::HUP);
    assert!(is_alive(pid));
    pageferry(&["set", "--switch", "now", "--vm", control]).assert_ok();
    migration.end().assert_ok();
    wait_until("the end of the source", || !is_alive(pid));
    assert_whole(&destination.socket);
    drop(shell);
}

#[test]
fn a_command_that_ignores_hang_ups_runs_on() {
    let dir = Dir::new();
    let pty = Pty::new();
    let (shell, pid) = pty.start_in_session("trap '' HUP", &run_echo(&dir));
    wait_until("the VM's socket", || status(&dir.path("vm")).is_some());
    pty.close();
    signal(pid, Signal::HUP);
    std::thread::sleep(Duration::from_millis(1500));
    assert!(is_alive(pid));
    pageferry(&["quit", "--vm", dir.path("vm").to_str().unwrap()]).assert_ok();
    wait_until("the end of the command", || !is_alive(pid));
    drop(shell);
}
