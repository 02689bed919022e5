//! A Cloud Hypervisor that a VM leaves.
//!
//! **Guarantee.** An error response makes Cloud Hypervisor take its VM back: it runs on, or stays
//! paused, as it was.
//!
//! **Mechanism.** Cloud Hypervisor sends its VM to our socket. Its memfds come first, while the VM
//! runs. It pauses when its Config is answered, and ends when Complete is. So the pause is the
//! answer to Config, and an error response to State takes the VM back. State and Complete are
//! answered when the destination says that it runs the VM.
//!
//! **Neighbours.** `foreign::departure` has the state machine.
#![expect(unsafe_code, reason = "takes the memory of another VMM")]

use super::link::{Limit, Link};
use super::wire::{self, Command, Status};
use super::{KIND, STATE_DEVICE, version};
use crate::foreign::api::{Api, Call, Meeting};
use crate::foreign::departure::{Leaving, Saved};
use crate::foreign::description::Description;
use crate::foreign::disks;
use crate::foreign::keeper::End;
use crate::foreign::kept::Kept;
use crate::foreign::{Departure, STEP_LIMIT, SourceOptions, VmmError, check_moved};
use pageferry_addr::Gpa;
use pageferry_machine::{AdoptedRegion, BlackoutCost, GuestRam, Machine, MachineKind};
use pageferry_migration::Orphan;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::Pid;
use serde_json::json;
use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{error, info};

/// The pause and the snapshot of a real process took 19 ms with 128 MiB.
const COST: BlackoutCost = BlackoutCost::new(Duration::from_millis(20), Duration::ZERO);
/// The interval of looks at a Cloud Hypervisor that waits for us.
const WATCH: Duration = Duration::from_millis(50);

/// Makes Cloud Hypervisor send its VM, and takes its memory.
pub(super) fn depart(
    options: &mut SourceOptions,
    stop: &dyn Fn() -> bool,
) -> Result<Departure, VmmError> {
    let api = Api::new(&options.api)?;
    if let Some((kept, _, orphan, fds)) = Kept::found_move(api.path(), End::Source)? {
        return go_on(api, (kept, orphan), fds);
    }
    check_moved(api.path())?;
    let (version, process) = version(&api)?;
    let runs = vm_runs(&api)?;
    let meeting = Meeting::beside(api.path())?;
    let failed = |e| VmmError::io(format!("cannot listen on {}", meeting.socket.display()), e);
    let listener = meeting.listen().map_err(failed)?;
    let mut body = json!({ "destination_url": meeting.url(), "local": true });
    if options.preserve {
        body["preserve_source"] = true.into();
    }
    let mut call = api.begin("PUT /api/v1/vm.send-migration", Some(&body))?;
    let stream = call.until("connect", STEP_LIMIT, stop, || match listener.accept() {
        Ok((stream, _)) => Ok(Some(stream)),
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
        Err(e) => Err(failed(e)),
    })?;
    let link = Link::new(stream)?;
    let taken = receive_vm(&link, stop).and_then(|(config, ram, fds)| {
        let mut kept = Kept::leaving(runs, options.preserve)?;
        let of_vmm = std::iter::once(link.as_fd()).chain(fds.iter().map(OwnedFd::as_fd));
        let places = (api.path(), meeting.folder.path());
        kept.keep(options.keeper.as_mut(), End::Source, places, of_vmm)?;
        Ok((config, ram, kept))
    });
    let (config, ram, kept) = taken.inspect_err(|_| refuse(&link))?;
    let bytes = ram.layout().bytes();
    info!(bytes, runs, "Cloud Hypervisor offers its VM");
    let vcpus = wire::boot_vcpus(&config);
    let disks = wire::disks(&config);
    let vmm = Vmm::new((api.clone(), ram), link, Stage::Asked, Some(call));
    let vmm = Arc::new(Vmm {
        process,
        disks,
        ..vmm
    });
    let offer = Description::new(&version, config)?.encode()?;
    Ok(Departure::new((vmm, api), (offer, vcpus), kept, None))
}

