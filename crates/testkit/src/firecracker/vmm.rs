//! Firecracker's process: its API, and the orders of its test.
//!
//! **Mechanism.** The API carries out one call at a time, as the real one does. The state file has
//! the seed, and what each page must contain. So the process that loads it can check all pages.

use super::config::{Backend, Config, Quirk};
use super::handshake::{Fields, handshake_text, send_handshake};
use crate::double::contents::{PAGE_BYTES, bytes};
use crate::double::guest::{Guest, Plan};
use crate::double::memory::{Kind, Memory, Region};
use crate::double::process::{self, Vmm as _};
use crate::double::{Config as _, Done, Order, Status, lock};
use pageferry_userfault::uffd::{Features, RegisterMode, Userfaultfd};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// The limit of a state file.
const MAX_STATE_BYTES: u64 = 10_000_000;

/// Becomes the double, in a process that [`Double::start`](super::Double::start) has started.
/// Returns at once in any other process. Every test binary that starts a double has this test in
/// its `main.rs`:
///
/// ```
/// // #[test]
/// fn firecracker_double() {
///     pageferry_testkit::firecracker::entry();
/// }
/// # firecracker_double();
/// ```
pub fn entry() {
    process::entry(Vmm::new);
}

struct Vmm {
    quirk: Quirk,
    guest: OnceLock<Arc<Guest>>,
    /// That of a VM which is restored without the API.
    uffd: Option<Userfaultfd>,
    /// One call at a time.
    turn: Mutex<()>,
    /// The body of the load.
    loaded: Mutex<Value>,
    /// The data of the metadata service.
    mmds: Mutex<Value>,
}

impl process::Vmm for Vmm {
    const NO_VM: &'static str = "Not started";
    const REFUSED: &'static str = "400 Bad Request";
    const VITAL: &'static str = "/snapshot/load";

    fn guest(&self) -> Option<Arc<Guest>> {
        self.guest.get().cloned()
    }

    fn tell(&self, status: &mut Status) {
        status.loaded = lock(&self.loaded).clone();
        status.mmds = lock(&self.mmds).clone();
    }

    fn obey(&self, order: Order) -> Done {
        let Order::Connect(fields, socket) = order else {
            return Err("Firecracker knows no such order".into());
        };
        let (guest, uffd) = (self.guest.get(), self.uffd.as_ref());
        let memory = &guest.ok_or("there is no VM")?.memory;
        let uffd = uffd.ok_or("there is no userfaultfd")?;
        connect(&socket, memory.regions(), memory.unit(), fields, uffd)
    }

    fn refusal(why: String) -> String {
        json!({ "fault_message": why }).to_string()
    }

    fn call(self: &Arc<Self>, method: &str, path: &str, body: &Value) -> Done<Value> {
        let _turn = lock(&self.turn);
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
                    "vcpu_count": self.guest().map_or(1, |guest| guest.vcpus()),
                    "mem_size_mib": (bytes >> 20) - hidden, "smt": false,
                    "track_dirty_pages": self.quirk == Quirk::Settings,
                    "huge_pages": huge,
                }))
            }
            ("GET", "/vm/config") => Ok(json!({
                "drives": [{ "drive_id": "root", "path_on_host": "/none" }],
                "logger": (self.quirk == Quirk::Settings).then_some(json!({})),
            })),
            ("GET", "/mmds") => match lock(&self.mmds).clone() {
                Value::Null => Err("The MMDS data store is not initialized.".into()),
                data => Ok(data),
            },
            ("PUT", "/mmds") => {
                *lock(&self.mmds) = body.clone();
                Ok(Value::Null)
            }
            ("PATCH", "/vm") => {
                let guest = self.guest.get().ok_or("there is no VM")?;
                match (body["state"].as_str(), self.quirk) {
                    (Some("Paused"), Quirk::RefusePause) => return Err("it does not pause".into()),
                    (Some("Resumed"), Quirk::DieAtResume) => std::process::exit(9),
                    (Some("Paused"), _) => pause(guest),
                    (Some("Resumed"), _) => guest.run(),
                    (other, _) => return Err(format!("unknown state {other:?}").into()),
                };
                Ok(Value::Null)
            }
            ("PUT", "/snapshot/create") => self.create(body).map(|()| Value::Null),
            ("PUT", "/snapshot/load") => self.load(body).map(|()| Value::Null),
            _ => Err(format!("unknown call {method} {path}").into()),
        }
    }
}

impl Vmm {
    fn new(config: Config) -> Self {
        let huge = config.backend == Backend::UffdHuge || config.quirk == Quirk::Pool;
        let kind = match &config.backend {
            Backend::File(path) => Kind::File(File::open(path).expect("a memory file")),
            _ => Kind::Anonymous { huge },
        };
        let (mut uffd, guest) = (None, OnceLock::new());
        if !config.regions.is_empty() {
            let memory = Memory::map(&config.regions, kind).expect("memory");
            if config.api.is_none()
                && let Some(needs) = config.needs()
            {
                uffd = Some(register(&memory, needs).expect("registered"));
            }
            let plan = Plan {
                seed: config.seed,
                regions: config.regions,
                vcpus: config.vcpus,
                balloon_us: config.balloon_us,
                states: Vec::new(),
            };
            let started = guest.get_or_init(|| Guest::start(memory, plan));
            if config.api.is_some() {
                started.fill();
            }
        }
        Self {
            quirk: config.quirk,
            guest,
            uffd,
            turn: Mutex::default(),
            loaded: Mutex::default(),
            mmds: Mutex::new(match config.quirk {
                Quirk::Settings => json!({ "name": "web" }),
                _ => Value::Null,
            }),
        }
    }

