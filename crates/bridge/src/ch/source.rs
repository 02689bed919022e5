//! The seam of a Cloud Hypervisor that a VM leaves.
//!
//! **Guarantee.** Until the migration hands the VM over, every failure makes Cloud Hypervisor take
//! its VM back: it runs on, or stays paused, as it was. From then on this side never makes it run
//! the VM again.
//!
//! **Mechanism.** Cloud Hypervisor sends its VM to our socket. Its memfds come first, while the VM
//! runs. It pauses when its Config is answered, and ends when Complete is. So [`Vcpus::pause`] is
//! the answer to Config, and [`Vcpus::resume`] is an error response to State. State and Complete
//! are answered right behind `Go`.
//!
//! **Neighbours.** `migration` moves the VM. `destination` is the other seam.
#![expect(unsafe_code, reason = "takes the memory of another VMM")]

use super::api::{Api, Call, Meeting, until};
use super::error::ChError;
use super::left::{FoundMove, Left};
use super::link::{Limit, Link};
use super::wire::{self, Command, Status};
use super::{KIND, STATE_DEVICE, STATE_VERSION, VM_PAUSED, VM_RUNS};
use pageferry_addr::Gpa;
use pageferry_machine::{
    AdoptedRegion, Apply, BlackoutCost, Device, GuestRam, Machine, MachineError, MachineKind,
    PauseReport, VcpuState, Vcpus,
};
use pageferry_migration::{
    Observer, Orphan, Phase, Route, RunningVm, SourceConfig, SourceFailure, SourceReport,
    SourceSession, SourceVm, go_on, migrate,
};
use pageferry_userfault::PageBitmap;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command as ProcessCommand;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

/// The pause and the snapshot of a real process took 160 ms in a nested machine.
const COST: BlackoutCost = BlackoutCost::new(Duration::from_millis(160), Duration::ZERO);
/// The limit of a step that Cloud Hypervisor does not wait for anybody in.
const STEP_LIMIT: Duration = Duration::from_secs(30);
/// The interval of looks at a Cloud Hypervisor that waits for us.
const WATCH: Duration = Duration::from_millis(50);

/// The choices for a Cloud Hypervisor that a VM leaves.
#[derive(Debug)]
pub struct SourceOptions {
    /// Its API socket.
    pub api: PathBuf,
    /// Whether its VM stays there, paused, when it has moved (`preserve_source`, newer than v53).
    /// It then keeps its locks of disks, which the destination may need.
    pub preserve: bool,
    /// The command of a program that calls [`keep`](super::keep) at once. With it, the move
    /// outlives this process, from the hand-over on. Its standard input and output are set.
    pub keeper: Option<ProcessCommand>,
}

/// A failed move, seen from the source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// Cloud Hypervisor did something else than send its VM. The VM is where it was.
    #[error("{0}; the VM stays with its Cloud Hypervisor")]
    Vmm(#[from] ChError),
    /// The migration failed, and says where the VM is.
    #[error(transparent)]
    Migration(SourceFailure),
    /// The migration failed behind the hand-over. Cloud Hypervisor had ended by then.
    #[error(
        "{}; the VM was handed over, and its Cloud Hypervisor has ended: only with preserve_source \
         it keeps a paused VM",
        _0.error
    )]
    Ended(SourceFailure),
    /// An operator took the VM back, but it does not run.
    #[error("{}; the VM was handed over, and cannot be resumed here: {why}", failure.error)]
    NotResumed {
        /// The failure.
        failure: SourceFailure,
        /// The reason.
        why: Box<ChError>,
    },
}

/// A VM that its Cloud Hypervisor is sending to us. It still runs. Dropping this sends it back.
pub struct Source {
    vmm: Arc<Vmm>,
    config: Vec<u8>,
    /// The move that another process has handed over.
    orphan: Option<Orphan>,
    machine: Arc<dyn Machine>,
    devices: [Arc<dyn Device>; 1],
}

