//! The test's side of a double.

use super::child::CONFIG;
use super::config::Config;
use crate::{LIMIT, wait_for};
use pageferry_userfault::uffd::{Features, UffdSupport};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// The name of the test that calls [`entry`](super::entry).
const ENTRY: &str = "cloud_hypervisor_double";

/// The work of a double so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// `Running`, `Paused`, or `None` without a VM.
    pub state: String,
    /// The number of pages that vCPUs have checked.
    pub touches: u64,
    /// The number of times that a page had wrong contents.
    pub wrong: u64,
    /// The page faults of a receiver.
    pub faults: u64,
    /// Whether a receiver has asked for all pages.
    pub has_all: bool,
    /// Whether all pages have been checked.
    pub verified: bool,
    /// The time at which a sender had paused its VM, or a receiver ran it (`CLOCK_MONOTONIC`).
    pub at: Duration,
    /// How long a receiver took to ask for all pages.
    pub served: Duration,
    /// The first wrong page, in words.
    pub first_wrong: String,
    /// The end of the last migration: `sent`, `preserved`, `received`, or `failed: ..`.
    pub outcome: String,
}

/// A process that does what Cloud Hypervisor does in a migration. It is killed when this is
/// dropped.
///
/// All calls panic if the process has ended, or does not answer within [`LIMIT`].
#[derive(Debug)]
pub struct Double {
    process: Child,
    control: BufReader<UnixStream>,
}

impl Double {
    /// Starts a double, whose API listens. A VM is paused. Returns `None` if userfaultfd does not
    /// serve shared memory here, after it has reported the test as skipped.
    ///
    /// # Panics
    /// If the test binary has no test `cloud_hypervisor_double` at its root that calls
    /// [`entry`](super::entry). If `PAGEFERRY_REQUIRE` names `uffd` and it is not usable.
    #[must_use]
    #[track_caller]
    pub fn start(config: &Config) -> Option<Self> {
        if !UffdSupport::probe().serves(Features::MISSING_SHMEM | Features::MINOR_SHMEM) {
            crate::skip("uffd", "it does not serve shared memory");
            return None;
        }
        let (here, there) = UnixStream::pair().expect("a socket pair");
        here.set_read_timeout(Some(LIMIT)).expect("a limit");
        let process = Command::new(std::env::current_exe().expect("a path"))
            .args(["--exact", ENTRY, "--nocapture", "--include-ignored"])
            .env(CONFIG, config.to_text())
            .stdin(Stdio::from(OwnedFd::from(there)))
            .stdout(Stdio::null())
            .spawn()
            .expect("a process");
        let mut double = Self {
            process,
            control: BufReader::new(here),
        };
        let greeting = double.line();
        assert_eq!(greeting, "ready", "this test binary needs a test '{ENTRY}'");
        Some(double)
    }

    /// Lets the vCPUs run.
    pub fn run(&mut self) {
        assert_eq!(self.ask("run"), "ok");
    }

    /// Stops the vCPUs.
    pub fn pause(&mut self) {
        assert_eq!(self.ask("pause"), "ok");
    }

    /// Writes a snapshot of the paused VM into a directory.
    pub fn snapshot(&mut self, directory: &Path) {
        let directory = directory.to_str().expect("a path in UTF-8");
        assert_eq!(self.ask(&format!("snapshot {directory}")), "ok");
    }

    /// Lets a receiver pause behind each page that it gets from now on.
    pub fn slow_down(&mut self, pause: Duration) {
        let command = format!("slow-down {}", pause.as_micros());
        assert_eq!(self.ask(&command), "ok");
    }

    /// Checks all pages of the VM, and returns the status then.
    pub fn verify(&mut self) -> Status {
        assert_eq!(self.ask("verify"), "ok");
        wait_for("a check of all pages", || {
            Some(self.status()).filter(|status| status.verified)
        })
    }

    /// Waits until the last migration of this process has ended.
    pub fn outcome(&mut self) -> Status {
        wait_for("the end of a migration", || {
            Some(self.status()).filter(|status| !status.outcome.is_empty())
        })
    }

    /// Its work so far.
    pub fn status(&mut self) -> Status {
        let answer = self.ask("status");
        let mut parts = answer.splitn(3, '|');
        let mut part = || parts.next().expect("three parts").to_owned();
        let numbers = part();
        let words: Vec<&str> = numbers.split(' ').collect();
        let [state, touches, wrong, faults, has_all, verified, at, served] = words[..] else {
            panic!("the double's status is '{answer}'");
        };
        Status {
            state: state.into(),
            touches: touches.parse().expect("a number"),
            wrong: wrong.parse().expect("a number"),
            faults: faults.parse().expect("a number"),
            has_all: has_all == "true",
            verified: verified == "true",
            at: Duration::from_nanos(at.parse().expect("a number")),
            served: Duration::from_nanos(served.parse().expect("a number")),
            first_wrong: part(),
            outcome: part(),
        }
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        self.process.kill().expect("a child process");
    }

    /// Waits until the process has ended by itself, or was killed.
    pub fn wait(&mut self) -> ExitStatus {
        wait_for("the double to end", || {
            self.process.try_wait().expect("a child process")
        })
    }

    fn ask(&mut self, command: &str) -> String {
        writeln!(self.control.get_mut(), "{command}").expect("the double listens");
        let answer = self.line();
        assert!(!answer.is_empty(), "the double has ended");
        answer
    }

    /// The next line, or nothing if the process has ended.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.control.read_line(&mut line).expect("an answer");
        line.trim_end_matches('\n').to_owned()
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
