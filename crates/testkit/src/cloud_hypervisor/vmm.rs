//! Cloud Hypervisor's process: its API, and the orders of its test.

use super::config::{Config, Quirk};
use super::{receive, send, snapshot};
use crate::double::guest::{Guest, Plan};
use crate::double::memory::{Kind, Memory, Ram};
use crate::double::process;
use crate::double::{Done, Order, Status, lock};
use rustix::fs::MemfdFlags;
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};
use std::time::Duration;

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
    process::entry(Vmm::new);
}

/// The process, with or without a VM.
pub(super) struct Vmm {
    pub(super) config: Config,
    pub(super) guest: Mutex<Option<Arc<Guest>>>,
    /// Its own part of its status.
    pub(super) own: Mutex<Status>,
    /// A receiver's pause behind each page.
    pub(super) pause: Mutex<Duration>,
}

/// Stops the vCPUs, and waits until each has left the guest.
pub(super) fn pause(guest: &Guest) {
    guest.stop();
    crate::wait_until("the vCPUs to stop", || guest.is_still());
}

impl Vmm {
    fn new(config: Config) -> Self {
        let ram = |(index, size): (u64, &u64)| {
            // The second memfd has other bytes before those of its region. As those of the real
            // one, they cannot be sealed.
            let (gpa, offset) = (index * HIGH, index * (1 << 20));
            let fd = rustix::fs::memfd_create("ch_ram", MemfdFlags::CLOEXEC).expect("a memfd");
            rustix::fs::ftruncate(&fd, offset + size).expect("a size");
            let (slot, size) = (5 + index as u32, *size);
            Ram {
                slot,
                gpa,
                size,
                offset,
                fd,
            }
        };
        let guest = (!config.regions.is_empty()).then(|| {
            let rams = (0..).zip(&config.regions).map(ram).collect();
            let memory = Memory::map(&config.regions, Kind::Shared(rams)).expect("a mapping");
            // Half of the pages were never written.
            let states = (0..memory.pages()).map(|page| if page % 4 < 2 { 0 } else { Plan::ZEROS });
            let plan = Plan {
                seed: config.seed,
                regions: config.regions.clone(),
                vcpus: config.vcpus,
                balloon_us: None,
                states: states.collect(),
            };
            let guest = Guest::start(memory, plan);
            guest.fill();
            guest
        });
        Self {
            config,
            guest: Mutex::new(guest),
            own: Mutex::default(),
            pause: Mutex::default(),
        }
    }

    /// Notes the end of a migration.
    fn end(&self, done: &Done, outcome: &str) {
        lock(&self.own).outcome = match done {
            Ok(()) => outcome.into(),
            Err(why) => format!("failed: {why}"),
        };
    }

    /// Notes when it paused its VM as a sender, or ran it as a receiver.
    pub(super) fn note_time(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        lock(&self.own).at = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
    }
}

impl process::Vmm for Vmm {
    const NO_VM: &'static str = "None";
    const REFUSED: &'static str = "500 Internal Server Error";
    const VITAL: &'static str = "none";

    fn guest(&self) -> Option<Arc<Guest>> {
        lock(&self.guest).clone()
    }

    fn tell(&self, status: &mut Status) {
        let own = lock(&self.own).clone();
        (status.faults, status.at) = (own.faults, own.at);
        (status.served, status.outcome) = (own.served, own.outcome);
    }

    fn obey(&self, order: Order) -> Done {
        match order {
            Order::Snapshot(directory) => {
                let guest = self.guest().ok_or("no VM")?;
                Ok(snapshot::write(&guest, &directory)?)
            }
            Order::SlowDown(pause) => {
                *lock(&self.pause) = pause;
                Ok(())
            }
            _ => Err("Cloud Hypervisor knows no such order".into()),
        }
    }

    fn refusal(why: String) -> String {
        why
    }

    fn call(self: &Arc<Self>, _: &str, path: &str, body: &Value) -> Done<Value> {
        let socket = |name: &str| {
            let url = body[name].as_str().unwrap_or_default();
            let path = url.strip_prefix("unix:").map(str::to_owned);
            path.ok_or(format!("no unix: URL {name}"))
        };
        match path.strip_prefix("/api/v1/").unwrap_or_default() {
            "vm.info" => {
                self.guest().ok_or("VM is not created")?;
                return Ok(json!({ "config": {}, "state": self.state(), "device_tree": {} }));
            }
            "vmm.ping" => {
                let old = self.config.quirk == Quirk::OldVersion;
                let version = if old { "53.0.0" } else { "54.0.0" };
                return Ok(json!({ "version": version, "features": ["kvm"] }));
            }
            "vm.pause" => pause(&*self.guest().ok_or("no VM")?),
            "vm.resume" => self.guest().ok_or("no VM")?.run(),
            "vm.send-migration" => {
                let guest = self.guest().ok_or("no VM")?;
                let path = socket("destination_url")?;
                if body["local"] != true {
                    return Err("local is not set".into());
                }
                let preserve = body["preserve_source"] == true;
                let vmm = Arc::clone(self);
                // As the real one, it answers when the migration has begun.
                std::thread::spawn(move || {
                    let sent = send::send(&vmm, &guest, &path);
                    if sent.is_ok() && !preserve {
                        // The real one ends. The double stays for its test, without a VM.
                        *lock(&vmm.guest) = None;
                    }
                    vmm.end(&sent, if preserve { "preserved" } else { "sent" });
                });
            }
            "vm.receive-migration" => {
                if self.guest().is_some() {
                    return Err("there is a VM".into());
                }
                let postcopy = body["memory_mode"] == "Postcopy";
                let received = receive::receive(self, &socket("receiver_url")?, postcopy);
                self.end(&received, "received");
                received?;
            }
            _ => return Err(format!("unknown endpoint {path}").into()),
        }
        Ok(Value::Null)
    }
}
