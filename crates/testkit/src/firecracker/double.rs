//! The test's side of a double.

use super::child::CONFIG;
use super::config::Config;
use super::guest::Wrong;
use super::handshake::Fields;
use super::memory::Region;
use crate::{LIMIT, wait_until};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

/// The name of the test that calls [`entry`](super::entry).
const ENTRY: &str = "firecracker_double";

/// A piece of work that a double begins on a thread of its own. It may sleep on missing pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

impl Task {
    fn command(self) -> String {
        match self {
            Self::VerifyAll => "task verify".to_owned(),
            Self::Read(page) => format!("task read {page}"),
            Self::Write(page) => format!("task write {page}"),
            Self::Remove { first, pages } => format!("task remove {first} {pages}"),
        }
    }
}

/// The work of a double so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
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
}

/// A process that does what Firecracker does with its memory in a restore. It is killed when this
/// is dropped.
///
/// All calls panic if the process has ended, or does not answer within [`LIMIT`].
#[derive(Debug)]
pub struct Double {
    process: Child,
    control: BufReader<UnixStream>,
    regions: Vec<Region>,
}

impl Double {
    /// Starts a double. It has mapped and registered its memory, and nothing runs. Returns `None`
    /// if userfaultfd is not usable here, after it has reported the test as skipped.
    ///
    /// # Panics
    /// If the test binary has no test `firecracker_double` at its root that calls
    /// [`entry`](super::entry). If the configuration cannot be carried out. If `PAGEFERRY_REQUIRE`
    /// names `uffd` and it is not usable.
    #[must_use]
    #[track_caller]
    pub fn start(config: &Config) -> Option<Self> {
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
            regions: Vec::new(),
        };
        let greeting = double.line();
        let (word, rest) = greeting.split_once(' ').unwrap_or((&greeting, ""));
        match word {
            "ready" => double.regions = rest.split(';').map(region).collect(),
            "skip" => {
                crate::skip("uffd", rest);
                return None;
            }
            "" => panic!("the double ended at once: this test binary needs a test '{ENTRY}'"),
            _ => panic!("{greeting}"),
        }
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

    /// Connects to a page server's socket and sends the handshake. The double then leaks its
    /// socket.
    ///
    /// # Errors
    /// The reason why it cannot connect or send. Firecracker would end now.
    pub fn connect(&mut self, socket: &Path, fields: Fields) -> Result<(), String> {
        let fields = match fields {
            Fields::Both => "both",
            Fields::KibOnly => "kib",
            Fields::Unknown => "unknown",
        };
        let socket = socket.to_str().expect("a path in UTF-8");
        match self.ask(&format!("connect {fields} {socket}")) {
            answer if answer == "ok" => Ok(()),
            answer => Err(answer),
        }
    }

    /// Lets the vCPUs and the balloon run.
    pub fn run(&mut self) {
        self.order("run");
    }

    /// Stops the vCPUs and the balloon, and waits until each has ended its access or removal.
    pub fn pause(&mut self) {
        self.order("pause");
        wait_until("the double's threads to pause", || {
            self.status().active == 0
        });
    }

    /// Begins a task.
    pub fn begin(&mut self, task: Task) {
        self.order(&task.command());
    }

    /// Begins a task by which the double may end or stop before it answers. Afterwards only
    /// [`Double::pid`] and [`Double::wait`] have a meaning.
    pub fn begin_last(&mut self, task: Task) {
        self.say(&task.command());
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

    /// Its work so far.
    pub fn status(&mut self) -> Status {
        let answer = self.ask("status");
        let words: Vec<&str> = answer.split(' ').collect();
        let [active, tasks, removals, wrong, touches, first_wrong] = words[..] else {
            panic!("the double's status is '{answer}'");
        };
        let parts = |text: &str, at: char| {
            let texts: Vec<String> = text.split(at).map(str::to_owned).collect();
            texts.into_iter().filter(|text| !text.is_empty())
        };
        Status {
            active: active.parse().expect("a number"),
            tasks: tasks.parse().expect("a number"),
            removals: removals.parse().expect("a number"),
            wrong: wrong.parse().expect("a number"),
            touches: parts(touches, ',')
                .map(|each| each.parse().expect("a number"))
                .collect(),
            first_wrong: parts(first_wrong, ';')
                .map(|each| wrong_page(&each))
                .collect(),
        }
    }

    /// Ends the double. Its exit code is 0 only if no page was ever wrong.
    #[must_use]
    pub fn quit(mut self) -> ExitStatus {
        self.say("quit");
        self.wait()
    }

    /// Waits until the double has ended, such as by a signal of the page server.
    #[must_use]
    pub fn wait(mut self) -> ExitStatus {
        crate::wait_for("the double to end", || {
            self.process.try_wait().expect("a child process")
        })
    }

    fn order(&mut self, command: &str) {
        assert_eq!(
            self.ask(command),
            "ok",
            "the double's answer to '{command}'"
        );
    }

    fn ask(&mut self, command: &str) -> String {
        self.say(command);
        let answer = self.line();
        assert!(!answer.is_empty(), "the double has ended");
        answer
    }

    fn say(&mut self, command: &str) {
        writeln!(self.control.get_mut(), "{command}").expect("the double listens");
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

fn region(text: &str) -> Region {
    let numbers: Vec<u64> = text
        .split(',')
        .map(|number| number.parse().expect("a number"))
        .collect();
    let [base, size, offset] = numbers[..] else {
        panic!("the double's region is '{text}'");
    };
    Region { base, size, offset }
}

fn wrong_page(text: &str) -> Wrong {
    let mut parts = text.split(',');
    let mut next = || parts.next().expect("three parts");
    Wrong {
        page: next().parse().expect("a number"),
        expected: next().parse().expect("contents"),
        found: next().parse().expect("contents"),
    }
}
