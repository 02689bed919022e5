//! The test's side of a double with an API.

use super::vmm::{CONFIG, Quirk};
use crate::{LIMIT, wait_for};
use pageferry_userfault::uffd::{Features, UffdSupport};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

/// The properties of a double with an API.
#[derive(Clone, Debug)]
pub struct VmmConfig {
    /// The API socket.
    pub api: PathBuf,
    /// The seed of the memory's contents.
    pub seed: u64,
    /// The sizes of the VM's regions in bytes, whole MiB in all. Without any there is no VM.
    pub regions: Vec<u64>,
    /// The number of threads that stand for vCPUs.
    pub vcpus: usize,
    /// The time between two removals of the balloon in microseconds, or `None` for no balloon.
    pub balloon_us: Option<u64>,
    /// What it does wrong.
    pub quirk: Quirk,
    /// The directory that becomes its root, in a mount namespace of its own. It has the API socket.
    pub jail: Option<PathBuf>,
}

/// The work of a [`VmmDouble`] so far.
#[derive(Clone, Debug)]
pub struct VmmStatus {
    /// The state of its VM, in Firecracker's words.
    pub state: String,
    /// The accesses of all vCPUs.
    pub touches: u64,
    /// The number of removals.
    pub removals: u64,
    /// The number of times that a page had wrong contents.
    pub wrong: u64,
    /// Whether all pages have been read by [`VmmDouble::verify`].
    pub verified: bool,
    /// The first wrong page.
    pub first_wrong: String,
    /// The body of the `PUT /snapshot/load` that brought its VM, or null.
    pub loaded: Value,
    /// The data of its metadata service, or null.
    pub mmds: Value,
}

/// A process with Firecracker's API, with or without a VM. It is killed when this is dropped.
///
/// All calls panic if the process has ended, or does not answer within [`LIMIT`].
#[derive(Debug)]
pub struct VmmDouble {
    process: Child,
    control: BufReader<UnixStream>,
}

impl VmmDouble {
    /// Starts a process. Its VM, if it has one, is paused. Returns `None` if userfaultfd is not
    /// usable here, after it has reported the test as skipped.
    ///
    /// # Panics
    /// As [`Double::start`](super::Double::start).
    #[must_use]
    #[track_caller]
    pub fn start(config: &VmmConfig) -> Option<Self> {
        if !UffdSupport::probe().serves(Features::EVENT_REMOVE) {
            crate::skip("uffd", "it does not report removals");
            return None;
        }
        let (here, there) = UnixStream::pair().expect("a socket pair");
        here.set_read_timeout(Some(LIMIT)).expect("a limit");
        let text = json!({
            "api": config.api, "seed": config.seed, "regions": config.regions,
            "vcpus": config.vcpus, "balloon_us": config.balloon_us,
            "quirk": config.quirk as usize, "states": [], "jail": config.jail,
        });
        let process = program(config.jail.as_deref())?
            .args([
                "--exact",
                "firecracker_double",
                "--nocapture",
                "--include-ignored",
            ])
            .env(CONFIG, text.to_string())
            .stdin(Stdio::from(OwnedFd::from(there)))
            .stdout(Stdio::null())
            .spawn()
            .expect("a process");
        let mut double = Self {
            process,
            control: BufReader::new(here),
        };
        assert_eq!(
            double.line(),
            "ready",
            "it needs a test 'firecracker_double'"
        );
        Some(double)
    }

    /// Lets the vCPUs and the balloon run.
    pub fn run(&mut self) {
        assert_eq!(self.ask("run"), "ok");
    }

    /// Stops the vCPUs and the balloon.
    pub fn pause(&mut self) {
        assert_eq!(self.ask("pause"), "ok");
    }

    /// Reads all pages of the VM, and returns the status then.
    pub fn verify(&mut self) -> VmmStatus {
        assert_eq!(self.ask("verify"), "ok");
        wait_for("a check of all pages", || {
            Some(self.status()).filter(|status| status.verified)
        })
    }

    /// The mounts of its mount namespace, as the kernel lists them.
    ///
    /// # Panics
    /// If the process has ended.
    #[must_use]
    pub fn mounts(&self) -> String {
        let path = format!("/proc/{}/mountinfo", self.process.id());
        std::fs::read_to_string(path).expect("the list of mounts")
    }

    /// Its work so far.
    pub fn status(&mut self) -> VmmStatus {
        let status: Value = serde_json::from_str(&self.ask("status")).expect("JSON");
        let number = |name: &str| status[name].as_u64().expect("a number");
        VmmStatus {
            state: status["state"].as_str().expect("a state").into(),
            touches: number("touches"),
            removals: number("removals"),
            wrong: number("wrong"),
            verified: status["verified"] == true,
            first_wrong: status["first_wrong"].to_string(),
            loaded: status["loaded"].clone(),
            mmds: status["mmds"].clone(),
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

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.control.read_line(&mut line).expect("an answer");
        line.trim_end_matches('\n').to_owned()
    }
}

/// The command that runs this program again, in a jail or not. Returns `None` if jails cannot be
/// made here, after it has reported the test as skipped.
#[track_caller]
fn program(jail: Option<&Path>) -> Option<Command> {
    let this = std::env::current_exe().expect("a path");
    let Some(jail) = jail else {
        return Some(Command::new(this));
    };
    let mut unshare = Command::new("unshare");
    if !unshare
        .arg("--mount")
        .arg("true")
        .status()
        .is_ok_and(|s| s.success())
    {
        crate::skip("jail", "`unshare --mount` fails: only root may");
        return None;
    }
    // A program needs its libraries, which a jailer has linked into the real one.
    let script = "set -e
        mount --bind \"$0\" \"$0\"
        cd \"$0\"
        for each in lib lib64 usr; do
            if [ -d /$each ]; then mkdir -p $each; mount --bind /$each $each; fi
        done
        touch program
        mount --bind \"$1\" program
        shift
        exec chroot . /program \"$@\"";
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", script])
        .arg(jail)
        .arg(this);
    Some(command)
}

impl Drop for VmmDouble {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
