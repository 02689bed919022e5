//! Pre-copy at the destination: memory is allocated while pages arrive.

use super::{Allocation, Supervisor};
use crate::error::MigrationError;
use crate::phase::Phase;
use crate::sync::Ordering;
use crate::wire::{Frame, Pass, SetupProgress};
use pageferry_transport::Quota;
use std::time::{Duration, Instant};

/// The interval between two SetupProgress frames.
const REPORT_INTERVAL: Duration = Duration::from_millis(500);

/// Passes that begin behind so many phases are not in the report.
const RECORDED_PHASES: usize = 1000;

/// The progress of pre-copy.
pub(super) struct Precopy {
    /// Dropping it ends its threads.
    allocation: Option<Allocation>,
    reported: Instant,
    pass: u32,
    pages: u64,
    /// How often passes are reported.
    told: Quota,
    /// The pages that had come when the pass began.
    before: u64,
}

impl Precopy {
    pub(super) fn new(allocation: Allocation) -> Self {
        Self {
            allocation: Some(allocation),
            reported: Instant::now(),
            pass: 0,
            pages: 0,
            told: Quota::new(),
            before: 0,
        }
    }

    /// Whether all memory has been allocated, and the source knows it.
    pub(super) fn is_ready(&self) -> bool {
        self.allocation.is_none()
    }

    /// Ends the allocation.
    pub(super) fn end(&mut self) {
        self.allocation = None;
    }
}

impl Supervisor<'_, '_, '_> {
    pub(super) fn begin_pass(&mut self, pass: Pass) {
        self.guest.precopy.pass = pass.pass;
        self.guest.precopy.pages = pass.pages;
        self.guest.precopy.before = self.bulk_pages();
        // The source chooses how many there are, and their numbers.
        if self.guest.precopy.told.take().is_none() {
            return;
        }
        let phase = Phase::Precopy { pass: pass.pass };
        if self.record.phases.len() < RECORDED_PHASES {
            self.enter(phase);
        } else {
            self.record.observer.phase(phase);
        }
    }

    /// The pages that came on bulk channels so far.
    pub(super) fn bulk_pages(&self) -> u64 {
        let load = |count: &crate::sync::AtomicU64| count.load(Ordering::Relaxed);
        load(&self.link.inbound.data_pages) + load(&self.link.inbound.zero_pages)
    }

    /// Reports the allocation to the source and the observer at intervals.
    pub(super) fn report_allocation(&mut self) -> Result<(), MigrationError> {
        let Some(allocation) = &self.guest.precopy.allocation else {
            return Ok(());
        };
        let ready = allocation.is_ready()?;
        if !ready && self.guest.precopy.reported.elapsed() < REPORT_INTERVAL {
            return Ok(());
        }
        self.guest.precopy.reported = Instant::now();
        let pages = allocation.done();
        self.record
            .observer
            .allocated(pages, self.guest.core.page_count());
        self.send(&Frame::SetupProgress(SetupProgress { pages, ready }));
        if ready {
            self.guest.precopy.end();
        }
        Ok(())
    }

    /// Reports the pages of a pass to the observer.
    pub(super) fn report_pass(&self) {
        if self.guest.precopy.pass > 0 {
            let done = self.bulk_pages() - self.guest.precopy.before;
            let (pass, total) = (self.guest.precopy.pass, self.guest.precopy.pages);
            self.record
                .observer
                .progress(Phase::Precopy { pass }, done.min(total), total);
        }
    }
}
