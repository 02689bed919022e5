//! A pager in a process of its own, which can be killed.

use crate::mount::MountOrder;
use pageferry_pager::{Background, Pager, Restore, Settings};
use pageferry_testkit::LIMIT;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

/// The variable that has the order of a pager's process.
const ORDER: &str = "PAGEFERRY_PAGER_PROCESS";

/// The task of a process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) directory: PathBuf,
    pub(crate) take_over: bool,
    /// New restores by name.
    pub(crate) restores: BTreeMap<String, Restore>,
    /// How the memory of VMs is loaded from now on, by name.
    pub(crate) backgrounds: BTreeMap<String, Background>,
    /// A mount on the directory, in place of a pager.
    pub(crate) mount: Option<MountOrder>,
}

/// Becomes a pager in a process that [`PagerProcess::start`] has started. It answers each line by
/// the statuses of its restores, or ends the one that it names, and ends when its input does.
pub(crate) fn entry() {
    let Some(text) = std::env::var_os(ORDER) else {
        return;
    };
    let order: Order = serde_json::from_str(text.to_str().expect("UTF-8")).expect("an order");
    let stdin = std::io::stdin().as_fd().try_clone_to_owned();
    let mut control = UnixStream::from(stdin.expect("a descriptor"));
    if let Some(mount) = &order.mount {
        crate::mount::process(&order.directory, mount, control);
    }
    let settings = Settings {
        directory: order.directory,
        take_over: order.take_over,
        ..Settings::default()
    };
    let pager = match Pager::start(settings) {
        Ok(pager) => pager,
        Err(why) => {
            writeln!(control, "{why}").expect("a test that listens");
            std::process::exit(1);
        }
    };
    for (name, restore) in order.restores {
        let name = name.parse().expect("a name");
        pager.restore(&name, restore).expect("a restore");
    }
    for (name, background) in order.backgrounds {
        let name = name.parse().expect("a name");
        pager.set_background(&name, background).expect("set");
    }
    let lines = BufReader::new(control.try_clone().expect("a socket")).lines();
    let mut say = |line: &str| writeln!(control, "{line}").is_ok();
    if say("ready") {
        for line in lines.map_while(Result::ok) {
            if let Some(name) = line.strip_prefix("end ") {
                let ended = pager.end(&name.parse().expect("a name"), false);
                say(&ended.map_or_else(|why| why.to_string(), |()| "ended".to_owned()));
                continue;
            }
            say(&serde_json::to_string(&pager.list()).expect("JSON"));
        }
    }
    drop(pager);
    std::process::exit(0);
}

fn this_test() -> PathBuf {
    std::env::current_exe().expect("a path")
}

/// A pager's process. It is killed when this is dropped.
pub(crate) struct PagerProcess {
    child: Child,
    control: Option<BufReader<UnixStream>>,
    is_ready: bool,
}

impl PagerProcess {
    /// Starts it, and does not wait until it serves.
    pub(crate) fn start(order: &Order) -> Self {
        Self::spawn(Command::new(this_test()), order)
    }

    /// As [`PagerProcess::start`], by a program that runs the command behind its arguments.
    pub(crate) fn start_by(mut program: Command, order: &Order) -> Self {
        program.arg(this_test());
        Self::spawn(program, order)
    }

    fn spawn(mut command: Command, order: &Order) -> Self {
        let (here, there) = UnixStream::pair().expect("a socket pair");
        here.set_read_timeout(Some(LIMIT)).expect("a limit");
        let child = command
            .args(["--exact", "pager_process", "--nocapture"])
            .env(ORDER, serde_json::to_string(order).expect("JSON"))
            .stdin(Stdio::from(OwnedFd::from(there)))
            .stdout(Stdio::null())
            .spawn()
            .expect("a process");
        Self {
            child,
            control: Some(BufReader::new(here)),
            is_ready: false,
        }
    }

    /// As [`PagerProcess::start`], and waits until it serves.
    pub(crate) fn ready(order: &Order) -> Self {
        let mut process = Self::start(order);
        process.wait_ready();
        process
    }

    pub(crate) fn wait_ready(&mut self) {
        if !self.is_ready {
            assert_eq!(self.line(), "ready");
            self.is_ready = true;
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line, empty if the process has ended.
    fn line(&mut self) -> String {
        let mut line = String::new();
        let control = self.control.as_mut().expect("it was not told to end");
        control.read_line(&mut line).expect("an answer");
        line.trim_end().to_owned()
    }

    /// The statuses of its restores as JSON.
    pub(crate) fn list(&mut self) -> Vec<Value> {
        let control = self.control.as_mut().expect("it was not told to end");
        writeln!(control.get_mut(), "list").expect("a pager that listens");
        serde_json::from_str(&self.line()).expect("statuses")
    }

    /// Asks it to end a restore. Returns its answer.
    pub(crate) fn end_restore(&mut self, name: &str) -> String {
        let control = self.control.as_mut().expect("it was not told to end");
        writeln!(control.get_mut(), "end {name}").expect("a pager that listens");
        self.line()
    }

    /// Kills it.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("a signal");
        self.wait();
    }

    /// Lets it end by itself.
    pub(crate) fn end(&mut self) {
        self.control = None;
        assert!(self.wait().success());
    }

    /// Waits until it has ended.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        pageferry_testkit::wait_for("a pager to end", || {
            self.child.try_wait().expect("a child process")
        })
    }
}

impl Drop for PagerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
