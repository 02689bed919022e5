//! Shared by all tests of the command line: processes with deadlines, a VM to migrate, a slow link.

pub(crate) mod certificates;
pub(crate) mod link;
pub(crate) mod peer;
#[cfg(target_arch = "x86_64")]
pub(crate) mod service_filter;
pub(crate) mod service_manager;
pub(crate) mod terminal;
pub(crate) mod vmms;

use pageferry_testkit::shaper::{Plan, Shaper};
use pageferry_testkit::{LIMIT, wait_for, wait_until};
use serde_json::Value;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The program.
pub(crate) const PAGEFERRY: &str = env!("CARGO_BIN_EXE_pageferry");

/// A test's directory. Dropping it checks nothing; [`Dir::assert_empty`] does.
pub(crate) struct Dir(PathBuf);

impl Dir {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pf-test-{}-{number}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Checks that nothing was left behind.
    pub(crate) fn assert_empty(&self) {
        // The user's directory for sockets stays, without sockets.
        let _ = std::fs::remove_dir(self.path("pageferry"));
        let left: Vec<_> = std::fs::read_dir(&self.0)
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The end of a command.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    /// The command failed with `code` and exactly one error line, which contains `part`.
    #[track_caller]
    pub(crate) fn assert_failed(&self, code: i32, part: &str) {
        assert_eq!(self.code, Some(code), "{self:?}");
        let errors: Vec<_> = self
            .stderr
            .lines()
            .filter(|l| l.contains("error: "))
            .collect();
        assert_eq!(errors.len(), 1, "one sentence: {self:?}");
        assert!(errors[0].contains(part), "{part:?} in {:?}", errors[0]);
    }

    #[track_caller]
    pub(crate) fn assert_ok(&self) {
        assert_eq!(self.code, Some(0), "{self:?}");
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e} in {self:?}"))
    }
}

/// A running command. Dropping it kills it.
pub(crate) struct Process {
    child: Child,
    stdout: Output,
    stderr: Output,
}

/// The output of a command to stdout or stderr so far.
struct Output {
    so_far: Arc<Mutex<Vec<u8>>>,
    thread: Option<JoinHandle<()>>,
}

impl Output {
    fn of(mut from: impl Read + Send + 'static) -> Self {
        let so_far = Arc::new(Mutex::new(Vec::new()));
        let ours = Arc::clone(&so_far);
        let thread = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut bytes) {
                ours.lock().unwrap().extend_from_slice(&bytes[..n]);
            }
        });
        Self {
            so_far,
            thread: Some(thread),
        }
    }

    fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.so_far.lock().unwrap()).into_owned()
    }

    /// Nothing can write to it any more.
    fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// The whole output, once nothing can write to it any more.
    fn whole(&mut self) -> String {
        if let Some(thread) = self.thread.take() {
            wait_until("the end of the output", || thread.is_finished());
            thread.join().unwrap();
        }
        self.so_far()
    }
}

impl Process {
    /// Starts `pageferry` with `args`. Its temporary files, and sockets that have no other place,
    /// go to `tmp`.
    pub(crate) fn start<S: AsRef<std::ffi::OsStr>>(args: &[S], tmp: &Dir) -> Self {
        Self::start_by(Command::new(PAGEFERRY), args, tmp)
    }

    /// As [`Process::start`], by a command that starts `pageferry`.
    pub(crate) fn start_by<S: AsRef<std::ffi::OsStr>>(
        mut command: Command,
        args: &[S],
        tmp: &Dir,
    ) -> Self {
        command
            .args(args)
            .env("TMPDIR", &tmp.0)
            .env("XDG_RUNTIME_DIR", &tmp.0);
        Self::spawn(command)
    }

    pub(crate) fn spawn(command: Command) -> Self {
        Self::spawn_reading(command, Stdio::null())
    }

    /// As [`Process::spawn`], with this as the descriptor 0.
    pub(crate) fn spawn_reading(command: Command, stdin: Stdio) -> Self {
        let (from, to) = std::io::pipe().unwrap();
        let mut process = Self::spawn_on(command, stdin, to.into());
        process.stdout = Output::of(from);
        process
    }

    /// As [`Process::spawn`], with these as the descriptors 0 and 1. Only the standard error is
    /// kept.
    pub(crate) fn spawn_on(mut command: Command, stdin: Stdio, stdout: Stdio) -> Self {
        let mut child = command
            .stdin(stdin)
            .stdout(stdout)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = Output::of(child.stderr.take().unwrap());
        Self {
            child,
            stdout: Output::of(std::io::empty()),
            stderr,
        }
    }

    /// Waits until the process has written a whole line that contains `part`. Returns the rest of
    /// the line.
    #[track_caller]
    pub(crate) fn wait_until_said(&self, part: &str) -> String {
        let outputs = [&self.stdout, &self.stderr];
        wait_for(part, || {
            let ended = outputs.iter().all(|output| output.has_ended());
            let found = outputs.iter().find_map(|output| {
                let text = output.so_far();
                let (_, behind) = text.split_once(part)?;
                Some(behind.split_once('\n')?.0.to_owned())
            });
            if ended && found.is_none() {
                panic!("ended without '{part}': {}", self.said_on_stderr());
            }
            found
        })
    }