impl Source {
    /// Makes Cloud Hypervisor send its VM, and takes its memory. The VM runs meanwhile. If another
    /// process has handed the VM over, and died, this is that move.
    ///
    /// # Errors
    /// When the process cannot be reached, sends something else, or its memory cannot move. The VM
    /// is as it was.
    pub fn take(options: &mut SourceOptions, stop: &dyn Fn() -> bool) -> Result<Self, ChError> {
        if let Some(found) = FoundMove::at(&options.api)? {
            return Self::found(&options.api, found);
        }
        let api = Api::new(&options.api);
        let runs = api.vm_runs(STEP_LIMIT)?;
        let meeting = Meeting::beside(api.path())?;
        let failed = |e| ChError::io(format!("cannot listen on {}", meeting.socket.display()), e);
        let listener = meeting.listen().map_err(failed)?;
        let mut body = serde_json::json!({ "destination_url": meeting.url(), "local": true });
        if options.preserve {
            body["preserve_source"] = true.into();
        }
        let call = api.begin("vm.send-migration", Some(&body.to_string()))?;
        let stream = until("connect", STEP_LIMIT, &call, stop, || {
            match listener.accept() {
                Ok((stream, _)) => Ok(Some(stream)),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
                Err(e) => Err(failed(e)),
            }
        })?;
        let link = Link::new(stream)?;
        let taken = receive_vm(&link, stop).and_then(|(config, ram, fds)| {
            let mut left = Left::new(runs, options.preserve)?;
            if let Some(command) = &mut options.keeper {
                left.keep(command, (api.path(), meeting.folder.path()), &link, &fds)?;
            }
            Ok((config, ram, left))
        });
        let (config, ram, left) = taken.inspect_err(|_| refuse(&link))?;
        info!(
            bytes = ram.layout().bytes(),
            runs, "Cloud Hypervisor offers its VM"
        );
        let vmm = Arc::new(Vmm {
            ram: Arc::new(ram),
            was_running: runs,
            hold: Mutex::new(Hold {
                link,
                stage: Stage::Asked,
                departed: None,
                not_resumed: None,
            }),
            api,
            left,
            _call: Some(call),
        });
        Ok(Self {
            config,
            orphan: None,
            machine: Arc::clone(&vmm) as _,
            devices: [Arc::clone(&vmm) as _],
            vmm,
        })
    }

    /// The move of another process.
    fn found(api: &Path, found: FoundMove) -> Result<Self, ChError> {
        let FoundMove {
            left,
            orphan,
            link,
            ram,
        } = found;
        let config = orphan.offer().guest;
        let mappings = wire::mappings(&config)?;
        if mappings.len() != ram.len() {
            let (memfds, regions) = (ram.len(), mappings.len());
            return Err(ChError::Kept(format!(
                "{memfds} memfds, expected {regions}"
            )));
        }
        let slots = mappings.iter().map(|mapping| mapping.slot);
        let (ram, _) = memory(&mappings, slots.zip(ram).collect())?;
        let now = Instant::now();
        let stage = match left.is_released() {
            true => Stage::Released,
            false => Stage::Paused {
                state: Vec::new(),
                at: (now, now),
            },
        };
        let vmm = Arc::new(Vmm {
            ram: Arc::new(ram),
            was_running: !orphan.paused,
            hold: Mutex::new(Hold {
                link,
                stage,
                departed: None,
                not_resumed: None,
            }),
            api: Api::new(api),
            left,
            _call: None,
        });
        Ok(Self {
            config,
            orphan: Some(orphan),
            machine: Arc::clone(&vmm) as _,
            devices: [Arc::clone(&vmm) as _],
            vmm,
        })
    }

    /// Whether this is the move of a process that died behind the hand-over.
    #[must_use]
    pub fn goes_on(&self) -> bool {
        self.orphan.is_some()
    }

    /// The size of RAM in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.vmm.ram.layout().bytes()
    }

    /// The number of its vCPUs, if its Config tells.
    #[must_use]
    pub fn vcpus(&self) -> Option<u32> {
        wire::boot_vcpus(&self.config)
    }

    /// Moves the VM, as [`migrate`] does.
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
        let (release, released) = channel();
        let over = AtomicBool::new(false);
        let outcome = std::thread::scope(|scope| {
            let _over = SetOnDrop(&over);
            scope.spawn(|| self.vmm.watch(&over, session));
            let vmm = &self.vmm;
            scope.spawn(move || {
                if released.recv().is_ok() {
                    vmm.release();
                }
            });
            let observer = Releasing {
                observer,
                left: &self.vmm.left,
                release: Mutex::new(Some(release)),
            };
            match &self.orphan {
                Some(orphan) => go_on(&vm, route, orphan, config, session, &observer),
                None => migrate(&vm, route, &self.config, config, session, &observer),
            }
        });
        let failure = match outcome {
            Ok(report) => return Ok(report),
            Err(failure) => failure,
        };
        let mut hold = self.vmm.hold();
        if failure.vm == SourceVm::Runs {
            hold.refuse();
            return Err(match hold.departed.take() {
                Some(departed) => departed.into(),
                None => SourceError::Migration(failure),
            });
        }
        Err(match hold.not_resumed.take() {
            Some(why) => SourceError::NotResumed {
                failure,
                why: why.into(),
            },
            None if !self.vmm.left.preserves() => SourceError::Ended(failure),
            None => SourceError::Migration(failure),
        })
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.vmm.left.end();
        self.vmm.hold().refuse();
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source")
            .field("memory_bytes", &self.memory_bytes())
            .finish_non_exhaustive()
    }
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Says when the VM is handed over.
struct Releasing<'a> {
    observer: &'a dyn Observer,
    left: &'a Left,
    release: Mutex<Option<Sender<()>>>,
}

