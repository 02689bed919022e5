//! Opens the channels of a session, closes them, and opens them again.
//!
//! Attempts to open a channel have a thread. The first attempt after a loss begins at once, and the
//! pauses between later ones grow. So do they if the channel opens and is lost soon, again and
//! again: a destination chooses neither the number of attempts nor that of their threads. A control
//! channel that does not open has used up its generation, and another channel its incarnation: the
//! destination may have accepted it.

use super::bulk::Bulk;
use super::config::{Route, SourceConfig};
use super::shared::{Letter, Shared};
use super::urgent::Urgent;
use super::{Supervisor, Threads};
use crate::error::MigrationError;
use crate::ledger::{clear_all, runs};
use crate::limits::Limits;
use crate::protocol_error::ProtocolError;
use crate::session::source::{Event, Stage};
use crate::session::{ChannelId, Generation};
use crate::wire::{ChannelKey, MissingRuns, Role, Status};
use pageferry_transport::Bell;
use pageferry_transport::address::Address;
use pageferry_transport::channel::{ChannelError, Connection, Wait};
use pageferry_transport::handshake::{self, HandshakeError, Identity, Opened, Protection};
use pageferry_userfault::PageBitmap;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// The pause before the second attempt. It doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A channel that was open for this long was of use: the next attempt begins at once.
const STEADY: Duration = Duration::from_secs(1);
/// The channels in a row that may be lost before that without a pause. A bad network does so too.
const FREE_LOSSES: u32 = 4;
/// The threads that open the control channel. A resolver of names may hold one up, for an attempt
/// that nobody wants any more.
const CONTROL_THREADS: u32 = 2;
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
    control: Attempts,
    /// The attempts of the other channels, by their places.
    others: BTreeMap<(Role, u16), Attempts>,
}

/// The attempts to open one channel. Those of control are of all generations, those of others of
/// one.
#[derive(Default)]
struct Attempts {
    pace: Pace,
    wanted: Arc<Mutex<Wanted>>,
}

/// What the threads of a channel's attempts do.
#[derive(Default)]
struct Wanted {
    /// The next attempt. The one before it ends.
    next: Option<Attempt>,
    /// The number of threads.
    threads: u32,
}

struct Attempt {
    route: Route,
    key: ChannelKey,
    begin: Instant,
}

/// How soon the next attempt begins.
#[derive(Debug, Default)]
struct Pace {
    /// The attempts since the channel was open.
    failed: u32,
    /// The losses in a row of a channel that was not open for long, and the series of attempts
    /// before it was open.
    losses: u32,
    opened: Option<Instant>,
}

impl Pace {
    fn opened(&mut self, now: Instant) {
        // The peer may have ended an attempt before this side noted that it was open.
        self.losses += u32::from(self.failed > 1);
        self.failed = 0;
        self.opened = Some(now);
    }

