//! The seam of a Firecracker that a VM leaves.
//!
//! **Guarantee.** Until the migration hands the VM over, every failure lets Firecracker's VM run
//! on, or stay paused, as it was. From then on it stays paused.
//!
//! **Mechanism.** Firecracker's memory is private to its process, and no file tells which of its
//! mappings are the guest's. So Firecracker writes it to us: [`Vcpus::pause`] pauses the VM and
//! asks for a full snapshot, whose memory file is our memfd. The memfd's size is sealed. A VM of
//! another size cannot be written to it, and that is an error.
//!
//! Until then the memfd has a copy of what is probably the guest's memory ([`Machine::refresh`]).
//! `migration` sends that, and confirms or resends each page after the pause.
//!
//! Diff snapshots would lack pages that the last snapshot had. So all snapshots are full.
//!
//! **Neighbours.** `migration` moves the VM. `running` reads its memory. `destination` is the other
//! seam.
#![expect(unsafe_code, reason = "shares memory with another VMM")]

use super::api::{Api, MachineConfig};
use super::error::FcError;
use super::jail::{MemoryFile, Place};
use super::running::Running;
use super::{KIND, MAX_STATE_BYTES, STATE_DEVICE, STATE_VERSION, STEP_LIMIT, VM_PAUSED, VM_RUNS};
use pageferry_addr::{Gpa, RamPage};
use pageferry_hostfs::Folder;
use pageferry_machine::{
    AdoptedRegion, Apply, BlackoutCost, Device, GuestRam, Machine, MachineError, MachineKind,
    PauseReport, VcpuState, Vcpus,
};
use pageferry_migration::{
    Change, Observer, Route, RunningVm, SourceConfig, SourceFailure, SourceReport, SourceSession,
    Switch, migrate,
};
use pageferry_userfault::PageBitmap;
use rustix::fs::{MemfdFlags, SealFlags};
use serde_json::json;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// The bytes that Firecracker writes in a second at least.
const SLOWEST_WRITE: u64 = 64 << 20;

/// The choices for a Firecracker that a VM leaves.
#[derive(Clone, Debug)]
pub struct SourceOptions {
    /// Its API socket.
    pub api: PathBuf,
}

/// A failed move, seen from the source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// Firecracker cannot give its VM. The VM is where it was.
    #[error("{0}; the VM stays with its Firecracker")]
    Vmm(#[from] FcError),
    /// The migration failed, and says where the VM is.
    #[error(transparent)]
    Migration(SourceFailure),
    /// The VM is here, but it does not run.
    #[error("{}; the VM is here, and cannot be resumed: {why}", failure.error)]
    NotResumed {
        /// The failure.
        failure: SourceFailure,
        /// The reason.
        why: Box<FcError>,
    },
}

/// Firecracker's own parts of a pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pause {
    /// The time until it had paused its vCPUs.
    pub stop: Duration,
    /// The time until it had written its snapshot.
    pub save: Duration,
}

/// A VM of a Firecracker process. It still runs.
pub struct Source {
    vmm: Arc<Vmm>,
    config: Vec<u8>,
    vcpus: u32,
    machine: Arc<dyn Machine>,
    devices: [Arc<dyn Device>; 1],
    /// Why the memory cannot be copied while the VM runs.
    unread: Option<String>,
}

impl Source {
    /// Looks at the VM, and makes room for its memory. The VM runs meanwhile.
    ///
    /// # Errors
    /// When the process cannot be reached, has no VM, or its VM cannot move.
    pub fn take(options: &SourceOptions) -> Result<Self, FcError> {
        let api = Api::new(&options.api);
        let instance = api.instance(STEP_LIMIT)?;
        let runs = match instance.state.as_str() {
            "Running" => true,
            "Paused" => false,
            other => {
                return Err(FcError::VmState {
                    found: other.escape_debug().to_string(),
                    expected: "Running or Paused",
                });
            }
        };
        let text = api.call("GET /machine-config", None, STEP_LIMIT)?;
        let config = MachineConfig::parse(&text).map_err(FcError::Config)?;
        let bytes = config.bytes();
        let place = Place::beside(api.path(), instance.process)?;
        let file = place.memory_file(bytes)?;
        let ram = adopt(&file.fd, bytes, file.is_sealed)?;
        info!(
            bytes,
            runs,
            version = instance.vmm_version,
            "Firecracker has a VM to move"
        );
        let (running, unread) = match Running::find(instance.process, bytes) {
            Ok(running) => (Some(running), None),
            Err(why) => (None, Some(why)),
        };
        let vmm = Arc::new(Vmm {
            running,
            ram: Arc::new(ram),
            place,
            api,
            file,
            was_running: runs,
            hold: Mutex::default(),
        });
        Ok(Self {
            config: text,
            vcpus: config.vcpu_count,
            machine: Arc::clone(&vmm) as _,
            devices: [Arc::clone(&vmm) as _],
            vmm,
            unread,
        })
    }

