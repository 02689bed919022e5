//! The destination: the process that a VM moves to.
//!
//! **Guarantee.** No vCPU sees a page before its right bytes are there. The VM runs here only after
//! the source's `Go`. From then on a lost channel costs only waiting: vCPUs that need a missing
//! page wait until the source has opened new channels. The VM never continues with wrong pages. A
//! copy that is discarded after it was ready is discarded for good, and the source hears of it.
//!
//! **Mechanism.** [`Destination::listen`] accepts connections on a thread of its own.
//! [`Destination::accept`] takes a source's offer. The caller builds such a machine.
//! [`Incoming::receive`] runs the supervisor: it feeds the [session](crate::session) events, and
//! carries out its actions. It returns when every page is here and the source knows it.
//!
//! | file | contents |
//! |---|---|
//! | `desk` | decides about new channels |
//! | `setup` | the offer, and whether the machine fits it |
//! | `precopy` | allocates memory while pages arrive |
//! | `switchover` | loads all that the guest needs to run |
//! | `postcopy` | the threads that serve faults |
//! | `recovery` | takes new channels, and ends old ones |
//! | `completion` | the end of the session, and the report |
//! | `bulk`, `urgent` | the channels |
//! | `core` | what the threads of a receiving VM share |
//! | `pages`, `sleepers` | its pages, and the threads that wait for them |
//! | `resolver`, `faults`, `pieces` | the faults of vCPUs |
//! | `stalls`, `stages` | how long vCPUs waited, and for what |

mod allocation;
mod bulk;
mod collapse;
mod completion;
mod config;
mod core;
mod desk;
mod faults;
mod pages;
mod pieces;
mod place;
mod postcopy;
mod precopy;
mod recovery;
mod resolver;
mod setup;
mod shared;
mod sleepers;
mod stages;
mod stalls;
mod switchover;
mod urgent;

pub use config::{DestinationConfig, DestinationFailure, DestinationVm, Offer};
pub use resolver::{FAULT_SPIN, Resolver};
pub use setup::Incoming;
pub use stalls::new_histogram;

use self::allocation::Allocation;
use self::core::Core;
use self::desk::Desk;
use self::place::Inbound;
use self::shared::Letter;
use crate::control::{ControlLink, LostChannels, PendingLoss};
use crate::cpus::Pinned;
use crate::error::MigrationError;
use crate::ledger::runs;
use crate::limits::{Limits, Patience};
use crate::phase::{Observer, Phase};
use crate::report::{DestinationReport, PhaseStart, Protected, StallRow};
use crate::session::destination::{Action, Destination as Session, End, Event, Stage, step};
use crate::session::{DestinationStage, SourceStage, ToDestination, ToSource};
use crate::status::{Board, SessionStatus};
use crate::sync::AtomicBool;
use crate::vm::RunningVm;
use crate::wire::{Frame, MissingRuns, Text};
use pageferry_machine::MachineError;
use pageferry_transport::Quota;
use pageferry_transport::address::Address;
use pageferry_transport::channel::Listener;
use pageferry_transport::handshake::{Acceptor, Protection, Stranger};
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// The interval at which the status is published while nothing happens.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(50);
/// The longest sleep of the supervisor, so that `stop` is heard.
const LONGEST_SLEEP: Duration = Duration::from_millis(20);
/// The spin time of the supervisor after a frame of the switch-over. Each wake-up would be part of
/// the blackout.
const SWITCH_OVER_SPIN: Duration = Duration::from_micros(300);

/// A destination that listens for sources. Dropping it ends its listeners.
pub struct Destination {
    /// Dropped first: then no more letters come.
    acceptor: Acceptor,
    desk: Arc<Desk>,
    config: DestinationConfig,
    board: Board,
    /// The stalls of the session that is under way, or of the last one.
    stalls: Mutex<Option<Arc<stalls::Stalls>>>,
    /// Whether the owner may pause and resume the VM. It is held while the owner does. So a failure
    /// pauses the VM for good behind an owner who has begun.
    open_to_owner: Mutex<bool>,
}

