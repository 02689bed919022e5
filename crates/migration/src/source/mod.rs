//! The source: the process that a VM leaves.
//!
//! **Guarantee.** Until the destination says that the guest runs there, any failure leaves the VM
//! running here. From then on, this side resumes the VM in one case only: the destination says that
//! it discarded its copy without having received `RunningAck`. The source keeps every page until
//! the destination has acknowledged all pages.
//!
//! **Mechanism.** [`migrate`] goes through the [phases](crate::Phase): set-up, pre-copy by the
//! dirty log (`precopy`), switch-over (`switchover`), post-copy (`postcopy`) and completion. In
//! post-copy, one thread answers requests on the urgent connection, and the calling thread pushes
//! the other pages. In completion, both sides compare their page counts.
//!
//! | failure in | guest | why that is safe |
//! |---|---|---|
//! | set-up, pre-copy | runs on here | It never stopped. The source stops the dirty log. |
//! | switch-over, before `Running` arrived | resumed here | A destination without `RunningAck` pauses and discards its VM when the connection ends. It has received no missing page by then. |
//! | from `Running` on | stays paused here | The guest may have run there, and that copy may count. |
//! | the same, with code `Discarded` | resumed here | That copy is paused, and never received `RunningAck`. |

mod config;
mod pages;
mod postcopy;
mod precopy;
mod switchover;
mod unsent;

pub use config::{RunningVm, SourceConfig, SourceFailure, SourceVm};

use crate::address::Address;
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use crate::link::{StreamLink, UrgentLink, never};
use crate::phase::{Observer, Phase};
use crate::report::{PageCounts, PhaseStart, SourceReport};
use crate::sync::{AtomicBool, Ordering};
use crate::wire::{self, Frame, Setup, SetupProgress};
use pageferry_machine::Frozen;
use std::time::{Duration, Instant};

/// The state that all phases of one migration share.
struct Source<'a> {
    vm: RunningVm<'a>,
    config: &'a SourceConfig,
    cancel: &'a dyn Fn() -> bool,
    observer: &'a dyn Observer,
    link: StreamLink,
    /// Whether the destination has allocated all memory that it needs before the switch-over.
    destination_ready: bool,
    /// From switch-over on, as long as the VM may count elsewhere.
    frozen: Option<Frozen<'a>>,
    report: SourceReport,
}

/// The pause before a source retries with a busy destination.
const BUSY_PAUSE: Duration = Duration::from_millis(200);
/// The interval at which a pausing source checks `cancel`.
const CANCEL_POLL: Duration = Duration::from_millis(20);

/// Moves a running VM to the process that listens at `to`. `guest` describes the guest, in the
/// caller's own format (at most [`wire::MAX_DESCRIPTION_BYTES`]).
///
/// Setting `cancel` before switch-over ends the migration, and the VM runs on. Later it has no
/// effect. This sets short scheduler slices for the calling thread, since the guest waits for it in
/// the blackout. Returns when the destination has confirmed every page. The VM is then paused here,
/// and the caller drops it.
///
/// # Errors
/// [`SourceFailure`] says where the VM is.
pub fn migrate(
    vm: &RunningVm<'_>,
    to: &Address,
    guest: &[u8],
    config: &SourceConfig,
    cancel: &AtomicBool,
    observer: &dyn Observer,
) -> Result<SourceReport, SourceFailure> {
    let runs = |error| SourceFailure {
        vm: SourceVm::Runs,
        error,
    };
    let handed_over = |error| SourceFailure {
        vm: SourceVm::GivenUp,
        error,
    };
    let cancel = &|| cancel.load(Ordering::Relaxed);
    crate::latency::prefer_short_slices();
    let began_ns = monotonic_ns();
    observer.phase(Phase::Setup);
    let offer = offer(vm, guest).map_err(runs)?;
    let (stream, urgent) = connect(vm, to, &offer, config, cancel).map_err(|error| {
        observer.phase(Phase::Failed);
        runs(error)
    })?;
    let mut source = Source {
        vm: *vm,
        config,
        cancel,
        observer,
        link: stream,
        destination_ready: false,
        frozen: None,
        report: new_report(began_ns),
    };
    let missing = match source.until_running() {
        Ok(missing) => missing,
        Err(error) => {
            source.abort_and_resume(&error);
            observer.phase(Phase::Failed);
            return Err(runs(error));
        }
    };
    let finished = source.postcopy(&urgent, missing);
    urgent.shutdown();
    match finished {
        Ok(()) => {
            source.enter(Phase::Completed);
            source.report.total_ns = monotonic_ns() - began_ns;
            Ok(source.report)
        }
        // The destination waited too long for RunningAck: this side was not scheduled, or the link
        // was slow. Only this side has the VM now. Nothing here has changed since switch-over.
        Err(error) if error.is_discarded_there() => {
            source.abort_and_resume(&error);
            observer.phase(Phase::Failed);
            Err(runs(error))
        }
        Err(error) => {
            observer.phase(Phase::Failed);
            source.link.send_error(error.wire_code(), &error);
            Err(handed_over(error))
        }
    }
}

fn new_report(began_ns: u64) -> SourceReport {
    SourceReport {
        phases: vec![PhaseStart {
            phase: Phase::Setup,
            at_ns: began_ns,
        }],
        total_ns: 0,
        first_stop_ns: 0,
        last_stop_ns: 0,
        confirmed_ns: 0,
        pages: PageCounts::default(),
        missing_at_start: 0,
        page_bytes: 0,
        background_bytes: 0,
        background_ns: 0,
        passes: Vec::new(),
    }
}

