//! QEMU's control protocol (QMP): one JSON object a line, over the standard input and output of its
//! process.

use super::{Error, failed};
use rustix::process::Pid;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The longest QEMU may take for an answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// A QEMU process. Dropping this kills it and reaps it.
#[derive(Debug)]
pub(super) struct Monitor {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Monitor {
    /// Starts QEMU by `command`, which needs no arguments for the monitor.
    pub(super) fn start(mut command: Command) -> Result<Self, Error> {
        let mut child = command
            .args(["-qmp", "stdio"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|why| failed(format!("it does not start: {why}")))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed("its standard input and output are not pipes"));
        };
        let (send, lines) = channel();
        // It ends when QEMU does, so dropping the monitor ends it.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let mut monitor = Self {
            child,
            input,
            lines,
        };
        monitor.line()?;
        monitor.call("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    /// The process id.
    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Ends QEMU and waits for its end, until `deadline`.
    pub(super) fn quit(&mut self, deadline: Instant) -> Result<(), Error> {
        // It may end before it answers.
        self.send("quit", json!({}))?;
        while !matches!(self.child.try_wait(), Ok(Some(_))) {
            if Instant::now() > deadline {
                return Err(failed("it does not end"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Calls a command. Events that come before its answer are dropped.
    pub(super) fn call(&mut self, name: &str, arguments: Value) -> Result<Value, Error> {
        self.send(name, arguments)?;
        loop {
            let mut answer = self.line()?;
            if let Some(error) = answer.get("error") {
                let why = error.get("desc").and_then(Value::as_str);
                let why = why.unwrap_or("it gives no reason");
                return Err(failed(format!("it refuses '{name}': {why}")));
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    /// Turns capabilities of migrations on.
    pub(super) fn turn_on(&mut self, capabilities: &[&str]) -> Result<(), Error> {
        let on = |name| json!({ "capability": name, "state": true });
        let all: Vec<Value> = capabilities.iter().map(on).collect();
        self.call("migrate-set-capabilities", json!({ "capabilities": all }))?;
        Ok(())
    }

    /// What QEMU says of its migration, which has not failed.
    pub(super) fn migration(&mut self) -> Result<Value, Error> {
        let state = self.call("query-migrate", json!({}))?;
        if state["status"] == "failed" {
            let why = state["error-desc"].as_str();
            let why = why.unwrap_or("it gives no reason");
            return Err(failed(format!("its migration failed: {why}")));
        }
        Ok(state)
    }

    /// Sends a command by one write: QEMU acts on it when it has the last brace.
    fn send(&mut self, name: &str, arguments: Value) -> Result<(), Error> {
        let command = json!({ "execute": name, "arguments": arguments });
        let line = format!("{command}\n");
        let sent = self.input.write_all(line.as_bytes());
        sent.map_err(|_| self.ended())
    }

    fn line(&mut self) -> Result<Value, Error> {
        let line = match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => return Err(failed("it does not answer")),
            Err(RecvTimeoutError::Disconnected) => return Err(self.ended()),
        };
        serde_json::from_str(&line)
            .map_err(|_| failed(format!("its monitor sent '{line}', which is not JSON")))
    }

    /// The error of a QEMU that has closed its monitor.
    fn ended(&mut self) -> Error {
        // Its standard output is closed, so it ends now. A kill comes too late to change that.
        let _ = self.child.kill();
        let why = match self.child.wait() {
            Ok(status) => format!("it ended ({status}); its message is above if it has one"),
            Err(why) => format!("it ended: {why}"),
        };
        failed(why)
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
