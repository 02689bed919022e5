//! The source: the process that a VM leaves.
//!
//! **Guarantee.** Until the source sends `Go`, any failure leaves the VM running here. From then on
//! it resumes the VM in two cases only: the destination says that it discarded its copy, which
//! never ran; or an operator takes the risk. The source keeps every page until the destination has
//! confirmed all pages. A lost connection never ends a migration that is handed over.
//!
//! **Mechanism.** [`migrate`] runs the supervisor: it feeds the [session](crate::session) events,
//! and carries out its actions. Each bulk and each urgent channel has a thread, which shares the
//! ledger of pages with the others.
//!
//! | file | contents |
//! |---|---|
//! | `setup` | the offer, and the way to the first `SetupAck` |
//! | `precopy` | passes over the dirty pages while the guest runs |
//! | `convergence`, `forecast` | whether further passes help, and the expected blackout |
//! | `note` | what pre-copy says to people |
//! | `switchover` | stops the guest, and sends all that the destination needs to run it |
//! | `recovery` | opens channels, and closes lost ones |
//! | `completion` | the end of the session, and the report |
//! | `bulk`, `urgent` | the threads of channels |
//! | `limiter` | limits of rates, for all threads |
//! | `gate` | stops the push while urgent pages are answered |
//! | `governor` | how much of the push may be under way |
//! | `hashes` | which bytes the destination has, without a dirty log |
//! | `prefetch` | which pages vCPUs will probably touch next |
//! | `check` | a handshake without a migration |
//!
//! | failure | guest | why that is safe |
//! |---|---|---|
//! | before `Go` | runs on here | The destination never runs the guest without `Go`. |
//! | after `Go`: a channel | runs there | The source opens another. |
//! | the destination says `Discarded` | resumed here | That copy never ran, and never will. |

mod bulk;
mod check;
mod commands;
mod completion;
mod config;
mod convergence;
mod forecast;
mod gate;
mod governor;
mod hashes;
mod limiter;
mod note;
mod pages;
mod precopy;
mod prefetch;
mod recovery;
mod setup;
mod shared;
mod switchover;
mod urgent;

#[cfg(all(test, shuttle))]
mod model;

pub use check::{Checked, check};
pub use commands::SourceSession;
pub use config::{Connect, Route, SourceConfig, SourceFailure, SourceVm, Tracking};
pub use governor::Governor;
pub(crate) use setup::offer;
pub use urgent::URGENT_SPIN;

use self::hashes::SentHashes;
use self::recovery::Channels;
use self::shared::{Letter, Mode, Shared};
use crate::clock::monotonic;
use crate::control::{ControlLink, LostChannels, PendingLoss};
use crate::cpus::Pinned;
use crate::error::MigrationError;
use crate::ledger::Ledger;
use crate::limits::Limits;
use crate::orphan::{Orphan, record};
use crate::phase::{Observer, Phase};
use crate::report::{PhaseStart, SourceReport};
use crate::session::source::{Action, End, Event, Link, Source, Stage, step};
use crate::session::{ToDestination, ToSource};
use crate::settings::Settings;
use crate::sync::Ordering;
use crate::vm::{RunningVm, fits};
use crate::wire::{ErrorCode, Frame, Setup};
use pageferry_machine::Frozen;
use pageferry_transport::handshake::{Identity, Protection};
use pageferry_userfault::PageBitmap;
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::thread::Scope;
use std::time::{Duration, Instant};
use tracing::{debug, info, warn};

/// The interval at which a source that waits for a busy destination looks at its letters.
const BUSY_POLL: Duration = Duration::from_millis(20);
/// The pause before a source retries with a busy destination.
const BUSY_PAUSE: Duration = Duration::from_millis(200);
/// The interval at which the status is published while nothing happens.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(50);
/// The longest sleep of the supervisor, so that the status stays fresh.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);
/// The spin time of the supervisor in the blackout. Each wake-up would be part of it.
const SWITCH_OVER_SPIN: Duration = Duration::from_micros(300);

