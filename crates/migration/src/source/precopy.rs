//! Pre-copy: the source sends pages while the guest runs and changes them.
//!
//! The source starts the dirty log before it reads the first page. It harvests the log only when
//! the destination has acknowledged every page of a pass. So a page that the guest changes after it
//! was read is in a later harvest, and no page of one pass is under way in the next. The channels
//! need no order between them. The source sends such a page again, or it is *missing* at
//! switch-over.
//!
//! The destination allocates memory beside the passes. If it takes long after the last pass, what
//! the guest dirties meanwhile would be missing. So another pass follows if the source waited for
//! longer than the pass took.

use super::Supervisor;
use super::shared::Mode;
use crate::error::MigrationError;
use crate::phase::Phase;
use crate::report::PassFigures;
use crate::session::source::{Event, Stage};
use crate::sync::Ordering;
use crate::wire::{Frame, Pass};
use pageferry_addr::PAGE_SIZE;
use std::time::{Duration, Instant};

/// Passes end at this number of dirty pages. Sending so few takes less time than the round trip of
/// a pass.
const FEW_PAGES: u64 = 64;

/// The progress of pre-copy.
#[derive(Debug, Default)]
pub(super) struct Precopy {
    /// The pass, counted from 1.
    pass: u32,
    /// The pages of the pass, and its start.
    pages: u64,
    began: Option<Instant>,
    /// The time that the last pass took, and its end. The source waits for the destination.
    waiting: Option<(Duration, Instant)>,
    /// Whether the destination has allocated all memory that it needs before the switch-over.
    pub(super) destination_ready: bool,
    /// Bytes of pages dirtied a second during the last pass.
    pub(super) dirty_rate: Option<u64>,
    /// The data pages sent by the end of pre-copy.
    pub(super) data_pages: u64,
    /// The start of the push, and the time at which no page was unsent.
    pub(super) postcopy_began: Option<Instant>,
    pub(super) push_ended: Option<Instant>,
}

impl Supervisor<'_, '_, '_> {
    pub(super) fn start_precopy(&mut self) -> Result<(), MigrationError> {
        let pages = self.vm.machine.ram().pages() as usize;
        self.shared.ledger.set_unsent(0..pages);
        if self.config.precopy_passes == 0 {
            self.precopy.waiting = Some((Duration::MAX, Instant::now()));
            return self.decide();
        }
        self.vm.machine.set_dirty_log(true)?;
        self.begin_pass()
    }

    fn begin_pass(&mut self) -> Result<(), MigrationError> {
        self.precopy.pass += 1;
        self.precopy.pages = self.shared.ledger.unsent_count();
        self.precopy.began = Some(Instant::now());
        let (pass, pages) = (self.precopy.pass, self.precopy.pages);
        self.enter(Phase::Precopy { pass });
        if let Some(control) = &mut self.control {
            control.send(&Frame::Pass(Pass { pass, pages }))?;
        }
        self.shared.set_mode(Mode::Copy);
        self.channels.ring();
        if pages == 0 {
            return self.pass_is_acknowledged();
        }
        Ok(())
    }

    /// No page is without a receipt: the pass is over, unless this is a late letter about an
    /// earlier one.
    pub(super) fn pass_is_acknowledged(&mut self) -> Result<(), MigrationError> {
        let Some(began) = self.precopy.began else {
            return Ok(());
        };
        if self.shared.ledger.unacknowledged() > 0 {
            return Ok(());
        }
        self.shared.set_mode(Mode::Hold);
        self.precopy.began = None;
        self.vm.machine.harvest_dirty(&self.dirty, true)?;
        self.shared.ledger.add_dirty(&self.dirty, |_| ());
        let took = began.elapsed();
        let dirtied = self.shared.ledger.unsent_count() * PAGE_SIZE;
        self.precopy.dirty_rate = Some((dirtied as f64 / took.as_secs_f64()) as u64);
        self.report.passes.push(PassFigures {
            pages: self.precopy.pages,
            took,
        });
        let last = self.precopy.pass >= self.config.precopy_passes;
        if last || self.shared.ledger.unsent_count() <= FEW_PAGES {
            self.precopy.waiting = Some((took, Instant::now()));
            return self.decide();
        }
        self.begin_pass()
    }

    /// Reports a pass with `left` pages to go.
    pub(super) fn report_pass(&self, left: u64) {
        let (pass, total) = (self.precopy.pass, self.precopy.pages);
        self.observer
            .progress(Phase::Precopy { pass }, total.saturating_sub(left), total);
    }

    /// Ends pre-copy, or begins another pass, if both sides are ready for it.
    pub(super) fn decide(&mut self) -> Result<(), MigrationError> {
        let Some((took, since)) = self.precopy.waiting else {
            return Ok(());
        };
        if !self.precopy.destination_ready || self.state.stage != Stage::Precopy {
            return Ok(());
        }
        self.precopy.waiting = None;
        if since.elapsed() > took {
            return self.begin_pass();
        }
        self.precopy.data_pages = self.shared.figures.data.load(Ordering::Relaxed);
        self.events.push_back(Event::PrecopyDone);
        Ok(())
    }
}
