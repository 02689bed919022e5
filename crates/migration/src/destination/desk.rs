//! The desk of a listening destination: it decides about the channels that sources open.
//!
//! **Guarantee.** One source has the destination at a time, and only a source that knows the
//! session's secret opens channels of it. A stranger costs a place for a few seconds, and no memory
//! that grows.
//!
//! **Mechanism.** The acceptor's thread asks the desk. Sources that open a session wait at the desk
//! until [`Destination::accept`](super::Destination::accept) takes the first that speaks. The
//! channels of the session that was taken go to its supervisor, as letters.

use super::shared::Letter;
use crate::channel::{Connection, OpenError};
use crate::handshake::{Admission, Arrival, Expected, Router, Secret, Stranger, StrangerError};
use crate::mailbox::Mailbox;
use crate::wire::{ChannelKey, Hello, SessionId, Status};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The most sessions that wait for their source's first word.
const MAX_WAITING: usize = 8;

/// A session that waits for its source's first word.
pub(super) struct Waiting {
    pub(super) session: SessionId,
    pub(super) secret: Secret,
    pub(super) connection: Connection,
    pub(super) since: Instant,
}

/// The session that has the destination.
struct Active {
    session: SessionId,
    secret: Secret,
    admission: Admission,
}

#[derive(Default)]
struct State {
    waiting: Vec<Waiting>,
    active: Option<Active>,
}

/// Called with each connection that did not become a channel.
pub(super) type OnStranger = Box<dyn Fn(&Stranger) + Send + Sync>;

/// See the module.
pub(super) struct Desk {
    state: Mutex<State>,
    pub(super) letters: Arc<Mailbox<Letter>>,
    /// Rings when a session begins to wait.
    pub(super) arrivals: crate::bell::Bell,
    on_stranger: OnStranger,
}

impl Desk {
    pub(super) fn new(on_stranger: OnStranger) -> Result<Self, crate::MigrationError> {
        Ok(Self {
            state: Mutex::default(),
            letters: Arc::new(Mailbox::new()?),
            arrivals: crate::bell::Bell::new()?,
            on_stranger,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the sessions that have begun to wait.
    pub(super) fn take_waiting(&self) -> Vec<Waiting> {
        std::mem::take(&mut self.lock().waiting)
    }

    /// Gives the destination to a session that waited.
    pub(super) fn begin(&self, session: SessionId, secret: Secret, bulk: u16, urgent: u16) {
        let mut admission = Admission::new();
        // The control channel that opened the session.
        let _ = admission.admit(ChannelKey::control(1));
        admission.announce(bulk, urgent);
        let mut state = self.lock();
        state.active = Some(Active {
            session,
            secret,
            admission,
        });
    }

    /// Asks the supervisor of the session that has the destination to end it.
    pub(super) fn give_up(&self) {
        // `end` takes the lock before it forgets the letters, so none is left for a later session.
        let state = self.lock();
        if state.active.is_some() {
            self.letters.post(Letter::GiveUp);
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
        let state = self.lock();
        match &state.active {
            Some(active) if active.session == hello.session => {
                active.admission.check(hello.key)?;
                Ok(Expected::Known(active.secret.clone()))
            }
            _ if !opens => Err(Status::UnknownSession),
            None if state.waiting.len() < MAX_WAITING => Ok(Expected::New),
            _ => Err(Status::Busy),
        }
    }

    fn accepted(&self, arrival: Arrival) -> Result<(), Box<(Arrival, Status)>> {
        let agreed = *arrival.agreed();
        let mut state = self.lock();
        if agreed.key.opens_session() {
            if state.active.is_some() || state.waiting.len() >= MAX_WAITING {
                return Err(arrival.refused(Status::Busy));
            }
            let secret = arrival.secret().clone();
            // A source that is gone already needs no place.
            if let Ok(connection) = arrival.welcome() {
                state.waiting.push(Waiting {
                    session: agreed.session,
                    secret,
                    connection,
                    since: Instant::now(),
                });
                self.arrivals.ring();
            }
            return Ok(());
        }
        let Some(active) = &mut state.active else {
            return Err(arrival.refused(Status::UnknownSession));
        };
        if active.session != agreed.session {
            return Err(arrival.refused(Status::UnknownSession));
        }
        if let Err(status) = active.admission.admit(agreed.key) {
            return Err(arrival.refused(status));
        }
        // Letters keep their order: a control channel comes before the others of its generation.
        // If the source is gone, it opens the next generation, or another incarnation, by itself.
        if let Ok(connection) = arrival.welcome() {
            self.letters.post(Letter::Arrived(agreed.key, connection));
        }
        Ok(())
    }

    fn stranger(&self, stranger: &Stranger) {
        tracing::info!(peer = %stranger.peer, why = %stranger.why, "refused a stranger");
        (self.on_stranger)(stranger);
    }

    fn cannot_accept(&self, error: &OpenError) {
        (self.on_stranger)(&Stranger {
            peer: "this host".into(),
            why: StrangerError::NotAccepted(error.to_string()),
        });
    }
}
