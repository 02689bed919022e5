//! The seam of a Firecracker that a VM arrives at.
//!
//! **Guarantee.** A process that refuses the VM before `Go` costs nothing: the VM runs on at the
//! source.
//!
//! **Mechanism.** Pages arrive in a memfd of ours. In the switch-over the process loads the state
//! file, and sends us the userfaultfd of its memory. From then on pages are copied there, and their
//! place in the memfd is freed.
//!
//! The process may touch a missing page while it loads. Such a page comes only behind `Go`. So the
//! VM counts as loaded when the load is answered, or when the process waits for a page. If it
//! refuses the state later than that, the VM is lost here, and given up.
//!
//! **Neighbours.** `migration` brings the pages, `memory` places them. `source` is the other seam.
#![expect(unsafe_code, reason = "reads pages that have arrived")]

use super::api::{Api, Call, MachineConfig};
use super::error::FcError;
use super::jail::Place;
use super::memory::Memory;
use super::source::{adopt, memfd};
use super::{KIND, MAX_STATE_BYTES, STATE_DEVICE, STATE_VERSION, STEP_LIMIT, VM_PAUSED, VM_RUNS};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::{
    Apply, ArmOptions, Delivery, DeliveryInUse, Device, FaultEvent, FaultEvents, GuestRam, Machine,
    MachineError, MachineKind, PauseReport, VcpuState, Vcpus,
};
use pageferry_migration::{
    Destination, DestinationFailure, DestinationReport, Incoming, MigrationError, Observer, Offer,
    Resolver, RunningVm,
};
use pageferry_pager::Handshake;
use pageferry_transport::Bell;
use pageferry_userfault::PageBitmap;
use rustix::event::epoll;
use serde_json::json;
use std::io::Write as _;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::{error, info};

/// The interval of looks at what has changed.
const WATCH: Duration = Duration::from_millis(20);

/// The choices for a Firecracker that waits for a VM.
#[derive(Clone, Debug)]
pub struct ReceiverOptions {
    /// Its API socket.
    pub api: PathBuf,
    /// The differences from the source.
    pub overrides: Overrides,
}

/// The things of this host that take the place of those that a VM had at its source. Firecracker
/// refuses what its version does not know, before `Go`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// The names of network interfaces in the VM's configuration, and their tap devices here.
    pub network: Vec<(String, String)>,
    /// The Unix socket of the VM's vsock device (since 1.16).
    pub vsock: Option<PathBuf>,
    /// Whether the guest's clock is advanced by the time of the move (x86-64).
    pub clock_realtime: bool,
}

impl Overrides {
    /// Adds them to the body of a load. An older version knows none of the fields.
    fn add_to(&self, body: &mut serde_json::Value) {
        if !self.network.is_empty() {
            let taps = self
                .network
                .iter()
                .map(|(interface, tap)| json!({ "iface_id": interface, "host_dev_name": tap }));
            body["network_overrides"] = taps.collect();
        }
        if let Some(path) = &self.vsock {
            body["vsock_override"] = json!({ "uds_path": path });
        }
        if self.clock_realtime {
            body["clock_realtime"] = true.into();
        }
    }
}

/// A failed arrival.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// The VM was refused before the migration began. It stays at the source.
    #[error("{0}; the VM stays at the source")]
    Refused(FcError),
    /// The migration failed, and says where the VM is.
    #[error(transparent)]
    Migration(DestinationFailure),
    /// The receiving process failed.
    #[error("{why}; {}", failure.vm)]
    Vmm {
        /// The reason.
        why: Box<FcError>,
        /// The end of the migration.
        failure: DestinationFailure,
    },
    /// The VM is whole here, and does not run.
    #[error("{0}; the VM is here with all of its memory, and does not run")]
    NotResumed(FcError),
}