    /// The size of RAM in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.vmm.ram.layout().bytes()
    }

    /// The number of its vCPUs.
    #[must_use]
    pub fn vcpus(&self) -> u32 {
        self.vcpus
    }

    /// Firecracker's own parts of the pause, if there was one.
    #[must_use]
    pub fn pause(&self) -> Option<Pause> {
        self.vmm.hold().parts
    }

    /// Moves the VM, as [`migrate`] does. If its memory cannot be read while it runs, all pages
    /// come by post-copy.
    ///
    /// # Errors
    /// [`SourceError`] says where the VM is.
    pub fn migrate(
        &self,
        route: &Route,
        config: &SourceConfig,
        session: &SourceSession,
        observer: &dyn Observer,
    ) -> Result<SourceReport, SourceError> {
        let vm = RunningVm {
            machine: &self.machine,
            vcpus: &*self.vmm,
            devices: &self.devices,
        };
        session.prepare(config.settings);
        if let Some(why) = &self.unread {
            info!(%why, "Firecracker's memory cannot be read while its VM runs");
            observer.note(&format!(
                "{why}: the VM's memory cannot be read while it runs, so all pages follow it"
            ));
            let now = Change {
                switch: Some(Switch::NOW),
                ..Change::default()
            };
            // If it is refused, the copy in pre-copy is of zeros, which costs time only.
            let _ = session.set(&now);
        }
        let outcome = migrate(&vm, route, &self.config, config, session, observer);
        let failure = match outcome {
            Ok(report) => return Ok(report),
            Err(failure) => failure,
        };
        Err(match self.vmm.hold().not_resumed.take() {
            Some(why) => SourceError::NotResumed {
                failure,
                why: why.into(),
            },
            None => SourceError::Migration(failure),
        })
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source")
            .field("memory_bytes", &self.memory_bytes())
            .finish_non_exhaustive()
    }
}

/// A memfd whose size stays.
pub(super) fn memfd(bytes: u64) -> Result<OwnedFd, FcError> {
    let failed = |e| FcError::io("cannot make a memfd for guest memory", e);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("pageferry-fc", flags).map_err(failed)?;
    rustix::fs::ftruncate(&fd, bytes).map_err(failed)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).map_err(failed)?;
    Ok(fd)
}

/// Guest memory in the order of Firecracker's memory file, without its holes.
pub(super) fn adopt(file: &OwnedFd, bytes: u64, is_sealed: bool) -> Result<GuestRam, FcError> {
    let fd = file.try_clone();
    let fd = fd.map_err(|e| FcError::io("cannot clone a memfd", e))?;
    let region = AdoptedRegion::new(Gpa(0), bytes, fd, 0);
    // Firecracker changes the size only if it has more memory or less, in a pause that then fails.
    let region = if is_sealed {
        region
    } else {
        region.keeps_size()
    };
    // SAFETY: the memfd is new, and no guest has it mapped. At a source, the vCPU of this machine
    // is Firecracker with the copies of `Running`. They alone write it, until `Vcpus::pause`
    // returns. At a destination only this process writes it, through the calls of `machine`.
    Ok(unsafe { GuestRam::adopt(vec![region]) }?)
}

/// A Firecracker whose VM moves: the machine, its vCPUs and its one device.
struct Vmm {
    running: Option<Running>,
    ram: Arc<GuestRam>,
    api: Api,
    place: Place,
    file: MemoryFile,
    was_running: bool,
    hold: Mutex<Hold>,
}

#[derive(Default)]
struct Hold {
    /// Whether we have asked for a pause.
    asked: bool,
    saved: Option<Saved>,
    /// The parts of the last pause.
    parts: Option<Pause>,
    /// Why the VM does not run again.
    not_resumed: Option<FcError>,
}

struct Saved {
    state: Vec<u8>,
    at: (Instant, Instant),
    parts: Pause,
}

impl Vmm {
    fn hold(&self) -> MutexGuard<'_, Hold> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether only Firecracker writes the memfd.
    fn hold_copies(&self, held: bool) {
        if let Some(running) = &self.running {
            running.hold(held);
        }
    }

    /// Pauses the VM, and lets Firecracker save it.
    fn pause_and_save(&self) -> Result<Saved, FcError> {
        let began = Instant::now();
        self.hold_copies(true);
        if self.was_running {
            self.api.set_running(false, STEP_LIMIT)?;
        }
        let stopped = Instant::now();
        let folder = &self.place.meeting.folder;
        let path = folder.path().join("state");
        let body = json!({
            "snapshot_type": "Full",
            "snapshot_path": self.place.inside(&path),
            "mem_file_path": self.file.path,
        });
        let bytes = self.ram.layout().bytes();
        let limit = STEP_LIMIT + Duration::from_secs(bytes / SLOWEST_WRITE);
        self.api.call("PUT /snapshot/create", Some(&body), limit)?;
        let failed = |e| FcError::io("cannot look at the memory file", e);
        let found = rustix::fs::fstat(&self.file.fd).map_err(failed)?.st_size;
        if found as u64 != bytes {
            let why = format!("its memory file has {found} bytes: expected {bytes}");
            return Err(FcError::Config(why));
        }
        let state = read_state(folder)?;
        folder.remove("state");
        let parts = Pause {
            stop: stopped - began,
            save: stopped.elapsed(),
        };
        info!(?parts, state = state.len(), "Firecracker has saved its VM");
        Ok(Saved {
            state,
            at: (began, stopped),
            parts,
        })
    }

