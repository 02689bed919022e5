//! Opens the channels of a session, closes them, and opens them again.
//!
//! Each attempt to open a channel is a thread. The first attempt after a loss begins at once, and
//! the pauses between later ones grow. A control channel that does not open has used up its
//! generation, and another channel its incarnation: the destination may have accepted it.

use super::bulk::Bulk;
use super::config::{Route, SourceConfig};
use super::shared::{Letter, Shared};
use super::urgent::Urgent;
use super::{Supervisor, Threads};
use crate::bell::Bell;
use crate::channel::Connection;
use crate::error::MigrationError;
use crate::handshake::{self, HandshakeError, Identity, Opened, Protection};
use crate::protocol_error::ProtocolError;
use crate::session::source::{Event, Stage};
use crate::session::{ChannelId, Generation};
use crate::wire::{ChannelKey, Role, Status};
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// The pause before the second attempt. It doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The interval at which a pausing attempt looks whether it is still wanted.
const POLL: Duration = Duration::from_millis(10);

/// Everything that is needed to open a channel.
#[derive(Clone, Copy)]
pub(super) struct Dialler<'s, 'e, 'a> {
    pub(super) scope: Threads<'s, 'e>,
    pub(super) shared: &'e Shared<'a>,
    pub(super) identity: &'e Identity,
    pub(super) protection: &'e Protection,
    pub(super) config: &'e SourceConfig,
}

/// An open bulk or urgent channel.
struct Open<'s> {
    id: ChannelId,
    connection: Arc<Connection>,
    bell: Arc<Bell>,
    thread: ScopedJoinHandle<'s, ()>,
}

/// The channels other than control, and the attempts to open any.
pub(super) struct Channels<'s, 'e, 'a> {
    dialler: Dialler<'s, 'e, 'a>,
    route: Route,
    open: Vec<Open<'s>>,
    /// The failed attempts since a channel of this kind was open.
    control_attempts: u32,
    attempts: u32,
}

/// Ends the threads of channels, and the attempts to open any, on every path out of the scope.
impl Drop for Channels<'_, '_, '_> {
    fn drop(&mut self) {
        let ended = &self.dialler.shared.ended;
        ended.store(true, crate::sync::Ordering::Release);
        for open in &self.open {
            open.connection.shutdown();
            open.bell.ring();
        }
    }
}

/// The pause before an attempt.
fn pause(attempts: u32) -> Duration {
    match attempts {
        0 => Duration::ZERO,
        more => FIRST_PAUSE
            .saturating_mul(1 << (more - 1).min(10))
            .min(LONGEST_PAUSE),
    }
}

impl<'s, 'e, 'a> Channels<'s, 'e, 'a> {
    pub(super) fn new(dialler: Dialler<'s, 'e, 'a>, route: Route) -> Self {
        Self {
            dialler,
            route,
            open: Vec::new(),
            control_attempts: 0,
            attempts: 0,
        }
    }

    pub(super) fn reroute(&mut self, route: Route) {
        self.route = route;
        self.control_attempts = 0;
    }

    pub(super) fn control_is_open(&mut self) {
        self.control_attempts = 0;
        self.attempts = 0;
    }

    /// The ids of the open channels.
    pub(super) fn open(&self) -> impl Iterator<Item = ChannelId> {
        self.open.iter().map(|open| open.id)
    }

    /// Opens the control channel of a generation.
    pub(super) fn dial_control(&mut self, generation: Generation) {
        let shared = self.dialler.shared;
        shared
            .generation
            .store(generation, crate::sync::Ordering::Release);
        let key = ChannelKey {
            role: Role::Control,
            index: 0,
            generation,
            incarnation: 1,
        };
        let after = pause(self.control_attempts);
        self.control_attempts += 1;
        self.dialler.dial(&self.route, key, after, move |outcome| {
            shared.letters.post(match outcome {
                Ok(connection) => Letter::Opened(generation, connection),
                Err(error) => Letter::Lost(generation, error),
            });
        });
    }

