//! A real Linux under load, moved between processes at seeded moments, and with one of them killed.
//!
//! **Guarantee.** The guest finds no wrong page and no wrong file, its kernel does not complain, and
//! its clock never goes back. The clock also shows that two processes never ran the guest at once.
//!
//! **Mechanism.** Each process writes the guest's console to a file of its own. The first process of
//! the guest says there what it has checked (`lab/guest-linux/init.c`).

use crate::support::{Dir, PAGEFERRY, Process, pageferry, status};
use pageferry_testkit::{Random, guest_linux, wait_for, wait_until};
use rustix::process::Signal;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The moves of one VM. Some of the first are during its boot.
const MOVES_OF_A_VM: u64 = 20;
/// The moves in all, and the kills, if the environment does not say.
const MOVES: u64 = 200;
const KILLS: u64 = 40;
/// The time for which a guest that must not run is watched.
const STILL: Duration = Duration::from_millis(200);

fn number(variable: &str, otherwise: u64) -> u64 {
    let text = std::env::var(variable).ok();
    text.map_or(otherwise, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{variable} is '{text}': expected a whole number"))
    })
}

/// A process that has the VM, or waits for it.
struct Side {
    process: Process,
    socket: PathBuf,
    console: PathBuf,
    _dir: Dir,
}

impl Side {
    fn start(words: &[&str], kernel: &[&PathBuf]) -> Self {
        let dir = Dir::new();
        let (socket, console) = (dir.path("vm"), dir.path("console"));
        let mut command = Command::new(PAGEFERRY);
        command.args(words).arg("--control").arg(&socket);
        command.arg("--console").arg(&console);
        if let [kernel, initrd] = kernel {
            command.arg("--kernel").arg(kernel);
            command.arg("--initrd").arg(initrd);
        }
        Self {
            process: Process::spawn(command),
            socket,
            console,
            _dir: dir,
        }
    }

    fn source(files: &[PathBuf; 2]) -> Self {
        let line = "console=hvc0 panic=-1 quiet pf=load pf_mib=8";
        let words = ["run", "--memory", "128M", "--vcpus", "4", "--cmdline", line];
        let side = Self::start(&words, &[&files[0], &files[1]]);
        side.process.wait_until_said("runs on soft");
        side
    }

    /// A destination and its address.
    fn destination() -> (Self, String) {
        let side = Self::start(
            &[
                "receive",
                "--listen",
                "127.0.0.1:0",
                "--dead-after",
                "300ms",
            ],
            &[],
        );
        let address = side.process.wait_until_said("listening on ");
        (side, address)
    }

    /// `pageferry migrate` to `address`, with some passes of pre-copy.
    fn migrate(&self, address: &str, passes: u64) -> Process {
        let mut command = Command::new(PAGEFERRY);
        command.arg("migrate").arg("--vm").arg(&self.socket);
        command.args(["--to", address, "--precopy-passes", &passes.to_string()]);
        // Post-copy lasts long enough for a kill.
        command.args([
            "--dead-after",
            "300ms",
            "--max-postcopy-bandwidth",
            "800mbit",
        ]);
        Process::spawn(command)
    }

