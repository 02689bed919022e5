//! The source: the process a VM leaves.
//!
//! **Guarantee.** Until the destination has said that the guest runs there, any failure leaves the VM
//! running here. From then on this side resumes it only if the destination says that it has discarded its copy
//! without ever hearing `RunningAck`. A page is kept until the destination has acknowledged all pages.
//!
//! **Mechanism.** [`migrate`] goes through the [phases](crate::Phase): set-up; pre-copy passes by the
//! dirty log (`precopy`); switch-over (`switchover`); post-copy (`postcopy`), where one thread
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
mod pool;
mod postcopy;
mod precopy;
mod switchover;

pub use config::{RunningVm, SourceConfig, SourceFailure, SourceVm};

use crate::address::Address;
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use crate::link::StreamLink;
use crate::phase::{Observer, Phase};
use crate::report::{PageCounts, PhaseStart, SourceReport};
use crate::sync::{AtomicBool, Ordering};
use crate::wire::{self, Frame, Setup};

/// What all phases of one migration share.
struct Source<'a> {
    vm: RunningVm<'a>,
    config: &'a SourceConfig,
    cancel: &'a dyn Fn() -> bool,
    observer: &'a dyn Observer,
    link: StreamLink,
    report: SourceReport,
}

/// Moves a running VM to the process that listens at `to`. `guest` says what runs in it, in the
/// caller's own words (at most [`wire::MAX_DESCRIPTION_BYTES`]).
///
/// Setting `cancel` ends the migration before switch-over and the VM runs on; later it has no effect.
/// The calling thread asks the scheduler for short slices, as vCPUs wait for it in the blackout.
/// Returns when the destination has every page and has said so; the VM is then paused here and the
/// caller drops it.
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
    let (stream, urgent) =
        StreamLink::connect(to, config, vm.machine.ram().pages(), cancel).map_err(runs)?;
    let mut source = Source {
        vm: *vm,
        config,
        cancel,
        observer,
        link: stream,
        report: new_report(began_ns),
    };
    let missing = match source.until_running(guest) {
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
        // It waited too long for RunningAck, as this side was not scheduled or the link was slow. Nobody else has
        // the VM now, and nothing here has changed since switch-over.
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

    /// Set-up, pre-copy and switch-over: all that can still be undone. Returns the missing pages.
    fn until_running(
        &mut self,
        guest: &[u8],
    ) -> Result<pageferry_userfault::PageBitmap, MigrationError> {
        self.setup(guest)?;
        let dirty = self.precopy()?;
        self.switch_over(dirty)
    }

    fn setup(&mut self, guest: &[u8]) -> Result<(), MigrationError> {
        let layout = self.vm.machine.ram().layout();
        let (engine, isa) = crate::link::wire_engine(self.vm.machine.engine());
        let setup = Setup {
            engine,
            isa,
            state_format: crate::STATE_FORMAT,
            vcpus: u32::try_from(self.vm.threads.count())
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
        };
        self.link.send(&Frame::Setup(setup))?;
        match self.link.receive(self.config.setup_limit, self.cancel)? {
            Frame::SetupAck => Ok(()),
            other => Err(self.link.unexpected("SetupAck", &other)),
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