impl Destination {
    /// Listens on `listener`. `stranger` is called with connections that are no sources of this
    /// destination, on the thread that accepts connections or on that of [`Self::accept`]. It is
    /// called at most 32 times at once, and then once a second: [`Stranger::left_out`] counts the
    /// others.
    ///
    /// # Errors
    /// When the files for TLS do not serve, the host has no room for a thread, or a CPU of
    /// [`DestinationConfig::cpus`] is not usable.
    pub fn listen(
        listener: Listener,
        config: DestinationConfig,
        stranger: impl Fn(&Stranger) + Send + Sync + 'static,
    ) -> Result<Self, MigrationError> {
        let hello = config.limits.hello;
        let desk = Arc::new(Desk::new(Box::new(stranger), hello)?);
        let _pinned = Pinned::to(config.cpus.as_ref())?;
        let protection = config.protection()?;
        let acceptor =
            Acceptor::start_with_limit(listener, protection, Arc::clone(&desk) as _, hello)
                .map_err(|e| MigrationError::os("cannot accept connections", e))?;
        Ok(Self {
            acceptor,
            desk,
            config,
            board: Board::default(),
            stalls: Mutex::default(),
            open_to_owner: Mutex::default(),
        })
    }

    /// Listens on another address too, for example when the network has changed.
    pub fn listen_also(&self, listener: Listener) {
        self.acceptor.listen_also(listener);
    }

    /// The addresses that it listens on.
    #[must_use]
    pub fn local_addrs(&self) -> Vec<Address> {
        self.acceptor.local_addrs()
    }

    /// Waits for a source and its offer until `stop` returns true. Several sources may connect: the
    /// first that speaks is taken, and the others hear that the destination is busy. They do so too
    /// until the [`Incoming`] is dropped.
    ///
    /// # Errors
    /// [`MigrationError::Cancelled`] if `stop` returned true. Otherwise an error of the source or
    /// of the host.
    pub fn accept(self: &Arc<Self>, stop: &dyn Fn() -> bool) -> Result<Incoming, MigrationError> {
        // Certificates may have been renewed since the last session.
        self.acceptor.set_protection(self.config.protection()?);
        setup::accept(self, stop)
    }

    /// Ends the session that is under way: an operator knows that its source is gone. A VM that
    /// runs here with missing pages is paused. A VM that waits for `Go` is discarded. Has no effect
    /// while no source has the destination.
    pub fn give_up(&self) {
        self.desk.tell(Letter::GiveUp);
    }

    /// Another VMM has the VM, and runs it: see [`Vcpus::confirms_start`].
    ///
    /// [`Vcpus::confirms_start`]: pageferry_machine::Vcpus::confirms_start
    pub fn started(&self) {
        self.desk.tell(Letter::Started);
    }

    /// Another VMM has the VM, and cannot go on for this reason. Before the hand-over the VM stays
    /// at its source. Behind it the session ends at both ends, and the source keeps its paused VM.
    pub fn lost(&self, why: String) {
        self.desk.tell(Letter::Gone(why));
    }

    /// Calls `act`, which pauses or resumes the VM, if the source has handed it over. Returns
    /// `None`, and calls nothing, before `Go`, and after a failure that left pages missing: the VM
    /// must not run here then. `act` should be short: a failure that pauses the VM waits for it.
    pub fn after_hand_over<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        let open = self.owner();
        open.then(act)
    }

    fn owner(&self) -> std::sync::MutexGuard<'_, bool> {
        self.open_to_owner
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn set_open_to_owner(&self, open: bool) {
        *self.owner() = open;
    }

    /// The status of the session that is under way, or of the last one.
    #[must_use]
    pub fn status(&self) -> SessionStatus {
        SessionStatus {
            strangers: self.desk.strangers(),
            ..self.board.read()
        }
    }

    /// The stalls so far of the session that is under way, or of the last one: a row for each vCPU,
    /// and a last one for userfaultfd events. Empty before the first. No vCPU waits for this.
    #[must_use]
    pub fn stalls(&self) -> Vec<StallRow> {
        let stalls = self.stalls.lock();
        let stalls = stalls.unwrap_or_else(PoisonError::into_inner).clone();
        stalls.map(|stalls| stalls.rows()).unwrap_or_default()
    }
}