    fn text(&self) -> String {
        let bytes = std::fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The guest makes progress here.
    fn assert_runs_on(&self) {
        let before = Heard::of(&self.text()).ticks.len();
        wait_until("the guest's timer", || {
            Heard::of(&self.text()).ticks.len() > before + 2
        });
    }

    fn quit(self) {
        let socket = self.socket.to_str().unwrap();
        pageferry(&["quit", "--vm", socket]).assert_ok();
        self.process.end();
    }
}

/// What a guest has said.
#[derive(Default)]
struct Heard {
    /// The guest's clock at each line of its timer.
    ticks: Vec<u64>,
    pages: u64,
    sums: u64,
}

impl Heard {
    /// Fails if the guest noticed something wrong.
    #[track_caller]
    fn of(text: &str) -> Self {
        let mut heard = Self::default();
        for line in text.split_inclusive('\n') {
            for complaint in ["PF FAIL", "Oops", "BUG:", "rcu: INFO", "Unable to", "panic"] {
                assert!(!line.contains(complaint), "{line}");
            }
            // A part of a line has wrong numbers.
            let Some(line) = line.strip_suffix('\n') else {
                continue;
            };
            let words: Vec<&str> = line.trim_end().split(' ').collect();
            let ["PF", what, first, second] = words[..] else {
                continue;
            };
            let (Ok(first), Ok(second)) = (first.parse(), second.parse::<u64>()) else {
                continue;
            };
            match what {
                "tick" => {
                    let last = heard.ticks.last().copied().unwrap_or(0);
                    assert!(first > last, "the clock went from {last} to {first}");
                    heard.ticks.push(first);
                }
                "load" => heard.pages = first,
                "md5" => heard.sums = first,
                _ => continue,
            }
            assert!(what == "tick" || second == 0, "{line}");
        }
        heard
    }
}

#[test]
#[ignore = "takes minutes: `.ci/slow` runs it"]
fn linux_moves_back_and_forth_at_seeded_moments() {
    let Some(files) = guest_linux() else {
        return;
    };
    let moves = number("PAGEFERRY_LINUX_MOVES", MOVES);
    let (mut pages, mut sums) = (0, 0);
    for vm in 0..moves.div_ceil(MOVES_OF_A_VM) {
        let mut random = Random::new(vm + 1);
        let mut here = Side::source(&files);
        let mut text = String::new();
        for _ in 0..MOVES_OF_A_VM.min(moves - vm * MOVES_OF_A_VM) {
            let (there, address) = Side::destination();
            std::thread::sleep(Duration::from_millis(random.below(600)));
            let moved = here.migrate(&address, random.below(2)).end();
            assert_eq!(moved.code, Some(0), "VM {vm}: {moved:?}");
            let left = std::mem::replace(&mut here, there);
            left.process.end().assert_ok();
            let bytes = std::fs::read(&left.console).unwrap();
            text.push_str(&String::from_utf8_lossy(&bytes));
            Heard::of(&text);
        }
        // The guest has had time for each kind of its work.
        let heard = wait_for("the guest's checks", || {
            let heard = Heard::of(&(text.clone() + &here.text()));
            (heard.pages > 0 && heard.sums > 0).then_some(heard)
        });
        pages += heard.pages;
        sums += heard.sums;
        here.quit();
        println!("VM {vm}: {pages} pages and {sums} sums so far, none wrong");
    }
}

#[test]
fn linux_moves_while_it_is_paused() {
    let Some(files) = guest_linux() else {
        return;
    };
    let mut here = Side::source(&files);
    here.assert_runs_on();
    let mut text = String::new();
    for _ in 0..2 {
        let socket = here.socket.to_str().unwrap().to_owned();
        pageferry(&["pause", "--vm", &socket]).assert_ok();
        let (there, address) = Side::destination();
        here.migrate(&address, 1).end().assert_ok();
        let left = std::mem::replace(&mut here, there);
        left.process.end().assert_ok();
        text.push_str(&String::from_utf8_lossy(
            &std::fs::read(&left.console).unwrap(),
        ));
        wait_until("the VM to be here", || {
            status(&here.socket).is_some_and(|status| status["state"] == "paused")
        });
        std::thread::sleep(STILL);
        assert_eq!(here.text(), "", "a paused guest says nothing");
        let socket = here.socket.to_str().unwrap().to_owned();
        pageferry(&["resume", "--vm", &socket]).assert_ok();
        // Its timers go on, and its clock has not gone back.
        here.assert_runs_on();
        Heard::of(&(text.clone() + &here.text()));
    }
    here.quit();
}

/// The destination is gone. The source runs the guest, or keeps it still until the operator's word.
fn settle_source(source: Side, mut migrate: Process, there: &Heard) -> &'static str {
    let waits = wait_for("the source to notice", || {
        if !migrate.is_running() {
            return Some(false);
        }
        let session = &status(&source.socket)?["session"];
        let handed_over = session["stage"] == "handed-over" || session["stage"] == "drained";
        (handed_over && session["connected"] == false).then_some(true)
    });
    if !waits {
        if migrate.end().code == Some(0) {
            source.process.end().assert_ok();
            return "moved, and killed afterwards";
        }
        assert!(there.ticks.is_empty(), "it ran at the destination");
        source.assert_runs_on();
        source.quit();
        return "kept by the source";
    }
    let before = source.text();
    std::thread::sleep(STILL);
    assert_eq!(
        source.text(),
        before,
        "the guest runs after it was handed over"
    );
    let socket = source.socket.to_str().unwrap();
    pageferry(&["abandon", "--vm", socket, "--resume-here"]).assert_ok();
    migrate.end();
    source.assert_runs_on();
    source.quit();
    "resumed at the source by the operator"
}

