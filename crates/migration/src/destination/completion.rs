//! The end of a session at the destination, and its report.

use super::{DestinationFailure, DestinationReport, DestinationVm, Stage, Supervisor};
use crate::clock::monotonic_at;
use crate::devices;
use crate::error::MigrationError;
use crate::phase::Phase;
use crate::protocol_error::ProtocolError;
use crate::report::PageCounts;
use crate::session::destination::{End, Event, Link};
use crate::status::SessionStatus;
use crate::sync::Ordering;
use pageferry_addr::PAGE_SIZE;
use pageferry_machine::MachineError;
use std::time::Duration;

/// The longest wait for vCPUs to park after a failure. One that sleeps inside the kernel on a
/// missing page does not park: it stands still there.
const PAUSE_LIMIT: Duration = Duration::from_secs(1);
/// The longest wait for the times at which the vCPUs began. A kicked vCPU answers within
/// microseconds unless the host does not schedule its thread. The guest runs on meanwhile.
const FIRST_LIMIT: Duration = Duration::from_secs(5);

pub(super) type Received = Result<DestinationReport, DestinationFailure>;

/// The failure of a migration whose VM never ran here.
pub(super) fn discarded(error: MigrationError) -> DestinationFailure {
    DestinationFailure {
        vm: DestinationVm::Discarded,
        error,
    }
}

