//! Post-copy and completion at the destination: from the first guest instruction to the confirmed
//! end.

use super::config::{DestinationConfig, DestinationFailure, DestinationVm};
use super::core::Core;
use super::place::Placer;
use super::{Started, faults, page_counts};
use crate::clock::{instant_ns, monotonic_ns};
use crate::error::MigrationError;
use crate::link::{Received, StreamLink, never};
use crate::phase::{Observer, Phase};
use crate::report::{DestinationReport, PhaseStart};
use crate::source::RunningVm;
use crate::sync::AtomicBool;
use crate::sync::Ordering;
use crate::wire::{DrainCounts, ErrorCode, Frame};
use pageferry_machine::Backing;
use std::time::{Duration, Instant};

/// The longest wait for vCPUs to park after a failure.
const PAUSE_LIMIT: Duration = Duration::from_secs(10);
/// The longest wait for RunningAck. It is well below the source's own limit
/// ([`SourceConfig::answer_limit`](crate::SourceConfig::answer_limit)). So on a silent link, the
/// guest has stopped here before the source resumes it.
const ACK_LIMIT: Duration = Duration::from_secs(5);
/// The longest wait for the times at which the vCPUs began. A kicked vCPU answers within
/// microseconds unless the host does not schedule its thread. The guest runs on meanwhile.
const FIRST_LIMIT: Duration = Duration::from_secs(5);
/// The longest wait, after DrainEnd, for the next page on the urgent connection.
const LAST_PAGES_LIMIT: Duration = Duration::from_secs(10);

/// A VM that runs here while pages are missing.
pub(super) struct Running<'a> {
    pub(super) vm: &'a RunningVm<'a>,
    pub(super) started: Started,
    pub(super) link: StreamLink,
    pub(super) config: &'a DestinationConfig,
    pub(super) observer: &'a dyn Observer,
    pub(super) phases: Vec<PhaseStart>,
    pub(super) started_ns: u64,
}