/// The move of another process of ours.
fn go_on(
    api: Api,
    (kept, orphan): (Kept, Orphan),
    fds: Vec<OwnedFd>,
) -> Result<Departure, VmmError> {
    let offer = orphan.offer().guest;
    let config = Description::parse(&offer)?.config.into_bytes();
    let mappings = wire::mappings(&config)?;
    let found = fds.len();
    let mut fds = fds.into_iter();
    let (Some(link), true) = (fds.next(), found == 1 + mappings.len()) else {
        return Err(VmmError::Kept(format!(
            "{found} descriptors, expected {}",
            1 + mappings.len()
        )));
    };
    let slots = mappings.iter().map(|mapping| mapping.slot);
    let (ram, _) = memory(&mappings, slots.zip(fds).collect())?;
    let stage = match kept.is_released() {
        true => Stage::Released,
        false => Stage::Paused,
    };
    let link = Link::new(link.into())?;
    let vmm = Arc::new(Vmm::new((api.clone(), ram), link, stage, None));
    let vcpus = wire::boot_vcpus(&config);
    Ok(Departure::new(
        (vmm, api),
        (config, vcpus),
        kept,
        Some(orphan),
    ))
}

/// Whether the VM runs. Otherwise it is paused. Refuses one whose memory nobody else can have.
fn vm_runs(api: &Api) -> Result<bool, VmmError> {
    #[derive(serde::Deserialize)]
    struct Info {
        state: String,
        #[serde(default)]
        config: serde_json::Value,
    }
    let (info, _) = api.get::<Info>("GET /api/v1/vm.info", STEP_LIMIT)?;
    let memory = &info.config["memory"];
    if memory["shared"] == false && memory["zones"].as_array().is_none_or(Vec::is_empty) {
        return Err(VmmError::NotShared);
    }
    match info.state.as_str() {
        "Running" => Ok(true),
        "Paused" => Ok(false),
        other => Err(VmmError::VmState {
            found: other.escape_debug().to_string(),
            expected: "Running or Paused",
        }),
    }
}

/// Answers by an error, and ends the connection. Cloud Hypervisor then takes its VM back.
fn refuse(link: &Link) {
    let _ = link.answer(Status::Error);
    link.shutdown();
}

/// Receives all up to Config, which is not answered.
fn receive_vm(
    link: &Link,
    stop: &dyn Fn() -> bool,
) -> Result<(Vec<u8>, GuestRam, Vec<OwnedFd>), VmmError> {
    let limit = Limit::new(STEP_LIMIT);
    let mut fds: HashMap<u32, OwnedFd> = HashMap::new();
    let mut started = false;
    loop {
        if stop() {
            return Err(VmmError::Stopped);
        }
        let request = link.request("send its VM", limit)?;
        match request.command {
            Command::Start if !started => started = true,
            Command::MemoryFd if started => {
                let (slot, fd) = link.memory_fd(limit)?;
                let why = match fds.len() {
                    wire::MAX_MAPPINGS => "there are too many memfds",
                    _ if fds.insert(slot, fd).is_some() => "it came twice",
                    _ => "",
                };
                if !why.is_empty() {
                    let why = why.into();
                    return Err(VmmError::Memfd { slot, why });
                }
            }
            // Without memfds, the bytes would come in Memory requests.
            Command::Memory => return Err(VmmError::NotShared),
            Command::Config if started => {
                let config = link.payload(request, "send its Config", limit)?;
                let (ram, fds) = memory(&wire::mappings(&config)?, fds)?;
                return Ok((config, ram, fds));
            }
            Command::Abandon => return Err(VmmError::Abandoned),
            other if started => return Err(out_of_order(other, "MemoryFd or Config")),
            other => return Err(out_of_order(other, "Start")),
        }
        link.answer(Status::Ok)?;
    }
}