impl Supervisor<'_, '_, '_> {
    /// The source says that every page has a receipt: then none is missing here.
    pub(super) fn check_drained(&mut self, announced: u64) -> Result<(), MigrationError> {
        let found = self.guest.loading.missing_at_start();
        if announced != found {
            return Err(ProtocolError::MissingCount { announced, found }.into());
        }
        let left = self.guest.core.pages.left();
        if left > 0 {
            return Err(ProtocolError::Contradiction("it has receipts for missing pages").into());
        }
        if self.state.stage == Stage::Running {
            self.enter(Phase::Completion);
        }
        Ok(())
    }

    /// Ends the wait for a source that stays away, where it decides nothing about the guest.
    pub(super) fn check_lost_for_too_long(&mut self) {
        let limits = &self.host.config.limits;
        let limit = match self.state.stage {
            // Every page is here. The source only does not know it.
            Stage::Complete => Some(limits.connect),
            Stage::Ready | Stage::Running => limits.give_up_after,
            _ => None,
        };
        if let (Some(since), Some(limit)) = (self.link.lost_since, limit)
            && since.elapsed() > limit
        {
            self.link.lost_since = None;
            self.error.get_or_insert(MigrationError::GaveUp {
                why: MigrationError::NO_CONNECTION,
                last_loss: self.link.last_loss.clone(),
            });
            self.give_up();
        }
    }

    /// Ends the migration here. A VM that lacks no page stays whole.
    pub(super) fn give_up(&mut self) {
        let whole = self.guest.core.pages.missing() == 0;
        self.events.push_back(if whole {
            Event::GiveUpWhole
        } else {
            Event::GiveUp
        });
    }

    /// Reports the progress to the observer.
    pub(super) fn report_progress(&self) {
        match self.state.stage {
            Stage::Receiving => self.report_pass(),
            Stage::Running => {
                let total = self.guest.loading.missing_at_start();
                let done = total.saturating_sub(self.guest.core.pages.left());
                self.record.observer.progress(Phase::Postcopy, done, total);
            }
            _ => {}
        }
    }

    /// Publishes the session's status.
    pub(super) fn publish(&self) {
        let stage = match self.state.stage {
            Stage::Receiving => "receiving",
            Stage::Ready => "ready",
            Stage::Running => "running",
            Stage::Complete => "complete",
            Stage::Discarded => "discarded",
            Stage::Ended(End::Completed) => "completed",
            Stage::Ended(End::Discarded) => "discarded",
            Stage::Ended(End::Incomplete) => "incomplete",
        };
        let data = self.link.inbound.data_pages.load(Ordering::Relaxed);
        let urgent = self.guest.core.urgent_pages.load(Ordering::Relaxed);
        self.host.board.write(SessionStatus {
            stage,
            connected: self.state.link != Link::Down,
            peer: self
                .link
                .control
                .as_ref()
                .map(|control| control.peer().to_owned()),
            protected: Some(self.link.protected.clone()),
            generation: self.state.generation,
            reconnects: self.link.reconnects,
            channels_lost: self.link.lost.count(),
            channels: self.state.channels.clone(),
            pages_left: self.guest.core.pages.left(),
            page_bytes: (data + urgent) * PAGE_SIZE,
            paused: self.guest.loading.is_paused(),
            waiting_faults: self.guest.core.sleepers.waiting.load(Ordering::Relaxed),
            lost_for: self.link.lost_since.map(|since| since.elapsed()),
            last_loss: self.link.last_loss.clone(),
            ..SessionStatus::default()
        });
    }

    /// Ends the threads, and returns the outcome.
    pub(super) fn finish(&mut self) -> Received {
        let end = self.end.unwrap_or(End::Discarded);
        let outcome = match end {
            End::Completed => self.complete(),
            End::Discarded => Err(discarded(self.reason())),
            End::Incomplete => Err(self.stand_still()),
        };
        if outcome.is_err() {
            self.record.observer.phase(Phase::Failed);
        }
        self.guest.precopy.end();
        if let Some(mut control) = self.link.control.take() {
            control.close_gracefully();
        }
        self.end_up_to(u32::MAX);
        self.end_fault_threads();
        self.forget_letters();
        self.publish();
        outcome
    }

    fn reason(&mut self) -> MigrationError {
        self.error.take().unwrap_or_else(|| {
            let why = "the source is gone";
            let last_loss = self.link.last_loss.take();
            MigrationError::GaveUp { why, last_loss }
        })
    }

    /// The VM cannot go on: pauses it.
    fn stand_still(&mut self) -> DestinationFailure {
        let error = self.reason();
        // Stop the vCPUs first. Only then may the threads that serve them end.
        self.guest
            .core
            .fail(MigrationError::Internal("the migration has failed".into()));
        let _ = self.guest.vm.vcpus.pause(PAUSE_LIMIT);
        let _ = devices::pause(self.guest.vm.devices);
        if let Some(control) = &mut self.link.control {
            let _ = control.send(&error.to_frame());
        }
        tracing::error!(missing = self.guest.core.pages.missing(), %error, "the VM stays paused");
        let vm = match error {
            MigrationError::Machine(MachineError::Gone(_)) => DestinationVm::Gone,
            _ => DestinationVm::PausedIncomplete {
                missing: self.guest.core.pages.missing(),
                asleep: self.guest.vm.vcpus.inside(),
            },
        };
        DestinationFailure { vm, error }
    }

    fn complete(&mut self) -> Received {
        self.end_fault_threads();
        if let Err(error) = self.guest.core.machine.disarm_userfault() {
            let vm = DestinationVm::PausedIncomplete {
                missing: 0,
                asleep: 0,
            };
            self.host.set_open_to_owner(false);
            let _ = self.guest.vm.vcpus.pause(PAUSE_LIMIT);
            let _ = devices::pause(self.guest.vm.devices);
            let error = error.into();
            return Err(DestinationFailure { vm, error });
        }
        self.guest.core.collapse();
        self.enter(Phase::Completed);
        let (stalls, faults, first_faults, local_faults) = self.guest.core.stalls.collect();
        // A VM that came paused has not run, or begins whenever its owner wants.
        let first = match self.guest.loading.is_paused() {
            true => None,
            false => self.guest.vm.vcpus.first_instruction(FIRST_LIMIT),
        };
        Ok(DestinationReport {
            phases: std::mem::take(&mut self.record.phases),
            engine: self.guest.vm.machine.kind().engine.to_owned(),
            // Marking pages may have shown that the guest needs another.
            delivery: self
                .guest
                .vm
                .machine
                .delivery()
                .unwrap_or_else(|| self.guest.postcopy.delivery.clone()),
            started: self.guest.started,
            paused: self.guest.loading.is_paused(),
            first_instruction: first.map(monotonic_at),
            stalls,
            stall_rows: self.guest.core.stalls.rows(),
            faults,
            first_faults,
            local_faults,
            protected: self.link.protected.clone(),
            pages: self.counts(),
            missing_at_start: self.guest.loading.missing_at_start(),
            reconnects: self.link.reconnects,
            channels_lost: self.link.lost.count(),
        })
    }

    fn counts(&self) -> PageCounts {
        let load = |count: &crate::sync::AtomicU64| count.load(Ordering::Relaxed);
        let urgent = load(&self.guest.core.urgent_pages);
        let data = load(&self.link.inbound.data_pages);
        let background = data - self.guest.precopy_data;
        PageCounts {
            precopy: self.guest.precopy_data,
            urgent,
            background,
            zero: load(&self.link.inbound.zero_pages),
            confirmed: load(&self.guest.core.confirmed_pages),
        }
    }
}
