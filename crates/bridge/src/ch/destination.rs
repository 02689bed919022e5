//! The seam of a Cloud Hypervisor that a VM arrives at.
//!
//! **Guarantee.** A page fault is answered once, and when its page has its right bytes. A process
//! that refuses the VM before `Go` costs nothing: the VM runs on at the source.
//!
//! **Mechanism.** The receiving process gets memfds of ours and Config while the VM still runs at
//! its source, and the connection for page faults. It gets State in the switch-over, and Complete
//! on `Go`. A thread answers its page faults, one at a time, until it has all pages.
//!
//! It may touch a missing page while it loads State, such as that of the guest's clock. Such a page
//! comes only behind `Go`. So the VM counts as loaded when State is answered, or when the process
//! waits for a page. If it refuses State later than that, the VM is lost here, and given up.
//!
//! A VM that is loaded outlives our process, if a keeper has its descriptors too. The next process
//! finds it by [`LeftBehind::at`], and goes on with its session.
//!
//! **Neighbours.** `migration` brings the pages, and `receiver` speaks with the process. `source`
//! is the other seam.

use super::error::ChError;
use super::keeper::End;
use super::kept::{Found, Main};
use super::receiver::{Ended, Keep, Receiver, STEP_LIMIT};
use super::wire::{self, Command as VmmCommand, Mapping};
use super::{KIND, STATE_DEVICE, STATE_VERSION, VM_PAUSED, VM_RUNS};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::{
    Apply, Device, GuestRam, Machine, MachineError, MachineKind, PauseReport, VcpuState, Vcpus,
};
use pageferry_migration::{
    Destination, DestinationFailure, DestinationReport, Incoming, MigrationError, Observer, Offer,
    Orphan, Resolver, RunningVm,
};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::error;

/// The bytes that one access brings at most.
const FETCH_BYTES: u64 = 256 << 10;

/// The choices for a Cloud Hypervisor that waits for a VM.
#[derive(Debug)]
pub struct ReceiverOptions {
    /// Its API socket.
    pub api: PathBuf,
    /// The command of a program that calls [`keep`](super::keep) at once. With it, the VM outlives
    /// this process. Its standard input and output are set.
    pub keeper: Option<Command>,
}

/// A failed arrival.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// The VM was refused before the migration began. It stays at the source.
    #[error("{0}; the VM stays at the source")]
    Refused(ChError),
    /// The migration failed, and says where the VM is.
    #[error(transparent)]
    Migration(DestinationFailure),
    /// The receiving process failed when the VM was its own.
    #[error("{why}; {}", failure.vm)]
    Vmm {
        /// The reason.
        why: Box<ChError>,
        /// The end of the migration.
        failure: DestinationFailure,
    },
}

/// A VM that has arrived with all its pages.
#[must_use = "the process may still ask for pages: call `serve`"]
pub struct Arrived {
    /// The migration.
    pub report: DestinationReport,
    guest: Running,
}