impl std::fmt::Debug for Destination {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Destination")
            .field("listens_on", &self.local_addrs())
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

impl DestinationConfig {
    fn protection(&self) -> Result<Protection, MigrationError> {
        Ok(Protection::load(self.tls.as_ref(), self.plain)?)
    }
}

/// The missing pages that are being named. No reader runs until the source has heard all of them,
/// so the bitmap stands still.
struct Naming {
    stage: DestinationStage,
    /// Whether pages of a VM in this stage may be missing.
    pending: bool,
    /// Where the next frame begins to look.
    next: usize,
    /// The pages named so far.
    pages: u64,
}

impl Naming {
    fn new(stage: DestinationStage) -> Self {
        Self {
            stage,
            pending: matches!(stage, DestinationStage::Ready | DestinationStage::Running),
            next: 0,
            pages: 0,
        }
    }
}

/// The supervisor's own state.
struct Supervisor<'s, 'e, 'a> {
    host: &'a Destination,
    stop: &'a dyn Fn() -> bool,
    scope: &'s std::thread::Scope<'s, 'e>,
    done: &'e AtomicBool,
    state: Session,
    link: Connections<'s, 'e>,
    guest: Guest<'s, 'e, 'a>,
    record: Record<'a>,
    /// The reason for the end of the session.
    error: Option<MigrationError>,
    end: Option<End>,
    /// The last time at which the supervisor did what is due at a time.
    kept_time: Instant,
    events: VecDeque<Event>,
}

/// The way to the source.
struct Connections<'s, 'e> {
    inbound: &'e Inbound<'e>,
    patience: &'e Patience,
    control: Option<ControlLink>,
    /// Of the newest control channel.
    protected: Protected,
    /// The missing pages that are being named to a source that resumes.
    naming: Option<Naming>,
    bulk: Vec<recovery::BulkChannel<'s>>,
    last_loss: Option<String>,
    /// How often losses are logged: the source chooses how often there are any.
    losses: Quota,
    lost: LostChannels,
    pending_loss: PendingLoss,
    /// Since when there is no control channel.
    lost_since: Option<Instant>,
    reconnects: u32,
}

/// The VM that comes.
struct Guest<'s, 'e, 'a> {
    vm: RunningVm<'a>,
    core: &'e Arc<Core>,
    precopy: precopy::Precopy,
    loading: switchover::Loading<'a>,
    postcopy: postcopy::Postcopy<'s>,
    started: Duration,
    /// The data pages that came before the guest ran here.
    precopy_data: u64,
}

/// The record for people.
struct Record<'a> {
    observer: &'a dyn Observer,
    /// When the status was published last.
    published: Instant,
    phases: Vec<PhaseStart>,
}