    /// The standard output so far.
    pub(crate) fn said(&self) -> String {
        self.stdout.so_far()
    }

    /// The standard error so far.
    pub(crate) fn said_on_stderr(&self) -> String {
        self.stderr.so_far()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub(crate) fn interrupt(&self) {
        self.signal(rustix::process::Signal::INT);
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits for the end of the process, and fails the test if that takes too long.
    #[track_caller]
    pub(crate) fn end(mut self) -> Ended {
        let deadline = Instant::now() + LIMIT;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > deadline {
                let _ = self.child.kill();
                let _ = self.child.wait();
                let stderr = self.stderr.whole();
                panic!("did not end within {LIMIT:?}; stderr: {stderr}");
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        Ended {
            code: status.code(),
            stdout: self.stdout.whole(),
            stderr: self.stderr.whole(),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `pageferry` to its end.
#[track_caller]
pub(crate) fn pageferry<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Ended {
    let tmp = Dir::new();
    let ended = Process::start(args, &tmp).end();
    tmp.assert_empty();
    ended
}

/// The status of the VM at `socket`; `None` if there is none or the socket is busy.
pub(crate) fn status(socket: &Path) -> Option<Value> {
    let answer = ask(socket, "{\"command\":\"status\"}\n")?;
    Some(answer["result"].clone()).filter(|result| !result.is_null())
}

/// Sends one line to a control socket. Returns the first line of the answer.
pub(crate) fn ask(socket: &Path, line: &str) -> Option<Value> {
    use std::io::{BufRead, BufReader, Write};
    let mut stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    stream.write_all(line.as_bytes()).ok()?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).ok()?;
    serde_json::from_str(&answer).ok()
}

/// The number of pages that the guest of `socket` has done.
pub(crate) fn pages_done(socket: &Path) -> u64 {
    let status = status(socket).expect("a VM");
    let done = status["guest"]["pages_done"]
        .as_array()
        .expect("progress")
        .clone();
    done.iter().map(|v| v.as_u64().unwrap_or(0)).sum()
}

/// The VM is here and its guest makes progress, without errors.
#[track_caller]
pub(crate) fn assert_runs_on(socket: &Path) {
    wait_for("the VM to be running", || {
        (status(socket)?["state"] == "running").then_some(())
    });
    let before = pages_done(socket);
    wait_for("the guest to make progress", || {
        (pages_done(socket) > before + 100).then_some(())
    });
    assert_eq!(status(socket).unwrap()["guest"]["errors"], 0);
}

/// The VM is here and runs, and every page of it is right.
#[track_caller]
pub(crate) fn assert_whole(socket: &Path) {
    assert_runs_on(socket);
    pageferry(&["verify", "--vm", socket.to_str().unwrap()]).assert_ok();
}

/// Waits until the guest has written all of its memory, so that no page of it is zero.
#[track_caller]
pub(crate) fn wait_until_all_is_written(socket: &Path) {
    wait_for("the guest to have written all of it", || {
        let passes = status(socket)?["guest"]["pass"].clone();
        let written = |pass: &Value| pass.as_u64().is_some_and(|pass| pass > 1);
        passes.as_array()?.iter().all(written).then_some(())
    });
}

/// Waits until the control socket of `process` serves no client, so that there is room.
pub(crate) fn wait_for_no_clients(process: &Process) {
    let tasks = PathBuf::from(format!("/proc/{}/task", process.pid()));
    wait_for("its clients to be gone", || {
        let busy = std::fs::read_dir(&tasks).unwrap().any(|task| {
            std::fs::read_to_string(task.unwrap().path().join("comm"))
                .is_ok_and(|name| name.trim_end() == "client")
        });
        (!busy).then_some(())
    });
}

/// A small VM in a separate process.
pub(crate) struct Source {
    pub(crate) process: Process,
    pub(crate) socket: PathBuf,
    pub(crate) dir: Dir,
}

impl Source {
    /// Two vCPUs and `memory` on the soft engine, running.
    #[track_caller]
    pub(crate) fn start(memory: &str) -> Self {
        Self::start_on("soft", memory)
    }

    /// Two vCPUs and `memory` on this engine, running.
    #[track_caller]
    pub(crate) fn start_on(engine: &str, memory: &str) -> Self {
        Self::start_by(Command::new(PAGEFERRY), engine, memory)
    }

    /// As [`Source::start_on`], by a command that starts `pageferry`.
    #[track_caller]
    pub(crate) fn start_by(command: Command, engine: &str, memory: &str) -> Self {
        let dir = Dir::new();
        let socket = dir.path("vm");
        let process = Process::start_by(
            command,
            &[
                "run",
                "--engine",
                engine,
                "--vcpus",
                "2",
                "--memory",
                memory,
                // Guests at full speed would take the cores from the tests.
                "--rest",
                "300us",
                "--control",
                socket.to_str().unwrap(),
            ],
            &dir,
        );
        let source = Self {
            process,
            socket,
            dir,
        };
        wait_for("the VM", || {
            status(&source.socket).filter(|s| s["state"] == "running")
        });
        source
    }

    /// Runs `pageferry migrate` to `to`.
    pub(crate) fn migrate(&self, to: &str) -> Process {
        self.migrate_with(to, &[])
    }

    /// Runs `pageferry migrate` to `to` with more arguments.
    pub(crate) fn migrate_with(&self, to: &str, more: &[&str]) -> Process {
        let socket = self.socket.to_str().unwrap();
        let mut args = vec!["migrate", "--vm", socket, "--to", to, "--json"];
        args.extend(more);
        Process::start(&args, &self.dir)
    }

    /// As [`wait_until_all_is_written`], of this VM.
    #[track_caller]
    pub(crate) fn wait_until_all_is_written(&self) {
        wait_until_all_is_written(&self.socket);
    }

    /// The guest runs on, all its memory is right, and it ends leaving nothing behind.
    #[track_caller]
    pub(crate) fn assert_unharmed(self) {
        assert_runs_on(&self.socket);
        pageferry(&["verify", "--vm", self.socket.to_str().unwrap()]).assert_ok();
        self.process.interrupt();
        self.process.end().assert_ok();
        self.dir.assert_empty();
    }
}

/// `pageferry receive` on a unix socket.
pub(crate) struct Destination {
    pub(crate) process: Process,
    pub(crate) socket: PathBuf,
    pub(crate) address: String,
    pub(crate) dir: Dir,
}

impl Destination {
    #[track_caller]
    pub(crate) fn start(more: &[&str]) -> Self {
        let dir = Dir::new();
        let (socket, listen) = (dir.path("vm"), dir.path("in"));
        let address = format!("unix:{}", listen.display());
        let mut args = vec![
            "receive",
            "--listen",
            &address,
            "--control",
            socket.to_str().unwrap(),
        ];
        args.extend(more);
        let process = Process::start(&args, &dir);
        wait_for("the destination", || status(&socket));
        // The socket's file is no sign: it exists a moment before anybody listens.
        process.wait_until_said("listening on ");
        Self {
            process,
            socket,
            address,
            dir,
        }
    }

    /// A destination on a free port of the loopback interface.
    #[track_caller]
    pub(crate) fn start_on_tcp(more: &[&str]) -> Self {
        Self::start_by(Command::new(PAGEFERRY), "127.0.0.1:0", more)
    }

    /// A destination that listens on a TCP address, by a command that starts `pageferry`.
    #[track_caller]
    pub(crate) fn start_by(command: Command, listen: &str, more: &[&str]) -> Self {
        let dir = Dir::new();
        let socket = dir.path("vm");
        let mut args = vec!["receive", "--listen", listen];
        args.extend(["--control", socket.to_str().unwrap()]);
        args.extend(more);
        let process = Process::start_by(command, &args, &dir);
        let address = process.wait_until_said("listening on tcp:");
        Self {
            process,
            socket,
            address,
            dir,
        }
    }
}

/// A way to a destination on which post-copy of 16 MiB takes a minute. So a test on a busy machine
/// acts before its end. `throttle(None)` lets the rest move fast.
pub(crate) fn held_link(address: &str) -> Shaper {
    let plan = Plan {
        rate: Some(256 << 10),
        ..Plan::default()
    };
    Shaper::start(address.parse().unwrap(), plan).unwrap()
}

/// Waits for the guest to run at the destination with this socket, before its memory is there.
#[track_caller]
pub(crate) fn wait_for_handover(migrate: &mut Process, there: &Path) {
    wait_during(migrate, "the guest to run there", || {
        (status(there)?["session"]["stage"] == "running").then_some(())
    });
}

/// As [`wait_for`], for something that only happens while the VM moves.
#[track_caller]
pub(crate) fn wait_during<T>(
    migrate: &mut Process,
    what: &str,
    mut ready: impl FnMut() -> Option<T>,
) -> T {
    wait_for(what, || {
        let moves = migrate.is_running();
        ready().or_else(|| {
            assert!(moves, "the migration ended: {what}");
            None
        })
    })
}

/// The process ids whose parent is `parent`.
pub(crate) fn children_of(parent: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
            continue;
        };
        // The name in parentheses may contain anything. The parent is the second field behind it.
        let Some((_, rest)) = stat.rsplit_once(')') else {
            continue;
        };
        if rest.split_whitespace().nth(1) == Some(&parent.to_string()) {
            found.push(pid);
        }
    }
    found
}

/// Whether a process with this id exists and is not a zombie.
pub(crate) fn is_alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| Some(stat.rsplit_once(')')?.1.trim_start().chars().next()? != 'Z'))
        .unwrap_or(false)
}
