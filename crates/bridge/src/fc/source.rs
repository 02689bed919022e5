//! A Firecracker that a VM leaves.
//!
//! **Guarantee.** Until the migration hands the VM over, every failure lets Firecracker's VM run
//! on, or stay paused, as it was. From then on it stays paused.
//!
//! **Mechanism.** Firecracker's memory is private to its process, and no file tells which of its
//! mappings are the guest's. So Firecracker writes it to us: the pause asks for a full snapshot,
//! whose memory file is our memfd. The memfd's size is sealed. A VM of another size cannot be
//! written to it, and that is an error.
//!
//! Until then the memfd has a copy of what is probably the guest's memory ([`Machine::refresh`]).
//! `migration` sends that, and confirms or resends each page after the pause.
//!
//! A VM without a log of dirty pages has a diff snapshot that is whole: it has all pages that are
//! resident, and where the others are known to be zero, that is all ([`resident`]). So the pause
//! grows with the memory that is used. Otherwise the snapshot is full. A full one resets
//! Firecracker's log: the next diff of a chain lacks what the log had.
//!
//! **Neighbours.** `foreign::departure` has the state machine. `running` reads the VM's memory.
#![expect(unsafe_code, reason = "shares memory with another VMM")]

use super::api::{MachineConfig, Whole, instance, mmds, set_running};
use super::jail::{MemoryFile, Place};
use super::running::{Running, resident};
use super::{KIND, STATE_DEVICE, frame};
use crate::foreign::api::Api;
use crate::foreign::departure::{Leaving, Saved};
use crate::foreign::description::Description;
use crate::foreign::disks;
use crate::foreign::keeper::End;
use crate::foreign::kept::Kept;
use crate::foreign::{
    Departure, MAX_STATE_BYTES, Pause, STEP_LIMIT, SourceOptions, VmmError, check_moved,
};
use pageferry_addr::{Gpa, RamPage};
use pageferry_hostfs::Folder;
use pageferry_machine::{AdoptedRegion, BlackoutCost, GuestRam, Machine, MachineKind};
use pageferry_migration::Orphan;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::process::Pid;
use serde_json::json;
use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tracing::info;

/// The bytes that Firecracker writes in a second at least.
const SLOWEST_WRITE: u64 = 64 << 20;

/// Looks at a Firecracker's VM, and makes room for its memory. The VM runs meanwhile.
pub(super) fn depart(options: &mut SourceOptions) -> Result<Departure, VmmError> {
    let api = Api::new(&options.api)?;
    if let Some((kept, _, orphan, fds)) = Kept::found_move(api.path(), End::Source)? {
        return go_on(api, (kept, orphan), fds);
    }
    check_moved(api.path())?;
    let (found, process) = instance(&api, STEP_LIMIT)?;
    let runs = match found.state.as_str() {
        "Running" => true,
        "Paused" => false,
        other => {
            return Err(VmmError::VmState {
                found: other.escape_debug().to_string(),
                expected: "Running or Paused",
            });
        }
    };
    let text = api.call("GET /machine-config", None, STEP_LIMIT)?;
    let config = MachineConfig::parse(&text).map_err(VmmError::Config)?;
    let bytes = config.bytes();
    let place = Place::beside(api.path(), process)?;
    let file = place.memory_file(bytes)?;
    let ram = adopt(&file.fd, bytes, file.is_sealed)?;
    let version = found.vmm_version;
    info!(bytes, runs, version, "Firecracker has a VM to move");
    let whole = Whole::of(&api);
    let mut notes: Vec<String> = whole.lost().into_iter().collect();
    let full = config.track_dirty_pages || resident(process).is_none();
    let running = Running::find(process, bytes, full).inspect_err(|why| {
        notes.push(format!(
            "{why}: the VM's memory cannot be read while it runs, so all pages follow it"
        ));
    });
    let running = running.ok();
    let unread = running.is_none();
    let mut kept = Kept::leaving(runs, true)?;
    let places = (api.path(), place.meeting.folder.path());
    kept.keep(
        options.keeper.as_mut(),
        End::Source,
        places,
        [file.fd.as_fd()],
    )?;
    let vmm = Arc::new(Vmm {
        running,
        ram: Arc::new(ram),
        files: Some((place, file)),
        api: api.clone(),
        asked: AtomicBool::new(false),
        tracks: config.track_dirty_pages,
        process,
        disks: whole.disks(),
    });
    let offer = Description::new(&version, text)?.encode()?;
    let about = (offer, Some(config.vcpu_count));
    let mut departure = Departure::new((vmm, api), about, kept, None);
    (departure.unread, departure.notes) = (unread, notes);
    Ok(departure)
}