/// Moves a running VM to the process at the end of `route`. `guest` describes the guest, in the
/// caller's own format (at most [`crate::MAX_DESCRIPTION_BYTES`]).
///
/// `session` is the operator's hold on the migration. This sets short scheduler slices for the
/// calling thread, since the guest waits for it in the blackout. It runs on [`SourceConfig::cpus`]
/// meanwhile, and so do the threads that it starts. Returns when the destination has confirmed
/// every page. The VM is then paused here, and the caller drops it.
///
/// A VM that is paused when the switch-over begins ([`PauseReport::was_running`]) arrives paused.
/// The destination takes it over, and its owner there resumes it. Before the switch-over the owner
/// here pauses and resumes it by [`SourceSession::before_switch_over`].
///
/// [`PauseReport::was_running`]: pageferry_machine::PauseReport::was_running
///
/// # Errors
/// [`SourceFailure`] says where the VM is.
pub fn migrate(
    vm: &RunningVm<'_>,
    route: &Route,
    guest: &[u8],
    config: &SourceConfig,
    session: &SourceSession,
    observer: &dyn Observer,
) -> Result<SourceReport, SourceFailure> {
    crate::latency::prefer_short_slices();
    session.prepare(config.settings);
    session.open_to_owner();
    let outcome = attempts(vm, route, guest, config, session, observer);
    session.forget();
    outcome.inspect_err(|_| observer.phase(Phase::Failed))
}

/// Goes on with a move that another process had handed over before it died. `vm` has the same
/// memory, and stands still. Returns when the destination has confirmed every page.
///
/// # Errors
/// [`SourceFailure`] says where the VM is: at the destination, as far as this side knows.
pub fn go_on(
    vm: &RunningVm<'_>,
    route: &Route,
    orphan: &Orphan,
    config: &SourceConfig,
    session: &SourceSession,
    observer: &dyn Observer,
) -> Result<SourceReport, SourceFailure> {
    crate::latency::prefer_short_slices();
    session.prepare(config.settings);
    session.close_to_owner();
    let failed = |error| SourceFailure {
        vm: SourceVm::GivenUp,
        error,
    };
    let config = SourceConfig {
        bulk_channels: orphan.setup.bulk_channels,
        urgent_channels: orphan.setup.urgent_channels,
        // Nobody knows the hashes of what was sent, and the guest writes no more.
        tracking: Tracking::Log,
        ..config.clone()
    };
    let outcome = fits(&orphan.setup, vm).map_err(failed).and_then(|_| {
        let pinned = Pinned::to(config.cpus.as_ref());
        let _pinned = pinned.map_err(|e| failed(e.into()))?;
        attempt(
            vm,
            route,
            &orphan.setup,
            Some(orphan),
            &config,
            session,
            observer,
        )
    });
    session.forget();
    outcome.inspect_err(|_| observer.phase(Phase::Failed))
}

/// Attempts until the destination is not busy with another source.
fn attempts(
    vm: &RunningVm<'_>,
    route: &Route,
    guest: &[u8],
    config: &SourceConfig,
    session: &SourceSession,
    observer: &dyn Observer,
) -> Result<SourceReport, SourceFailure> {
    let began = Instant::now();
    let failed = |error| SourceFailure {
        vm: SourceVm::Runs,
        error,
    };
    let pinned = Pinned::to(config.cpus.as_ref());
    observer.phase(Phase::Setup);
    let _pinned = pinned.map_err(|e| failed(e.into()))?;
    let checked = config.settings.check();
    checked.map_err(|error| failed(error.into()))?;
    // A page that is missing here has no bytes to send.
    let whole = vm.machine.ram().check_whole();
    whole.map_err(|error| failed(error.into()))?;
    let channels = [config.bulk_channels, config.urgent_channels];
    let offer = offer(vm, guest, channels).map_err(failed)?;
    loop {
        let outcome = attempt(vm, route, &offer, None, config, session, observer);
        let busy = matches!(
            &outcome,
            Err(SourceFailure { vm: SourceVm::Runs, error }) if error.is_busy()
        );
        if !busy || began.elapsed() >= config.busy_limit {
            return outcome;
        }
        wait_for_next_attempt(session).map_err(failed)?;
    }
}

