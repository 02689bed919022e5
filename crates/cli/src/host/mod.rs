//! A process that owns a VM, whichever way the VM came: `run` boots one, `receive` takes one in.
//!
//! **Guarantee.** One thing happens to the VM at a time: requests of the control socket, the
//! migration that brings it and the one that takes it away exclude each other by [`Activity`]. A VM
//! that is incomplete, or has left, is never resumed.
//!
//! **Mechanism.** Control connections answer requests on their own threads; those that do something
//! to the VM hold one lock. A request to migrate is queued for the main thread, which runs it on a
//! thread of its own while it watches for Ctrl-C ([`leave`], [`wait`]).

mod leave;
mod service;
mod wait;

pub(crate) use leave::{FINISHING, send_away};
pub(crate) use service::HostService;
pub(crate) use wait::{
    ABANDONED_AT_SOURCE, Answers, NoOutcome, Stop, StopRequests, wait_for_outcome,
};

use crate::exit::Failure;
use crate::output;
use crate::progress::Feed;
use crate::report::{Received, Verified};
use crate::sampler::Sampler;
use crate::signals::Interrupts;
use crate::vm::Vm;
use leave::Job;
use pageferry_migration::{Observer, Phase};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

/// What is happening to the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// It has not come yet.
    Waiting,
    /// It is being received.
    Arriving(Phase),
    /// Nothing but that it is here.
    Here,
    /// It is being sent.
    Leaving(Phase),
    /// It runs elsewhere.
    Left {
        /// Where to it went.
        to: String,
    },
    /// It was handed over, and the migration failed: paused here with all its pages, never resumed.
    GivenUp {
        /// Where to it went.
        to: String,
    },
    /// It was received in part and the rest will not come.
    Incomplete {
        /// How many pages are not here.
        missing: u64,
    },
}

/// What the main thread, the control connections and a migration's observer share.
pub(crate) struct Host {
    vm: Mutex<Option<Arc<Vm>>>,
    began: Instant,
    /// How many bytes the destination of the migration under way has allocated.
    allocated: Mutex<Option<u64>>,
    activity: Mutex<Activity>,
    /// Held by whoever does something to the VM that takes time, so that such things exclude each
    /// other while the activity can still be read.
    busy: Mutex<()>,
    /// What the migration that brought the VM did.
    received: OnceLock<Received>,
    /// Watches the guest's progress after a migration that brought it.
    sampler: Mutex<Option<Sampler>>,
    /// A verification whose outcome counts together with every later one (tests corrupt a page).
    earlier: OnceLock<Verified>,
    /// How often somebody asked for the end over the control socket.
    quits: AtomicU32,
    /// Calls the migration that takes the VM away off.
    cancel: Arc<AtomicBool>,
    jobs: Sender<Job>,
}

/// The main thread's end of the queue.
pub(crate) struct Jobs(Receiver<Job>);

/// How a host came to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Ctrl-C or `quit`.
    Asked,
    /// The VM was migrated to this address.
    Migrated(String),
}

impl Host {
    /// A host without a VM.
    pub(crate) fn new() -> (Arc<Self>, Jobs) {
        let (jobs, queue) = channel();
        let host = Self {
            vm: Mutex::default(),
            began: Instant::now(),
            allocated: Mutex::default(),
            activity: Mutex::new(Activity::Waiting),
            busy: Mutex::default(),
            received: OnceLock::new(),
            sampler: Mutex::default(),
            earlier: OnceLock::new(),
            quits: AtomicU32::new(0),
            cancel: Arc::default(),
            jobs,
        };
        (Arc::new(host), Jobs(queue))
    }

    fn lock(&self) -> MutexGuard<'_, Activity> {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is happening now.
    pub(crate) fn activity(&self) -> Activity {
        self.lock().clone()
    }

    /// Something else is happening from now on.
    pub(crate) fn set_activity(&self, activity: Activity) {
        if !matches!(activity, Activity::Arriving(_) | Activity::Leaving(_)) {
            self.set_allocated(None);
        }
        *self.lock() = activity;
    }

    /// The VM, if there is one.
    fn vm(&self) -> Option<Arc<Vm>> {
        let vm = self.vm.lock().unwrap_or_else(PoisonError::into_inner);
        vm.clone()
    }