    /// The pause before an attempt at this time.
    fn next(&mut self, now: Instant) -> Duration {
        if let Some(opened) = self.opened.take() {
            let steady = now.saturating_duration_since(opened) >= STEADY;
            self.losses = if steady { 0 } else { self.losses + 1 };
        }
        let pause = pause(self.failed.max(self.losses.saturating_sub(FREE_LOSSES)));
        self.failed = self.failed.saturating_add(1);
        pause
    }
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
            control: Attempts::default(),
            others: BTreeMap::new(),
        }
    }

    pub(super) fn reroute(&mut self, route: Route) {
        self.route = route;
        self.control.pace = Pace::default();
    }

    pub(super) fn control_is_open(&mut self) {
        self.control.pace.opened(Instant::now());
    }

    /// The ids of the open channels.
    pub(super) fn open(&self) -> impl Iterator<Item = ChannelId> {
        self.open.iter().map(|open| open.id)
    }

    /// Opens the control channel of a generation.
    pub(super) fn dial_control(&mut self, generation: Generation) {
        // The pace of control bounds that of generations. In each, the other channels begin at
        // once: with pauses from the one before, a generation could end before any of them is open.
        for attempts in self.others.values_mut() {
            attempts.pace = Pace::default();
        }
        let shared = self.dialler.shared;
        shared
            .generation
            .store(generation, crate::sync::Ordering::Release);
        let key = ChannelKey::control(generation);
        self.dialler
            .dial(&self.route, key, &mut self.control, CONTROL_THREADS);
    }

    /// Opens another channel.
    pub(super) fn dial(&mut self, generation: Generation, id: ChannelId) {
        let attempts = self.others.entry((id.role, id.index)).or_default();
        self.dialler
            .dial(&self.route, id.key(generation), attempts, 1);
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
        let (connection, bell) = (
            Arc::new(connection),
            Arc::new(Bell::new().map_err(MigrationError::eventfd)?),
        );
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
        let attempts = self.others.entry((id.role, id.index)).or_default();
        attempts.pace.opened(Instant::now());
        self.open.push(Open {
            id,
            connection,
            bell,
            thread,
        });
        Ok(())
    }

    /// Closes a channel and ends its thread. Returns whether it was open.
    pub(super) fn close(&mut self, id: ChannelId) -> bool {
        let Some(at) = self.open.iter().position(|open| open.id == id) else {
            return false;
        };
        self.open.swap_remove(at).end();
        true
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

/// The address of the route's host that worked the last time.
#[derive(Debug, Default)]
pub(super) struct Worked(Mutex<Option<(Address, SocketAddr)>>);

impl Worked {
    fn lock(&self) -> MutexGuard<'_, Option<(Address, SocketAddr)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address of this route's host, if one has worked.
    fn of(&self, route: &Route) -> Option<SocketAddr> {
        let worked = self.lock();
        let (address, found) = worked.as_ref()?;
        matches!(route, Route::To(to) if to == address).then_some(*found)
    }

    /// Notes what became of this route's host.
    fn note(&self, route: &Route, found: Option<SocketAddr>) {
        if let Route::To(address) = route {
            *self.lock() = found.map(|found| (address.clone(), found));
        }
    }
}

impl Route {
    /// Opens a channel by this way. Tries again for [`Limits::retry`] if the connection ends
    /// without a reason.
    pub(super) fn open(
        &self,
        worked: &Worked,
        protection: &Protection,
        identity: &Identity,
        key: ChannelKey,
        limits: &Limits,
        stop: &dyn Fn() -> bool,
    ) -> Result<Opened, HandshakeError> {
        let (began, mut limit) = (Instant::now(), limits.connect);
        let mut first = None;
        loop {
            let error = match self.open_once(worked, protection, identity, key, limit, stop) {
                Err(error) => error,
                opened => return opened,
            };
            let left = limits.retry.saturating_sub(began.elapsed());
            if !matches!(self, Self::To(_)) || !error.may_pass() || left.is_zero() || stop() {
                // A retry has less time: what the first attempt found says more.
                let timed_out = matches!(
                    error,
                    HandshakeError::Channel(ChannelError::TimedOut { .. })
                );
                return Err(first.filter(|_| timed_out).unwrap_or(error));
            }
            first.get_or_insert(error);
            limit = limits.connect.min(left);
            std::thread::sleep(POLL);
        }
    }

    /// Tries the address first that worked the last time.
    fn open_once(
        &self,
        worked: &Worked,
        protection: &Protection,
        identity: &Identity,
        key: ChannelKey,
        limit: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<Opened, HandshakeError> {
        match self {
            Self::To(address) => {
                protection.allows(address)?;
                let wait = Wait::block("connection").within(limit).unless(stop);
                let connection = Connection::connect_preferring(address, worked.of(self), &wait)?;
                let found = connection.tcp_peer();
                let host = self.host();
                let opened =
                    handshake::open_on(connection, host, protection, identity, key, limit, stop);
                // Another process may have the address by now.
                worked.note(self, found.filter(|_| opened.is_ok()));
                opened
            }
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

fn lock(wanted: &Mutex<Wanted>) -> MutexGuard<'_, Wanted> {
    wanted.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Dialler<'_, '_, '_> {
    /// Opens a channel on a thread of its own, which posts the outcome. This ends the attempt
    /// before it, whose outcome nobody wants any more.
    fn dial(self, route: &Route, key: ChannelKey, attempts: &mut Attempts, threads: u32) {
        let now = Instant::now();
        let begin = now + attempts.pace.next(now);
        let route = route.clone();
        let mut wanted = lock(&attempts.wanted);
        wanted.next = Some(Attempt { route, key, begin });
        if wanted.threads >= threads {
            // They see it, and take it.
            return;
        }
        wanted.threads += 1;
        drop(wanted);
        let of_thread = Arc::clone(&attempts.wanted);
        let spawned = std::thread::Builder::new()
            .name("pf-dial".into())
            .spawn_scoped(self.scope, move || self.attempt_all(&of_thread));
        if let Err(e) = spawned {
            let mut wanted = lock(&attempts.wanted);
            wanted.threads -= 1;
            wanted.next = None;
            let error = MigrationError::os("cannot start a thread that connects", e);
            self.post(key, Err(error));
        }
    }

    /// Makes attempts until no further one is wanted.
    fn attempt_all(self, wanted: &Mutex<Wanted>) {
        loop {
            let next = {
                let mut wanted = lock(wanted);
                let next = wanted.next.take();
                if next.is_none() {
                    // Under the lock: an attempt that comes now finds that it needs a thread.
                    wanted.threads -= 1;
                }
                next
            };
            let Some(Attempt { route, key, begin }) = next else {
                return;
            };
            let shared = self.shared;
            let stop = || !shared.is_current(key.generation) || lock(wanted).next.is_some();
            while Instant::now() < begin && !stop() {
                std::thread::sleep(POLL.min(begin.saturating_duration_since(Instant::now())));
            }
            let opened = route.open(
                &shared.worked,
                self.protection,
                self.identity,
                key,
                &self.config.limits,
                &stop,
            );
            let outcome = opened.map(|opened| {
                shared.note_round_trip(opened.round_trip);
                opened.connection
            });
            if !stop() {
                self.post(key, outcome.map_err(MigrationError::from));
            }
        }
    }

    fn post(self, key: ChannelKey, outcome: Result<Connection, MigrationError>) {
        let generation = key.generation;
        let id = ChannelId {
            role: key.role,
            index: key.index,
            incarnation: key.incarnation,
        };
        self.shared.letters.post(match (key.role, outcome) {
            (Role::Control, Ok(connection)) => Letter::Opened(generation, connection),
            (Role::Control, Err(error)) => Letter::Lost(generation, error),
            (_, Ok(connection)) => Letter::ChannelOpened(generation, id, connection),
            (_, Err(error)) => Letter::ChannelLost(generation, id, error),
        });
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
        match self.link.channels.start(generation, id, connection) {
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
        let was_open = self.link.channels.open().any(|open| open == id);
        if was_open {
            self.link.lost.noticed(id);
        }
        if broken && self.state.has_handed_over() && was_open {
            return self.lose_control(error);
        }
        if error.is_lost() && !self.state.has_handed_over() && self.link.control.is_some() {
            self.link.pending_loss.keep((generation, id, error));
            return;
        }
        self.note_loss(error);
        self.events.push_back(Event::ChannelLost(generation, id));
    }

    /// A channel is lost, and the destination has not said why.
    pub(super) fn conclude_loss(&mut self) {
        if let Some((generation, id, error)) = self.link.pending_loss.take_due() {
            self.note_loss(error);
            self.events.push_back(Event::ChannelLost(generation, id));
        }
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
        self.link.last_loss = Some(error.to_string());
        if !self.state.has_handed_over() {
            self.error.get_or_insert(error);
        }
    }

    pub(super) fn close_generation(&mut self) {
        if let Some(mut control) = self.link.control.take() {
            if matches!(self.state.stage, Stage::Ended(_)) {
                control.close_gracefully();
            }
            control.shutdown();
        }
        self.forget_named();
        self.link.channels.close_all();
        self.link.lost.end_generation();
    }

    /// Pages of a lost channel are unsent again.
    pub(super) fn reclaim(&mut self, id: ChannelId, placed: u64) {
        let index = Shared::ledger_index(id, self.config.bulk_channels);
        match self.shared.ledger.reclaim(index, placed) {
            Ok(_) => self.shared.check_acknowledged(),
            Err(error) => return self.lose_control(ProtocolError::from(error).into()),
        }
        self.link.channels.ring();
    }

    /// The missing pages that the destination has named are the unsent ones.
    pub(super) fn adopt_missing(&mut self) {
        let named = self.link.named.0.iter().flat_map(|named| runs(named, 0));
        match self.shared.ledger.adopt_missing(named) {
            Ok(()) => self.shared.check_acknowledged(),
            Err(error) => self.lose_control(ProtocolError::from(error).into()),
        }
        self.forget_named();
        self.link.channels.ring();
    }

    /// Takes missing pages that a resuming destination has named. It names each once.
    pub(super) fn take_named(&mut self, missing: &MissingRuns) -> Result<(), MigrationError> {
        let (named, pages) = &mut self.link.named;
        if named.is_none() {
            let all = self.guest.vm.machine.ram().pages();
            *named = Some(PageBitmap::try_new(all as usize)?);
        }
        let named = named.as_ref().expect("there is one now");
        for run in &missing.runs {
            let newly = named.set_range(run.start as usize..run.end as usize) as u64;
            if newly < run.end - run.start {
                let why = "it names a missing page twice";
                return Err(ProtocolError::Contradiction(why).into());
            }
            *pages += newly;
        }
        Ok(())
    }

    fn forget_named(&mut self) {
        if let Some(named) = &self.link.named.0 {
            clear_all(named);
        }
        self.link.named.1 = 0;
    }

    /// Checks the number of missing pages that a resuming destination announced.
    pub(super) fn check_named(&self, announced: u64) -> Result<(), MigrationError> {
        let found = self.link.named.1;
        if found == announced {
            return Ok(());
        }
        Err(ProtocolError::MissingCount { announced, found }.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_that_is_lost_soon_again_and_again_is_opened_more_and_more_slowly() {
        let mut pace = Pace::default();
        let mut now = Instant::now();
        let mut pauses = Vec::new();
        for _ in 0..20 {
            let pause = pace.next(now);
            pauses.push(pause);
            now += pause;
            pace.opened(now);
        }
        let free = FREE_LOSSES as usize + 1;
        assert!(pauses[..free].iter().all(Duration::is_zero), "{pauses:?}");
        assert_eq!(pauses[free], FIRST_PAUSE);
        assert_eq!(pauses[19], LONGEST_PAUSE);
        // One that was of use begins anew, and so does none that never opened.
        assert_eq!(pace.next(now + STEADY), Duration::ZERO);
        let failed: Vec<_> = (0..12).map(|_| pace.next(now)).collect();
        assert_eq!(failed[0], FIRST_PAUSE);
        assert_eq!(failed[11], LONGEST_PAUSE);
    }

    #[test]
    fn an_attempt_that_ends_before_it_is_noted_open_is_a_loss() {
        let mut pace = Pace::default();
        let mut now = Instant::now();
        let mut pauses = Vec::new();
        for _ in 0..12 {
            pace.next(now);
            let pause = pace.next(now);
            pauses.push(pause);
            now += pause;
            pace.opened(now);
        }
        assert_eq!(pauses[11], LONGEST_PAUSE, "{pauses:?}");
    }
}
