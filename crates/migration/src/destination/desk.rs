//! The desk of a listening destination: it decides about the channels that sources open.
//!
//! **Guarantee.** One source has the destination at a time, and only a source that knows the
//! session's secret opens channels of it. A stranger costs a place for a few seconds, and no memory
//! that grows. Strangers keep no source out that says at once what it wants.
//!
//! **Mechanism.** The acceptor's thread asks the desk. Sources that open a session wait at the desk
//! until [`Destination::accept`](super::Destination::accept) takes the first that speaks. If there
//! is no place, one that has said nothing gives up its own. A source that only checks the way opens
//! the other channels of a session that waits: each is proved, and closed. A source that moves a VM
//! opens them later, when it has the destination. The channels of the session that was
//! taken go to its supervisor, as letters. A letter takes the place of an older one that it makes
//! useless, so there is at most one for each channel of the session.

use super::shared::Letter;
use crate::control::ControlLink;
use crate::error::MigrationError;
use crate::sync::{AtomicU64, Ordering};
use crate::wire::{ChannelKey, Frame, Hello, Role, SessionId, Side, Status};
use pageferry_transport::channel::{Connection, OpenError};
use pageferry_transport::handshake::{
    Admission, Arrival, Expected, Identity, Router, Secret, Stranger, StrangerError, place_to_take,
};
use pageferry_transport::{Bell, Mailbox, Quota};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most sessions that wait for their source's first word.
const MAX_WAITING: usize = 32;

/// A session that waits for its source's first word.
pub(super) struct Candidate {
    pub(super) session: SessionId,
    pub(super) secret: Secret,
    pub(super) control: ControlLink,
    since: Instant,
}

/// A source that spoke.
pub(super) struct Chosen {
    pub(super) candidate: Candidate,
    pub(super) said: Result<Frame, MigrationError>,
}

impl Candidate {
    fn is_silent(&self) -> bool {
        !self.control.has_unread()
    }

    fn stranger(&self, why: StrangerError) -> Stranger {
        Stranger::new(self.control.peer().to_owned(), why)
    }
}

/// The session that has the destination.
struct Active {
    identity: Identity,
    admission: Admission,
}

#[derive(Default)]
struct State {
    /// In the order in which they came, at most [`MAX_WAITING`].
    waiting: Vec<Candidate>,
    active: Option<Active>,
}

impl State {
    /// The session that waits and to which this channel belongs, unless it is a control channel.
    fn waiting_session(&self, session: SessionId, key: ChannelKey) -> Option<&Candidate> {
        let mut waiting = self.waiting.iter();
        waiting.find(|one| one.session == session && key.role != Role::Control)
    }
}

/// Called with connections that did not become channels, at a bounded rate.
pub(super) type OnStranger = Box<dyn Fn(&Stranger) + Send + Sync>;

/// See the module.
pub(super) struct Desk {
    state: Mutex<State>,
    pub(super) letters: Arc<Mailbox<Letter>>,
    /// Rings when a session begins to wait.
    pub(super) arrivals: Bell,
    on_stranger: OnStranger,
    /// The strangers so far.
    strangers: AtomicU64,
    quota: Quota,
    /// The longest wait for a session's first word.
    silence: Duration,
}

