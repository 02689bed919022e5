//! The seam of a VMM that a VM arrives at.
//!
//! **Guarantee.** Nothing is handed over before the process has loaded the VM, devices, locks and
//! all. A process that refuses it costs nothing: the VM runs on at the source.
//!
//! **Mechanism.** The VM is a machine of `migration` whose one vCPU stands for all, and whose one
//! device has the VMM's state. [`Vcpus::restore`] lets the process load it, and returns when that
//! has succeeded: what it touches of memory comes from the source, which is paused. A thread lets
//! the VM run behind `Go`, since that may wait for pages, too.
//!
//! **Neighbours.** `ch` and `fc` have what differs. `departure` is the other seam.

use super::{STATE_VERSION, VM_PAUSED, VM_RUNS, VmmError};
use pageferry_machine::{Apply, Device, Machine, MachineError, PauseReport, VcpuState, Vcpus};
use pageferry_migration::{
    Destination, DestinationFailure, DestinationReport, Incoming, MigrationError, Observer, Orphan,
    Resolver, RunningVm,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::error;

/// The interval of looks at what has changed.
const WATCH: Duration = Duration::from_millis(20);

/// A process that a VM arrives at: what differs between VMMs.
pub(crate) trait Arriving: Machine {
    /// The name of the device whose state is that of the VMM.
    fn state_device(&self) -> &'static str;

    /// Lets the process load the state. Returns when it has opened all that it needs.
    fn load(&self, state: &[u8], paused: bool) -> Result<(), VmmError>;

    /// Fails if the process has ended before `Go`, as far as that is seen.
    fn check_alive(&self) -> Result<(), VmmError> {
        Ok(())
    }

    /// The VM is here and nowhere else. This only notes it.
    fn handed_over(&self);

    /// Gives the process its VM, which runs then unless it comes paused.
    fn start(&self, paused: bool) -> Result<(), VmmError>;

    /// Pauses the VM, or lets it run.
    fn set_running(&self, on: bool, limit: Duration) -> Result<(), VmmError>;

    /// Answers the process until it needs nobody any more. Returns whether that is so.
    fn serve(&self, _life: &Life) -> Result<bool, VmmError> {
        Ok(true)
    }

    /// Ends what [`Self::serve`] and [`Self::start`] wait for.
    fn shutdown(&self) {}
}

/// A failed arrival.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// The VM was refused before the migration began. It stays at the source.
    #[error("{0}; the VM stays at the source")]
    Refused(VmmError),
    /// The migration failed, and says where the VM is.
    #[error(transparent)]
    Migration(DestinationFailure),
}

impl From<ReceiveError> for MigrationError {
    fn from(error: ReceiveError) -> Self {
        match error {
            ReceiveError::Migration(failure) => failure.error,
            other => Self::Internal(other.to_string()),
        }
    }
}

/// How far the threads of a seam are.
pub(crate) struct Life {
    over: AtomicBool,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
pub(crate) struct Progress {
    /// The state that has come.
    state: Option<Vec<u8>>,
    /// Whether the VM comes paused.
    paused: bool,
    /// The VM is its own.
    pub(crate) go: bool,
    /// It is to run its VM.
    run: bool,
    /// It runs its VM.
    runs: bool,
    /// It has its VM.
    started: bool,
    /// It needs nobody any more.
    has_all: bool,
    /// Why it cannot go on.
    gone: Option<VmmError>,
}

impl Life {
    pub(crate) fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress());
        self.changed.notify_all();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Waits for a change of the progress, not long.
    fn wait<'a>(&self, progress: MutexGuard<'a, Progress>) -> MutexGuard<'a, Progress> {
        let waited = self.changed.wait_timeout(progress, WATCH);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits until something is so. Returns false if it cannot become so any more.
    pub(crate) fn await_change(&self, is: impl Fn(&Progress) -> bool) -> bool {
        let mut progress = self.progress();
        while !is(&progress) {
            if self.is_over() || progress.gone.is_some() {
                return false;
            }
            progress = self.wait(progress);
        }
        true
    }
}

/// A receiving process as the vCPUs and the one device of its VM.
struct Seam {
    vmm: Arc<dyn Arriving>,
    life: Life,
    destination: Arc<Destination>,
}

/// A VM that arrives, or has arrived with all its pages.
#[must_use = "the process may still need pages: call `serve`"]
pub struct Arrival {
    seam: Arc<Seam>,
    threads: Vec<JoinHandle<()>>,
}

impl Arrival {
    /// Begins with the process of an offered VM, or of one that was left behind.
    pub(crate) fn new(
        vmm: Arc<dyn Arriving>,
        destination: &Arc<Destination>,
        orphan: Option<&Orphan>,
    ) -> Result<Self, VmmError> {
        let progress = orphan.map_or_else(Progress::default, |orphan| Progress {
            paused: orphan.paused,
            go: orphan.handed_over,
            run: !orphan.paused,
            ..Progress::default()
        });
        let life = Life {
            over: AtomicBool::new(false),
            progress: Mutex::new(progress),
            changed: Condvar::new(),
        };
        let seam = Arc::new(Seam {
            vmm,
            life,
            destination: Arc::clone(destination),
        });
        let mut arrival = Self {
            seam: Arc::clone(&seam),
            threads: Vec::new(),
        };
        for (name, run) in [
            ("vmm-main", Seam::run as fn(&Seam) -> Result<(), VmmError>),
            ("vmm-faults", Seam::serve),
        ] {
            let seam = Arc::clone(&seam);
            let thread = std::thread::Builder::new()
                .name(name.into())
                .spawn(move || run(&seam).unwrap_or_else(|why| seam.fail(why)))
                .map_err(|e| VmmError::io("cannot start a thread", e))?;
            arrival.threads.push(thread);
        }
        Ok(arrival)
    }