impl Arrived {
    /// Answers page faults until the process has asked for every page.
    ///
    /// # Errors
    /// [`ChError::Gone`] when it ends before. [`ChError::Stopped`] when `stop` returned true: the
    /// process then ends its VM.
    pub fn serve(self, stop: &dyn Fn() -> bool) -> Result<(), ChError> {
        let mut progress = self.guest.0.progress();
        loop {
            if let Some(gone) = progress.gone.take() {
                return Err(gone);
            }
            if progress.has_all && progress.completed {
                return Ok(());
            }
            if stop() {
                return Err(ChError::Stopped);
            }
            let waited = self.guest.0.changed.wait_timeout(progress, WATCH);
            progress = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl std::fmt::Debug for Arrived {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arrived")
            .field("report", &self.report)
            .finish_non_exhaustive()
    }
}

/// The interval of looks at `stop`.
const WATCH: Duration = Duration::from_millis(50);

/// Receives an offered VM into a Cloud Hypervisor process that has none.
///
/// # Errors
/// [`ReceiveError`] says where the VM is.
pub fn receive(
    options: &mut ReceiverOptions,
    destination: &Arc<Destination>,
    incoming: Incoming,
    stop: &dyn Fn() -> bool,
    observer: &dyn Observer,
) -> Result<Arrived, ReceiveError> {
    match Guest::prepare(options, destination, &incoming, stop) {
        Ok(guest) => Running(Arc::new(guest)).bring(incoming, stop, observer),
        Err(error) => {
            incoming.refuse(&error.to_string());
            Err(ReceiveError::Refused(error))
        }
    }
}

/// A VM that waits in its Cloud Hypervisor for pages, and whose process of ours has died.
pub struct LeftBehind {
    process: Receiver,
    orphan: Orphan,
}

impl LeftBehind {
    /// The VM of the process at an API socket, if it was left behind. From now on it is this
    /// process's own.
    ///
    /// # Errors
    /// When another process has it, or what was kept of it does not serve.
    pub fn at(api: &Path) -> Result<Option<Self>, ChError> {
        let Some((found, orphan)) = Found::arriving(api)? else {
            return Ok(None);
        };
        let mappings = wire::mappings(&orphan.offer().guest)?;
        let process = Receiver::found(api, found, &mappings)?;
        Ok(Some(Self { process, orphan }))
    }

    /// Goes on with the session that brings its pages, at a destination that its source reaches.
    ///
    /// # Errors
    /// When the session's record does not fit its pages.
    pub fn session(&self, destination: &Arc<Destination>) -> Result<Incoming, MigrationError> {
        destination.take_over(self.orphan.clone())
    }

    /// Brings the missing pages, as [`receive`] does.
    ///
    /// # Errors
    /// [`ReceiveError`] says where the VM is.
    pub fn receive(
        self,
        destination: &Arc<Destination>,
        incoming: Incoming,
        stop: &dyn Fn() -> bool,
        observer: &dyn Observer,
    ) -> Result<Arrived, ReceiveError> {
        let main = self.process.kept.main();
        let progress = Progress {
            paused: self.orphan.paused,
            begun: true,
            loaded: main > Main::State,
            waits: true,
            go: self.orphan.handed_over,
            completed: main == Main::Completed,
            ..Progress::default()
        };
        let guest = Guest::new(self.process, destination, progress);
        Running(Arc::new(guest)).bring(incoming, stop, observer)
    }
}

impl std::fmt::Debug for LeftBehind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeftBehind")
            .field("orphan", &self.orphan)
            .finish_non_exhaustive()
    }
}

impl Running {
    /// Brings the pages of the migration.
    fn bring(
        self,
        incoming: Incoming,
        stop: &dyn Fn() -> bool,
        observer: &dyn Observer,
    ) -> Result<Arrived, ReceiveError> {
        let guest = self;
        let machine: Arc<dyn Machine> = Arc::clone(&guest.0) as _;
        let devices = [Arc::clone(&guest.0) as Arc<dyn Device>];
        let vm = RunningVm {
            machine: &machine,
            vcpus: &*guest.0,
            devices: &devices,
        };
        let started = guest.0.start("ch-faults", Guest::serve_faults);
        if let Err(error) = started.and_then(|()| guest.0.start("ch-main", Guest::follow)) {
            incoming.refuse(&error.to_string());
            return Err(ReceiveError::Refused(error.into()));
        }
        match incoming.receive(&vm, &Resolver::new(), stop, observer) {
            Ok(report) => Ok(Arrived { report, guest }),
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
}

/// Ends the threads and connections of a guest on drop. The process then ends its VM, unless it has
/// all pages.
struct Running(Arc<Guest>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Release);
        self.0.process.shutdown();
        let threads = std::mem::take(&mut self.0.progress().threads);
        self.0.changed.notify_all();
        for thread in threads {
            // Its panic message was printed.
            let _ = thread.join();
        }
    }
}