impl Source<'_> {
    fn enter(&mut self, phase: Phase) {
        self.report.phases.push(PhaseStart {
            phase,
            at_ns: monotonic_ns(),
        });
        self.observer.phase(phase);
    }

    fn check_cancel(&self) -> Result<(), MigrationError> {
        if (self.cancel)() {
            return Err(MigrationError::Cancelled);
        }
        Ok(())
    }

    /// Runs pre-copy and switch-over, which this side can still undo. Returns the missing pages.
    fn until_running(&mut self) -> Result<pageferry_userfault::PageBitmap, MigrationError> {
        let dirty = self.precopy()?;
        self.wait_until_destination_is_ready()?;
        self.switch_over(dirty)
    }

    /// Receives pending SetupProgress frames, so that the destination never waits for room in the
    /// socket.
    fn take_setup_progress(&mut self) -> Result<(), MigrationError> {
        while self.link.wait_for_frame(Duration::ZERO, never())? {
            self.receive_setup_progress()?;
        }
        Ok(())
    }

    /// Waits until the destination has allocated its memory. The guest runs on meanwhile.
    fn wait_until_destination_is_ready(&mut self) -> Result<(), MigrationError> {
        while !self.destination_ready {
            self.receive_setup_progress()?;
        }
        Ok(())
    }

    fn receive_setup_progress(&mut self) -> Result<(), MigrationError> {
        match self.link.receive(self.config.setup_limit, self.cancel)? {
            Frame::SetupProgress(progress) => self.note_setup_progress(progress),
            other => Err(self.link.unexpected("SetupProgress", &other)),
        }
    }

    fn note_setup_progress(&mut self, progress: SetupProgress) -> Result<(), MigrationError> {
        if self.destination_ready {
            let why = "it sent SetupProgress after it was ready";
            return Err(MigrationError::Peer(why.into()));
        }
        self.destination_ready = progress.ready;
        let total = self.vm.machine.ram().pages();
        self.observer.allocated(progress.pages, total);
        Ok(())
    }

    /// Receives the destination's answer to a pass.
    fn receive_answer(&mut self) -> Result<Frame, MigrationError> {
        loop {
            match self.link.receive(self.config.answer_limit, self.cancel)? {
                Frame::SetupProgress(progress) => self.note_setup_progress(progress)?,
                other => return Ok(other),
            }
        }
    }

    /// Ends a migration whose VM counts only here: sends the reason, and lets the VM run as before.
    fn abort_and_resume(&mut self, error: &MigrationError) {
        if matches!(error, MigrationError::Cancelled) {
            self.link.send_cancel();
        } else {
            self.link.send_error(error.wire_code(), error);
        }
        // A failure to stop the dirty log costs only speed.
        let _ = self.vm.machine.set_dirty_log(false);
        self.frozen = None;
        self.vm.threads.resume();
        self.link.shutdown();
    }
}

/// Describes the VM that the destination must build.
fn offer(vm: &RunningVm<'_>, guest: &[u8]) -> Result<Setup, MigrationError> {
    let layout = vm.machine.ram().layout();
    let (engine, isa) = crate::link::wire_engine(vm.machine.engine());
    Ok(Setup {
        engine,
        isa,
        state_format: crate::STATE_FORMAT,
        vcpus: u32::try_from(vm.threads.count())
            .map_err(|_| MigrationError::Internal("too many vCPUs".into()))?,
        memory_bytes: layout.bytes(),
        regions: layout
            .regions()
            .iter()
            .map(|r| wire::Region {
                slot: r.slot,
                gfn: r.gfn,
                pages: r.pages,
            })
            .collect(),
        description: guest.to_vec(),
    })
}

/// Connects, offers the VM, and waits for the destination's SetupAck. Retries for a while if the
/// destination is busy.
fn connect(
    vm: &RunningVm<'_>,
    to: &Address,
    offer: &Setup,
    config: &SourceConfig,
    cancel: &dyn Fn() -> bool,
) -> Result<(StreamLink, UrgentLink), MigrationError> {
    let until = Instant::now() + config.busy_limit;
    loop {
        match connect_once(vm, to, offer, config, cancel) {
            Err(error) if error.is_busy() && Instant::now() < until => {
                let pause = Instant::now() + BUSY_PAUSE;
                while Instant::now() < pause {
                    if cancel() {
                        return Err(MigrationError::Cancelled);
                    }
                    std::thread::sleep(CANCEL_POLL);
                }
            }
            outcome => return outcome,
        }
    }
}

fn connect_once(
    vm: &RunningVm<'_>,
    to: &Address,
    offer: &Setup,
    config: &SourceConfig,
    cancel: &dyn Fn() -> bool,
) -> Result<(StreamLink, UrgentLink), MigrationError> {
    let (mut link, urgent) = StreamLink::connect(to, config, vm.machine.ram().pages(), cancel)?;
    let answer = link
        .send(&Frame::Setup(offer.clone()))
        .and_then(|()| link.receive(config.setup_limit, cancel));
    let error = match answer {
        Ok(Frame::SetupAck) => return Ok((link, urgent)),
        Ok(other) => link.unexpected("SetupAck", &other),
        Err(error) => error,
    };
    if matches!(error, MigrationError::Cancelled) {
        link.send_cancel();
    } else {
        link.send_error(error.wire_code(), &error);
    }
    link.shutdown();
    Err(error)
}
