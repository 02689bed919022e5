//! Runs of the program.

use pageferry_testkit::wait_for;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

/// The program.
pub(crate) const BENCH: &str = env!("CARGO_BIN_EXE_pageferry-bench");

/// The end of a run.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    pub(crate) fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        Self {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    /// It failed with `code` and exactly one error line, which contains `part`.
    #[track_caller]
    pub(crate) fn assert_failed(&self, code: i32, part: &str) {
        assert_eq!(self.code, Some(code), "{self:?}");
        let errors = self.stderr.lines().filter(|line| line.contains("error: "));
        let errors: Vec<_> = errors.collect();
        assert_eq!(errors.len(), 1, "one sentence: {self:?}");
        assert!(errors[0].contains(part), "{part:?} in {:?}", errors[0]);
    }

    #[track_caller]
    pub(crate) fn assert_ok(&self) {
        assert_eq!(self.code, Some(0), "{self:?}");
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        self.assert_ok();
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e} in {self:?}"))
    }
}

/// Runs the program to its end.
pub(crate) fn bench<S: AsRef<std::ffi::OsStr>>(words: &[S]) -> Ended {
    ended(Command::new(BENCH).args(words))
}

/// Runs a command to its end.
pub(crate) fn ended(command: &mut Command) -> Ended {
    Ended::of(command.output().expect("the program starts"))
}

/// A run that has not ended. Dropping it kills it.
pub(crate) struct Running(Child);

impl Running {
    /// Starts the program, and waits until it says `part` on stderr.
    pub(crate) fn until_said(words: &[&str], part: &str) -> Self {
        let mut child = Command::new(BENCH)
            .args(words)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let errors = BufReader::new(child.stderr.take().expect("a pipe"));
        let running = Self(child);
        let mut lines = errors.lines();
        assert!(
            lines.any(|line| line.expect("a line").contains(part)),
            "ended without '{part}'"
        );
        // The rest must not fill the pipe.
        std::thread::spawn(move || lines.count());
        running
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Sends SIGINT, and returns the exit code.
    pub(crate) fn interrupt(mut self) -> Option<i32> {
        kill_process(Pid::from_child(&self.0), Signal::INT).expect("it runs");
        wait_for("the end", || self.0.try_wait().expect("a child")).code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
