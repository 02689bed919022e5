//! A whole Firecracker process: its API socket, and the commands of its test.
//!
//! **Guarantee.** The threads that answer the test touch no guest memory. The process ends when its
//! test ends.
//!
//! **Mechanism.** The API carries out one call at a time, as the real one does. The state file has
//! the seed, and what each page must contain. So the process that loads it can check all pages.

use super::guest::Guest;
use super::handshake::{Fields, handshake_text, send_handshake};
use super::memory::{Kind, Memory, Region};
use pageferry_userfault::uffd::{Features, Userfaultfd};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The variable that has the configuration in the double's process.
pub(super) const CONFIG: &str = "PAGEFERRY_FIRECRACKER_VMM_DOUBLE";

/// Something that a real process could do wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Quirk {
    /// It does all right.
    Right,
    /// It does not pause its VM.
    RefusePause,
    /// It makes no snapshot.
    RefuseCreate,
    /// It ends while it makes a snapshot.
    DieAtCreate,
    /// Its state file is longer than Firecracker's limit.
    LongState,
    /// Its state file is a link to another file.
    LinkState,
    /// It says that its pages have 1 GiB, which no version has.
    HugePages,
    /// It does all right, and its pages are huge pages of a pool of 2 MiB pages.
    Pool,
    /// It has 1 MiB more than it says, as with hot-plugged memory.
    MoreMemory,
    /// It refuses the snapshot, and ends.
    RefuseLoad,
    /// A tap is busy: it opens its devices behind its vCPUs, refuses, and ends.
    RefuseDevice,
    /// It ends before the handshake.
    DieAtLoad,
    /// Its handshake has a region less.
    ShortHandshake,
    /// It ends when its VM is to run.
    DieAtResume,
    /// It does all right, and its VM has metadata, a log of dirty pages, and a logger.
    Settings,
    /// It is of another minor version.
    OtherVersion,
    /// It makes no diff snapshot without a log of dirty pages, as older versions.
    NoDiff,
}

impl Quirk {
    const ALL: [Self; 17] = [
        Self::Right,
        Self::RefusePause,
        Self::RefuseCreate,
        Self::DieAtCreate,
        Self::LongState,
        Self::LinkState,
        Self::HugePages,
        Self::Pool,
        Self::MoreMemory,
        Self::RefuseLoad,
        Self::RefuseDevice,
        Self::DieAtLoad,
        Self::ShortHandshake,
        Self::DieAtResume,
        Self::Settings,
        Self::OtherVersion,
        Self::NoDiff,
    ];
}

/// The limit of a state file.
const MAX_STATE_BYTES: u64 = 10_000_000;