impl Desk {
    /// `hello` is [`Limits::hello`](crate::Limits::hello). A source that checks the way says its
    /// first word when each of its channels has had this time for its large packets.
    pub(super) fn new(on_stranger: OnStranger, hello: Duration) -> Result<Self, MigrationError> {
        Ok(Self {
            state: Mutex::default(),
            letters: Arc::new(Mailbox::new().map_err(MigrationError::eventfd)?),
            arrivals: Bell::new().map_err(MigrationError::eventfd)?,
            on_stranger,
            strangers: AtomicU64::new(0),
            quota: Quota::new(),
            silence: hello.saturating_mul(2),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all sessions that wait.
    pub(super) fn take_waiting(&self) -> Vec<Candidate> {
        std::mem::take(&mut self.lock().waiting)
    }

    /// The connections of the sessions that wait, to sleep until one is readable. `None` if some
    /// have more to read already.
    pub(super) fn connections(&self) -> Option<Vec<Arc<Connection>>> {
        let state = self.lock();
        let controls = || state.waiting.iter().map(|candidate| &candidate.control);
        if controls().any(ControlLink::has_more) {
            return None;
        }
        Some(controls().map(ControlLink::connection).collect())
    }

    /// Takes the first session whose source has spoken. Ends those that have gone, or have said
    /// nothing in time.
    pub(super) fn take_first(&self) -> Option<Chosen> {
        let mut silent = Vec::new();
        let mut chosen = None;
        let mut state = self.lock();
        let mut at = 0;
        while let Some(candidate) = state.waiting.get_mut(at) {
            let said = match candidate.control.receive() {
                Ok(None) if candidate.since.elapsed() < self.silence => {
                    at += 1;
                    continue;
                }
                // It has only checked the way.
                Ok(Some(Frame::Cancel)) => {
                    state.waiting.remove(at).control.shutdown();
                    continue;
                }
                Ok(Some(frame)) => Ok(frame),
                Err(error) if !error.is_lost() || candidate.control.has_begun() => Err(error),
                // It is gone, or has said nothing in time.
                Ok(None) | Err(_) => {
                    silent.push(state.waiting.remove(at));
                    continue;
                }
            };
            let candidate = state.waiting.remove(at);
            chosen = Some(Chosen { candidate, said });
            break;
        }
        drop(state);
        for candidate in silent {
            candidate.control.shutdown();
            self.stranger(candidate.stranger(StrangerError::SilentSession));
        }
        chosen
    }

    /// The number of strangers so far.
    pub(super) fn strangers(&self) -> u64 {
        self.strangers.load(Ordering::Relaxed)
    }

    /// A source opens a session. Returns the session that makes room, if one has to.
    fn wait(&self, arrival: Arrival) -> Result<Option<Candidate>, Box<(Arrival, Status)>> {
        let mut state = self.lock();
        let mut makes_room = None;
        if state.waiting.len() >= MAX_WAITING {
            // One that has spoken is about to be taken.
            let silent = state.waiting.iter().enumerate();
            let silent = silent.filter(|(_, candidate)| candidate.is_silent());
            let silent = silent.map(|(at, candidate)| (at, candidate.control.origin()));
            makes_room = place_to_take(&silent.collect::<Vec<_>>());
            if makes_room.is_none() {
                return Err(arrival.refused(Status::Busy));
            }
        }
        if state.active.is_some() {
            return Err(arrival.refused(Status::Busy));
        }
        let session = arrival.agreed().session;
        let secret = arrival.secret().clone();
        // A source that is gone already needs no place.
        let Ok(connection) = arrival.welcome() else {
            return Ok(None);
        };
        let makes_room = makes_room.map(|at| state.waiting.remove(at));
        state.waiting.push(Candidate {
            session,
            secret,
            control: ControlLink::new(Arc::new(connection), 1, Side::Source, 0),
            since: Instant::now(),
        });
        self.arrivals.ring();
        Ok(makes_room)
    }

    /// Gives the destination to a session that waited.
    pub(super) fn begin(&self, identity: Identity, bulk: u16, urgent: u16) {
        let mut admission = Admission::new();
        // The control channel that opened the session.
        let _ = admission.admit(ChannelKey::control(1));
        admission.announce(bulk, urgent);
        let mut state = self.lock();
        state.active = Some(Active {
            identity,
            admission,
        });
    }

    /// Gives the supervisor of the session that has the destination a letter, in the place of an
    /// older one of its kind.
    pub(super) fn tell(&self, letter: Letter) {
        // `end` takes the lock before it forgets the letters, so none is left for a later session.
        let state = self.lock();
        if state.active.is_some() {
            let kind = std::mem::discriminant(&letter);
            let same = |other: &Letter| std::mem::discriminant(other) == kind;
            self.letters.post_instead_of(letter, same);
        }
    }

    /// Ends the session that has the destination. Its channels are unknown from now on.
    pub(super) fn end(&self) {
        let mut state = self.lock();
        state.active = None;
        // Connections of the session that nobody has taken. Under the lock: another thread may
        // accept the next session at once, whose letters come under the lock too.
        while self.letters.take().is_some() {}
    }
}

impl Router for Desk {
    fn route(&self, hello: &Hello, opens: bool) -> Result<Expected, Status> {
        if matches!(hello.key.role, Role::Tunnel | Role::Share) {
            return Err(Status::BadRole);
        }
        let state = self.lock();
        match &state.active {
            Some(active) if active.identity.session == hello.session => {
                active.admission.check(hello.key)?;
                Ok(Expected::Known(active.identity.secret.clone()))
            }
            _ if !opens => match state.waiting_session(hello.session, hello.key) {
                Some(candidate) => Ok(Expected::Known(candidate.secret.clone())),
                None => Err(Status::UnknownSession),
            },
            None => Ok(Expected::New),
            Some(_) => Err(Status::Busy),
        }
    }

    fn accepted(&self, arrival: Arrival) -> Result<(), Box<(Arrival, Status)>> {
        let agreed = *arrival.agreed();
        if agreed.key.opens_session() {
            if let Some(silent) = self.wait(arrival)? {
                silent.control.shutdown();
                self.stranger(silent.stranger(StrangerError::Crowded));
            }
            return Ok(());
        }
        let mut state = self.lock();
        if state.waiting_session(agreed.session, agreed.key).is_some() {
            // It has proved the way, and serves nothing else. If the source is gone, so is its
            // check.
            let _ = arrival.welcome();
            return Ok(());
        }
        let Some(active) = &mut state.active else {
            return Err(arrival.refused(Status::UnknownSession));
        };
        if active.identity.session != agreed.session {
            return Err(arrival.refused(Status::UnknownSession));
        }
        if let Err(status) = active.admission.admit(agreed.key) {
            return Err(arrival.refused(status));
        }
        // Letters keep their order: a control channel comes before the others of its generation.
        // If the source is gone, it opens the next generation, or another incarnation, by itself.
        if let Ok(connection) = arrival.welcome() {
            let letter = Letter::Arrived(agreed.key, connection);
            self.letters.post_instead_of(letter, |older| match older {
                Letter::Arrived(older, _) => replaces(agreed.key, *older),
                _ => false,
            });
        }
        Ok(())
    }

    fn stranger(&self, mut stranger: Stranger) {
        self.strangers.fetch_add(1, Ordering::Relaxed);
        let Some(left_out) = self.quota.take() else {
            return;
        };
        stranger.left_out = left_out;
        let Stranger { peer, why, .. } = &stranger;
        tracing::info!(%peer, %why, left_out, "refused a stranger");
        (self.on_stranger)(&stranger);
    }

    fn cannot_accept(&self, error: &OpenError) {
        self.stranger(Stranger::new(
            "this host".into(),
            StrangerError::NotAccepted(error.to_string()),
        ));
    }
}

/// Whether an accepted channel makes an earlier one useless that the supervisor has not taken: a
/// source opens a channel again only when it has left the last one, and a generation likewise.
fn replaces(newer: ChannelKey, older: ChannelKey) -> bool {
    newer.role == Role::Control || (newer.role, newer.index) == (older.role, older.index)
}
