//! The seam of a VMM that a VM leaves.
//!
//! **Guarantee.** Until the migration hands the VM over, every failure lets its VMM run it on, or
//! keep it paused, as it was. From then on this side never makes it run the VM again, unless an
//! operator says so. A VM that was handed over is not moved a second time.
//!
//! **Mechanism.** The VM is a machine of `migration` whose one vCPU stands for all, and whose one
//! device has the VMM's state. The hand-over is noted before `Go` is sent: in [`Kept`], from which
//! another process of ours goes on, and beside the API's socket, where the next `migrate` finds it.
//!
//! **Neighbours.** `ch` and `fc` have what differs. `arrival` is the other seam.

use super::api::Api;
use super::kept::Kept;
use super::{STATE_VERSION, VM_PAUSED, VM_RUNS, VmmError, moved};
use pageferry_machine::{Apply, Device, Machine, MachineError, PauseReport, VcpuState, Vcpus};
use pageferry_migration::{
    Change, Observer, Orphan, Phase, Route, RunningVm, SourceConfig, SourceFailure, SourceReport,
    SourceSession, SourceVm, Switch, go_on, migrate,
};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::warn;

/// A paused VM.
pub(crate) struct Saved {
    /// The VMM's state.
    pub(crate) state: Vec<u8>,
    /// The begin of the pause, and the time at which the VM stood still at the latest.
    pub(crate) at: (Instant, Instant),
    /// The parts of the pause, if they are known.
    pub(crate) parts: Option<Pause>,
    /// Whether that has reset the log for the owner's diff snapshots.
    pub(crate) log_reset: bool,
    /// Sentences for people.
    pub(crate) notes: Vec<String>,
}

/// A VMM's own parts of a pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pause {
    /// The time until it had paused its vCPUs.
    pub stop: Duration,
    /// The time until it had written its snapshot.
    pub save: Duration,
}

/// A process whose VM leaves: what differs between VMMs.
pub(crate) trait Leaving: Machine {
    /// The name of the device whose state is that of the VMM.
    fn state_device(&self) -> &'static str;

    /// Pauses the VM. All of its memory is in [`Machine::ram`] then.
    fn pause(&self, kept: &Kept, limit: Duration) -> Result<Saved, VmmError>;

    /// Gives the process its VM back, which runs on if it ran.
    fn take_back(&self, kept: &Kept) -> Result<(), VmmError>;

    /// Another process has the VM, and runs it: this may wait for the VMM. Repeating it is
    /// harmless.
    fn release(&self, _kept: &Kept) {}

    /// Waits until `over`, or until the process gives up while its VM runs. Returns why.
    fn watch(&self, _over: &AtomicBool) -> Option<VmmError> {
        None
    }

    /// Whether the process keeps a VM that was handed over.
    fn keeps(&self, _kept: &Kept) -> bool {
        true
    }

    /// Asks the process whether it still has the VM.
    fn look(&self) -> Result<(), VmmError>;
}

/// A failed move, seen from the source.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The VMM cannot give its VM, or does something else. The VM is where it was.
    #[error("{0}; the VM stays with its VMM")]
    Vmm(#[from] VmmError),
    /// The migration failed, and says where the VM is.
    #[error(transparent)]
    Migration(SourceFailure),
    /// The migration failed, and the VM runs on. Its next diff snapshot would lack pages.
    #[error(
        "{0}; Firecracker's log of dirty pages was reset: take a Full snapshot before the next Diff"
    )]
    LogReset(SourceFailure),
    /// The migration failed behind the hand-over. The VMM had ended by then.
    #[error(
        "{}; the VM was handed over, and its Cloud Hypervisor has ended: only with preserve_source \
         it keeps a paused VM",
        _0.error
    )]
    Ended(SourceFailure),
    /// The migration failed behind the hand-over. The VMM keeps the VM, paused.
    #[error("{0}; its VMM keeps it: if the other host runs it no more, resume it by its API")]
    GivenUp(SourceFailure),
    /// The VM was not handed over, or was taken back, and its VMM does not run it.
    #[error("{}; the VM does not run: {why}", failure.error)]
    NotResumed {
        /// The failure.
        failure: SourceFailure,
        /// The reason.
        why: Box<VmmError>,
    },
}

/// A VM that its VMM gives to a migration. It still runs. Dropping this gives it back.
pub struct Departure {
    seam: Arc<Seam>,
    config: Vec<u8>,
    vcpus: Option<u32>,
    /// The move that another process has handed over.
    orphan: Option<Orphan>,
    /// Whether its memory cannot be read while it runs.
    pub(crate) unread: bool,
    /// Sentences for people.
    pub(crate) notes: Vec<String>,
}