impl Observer for Releasing<'_> {
    fn phase(&self, phase: Phase) {
        let mut release = self.release.lock().unwrap_or_else(PoisonError::into_inner);
        if phase == Phase::Postcopy
            && let Some(release) = release.take()
        {
            let _ = release.send(());
        }
        self.observer.phase(phase);
    }
    fn progress(&self, phase: Phase, done: u64, total: u64) {
        self.observer.progress(phase, done, total);
    }
    fn allocated(&self, done: u64, total: u64) {
        self.observer.allocated(done, total);
    }
    fn handing_over(&self, record: &[u8], missing: u64) {
        self.left.hand_over(record, missing);
    }
    fn note(&self, text: &str) {
        self.observer.note(text);
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
) -> Result<(Vec<u8>, GuestRam, Vec<OwnedFd>), ChError> {
    let limit = Limit::new(STEP_LIMIT);
    let mut fds: HashMap<u32, OwnedFd> = HashMap::new();
    let mut started = false;
    loop {
        if stop() {
            return Err(ChError::Stopped);
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
                    return Err(ChError::Memfd { slot, why });
                }
            }
            // Without memfds, the bytes would come in Memory requests.
            Command::Memory => return Err(ChError::NotShared),
            Command::Config if started => {
                let config = link.payload(request, "send its Config", limit)?;
                let (ram, fds) = memory(&wire::mappings(&config)?, fds)?;
                return Ok((config, ram, fds));
            }
            Command::Abandon => return Err(ChError::Abandoned),
            other => {
                let expected = if started {
                    "MemoryFd or Config"
                } else {
                    "Start"
                };
                let found = format!("{other:?}");
                return Err(ChError::Order { found, expected });
            }
        }
        link.answer(Status::Ok)?;
    }
}