/// Waits before the next attempt at a busy destination.
fn wait_for_next_attempt(session: &SourceSession) -> Result<(), MigrationError> {
    let until = Instant::now() + BUSY_PAUSE;
    while Instant::now() < until {
        while let Some(letter) = session.letters.take() {
            if let Letter::Command(commands::Command::Cancel) = letter {
                return Err(MigrationError::Cancelled);
            }
        }
        std::thread::sleep(BUSY_POLL);
    }
    Ok(())
}

/// One session with the destination: a new one, or that of another process.
fn attempt(
    vm: &RunningVm<'_>,
    route: &Route,
    offer: &Setup,
    orphan: Option<&Orphan>,
    config: &SourceConfig,
    session: &SourceSession,
    observer: &dyn Observer,
) -> Result<SourceReport, SourceFailure> {
    let place = match orphan {
        Some(_) => SourceVm::GivenUp,
        None => SourceVm::Runs,
    };
    let early = |error| SourceFailure { vm: place, error };
    let ram = vm.machine.ram();
    let pages = ram.pages() as usize;
    let channels = usize::from(config.bulk_channels) + usize::from(config.urgent_channels);
    let ledger = Ledger::try_new(pages, channels).map_err(|e| early(e.into()))?;
    let dirty = PageBitmap::try_new(pages).map_err(|e| early(e.into()))?;
    let identity = match orphan {
        Some(orphan) => orphan.identity.clone(),
        None => Identity::random()
            .map_err(|e| early(MigrationError::os("cannot make a session's secret", e)))?,
    };
    let session_record = record(&identity, offer).map_err(early)?;
    let protection =
        Protection::load(config.tls.as_ref(), config.plain).map_err(|error| early(error.into()))?;
    let vcpus = vm.vcpus.count();
    let tracking = match vm.machine.has_dirty_log() || orphan.is_some() {
        true => config.tracking,
        false => Tracking::Hash,
    };
    let hashes = match tracking {
        Tracking::Log => None,
        Tracking::Hash => Some(SentHashes::try_new(pages).map_err(early)?),
    };
    let shared = Shared::new(
        &**vm.machine,
        ledger,
        &session.letters,
        config,
        vcpus,
        hashes,
    );
    std::thread::scope(|scope| {
        let dialler = recovery::Dialler {
            scope,
            shared: &shared,
            identity: &identity,
            protection: &protection,
            config,
        };
        let mut supervisor = Supervisor {
            config,
            session,
            offer,
            session_record: &session_record,
            state: Source::new(setup::channel_ids(config)),
            shared: &shared,
            link: Connections {
                control: None,
                channels: Channels::new(dialler, route.clone()),
                named: (None, 0),
                last_loss: None,
                lost: LostChannels::default(),
                pending_loss: PendingLoss::default(),
                lost_since: None,
            },
            guest: Guest {
                vm: *vm,
                precopy: precopy::Precopy::new(tracking),
                dirty,
                frozen: None,
                devices_paused: false,
                resumes: false,
            },
            record: Record {
                observer,
                published: Instant::now(),
                report: completion::new_report(),
            },
            error: None,
            end: None,
            kept_time: Instant::now(),
            quiet: (0, Instant::now()),
            events: VecDeque::new(),
        };
        supervisor.limit_rates();
        match orphan {
            None => supervisor.link.channels.dial_control(1),
            Some(orphan) => supervisor.go_on(orphan).map_err(early)?,
        }
        supervisor.run()
    })
}

/// The supervisor's own state.
struct Supervisor<'s, 'e, 'a> {
    config: &'a SourceConfig,
    session: &'a SourceSession,
    offer: &'a Setup,
    /// The bytes by which another process could go on.
    session_record: &'e [u8],
    state: Source,
    shared: &'e Shared<'a>,
    link: Connections<'s, 'e, 'a>,
    guest: Guest<'a>,
    record: Record<'a>,
    /// The reason for the end of the session.
    error: Option<MigrationError>,
    end: Option<End>,
    /// The last time at which the supervisor did what is due at a time.
    kept_time: Instant,
    /// The urgent pages when they were last seen to grow, and that time.
    quiet: (u64, Instant),
    events: VecDeque<Event>,
}

