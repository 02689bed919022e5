//! From the first guest instruction here to the confirmed end.

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
use std::time::{Duration, Instant};

/// The longest wait for vCPUs to park when the migration has failed.
const PAUSE_LIMIT: Duration = Duration::from_secs(10);
/// The longest wait for the source's acknowledgement that the guest runs here. Well below the
/// source's own limit ([`SourceConfig::answer_limit`](crate::SourceConfig::answer_limit)): on a
/// link that falls silent the guest has stopped here before the source resumes it.
const ACK_LIMIT: Duration = Duration::from_secs(5);
/// How long a report waits for the vCPUs to tell when they began. They are kicked and answer within
/// microseconds, unless the host lets their threads wait; the guest runs on meanwhile.
const FIRST_LIMIT: Duration = Duration::from_secs(5);
/// How long the drain's end may wait for requested pages that are still on the urgent connection.
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
        let events = self.started.events.take();
        // However this thread leaves the scope, its helpers end too.
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
            if let Some(events) = events {
                let spawned = std::thread::Builder::new()
                    .name("pf-faults".into())
                    .spawn_scoped(scope, || faults::fault_thread(&core, events, &done));
                if let Err(e) = spawned {
                    return Err(MigrationError::os("cannot start the fault thread", e));
                }
            }
            let assist = std::thread::Builder::new()
                .name("pf-assist".into())
                .spawn_scoped(scope, || {
                    crate::latency::stand_back();
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
                // Where the connection ended because another thread failed first, that thread knows
                // why.
                let error = if error.is_lost() {
                    core.take_failure().unwrap_or(error)
                } else {
                    error
                };
                // Nobody may go on; then the threads that could have helped may end.
                core.fail(MigrationError::Internal("the migration has failed".into()));
                let _ = self.vm.threads.pause(PAUSE_LIMIT);
                error
            })
        });
        match outcome {
            Ok(counts) => self.finish(counts),
            Err(error) => {
                self.observer.phase(Phase::Failed);
                // The source may have acknowledged meanwhile. Then it can resume its copy by this
                // word only, which is said where this one stands still.
                let code = if self.started_ns == 0 && self.vm.threads.is_paused() {
                    ErrorCode::Discarded
                } else {
                    error.wire_code()
                };
                self.link.say_error(code, &error);
                self.link.close_after_word();
                core.link.shutdown();
                let vm = if self.started_ns == 0 {
                    DestinationVm::Discarded
                } else {
                    DestinationVm::PausedIncomplete {
                        missing: core.missing(),
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
        // A source that waited too long for us has resumed its guest, and has said so: nothing else
        // is due before RunningAck. Ours must not start beside it.
        self.link.check_silent()?;
        let started_at_ns = monotonic_ns();
        self.vm.threads.resume();
        self.link.send(&Frame::Running { started_at_ns })?;
        // Until the source has answered, it may resume the guest if it did not hear us; if the
        // connection ends before, what ran here since never counted.
        let limit = ACK_LIMIT.min(self.config.silence_limit);
        match self.link.receive(limit, never())? {
            Frame::RunningAck => {}
            other => return Err(self.link.unexpected("RunningAck", &other)),
        }
        self.started_ns = started_at_ns;
        self.enter(Phase::Postcopy);

        let core = std::sync::Arc::clone(&self.started.core);
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
                "it says it sent {announced} where {counts} arrived"
            )));
        }
        // A vCPU or a thread that failed while every page arrived all the same: no success.
        if let Some(failure) = core.take_failure() {
            return Err(failure);
        }
        // Every page is here and verified, and both counts agree: the guest needs nobody any more.
        // The source's last word says only that it knows; whatever comes instead changes
        // nothing here.
        if self.link.send(&Frame::DrainAck(counts)).is_ok() {
            let _ = self.link.receive(self.config.silence_limit, never());
        }
        core.machine.disarm_userfault()?;
        Ok(counts)
    }

    /// All pages were sent; those on the urgent connection may still be on their way.
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
            delivery: self.started.delivery,
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