/// Makes guest memory of the memfds of a VM. Returns these in the order of its mappings, too.
fn memory(
    mappings: &[wire::Mapping],
    mut fds: HashMap<u32, OwnedFd>,
) -> Result<(GuestRam, Vec<OwnedFd>), ChError> {
    if fds.is_empty() {
        return Err(ChError::NotShared);
    }
    let refused = |slot, why: &str| ChError::Memfd {
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
        kept.push(clone.map_err(|e| ChError::io("cannot clone a memfd", e))?);
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

/// A Cloud Hypervisor whose VM moves: the machine, its vCPUs and its one device.
struct Vmm {
    ram: Arc<GuestRam>,
    was_running: bool,
    hold: Mutex<Hold>,
    api: Api,
    left: Left,
    /// The wait for the answer to `vm.send-migration`.
    _call: Option<Call>,
}

/// How far Cloud Hypervisor has come.
struct Hold {
    link: Link,
    stage: Stage,
    /// Why it gave up before it paused.
    departed: Option<ChError>,
    /// Why it did not resume a VM that was handed over.
    not_resumed: Option<ChError>,
}

enum Stage {
    /// It waits for the answer to Config. Its VM runs.
    Asked,
    /// It has the answer, and pauses.
    Pausing,
    /// It is paused, and waits for the answer to State.
    Paused {
        state: Vec<u8>,
        at: (Instant, Instant),
    },
    /// It has the answer to Complete.
    Released,
    /// It has an error, and takes its VM back.
    Refused,
}

impl Hold {
    /// Makes Cloud Hypervisor take its VM back, if it can.
    fn refuse(&mut self) {
        match self.stage {
            Stage::Asked | Stage::Paused { .. } => refuse(&self.link),
            // It takes the end of the connection for an error.
            Stage::Pausing => self.link.shutdown(),
            Stage::Released | Stage::Refused => return,
        }
        self.stage = Stage::Refused;
    }

    /// Lets Cloud Hypervisor pause, and waits for its State.
    fn pause(&mut self, limit: Duration) -> Result<(), ChError> {
        let began = Instant::now();
        if let Stage::Asked = self.stage {
            self.link.answer(Status::Ok)?;
            self.stage = Stage::Pausing;
        }
        if !matches!(self.stage, Stage::Pausing) {
            return Ok(());
        }
        const WHAT: &str = "pause, and send its State";
        let limit = Limit::new(limit);
        let request = self.link.request(WHAT, limit)?;
        match request.command {
            Command::State => {}
            Command::Abandon => return Err(ChError::Abandoned),
            other => {
                return Err(ChError::Order {
                    found: format!("{other:?}"),
                    expected: "State",
                });
            }
        }
        let state = self.link.payload(request, WHAT, limit)?;
        let at = (began, Instant::now());
        self.stage = Stage::Paused { state, at };
        Ok(())
    }

    /// Lets Cloud Hypervisor end: another process has its VM.
    fn release(&mut self) -> Result<(), ChError> {
        let limit = Limit::new(STEP_LIMIT);
        self.link.answer(Status::Ok)?;
        let request = self.link.request("complete", limit)?;
        self.stage = Stage::Released;
        // Anything but a success would make it run its VM again.
        self.link.answer(Status::Ok)?;
        match request.command {
            Command::Complete | Command::CompletePaused => Ok(()),
            other => Err(ChError::Order {
                found: format!("{other:?}"),
                expected: "Complete or CompletePaused",
            }),
        }
    }
}

impl Vmm {
    fn hold(&self) -> MutexGuard<'_, Hold> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another process has the VM.
    fn release(&self) {
        let mut hold = self.hold();
        if !matches!(hold.stage, Stage::Paused { .. }) {
            return;
        }
        match hold.release() {
            Ok(()) => info!("Cloud Hypervisor has handed its VM over"),
            // It had its answers from a process that died before it could note that.
            Err(ChError::Closed(_)) if self.left.was_handed_over() => {
                info!("Cloud Hypervisor has ended");
            }
            // Without its process there is no VM either. If it lives, it may have an own opinion.
            Err(error) => {
                error!(%error, "the VM runs at the destination; see that it does not run here");
            }
        }
        hold.stage = Stage::Released;
        self.left.release();
    }

    /// Cancels the migration when Cloud Hypervisor gives up while it waits for us.
    fn watch(&self, over: &AtomicBool, session: &SourceSession) {
        let Ok(link) = self.hold().link.try_clone() else {
            return;
        };
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
                return;
            }
            if speaks(Duration::ZERO) {
                let limit = Limit::new(WATCH);
                let said = hold.link.try_request("give up", limit);
                let departed = match said {
                    Ok(None) => ChError::Closed("pause"),
                    Ok(Some(request)) if request.command == Command::Abandon => ChError::Abandoned,
                    Ok(Some(request)) => ChError::Order {
                        found: format!("{:?}", request.command),
                        expected: "nothing",
                    },
                    Err(error) => error,
                };
                warn!(%departed, "Cloud Hypervisor has left the migration");
                hold.departed = Some(departed);
                hold.refuse();
                drop(hold);
                return session.cancel();
            }
        }
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

const NO_LOG: &str = "Cloud Hypervisor shows nobody its dirty log";

impl Vcpus for Vmm {
    /// All of its vCPUs: their states are in State.
    fn count(&self) -> usize {
        1
    }
    fn pause(&self, limit: Duration) -> Result<PauseReport, MachineError> {
        let mut hold = self.hold();
        hold.pause(limit).map_err(MachineError::engine)?;
        let Stage::Paused { at, .. } = &hold.stage else {
            return Err(MachineError::WrongState("Cloud Hypervisor has its VM back"));
        };
        Ok(PauseReport {
            first_stop: at.0,
            last_stop: at.1,
            was_running: self.was_running,
        })
    }
    fn resume(&self) {
        let mut hold = self.hold();
        if matches!(hold.stage, Stage::Released) {
            // An operator takes the VM back. It is there only if it was preserved.
            let resumed = match self.left.preserves() {
                true => self.api.call("vm.resume", Some(""), STEP_LIMIT).map(drop),
                false => Err(ChError::VmState("gone".into())),
            };
            hold.not_resumed = resumed.err();
        }
        hold.refuse();
    }
    fn inside(&self) -> usize {
        matches!(self.hold().stage, Stage::Asked | Stage::Pausing).into()
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
    /// Cloud Hypervisor pauses its devices before it sends State.
    fn pause(&self) -> Result<(), MachineError> {
        Ok(())
    }
    fn resume(&self) {}
    fn save(&self) -> Result<Vec<u8>, MachineError> {
        match &self.hold().stage {
            Stage::Paused { state, .. } => Ok(state.clone()),
            _ => Err(MachineError::WrongState("Cloud Hypervisor is not paused")),
        }
    }
    fn decode<'a>(&'a self, _: u32, _: &[u8]) -> Result<Apply<'a>, MachineError> {
        Err(MachineError::WrongState("a source takes no states"))
    }
}