/// Receives an offered VM into a Firecracker process that has none. When this returns, the process
/// has all pages, and needs us no more.
///
/// # Errors
/// [`ReceiveError`] says where the VM is.
pub fn receive(
    options: &ReceiverOptions,
    destination: &Arc<Destination>,
    incoming: Incoming,
    stop: &dyn Fn() -> bool,
    observer: &dyn Observer,
) -> Result<DestinationReport, ReceiveError> {
    let guest = match Guest::prepare(options, destination, incoming.offer()) {
        Ok(guest) => Running(Arc::new(guest)),
        Err(error) => {
            incoming.refuse(&error.to_string());
            return Err(ReceiveError::Refused(error));
        }
    };
    let machine: Arc<dyn Machine> = Arc::new(Seam(Arc::clone(&guest.0)));
    let devices = [Arc::new(Seam(Arc::clone(&guest.0))) as Arc<dyn Device>];
    let vm = RunningVm {
        machine: &machine,
        vcpus: &Seam(Arc::clone(&guest.0)),
        devices: &devices,
    };
    match incoming.receive(&vm, &Resolver::new(), stop, observer) {
        Ok(report) => {
            guest.0.wait_until_it_runs()?;
            Ok(report)
        }
        Err(failure) => {
            let why = guest.0.progress().gone.take();
            Err(match why {
                Some(why) => ReceiveError::Vmm {
                    why: why.into(),
                    failure,
                },
                None => ReceiveError::Migration(failure),
            })
        }
    }
}

/// Ends the thread of a guest on drop.
struct Running(Arc<Guest>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Release);
        let thread = self.0.progress().thread.take();
        self.0.changed.notify_all();
        if let Some(thread) = thread {
            // Its panic message was printed.
            let _ = thread.join();
        }
    }
}

/// A receiving process.
struct Guest {
    ram: Arc<GuestRam>,
    api: Api,
    overrides: Overrides,
    /// Whether the VM had huge pages of a pool.
    had_pool: bool,
    place: Place,
    listener: UnixListener,
    /// The process's memory, from the handshake on.
    memory: OnceLock<Memory>,
    /// The connection of the handshake.
    stream: OnceLock<UnixStream>,
    /// Readable when faults wait: in the userfaultfd, or read by another thread (`bell`).
    faults: OwnedFd,
    bell: Bell,
    /// Ends the migration.
    give_up: Box<dyn Fn() + Send + Sync>,
    over: AtomicBool,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Progress {
    /// The state file that has come.
    state: Option<Vec<u8>>,
    thread: Option<JoinHandle<()>>,
    /// The process has begun to load it.
    begun: bool,
    /// It has loaded it.
    loaded: bool,
    /// It waits for a page.
    waits: bool,
    /// The VM is its own.
    go: bool,
    /// It is to run its VM.
    run: bool,
    /// It runs its VM.
    runs: bool,
    /// It failed.
    gone: Option<FcError>,
}

/// A guest as the machine, its vCPUs and its one device.
struct Seam(Arc<Guest>);

/// Checks that an offer is such a VM.
fn check(offer: &Offer) -> Result<MachineConfig, FcError> {
    if offer.kind.engine.as_str() != KIND.engine {
        let why = format!(
            "its engine is {}, expected {}",
            offer.kind.engine, KIND.engine
        );
        return Err(FcError::Offer(why));
    }
    let config = MachineConfig::parse(&offer.guest).map_err(FcError::Offer)?;
    if config.bytes() != offer.memory_bytes {
        let why = format!(
            "its configuration has {} bytes of RAM, and the offer has {}",
            config.bytes(),
            offer.memory_bytes
        );
        return Err(FcError::Offer(why));
    }
    Ok(config)
}

impl Guest {
    /// Looks at the process, and makes room for the memory.
    fn prepare(
        options: &ReceiverOptions,
        destination: &Arc<Destination>,
        offer: &Offer,
    ) -> Result<Self, FcError> {
        let config = check(offer)?;
        let bytes = config.bytes();
        let api = Api::new(&options.api);
        let instance = api.instance(STEP_LIMIT)?;
        if instance.state != "Not started" {
            return Err(FcError::VmState {
                found: instance.state.escape_debug().to_string(),
                expected: "Not started, in a new process",
            });
        }
        let place = Place::beside(api.path(), instance.process)?;
        let meeting = &place.meeting;
        let failed = |e| FcError::io(format!("cannot listen on {}", meeting.socket.display()), e);
        let listener = meeting.listen().map_err(failed)?;
        let ram = adopt(&memfd(bytes)?, bytes, true)?;
        let os = |e: rustix::io::Errno| FcError::io("cannot make descriptors for faults", e);
        let faults = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(os)?;
        let bell = Bell::new().map_err(|e| FcError::io("cannot make descriptors for faults", e))?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&faults, &bell, data, epoll::EventFlags::IN).map_err(os)?;
        let host = Arc::clone(destination);
        Ok(Self {
            ram: Arc::new(ram),
            api,
            overrides: options.overrides.clone(),
            had_pool: config.has_pool(),
            place,
            listener,
            memory: OnceLock::new(),
            stream: OnceLock::new(),
            faults,
            bell,
            give_up: Box::new(move || host.give_up()),
            over: AtomicBool::new(false),
            progress: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress());
        self.changed.notify_all();
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Waits for a change of the progress, not long.
    fn wait<'a>(&self, progress: MutexGuard<'a, Progress>) -> MutexGuard<'a, Progress> {
        let waited = self.changed.wait_timeout(progress, WATCH);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// The process failed: the VM cannot go on here.
    fn fail(&self, why: FcError) {
        if self.is_over() {
            return;
        }
        error!(%why, "the receiving Firecracker failed");
        let mut ends = false;
        self.change(|progress| {
            // In between, `restore` and `Go` find the reason.
            ends = progress.go || !progress.begun;
            progress.gone.get_or_insert(why);
        });
        if ends {
            (self.give_up)();
        }
    }