/// The way to the destination.
struct Connections<'s, 'e, 'a> {
    control: Option<ControlLink>,
    channels: Channels<'s, 'e, 'a>,
    /// The missing pages that a resuming destination has named, and their number. There is room
    /// from the first time on.
    named: (Option<PageBitmap>, u64),
    /// The reason why the last channel was lost.
    last_loss: Option<String>,
    lost: LostChannels,
    pending_loss: PendingLoss,
    /// Since when there is no control channel.
    lost_since: Option<Instant>,
}

/// The VM that moves.
struct Guest<'a> {
    vm: RunningVm<'a>,
    precopy: precopy::Precopy,
    /// The dirty log is harvested into this. It is empty otherwise.
    dirty: PageBitmap,
    /// From switch-over on, as long as the VM may count elsewhere.
    frozen: Option<Frozen<'a>>,
    /// Whether the switch-over has paused the devices, or has begun to.
    devices_paused: bool,
    /// Whether the switch-over has paused vCPUs that ran, or has begun to.
    resumes: bool,
}

/// The record for people.
struct Record<'a> {
    observer: &'a dyn Observer,
    /// When the status was published last.
    published: Instant,
    report: SourceReport,
}

impl<'a> Supervisor<'_, '_, 'a> {
    /// Runs the session to its end.
    fn run(&mut self) -> Result<SourceReport, SourceFailure> {
        let mut spin_until = None;
        while self.end.is_none() {
            if let Some(event) = self.events.pop_front() {
                self.feed(event);
                continue;
            }
            if self.take_letter() || self.receive() {
                spin_until = (self.state.stage == Stage::SwitchOver)
                    .then(|| Instant::now() + SWITCH_OVER_SPIN);
                // A peer that never stops talking does not stop the clock.
                if self.kept_time.elapsed() < LONGEST_SLEEP {
                    continue;
                }
            }
            self.kept_time = Instant::now();
            self.keep_time();
            if self.events.is_empty() && self.end.is_none() {
                if spin_until.is_some_and(|until| Instant::now() < until) {
                    std::hint::spin_loop();
                    continue;
                }
                self.sleep();
            }
        }
        self.finish()
    }

    /// Goes on with a VM that another process has handed over.
    fn go_on(&mut self, orphan: &Orphan) -> Result<(), MigrationError> {
        let ids = setup::channel_ids(self.config);
        self.state = Source::taken_over(ids, orphan.generation());
        let ram = self.guest.vm.machine.ram();
        self.guest.frozen = Some(ram.freeze()?);
        self.guest.resumes = !orphan.paused;
        self.record.report.paused = orphan.paused;
        self.record.report.missing_at_start = orphan.missing_at_start;
        self.session.board.set_paused(orphan.paused);
        // The destination names those that are missing. The others count as acknowledged then.
        self.shared.ledger.set_unsent(0..ram.pages() as usize);
        self.shared.set_confirms(false);
        self.shared.set_mode(Mode::Answer);
        self.shared.patience.set(self.config.limits.dead_after);
        self.link.lost_since = Some(Instant::now());
        self.enter(Phase::Postcopy);
        self.link.channels.dial_control(self.state.generation);
        Ok(())
    }

    /// The settings of the operator now.
    fn settings(&self) -> Settings {
        self.session.settings().unwrap_or(self.config.settings)
    }

    /// Gives the operator's limits of rates to the threads that send.
    fn limit_rates(&self) {
        let settings = self.settings();
        self.shared
            .limiter
            .set(settings.max_bandwidth, settings.max_postcopy_bandwidth);
    }

    fn enter(&mut self, phase: Phase) {
        PhaseStart::note(&mut self.record.report.phases, phase);
        info!(%phase, "phase");
        self.record.observer.phase(phase);
    }

    /// Keeps the reason for an end: the first before the hand-over, and the last after it.
    fn note(&mut self, error: MigrationError) {
        self.link.last_loss = Some(error.to_string());
        if self.state.has_handed_over() {
            self.error = Some(error);
        } else {
            self.error.get_or_insert(error);
        }
    }

