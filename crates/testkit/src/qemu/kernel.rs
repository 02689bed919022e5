//! A machine of QEMU on KVM, which runs a kernel of x86-64, and its move.

use super::monitor::Monitor;
use super::trace::{self, Traced};
use super::{Error, Qemu, failed};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The time between two looks at a migration.
const POLL: Duration = Duration::from_millis(20);
/// The passes of pre-copy that QEMU counts before it has sent all pages once.
const PASSES: u64 = 2;
/// The longest QEMU may take for its end.
const END: Duration = Duration::from_secs(60);

/// The kernel of a machine, and its hardware.
pub struct KernelSpec<'a> {
    /// The file of the kernel.
    pub kernel: &'a Path,
    /// The file of its initial RAM disk.
    pub initrd: &'a Path,
    /// Its command line.
    pub command_line: &'a str,
    /// The number of vCPUs.
    pub vcpus: u32,
    /// Guest memory, in bytes.
    pub memory_bytes: u64,
}

/// A machine that runs a kernel.
pub struct KernelMachine {
    monitor: Monitor,
    folder: TempDir,
}

/// The figures of a move.
pub struct KernelMove {
    /// What QEMU calls the downtime, in milliseconds.
    pub downtime_ms: f64,
    /// The destination's stalls.
    pub traced: Traced,
}

impl KernelMachine {
    /// Starts the kernel.
    pub fn boot(qemu: &Qemu, spec: &KernelSpec<'_>) -> Result<Self, Error> {
        Self::start(qemu, spec, |_, _| {})
    }

    fn start(
        qemu: &Qemu,
        spec: &KernelSpec<'_>,
        more: impl FnOnce(&mut Command, &TempDir),
    ) -> Result<Self, Error> {
        let folder = tempfile::tempdir()?;
        let mut command = Command::new(qemu.file());
        command
            .args(["-machine", "pc,memory-backend=ram", "-accel", "kvm"])
            .args(["-cpu", "host", "-smp", &spec.vcpus.to_string()])
            .args(["-m", &format!("{}M", spec.memory_bytes >> 20)])
            .arg("-object")
            .arg(format!(
                "memory-backend-memfd,id=ram,size={},share=on",
                spec.memory_bytes
            ))
            .args(["-display", "none", "-nodefaults", "-no-reboot"])
            .arg("-serial")
            .arg(format!("file:{}", folder.path().join("console").display()))
            .arg("-kernel")
            .arg(spec.kernel)
            .arg("-initrd")
            .arg(spec.initrd)
            .args(["-append", spec.command_line])
            .stderr(Stdio::inherit());
        more(&mut command, &folder);
        Ok(Self {
            monitor: Monitor::start(command)?,
            folder,
        })
    }

    /// The file with what the kernel has written.
    pub fn console(&self) -> PathBuf {
        self.folder.path().join("console")
    }

    /// Moves the kernel to another process, by pre-copy of all its pages and then post-copy.
    /// Returns the process where it runs. `go_on` ends a wait.
    pub fn moved<E: From<Error>>(
        mut self,
        qemu: &Qemu,
        spec: &KernelSpec<'_>,
        go_on: &dyn Fn() -> Result<(), E>,
    ) -> Result<(Self, KernelMove), E> {
        let mut there = Self::start(qemu, spec, |command, folder| {
            command.args(["-incoming", "defer", "-msg", "timestamp=on"]);
            command.arg("-D").arg(folder.path().join("trace"));
            for event in trace::EVENTS {
                command.args(["-trace", event]);
            }
        })?;
        for machine in [&mut self, &mut there] {
            machine
                .monitor
                .turn_on(&["postcopy-ram", "postcopy-preempt"])?;
        }
        // A limit of 0 is none.
        let limits = json!({ "max-bandwidth": 0, "max-postcopy-bandwidth": 0 });
        self.monitor.call("migrate-set-parameters", limits)?;
        let uri = format!("unix:{}", there.folder.path().join("in").display());
        let uri = json!({ "uri": uri });
        there.monitor.call("migrate-incoming", uri.clone())?;
        self.monitor.call("migrate", uri)?;
        let mut asked = false;
        let downtime_ms = loop {
            let states = [self.monitor.migration()?, there.monitor.migration()?];
            if states.iter().all(|state| state["status"] == "completed") {
                break states[0]["downtime"].as_f64();
            }
            let passes = states[0]["ram"]["dirty-sync-count"].as_u64();
            if !asked && passes.is_some_and(|passes| passes >= PASSES) {
                self.monitor.call("migrate-start-postcopy", json!({}))?;
                asked = true;
            }
            go_on()?;
            std::thread::sleep(POLL);
        };
        self.monitor.quit(Instant::now() + END)?;
        let took = KernelMove {
            downtime_ms: downtime_ms.ok_or_else(|| failed("it does not tell its downtime"))?,
            traced: there.traced()?,
        };
        Ok((there, took))
    }

    /// The stalls so far. QEMU writes a line at once.
    fn traced(&self) -> Result<Traced, Error> {
        let bytes = std::fs::read(self.folder.path().join("trace"));
        let bytes = bytes.map_err(|why| failed(format!("its trace cannot be read: {why}")))?;
        Ok(trace::read(&String::from_utf8_lossy(&bytes)))
    }

    /// What QEMU says of the machine: it runs, or why it does not.
    pub fn check(&mut self) -> Result<(), Error> {
        let state = self.monitor.call("query-status", json!({}))?;
        match state.get("status").and_then(Value::as_str) {
            Some("running") => Ok(()),
            state => Err(failed(format!(
                "its guest is '{}', and should run",
                state.unwrap_or_default()
            ))),
        }
    }
}
