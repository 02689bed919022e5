//! Running a command until it ends or a signal ends it.
//!
//! **Guarantee.** A signal that ends a process by default ends the run, but not before the command
//! and its descendants are gone. The command has a moment to end by itself. Descendants that
//! outlive the command are killed, also if no signal came.
//!
//! **Mechanism.** The signal is passed on as SIGTERM. A terminal sends SIGINT to the command too,
//! so the command then has a second before SIGTERM. Later comes SIGKILL. This process adopts
//! orphans, so that it finds the test program that an ended `cargo test` leaves.
//!
//! **Neighbours.** [`super`] makes the hosts before and removes them after.

use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_child_subreaper, wait};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// How long a command may take to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// How often this process looks for signals and for the end of the command.
const INTERVAL: Duration = Duration::from_millis(10);

/// Holds back the signals that would end this process.
pub(super) struct Supervisor {
    signals: Signals,
}

impl Supervisor {
    pub(super) fn new() -> io::Result<Self> {
        set_child_subreaper(Pid::from_raw(1))?;
        let signals = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM])?;
        Ok(Self { signals })
    }

    /// Runs the command. Returns its exit code as a shell would.
    pub(super) fn run(&mut self, command: &[OsString], environment: Vec<(String, String)>) -> u8 {
        if let Some(signal) = self.signals.pending().next() {
            return 128 + signal as u8;
        }
        let (program, arguments) = command.split_first().expect("clap requires a command");
        let mut command = Command::new(program);
        command.args(arguments).envs(environment);
        match command.spawn() {
            Ok(child) => self.watch(child),
            Err(why) => {
                eprintln!("two-hosts: cannot run {}: {why}", program.display());
                if why.kind() == io::ErrorKind::NotFound {
                    127
                } else {
                    126
                }
            }
        }
    }

    fn watch(&mut self, mut child: Child) -> u8 {
        // When SIGTERM is due, and then when SIGKILL is.
        let mut due: Option<Instant> = None;
        let mut next = Signal::TERM;
        loop {
            match child.try_wait() {
                Ok(None) => {}
                Ok(Some(status)) => {
                    // One of them may be on its way into a namespace, where it is not listed yet.
                    kill_orphans();
                    return code(status);
                }
                Err(why) => {
                    eprintln!("two-hosts: cannot wait for the command: {why}");
                    return super::FAILED;
                }
            }
            if let Some(signal) = self.signals.pending().next() {
                let wait = Duration::from_secs(u64::from(signal == SIGINT));
                due.get_or_insert_with(|| Instant::now() + wait);
            }
            if due.is_some_and(|due| Instant::now() >= due) {
                // The child has not been waited for, so its id is still its own.
                let _ = kill_process(Pid::from_child(&child), next);
                next = Signal::KILL;
                due = Some(Instant::now() + GRACE);
            }
            std::thread::sleep(INTERVAL);
        }
    }
}

/// Kills the children of this process, which are the orphans of the command, and then theirs.
fn kill_orphans() {
    let end = Instant::now() + GRACE;
    while Instant::now() < end {
        for child in children() {
            let _ = kill_process(child, Signal::KILL);
        }
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) => {}
            Ok(None) => std::thread::sleep(INTERVAL),
            Err(_) => return,
        }
    }
}

fn children() -> Vec<Pid> {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    let lists = threads
        .flatten()
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    let pids = lists.flat_map(|list| {
        let pids = list.split_whitespace().filter_map(|pid| pid.parse().ok());
        pids.filter_map(Pid::from_raw).collect::<Vec<_>>()
    });
    pids.collect()
}

fn code(status: ExitStatus) -> u8 {
    let signal = status.signal().map(|signal| 128 + signal);
    let code = status.code().or(signal).unwrap_or(255);
    u8::try_from(code).unwrap_or(255)
}