/// Becomes the double. Ends the process.
pub(super) fn main(text: &str) -> ! {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned();
    let control = UnixStream::from(stdin.expect("a descriptor"));
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(2);
    }));
    let config: Value = serde_json::from_str(text).expect("the text of a configuration");
    let vmm = Arc::new(Vmm::new(&config));
    let mut path = Path::new(config["api"].as_str().expect("a path")).to_owned();
    if let Some(jail) = config["jail"].as_str() {
        path = Path::new("/").join(path.strip_prefix(jail).expect("a path in the jail"));
    }
    let api = UnixListener::bind(path).expect("a path for the API socket");
    let served = Arc::clone(&vmm);
    std::thread::spawn(move || {
        for call in api.incoming().flatten() {
            served.answer(&call);
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
        answer = match line.as_str() {
            "status" => vmm.status(),
            "run" => vmm.set_running(true),
            "pause" => vmm.set_running(false),
            "verify" => {
                let checked = Arc::clone(vmm);
                std::thread::spawn(move || {
                    let guest = checked.guest().expect("a VM");
                    (0..guest.memory.pages()).for_each(|page| guest.read(page));
                    checked.verified.store(true, Ordering::SeqCst);
                });
                "ok".into()
            }
            _ => return 0,
        };
    }
}

struct Vmm {
    quirk: Quirk,
    guest: Mutex<Option<Arc<Guest>>>,
    verified: AtomicBool,
    /// The body of the load.
    loaded: Mutex<Value>,
    /// The data of the metadata service.
    mmds: Mutex<Value>,
}

/// What a state file says, and the configuration of a process with a VM.
struct State {
    regions: Vec<u64>,
    seed: u64,
    vcpus: usize,
    balloon_us: Option<u64>,
    /// What each page contains. A VM that was never saved has the memory file's contents.
    pages: Vec<u64>,
}

impl State {
    fn parse(state: &Value) -> Option<Self> {
        let numbers = |value: &Value| -> Option<Vec<u64>> {
            value.as_array()?.iter().map(Value::as_u64).collect()
        };
        Some(Self {
            regions: numbers(&state["regions"])?,
            seed: state["seed"].as_u64()?,
            vcpus: state["vcpus"].as_u64()? as usize,
            balloon_us: state["balloon_us"].as_u64(),
            pages: numbers(&state["states"])?,
        })
    }
}

/// A guest whose threads wait.
fn start(memory: Memory, state: &State) -> Arc<Guest> {
    let guest = Arc::new(Guest::new(memory, state.seed, state.vcpus));
    guest.set_page_states(&state.pages);
    for number in 0..state.vcpus {
        let guest = Arc::clone(&guest);
        std::thread::spawn(move || guest.vcpu(number));
    }
    if let Some(us) = state.balloon_us {
        *guest.balloon_us.lock().expect("no thread panics here") = Some(us);
        let guest = Arc::clone(&guest);
        std::thread::spawn(move || guest.balloon(Duration::from_micros(us)));
    }
    guest
}

impl Vmm {
    fn new(config: &Value) -> Self {
        let quirk = Quirk::ALL[config["quirk"].as_u64().expect("a number") as usize];
        let state = State::parse(config).expect("a configuration");
        let guest = (!state.regions.is_empty()).then(|| {
            let huge = quirk == Quirk::Pool;
            let memory = Memory::map(&state.regions, Kind::Anonymous { huge }).expect("memory");
            let guest = start(memory, &state);
            guest.fill();
            guest
        });
        Self {
            quirk,
            guest: Mutex::new(guest),
            verified: AtomicBool::new(false),
            loaded: Mutex::default(),
            mmds: Mutex::new(match quirk {
                Quirk::Settings => json!({ "name": "web" }),
                _ => Value::Null,
            }),
        }
    }

    fn guest(&self) -> Option<Arc<Guest>> {
        self.guest.lock().expect("no thread panics here").clone()
    }

    fn set_running(&self, on: bool) -> String {
        let guest = self.guest().expect("a VM");
        guest.running.store(on, Ordering::SeqCst);
        // A vCPU that sleeps on a missing page does not keep Firecracker from its answer.
        for _ in 0..100 {
            if on || guest.active.load(Ordering::SeqCst) == 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        "ok".into()
    }

    fn state(&self) -> &'static str {
        match self.guest() {
            None => "Not started",
            Some(guest) if guest.running.load(Ordering::SeqCst) => "Running",
            Some(_) => "Paused",
        }
    }

    /// One line of JSON.
    fn status(&self) -> String {
        let guest = self.guest();
        let first = guest.as_ref().map(|guest| {
            let wrong = guest.remembered.lock().expect("no thread panics here");
            format!("{:?}", wrong.first())
        });
        json!({
            "state": self.state(),
            "touches": guest.as_ref().map_or(0, |guest| {
                guest.touches.iter().map(|each| each.load(Ordering::SeqCst)).sum::<u64>()
            }),
            "removals": guest.as_ref().map_or(0, |g| g.removals.load(Ordering::SeqCst)),
            "wrong": guest.as_ref().map_or(0, |guest| guest.wrong.load(Ordering::SeqCst)),
            "verified": self.verified.load(Ordering::SeqCst),
            "first_wrong": first,
            "loaded": *self.loaded.lock().expect("no thread panics here"),
            "mmds": *self.mmds.lock().expect("no thread panics here"),
        })
        .to_string()
    }

    /// Answers one call of the API.
    fn answer(&self, mut call: &UnixStream) {
        let Some((method, path, body)) = read_call(call) else {
            return;
        };
        let done = self.perform(&method, &path, &body);
        let (status, body) = match &done {
            Ok(Value::Null) => ("204 No Content", String::new()),
            Ok(body) => ("200 OK", body.to_string()),
            Err(why) => (
                "400 Bad Request",
                json!({ "fault_message": why }).to_string(),
            ),
        };
        let _ = write!(
            call,
            "HTTP/1.1 {status}\r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        if done.is_err() && path == "/snapshot/load" {
            // As the real one.
            std::process::exit(1);
        }
    }

    fn perform(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        match (method, path) {
            ("GET", "/") => Ok(json!({
                "id": "double", "state": self.state(),
                "vmm_version": match self.quirk {
                    Quirk::OtherVersion => "1.15.1",
                    _ => "1.17.0-dev",
                },
                "app_name": "Firecracker",
            })),
            ("GET", "/machine-config") => {
                let bytes = self.guest().map_or(128 << 20, |g| g.memory.pages() * 4096);
                let hidden = u64::from(self.quirk == Quirk::MoreMemory);
                let huge = match self.quirk {
                    Quirk::HugePages => "1G",
                    Quirk::Pool => "2M",
                    _ => "None",
                };
                Ok(json!({
                    "vcpu_count": self.guest().map_or(1, |guest| guest.touches.len()),
                    "mem_size_mib": (bytes >> 20) - hidden, "smt": false,
                    "track_dirty_pages": self.quirk == Quirk::Settings,
                    "huge_pages": huge,
                }))
            }
            ("GET", "/vm/config") => Ok(json!({
                "drives": [{ "drive_id": "root", "path_on_host": "/none" }],
                "logger": (self.quirk == Quirk::Settings).then_some(json!({})),
            })),
            ("GET", "/mmds") => match self.mmds.lock().expect("no thread panics here").clone() {
                Value::Null => Err("The MMDS data store is not initialized.".into()),
                data => Ok(data),
            },
            ("PUT", "/mmds") => {
                *self.mmds.lock().expect("no thread panics here") = body.clone();
                Ok(Value::Null)
            }
            ("PATCH", "/vm") => {
                self.guest().ok_or("there is no VM")?;
                match (body["state"].as_str(), self.quirk) {
                    (Some("Paused"), Quirk::RefusePause) => return Err("it does not pause".into()),
                    (Some("Resumed"), Quirk::DieAtResume) => std::process::exit(9),
                    (Some("Paused"), _) => self.set_running(false),
                    (Some("Resumed"), _) => self.set_running(true),
                    (other, _) => return Err(format!("unknown state {other:?}")),
                };
                Ok(Value::Null)
            }
            ("PUT", "/snapshot/create") => self.create(body).map(|()| Value::Null),
            ("PUT", "/snapshot/load") => self.load(body).map(|()| Value::Null),
            _ => Err(format!("unknown call {method} {path}")),
        }
    }

    /// Makes a snapshot of the paused VM. A diff has the resident pages, and leaves the others as they
    /// are in the file: there is no log of dirty pages.
    fn create(&self, body: &Value) -> Result<(), String> {
        let guest = self.guest().ok_or("there is no VM")?;
        if self.state() != "Paused" || self.quirk == Quirk::RefuseCreate {
            return Err("the VM cannot be saved now".into());
        }
        let diff = match body["snapshot_type"].as_str() {
            Some("Full") => false,
            Some("Diff") if self.quirk == Quirk::NoDiff => {
                return Err("Diff snapshots are not allowed".into());
            }
            Some("Diff") => true,
            other => return Err(format!("unknown type {other:?}")),
        };
        // On a busy machine, a vCPU may still be within its last access: then what its page
        // contains is not known.
        crate::wait_until("the vCPUs to stop", || {
            guest.active.load(Ordering::SeqCst) == 0
        });
        let path = |name: &str| body[name].as_str().ok_or(format!("no {name}"));
        let failed = |why: std::io::Error| why.to_string();
        let regions = guest.memory.regions().iter().map(|region| region.size);
        let state = json!({
            "seed": guest.seed(),
            "regions": regions.collect::<Vec<_>>(),
            "vcpus": guest.touches.len(),
            "balloon_us": *guest.balloon_us.lock().expect("no thread panics here"),
            "states": guest.page_states(),
        });
        if self.quirk == Quirk::LinkState {
            std::os::unix::fs::symlink("/etc/hostname", path("snapshot_path")?).map_err(failed)?;
            return Ok(());
        }
        let mut file = File::create(path("snapshot_path")?).map_err(failed)?;
        file.write_all(state.to_string().as_bytes())
            .map_err(failed)?;
        if self.quirk == Quirk::LongState {
            file.set_len(MAX_STATE_BYTES + 1).map_err(failed)?;
        }
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false);
        let memory = options.open(path("mem_file_path")?).map_err(failed)?;
        let bytes = guest.memory.pages() * 4096;
        if memory.metadata().map_err(failed)?.len() != bytes {
            memory.set_len(0).map_err(failed)?;
        }
        memory.set_len(bytes).map_err(failed)?;
        if self.quirk == Quirk::DieAtCreate {
            let words = super::contents::bytes(&guest.memory.load(0));
            memory.write_all_at(&words, 0).map_err(failed)?;
            std::process::exit(9);
        }
        guest
            .memory
            .write_to(&memory, diff)
            .map_err(|e| failed(e.into()))?;
        memory.sync_all().map_err(failed)
    }

    /// Loads a snapshot, in the steps of the real one: the state, the handshake, its vCPUs, for which
    /// KVM reads the page of a clock, its devices, and the answer.
    fn load(&self, body: &Value) -> Result<(), String> {
        if self.guest().is_some() {
            return Err("there is a VM".into());
        }
        match self.quirk {
            Quirk::RefuseLoad => return Err("the snapshot is of another version".into()),
            Quirk::DieAtLoad => std::process::exit(9),
            _ => {}
        }
        check_load(body)?;
        let path = body["snapshot_path"].as_str().ok_or("no snapshot_path")?;
        let text = std::fs::read_to_string(path).map_err(|why| why.to_string())?;
        let state = serde_json::from_str(&text).map_err(|why| why.to_string())?;
        let state = State::parse(&state).ok_or("a bad state file")?;
        if body["mem_backend"]["backend_type"] != "Uffd" {
            return Err("the double loads by userfaultfd only".into());
        }
        let socket = body["mem_backend"]["backend_path"]
            .as_str()
            .ok_or("no path")?;
        let memory = Memory::map(&state.regions, Kind::Anonymous { huge: false });
        let memory = memory.map_err(|why| why.to_string())?;
        let uffd = Userfaultfd::open(Features::EVENT_REMOVE).map_err(|why| why.to_string())?;
        memory.register(&uffd)?;
        let mut regions: Vec<Region> = memory.regions().to_vec();
        if self.quirk == Quirk::ShortHandshake {
            regions.pop();
        }
        let handshake = handshake_text(&regions, 4096, Fields::Both);
        let stream = send_handshake(Path::new(socket), handshake.as_bytes(), &[uffd.as_fd()]);
        // Both stay open as long as the process lives.
        std::mem::forget(stream.map_err(|why| why.to_string())?);
        std::mem::forget(uffd);
        let guest = start(memory, &state);
        guest.read(guest.memory.pages() / 2);
        if self.quirk == Quirk::RefuseDevice {
            return Err("Open tap device failed: Resource busy".into());
        }
        *self.guest.lock().expect("no thread panics here") = Some(guest);
        *self.loaded.lock().expect("no thread panics here") = body.clone();
        if body["resume_vm"] == true {
            self.set_running(true);
        }
        Ok(())
    }
}

/// Checks the fields of a load, as the real one does. The only network interface is `eth0`.
fn check_load(body: &Value) -> Result<(), String> {
    for (name, value) in body.as_object().ok_or("no body")? {
        let right = match name.as_str() {
            "snapshot_path" | "mem_backend" => true,
            "resume_vm" | "clock_realtime" | "track_dirty_pages" => value.is_boolean(),
            "huge_pages" => value == "Transparent",
            "vsock_override" => value["uds_path"].is_string(),
            "network_overrides" => value.as_array().is_some_and(|all| {
                all.iter()
                    .all(|one| one["iface_id"] == "eth0" && one["host_dev_name"].is_string())
            }),
            _ => false,
        };
        if !right {
            return Err(format!("the field {name} cannot be {value}"));
        }
    }
    Ok(())
}

/// Reads a call: its method, its path and its body.
fn read_call(call: &UnixStream) -> Option<(String, String, Value)> {
    let mut reader = BufReader::new(call);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
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
    Some((
        method,
        path,
        serde_json::from_slice(&body).unwrap_or_default(),
    ))
}