    /// Makes a snapshot of the paused VM. A diff has the resident pages, and leaves the others as
    /// they are in the file: there is no log of dirty pages.
    fn create(&self, body: &Value) -> Done {
        let guest = self.guest().ok_or("there is no VM")?;
        if self.state() != "Paused" || self.quirk == Quirk::RefuseCreate {
            return Err("the VM cannot be saved now".into());
        }
        let diff = match body["snapshot_type"].as_str() {
            Some("Full") | None => false,
            Some("Diff") if self.quirk == Quirk::NoDiff => {
                return Err("Diff snapshots are not allowed".into());
            }
            Some("Diff") => true,
            other => return Err(format!("unknown type {other:?}").into()),
        };
        // On a busy machine, a vCPU may still be within its last access: then what its page
        // contains is not known.
        crate::wait_until("the vCPUs to stop", || guest.is_still());
        let path = |name: &str| body[name].as_str().ok_or(format!("no {name}"));
        if self.quirk == Quirk::LinkState {
            std::os::unix::fs::symlink("/etc/hostname", path("snapshot_path")?)?;
            return Ok(());
        }
        let mut file = File::create(path("snapshot_path")?)?;
        let state = json!(guest.plan()).to_string();
        file.write_all(state.as_bytes())?;
        if self.quirk == Quirk::LongState {
            file.set_len(MAX_STATE_BYTES + 1)?;
        }
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(false);
        let memory = options.open(path("mem_file_path")?)?;
        let length = guest.memory.pages() * PAGE_BYTES;
        if memory.metadata()?.len() != length {
            memory.set_len(0)?;
        }
        memory.set_len(length)?;
        if self.quirk == Quirk::DieAtCreate {
            let page = bytes(&guest.memory.load(0));
            memory.write_all_at(&page, 0)?;
            std::process::exit(9);
        }
        guest.memory.write_to(&memory, diff)?;
        Ok(memory.sync_all()?)
    }

    /// Loads a snapshot, in the steps of the real one: the state, the handshake, its vCPUs, for
    /// which KVM reads the page of a clock, its devices, and the answer.
    fn load(&self, body: &Value) -> Done {
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
        let text = std::fs::read_to_string(path)?;
        let plan: Plan = serde_json::from_str(&text)?;
        if body["mem_backend"]["backend_type"] != "Uffd" {
            return Err("the double loads by userfaultfd only".into());
        }
        let socket = body["mem_backend"]["backend_path"]
            .as_str()
            .ok_or("no path")?;
        let memory = Memory::map(&plan.regions, Kind::Anonymous { huge: false })?;
        let uffd = register(&memory, Features::EVENT_REMOVE)?;
        let hidden = usize::from(self.quirk == Quirk::ShortHandshake);
        let regions = &memory.regions()[..plan.regions.len() - hidden];
        connect(Path::new(socket), regions, 1, Fields::Both, &uffd)?;
        // It stays open as long as the process lives.
        std::mem::forget(uffd);
        let guest = Guest::start(memory, plan);
        guest.read(guest.memory.pages() / 2);
        if self.quirk == Quirk::RefuseDevice {
            return Err("Open tap device failed: Resource busy".into());
        }
        if body["resume_vm"] == true {
            guest.run();
        }
        let _ = self.guest.set(guest);
        *lock(&self.loaded) = body.clone();
        Ok(())
    }
}

/// Checks the fields of a load, as the real one does. The only network interface is `eth0`.
fn check_load(body: &Value) -> Done {
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
            return Err(format!("the field {name} cannot be {value}").into());
        }
    }
    Ok(())
}

/// Stops the guest. A vCPU that sleeps on a missing page does not keep Firecracker from its answer.
fn pause(guest: &Guest) {
    guest.stop();
    for _ in 0..100 {
        if guest.is_still() {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Registers memory for missing faults.
fn register(memory: &Memory, features: Features) -> Done<Userfaultfd> {
    let uffd = Userfaultfd::open(features)?;
    memory.register(&uffd, RegisterMode::MISSING)?;
    Ok(uffd)
}

/// Sends the handshake. The connection stays open as long as the process lives.
fn connect(
    socket: &Path,
    regions: &[Region],
    unit: u64,
    fields: Fields,
    uffd: &Userfaultfd,
) -> Done {
    let text = handshake_text(regions, unit * PAGE_BYTES, fields);
    let stream = send_handshake(socket, text.as_bytes(), &[uffd.as_fd()]);
    std::mem::forget(stream?);
    Ok(())
}
