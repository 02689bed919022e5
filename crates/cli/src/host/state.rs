//! The state that the threads of a host share.

use crate::exit::Failure;
use crate::progress::Feed;
use crate::report::{Received, Report, Verified};
use crate::sampler::Sampler;
use crate::vm::Vm;
use pageferry_migration::{
    Destination, Phase, SessionStatus, SourceConfig, SourceSession, StallRow,
};
use pageferry_transport::address::Address;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

/// A request to migrate.
pub(super) struct Job {
    /// The destination.
    pub(super) to: Address,
    /// Passes, channels, limits and protection.
    pub(super) config: SourceConfig,
    /// The hold on the migration.
    pub(super) session: Arc<SourceSession>,
    /// The feed for those who watch.
    pub(super) feed: Arc<Feed>,
    /// The channel for the outcome.
    pub(super) done: Sender<Result<Report, Failure>>,
}

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
    pub(super) began: Instant,
    /// The bytes that the destination of the current migration has allocated.
    allocated: Mutex<Option<u64>>,
    activity: Mutex<Activity>,
    /// Held during every long operation on the VM. Such operations exclude each other, while the
    /// activity can still be read.
    pub(super) busy: Mutex<()>,
    /// The record of the migration that brought the VM.
    received: OnceLock<Received>,
    /// Samples the guest's progress after the migration that brought the VM.
    sampler: Mutex<Option<Sampler>>,
    /// A verification whose outcome counts together with every later one (tests corrupt a page).
    pub(super) earlier: OnceLock<Verified>,
    /// The number of `quit` requests over the control socket.
    quits: AtomicU32,
    /// The hold on the migration that takes the VM away, or on the last one.
    session: Mutex<Option<Arc<SourceSession>>>,
    /// The hold on the migration that brings the VM.
    destination: Mutex<Weak<Destination>>,
    /// The last status of that migration and its stalls, once it is over.
    arrived: OnceLock<(SessionStatus, Vec<StallRow>)>,
    pub(super) jobs: Sender<Job>,
}

/// The main thread's end of the queue.
pub(crate) struct Jobs(pub(super) Receiver<Job>);

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
            session: Mutex::default(),
            destination: Mutex::default(),
            arrived: OnceLock::new(),
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
    pub(super) fn vm(&self) -> Option<Arc<Vm>> {
        let vm = self.vm.lock().unwrap_or_else(PoisonError::into_inner);
        vm.clone()
    }

    /// Gives the host its VM, or removes one that was discarded.
    pub(crate) fn set_vm(&self, vm: Option<&Arc<Vm>>) {
        *self.vm.lock().unwrap_or_else(PoisonError::into_inner) = vm.cloned();
    }

    /// Sets the bytes that the destination of the current migration has allocated.
    pub(super) fn set_allocated(&self, bytes: Option<u64>) {
        *self
            .allocated
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = bytes;
    }

    pub(super) fn allocated(&self) -> Option<u64> {
        *self
            .allocated
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The hold on the migration that takes the VM away, or on the last one.
    pub(crate) fn session(&self) -> Option<Arc<SourceSession>> {
        let session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        session.clone()
    }

    /// Keeps the hold on a migration that begins.
    pub(crate) fn set_session(&self, session: &Arc<SourceSession>) {
        let mut kept = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        *kept = Some(Arc::clone(session));
    }

    /// The hold on the migration that brings the VM.
    pub(crate) fn destination(&self) -> Option<Arc<Destination>> {
        let kept = self.destination.lock();
        kept.unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// The last status of the migration that brought the VM.
    pub(super) fn arrived(&self) -> Option<&SessionStatus> {
        self.arrived.get().map(|(status, _)| status)
    }

    /// Keeps the last status of the migration that brought the VM, and its stalls.
    pub(crate) fn set_arrived(&self, status: SessionStatus, stalls: Vec<StallRow>) {
        let _ = self.arrived.set((status, stalls));
    }

    /// The stalls of the migration that brings the VM, or has brought it.
    pub(crate) fn stalls(&self) -> Vec<StallRow> {
        let kept = || self.arrived.get().map(|(_, stalls)| stalls.clone());
        let now = self.destination().map(|there| there.stalls());
        now.or_else(kept).unwrap_or_default()
    }

    /// Keeps the hold on the migration that brings the VM.
    pub(crate) fn set_destination(&self, destination: &Arc<Destination>) {
        let mut kept = self
            .destination
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *kept = Arc::downgrade(destination);
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
    pub(super) fn quit_count(&self) -> u32 {
        self.quits.load(Ordering::Acquire)
    }

    /// Forgets the `quit` requests so far, which could not be fulfilled.
    pub(super) fn forget_quits(&self) {
        self.quits.store(0, Ordering::Release);
    }

    /// Counts a `quit`.
    pub(super) fn ask_to_quit(&self) {
        self.quits.fetch_add(1, Ordering::Release);
    }
}