/// Makes guest memory of the memfds of a VM. Returns these in the order of its mappings, too.
fn memory(
    mappings: &[wire::Mapping],
    mut fds: HashMap<u32, OwnedFd>,
) -> Result<(GuestRam, Vec<OwnedFd>), VmmError> {
    if fds.is_empty() {
        return Err(VmmError::NotShared);
    }
    let refused = |slot, why: &str| VmmError::Memfd {
        slot,
        why: why.into(),
    };
    let mut regions = Vec::with_capacity(mappings.len());
    let mut kept = Vec::with_capacity(mappings.len());
    for mapping in mappings {
        let slot = mapping.slot;
        let fd = fds.remove(&slot);
        let fd = fd.ok_or_else(|| refused(slot, "it did not come, and Config maps it"))?;
        let clone = fd.try_clone();
        kept.push(clone.map_err(|e| VmmError::io("cannot clone a memfd", e))?);
        let region = AdoptedRegion::new(Gpa(mapping.gpa), mapping.size, fd, mapping.file_offset);
        // Its memfds cannot be sealed.
        regions.push(region.keeps_size());
    }
    if let Some(slot) = fds.keys().next() {
        return Err(refused(*slot, "Config does not map it"));
    }
    // SAFETY: the memory belongs to Cloud Hypervisor, whose VM writes it. It pauses all of its
    // writers, which are the vCPUs of this machine, before it sends State. We write none of it.
    let ram = unsafe { GuestRam::adopt(regions) }?;
    if ram.backing().is_hugetlb() {
        let why = "huge pages of a pool cannot move yet: start the VM with hugepages=off";
        return Err(refused(mappings[0].slot, why));
    }
    Ok((ram, kept))
}

/// A Cloud Hypervisor whose VM moves.
struct Vmm {
    ram: Arc<GuestRam>,
    hold: Mutex<Hold>,
    api: Api,
    /// The wait for the answer to `vm.send-migration`.
    _call: Option<Mutex<Call>>,
    /// The process, if it is visible here, and the files of its disks.
    process: Option<Pid>,
    disks: Vec<String>,
}

/// How far Cloud Hypervisor has come.
struct Hold {
    link: Link,
    stage: Stage,
}

enum Stage {
    /// It waits for the answer to Config. Its VM runs.
    Asked,
    /// It has the answer, and pauses.
    Pausing,
    /// It is paused, and waits for the answer to State.
    Paused,
    /// It has the answer to Complete.
    Released,
    /// It has an error, and takes its VM back.
    Refused,
}

impl Hold {
    /// Makes Cloud Hypervisor take its VM back, if it can.
    fn refuse(&mut self) {
        match self.stage {
            Stage::Asked | Stage::Paused => refuse(&self.link),
            // It takes the end of the connection for an error.
            Stage::Pausing => self.link.shutdown(),
            Stage::Released | Stage::Refused => return,
        }
        self.stage = Stage::Refused;
    }

    /// Lets Cloud Hypervisor pause, and waits for its State.
    fn pause(&mut self, limit: Duration) -> Result<Saved, VmmError> {
        const WHAT: &str = "pause, and send its State";
        let began = Instant::now();
        if let Stage::Asked = self.stage {
            self.link.answer(Status::Ok)?;
            self.stage = Stage::Pausing;
        }
        if !matches!(self.stage, Stage::Pausing) {
            return Err(VmmError::Closed(WHAT));
        }
        let limit = Limit::new(limit);
        let request = self.link.request(WHAT, limit)?;
        match request.command {
            Command::State => {}
            Command::Abandon => return Err(VmmError::Abandoned),
            other => return Err(out_of_order(other, "State")),
        }
        let state = self.link.payload(request, WHAT, limit)?;
        self.stage = Stage::Paused;
        Ok(Saved {
            state,
            at: (began, Instant::now()),
            parts: None,
            log_reset: false,
            notes: Vec::new(),
        })
    }

    /// Lets Cloud Hypervisor end: another process has its VM.
    fn release(&mut self) -> Result<(), VmmError> {
        let limit = Limit::new(STEP_LIMIT);
        self.link.answer(Status::Ok)?;
        let request = self.link.request("complete", limit)?;
        self.stage = Stage::Released;
        // Anything but a success would make it run its VM again.
        self.link.answer(Status::Ok)?;
        match request.command {
            Command::Complete | Command::CompletePaused => Ok(()),
            other => Err(out_of_order(other, "Complete or CompletePaused")),
        }
    }
}

