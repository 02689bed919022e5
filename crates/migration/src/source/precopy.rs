//! Pre-copy: the source sends pages while the guest runs and changes them.
//!
//! The source starts the dirty log before it reads the first page. It harvests the log only when
//! the destination has acknowledged every page of a pass. So a page that the guest changes after it
//! was read is in a later harvest, and no page of one pass is under way in the next. The channels
//! need no order between them. The source sends such a page again, or it is *missing* at
//! switch-over.
//!
//! At the end of each pass the source decides what comes next ([`Switch`]). It uses the
//! [outlook](super::convergence) and the [forecast](super::forecast) of the blackout. While it
//! holds the switch-over back, a rest follows each short pass.
//!
//! Without a dirty log ([`Tracking::Hash`]), each pass looks at all memory, and the first sends all
//! of it. Later ones send the pages whose bytes differ from those sent before. The source takes as
//! many for dirty at the end of a pass as the pass has sent, and after the first pass all. Every
//! page is missing at the switch-over, and post-copy confirms those that have not changed.
//!
//! The destination allocates memory beside the passes. If it takes long after the last pass, what
//! the guest dirties meanwhile would be missing. So another pass follows if the source waited for
//! longer than the pass took.

use super::convergence::{Convergence, Outlook, PassEnd};
use super::forecast::{self, Basis};
use super::note;
use super::shared::Mode;
use super::{Supervisor, Tracking};
use crate::error::MigrationError;
use crate::phase::Phase;
use crate::report::PassFigures;
use crate::session::source::{Event, Stage};
use crate::settings::Switch;
use crate::sync::Ordering;
use crate::wire::{Frame, Pass};
use pageferry_addr::PAGE_SIZE;
use std::time::{Duration, Instant};

/// The least time from the start of a pass to that of the next, while the switch-over is held back.
const REST: Duration = Duration::from_millis(500);

/// The most passes that a report names one by one. A source that waits for its operator makes any
/// number.
const RECORDED_PASSES: u32 = 1000;

/// The progress of pre-copy.
#[derive(Debug, Default)]
pub(super) struct Precopy {
    pub(super) tracking: Tracking,
    /// Whether pre-copy would bring nothing: there is no log, and the destination would not keep
    /// the bytes.
    useless: bool,
    /// Whether the dirty log runs.
    pub(super) logs: bool,
    /// The pass, counted from 1.
    pass: u32,
    /// The pages of the pass, and its start.
    pages: u64,
    began: Option<Instant>,
    /// The data pages and the zero pages sent before the pass.
    data_before: u64,
    zero_before: u64,
    /// Without a dirty log: the pages that may be dirty, by the last pass.
    may_be_dirty: u64,
    /// The end of the last pass that has ended.
    last: Option<LastPass>,
    /// The time that the last pass took, and its end. The source waits for the destination.
    waiting: Option<(Duration, Instant)>,
    /// The time of the next pass, while the switch-over is held back.
    rests_until: Option<Instant>,
    /// Whether the destination has allocated all memory that it needs before the switch-over.
    pub(super) destination_ready: bool,
    pub(super) convergence: Convergence,
    /// The passes that have ended.
    pub(super) passes: u32,
    /// The shortest harvest right after another.
    least_harvest: Option<Duration>,
    /// The expected blackout, by the last forecast.
    pub(super) forecast: Option<Duration>,
    /// Why pre-copy ends with many pages left, or goes on, for people.
    pub(super) note: Option<String>,
    /// Whether the last note said that the switch-over is held back.
    said: Option<bool>,
    /// The data pages sent by the end of pre-copy.
    pub(super) data_pages: u64,
    /// The start of the push, and the time at which no page was unsent.
    pub(super) postcopy_began: Option<Instant>,
    pub(super) push_ended: Option<Instant>,
}

/// A pass that has ended.
#[derive(Clone, Copy, Debug)]
struct LastPass {
    took: Duration,
    ended: Instant,
    outlook: Outlook,
    /// From its end.
    time_left: Option<Duration>,
}

impl Precopy {
    pub(super) fn new(tracking: Tracking) -> Self {
        Self {
            tracking,
            ..Self::default()
        }
    }

    /// The time until no page is left, by the last pass. `None` before one has ended.
    pub(super) fn time_left(&self) -> Option<Duration> {
        let last = self.last?;
        last.time_left
            .map(|left| left.saturating_sub(last.ended.elapsed()))
    }
}