    /// Gives the host its VM, or takes away one that was discarded.
    pub(crate) fn set_vm(&self, vm: Option<&Arc<Vm>>) {
        *self.vm.lock().unwrap_or_else(PoisonError::into_inner) = vm.cloned();
    }

    /// The destination of the migration under way has allocated so many bytes.
    fn set_allocated(&self, bytes: Option<u64>) {
        *self
            .allocated
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = bytes;
    }

    fn allocated(&self) -> Option<u64> {
        *self
            .allocated
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what the migration that brought the VM did.
    pub(crate) fn set_received(&self, received: Received) {
        let _ = self.received.set(received);
    }

    /// Keeps the sampler that watches the guest's progress here; `None` ends it.
    pub(crate) fn set_sampler(&self, sampler: Option<Sampler>) {
        *self.sampler.lock().unwrap_or_else(PoisonError::into_inner) = sampler;
    }

    /// Keeps the outcome of a verification that counts together with every later one.
    pub(crate) fn set_earlier(&self, verified: Verified) {
        let _ = self.earlier.set(verified);
    }

    /// What the migration that brought the VM did, with the guest's progress until now.
    pub(crate) fn received(&self) -> Option<Received> {
        let mut received = self.received.get()?.clone();
        let sampler = self.sampler.lock().unwrap_or_else(PoisonError::into_inner);
        received.samples = sampler.as_ref().map(Sampler::samples).unwrap_or_default();
        Some(received)
    }

    /// Whether somebody asked for the end over the control socket.
    pub(crate) fn quits(&self) -> bool {
        self.quit_count() > 0
    }

    /// How often somebody asked for the end over the control socket.
    fn quit_count(&self) -> u32 {
        self.quits.load(Ordering::Acquire)
    }

    /// Asks for the end.
    fn ask_to_quit(&self) {
        self.quits.fetch_add(1, Ordering::Release);
    }

    /// Keeps the VM until it is migrated away or somebody wants the end.
    ///
    /// # Errors
    /// When the guest cannot go on, or the user gave a migration up after the switch-over.
    pub(crate) fn keep(
        self: &Arc<Self>,
        jobs: &Jobs,
        interrupts: &Interrupts,
    ) -> Result<Ended, Failure> {
        let mut stops = StopRequests::new(interrupts, Some(self));
        loop {
            // A `quit` that cancelled a migration still ends the VM; a signal was answered by that.
            if self.quits() || stops.take().is_some() {
                return Ok(Ended::Asked);
            }
            if let Some(vm) = self.vm() {
                vm.check_guest()?;
            }
            match jobs.0.recv_timeout(Interrupts::POLL) {
                Ok(job) => {
                    if let Some(to) = self.leave(job, &mut stops)? {
                        return Ok(Ended::Migrated(to));
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                // The host holds a sender itself, so this cannot be; not to spin if it were:
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Interrupts::POLL),
            }
        }
    }
}

/// Passes a migration's phases on to the host's activity and to those who watch.
pub(crate) struct Watch {
    /// Whose activity it is.
    pub(crate) host: Arc<Host>,
    /// What a phase makes of the activity.
    pub(crate) activity: fn(Phase) -> Activity,
    /// Who watches.
    pub(crate) feed: Arc<Feed>,
}

impl Observer for Watch {
    fn phase(&self, phase: Phase) {
        // The end is told by the migration's result.
        if !matches!(phase, Phase::Completed | Phase::Failed) {
            self.host.set_activity((self.activity)(phase));
        }
        self.feed.phase(phase);
    }

    fn progress(&self, phase: Phase, done: u64, total: u64) {
        self.feed.progress(phase, done, total);
    }

    fn allocated(&self, done: u64, total: u64) {
        self.host
            .set_allocated(Some(done * pageferry_addr::PAGE_SIZE));
        self.feed.allocated(done, total);
    }
}

/// Whether the guest may run at the destination in this phase.
pub(crate) fn has_switched_over(phase: Phase) -> bool {
    matches!(
        phase,
        Phase::Postcopy | Phase::Completion | Phase::Completed
    )
}

/// Says that somebody asked for the end, and what is done about it.
fn say(text: &str) {
    output::note(text);
}