    /// Opens another channel.
    pub(super) fn dial(&mut self, generation: Generation, id: ChannelId) {
        let shared = self.dialler.shared;
        let key = ChannelKey {
            role: id.role,
            index: id.index,
            generation,
            incarnation: id.incarnation,
        };
        let after = pause(if id.incarnation > 1 { self.attempts } else { 0 });
        self.attempts += 1;
        self.dialler.dial(&self.route, key, after, move |outcome| {
            shared.letters.post(match outcome {
                Ok(connection) => Letter::ChannelOpened(generation, id, connection),
                Err(error) => Letter::ChannelLost(generation, id, error),
            });
        });
    }

    /// Starts the thread of an open channel.
    pub(super) fn start(
        &mut self,
        generation: Generation,
        id: ChannelId,
        connection: Connection,
    ) -> Result<(), MigrationError> {
        let shared = self.dialler.shared;
        let index = Shared::ledger_index(id, self.dialler.config.bulk_channels);
        let (connection, bell) = (Arc::new(connection), Arc::new(Bell::new()?));
        let (of_thread, bell_of_thread) = (Arc::clone(&connection), Arc::clone(&bell));
        let (name, run): (_, Run) = match id.role {
            Role::Urgent => ("pf-urgent", run_urgent),
            _ => ("pf-bulk", run_bulk),
        };
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn_scoped(self.dialler.scope, move || {
                let error = run(shared, &of_thread, &bell_of_thread, index);
                of_thread.shutdown();
                shared
                    .letters
                    .post(Letter::ChannelLost(generation, id, error));
            })
            .map_err(|e| MigrationError::os("cannot start the thread of a channel", e))?;
        // Only now: while the host has no room for the thread, the pauses between attempts grow.
        self.attempts = 0;
        self.open.push(Open {
            id,
            connection,
            bell,
            thread,
        });
        Ok(())
    }

    /// Closes a channel and ends its thread. Nothing happens if it is not open.
    pub(super) fn close(&mut self, id: ChannelId) {
        if let Some(at) = self.open.iter().position(|open| open.id == id) {
            self.open.swap_remove(at).end();
        }
    }

    /// Closes all channels and ends their threads.
    pub(super) fn close_all(&mut self) {
        for open in &self.open {
            open.connection.shutdown();
        }
        for open in self.open.drain(..) {
            open.end();
        }
    }

    /// Wakes the threads of all channels.
    pub(super) fn ring(&self) {
        for open in &self.open {
            open.bell.ring();
        }
    }
}