fn out_of_order(found: Command, expected: &'static str) -> VmmError {
    let found = format!("{found:?}");
    VmmError::Order { found, expected }
}

impl Vmm {
    fn new((api, ram): (Api, GuestRam), link: Link, stage: Stage, call: Option<Call>) -> Self {
        Self {
            ram: Arc::new(ram),
            hold: Mutex::new(Hold { link, stage }),
            api,
            _call: call.map(Mutex::new),
            process: None,
            disks: Vec::new(),
        }
    }

    fn hold(&self) -> MutexGuard<'_, Hold> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Leaving for Vmm {
    fn state_device(&self) -> &'static str {
        STATE_DEVICE
    }
    fn pause(&self, _: &Kept, limit: Duration) -> Result<Saved, VmmError> {
        let mut saved = self.hold().pause(limit)?;
        let disks = self.disks.iter().map(String::as_str);
        saved.notes = disks::flush(self.process, disks);
        Ok(saved)
    }
    fn take_back(&self, kept: &Kept) -> Result<(), VmmError> {
        let mut hold = self.hold();
        if !matches!(hold.stage, Stage::Released) {
            hold.refuse();
            return Ok(());
        }
        // An operator takes the VM back. It is there only if it was preserved.
        match kept.preserves() {
            true => self
                .api
                .call("PUT /api/v1/vm.resume", None, STEP_LIMIT)
                .map(drop),
            false => Err(VmmError::VmState {
                found: "gone".into(),
                expected: "Paused",
            }),
        }
    }
    fn release(&self, kept: &Kept) {
        let mut hold = self.hold();
        if !matches!(hold.stage, Stage::Paused) {
            return;
        }
        match hold.release() {
            Ok(()) => info!("Cloud Hypervisor has handed its VM over"),
            // It had its answers from a process that died before it could note that.
            Err(VmmError::Closed(_)) if kept.was_handed_over() => {
                info!("Cloud Hypervisor has ended");
            }
            // Without its process there is no VM either. If it lives, it may have an own opinion.
            Err(error) => {
                error!(%error, "the VM runs at the destination; see that it does not run here");
            }
        }
        hold.stage = Stage::Released;
        kept.release();
    }
    fn watch(&self, over: &AtomicBool) -> Option<VmmError> {
        let link = self.hold().link.try_clone().ok()?;
        let speaks = |limit: Duration| {
            let mut fds = [PollFd::new(&link, PollFlags::IN)];
            let limit = Timespec::try_from(limit).ok();
            rustix::event::poll(&mut fds, limit.as_ref()).is_ok_and(|ready| ready > 0)
        };
        while !over.load(Ordering::Acquire) {
            if !speaks(WATCH) {
                continue;
            }
            let mut hold = self.hold();
            if !matches!(hold.stage, Stage::Asked) {
                return None;
            }
            if speaks(Duration::ZERO) {
                let said = hold.link.try_request("give up", Limit::new(WATCH));
                hold.refuse();
                return Some(match said {
                    Ok(None) => VmmError::Closed("pause"),
                    Ok(Some(request)) if request.command == Command::Abandon => VmmError::Abandoned,
                    Ok(Some(request)) => out_of_order(request.command, "nothing"),
                    Err(error) => error,
                });
            }
        }
        None
    }
    fn keeps(&self, kept: &Kept) -> bool {
        kept.preserves()
    }
    fn look(&self) -> Result<(), VmmError> {
        vm_runs(&self.api).map(drop)
    }
}

impl Machine for Vmm {
    fn kind(&self) -> MachineKind<'_> {
        KIND
    }
    fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }
    fn blackout_cost(&self) -> BlackoutCost {
        COST
    }
    /// The writes of another process's vCPUs are in no log of ours.
    fn has_dirty_log(&self) -> bool {
        false
    }
}