/// A VMM whose VM moves, as its vCPUs and its one device.
struct Seam {
    vmm: Arc<dyn Leaving>,
    api: Api,
    kept: Kept,
    hold: Mutex<Hold>,
}

#[derive(Default)]
struct Hold {
    saved: Option<Saved>,
    parts: Option<Pause>,
    log_reset: bool,
    notes: Vec<String>,
    /// Why the VM does not run again.
    not_resumed: Option<VmmError>,
    /// Why the VMM gave up.
    departed: Option<VmmError>,
}

impl Departure {
    /// A VM with its description, and the move of another process, if that has handed it over.
    pub(crate) fn new(
        (vmm, api): (Arc<dyn Leaving>, Api),
        (config, vcpus): (Vec<u8>, Option<u32>),
        kept: Kept,
        orphan: Option<Orphan>,
    ) -> Self {
        let now = Instant::now();
        let hold = Hold {
            saved: orphan.is_some().then(|| Saved {
                state: Vec::new(),
                at: (now, now),
                parts: None,
                log_reset: false,
                notes: Vec::new(),
            }),
            ..Hold::default()
        };
        Self {
            seam: Arc::new(Seam {
                vmm,
                api,
                kept,
                hold: Mutex::new(hold),
            }),
            config,
            vcpus,
            orphan,
            unread: false,
            notes: Vec::new(),
        }
    }

    /// Whether this is the move of a process that died behind the hand-over.
    #[must_use]
    pub fn goes_on(&self) -> bool {
        self.orphan.is_some()
    }

    /// The size of RAM in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.seam.vmm.ram().layout().bytes()
    }

    /// The number of its vCPUs, if its configuration tells.
    #[must_use]
    pub fn vcpus(&self) -> Option<u32> {
        self.vcpus
    }

    /// The VMM's own parts of the pause, if they are known.
    #[must_use]
    pub fn pause(&self) -> Option<Pause> {
        self.seam.hold().parts
    }

    /// Whether the VMM keeps a paused VM when this has moved.
    #[must_use]
    pub fn keeps_vm(&self) -> bool {
        self.seam.vmm.keeps(&self.seam.kept)
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
        let seam = &self.seam;
        let machine = Arc::clone(&seam.vmm) as Arc<dyn Machine>;
        let vm = RunningVm {
            machine: &machine,
            vcpus: &**seam,
            devices: &[Arc::clone(seam) as Arc<dyn Device>],
        };
        session.prepare(config.settings);
        self.notes.iter().for_each(|note| observer.note(note));
        if self.unread {
            let now = Change {
                switch: Some(Switch::NOW),
                ..Change::default()
            };
            // If it is refused, the copy in pre-copy is of zeros, which costs time only.
            let _ = session.set(&now);
        }
        let (release, released) = channel();
        let over = AtomicBool::new(false);
        let outcome = std::thread::scope(|scope| {
            let _over = SetOnDrop(&over);
            scope.spawn(|| {
                if let Some(why) = seam.vmm.watch(&over) {
                    warn!(%why, "the VMM has left the migration");
                    seam.hold().departed = Some(why);
                    session.cancel();
                }
            });
            scope.spawn(move || {
                for () in released {
                    seam.vmm.release(&seam.kept);
                }
            });
            let observer = Releasing {
                observer,
                seam,
                to: route.to_string(),
                release,
            };
            match &self.orphan {
                Some(orphan) => go_on(&vm, route, orphan, config, session, &observer),
                None => migrate(&vm, route, &self.config, config, session, &observer),
            }
        });
        let notes = std::mem::take(&mut seam.hold().notes);
        notes.iter().for_each(|note| observer.note(note));
        if seam.kept.is_handed_over() {
            seam.vmm.release(&seam.kept);
        }
        let failure = match outcome {
            Ok(report) => {
                if !self.keeps_vm() {
                    moved::forget(seam.api.path());
                }
                return Ok(report);
            }
            Err(failure) => failure,
        };
        let mut hold = seam.hold();
        if failure.vm == SourceVm::Runs
            && let Some(departed) = hold.departed.take()
        {
            return Err(departed.into());
        }
        let mut why = hold.not_resumed.take();
        if failure.vm == SourceVm::Runs && why.is_none() {
            // Another process has the VM: what becomes of it is seen, not assumed.
            why = seam.vmm.look().err();
        }
        Err(match why {
            Some(why) => SourceError::NotResumed {
                failure,
                why: why.into(),
            },
            None => match failure.vm {
                SourceVm::Runs if hold.log_reset => SourceError::LogReset(failure),
                SourceVm::GivenUp if self.keeps_vm() => SourceError::GivenUp(failure),
                SourceVm::GivenUp | SourceVm::Forced if !self.keeps_vm() => {
                    SourceError::Ended(failure)
                }
                _ => SourceError::Migration(failure),
            },
        })
    }
}