/// The move of another process of ours.
fn go_on(
    api: Api,
    (kept, orphan): (Kept, Orphan),
    fds: Vec<OwnedFd>,
) -> Result<Departure, VmmError> {
    let Ok([memory]) = <[OwnedFd; 1]>::try_from(fds) else {
        return Err(VmmError::Kept("it has no memory, or too much".into()));
    };
    let offer = orphan.offer().guest;
    let text = Description::parse(&offer)?.config;
    let config = MachineConfig::parse(text.as_bytes()).map_err(VmmError::Config)?;
    let vmm = Arc::new(Vmm {
        running: None,
        ram: Arc::new(adopt(&memory, config.bytes(), false)?),
        files: None,
        api: api.clone(),
        // It is paused: only an operator takes it back.
        asked: AtomicBool::new(true),
        tracks: false,
        process: None,
        disks: Vec::new(),
    });
    let about = (offer, Some(config.vcpu_count));
    Ok(Departure::new((vmm, api), about, kept, Some(orphan)))
}

/// A memfd whose size stays.
pub(super) fn memfd(bytes: u64) -> Result<OwnedFd, VmmError> {
    let failed = |e| VmmError::io("cannot make a memfd for guest memory", e);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("pageferry-fc", flags).map_err(failed)?;
    rustix::fs::ftruncate(&fd, bytes).map_err(failed)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).map_err(failed)?;
    Ok(fd)
}

/// Guest memory in the order of Firecracker's memory file, without its holes.
pub(super) fn adopt(file: &OwnedFd, bytes: u64, is_sealed: bool) -> Result<GuestRam, VmmError> {
    let fd = file.try_clone();
    let fd = fd.map_err(|e| VmmError::io("cannot clone a memfd", e))?;
    let region = AdoptedRegion::new(Gpa(0), bytes, fd, 0);
    // Firecracker changes the size only if it has more memory or less, in a pause that then fails.
    let region = if is_sealed {
        region
    } else {
        region.keeps_size()
    };
    // SAFETY: the memfd is new, and no guest has it mapped. At a source, the vCPU of this machine
    // is Firecracker with the copies of `Running`. They alone write it, until the pause
    // returns. At a destination only this process writes it, through the calls of `machine`.
    Ok(unsafe { GuestRam::adopt(vec![region]) }?)
}

/// Reads a state file, which has a bounded length.
fn read_state(folder: &Folder) -> Result<Vec<u8>, VmmError> {
    let failed = |e| VmmError::io("cannot read Firecracker's state file", e);
    let mut state = Vec::new();
    let file = folder.open("state").map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    let mut limited = file.take(MAX_STATE_BYTES + 1);
    limited.read_to_end(&mut state).map_err(failed)?;
    match state.len() as u64 {
        1..=MAX_STATE_BYTES => Ok(state),
        _ => Err(VmmError::StateLength(length)),
    }
}

/// A Firecracker whose VM moves.
struct Vmm {
    running: Option<Running>,
    ram: Arc<GuestRam>,
    /// Where it writes. A process that goes on with a move needs nothing more of it.
    files: Option<(Place, MemoryFile)>,
    api: Api,
    /// Whether we have asked for a pause.
    asked: AtomicBool,
    /// Whether its owner has it log dirty pages.
    tracks: bool,
    /// The process, if it is visible here, and the files of its drives.
    process: Option<Pid>,
    disks: Vec<String>,
}

impl Vmm {
    /// Whether only Firecracker writes the memfd.
    fn hold_copies(&self, held: bool) {
        if let Some(running) = &self.running {
            running.hold(held);
        }
    }
}