    /// Lets the process load a state file, and takes its handshake. Returns the call under way.
    fn load(&self, state: &[u8]) -> Result<Call, FcError> {
        let meeting = &self.place.meeting;
        let path = meeting.folder.path().join("state");
        let failed = |e| FcError::io(format!("cannot write {}", path.display()), e);
        let mut file = meeting
            .folder
            .create("state", &meeting.owner)
            .map_err(failed)?;
        file.write_all(state).map_err(failed)?;
        let mut body = json!({
            "snapshot_path": self.place.inside(&path),
            "mem_backend": {
                "backend_type": "Uffd",
                "backend_path": self.place.inside(&self.place.meeting.socket),
            },
            "resume_vm": false,
        });
        self.overrides.add_to(&mut body);
        if self.had_pool {
            // Pages of 4 KiB arrive one by one. The kernel joins them when all are there.
            body["huge_pages"] = "Transparent".into();
        }
        let mut call = self.api.begin("PUT /snapshot/load", Some(&body))?;
        let began = Instant::now();
        let stream = loop {
            match self.listener.accept() {
                Ok((stream, _)) => break stream,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(FcError::io("cannot accept a handshake", e)),
            }
            if call.poll(Duration::from_millis(2))?.is_some() {
                let why = "it loaded its memory from elsewhere".into();
                return Err(FcError::Handshake(why));
            }
            if began.elapsed() > STEP_LIMIT {
                return Err(FcError::Timeout {
                    what: "connect to the socket of its memory",
                    limit: STEP_LIMIT,
                });
            }
        };
        let bytes = self.ram.layout().bytes();
        let handshake = Handshake::receive(stream.as_fd(), bytes, None)
            .map_err(|e| FcError::Handshake(e.to_string()))?;
        let memory = Memory::new(handshake, bytes)?;
        let data = epoll::EventData::new_u64(1);
        epoll::add(&self.faults, &memory, data, epoll::EventFlags::IN)
            .map_err(|e| FcError::io("cannot watch a userfaultfd", e))?;
        let _ = self.stream.set(stream);
        if self.memory.set(memory).is_err() {
            return Err(FcError::Handshake("there was one before".into()));
        }
        // Events that came meanwhile.
        self.ring();
        Ok(call)
    }

    /// Tells the thread of faults that there may be some.
    fn ring(&self) {
        self.bell.ring();
    }

    /// Follows the process from the load on.
    fn follow(&self, call: Call) {
        if let Err(error) = self.finish_load(call) {
            self.fail(error);
        }
    }