    /// This side ends a migration that is handed over, without the destination.
    fn note_giving_up(&mut self, why: &'static str) {
        if self.state.has_handed_over() {
            let last_loss = self.link.last_loss.clone();
            self.error = Some(MigrationError::GaveUp { why, last_loss });
        }
    }

    /// Ends the migration, or gives it up, with `error`.
    fn fail(&mut self, error: MigrationError) {
        self.note(error);
        self.events.push_back(Event::Failed);
    }

    /// The control channel is lost, for this reason.
    fn lose_control(&mut self, error: MigrationError) {
        if let MigrationError::PeerGaveUp { .. } = &error {
            // It may have refused a confirmation, and would refuse it again.
            self.shared.set_confirms(false);
        }
        if let Some(control) = &mut self.link.control {
            if !error.is_lost() {
                // The peer may still read why.
                let _ = control.send(&error.to_frame());
            }
            let generation = control.generation;
            warn!(generation, %error, "the control channel is lost");
            self.link.lost.control_lost();
            self.note_loss(error);
            self.events.push_back(Event::Lost(generation));
        }
    }

    fn feed(&mut self, event: Event) {
        let (next, actions) = step(&self.state, event);
        let handed_over = next.has_handed_over() && !self.state.has_handed_over();
        if handed_over {
            // Before `Go`: another process must know of it.
            let missing = self.record.report.missing_at_start;
            let noted = self.record.observer;
            if let Err(why) = noted.handing_over(self.session_record, missing) {
                return self.fail(MigrationError::os("cannot note the hand-over", why));
            }
            // A loss that the session survives is no reason for its end.
            self.error = None;
        }
        let before = std::mem::replace(&mut self.state, next);
        for action in actions {
            if let Err(error) = self.perform(action) {
                self.fail(error);
            }
        }
        // Observers and logs come last: the blackout does not wait for them.
        if handed_over {
            self.enter(Phase::Postcopy);
        }
        let (stage, generation) = (self.state.stage, self.state.generation);
        if stage != before.stage {
            info!(?stage, generation, "session");
        }
        self.publish();
    }

    fn perform(&mut self, action: Action) -> Result<(), MigrationError> {
        match action {
            Action::Dial(generation) => {
                self.link.lost_since.get_or_insert_with(Instant::now);
                self.record.report.reconnects += 1;
                debug!(generation, "dialling");
                self.link.channels.dial_control(generation);
            }
            Action::Send(message) => self.say(message)?,
            Action::DialChannel(id) => self.link.channels.dial(self.state.generation, id),
            Action::CloseChannel(id) => {
                if self.link.channels.close(id) {
                    self.link.lost.closed(id);
                }
            }
            Action::CloseGeneration => self.close_generation(),
            Action::Reclaim { channel, placed } => self.reclaim(channel, placed),
            Action::AdoptMissing => self.adopt_missing(),
            Action::StartPrecopy => self.start_precopy()?,
            Action::SwitchOver => {
                if let Err(error) = self.switch_over() {
                    self.fail(error);
                }
            }
            Action::StartPush => self.start_push(),
            Action::ResumeGuest => self.resume_guest(),
            Action::End(end) => self.end = Some(end),
        }
        Ok(())
    }

    fn say(&mut self, message: ToDestination) -> Result<(), MigrationError> {
        let frame = match message {
            ToDestination::Go => Frame::Go,
            ToDestination::Resume(stage) => Frame::Resume(stage),
            // A destination that may be ready has to answer. Any other one only needs the reason.
            ToDestination::Cancel if self.state.stage == Stage::Cancelling => Frame::Cancel,
            ToDestination::Cancel => match &self.error {
                Some(error) => error.to_frame(),
                None => Frame::Cancel,
            },
            ToDestination::Drained => {
                self.guest
                    .precopy
                    .push_ended
                    .get_or_insert_with(Instant::now);
                self.enter(Phase::Completion);
                Frame::Drained {
                    missing: self.record.report.missing_at_start,
                }
            }
            ToDestination::Complete => Frame::Complete,
            ToDestination::DiscardHeard => Frame::DiscardHeard,
            ToDestination::CloseChannel(id) => Frame::CloseChannel(id),
            ToDestination::Again => Frame::Again,
        };
        if let Some(control) = &mut self.link.control
            && let Err(error) = control.answer(&frame)
        {
            self.lose_control(error);
        }
        Ok(())
    }