    /// Brings the VM's pages.
    ///
    /// # Errors
    /// [`ReceiveError`] says where the VM is.
    pub fn receive(
        &self,
        incoming: Incoming,
        stop: &dyn Fn() -> bool,
        observer: &dyn Observer,
    ) -> Result<DestinationReport, ReceiveError> {
        let machine = Arc::clone(&self.seam.vmm) as Arc<dyn Machine>;
        let vm = RunningVm {
            machine: &machine,
            vcpus: &*self.seam,
            devices: &[Arc::clone(&self.seam) as Arc<dyn Device>],
        };
        let received = incoming.receive(&vm, &Resolver::new(), stop, observer);
        received.map_err(ReceiveError::Migration)
    }

    /// Waits, behind the migration, until the process has its VM and needs us no more.
    ///
    /// # Errors
    /// Why it cannot go on. [`VmmError::Stopped`] when `stop` returned true: a process that still
    /// needs pages ends its VM then.
    pub fn serve(self, stop: &dyn Fn() -> bool) -> Result<(), VmmError> {
        let life = &self.seam.life;
        let mut progress = life.progress();
        loop {
            if let Some(gone) = progress.gone.take() {
                return Err(gone);
            }
            if progress.has_all && progress.started {
                return Ok(());
            }
            if stop() {
                return Err(VmmError::Stopped);
            }
            progress = life.wait(progress);
        }
    }
}

/// Ends the threads and connections. The process then ends its VM, unless it has all pages.
impl Drop for Arrival {
    fn drop(&mut self) {
        self.seam.life.over.store(true, Ordering::Release);
        self.seam.vmm.shutdown();
        self.seam.life.changed.notify_all();
        for thread in self.threads.drain(..) {
            // Its panic message was printed.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Arrival {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arrival")
            .field("machine", &self.seam.vmm.kind())
            .finish_non_exhaustive()
    }
}

impl Seam {
    /// The process failed: the VM cannot go on here.
    fn fail(&self, why: VmmError) {
        if self.life.is_over() {
            return;
        }
        error!(%why, "the receiving VMM failed");
        self.destination.lost(why.to_string());
        self.life.change(|progress| {
            progress.gone.get_or_insert(why);
        });
    }

    fn serve(&self) -> Result<(), VmmError> {
        let has_all = self.vmm.serve(&self.life)?;
        self.life.change(|progress| progress.has_all = has_all);
        Ok(())
    }

    /// Gives the process its VM on `Go`. Then lets it run, or pauses it, as its owner wants.
    fn run(&self) -> Result<(), VmmError> {
        let mut progress = self.life.progress();
        while !progress.go {
            if self.life.is_over() || progress.gone.is_some() {
                return Ok(());
            }
            self.vmm.check_alive()?;
            progress = self.life.wait(progress);
        }
        let paused = progress.paused;
        drop(progress);
        self.vmm.start(paused)?;
        self.life
            .change(|progress| (progress.started, progress.runs) = (true, !paused));
        self.destination.started();
        while self
            .life
            .await_change(|progress| progress.run != progress.runs)
        {
            let run = self.life.progress().run;
            self.vmm.set_running(run, super::STEP_LIMIT)?;
            self.life.change(|progress| progress.runs = run);
        }
        Ok(())
    }
}

impl Vcpus for Seam {
    fn count(&self) -> usize {
        1
    }
    /// Before `Go` nothing runs. Later it is a failure that pauses, or the VM's owner.
    fn pause(&self, limit: Duration) -> Result<PauseReport, MachineError> {
        let (was_running, started) = {
            let mut progress = self.life.progress();
            let was_running = std::mem::take(&mut progress.run);
            (was_running, progress.gone.is_none() && was_running)
        };
        if started {
            let began = Instant::now();
            while !self.life.await_change(|progress| !progress.runs) {
                if self.life.is_over() || self.life.progress().gone.is_some() {
                    break;
                }
                if began.elapsed() > limit {
                    let what = "the VMM to pause its VM";
                    return Err(MachineError::Timeout { what, limit });
                }
            }
        }
        let now = Instant::now();
        Ok(PauseReport {
            first_stop: now,
            last_stop: now,
            was_running,
        })
    }
    fn resume(&self) {
        self.life.change(|progress| progress.run = true);
    }
    fn confirms_start(&self) -> bool {
        true
    }
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
            let mut progress = self.life.progress();
            progress.paused = paused;
            progress.state.take()
        };
        let state = state.ok_or(MachineError::WrongState("the VMM's state has not come"))?;
        self.vmm.load(&state, paused).map_err(MachineError::refused)
    }
}

impl Device for Seam {
    fn name(&self) -> &str {
        self.vmm.state_device()
    }
    fn version(&self) -> u32 {
        STATE_VERSION
    }
    fn pause(&self) -> Result<(), MachineError> {
        Ok(())
    }
    /// `Go`, also for a VM that comes paused.
    fn resume(&self) {
        self.vmm.handed_over();
        self.life
            .change(|progress| (progress.go, progress.run) = (true, !progress.paused));
    }
    fn save(&self) -> Result<Vec<u8>, MachineError> {
        Err(MachineError::WrongState("a destination gives no states"))
    }
    /// The VMM itself checks the state, when it loads it before `Go`.
    fn decode<'a>(&'a self, _: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
        if bytes.is_empty() {
            return Err(MachineError::Device("the VMM's state is empty".into()));
        }
        self.life.progress().state = Some(bytes.to_vec());
        Ok(Box::new(|| ()))
    }
}
