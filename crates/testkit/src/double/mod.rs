//! What the doubles of VMMs have in common: a process of its own, orders for it, and a guest.
//!
//! **Guarantee.** A [`Double`] is a process that can be killed, and other processes can take its
//! descriptors. It ends when its test ends. Its guest knows what each page must contain.
//!
//! **Mechanism.** [`Double::start`] runs the test binary once more, which becomes the double in a
//! test at its root. Its standard input is one end of a socket pair. Each order is a line of JSON,
//! and gets a line.
//!
//! **Neighbours.** `firecracker` and `cloud_hypervisor` have what differs.

pub(crate) mod contents;
pub(crate) mod guest;
pub(crate) mod memory;
pub(crate) mod process;

use crate::firecracker::Fields;
use crate::{LIMIT, wait_for, wait_until};
use guest::Wrong;
use memory::Region;
use pageferry_userfault::uffd::{Features, UffdSupport};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// The variable that has the configuration in the double's process.
const CONFIG: &str = "PAGEFERRY_DOUBLE";

const ENDED: &str = "the double has ended, or has no test that calls `entry`";

/// The properties of a double. They travel to its process as JSON.
pub trait Config: Serialize + DeserializeOwned {
    /// The name of the test that becomes the double.
    const ENTRY: &'static str;

    /// What it needs of userfaultfd, or `None` if it needs no userfaultfd.
    fn needs(&self) -> Option<Features>;

    /// The API socket, as its process sees the path.
    fn api(&self) -> Option<PathBuf>;

    /// The command that runs this program again. Returns `None` if that is not possible here, after
    /// it has reported the test as skipped.
    #[track_caller]
    fn program(&self) -> Option<Command> {
        Some(Command::new(std::env::current_exe().expect("a path")))
    }
}

/// A piece of work that a double begins on a thread of its own. It may sleep on missing pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Task {
    /// Reads every page whole and checks it, by as many threads as there are vCPUs.
    VerifyAll,
    /// Reads this page whole and checks it.
    Read(u64),
    /// Writes this page. Its old contents are checked too.
    Write(u64),
    /// Removes pages that lie in one region, as the balloon does. Huge pages are removed whole
    /// only.
    Remove {
        /// The index of the first page of 4 KiB.
        first: u64,
        /// The number of pages of 4 KiB.
        pages: u64,
    },
}

/// What a test tells a double.
#[derive(Serialize, Deserialize)]
pub(crate) enum Order {
    Status,
    Run,
    Pause,
    Begin(Task),
    Quit,
    Connect(Fields, PathBuf),
    Snapshot(PathBuf),
    SlowDown(Duration),
}

/// The work of a double so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The state of its VM, in the VMM's words.
    pub state: String,
    /// The number of vCPUs and balloons that are within an access or a removal.
    pub active: u32,
    /// The number of threads of tasks that have not ended.
    pub tasks: u32,
    /// The number of removals.
    pub removals: u64,
    /// The number of times that a page had wrong contents.
    pub wrong: u64,
    /// The number of accesses of each vCPU.
    pub touches: Vec<u64>,
    /// The first wrong pages, 16 at most.
    pub first_wrong: Vec<Wrong>,
    /// Firecracker: the body of the `PUT /snapshot/load` that brought its VM, or null.
    pub loaded: Value,
    /// Firecracker: the data of its metadata service, or null.
    pub mmds: Value,
    /// Cloud Hypervisor: the page faults of a receiver.
    pub faults: u64,
    /// Cloud Hypervisor: the time at which a sender had paused its VM, or a receiver ran it
    /// (`CLOCK_MONOTONIC`).
    pub at: Duration,
    /// Cloud Hypervisor: how long a receiver took to ask for all pages, if it has all.
    pub served: Option<Duration>,
    /// Cloud Hypervisor: the end of the last migration: `sent`, `preserved`, `received`, or
    /// `failed: ..`.
    pub outcome: String,
}

impl Status {
    /// The accesses of all vCPUs.
    #[must_use]
    pub fn touched(&self) -> u64 {
        self.touches.iter().sum()
    }
}

/// A process that does what a VMM does. It is killed when this is dropped.
///
/// All calls panic if the process has ended, does not answer within [`LIMIT`], or refuses.
#[derive(Debug)]
pub struct Double {
    process: Child,
    control: BufReader<UnixStream>,
    regions: Vec<Region>,
}

