//! The double's own process: its API, and the commands of its test.
//!
//! **Guarantee.** The threads that answer the API and the test touch no guest memory. The process
//! ends when its test ends.

use super::config::{Config, Quirk};
use super::guest::{Guest, Region};
use super::{receive, send, snapshot};
use rustix::fs::MemfdFlags;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The variable that has the configuration in the double's process.
pub(super) const CONFIG: &str = "PAGEFERRY_CLOUD_HYPERVISOR_DOUBLE";
/// The guest-physical address of the second region, as behind a hole for devices.
const HIGH: u64 = 4 << 30;

/// Becomes the double, in a process that [`Double::start`](super::Double::start) has started.
/// Returns at once in any other process. Every test binary that starts a double has this test in
/// its `main.rs`:
///
/// ```
/// // #[test]
/// fn cloud_hypervisor_double() {
///     pageferry_testkit::cloud_hypervisor::entry();
/// }
/// # cloud_hypervisor_double();
/// ```
pub fn entry() {
    let Some(text) = std::env::var_os(CONFIG) else {
        return;
    };
    let config = text.to_str().and_then(Config::from_text);
    let config = config.expect("the text of a configuration");
    let stdin = std::io::stdin().as_fd().try_clone_to_owned();
    let control = UnixStream::from(stdin.expect("a descriptor"));
    // A thread that panics would let the test wait for what never comes.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(2);
    }));
    let vmm = Arc::new(Vmm::new(config));
    let api = UnixListener::bind(&vmm.config.api).expect("a path for the API socket");
    let served = Arc::clone(&vmm);
    std::thread::spawn(move || {
        for call in api.incoming().flatten() {
            let vmm = Arc::clone(&served);
            std::thread::spawn(move || vmm.answer(&call));
        }
    });
    std::process::exit(serve(&vmm, &control));
}

/// Serves the commands of the test until there are no more. Returns the exit code.
fn serve(vmm: &Arc<Vmm>, mut control: &UnixStream) -> i32 {
    let mut answer = "ready".to_owned();
    let mut lines = BufReader::new(control).lines();
    loop {
        if writeln!(control, "{answer}").is_err() {
            return 2;
        }
        let Some(Ok(line)) = lines.next() else {
            return 2;
        };
        // A command, and its argument.
        let (command, argument) = line.split_once(' ').unwrap_or((&line, ""));
        answer = match command {
            "snapshot" => {
                let guest = vmm.guest().expect("a VM");
                let written = snapshot::write(&guest, Path::new(argument));
                written.expect("a paused VM, and a directory");
                "ok".into()
            }
            "status" => vmm.status(),
            "slow-down" => {
                let pause = argument.parse().expect("a number");
                vmm.pause_us.store(pause, Ordering::SeqCst);
                "ok".into()
            }
            "run" => {
                vmm.guest().expect("a VM").resume();
                "ok".into()
            }
            "pause" => {
                vmm.guest().expect("a VM").pause();
                "ok".into()
            }
            "verify" => {
                let (guest, verified) = (vmm.guest().expect("a VM"), Arc::clone(vmm));
                std::thread::spawn(move || {
                    guest.verify();
                    verified.verified.store(true, Ordering::SeqCst);
                });
                "ok".into()
            }
            _ => return 0,
        };
    }
}

/// The process, with or without a VM.
pub(super) struct Vmm {
    pub(super) config: Config,
    guest: Mutex<Option<Arc<Guest>>>,
    /// The end of the last migration.
    outcome: Mutex<String>,
    pub(super) faults: AtomicU64,
    /// A receiver's pause behind each page, in microseconds.
    pub(super) pause_us: AtomicU64,
    /// When it paused its VM as a sender, or ran it as a receiver: `CLOCK_MONOTONIC`, nanoseconds.
    pub(super) at_ns: AtomicU64,
    /// The time from the connection for page faults to its end.
    pub(super) served_ns: AtomicU64,
    /// A receiver has all pages.
    pub(super) has_all: AtomicBool,
    verified: AtomicBool,
}

impl Vmm {
    fn new(config: Config) -> Self {
        let mut regions = Vec::new();
        for (index, size) in config.regions.iter().enumerate() {
            // The second memfd has other bytes before those of its region. As those of the real
            // one, they cannot be sealed.
            let (gpa, offset) = (index as u64 * HIGH, index as u64 * (1 << 20));
            let fd = rustix::fs::memfd_create("ch_ram", MemfdFlags::CLOEXEC).expect("a memfd");
            rustix::fs::ftruncate(&fd, offset + size).expect("a size");
            let slot = 5 + index as u32;
            regions.push(Region::map(slot, gpa, *size, offset, fd).expect("a mapping"));
        }
        let pages = config.regions.iter().sum::<u64>() / 4096;
        let guest = (!regions.is_empty()).then(|| {
            let versions = vec![0; pages as usize];
            let guest = Guest::new(regions, config.seed, versions, config.vcpus);
            guest.fill();
            guest
        });
        Self {
            config,
            guest: Mutex::new(guest),
            outcome: Mutex::default(),
            faults: AtomicU64::new(0),
            pause_us: AtomicU64::new(0),
            at_ns: AtomicU64::new(0),
            served_ns: AtomicU64::new(0),
            has_all: AtomicBool::new(false),
            verified: AtomicBool::new(false),
        }
    }