impl Leaving for Vmm {
    fn state_device(&self) -> &'static str {
        STATE_DEVICE
    }
    fn pause(&self, kept: &Kept, _: Duration) -> Result<Saved, VmmError> {
        let Some((place, memory)) = &self.files else {
            return Err(VmmError::Kept("it was saved before".into()));
        };
        let has_diff = !self.tracks && resident(self.process).is_some();
        let began = Instant::now();
        self.hold_copies(true);
        self.asked.store(true, Ordering::Release);
        kept.pause_asked(true);
        if kept.ran() {
            set_running(&self.api, false, STEP_LIMIT)?;
        }
        let stopped = Instant::now();
        let folder = &place.meeting.folder;
        let path = folder.path().join("state");
        let bytes = self.ram.layout().bytes();
        let limit = STEP_LIMIT + Duration::from_secs(bytes / SLOWEST_WRITE);
        let create = |kind: &str| {
            let body = json!({
                "snapshot_type": kind,
                "snapshot_path": place.inside(&path),
                "mem_file_path": memory.path,
            });
            self.api.call("PUT /snapshot/create", Some(&body), limit)
        };
        let mut saved = false;
        if has_diff {
            // A page that it does not write is zero, whatever was copied before.
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&memory.fd, flags, 0, bytes)
                .map_err(|e| VmmError::io("cannot empty the memory file", e))?;
            saved = match create("Diff") {
                // An older version has no diff of a VM without a log.
                Err(VmmError::Api { .. }) => false,
                other => other.map(|_| true)?,
            };
        }
        if !saved {
            create("Full")?;
        }
        let failed = |e| VmmError::io("cannot look at the memory file", e);
        let found = rustix::fs::fstat(&memory.fd).map_err(failed)?.st_size;
        if found as u64 != bytes {
            let why = format!("its memory file has {found} bytes: expected {bytes}");
            return Err(VmmError::Config(why));
        }
        let mmds = mmds(&self.api)?;
        let state = frame(&mmds, read_state(folder)?);
        folder.remove("state");
        let parts = Pause {
            stop: stopped - began,
            save: stopped.elapsed(),
        };
        info!(?parts, state = state.len(), "Firecracker has saved its VM");
        Ok(Saved {
            state,
            at: (began, stopped),
            parts: Some(parts),
            log_reset: self.tracks,
            notes: disks::flush(self.process, self.disks.iter().map(String::as_str)),
        })
    }
    fn take_back(&self, kept: &Kept) -> Result<(), VmmError> {
        // Also when the pause itself failed: it may have come to pass later.
        let asked = self.asked.swap(false, Ordering::AcqRel);
        let resumed = match asked && kept.ran() {
            true => set_running(&self.api, true, STEP_LIMIT),
            false => Ok(()),
        };
        self.hold_copies(false);
        resumed
    }
    fn look(&self) -> Result<(), VmmError> {
        instance(&self.api, STEP_LIMIT).map(drop)
    }
}

impl Machine for Vmm {
    fn kind(&self) -> MachineKind<'_> {
        KIND
    }
    fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }
    /// The snapshot is most of it. It writes what the copy has written, as fast.
    fn blackout_cost(&self) -> BlackoutCost {
        let all = self.ram.layout().bytes();
        let bytes = match self.tracks {
            true => all,
            false => resident(self.process).unwrap_or(all),
        };
        let measured = self.running.as_ref().and_then(|copy| copy.time_of(bytes));
        // Before the first copy: 1 GiB/s.
        let save = measured.unwrap_or(Duration::from_nanos(bytes));
        BlackoutCost::new(Duration::from_millis(20) + save, Duration::ZERO)
    }
    /// Firecracker shows nobody its dirty log.
    fn has_dirty_log(&self) -> bool {
        false
    }
    fn refresh(&self, first: RamPage, pages: u64) -> bool {
        let (Some(running), Some((_, file))) = (&self.running, &self.files) else {
            return false;
        };
        running.copy_to(&file.fd, first.0..first.0 + pages);
        true
    }
}
