//! The end of a session at the source, and its report.

use super::prefetch::Prefetch;
use super::shared::Mode;
use super::{SourceFailure, SourceVm, Supervisor};
use crate::clock::monotonic;
use crate::error::MigrationError;
use crate::phase::Phase;
use crate::protocol_error::ProtocolError;
use crate::report::{
    DeviceFigures, PageCounts, PhaseStart, PrefetchCounts, Protected, SourceReport,
};
use crate::session::source::{End, Stage};
use crate::status::SessionStatus;
use crate::sync::Ordering;
use pageferry_addr::PAGE_SIZE;
use std::time::{Duration, Instant};

pub(super) fn new_report() -> SourceReport {
    SourceReport {
        phases: vec![PhaseStart {
            phase: Phase::Setup,
            at: monotonic(),
        }],
        total: Duration::ZERO,
        first_stop: Duration::ZERO,
        last_stop: Duration::ZERO,
        paused: false,
        sent_at: Duration::ZERO,
        confirmed: Duration::ZERO,
        protected: Protected::default(),
        pages: PageCounts::default(),
        prefetch: PrefetchCounts::default(),
        devices: DeviceFigures::default(),
        missing_at_start: 0,
        pages_resent: 0,
        bytes_saved: 0,
        page_bytes: 0,
        background_bytes: 0,
        background_took: Duration::ZERO,
        passes: Vec::new(),
        blackout_forecast: None,
        notes: Vec::new(),
        reconnects: 0,
        channels_lost: 0,
    }
}

impl Supervisor<'_, '_, '_> {
    /// Checks the destination's count of the pages that were missing.
    pub(super) fn check_drained(&self, counted: u64) -> Result<(), MigrationError> {
        let announced = self.record.report.missing_at_start;
        if counted == announced {
            return Ok(());
        }
        let found = counted;
        Err(ProtocolError::MissingCount { announced, found }.into())
    }

    /// Reports the progress to the observer, and begins a delayed push.
    pub(super) fn report_progress(&mut self) {
        let ledger = &self.shared.ledger;
        let left = ledger.unacknowledged();
        match self.state.stage {
            Stage::Precopy => self.report_pass(left),
            Stage::HandedOver => {
                let total = self.record.report.missing_at_start;
                self.record
                    .observer
                    .progress(Phase::Postcopy, total.saturating_sub(left), total);
                if ledger.unsent_count() == 0 && self.guest.precopy.push_ended.is_none() {
                    self.guest.precopy.push_ended = Some(Instant::now());
                }
                self.begin_delayed_push();
            }
            _ => {}
        }
    }

    /// Begins the push when the guest has requested no page for a while.
    fn begin_delayed_push(&mut self) {
        // Before `Running` the source only answers: the push has not begun.
        if self.shared.mode() != Mode::Answer || self.guest.precopy.postcopy_began.is_none() {
            return;
        }
        let now = self.shared.figures.urgent.load(Ordering::Relaxed);
        if now != self.quiet.0 {
            self.quiet = (now, Instant::now());
        } else if self.quiet.1.elapsed() > self.config.push_after {
            self.guest.precopy.postcopy_began = Some(Instant::now());
            self.shared.set_mode(Mode::Push);
            self.link.channels.ring();
        }
    }

    /// Publishes the session's status.
    pub(super) fn publish(&mut self) {
        let ledger = &self.shared.ledger;
        let stage = match self.state.stage {
            Stage::Setup => "setup",
            Stage::Precopy => "pre-copy",
            Stage::SwitchOver => "switch-over",
            Stage::HandedOver => "handed-over",
            Stage::Drained => "drained",
            Stage::Cancelling => "cancelling",
            Stage::Ended(End::Completed) => "completed",
            Stage::Ended(End::Kept) => "kept",
            Stage::Ended(End::Returned) => "returned",
            Stage::Ended(End::GivenUp) => "given-up",
            Stage::Ended(End::Forced) => "resumed-here",
        };
        self.session.board.write(SessionStatus {
            stage,
            connected: self.link.control.is_some(),
            peer: self
                .link
                .control
                .as_ref()
                .map(|control| control.peer().to_owned()),
            protected: (self.record.report.protected.version > 0)
                .then(|| self.record.report.protected.clone()),
            generation: self.state.generation,
            reconnects: self.record.report.reconnects,
            channels_lost: self.link.lost.count(),
            channels: self.link.channels.open().collect(),
            pages_left: ledger.unacknowledged(),
            pages_in_flight: ledger.in_flight(),
            page_bytes: ledger.acknowledged_bytes(),
            paused: self.record.report.paused,
            passes: self.guest.precopy.passes,
            dirty_rate: self.guest.precopy.convergence.dirty_rate,
            link_rate: self.guest.precopy.convergence.link_rate,
            blackout_forecast: self.guest.precopy.forecast,
            note: self.guest.precopy.note.clone(),
            settings: self.session.settings(),
            time_left: self.guest.precopy.time_left(),
            lost_for: self.link.lost_since.map(|since| since.elapsed()),
            last_loss: self.link.last_loss.clone(),
            ..SessionStatus::default()
        });
    }

    /// Ends the threads, and returns the outcome.
    pub(super) fn finish(&mut self) -> Result<SourceReport, SourceFailure> {
        self.close_generation();
        self.shared.ended.store(true, Ordering::Release);
        let end = self.end.unwrap_or(End::Kept);
        self.publish();
        let vm = match end {
            End::Completed => return Ok(self.complete()),
            End::Kept | End::Returned => SourceVm::Runs,
            End::GivenUp => SourceVm::GivenUp,
            End::Forced => SourceVm::Forced,
        };
        let error = self.error.take().unwrap_or_else(|| {
            let last_loss = self.link.last_loss.take();
            if end == End::Returned {
                let last = last_loss.unwrap_or_default();
                let why = format!("its reason was lost with a connection ({last})");
                return MigrationError::Discarded(why);
            }
            let why = "the source ended the migration";
            MigrationError::GaveUp { why, last_loss }
        });
        Err(SourceFailure { vm, error })
    }

    fn complete(&mut self) -> SourceReport {
        self.enter(Phase::Completed);
        let figures = &self.shared.figures;
        let load = |figure: &crate::sync::AtomicU64| figure.load(Ordering::Relaxed);
        let data = self.guest.precopy.data_pages;
        let background = load(&figures.data) - data;
        self.record.report.pages = PageCounts {
            precopy: data,
            urgent: load(&figures.urgent),
            background,
            zero: load(&figures.zero),
            confirmed: load(&figures.confirmed),
        };
        self.record.report.pages_resent = load(&figures.resent);
        self.record.report.bytes_saved = load(&figures.confirmed) * PAGE_SIZE;
        let prefetch = self.shared.prefetch.as_ref();
        let counts = prefetch.map(Prefetch::counts).unwrap_or_default();
        self.record.report.prefetch = PrefetchCounts {
            late: load(&figures.late),
            ..counts
        };
        self.record.report.channels_lost = self.link.lost.count();
        self.record.report.page_bytes = self.shared.ledger.acknowledged_bytes();
        self.record.report.background_bytes = background * PAGE_SIZE;
        if let (Some(began), Some(ended)) = (
            self.guest.precopy.postcopy_began,
            self.guest.precopy.push_ended,
        ) {
            self.record.report.background_took = ended.saturating_duration_since(began);
        }
        self.record.report.total = monotonic().saturating_sub(self.record.report.phases[0].at);
        self.record.report.clone()
    }
}