/// A receiving process: the machine, its vCPUs and its one device.
struct Guest {
    process: Receiver,
    /// Ends the migration.
    give_up: Box<dyn Fn() + Send + Sync>,
    over: AtomicBool,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Progress {
    /// The State that has come.
    state: Option<Vec<u8>>,
    /// Whether the VM comes paused.
    paused: bool,
    threads: Vec<JoinHandle<()>>,
    /// The missing pages are known.
    open: bool,
    /// The process has begun to load State.
    begun: bool,
    /// It has loaded State.
    loaded: bool,
    /// It waits for a page.
    waits: bool,
    /// The VM is its own.
    go: bool,
    /// It has answered Complete.
    completed: bool,
    /// It has asked for every page.
    has_all: bool,
    /// It failed.
    gone: Option<ChError>,
}

/// Checks that an offer is such a VM. Returns its memory.
fn check(offer: &Offer) -> Result<Vec<Mapping>, ChError> {
    if offer.kind.engine.as_str() != KIND.engine {
        let why = format!(
            "its engine is {}, expected {}",
            offer.kind.engine, KIND.engine
        );
        return Err(ChError::Offer(why));
    }
    let mappings = wire::mappings(&offer.guest)?;
    let mut bytes = 0_u64;
    for mapping in &mappings {
        bytes = bytes.saturating_add(mapping.size);
    }
    if bytes != offer.memory_bytes {
        let why = format!(
            "its Config maps {bytes} bytes of RAM, and the offer has {}",
            offer.memory_bytes
        );
        return Err(ChError::Offer(why));
    }
    Ok(mappings)
}

impl Guest {
    /// Gives the process its memory and Config.
    fn prepare(
        options: &mut ReceiverOptions,
        destination: &Arc<Destination>,
        incoming: &Incoming,
        stop: &dyn Fn() -> bool,
    ) -> Result<Self, ChError> {
        let offer = incoming.offer();
        let mappings = check(offer)?;
        let session = incoming
            .record()
            .map_err(|e| ChError::Offer(e.to_string()))?;
        let keep = Keep {
            record: &session,
            end: End::Destination,
            keeper: options.keeper.as_mut(),
        };
        let process = Receiver::prepare(&options.api, &mappings, &offer.guest, keep, stop)?;
        Ok(Self::new(process, destination, Progress::default()))
    }