impl Running<'_> {
    /// Starts the vCPUs, receives every missing page, and confirms the end.
    pub(super) fn receive_rest(
        mut self,
        placer: &mut Placer<'_>,
    ) -> Result<DestinationReport, DestinationFailure> {
        let done = AtomicBool::new(false);
        let core = std::sync::Arc::clone(&self.started.core);
        let events = std::mem::take(&mut self.started.events);
        // Ends the other threads on every path out of the scope.
        struct Ended<'a>(&'a AtomicBool, &'a Core);
        impl Drop for Ended<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    let why = "the receiving thread panicked".into();
                    self.1.fail(MigrationError::Internal(why));
                }
                self.0.store(true, Ordering::Release);
                self.1.wake_all();
            }
        }
        let outcome = std::thread::scope(|scope| {
            let _ended = Ended(&done, &core);
            for events in events {
                let spawned = std::thread::Builder::new()
                    .name("pf-faults".into())
                    .spawn_scoped(scope, || faults::fault_thread(&core, events, &done));
                if let Err(e) = spawned {
                    return Err(MigrationError::os("cannot start a fault thread", e));
                }
            }
            let assist = std::thread::Builder::new()
                .name("pf-assist".into())
                .spawn_scoped(scope, || {
                    crate::latency::lower_priority();
                    let stop = || done.load(Ordering::Acquire) || core.has_failed();
                    if let Err(error) = core
                        .machine
                        .assist_postcopy(&stop, &|page| core.fetch(page))
                    {
                        core.fail(error.into());
                    }
                });
            let outcome = match assist {
                Ok(_) => self.run(placer),
                Err(e) => Err(MigrationError::os("cannot start a thread", e)),
            };
            outcome.map_err(|error| {
                // If another thread failed first and ended the connection, it has the reason.
                let error = if error.is_lost() {
                    core.take_failure().unwrap_or(error)
                } else {
                    error
                };
                // Stop the vCPUs first. Only then may the threads that serve them end.
                core.fail(MigrationError::Internal("the migration has failed".into()));
                let _ = self.vm.threads.pause(PAUSE_LIMIT);
                error
            })
        });
        match outcome {
            Ok(counts) => self.finish(counts),
            Err(error) => {
                self.observer.phase(Phase::Failed);
                // The source may have sent RunningAck meanwhile. Then only this code allows it to
                // resume its copy. So this side sends the code only if its vCPUs are paused.
                let code = if self.started_ns == 0 && self.vm.threads.is_paused() {
                    ErrorCode::Discarded
                } else {
                    error.wire_code()
                };
                self.link.send_error(code, &error);
                self.link.close_gracefully();
                core.link.shutdown();
                let vm = if self.started_ns == 0 {
                    DestinationVm::Discarded
                } else {
                    DestinationVm::PausedIncomplete {
                        missing: core.missing(),
                        asleep: self.vm.threads.inside(),
                    }
                };
                Err(DestinationFailure { vm, error })
            }
        }
    }

    fn enter(&mut self, phase: Phase) {
        self.phases.push(PhaseStart {
            phase,
            at_ns: monotonic_ns(),
        });
        self.observer.phase(phase);
    }

    fn run(&mut self, placer: &mut Placer<'_>) -> Result<DrainCounts, MigrationError> {
        // A source that waited too long has resumed its guest and has sent an error. Then the guest
        // here must not start. No other frame is due before RunningAck.
        self.link.check_silent()?;
        let started_at_ns = monotonic_ns();
        self.vm.threads.resume();
        self.link.send(&Frame::Running { started_at_ns })?;
        // Until the source has answered, it may resume the guest, since Running may be lost. If the
        // connection ends before that, the guest's run here never counted.
        let limit = ACK_LIMIT.min(self.config.silence_limit);
        match self.link.receive(limit, never())? {
            Frame::RunningAck => {}
            other => return Err(self.link.unexpected("RunningAck", &other)),
        }
        self.started_ns = started_at_ns;
        self.enter(Phase::Postcopy);

        let core = std::sync::Arc::clone(&self.started.core);
        // For private memory, the kernel makes huge pages under the lock of all mappings, where every
        // fault would wait.
        if core.machine.ram().backing() != Backing::Anonymous {
            core.collapse();
        }
        let total = self.started.missing_at_start;
        let failed = || core.has_failed();
        let announced = loop {
            match self.link.receive_any(self.config.silence_limit, &failed) {
                Ok(Received::Pages(header)) => {
                    placer.postcopy(&mut self.link, &header, &core)?;
                    let done = placer.data_pages
                        + placer.zero_pages
                        + core.urgent_pages.load(Ordering::Relaxed);
                    self.observer
                        .progress(Phase::Postcopy, done.min(total), total);
                }
                Ok(Received::Frame(Frame::DrainEnd(counts))) => break counts,
                Ok(Received::Frame(other)) => return Err(self.link.unexpected("DrainEnd", &other)),
                Err(MigrationError::Cancelled) => {
                    return Err(core.take_failure().unwrap_or(MigrationError::Cancelled));
                }
                Err(error) => return Err(error),
            }
        };
        self.enter(Phase::Completion);
        self.wait_for_last_pages()?;
        let (background, zero) = (placer.data_pages, placer.zero_pages);
        let counts = DrainCounts {
            urgent: core.urgent_pages.load(Ordering::Relaxed),
            background,
            zero,
        };
        if counts != announced {
            return Err(MigrationError::Peer(format!(
                "it announced {announced} where {counts} arrived"
            )));
        }
        // A failure of a vCPU or a thread is no success, even if every page arrived.
        if let Some(failure) = core.take_failure() {
            return Err(failure);
        }
        // Every page is here and verified, and both counts agree. The guest does not need the
        // source any more. Complete only confirms that the source knows. Any other frame or error
        // changes nothing.
        if self.link.send(&Frame::DrainAck(counts)).is_ok() {
            let _ = self.link.receive(self.config.silence_limit, never());
        }
        core.machine.disarm_userfault()?;
        core.collapse();
        Ok(counts)
    }

    /// Waits for pages that are still in flight on the urgent connection.
    fn wait_for_last_pages(&self) -> Result<(), MigrationError> {
        let core = &self.started.core;
        let limit = LAST_PAGES_LIMIT.min(self.config.silence_limit);
        let mut deadline = Instant::now() + limit;
        let mut left = core.missing();
        while left > 0 {
            if let Some(failure) = core.has_failed().then(|| core.take_failure()).flatten() {
                return Err(failure);
            }
            if core.pump()? == 0 {
                if Instant::now() > deadline {
                    return Err(MigrationError::Timeout(
                        "the last pages on the urgent connection",
                    ));
                }
                std::thread::yield_now();
            }
            let now_left = core.missing();
            if now_left < left {
                (left, deadline) = (now_left, Instant::now() + limit);
            }
        }
        Ok(())
    }

    fn finish(mut self, counts: DrainCounts) -> Result<DestinationReport, DestinationFailure> {
        self.enter(Phase::Completed);
        let core = &self.started.core;
        core.link.shutdown();
        let (stalls, faults, first_faults, local_faults) = core.stalls.collect();
        let first = self.vm.threads.first_instruction(FIRST_LIMIT);
        Ok(DestinationReport {
            phases: self.phases,
            engine: self.vm.machine.engine(),
            // Marking pages may have shown that the guest needs another.
            delivery: self.vm.machine.delivery().unwrap_or(self.started.delivery),
            started_ns: self.started_ns,
            first_instruction_ns: first.map(instant_ns),
            stalls,
            faults,
            first_faults,
            local_faults,
            pages: page_counts(
                self.started.precopy,
                counts.urgent,
                (counts.background, counts.zero),
            ),
            missing_at_start: self.started.missing_at_start,
        })
    }
}
