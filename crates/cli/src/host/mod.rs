//! A process that owns a VM: `run` boots one, `receive` receives one.
//!
//! **Guarantee.** The VM has one activity at a time. [`Activity`] makes requests of the control
//! socket, the migration that brings the VM and the one that takes it away exclude each other. A VM
//! that is incomplete, or has left, is never resumed.
//!
//! **Mechanism.** Control connections answer requests on their own threads. Requests that change
//! the VM hold one lock. A request to migrate is queued for the main thread. That runs it on a
//! separate thread while it watches for Ctrl-C ([`leave`], [`wait`]).

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

/// The current activity of the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// It has not come yet.
    Waiting,
    /// It is being received.
    Arriving(Phase),
    /// It is here, and nothing else happens.
    Here,
    /// It is being sent.
    Leaving(Phase),
    /// It runs elsewhere.
    Left {
        /// Its destination.
        to: String,
    },
    /// It was handed over, and the migration failed. It is paused here with all its pages, and
    /// never resumed.
    GivenUp {
        /// Its destination.
        to: String,
    },
    /// It was received in part, and the rest will not come.
    Incomplete {
        /// The number of missing pages.
        missing: u64,
    },
}

/// The state that the main thread, the control connections and a migration's observer share.
pub(crate) struct Host {
    vm: Mutex<Option<Arc<Vm>>>,
    began: Instant,
    /// The bytes that the destination of the current migration has allocated.
    allocated: Mutex<Option<u64>>,
    activity: Mutex<Activity>,
    /// Held during every long operation on the VM. Such operations exclude each other, while the
    /// activity can still be read.
    busy: Mutex<()>,
    /// The record of the migration that brought the VM.
    received: OnceLock<Received>,
    /// Samples the guest's progress after the migration that brought the VM.
    sampler: Mutex<Option<Sampler>>,
    /// A verification whose outcome counts together with every later one (tests corrupt a page).
    earlier: OnceLock<Verified>,
    /// The number of `quit` requests over the control socket.
    quits: AtomicU32,
    /// Cancels the migration that takes the VM away.
    cancel: Arc<AtomicBool>,
    jobs: Sender<Job>,
}

/// The main thread's end of the queue.
pub(crate) struct Jobs(Receiver<Job>);

/// The end of a host.
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

    /// The current activity.
    pub(crate) fn activity(&self) -> Activity {
        self.lock().clone()
    }

    /// Changes the current activity.
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

    /// Gives the host its VM, or removes one that was discarded.
    pub(crate) fn set_vm(&self, vm: Option<&Arc<Vm>>) {
        *self.vm.lock().unwrap_or_else(PoisonError::into_inner) = vm.cloned();
    }

    /// Sets the bytes that the destination of the current migration has allocated.
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

    /// Keeps the record of the migration that brought the VM.
    pub(crate) fn set_received(&self, received: Received) {
        let _ = self.received.set(received);
    }

    /// Keeps the sampler of the guest's progress here. `None` ends it.
    pub(crate) fn set_sampler(&self, sampler: Option<Sampler>) {
        *self.sampler.lock().unwrap_or_else(PoisonError::into_inner) = sampler;
    }

    /// Keeps the outcome of a verification that counts together with every later one.
    pub(crate) fn set_earlier(&self, verified: Verified) {
        let _ = self.earlier.set(verified);
    }

    /// The record of the migration that brought the VM, with the guest's progress until now.
    pub(crate) fn received(&self) -> Option<Received> {
        let mut received = self.received.get()?.clone();
        let sampler = self.sampler.lock().unwrap_or_else(PoisonError::into_inner);
        received.samples = sampler.as_ref().map(Sampler::samples).unwrap_or_default();
        Some(received)
    }

    /// Whether a `quit` came over the control socket.
    pub(crate) fn quits(&self) -> bool {
        self.quit_count() > 0
    }

    /// The number of `quit` requests over the control socket.
    fn quit_count(&self) -> u32 {
        self.quits.load(Ordering::Acquire)
    }

    /// Counts a `quit`.
    fn ask_to_quit(&self) {
        self.quits.fetch_add(1, Ordering::Release);
    }

    /// Keeps the VM until it is migrated away or somebody asks for the end.
    ///
    /// # Errors
    /// When the guest cannot run any further, or the user gave a migration up after the
    /// switch-over.
    pub(crate) fn keep(
        self: &Arc<Self>,
        jobs: &Jobs,
        interrupts: &Interrupts,
    ) -> Result<Ended, Failure> {
        let mut stops = StopRequests::new(interrupts, Some(self));
        loop {
            // A `quit` that cancelled a migration still ends the VM. For a signal, the cancellation
            // was the answer.
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
                // The host itself holds a sender, so this cannot happen. If it did, the loop must
                // not spin.
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(Interrupts::POLL),
            }
        }
    }
}

/// Passes a migration's phases to the host's activity and to those who watch.
pub(crate) struct Watch {
    /// The host with the activity.
    pub(crate) host: Arc<Host>,
    /// Converts a phase to an activity.
    pub(crate) activity: fn(Phase) -> Activity,
    /// The feed for those who watch.
    pub(crate) feed: Arc<Feed>,
}

impl Observer for Watch {
    fn phase(&self, phase: Phase) {
        // The migration's result reports the end.
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

/// Prints the answer to a request to stop.
fn say(text: &str) {
    output::note(text);
}