    fn new(process: Receiver, destination: &Arc<Destination>, progress: Progress) -> Self {
        let host = Arc::clone(destination);
        Self {
            process,
            give_up: Box::new(move || host.give_up()),
            over: AtomicBool::new(false),
            progress: Mutex::new(progress),
            changed: Condvar::new(),
        }
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

    /// The process failed: the VM cannot go on here.
    fn fail(&self, why: ChError) {
        if self.is_over() {
            return;
        }
        error!(%why, "the receiving Cloud Hypervisor failed");
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

    /// Starts a thread of this guest.
    fn start(self: &Arc<Self>, name: &str, run: fn(&Self)) -> Result<(), MachineError> {
        let guest = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || run(&guest))
            .map_err(|e| MachineError::os("cannot start a thread", e))?;
        self.progress().threads.push(thread);
        Ok(())
    }

    /// Follows the process from State on.
    fn follow(&self) {
        if let Err(error) = self.load_and_complete() {
            self.fail(error);
        }
    }

    /// Waits for the answer to State. Says Complete on `Go`, and waits for the answer. Both may
    /// wait for pages.
    fn load_and_complete(&self) -> Result<(), ChError> {
        let loaded = || self.change(|progress| progress.loaded = true);
        if self
            .process
            .load_and_complete(&loaded, &|| self.wait_for_go())?
        {
            self.change(|progress| progress.completed = true);
        }
        Ok(())
    }

    /// Waits for `Go`. Returns whether the VM comes paused, or `None` if it does not come.
    fn wait_for_go(&self) -> Option<bool> {
        let mut progress = self.progress();
        while !progress.go {
            if self.is_over() || progress.gone.is_some() {
                return None;
            }
            let waited = self.changed.wait_timeout(progress, WATCH);
            progress = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Some(progress.paused)
    }

    /// Answers page faults until the process has no more.
    fn serve_faults(&self) {
        let mut progress = self.progress();
        while !progress.open {
            if self.is_over() {
                return;
            }
            let waited = self.changed.wait_timeout(progress, WATCH);
            progress = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(progress);
        let bring = |first, pages| self.bring(first, pages * PAGE_SIZE);
        let ended = self.process.answer_faults(&bring);
        let (asked, pages) = (self.process.kept.asked(), self.process.ram.pages());
        match ended {
            Ok(Ended::Closed) if asked == pages => self.change(|progress| progress.has_all = true),
            Ok(Ended::Unanswered) => {}
            Ok(Ended::Closed) => {
                // Before `Go`, the other connection has the reason.
                if self.wait_for_go().is_some() {
                    self.fail(ChError::Gone { asked, pages });
                }
            }
            Err(error) => self.fail(error),
        }
    }

    /// Waits until pages are here. Returns false if they never come.
    fn bring(&self, first: RamPage, bytes: u64) -> bool {
        let mut byte = [0];
        if self.process.ram.try_read(first, &mut byte).is_err() {
            self.change(|progress| progress.waits = true);
        }
        let stop = || self.is_over();
        let mut rest = vec![0; bytes.min(FETCH_BYTES) as usize];
        let mut done = 0;
        while done < bytes {
            let part = &mut rest[..(bytes - done).min(FETCH_BYTES) as usize];
            if let Err(error) = self.process.ram.read((first, done), part, &stop) {
                error!(%error, "a page fault is left without an answer");
                return false;
            }
            done += part.len() as u64;
        }
        true
    }
}

impl Machine for Guest {
    fn kind(&self) -> MachineKind<'_> {
        KIND
    }
    fn ram(&self) -> &Arc<GuestRam> {
        &self.process.ram
    }
    fn has_dirty_log(&self) -> bool {
        false
    }
    /// The missing pages are final: they are kept, and page faults are answered from now on.
    fn begin_postcopy(&self) -> Result<(), MachineError> {
        if !self.progress().begun
            && let Some(missing) = self.process.ram.missing()
        {
            self.process.kept.set_missing(&missing.snapshot());
        }
        self.process.ram.begin();
        self.change(|progress| progress.open = true);
        Ok(())
    }
    fn install(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        self.process.kept.came(first, pages);
        Ok(())
    }
}

impl Vcpus for Guest {
    fn count(&self) -> usize {
        1
    }
    /// Before `Go` nothing runs. Later it is a failure that pauses.
    fn pause(&self, limit: Duration) -> Result<PauseReport, MachineError> {
        let went = self.progress().go;
        if went {
            let paused = self.process.api.call("vm.pause", Some(""), limit);
            paused.map_err(MachineError::engine)?;
        }
        let now = Instant::now();
        Ok(PauseReport {
            first_stop: now,
            last_stop: now,
            was_running: went,
        })
    }
    /// Complete makes it run: see [`Device::resume`] of the same guest.
    fn resume(&self) {}
    fn inside(&self) -> usize {
        0
    }
    fn save(&self) -> Result<Vec<VcpuState>, MachineError> {
        Err(MachineError::WrongState("a destination gives no states"))
    }
    fn restore(&self, states: &[VcpuState]) -> Result<(), MachineError> {
        let paused = match states {
            [VcpuState(state)] if state[..] == [VM_RUNS] => false,
            [VcpuState(state)] if state[..] == [VM_PAUSED] => true,
            _ => {
                let why = format!("expected the byte {VM_RUNS} or {VM_PAUSED}");
                return Err(MachineError::BadState(why));
            }
        };
        let state = {
            let mut progress = self.progress();
            progress.paused = paused;
            progress.begun = true;
            progress.state.take()
        };
        let state = state.ok_or(MachineError::WrongState("State has not come"))?;
        let main = &self.process.main;
        let sent = main.begin(VmmCommand::State, &state, "take State", STEP_LIMIT);
        sent.map_err(MachineError::engine)?;
        let began = Instant::now();
        let mut progress = self.progress();
        while !progress.loaded && !progress.waits {
            if let Some(gone) = progress.gone.take() {
                return Err(MachineError::engine(gone));
            }
            if began.elapsed() > STEP_LIMIT {
                return Err(MachineError::Timeout {
                    what: "loading State in Cloud Hypervisor",
                    limit: STEP_LIMIT,
                });
            }
            let waited = self.changed.wait_timeout(progress, WATCH);
            progress = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        // Before the source hears that the VM is ready.
        self.process.kept.loaded(paused);
        Ok(())
    }
}

impl Device for Guest {
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
        self.process.kept.handed_over();
        let mut gone = false;
        self.change(|progress| {
            progress.go = true;
            gone = progress.gone.is_some();
        });
        // It failed between its last answer and `Go`.
        if gone {
            (self.give_up)();
        }
    }
    fn save(&self) -> Result<Vec<u8>, MachineError> {
        Err(MachineError::WrongState("a destination gives no states"))
    }
    /// Cloud Hypervisor itself checks State, when it loads it before `Go`.
    fn decode<'a>(&'a self, _: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
        if bytes.is_empty() {
            return Err(MachineError::Device("State is empty".into()));
        }
        self.progress().state = Some(bytes.to_vec());
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