    /// Takes one letter. Returns whether there was one.
    fn take_letter(&mut self) -> bool {
        let Some(letter) = self.session.letters.take() else {
            return false;
        };
        match letter {
            Letter::Command(command) => self.command(command),
            Letter::Opened(generation, connection) => self.opened(generation, connection),
            Letter::ChannelOpened(generation, id, connection) => {
                self.channel_opened(generation, id, connection);
            }
            Letter::Lost(generation, error) => self.dial_failed(generation, error),
            Letter::ChannelLost(generation, id, error) => {
                self.channel_lost(generation, id, error);
            }
            Letter::Happened(Event::AllAcknowledged) if self.state.stage == Stage::Precopy => {
                if let Err(error) = self.pass_is_acknowledged() {
                    self.fail(error);
                }
            }
            // A thread may have posted it in pre-copy, and was not scheduled until now.
            Letter::Happened(Event::AllAcknowledged) if self.shared.ledger.unacknowledged() > 0 => {
            }
            Letter::Happened(event) => self.events.push_back(event),
        }
        true
    }

    fn command(&mut self, command: commands::Command) {
        if let Some(event) = command.event() {
            if event == Event::Cancel && !self.state.has_handed_over() {
                self.note(MigrationError::Cancelled);
            }
            match event {
                Event::GiveUp => self.note_giving_up("the operator gave the migration up"),
                Event::ResumeHere => self.note_giving_up("the operator resumed the VM here"),
                _ => {}
            }
            self.events.push_back(event);
        }
        if let commands::Command::Settings = command
            && let Err(error) = self.settings_changed()
        {
            self.fail(error);
        }
        if let commands::Command::Recover(route) = command
            && self.state.has_handed_over()
        {
            self.link.channels.reroute(route);
            // A working connection is left too: the operator wants the new way.
            self.events.push_back(Event::Lost(self.state.generation));
        }
    }

    /// Handles the frames that have arrived. Returns whether there were any.
    fn receive(&mut self) -> bool {
        let Some(control) = &mut self.link.control else {
            return false;
        };
        let generation = control.generation;
        match control.receive() {
            Ok(None) => false,
            Ok(Some(frame)) => {
                if let Err(error) = self.handle(generation, frame) {
                    self.lose_control(error);
                }
                true
            }
            Err(error) => {
                self.lose_control(error);
                true
            }
        }
    }

    fn handle(&mut self, generation: u32, frame: Frame) -> Result<(), MigrationError> {
        let before_go = !self.state.has_handed_over();
        let message = match frame {
            Frame::SetupAck { keeps } if self.state.stage == Stage::Setup => {
                self.choose_tracking(keeps);
                self.shared.patience.set(self.config.limits.silence);
                ToSource::SetupAck
            }
            Frame::SetupProgress(progress) if before_go => {
                return self.note_setup_progress(progress);
            }
            Frame::Ready if self.state.stage == Stage::SwitchOver => {
                self.shared.patience.set(self.config.limits.dead_after);
                ToSource::Ready
            }
            // It crossed the cancellation.
            Frame::Ready if self.state.stage == Stage::Cancelling => return Ok(()),
            Frame::Running { .. } if !before_go => {
                if self.record.report.confirmed.is_zero() {
                    self.record.report.confirmed = monotonic();
                }
                ToSource::Running
            }
            Frame::Missing(runs) if self.state.link == Link::Resuming => {
                return self.take_named(&runs);
            }
            Frame::Resumed { stage, missing } if self.state.link == Link::Resuming => {
                self.check_named(missing)?;
                self.control_works();
                ToSource::Resumed(stage)
            }
            Frame::DrainAck { missing } if self.state.stage == Stage::Drained => {
                self.check_drained(missing)?;
                ToSource::DrainAck
            }
            Frame::Discarded(reason) => {
                self.note(MigrationError::discarded(&reason));
                ToSource::Discarded
            }
            Frame::ChannelEnded { channel, placed }
                if !before_go || self.state.stage == Stage::Cancelling =>
            {
                ToSource::ChannelEnded { channel, placed }
            }
            Frame::Error(error) if error.code() == ErrorCode::VmGone && !before_go => {
                self.note(MigrationError::gave_up(&error));
                self.note_giving_up("the VM has ended at the destination");
                self.events.push_back(Event::GiveUp);
                return Ok(());
            }
            Frame::Error(error) => return Err(MigrationError::gave_up(&error)),
            Frame::Cancel => return Err(MigrationError::PeerCancelled),
            other => return Err(MigrationError::unexpected("another frame", &other)),
        };
        self.events.push_back(Event::Received(generation, message));
        Ok(())
    }

