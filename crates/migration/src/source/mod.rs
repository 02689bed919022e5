//! The source: the process a VM leaves.
//!
//! **Guarantee.** Until the destination has said that the guest runs there, any failure leaves the
//! VM running here. From then on this side resumes it only if the destination says that it has
//! discarded its copy without ever hearing `RunningAck`. A page is kept until the destination has
//! acknowledged all pages.
//!
//! **Mechanism.** [`migrate`] goes through the [phases](crate::Phase): set-up; pre-copy passes by
//! the dirty log (`precopy`); switch-over (`switchover`); post-copy (`postcopy`), where one thread
//! answers requests on the urgent connection and this one pushes the rest in the background; and
//! completion, where both ends compare what was sent with what was received.
//!
//! | at failure in | guest | why that is safe |
//! |---|---|---|
//! | set-up, pre-copy | runs on here | it never stopped; the dirty log is switched off again |
//! | switch-over, before `Running` came | resumed here | a destination that started but has no `RunningAck` pauses its VM when the connection ends, before any page that only we have was read |
//! | from `Running` on | paused here for good | the guest may have run there, and count |
//! | the same, by the word `Discarded` | resumed here | that copy stands still, and did not hear that it counts |

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
use std::time::{Duration, Instant};

/// What all phases of one migration share.
struct Source<'a> {
    vm: RunningVm<'a>,
    config: &'a SourceConfig,
    cancel: &'a dyn Fn() -> bool,
    observer: &'a dyn Observer,
    link: StreamLink,
    /// The destination has allocated the memory it wants to have before the switch-over.
    destination_ready: bool,
    report: SourceReport,
}

/// How long a source waits before it asks a busy destination again.
const BUSY_PAUSE: Duration = Duration::from_millis(200);
/// How often a source that waits looks whether it was cancelled.
const CANCEL_POLL: Duration = Duration::from_millis(20);

/// Moves a running VM to the process that listens at `to`. `guest` says what runs in it, in the
/// caller's own words (at most [`wire::MAX_DESCRIPTION_BYTES`]).
///
/// Setting `cancel` ends the migration before switch-over and the VM runs on; later it has no
/// effect. The calling thread asks the scheduler for short slices, as vCPUs wait for it in the
/// blackout. Returns when the destination has every page and has said so; the VM is then paused
/// here and the caller drops it.
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
    let given_up = |error| SourceFailure {
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
        report: new_report(began_ns),
    };
    let missing = match source.until_running() {
        Ok(missing) => missing,
        Err(error) => {
            source.call_off(&error);
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
        // It waited too long for RunningAck, as this side was not scheduled or the link was slow.
        // Nobody else has the VM now, and nothing here has changed since switch-over.
        Err(error) if error.is_discarded_there() => {
            source.call_off(&error);
            observer.phase(Phase::Failed);
            Err(runs(error))
        }
        Err(error) => {
            observer.phase(Phase::Failed);
            source.link.say_error(error.wire_code(), &error);
            Err(given_up(error))
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

    /// Pre-copy and switch-over: all that can still be undone. Returns the missing pages.
    fn until_running(&mut self) -> Result<pageferry_userfault::PageBitmap, MigrationError> {
        let dirty = self.precopy()?;
        self.wait_until_destination_is_ready()?;
        self.switch_over(dirty)
    }

    /// Takes what the destination has said about its memory meanwhile, so that it never waits for
    /// room.
    fn take_setup_progress(&mut self) -> Result<(), MigrationError> {
        while self.link.wait_for_frame(Duration::ZERO, never())? {
            self.receive_setup_progress()?;
        }
        Ok(())
    }

    /// The guest runs on while the destination still allocates memory.
    fn wait_until_destination_is_ready(&mut self) -> Result<(), MigrationError> {
        while !self.destination_ready {
            self.receive_setup_progress()?;
        }
        Ok(())
    }

    fn receive_setup_progress(&mut self) -> Result<(), MigrationError> {
        match self.link.receive(self.config.setup_limit, self.cancel)? {
            Frame::SetupProgress(progress) => self.hear_setup_progress(progress),
            other => Err(self.link.unexpected("SetupProgress", &other)),
        }
    }

    fn hear_setup_progress(&mut self, progress: SetupProgress) -> Result<(), MigrationError> {
        if self.destination_ready {
            let why = "it sent SetupProgress after it was ready";
            return Err(MigrationError::Peer(why.into()));
        }
        self.destination_ready = progress.ready;
        let total = self.vm.machine.ram().pages();
        self.observer.allocated(progress.pages, total);
        Ok(())
    }

    /// The destination's answer to a pass.
    fn receive_answer(&mut self) -> Result<Frame, MigrationError> {
        loop {
            match self.link.receive(self.config.answer_limit, self.cancel)? {
                Frame::SetupProgress(progress) => self.hear_setup_progress(progress)?,
                other => return Ok(other),
            }
        }
    }

    /// Ends a migration whose VM counts nowhere else: says why, and lets the VM run as before.
    fn call_off(&mut self, error: &MigrationError) {
        if matches!(error, MigrationError::Cancelled) {
            self.link.say_cancel();
        } else {
            self.link.say_error(error.wire_code(), error);
        }
        // A refusal to stop logging costs the guest speed, not correctness.
        let _ = self.vm.machine.set_dirty_log(false);
        self.vm.threads.resume();
        self.link.shutdown();
    }
}

/// What the destination has to build.
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

/// Connects, offers the VM, and hears that the destination takes it. A destination that is busy is
/// asked again for a while.
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
        link.say_cancel();
    } else {
        link.say_error(error.wire_code(), &error);
    }
    link.shutdown();
    Err(error)
}
