//! A pseudo-terminal, and commands on it.

use super::{PAGEFERRY, Process, children_of};
use pageferry_testkit::{wait_for, wait_until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{
    InputModes, LocalModes, OptionalActions, OutputModes, SpecialCodeIndex, Termios, tcgetattr,
    tcsetattr,
};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A terminal with a user: this test.
pub(crate) struct Pty {
    user: File,
    line: File,
    shown: Arc<Mutex<Vec<u8>>>,
    close: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
}

impl Pty {
    pub(crate) fn new() -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let user = openpt(flags).unwrap();
        grantpt(&user).unwrap();
        unlockpt(&user).unwrap();
        let path = ptsname(&user, Vec::new()).unwrap().into_string().unwrap();
        let no_ctty = rustix::fs::OFlags::NOCTTY.bits() as i32;
        let mut open = OpenOptions::new();
        let line = open.read(true).write(true).custom_flags(no_ctty);
        let line = line.open(path).unwrap();
        let user = File::from(user);
        let shown = Arc::new(Mutex::new(Vec::new()));
        let close = Arc::new(AtomicBool::new(false));
        let (from, to, end) = (
            user.try_clone().unwrap(),
            Arc::clone(&shown),
            Arc::clone(&close),
        );
        let reader = std::thread::spawn(move || show(from, &to, &end));
        Self {
            user,
            line,
            shown,
            close,
            reader: Some(reader),
        }
    }

    /// The terminal as a standard stream of a command.
    pub(crate) fn stream(&self) -> Stdio {
        OwnedFd::from(self.line.try_clone().unwrap()).into()
    }

    /// Presses these keys.
    pub(crate) fn press(&self, keys: &[u8]) {
        (&self.user).write_all(keys).unwrap();
    }

    /// The bytes that were shown so far.
    pub(crate) fn shown(&self) -> Vec<u8> {
        self.shown.lock().unwrap().clone()
    }

    #[track_caller]
    pub(crate) fn wait_until_shown(&self, part: &[u8]) {
        let is_there = || self.shown().windows(part.len()).any(|bytes| bytes == part);
        wait_until(&String::from_utf8_lossy(part), is_there);
    }

    /// What decides how keys and text are treated.
    pub(crate) fn settings(&self) -> Settings {
        Settings::of(&tcgetattr(&self.user).unwrap())
    }

    /// Gives this terminal the settings of another one.
    pub(crate) fn set_like(&self, other: &Self) {
        let settings = tcgetattr(&other.user).unwrap();
        tcsetattr(&self.user, OptionalActions::Now, &settings).unwrap();
    }

    #[track_caller]
    pub(crate) fn wait_until_keys_are_passed_on(&self) {
        wait_until("the guest to have the keys", || {
            self.settings().passes_keys_on()
        });
    }

    /// Starts `pageferry` on this terminal, which is not its controlling one.
    pub(crate) fn start<S: AsRef<std::ffi::OsStr>>(&self, args: &[S]) -> Process {
        let mut command = Command::new(PAGEFERRY);
        command.args(args);
        Process::spawn_on(command, self.stream(), self.stream())
    }

    /// Starts `pageferry` as a shell on this terminal does. `before` is what the shell does first.
    /// The shell waits until it is dropped.
    pub(crate) fn start_in_session<S: AsRef<std::ffi::OsStr>>(
        &self,
        before: &str,
        args: &[S],
    ) -> (Process, u32) {
        let mut command = Command::new("setsid");
        let script = format!("{before}; \"$@\"; echo ended $?; sleep 1000");
        // The tests may run under `nohup`.
        command.args(["--ctty", "env", "--default-signal=HUP"]);
        command.args(["sh", "-c", &script, "sh", PAGEFERRY]);
        command.args(args);
        let shell = Process::spawn_on(command, self.stream(), self.stream());
        let child = wait_for("the command in the session", || {
            let children = children_of(shell.pid());
            let name = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm"));
            let ours = |pid: &u32| name(pid).is_ok_and(|name| name.trim_end() == "pageferry");
            children.into_iter().find(ours)
        });
        (shell, child)
    }

    /// Closes the terminal, as a window does.
    pub(crate) fn close(self) {
        drop(self);
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        self.close.store(true, Ordering::Release);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// Keeps what is shown, until `end` holds.
fn show(mut from: File, to: &Mutex<Vec<u8>>, end: &AtomicBool) {
    let mut bytes = [0; 4096];
    let limit = Timespec {
        tv_sec: 0,
        tv_nsec: 10_000_000,
    };
    while !end.load(Ordering::Acquire) {
        let mut ready = [PollFd::new(&from, PollFlags::IN)];
        if poll(&mut ready, Some(&limit)) == Ok(1)
            && ready[0].revents().contains(PollFlags::IN)
            && let Ok(read) = from.read(&mut bytes)
        {
            to.lock().unwrap().extend_from_slice(&bytes[..read]);
        }
    }
}

/// Settings of a terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    local: LocalModes,
    input: InputModes,
    output: OutputModes,
    least: u8,
}

impl Settings {
    fn of(termios: &Termios) -> Self {
        Self {
            local: termios.local_modes,
            input: termios.input_modes,
            output: termios.output_modes,
            least: termios.special_codes[SpecialCodeIndex::VMIN],
        }
    }

    /// The treatment of text.
    pub(crate) const fn output(&self) -> OutputModes {
        self.output
    }

    /// Whether each key is a byte for the guest, also Ctrl-C, Ctrl-S and Enter.
    pub(crate) fn passes_keys_on(&self) -> bool {
        let lines = LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG | LocalModes::IEXTEN;
        let changes = InputModes::IXON | InputModes::ICRNL;
        !self.local.intersects(lines) && !self.input.intersects(changes)
    }
}
