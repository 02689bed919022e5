//! The demo's destination: a child process that never outlives the demo.
//!
//! The child asks the kernel to end it with its parent, for whatever reason the parent ends. It has
//! its own process group, so that the parent handles Ctrl-C. Dropping this kills the child and
//! waits for it.

use crate::args::{DemoArgs, DemoGuest};
use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::exit::{Exit, Failure};
use crate::signals::Interrupts;
use pageferry_hostfs::Folder;
use pageferry_machine::{Delivery, Engine};
use pageferry_transport::address::Address;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// The time limit for the child to report its address, and to end. It is far more than needed, as a
/// busy host may delay the child.
const LIMIT: Duration = Duration::from_secs(60);

/// The destination's process.
#[derive(Debug)]
pub(super) struct Child {
    process: std::process::Child,
    control: PathBuf,
    errors: PathBuf,
    address: Address,
    /// Its standard output after its address: the guest's console, if the guest is Linux.
    out: Option<ChildStdout>,
    /// Removed after the process was waited for: fields drop in this order.
    _dir: Folder,
}

impl Child {
    /// Starts the child and waits until it listens.
    ///
    /// # Errors
    /// The child's failure.
    pub(super) fn start(
        args: &DemoArgs,
        engine: Engine,
        interrupts: &Interrupts,
    ) -> Result<Self, Failure> {
        let delivery = match (args.delivery.delivery.0, engine) {
            (Some(delivery), _) => delivery.name(),
            // The child need not try KVM's.
            (None, Engine::Soft) => Delivery::Exit.name(),
            (None, Engine::Kvm) => "auto",
        };
        let dir = Folder::within(&std::env::temp_dir())
            .map_err(|why| Failure::os("cannot make a directory for temporary files", why))?;
        let control = dir.path().join("destination");
        let errors = dir.path().join("errors");
        let cannot = |e: std::io::Error| Failure::os("cannot start the destination's process", e);
        // An executable that was replaced meanwhile is still reachable under this name.
        let exe = std::env::current_exe().ok().filter(|path| path.exists());
        let mut command = Command::new(exe.unwrap_or_else(|| "/proc/self/exe".into()));
        command
            .arg0("pageferry")
            .args(["receive", "--listen", "127.0.0.1:0", "--control"])
            .arg(&control)
            .args(["--delivery", delivery])
            .args(["--userfaultfds", &args.delivery.userfaultfds.to_string()])
            .args(["--fault-readers", &args.delivery.fault_readers.to_string()])
            .args(["--backing", args.backing.backing.name()])
            // The demo makes such a VM anyhow: its size is the user's choice.
            .args(["--max-vcpus", &args.machine.vcpus.to_string()])
            .args(args.backing.ignore_limits.then_some("--ignore-limits"))
            .args(["--child-of", &std::process::id().to_string()])
            .args(args.corrupt_page.then_some("--corrupt-page"))
            .args((args.guest == DemoGuest::Linux).then_some("--console=-"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&errors).map_err(cannot)?)
            .process_group(0);
        let mut process = command.spawn().map_err(cannot)?;
        let out = process.stdout.take();
        let mut child = Self {
            process,
            out,
            control,
            errors,
            // Replaced by the child's report.
            address: Address::Unix(dir.path().join("unknown")),
            _dir: dir,
        };
        child.address = child.hear(interrupts)?;
        Ok(child)
    }