    /// Waits for the end of the load, which may wait for pages. Then lets the VM run if it is to.
    fn finish_load(&self, mut call: Call) -> Result<(), FcError> {
        loop {
            if self.is_over() {
                return Ok(());
            }
            if call.poll(WATCH)?.is_some() {
                break;
            }
        }
        drop(call);
        info!("the receiving Firecracker has loaded the VM");
        self.change(|progress| progress.loaded = true);
        let mut progress = self.progress();
        loop {
            if progress.run && !progress.runs {
                drop(progress);
                self.api.set_running(true, STEP_LIMIT)?;
                self.change(|progress| progress.runs = true);
                progress = self.progress();
            }
            if self.is_over() || progress.gone.is_some() {
                return Ok(());
            }
            progress = self.wait(progress);
        }
    }

    /// Waits for the end of the load, and until the VM runs if it is to.
    fn wait_until_it_runs(&self) -> Result<(), ReceiveError> {
        let began = Instant::now();
        let mut progress = self.progress();
        while !progress.loaded || (progress.run && !progress.runs) {
            let failed = progress.gone.take().or_else(|| {
                (began.elapsed() > 2 * STEP_LIMIT).then_some(FcError::Timeout {
                    what: "resume its VM",
                    limit: 2 * STEP_LIMIT,
                })
            });
            if let Some(why) = failed {
                return Err(ReceiveError::NotResumed(why));
            }
            progress = self.wait(progress);
        }
        Ok(())
    }

    /// Copies pages that have arrived to the process, and frees their place here.
    fn place(&self, pages: Range<u64>) -> Result<(), MachineError> {
        let Some(memory) = self.memory.get() else {
            return Ok(());
        };
        let bytes = |part: Range<u64>| {
            let start = self.ram.alias_hva(RamPage(part.start)).0 as usize;
            let length = ((part.end - part.start) * PAGE_SIZE) as usize;
            // SAFETY: the pages lie in guest RAM, which is mapped as long as `self` lives. They are
            // in place, so no thread writes them any more. A thread that frees them has placed
            // them, and then the bytes that are read here are placed nowhere.
            Some(unsafe {
                let start = std::ptr::with_exposed_provenance::<u8>(start);
                std::slice::from_raw_parts(start, length)
            })
        };
        let placed = memory.place(pages.clone(), &bytes, &|| self.ring());
        placed.map_err(MachineError::engine)?;
        // SAFETY: the pages are not missing, and their bytes are needed no more.
        let ram = unsafe { self.ram.unchecked() };
        ram.punch_hole(RamPage(pages.start), pages.end - pages.start)
    }
}

impl Machine for Seam {
    fn kind(&self) -> MachineKind<'_> {
        KIND
    }
    fn ram(&self) -> &Arc<GuestRam> {
        &self.0.ram
    }
    fn has_dirty_log(&self) -> bool {
        false
    }
    fn deliveries(&self) -> Vec<Delivery> {
        vec![Delivery::Missing]
    }
    fn delivery(&self) -> Option<DeliveryInUse> {
        self.0.ram.is_armed().then(|| DeliveryInUse {
            delivery: Delivery::Missing,
            because: "Firecracker's memory has no other".into(),
        })
    }
    fn arm_userfault(
        &self,
        missing: Arc<PageBitmap>,
        options: ArmOptions,
    ) -> Result<Vec<Box<dyn FaultEvents>>, MachineError> {
        if let Some(other) = options.delivery.filter(|d| *d != Delivery::Missing) {
            return Err(MachineError::NoDelivery(other));
        }
        self.0.ram.arm(&missing, &options, || Ok(()))?;
        Ok(vec![Box::new(Stream(Arc::clone(&self.0)))])
    }
    fn install(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        self.0.place(first.0..first.0 + pages)
    }
    /// All pages are here: the process gets the rest of them, and keeps its memory alone.
    fn disarm_userfault(&self) -> Result<(), MachineError> {
        self.0.ram.check_whole()?;
        if let Some(memory) = self.0.memory.get() {
            let mut at = 0;
            while let Some(run) = memory.next_open(at) {
                at = run.end;
                self.0.place(run)?;
            }
            memory.leave().map_err(MachineError::engine)?;
        }
        self.0.ram.disarm()
    }
}

/// The faults of the process.
struct Stream(Arc<Guest>);