    /// Lets the VM run, if it ran.
    fn run_again(&self, hold: &mut Hold) {
        if hold.asked && self.was_running {
            hold.not_resumed = self.api.set_running(true, STEP_LIMIT).err();
            if let Some(why) = &hold.not_resumed {
                warn!(%why, "Firecracker does not resume its VM");
            }
        }
        hold.asked = false;
        // A VM that runs is not the saved one any more.
        hold.saved = None;
        self.hold_copies(false);
    }
}

/// Reads a state file, which has a bounded length.
fn read_state(folder: &Folder) -> Result<Vec<u8>, FcError> {
    let failed = |e| FcError::io("cannot read Firecracker's state file", e);
    let mut state = Vec::new();
    let file = folder.open("state").map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    let mut limited = file.take(MAX_STATE_BYTES + 1);
    limited.read_to_end(&mut state).map_err(failed)?;
    match state.len() as u64 {
        1..=MAX_STATE_BYTES => Ok(state),
        _ => Err(FcError::StateLength(length)),
    }
}

impl Machine for Vmm {
    fn kind(&self) -> MachineKind<'_> {
        KIND
    }
    fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }
    /// A guess from the size: the snapshot is most of it. A double took a third of the time for a
    /// memfd that had its memory before.
    fn blackout_cost(&self) -> BlackoutCost {
        let us = if self.running.is_some() { 300 } else { 1000 };
        let save = Duration::from_micros((self.ram.layout().bytes() >> 20) * us);
        BlackoutCost::new(Duration::from_millis(50) + save, Duration::ZERO)
    }
    fn has_dirty_log(&self) -> bool {
        false
    }
    fn refresh(&self, first: RamPage, pages: u64) -> bool {
        let Some(running) = &self.running else {
            return false;
        };
        running.copy_to(&self.file.fd, first.0..first.0 + pages);
        true
    }
    fn set_dirty_log(&self, on: bool) -> Result<(), MachineError> {
        match on {
            true => Err(MachineError::WrongState(NO_LOG)),
            false => Ok(()),
        }
    }
    fn harvest_dirty(&self, _: &PageBitmap, _: bool) -> Result<usize, MachineError> {
        Err(MachineError::WrongState(NO_LOG))
    }
}

const NO_LOG: &str = "Firecracker shows nobody its dirty log";

impl Vcpus for Vmm {
    /// All of its vCPUs: their states are in the state file.
    fn count(&self) -> usize {
        1
    }
    fn pause(&self, _: Duration) -> Result<PauseReport, MachineError> {
        let mut hold = self.hold();
        if hold.saved.is_none() {
            hold.asked = true;
            match self.pause_and_save() {
                Ok(saved) => {
                    hold.parts = Some(saved.parts);
                    hold.saved = Some(saved);
                }
                Err(error) => {
                    // Also when the pause itself failed: it may have come to pass later.
                    self.run_again(&mut hold);
                    return Err(MachineError::engine(error));
                }
            }
        }
        let Some(saved) = &hold.saved else {
            return Err(MachineError::WrongState("Firecracker has saved nothing"));
        };
        Ok(PauseReport {
            first_stop: saved.at.0,
            last_stop: saved.at.1,
            was_running: self.was_running,
        })
    }
    fn resume(&self) {
        let mut hold = self.hold();
        self.run_again(&mut hold);
    }
    fn inside(&self) -> usize {
        self.hold().saved.is_none().into()
    }
    fn save(&self) -> Result<Vec<VcpuState>, MachineError> {
        let flag = if self.was_running { VM_RUNS } else { VM_PAUSED };
        Ok(vec![VcpuState(vec![flag])])
    }
    fn restore(&self, _: &[VcpuState]) -> Result<(), MachineError> {
        Err(MachineError::WrongState("a source takes no states"))
    }
}

impl Device for Vmm {
    fn name(&self) -> &str {
        STATE_DEVICE
    }
    fn version(&self) -> u32 {
        STATE_VERSION
    }
    /// Firecracker pauses its devices before it saves them.
    fn pause(&self) -> Result<(), MachineError> {
        Ok(())
    }
    fn resume(&self) {}
    fn save(&self) -> Result<Vec<u8>, MachineError> {
        match &self.hold().saved {
            Some(saved) => Ok(saved.state.clone()),
            None => Err(MachineError::WrongState("Firecracker has saved nothing")),
        }
    }
    fn decode<'a>(&'a self, _: u32, _: &[u8]) -> Result<Apply<'a>, MachineError> {
        Err(MachineError::WrongState("a source takes no states"))
    }
}