    pub(super) fn guest(&self) -> Option<Arc<Guest>> {
        self.guest.lock().expect("no thread panics here").clone()
    }

    pub(super) fn set_guest(&self, guest: Option<Arc<Guest>>) {
        *self.guest.lock().expect("no thread panics here") = guest;
    }

    fn set_outcome(&self, outcome: &str) {
        *self.outcome.lock().expect("no thread panics here") = outcome.replace('\n', " ");
    }

    fn state(&self) -> &'static str {
        match self.guest() {
            None => "None",
            Some(guest) if guest.is_running() => "Running",
            Some(_) => "Paused",
        }
    }

    /// Notes the present time.
    pub(super) fn note_time(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        self.at_ns.store(ns, Ordering::SeqCst);
    }

    /// `STATE TOUCHES WRONG FAULTS HAS_ALL VERIFIED AT SERVED|FIRST WRONG|OUTCOME`
    fn status(&self) -> String {
        let outcome = self.outcome.lock().expect("no thread panics here").clone();
        let (touches, wrong, first) = self.guest().map_or((0, 0, String::new()), |guest| {
            let first = guest.first_wrong.lock().expect("no thread panics here");
            let touches = guest.touches.load(Ordering::SeqCst);
            (touches, guest.wrong.load(Ordering::SeqCst), first.clone())
        });
        format!(
            "{} {touches} {wrong} {} {} {} {} {}|{first}|{outcome}",
            self.state(),
            self.faults.load(Ordering::SeqCst),
            self.has_all.load(Ordering::SeqCst),
            self.verified.load(Ordering::SeqCst),
            self.at_ns.load(Ordering::SeqCst),
            self.served_ns.load(Ordering::SeqCst),
        )
    }

    /// Answers one call of the API.
    fn answer(self: &Arc<Self>, mut call: &UnixStream) {
        let Some((endpoint, body)) = read_call(call) else {
            return;
        };
        let done = self.perform(&endpoint, &body);
        let (status, body) = match &done {
            Ok(body) if body.is_empty() => ("204 No Content", body),
            Ok(body) => ("200 OK", body),
            Err(why) => ("500 Internal Server Error", why),
        };
        let head = match status {
            "204 No Content" => String::new(),
            _ => format!("Content-Length: {}\r\n", body.len()),
        };
        let _ = call.write_all(format!("HTTP/1.1 {status}\r\n{head}\r\n{body}").as_bytes());
    }

    fn perform(self: &Arc<Self>, endpoint: &str, body: &str) -> Result<String, String> {
        let body: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
        let path = |name: &str| {
            let url = body[name].as_str().unwrap_or_default();
            let path = url.strip_prefix("unix:").map(str::to_owned);
            path.ok_or(format!("no unix: URL {name}"))
        };
        match endpoint {
            "vm.info" => Ok(format!(
                r#"{{"config":{{}},"state":"{}","device_tree":{{}}}}"#,
                self.state()
            )),
            "vmm.ping" => Ok(match self.config.quirk {
                Quirk::OldVersion => r#"{"version":"53.0.0","features":["kvm"]}"#.into(),
                _ => r#"{"version":"54.0.0","features":["kvm"]}"#.into(),
            }),
            "vm.pause" => {
                self.guest().ok_or("no VM")?.pause();
                Ok(String::new())
            }
            "vm.resume" => {
                self.guest().ok_or("no VM")?.resume();
                Ok(String::new())
            }
            "vm.send-migration" => {
                let guest = self.guest().ok_or("no VM")?;
                let path = path("destination_url")?;
                if body["local"] != true {
                    return Err("local is not set".into());
                }
                let preserve = body["preserve_source"] == true;
                let vmm = Arc::clone(self);
                // As the real one, it answers when the migration has begun.
                std::thread::spawn(move || match send::send(&vmm, &guest, &path) {
                    Ok(()) if preserve => vmm.set_outcome("preserved"),
                    Ok(()) => {
                        // The real one ends. The double stays for its test, without a VM.
                        guest.end();
                        vmm.set_guest(None);
                        vmm.set_outcome("sent");
                    }
                    Err(why) => vmm.set_outcome(&format!("failed: {why}")),
                });
                Ok(String::new())
            }
            "vm.receive-migration" => {
                if self.guest().is_some() {
                    return Err("there is a VM".into());
                }
                let postcopy = body["memory_mode"] == "Postcopy";
                let received = receive::receive(self, &path("receiver_url")?, postcopy);
                match &received {
                    Ok(()) => self.set_outcome("received"),
                    Err(why) => self.set_outcome(&format!("failed: {why}")),
                }
                received.map(|()| String::new())
            }
            other => Err(format!("unknown endpoint {other}")),
        }
    }
}

/// Reads a call: its endpoint and its body.
fn read_call(call: &UnixStream) -> Option<(String, String)> {
    let mut reader = BufReader::new(call);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let endpoint = line.split(' ').nth(1)?.strip_prefix("/api/v1/")?.to_owned();
    let mut length = 0;
    loop {
        line.clear();
        reader.read_line(&mut line).ok()?;
        if line.trim().is_empty() {
            break;
        }
        let (name, value) = line.split_once(':')?;
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((endpoint, String::from_utf8(body).ok()?))
}