impl Drop for Departure {
    fn drop(&mut self) {
        if !self.seam.kept.is_handed_over() {
            Vcpus::resume(&*self.seam);
        }
        self.seam.kept.end();
    }
}

impl std::fmt::Debug for Departure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Departure")
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

/// Notes the hand-over, and lets the VMM go when the VM runs elsewhere: not before, since until
/// then the destination may give the VM back.
struct Releasing<'a> {
    observer: &'a dyn Observer,
    seam: &'a Seam,
    to: String,
    release: Sender<()>,
}

impl Observer for Releasing<'_> {
    fn phase(&self, phase: Phase) {
        self.observer.phase(phase);
    }
    fn runs_there(&self) {
        let _ = self.release.send(());
    }
    fn progress(&self, phase: Phase, done: u64, total: u64) {
        self.observer.progress(phase, done, total);
    }
    fn allocated(&self, done: u64, total: u64) {
        self.observer.allocated(done, total);
    }
    fn handing_over(&self, record: &[u8], missing: u64) -> io::Result<()> {
        moved::note(self.seam.api.path(), &self.to)?;
        self.seam.kept.hand_over(record, missing)
    }
    fn note(&self, text: &str) {
        self.observer.note(text);
    }
}

impl Seam {
    fn hold(&self) -> MutexGuard<'_, Hold> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Vcpus for Seam {
    fn count(&self) -> usize {
        1
    }
    fn pause(&self, limit: Duration) -> Result<PauseReport, MachineError> {
        let mut hold = self.hold();
        if hold.saved.is_none() {
            let saved = self.vmm.pause(&self.kept, limit);
            let mut saved = saved.map_err(MachineError::engine)?;
            (hold.parts, hold.log_reset) = (saved.parts, saved.log_reset);
            hold.notes.append(&mut saved.notes);
            hold.saved = Some(saved);
        }
        let Some(Saved { at, .. }) = hold.saved else {
            return Err(MachineError::WrongState("the VMM has saved nothing"));
        };
        Ok(PauseReport {
            first_stop: at.0,
            last_stop: at.1,
            was_running: self.kept.ran(),
        })
    }
    /// The VM is the VMM's own again, also one that stays paused.
    fn resume(&self) {
        let mut hold = self.hold();
        hold.not_resumed = self.vmm.take_back(&self.kept).err();
        match &hold.not_resumed {
            Some(why) => warn!(%why, "the VMM does not resume its VM"),
            None => {
                moved::forget(self.api.path());
                self.kept.taken_back();
            }
        }
        // A VM that runs is not the saved one any more.
        hold.saved = None;
    }
    fn inside(&self) -> usize {
        self.hold().saved.is_none().into()
    }
    fn save(&self) -> Result<Vec<VcpuState>, MachineError> {
        let flag = if self.kept.ran() { VM_RUNS } else { VM_PAUSED };
        Ok(vec![VcpuState(vec![flag])])
    }
    fn restore(&self, _: &[VcpuState]) -> Result<(), MachineError> {
        Err(MachineError::WrongState("a source takes no states"))
    }
}

impl Device for Seam {
    fn name(&self) -> &str {
        self.vmm.state_device()
    }
    fn version(&self) -> u32 {
        STATE_VERSION
    }
    /// The VMM pauses its devices before it saves them.
    fn pause(&self) -> Result<(), MachineError> {
        Ok(())
    }
    fn resume(&self) {}
    fn save(&self) -> Result<Vec<u8>, MachineError> {
        match &self.hold().saved {
            Some(saved) => Ok(saved.state.clone()),
            None => Err(MachineError::WrongState("the VMM has saved nothing")),
        }
    }
    fn decode<'a>(&'a self, _: u32, _: &[u8]) -> Result<Apply<'a>, MachineError> {
        Err(MachineError::WrongState("a source takes no states"))
    }
}