impl Supervisor<'_, '_, '_> {
    pub(super) fn start_precopy(&mut self) -> Result<(), MigrationError> {
        let pages = self.guest.vm.machine.ram().pages() as usize;
        self.shared.ledger.set_unsent(0..pages);
        if self.switch() == Switch::NOW {
            return self.decide();
        }
        self.start_passes()
    }

    fn start_passes(&mut self) -> Result<(), MigrationError> {
        if self.guest.precopy.useless {
            return Ok(());
        }
        if self.guest.precopy.tracking == Tracking::Log {
            self.guest.vm.machine.set_dirty_log(true)?;
            self.guest.precopy.logs = true;
        }
        self.begin_pass()
    }

    /// Chooses how dirty pages are found. `keeps`: the destination keeps the bytes of missing
    /// pages.
    pub(super) fn choose_tracking(&mut self, keeps: bool) {
        if self.guest.precopy.tracking == Tracking::Log {
            return;
        }
        self.shared.set_confirms(keeps);
        if keeps {
            return;
        }
        let note = if self.guest.vm.machine.has_dirty_log() {
            self.guest.precopy.tracking = Tracking::Log;
            note::NOT_KEPT_BUT_LOGGED
        } else {
            self.guest.precopy.useless = true;
            note::NOT_KEPT
        };
        self.take_note(note.to_owned());
    }

    /// The end of pre-copy: at once if it would bring nothing, unless the operator decides.
    fn switch(&self) -> Switch {
        match self.settings().switch {
            Switch::Manual => Switch::Manual,
            _ if self.guest.precopy.useless => Switch::NOW,
            other => other,
        }
    }

    /// Without a dirty log: all pages may have changed since they were sent.
    pub(super) fn all_may_be_dirty(&self) {
        let pages = self.guest.vm.machine.ram().pages() as usize;
        self.shared.ledger.set_unsent(0..pages);
    }

    /// The pages that the guest has dirtied, as far as that is known.
    fn left(&self) -> u64 {
        match self.guest.precopy.tracking {
            Tracking::Log => self.shared.ledger.unsent_count(),
            Tracking::Hash => self.guest.precopy.may_be_dirty,
        }
    }

    fn begin_pass(&mut self) -> Result<(), MigrationError> {
        self.guest.precopy.pass += 1;
        if self.guest.precopy.tracking == Tracking::Hash {
            self.all_may_be_dirty();
        }
        self.guest.precopy.pages = self.shared.ledger.unsent_count();
        self.guest.precopy.data_before = self.shared.figures.data.load(Ordering::Relaxed);
        self.guest.precopy.zero_before = self.shared.figures.zero.load(Ordering::Relaxed);
        self.guest.precopy.began = Some(Instant::now());
        (self.guest.precopy.waiting, self.guest.precopy.rests_until) = (None, None);
        let (pass, pages) = (self.guest.precopy.pass, self.guest.precopy.pages);
        if pass <= RECORDED_PASSES {
            self.enter(Phase::Precopy { pass });
        } else {
            self.record.observer.phase(Phase::Precopy { pass });
        }
        if let Some(control) = &mut self.link.control {
            control.send(&Frame::Pass(Pass { pass, pages }))?;
        }
        self.shared.set_mode(Mode::Copy);
        self.link.channels.ring();
        if pages == 0 {
            return self.pass_is_acknowledged();
        }
        Ok(())
    }

    /// No page is without a receipt: the pass is over, unless this is a late letter about an
    /// earlier one.
    pub(super) fn pass_is_acknowledged(&mut self) -> Result<(), MigrationError> {
        let Some(began) = self.guest.precopy.began else {
            return Ok(());
        };
        if self.shared.ledger.unacknowledged() > 0 {
            return Ok(());
        }
        self.shared.set_mode(Mode::Hold);
        self.guest.precopy.began = None;
        if self.guest.precopy.logs {
            self.harvest(true, |_| ())?;
        }
        let took = began.elapsed();
        let data = self.shared.figures.data.load(Ordering::Relaxed);
        let data = data - self.guest.precopy.data_before;
        let (mut pages, mut bytes) = (self.guest.precopy.pages, data * PAGE_SIZE);
        if self.guest.precopy.tracking == Tracking::Hash {
            if self.guest.precopy.passes > 0 {
                let zero = self.shared.figures.zero.load(Ordering::Relaxed);
                // The time of such a pass is that of looking at all memory: it says nothing of the
                // link.
                (pages, bytes) = (data + zero - self.guest.precopy.zero_before, 0);
            }
            self.guest.precopy.may_be_dirty = pages;
        }
        let left = self.left();
        let outlook = self.guest.precopy.convergence.pass_ended(&PassEnd {
            pages,
            bytes,
            took,
            left,
            round_trip: self.shared.round_trip(),
        });
        self.guest.precopy.passes += 1;
        if self.guest.precopy.pass <= RECORDED_PASSES {
            self.record
                .report
                .passes
                .push(PassFigures { pages, took, left });
        }
        self.forecast()?;
        self.guest.precopy.last = Some(LastPass {
            took,
            ended: Instant::now(),
            outlook,
            time_left: self.time_left(left),
        });
        self.after_pass()
    }

    /// Moves what the guest has dirtied to the unsent pages. Calls `newly` with the pages that were
    /// not unsent.
    pub(super) fn harvest(
        &self,
        rearm: bool,
        newly: impl FnMut(std::ops::Range<usize>),
    ) -> Result<(), MigrationError> {
        self.guest
            .vm
            .machine
            .harvest_dirty(&self.guest.dirty, rearm)?;
        self.shared.ledger.add_dirty(&self.guest.dirty, newly);
        Ok(())
    }

    fn time_left(&self, left: u64) -> Option<Duration> {
        let passes = match self.switch() {
            Switch::Auto => None,
            Switch::AfterPasses(passes) => Some(passes.saturating_sub(self.guest.precopy.pass)),
            Switch::Manual => return None,
        };
        self.guest.precopy.convergence.time_left(left, passes)
    }

    /// Computes the expected blackout. It harvests as the switch-over will: right after a harvest.
    fn forecast(&mut self) -> Result<(), MigrationError> {
        let mut runs = 0;
        if self.guest.precopy.logs {
            let began = Instant::now();
            self.harvest(true, |_| runs += 1)?;
            let least = self.guest.precopy.least_harvest.unwrap_or(Duration::MAX);
            self.guest.precopy.least_harvest = Some(least.min(began.elapsed()));
        }
        let blackout = forecast::blackout(&Basis {
            cost: self.guest.vm.machine.blackout_cost(),
            vcpus: self.guest.vm.vcpus.count(),
            round_trip: self.shared.round_trip(),
            harvest: self.guest.precopy.least_harvest.unwrap_or_default(),
            runs,
            link_rate: self.guest.precopy.convergence.link_rate,
        });
        self.guest.precopy.forecast = Some(blackout);
        self.record.report.blackout_forecast = Some(blackout);
        Ok(())
    }

    /// Chooses what follows the last pass.
    fn after_pass(&mut self) -> Result<(), MigrationError> {
        let Some(last) = self.guest.precopy.last else {
            return Ok(());
        };
        let few = self.left() <= Switch::FEW_PAGES;
        match self.switch() {
            Switch::AfterPasses(passes) if few || self.guest.precopy.pass >= passes => {
                self.end(last)
            }
            Switch::AfterPasses(_) => self.begin_pass(),
            Switch::Manual => self.hold(last),
            Switch::Auto if last.outlook == Outlook::Open => self.begin_pass(),
            Switch::Auto => {
                let too_long = self.too_long_a_blackout();
                self.tell(last.outlook, too_long);
                match too_long {
                    Some(_) => self.hold(last),
                    None => self.end(last),
                }
            }
        }
    }

    /// The expected blackout and its limit, if it is above that.
    fn too_long_a_blackout(&self) -> Option<(Duration, Duration)> {
        let both = self
            .guest
            .precopy
            .forecast
            .zip(self.settings().max_blackout);
        both.filter(|(blackout, limit)| blackout > limit)
    }

    /// No pass follows: the switch-over begins when the destination is ready.
    fn end(&mut self, last: LastPass) -> Result<(), MigrationError> {
        self.guest.precopy.rests_until = None;
        self.guest.precopy.waiting = Some((last.took, last.ended));
        self.decide()
    }

    /// The switch-over is held back: passes go on. A short one is followed by a rest.
    fn hold(&mut self, last: LastPass) -> Result<(), MigrationError> {
        self.guest.precopy.waiting = None;
        if last.took >= REST {
            return self.begin_pass();
        }
        self.guest.precopy.rests_until = Some(last.ended + (REST - last.took));
        Ok(())
    }

    /// Says why pre-copy ends with many pages left, and why it goes on although it does not help.
    fn tell(&mut self, outlook: Outlook, held_back: Option<(Duration, Duration)>) {
        let says = Some(held_back.is_some());
        if self.guest.precopy.said == says {
            return;
        }
        let note = note::after_pass(&note::Facts {
            vain: outlook == Outlook::Vain,
            held_back,
            dirty_rate: self.guest.precopy.convergence.dirty_rate,
            link_rate: self.guest.precopy.convergence.link_rate,
            max_bandwidth: self.settings().max_bandwidth,
            left: self.left(),
        });
        if let Some(note) = note {
            self.guest.precopy.said = says;
            self.take_note(note);
        }
    }

    fn take_note(&mut self, note: String) {
        tracing::info!(%note, "pre-copy");
        self.record.observer.note(&note);
        self.record.report.notes.push(note.clone());
        self.guest.precopy.note = Some(note);
    }

    /// Reports a pass with `left` pages to go.
    pub(super) fn report_pass(&self, left: u64) {
        let (pass, total) = (self.guest.precopy.pass, self.guest.precopy.pages);
        self.record
            .observer
            .progress(Phase::Precopy { pass }, total.saturating_sub(left), total);
    }

    /// Ends pre-copy, or begins another pass, if both sides are ready for it.
    pub(super) fn decide(&mut self) -> Result<(), MigrationError> {
        if !self.guest.precopy.destination_ready || self.state.stage != Stage::Precopy {
            return Ok(());
        }
        if self.switch() == Switch::NOW {
            // Threads send nothing more. The last receipts may still come.
            self.shared.set_mode(Mode::Hold);
            if self.shared.ledger.in_flight() > 0 {
                return Ok(());
            }
        } else {
            let Some((took, since)) = self.guest.precopy.waiting else {
                return Ok(());
            };
            if since.elapsed() > took {
                return self.begin_pass();
            }
        }
        if self.guest.precopy.forecast.is_none() {
            self.forecast()?;
        }
        (self.guest.precopy.began, self.guest.precopy.waiting) = (None, None);
        self.guest.precopy.data_pages = self.shared.figures.data.load(Ordering::Relaxed);
        self.events.push_back(Event::PrecopyDone);
        Ok(())
    }

    /// Does what is due at a time: the end of a rest, and a switch-over at once.
    pub(super) fn keep_precopy_time(&mut self) -> Result<(), MigrationError> {
        if self.state.stage != Stage::Precopy || !self.events.is_empty() {
            return Ok(());
        }
        if self.switch() == Switch::NOW {
            return self.decide();
        }
        let Some(until) = self.guest.precopy.rests_until else {
            return Ok(());
        };
        if Instant::now() < until {
            return Ok(());
        }
        if self.guest.precopy.tracking == Tracking::Hash {
            return self.begin_pass();
        }
        self.harvest(true, |_| ())?;
        if self.shared.ledger.unsent_count() > 0 {
            return self.begin_pass();
        }
        // No pass is needed. The forecast may have changed all the same.
        self.forecast()?;
        if let Some(last) = &mut self.guest.precopy.last {
            (last.took, last.ended) = (Duration::ZERO, Instant::now());
        }
        self.after_pass()
    }

    /// The operator has changed the settings.
    pub(super) fn settings_changed(&mut self) -> Result<(), MigrationError> {
        self.limit_rates();
        self.link.channels.ring();
        if self.state.stage != Stage::Precopy || !self.events.is_empty() {
            return Ok(());
        }
        self.guest.precopy.said = None;
        if self.switch() == Switch::NOW {
            return self.decide();
        }
        if self.guest.precopy.pass == 0 {
            // All pages were to follow the switch-over, which has not begun.
            return self.start_passes();
        }
        if self.guest.precopy.began.is_none() {
            return self.after_pass();
        }
        // A switch-over at once may have stopped the pass.
        self.shared.set_mode(Mode::Copy);
        self.link.channels.ring();
        Ok(())
    }
}