/// The work of a channel's thread. It returns the reason for the loss of the channel.
type Run = fn(&Shared<'_>, &Connection, &Bell, usize) -> MigrationError;

fn run_bulk(
    shared: &Shared<'_>,
    connection: &Connection,
    bell: &Bell,
    index: usize,
) -> MigrationError {
    Bulk {
        shared,
        connection,
        bell,
        index,
    }
    .run()
}

fn run_urgent(
    shared: &Shared<'_>,
    connection: &Connection,
    bell: &Bell,
    index: usize,
) -> MigrationError {
    Urgent {
        shared,
        connection,
        bell,
        index,
    }
    .run()
}

impl Route {
    /// Opens a channel by this way.
    pub(super) fn open(
        &self,
        protection: &Protection,
        identity: &Identity,
        key: ChannelKey,
        limit: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<Opened, HandshakeError> {
        match self {
            Self::To(address) => handshake::dial(address, protection, identity, key, limit, stop),
            Self::Caller(connect) => {
                let connection = connect.connect().map_err(HandshakeError::Caller)?;
                handshake::open_on(connection, None, protection, identity, key, limit, stop)
            }
        }
    }
}

impl Open<'_> {
    fn end(self) {
        self.connection.shutdown();
        self.bell.ring();
        // A thread that panics has posted no letter, and its channel is closed all the same.
        let _ = self.thread.join();
    }
}

impl<'s> Dialler<'s, '_, '_> {
    /// Opens a channel on a thread of its own, which passes the outcome to `done`. Nothing is
    /// passed on if the channel is not wanted any more.
    fn dial(
        &self,
        route: &Route,
        key: ChannelKey,
        after: Duration,
        done: impl Fn(Result<Connection, MigrationError>) + Send + Sync + 's,
    ) {
        let (shared, identity, protection, config) =
            (self.shared, self.identity, self.protection, self.config);
        let route = route.clone();
        let stop = move || !shared.is_current(key.generation);
        let begin = Instant::now() + after;
        let done = Arc::new(done);
        let from_thread = Arc::clone(&done);
        let spawned = std::thread::Builder::new()
            .name("pf-dial".into())
            .spawn_scoped(self.scope, move || {
                while Instant::now() < begin && !stop() {
                    std::thread::sleep(POLL.min(begin.saturating_duration_since(Instant::now())));
                }
                let limit = config.limits.connect;
                let opened = route.open(protection, identity, key, limit, &stop);
                let outcome = opened.map(|opened| {
                    shared.note_round_trip(opened.round_trip);
                    opened.connection
                });
                if !stop() {
                    from_thread(outcome.map_err(MigrationError::from));
                }
            });
        if let Err(e) = spawned {
            done(Err(MigrationError::os(
                "cannot start a thread that connects",
                e,
            )));
        }
    }
}

impl Supervisor<'_, '_, '_> {
    pub(super) fn channel_opened(
        &mut self,
        generation: Generation,
        id: ChannelId,
        connection: Connection,
    ) {
        let wanted = self.state.channels.iter().any(|(known, _)| *known == id);
        if generation != self.state.generation || !wanted {
            return connection.shutdown();
        }
        match self.channels.start(generation, id, connection) {
            Ok(()) => self.events.push_back(Event::ChannelOpened(generation, id)),
            Err(error) => {
                self.note_loss(error);
                self.events.push_back(Event::ChannelLost(generation, id));
            }
        }
    }

    /// A channel was lost, or could not be opened.
    pub(super) fn channel_lost(
        &mut self,
        generation: Generation,
        id: ChannelId,
        error: MigrationError,
    ) {
        if generation != self.state.generation {
            return;
        }
        tracing::warn!(generation, channel = %id, %error, "a channel is lost");
        // A destination that breaks the protocol on one channel loses all, and hears why: its other
        // receipts may be wrong too.
        let broken = matches!(error, MigrationError::Wire(_) | MigrationError::Protocol(_));
        if broken && self.state.has_handed_over() && self.channels.open().any(|open| open == id) {
            return self.lose_control(error);
        }
        self.note_loss(error);
        self.events.push_back(Event::ChannelLost(generation, id));
    }

    /// The control channel of `generation` could not be opened.
    pub(super) fn dial_failed(&mut self, generation: Generation, error: MigrationError) {
        if generation != self.state.generation {
            return;
        }
        let unknown = matches!(error, MigrationError::Refused(Status::UnknownSession));
        self.note_loss(error);
        if unknown {
            self.events.push_back(Event::UnknownSession(generation));
        }
        self.events.push_back(Event::Lost(generation));
    }

    /// Keeps the reason for a loss. It is the reason for the end unless the session survives it.
    pub(super) fn note_loss(&mut self, error: MigrationError) {
        self.last_loss = Some(error.to_string());
        if !self.state.has_handed_over() {
            self.error.get_or_insert(error);
        }
    }

    pub(super) fn close_generation(&mut self) {
        if let Some(mut control) = self.control.take() {
            if matches!(self.state.stage, Stage::Ended(_)) {
                control.close_gracefully();
            }
            control.shutdown();
        }
        self.named.clear();
        self.channels.close_all();
    }

    /// Pages of a lost channel are unsent again.
    pub(super) fn reclaim(&mut self, id: ChannelId, placed: u64) {
        let index = Shared::ledger_index(id, self.config.bulk_channels);
        match self.shared.ledger.reclaim(index, placed) {
            Ok(_) => self.shared.check_acknowledged(),
            Err(error) => return self.lose_control(ProtocolError::from(error).into()),
        }
        self.channels.ring();
    }

    /// The missing pages that the destination has named are the unsent ones.
    pub(super) fn adopt_missing(&mut self) {
        let named = std::mem::take(&mut self.named);
        match self.shared.ledger.adopt_missing(named.iter().cloned()) {
            Ok(()) => self.shared.check_acknowledged(),
            Err(error) => self.lose_control(ProtocolError::from(error).into()),
        }
        self.channels.ring();
    }

    /// Checks the number of missing pages that a resuming destination announced.
    pub(super) fn check_named(&self, announced: u64) -> Result<(), MigrationError> {
        let found: u64 = self.named.iter().map(|run| run.end - run.start).sum();
        if found == announced {
            return Ok(());
        }
        Err(ProtocolError::MissingCount { announced, found }.into())
    }
}