/// The source is gone. The destination runs the guest if it has all of it.
fn settle_destination(there: Side) -> &'static str {
    let (state, session) = wait_for("the destination to notice", || {
        let status = status(&there.socket)?;
        let state = status["state"].as_str()?.to_owned();
        let session = status["session"].clone();
        let settled = state == "waiting"
            || state == "running"
            || (state == "arriving" || state == "incomplete") && !session["lost_for_ms"].is_null();
        settled.then_some((state, session))
    });
    let stage = session["stage"].as_str().unwrap_or("none");
    let outcome = match (state.as_str(), stage) {
        ("waiting", _) | (_, "ready" | "discarded") => {
            std::thread::sleep(STILL);
            assert!(Heard::of(&there.text()).ticks.is_empty(), "it ran");
            "gone with the source"
        }
        (_, "running") if session["pages_left"] != 0 => {
            // It waits for pages that never come. What it has said is right.
            "incomplete at the destination"
        }
        _ => {
            there.assert_runs_on();
            "moved whole"
        }
    };
    Heard::of(&there.text());
    outcome
}

#[test]
#[ignore = "takes minutes: `.ci/slow` runs it"]
fn linux_runs_in_one_process_at_most_when_the_other_is_killed() {
    let Some(files) = guest_linux() else {
        return;
    };
    let mut outcomes = std::collections::BTreeMap::<&str, u64>::new();
    for seed in 0..number("PAGEFERRY_LINUX_KILLS", KILLS) {
        let mut random = Random::new(seed + 1);
        let source = Side::source(&files);
        let (there, address) = Side::destination();
        std::thread::sleep(Duration::from_millis(500 + random.below(1500)));
        let migrate = source.migrate(&address, random.below(2));
        if random.below(3) == 0 {
            std::thread::sleep(Duration::from_micros(random.below(400_000)));
        } else {
            // In the switch-over or after it.
            wait_for("the switch-over", || {
                let stage = status(&there.socket)?["session"]["stage"].clone();
                ["ready", "running", "complete", "completed"]
                    .contains(&stage.as_str()?)
                    .then_some(())
            });
            std::thread::sleep(Duration::from_micros(random.below(300_000)));
        }
        let source_dies = random.below(2) == 0;
        let killed = if source_dies { &source } else { &there };
        killed.process.signal(Signal::KILL);
        // What was said before the kill is in the files.
        std::thread::sleep(STILL);
        let [before, after] = [&source, &there].map(|side| Heard::of(&side.text()));
        if let (Some(last), Some(first)) = (before.ticks.last(), after.ticks.first()) {
            assert!(last < first, "seed {seed}: the guest ran at both sides");
        }
        let outcome = if source_dies {
            settle_destination(there)
        } else {
            settle_source(source, migrate, &after)
        };
        *outcomes.entry(outcome).or_default() += 1;
    }
    println!("{outcomes:?}");
    assert!(outcomes.len() > 1, "the moments are not spread");
}