    /// Says `Alive` in time, notices silence, and gives up in time.
    fn keep_time(&mut self) {
        let interval = Limits::INTERVAL;
        let patience = if self.state.stage == Stage::Setup {
            self.config.setup_limit
        } else {
            self.shared.patience.get()
        };
        if let Some(control) = &mut self.link.control {
            if control.is_silent(patience) {
                self.lose_control(MigrationError::Timeout("anything on the control channel"));
            } else if let Err(error) = control.keep_alive(interval) {
                self.lose_control(error);
            }
        }
        let limit = match self.state.stage {
            Stage::Cancelling => Some(self.config.limits.connect),
            _ => self.config.limits.give_up_after,
        };
        if let (Some(since), Some(limit)) = (self.link.lost_since, limit)
            && since.elapsed() > limit
        {
            self.link.lost_since = None;
            self.note_giving_up(MigrationError::NO_CONNECTION);
            self.events.push_back(Event::GiveUp);
        }
        self.conclude_loss();
        if let Err(error) = self.keep_precopy_time() {
            self.fail(error);
        }
        self.report_progress();
        if self.record.published.elapsed() > PUBLISH_INTERVAL {
            self.record.published = Instant::now();
            self.publish();
        }
    }

    fn sleep(&self) {
        if self
            .link
            .control
            .as_ref()
            .is_some_and(ControlLink::has_more)
        {
            return;
        }
        let mut fds = vec![PollFd::new(&self.session.letters, PollFlags::IN)];
        if let Some(control) = &self.link.control {
            fds.push(PollFd::from_borrowed_fd(
                control.as_fd(),
                control.interest(),
            ));
        }
        let nap = Limits::INTERVAL.min(LONGEST_SLEEP);
        pageferry_transport::sleep_on(&mut fds, nap);
    }

    fn start_push(&mut self) {
        self.record.observer.runs_there();
        let urgent = self.shared.figures.urgent.load(Ordering::Relaxed);
        self.quiet = (urgent, Instant::now());
        self.shared.set_mode(if self.config.push_after.is_zero() {
            Mode::Push
        } else {
            Mode::Answer
        });
        if self.record.report.missing_at_start == 0 || self.shared.ledger.unacknowledged() == 0 {
            self.events.push_back(Event::AllAcknowledged);
        }
        if self.guest.precopy.postcopy_began.is_none() {
            self.guest.precopy.postcopy_began = Some(Instant::now());
        }
        self.link.channels.ring();
    }

    /// Takes the guest back as it was: a VM that its owner had paused stays paused.
    fn resume_guest(&mut self) {
        self.shared.set_mode(Mode::Hold);
        if self.guest.precopy.tracking == Tracking::Log {
            // A failure to stop the dirty log costs only speed.
            let _ = self.guest.vm.machine.set_dirty_log(false);
        }
        self.guest.frozen = None;
        if std::mem::take(&mut self.guest.devices_paused) {
            crate::devices::resume(self.guest.vm.devices);
        }
        if std::mem::take(&mut self.guest.resumes) {
            self.guest.vm.vcpus.resume();
        }
        // Behind the resume: an owner's pause comes after it.
        self.session.open_to_owner();
    }
}

/// The scope of the source's threads.
type Threads<'s, 'e> = &'s Scope<'s, 'e>;