impl<'a> Supervisor<'_, '_, 'a> {
    /// Runs the session to its end.
    fn run(&mut self) -> Result<DestinationReport, DestinationFailure> {
        let mut spin_until = None;
        while self.end.is_none() {
            if let Some(event) = self.events.pop_front() {
                self.feed(event);
                continue;
            }
            if self.take_letter() || self.receive() {
                spin_until = (self.state.stage == Stage::Ready || self.guest.loading.has_begun())
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

    fn enter(&mut self, phase: Phase) {
        PhaseStart::note(&mut self.record.phases, phase);
        info!(%phase, "phase");
        self.record.observer.phase(phase);
    }

    /// Ends the migration, or the VM's run here, with `error`.
    fn fail(&mut self, error: MigrationError) {
        self.error.get_or_insert(error);
        self.events.push_back(Event::Failed);
    }

    /// Keeps the reason for a loss. It is the reason for the end if the session does not survive.
    fn note_loss(&mut self, error: MigrationError) {
        self.link.last_loss = Some(error.to_string());
        if matches!(self.state.stage, Stage::Receiving) {
            self.error.get_or_insert(error);
        }
    }

    /// The control channel is lost, for this reason.
    fn lose_control(&mut self, error: MigrationError) {
        let Some(control) = &mut self.link.control else {
            return self.note_loss(error);
        };
        if !error.is_lost() {
            // The peer may still read why.
            let _ = control.send(&error.to_frame());
        }
        let generation = control.generation;
        if let Some(left_out) = self.link.losses.take() {
            warn!(generation, %error, left_out, "the control channel is lost");
        }
        self.link.lost.control_lost();
        self.note_loss(error);
        self.events.push_back(Event::Lost(generation));
    }

    fn feed(&mut self, event: Event) {
        let (next, actions) = step(&self.state, event);
        let before = std::mem::replace(&mut self.state, next);
        for action in actions {
            self.perform(action);
        }
        // Behind the actions: the blackout does not wait for the log.
        let (stage, generation) = (self.state.stage, self.state.generation);
        if stage != before.stage {
            info!(?stage, generation, "session");
        }
        self.publish();
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Send(message) => self.say(message),
            Action::SendMissing(stage) => {
                self.link.naming = Some(Naming::new(stage));
                self.name_missing();
            }
            Action::EndUpTo(generation) => self.end_up_to(generation),
            Action::EndChannel(id) => self.end_channel(id),
            Action::RepeatRequests => self.guest.core.repeat_requests(),
            Action::StartGuest => self.start_guest(),
            Action::Refuse => self.lose_control(
                crate::ProtocolError::Contradiction("a message of another state").into(),
            ),
            Action::End(end) => {
                if end == End::Incomplete {
                    // Before the status tells of it: the owner must not resume the VM any more.
                    self.host.set_open_to_owner(false);
                }
                self.end = Some(end);
            }
        }
    }

    fn say(&mut self, message: ToSource) {
        let reason = || match &self.error {
            Some(error) => error.to_string(),
            None => "the source cancelled the migration".to_owned(),
        };
        let frame = match message {
            ToSource::SetupAck => Frame::SetupAck {
                keeps: self.guest.core.keeps_bytes(),
            },
            ToSource::Ready => Frame::Ready,
            ToSource::Running => Frame::Running {
                started_at_ns: self.guest.started.as_nanos() as u64,
            },
            ToSource::Resumed(_) => return,
            ToSource::DrainAck => Frame::DrainAck {
                missing: self.guest.loading.missing_at_start(),
            },
            // A copy that was never ready needs no answer that is kept. A source that did not
            // cancel hears the reason.
            ToSource::Discarded if !self.guest.loading.is_loaded() => match &self.error {
                Some(MigrationError::PeerGaveUp { .. } | MigrationError::PeerCancelled) | None => {
                    Frame::Discarded(Text::new(&reason()))
                }
                Some(error) => error.to_frame(),
            },
            ToSource::Discarded => Frame::Discarded(Text::new(&reason())),
            ToSource::ChannelEnded { channel, placed } => Frame::ChannelEnded { channel, placed },
        };
        self.send(&frame);
    }

    fn send(&mut self, frame: &Frame) {
        if let Some(control) = &mut self.link.control
            && let Err(error) = control.answer(frame)
        {
            self.lose_control(error);
        }
    }

    /// Names missing pages as fast as the source takes them, and then says `Resumed`. All of them
    /// at once would take a byte for each page.
    fn name_missing(&mut self) {
        while let Some(naming) = &mut self.link.naming
            && let Some(control) = &mut self.link.control
            && control.waiting() == 0
        {
            let rest = runs(self.guest.core.pages.states.missing(), naming.next);
            let next = MissingRuns::frames(rest).next().filter(|_| naming.pending);
            let frame = match next {
                Some(missing) => {
                    naming.pages += missing.pages();
                    naming.next = missing
                        .runs
                        .last()
                        .map_or(naming.next, |run| run.end as usize);
                    Frame::Missing(missing)
                }
                None => {
                    let (stage, missing) = (naming.stage, naming.pages);
                    self.link.naming = None;
                    Frame::Resumed { stage, missing }
                }
            };
            self.send(&frame);
        }
    }

    /// Takes one letter. Returns whether there was one.
    fn take_letter(&mut self) -> bool {
        let Some(letter) = self.host.desk.letters.take() else {
            return false;
        };
        match letter {
            Letter::Arrived(key, connection) => self.arrived(key, connection),
            Letter::ChannelLost(generation, id, error) => {
                self.channel_lost(generation, id, error);
            }
            Letter::AllHere => {}
            Letter::Started => self.started(),
            Letter::Gone(why) => self.fail(MachineError::Gone(why).into()),
            Letter::Failed => {
                if let Some(error) = self.guest.core.take_failure() {
                    self.fail(error);
                }
            }
            Letter::GiveUp => {
                self.error.get_or_insert(MigrationError::Cancelled);
                self.give_up();
            }
        }
        true
    }

    /// Handles a frame that has arrived. Returns whether there was one.
    fn receive(&mut self) -> bool {
        let Some(control) = &mut self.link.control else {
            return false;
        };
        let generation = control.generation;
        match control.receive() {
            Ok(None) => false,
            Ok(Some(frame)) => {
                match self.handle(generation, frame) {
                    // A machine that fails is no fault of the source.
                    Err(error) if error.is_fatal_here() => self.fail(error),
                    Err(error) => self.lose_control(error),
                    Ok(()) => {}
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
        let receiving = self.state.stage == Stage::Receiving;
        let message = match frame {
            Frame::Pass(pass) if receiving => {
                self.begin_pass(pass);
                return Ok(());
            }
            Frame::Missing(runs) if receiving => return self.load_missing(&runs),
            Frame::VcpuState(state) if receiving => return self.load_state(state),
            Frame::DeviceState(state) if receiving => return self.load_device(state),
            Frame::SwitchOver(switch_over) if receiving => return self.load(&switch_over),
            Frame::Go => ToDestination::Go,
            Frame::Resume(stage) => {
                if stage == SourceStage::Cancelled && self.state.stage == Stage::Ready {
                    self.error.get_or_insert(MigrationError::PeerCancelled);
                }
                ToDestination::Resume(stage)
            }
            Frame::Cancel => {
                self.error.get_or_insert(MigrationError::PeerCancelled);
                ToDestination::Cancel
            }
            Frame::Drained { missing } => {
                self.check_drained(missing)?;
                ToDestination::Drained
            }
            Frame::Complete => ToDestination::Complete,
            Frame::DiscardHeard => ToDestination::DiscardHeard,
            Frame::CloseChannel(id) => ToDestination::CloseChannel(id),
            Frame::Again => ToDestination::Again,
            Frame::Error(error) if receiving => {
                self.error.get_or_insert(MigrationError::gave_up(&error));
                ToDestination::Cancel
            }
            // The source leaves this generation, and says why.
            Frame::Error(error) => return Err(MigrationError::gave_up(&error)),
            other => return Err(MigrationError::unexpected("another frame", &other)),
        };
        self.events.push_back(Event::Received(generation, message));
        Ok(())
    }

    /// Says `Alive` in time, notices silence, and hears `stop`.
    fn keep_time(&mut self) {
        let interval = Limits::INTERVAL;
        let patience = self.link.patience.get();
        if let Some(control) = &mut self.link.control {
            if control.is_silent(patience) {
                self.lose_control(MigrationError::Timeout("anything on the control channel"));
            } else if let Err(error) = control.keep_alive(interval) {
                self.lose_control(error);
            }
        }
        for channel in &self.guest.core.urgent {
            channel.keep_time(self.guest.core, interval, patience);
        }
        self.start_readers();
        for channel in &self.link.bulk {
            channel.bulk.keep_alive(interval);
        }
        if self.state.stage == Stage::Receiving {
            if (self.stop)() {
                self.error.get_or_insert(MigrationError::Cancelled);
                self.events.push_back(Event::GiveUp);
            } else if let Err(error) = self.report_allocation() {
                self.fail(error);
            }
        } else if self.state.stage == Stage::Ready && (self.stop)() {
            self.error.get_or_insert(MigrationError::Cancelled);
            self.events.push_back(Event::GiveUp);
        }
        self.conclude_loss();
        self.name_missing();
        self.guest.core.repeat_if_due();
        self.check_lost_for_too_long();
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
        let mut fds = vec![PollFd::new(&*self.host.desk.letters, PollFlags::IN)];
        if let Some(control) = &self.link.control {
            fds.push(PollFd::from_borrowed_fd(
                control.as_fd(),
                control.interest(),
            ));
        }
        let nap = Limits::INTERVAL.min(LONGEST_SLEEP);
        pageferry_transport::sleep_on(&mut fds, nap);
    }
}