impl FaultEvents for Stream {
    fn fd(&self) -> BorrowedFd<'_> {
        self.0.faults.as_fd()
    }
    fn next(&mut self) -> Result<Option<FaultEvent>, MachineError> {
        // Before the look: a later ring is for a later look.
        self.0.bell.hush();
        let Some(memory) = self.0.memory.get() else {
            return Ok(None);
        };
        let fault = memory.next_fault().map_err(MachineError::engine)?;
        if fault.is_some() && !self.0.progress().waits {
            self.0.change(|progress| progress.waits = true);
        }
        Ok(fault)
    }
}

impl Vcpus for Seam {
    fn count(&self) -> usize {
        1
    }
    /// Before `Go` nothing runs. Later it is a failure that pauses, or the VM's owner.
    fn pause(&self, limit: Duration) -> Result<PauseReport, MachineError> {
        let was_running = {
            let mut progress = self.0.progress();
            progress.run = false;
            std::mem::take(&mut progress.runs)
        };
        if was_running {
            let paused = self.0.api.set_running(false, limit);
            paused.map_err(MachineError::engine)?;
        }
        let now = Instant::now();
        Ok(PauseReport {
            first_stop: now,
            last_stop: now,
            was_running,
        })
    }
    fn resume(&self) {
        self.0.change(|progress| progress.run = true);
    }
    fn inside(&self) -> usize {
        0
    }
    fn save(&self) -> Result<Vec<VcpuState>, MachineError> {
        Err(MachineError::WrongState("a destination gives no states"))
    }
    fn restore(&self, states: &[VcpuState]) -> Result<(), MachineError> {
        match states {
            [VcpuState(state)] if matches!(state[..], [VM_RUNS | VM_PAUSED]) => {}
            _ => {
                let why = format!("expected the byte {VM_RUNS} or {VM_PAUSED}");
                return Err(MachineError::BadState(why));
            }
        }
        let state = {
            let mut progress = self.0.progress();
            progress.begun = true;
            progress.state.take()
        };
        let state = state.ok_or(MachineError::WrongState("the state file has not come"))?;
        let call = self.0.load(&state).map_err(MachineError::engine)?;
        let guest = Arc::clone(&self.0);
        let thread = std::thread::Builder::new()
            .name("fc-main".into())
            .spawn(move || guest.follow(call))
            .map_err(|e| MachineError::os("cannot start a thread", e))?;
        let began = Instant::now();
        let mut progress = self.0.progress();
        progress.thread = Some(thread);
        while !progress.loaded && !progress.waits {
            if let Some(gone) = progress.gone.take() {
                return Err(MachineError::engine(gone));
            }
            if began.elapsed() > STEP_LIMIT {
                return Err(MachineError::Timeout {
                    what: "loading the state file in Firecracker",
                    limit: STEP_LIMIT,
                });
            }
            progress = self.0.wait(progress);
        }
        Ok(())
    }
}

impl Device for Seam {
    fn name(&self) -> &str {
        STATE_DEVICE
    }
    fn version(&self) -> u32 {
        STATE_VERSION
    }
    fn pause(&self) -> Result<(), MachineError> {
        Ok(())
    }
    /// `Go`, also for a VM that comes paused.
    fn resume(&self) {
        let mut gone = false;
        self.0.change(|progress| {
            progress.go = true;
            gone = progress.gone.is_some();
        });
        // It failed between its load and `Go`.
        if gone {
            (self.0.give_up)();
        }
    }
    fn save(&self) -> Result<Vec<u8>, MachineError> {
        Err(MachineError::WrongState("a destination gives no states"))
    }
    /// Firecracker itself checks the state, when it loads it before `Go`.
    fn decode<'a>(&'a self, _: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
        if !(1..=MAX_STATE_BYTES).contains(&(bytes.len() as u64)) {
            let why = FcError::StateLength(bytes.len() as u64);
            return Err(MachineError::Device(why.to_string()));
        }
        self.0.progress().state = Some(bytes.to_vec());
        Ok(Box::new(|| ()))
    }
}

impl From<ReceiveError> for MigrationError {
    fn from(error: ReceiveError) -> Self {
        match error {
            ReceiveError::Migration(failure) => failure.error,
            other => Self::Internal(other.to_string()),
        }
    }
}