    /// Reads the address from the child's stdout.
    fn hear(&mut self, interrupts: &Interrupts) -> Result<Address, Failure> {
        let mut out = self.console();
        let deadline = Instant::now() + LIMIT;
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            interrupts.check()?;
            if Instant::now() > deadline {
                return Err(self.failed("it did not say where it listens"));
            }
            let wait = Timespec {
                tv_sec: 0,
                tv_nsec: Interrupts::POLL.subsec_nanos().into(),
            };
            let mut fds = [PollFd::new(&out, PollFlags::IN)];
            match poll(&mut fds, Some(&wait)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(e) => return Err(Failure::os("cannot hear the destination", e)),
            }
            let mut byte = [0];
            match out.read(&mut byte) {
                Ok(1) if line.len() < 256 => line.push(byte[0]),
                Ok(_) => return Err(self.failed("it ended before it listened")),
                Err(e) => return Err(Failure::os("cannot hear the destination", e)),
            }
        }
        self.out = Some(out);
        let text = String::from_utf8_lossy(&line);
        text.trim()
            .parse()
            .map_err(|_| self.failed("it did not say where it listens"))
    }

    /// Takes the child's standard output. It may be taken once.
    pub(super) fn console(&mut self) -> ChildStdout {
        self.out
            .take()
            .expect("stdout was piped, and is taken once")
    }

    /// The child's address.
    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    /// Sends a request to the child's control socket.
    ///
    /// # Errors
    /// The child's answer, or its last line on stderr if it ended.
    pub(super) fn ask(
        &mut self,
        request: &Request,
        limit: Duration,
        interrupts: &Interrupts,
    ) -> Result<Value, Failure> {
        ask(&self.control, request, limit, interrupts).map_err(|failure| {
            match self.process.try_wait() {
                Ok(Some(_)) => self.failed(&failure.message),
                _ => failure,
            }
        })
    }

    /// Waits until the whole VM has arrived.
    ///
    /// # Errors
    /// When the VM does not arrive.
    pub(super) fn wait_until_here(&mut self, interrupts: &Interrupts) -> Result<(), Failure> {
        let here = interrupts.wait_for(LIMIT, || {
            let status = self.ask(&Request::Status {}, LIMIT, interrupts)?;
            Ok((status["state"] == "running").then_some(()))
        })?;
        here.ok_or_else(|| self.failed("it does not say that the VM runs there"))
    }

    /// Adds the destination's last line on stderr to a failure of the migration.
    pub(super) fn explain(&self, failure: Failure) -> Failure {
        match self.last_words() {
            Some(words) if failure.exit != Exit::Cancelled => {
                failure.and(&format!("the destination said: {words}"))
            }
            _ => failure,
        }
    }

    /// The last line of the child's stderr.
    fn last_words(&self) -> Option<String> {
        let text = std::fs::read_to_string(&self.errors).ok()?;
        let line = text.lines().rfind(|line| !line.trim().is_empty())?;
        Some(
            line.trim_start_matches("pageferry: ")
                .trim_start_matches("error: ")
                .to_owned(),
        )
    }

    /// The failure of a child that does not do its work: its exit code and last line, if it ended.
    pub(super) fn failed(&mut self, why: &str) -> Failure {
        // A child that is about to end gets time to print its reason.
        let deadline = Instant::now() + Duration::from_secs(2);
        let code = loop {
            match self.process.try_wait() {
                Ok(Some(status)) => break status.code(),
                _ if Instant::now() > deadline => break None,
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let exit = code.and_then(Exit::from_code).unwrap_or(Exit::Internal);
        let words = self.last_words().unwrap_or_else(|| why.to_owned());
        Failure::new(exit, format!("the destination failed: {words}"))
    }

    /// Ends the child in good order.
    ///
    /// # Errors
    /// When it does not end well.
    pub(super) fn end(mut self) -> Result<(), Failure> {
        ask(
            &self.control,
            &Request::Quit {},
            LIMIT,
            &Interrupts::default(),
        )?;
        let deadline = Instant::now() + LIMIT;
        while Instant::now() < deadline {
            match self.process.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(_)) => return Err(self.failed("it did not end well")),
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                Err(e) => return Err(Failure::os("cannot wait for the destination", e)),
            }
        }
        Err(self.failed("it does not end"))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // The child has ended or is about to. Both calls are harmless for a process that was waited
        // for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