impl Double {
    /// Starts a double. Its API listens if it has one, and its VM is paused if it has one. Returns
    /// `None` if userfaultfd does not serve it here, after it has reported the test as skipped.
    ///
    /// # Panics
    /// If the test binary has no test [`Config::ENTRY`] at its root that calls `entry`. If the
    /// configuration cannot be carried out. If `PAGEFERRY_REQUIRE` names `uffd` and it is not
    /// usable.
    #[must_use]
    #[track_caller]
    pub fn start<C: Config>(config: &C) -> Option<Self> {
        if config
            .needs()
            .is_some_and(|needs| !UffdSupport::probe().serves(needs))
        {
            crate::skip("uffd", "it does not serve this double");
            return None;
        }
        let (here, there) = UnixStream::pair().expect("a socket pair");
        here.set_read_timeout(Some(LIMIT)).expect("a limit");
        let process = config
            .program()?
            .args(["--exact", C::ENTRY, "--nocapture", "--include-ignored"])
            .env(CONFIG, serde_json::to_string(config).expect("JSON"))
            .stdin(Stdio::from(OwnedFd::from(there)))
            .stdout(Stdio::null())
            .spawn()
            .expect("a process");
        let mut double = Self {
            process,
            control: BufReader::new(here),
            regions: Vec::new(),
        };
        double.regions = double.answer().expect(ENDED).expect("the regions");
        Some(double)
    }

    /// The id of the double's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The regions of its memory, in the order of their offsets.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The mounts of its mount namespace, as the kernel lists them.
    #[must_use]
    pub fn mounts(&self) -> String {
        let path = format!("/proc/{}/mountinfo", self.pid());
        std::fs::read_to_string(path).expect("the list of mounts")
    }

    /// Firecracker: connects to a page server's socket and sends the handshake. The double then
    /// leaks its socket.
    ///
    /// # Errors
    /// The reason why it cannot connect or send. Firecracker would end now.
    pub fn connect(&mut self, socket: &Path, fields: Fields) -> Result<(), String> {
        self.ask(&Order::Connect(fields, socket.into()))
    }

    /// Lets the vCPUs and the balloon run.
    pub fn run(&mut self) {
        self.order(&Order::Run);
    }

    /// Stops the vCPUs and the balloon, and waits until each has ended its access or removal.
    pub fn pause(&mut self) {
        self.order(&Order::Pause);
        wait_until("the double's threads to pause", || {
            self.status().active == 0
        });
    }

    /// Cloud Hypervisor: writes a snapshot of the paused VM into a directory.
    pub fn snapshot(&mut self, directory: &Path) {
        self.order(&Order::Snapshot(directory.into()));
    }

    /// Cloud Hypervisor: lets a receiver pause behind each page that it gets from now on.
    pub fn slow_down(&mut self, pause: Duration) {
        self.order(&Order::SlowDown(pause));
    }

    /// Cloud Hypervisor: waits until the last migration of this process has ended.
    pub fn outcome(&mut self) -> Status {
        wait_for("the end of a migration", || {
            Some(self.status()).filter(|status| !status.outcome.is_empty())
        })
    }

    /// Begins a task.
    pub fn begin(&mut self, task: Task) {
        self.order(&Order::Begin(task));
    }

    /// Begins a task by which the double may end or stop before it answers. Afterwards only
    /// [`Double::pid`] and [`Double::wait`] have a meaning.
    pub fn begin_last(&mut self, task: Task) {
        self.say(&Order::Begin(task)).expect(ENDED);
    }

    /// Waits until all tasks have ended.
    pub fn finish(&mut self) {
        wait_until("the double's tasks", || self.status().tasks == 0);
    }

    /// Begins a task and waits until it has ended.
    pub fn perform(&mut self, task: Task) {
        self.begin(task);
        self.finish();
    }

    /// Checks all pages, and returns the status then.
    pub fn verify(&mut self) -> Status {
        self.perform(Task::VerifyAll);
        self.status()
    }

    /// Its work so far.
    pub fn status(&mut self) -> Status {
        self.ask(&Order::Status).expect("a status")
    }

    /// The state of its VM in the VMM's words, or `ended`.
    pub fn state(&mut self) -> String {
        let answer = self.say(&Order::Status).and_then(|()| self.answer());
        answer.map_or("ended".into(), |status: Result<Status, _>| {
            status.expect("a status").state
        })
    }

    /// Ends the double. Its exit code is 0 only if no page was ever wrong.
    #[must_use]
    pub fn quit(mut self) -> ExitStatus {
        self.say(&Order::Quit).expect(ENDED);
        self.wait()
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        self.process.kill().expect("a child process");
    }

    /// Waits until the process has ended, such as by a signal of a page server.
    pub fn wait(&mut self) -> ExitStatus {
        wait_for("the double to end", || {
            self.process.try_wait().expect("a child process")
        })
    }

    fn order(&mut self, order: &Order) {
        self.ask::<()>(order).expect("the double obeys");
    }

    fn ask<T: DeserializeOwned>(&mut self, order: &Order) -> Result<T, String> {
        self.say(order).expect(ENDED);
        self.answer().expect(ENDED)
    }

    fn say(&mut self, order: &Order) -> std::io::Result<()> {
        let line = serde_json::to_string(order).expect("JSON");
        writeln!(self.control.get_mut(), "{line}")
    }

    fn answer<T: DeserializeOwned>(&mut self) -> std::io::Result<Result<T, String>> {
        let mut line = String::new();
        match self.control.read_line(&mut line)? {
            0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(serde_json::from_str(&line).expect("an answer")),
        }
    }
}

impl Drop for Double {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The error is the reason, in words.
pub(crate) type Done<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics here")
}
