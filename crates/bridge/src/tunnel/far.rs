//! The end that connects to VMMs.

use super::session::{Board, Letter, Place, Routes, Session};
use super::status::{Event, Observer, SessionState, StartError};
use super::{Config, Letters, MAX_CHANNELS, Route, Threads};
use pageferry_migration::{Listener, Role, Status};
use pageferry_transport::address::Address;
use pageferry_transport::channel::{OpenError, Origin};
use pageferry_transport::handshake::{
    Acceptor, Arrival, Expected, Router, Secret, Stranger, StrangerError,
};
use pageferry_transport::wire::{ChannelKey, Hello, SessionId};
use pageferry_transport::{Mailbox, Quota};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The most sessions at once, and of them those of one host. Each has a thread.
const MAX_SESSIONS: usize = 256;
const MAX_SESSIONS_OF_ONE: usize = 48;
/// The most connections of the sessions of one host.
const MAX_CONNECTIONS_OF_ONE: usize = 96;

/// The far end of a tunnel: it accepts near ends, and connects to the VMM of each route.
pub struct Far {
    /// Dropped first: then no more connections come.
    acceptor: Option<Acceptor>,
    desk: Arc<Desk>,
    address: Address,
}

struct Desk {
    config: Arc<Config>,
    routes: Arc<Routes>,
    observer: Arc<dyn Observer>,
    closed: AtomicBool,
    sessions: Mutex<HashMap<SessionId, Known>>,
    threads: Threads,
    /// How often strangers are told.
    quota: Quota,
}

/// A session that is under way.
struct Known {
    origin: Origin,
    secret: Secret,
    letters: Letters,
    board: Board,
    /// The last connection of each place.
    incarnations: HashMap<u16, u32>,
}

impl Far {
    /// Accepts near ends at `listener`. Streams of a route go to its address.
    ///
    /// # Errors
    /// When the certificates do not serve, or the host has no room for a thread.
    pub fn listen(
        listener: Listener,
        routes: &[Route],
        config: Config,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        let address = listener.local_addr().clone();
        let protection = config.protection()?;
        let desk = Arc::new(Desk {
            config: Arc::new(config),
            routes: Arc::new(Mutex::new(routes.to_vec())),
            observer,
            closed: AtomicBool::new(false),
            sessions: Mutex::default(),
            threads: Threads::default(),
            quota: Quota::new(),
        });
        let gate = Arc::new(Gate(Arc::clone(&desk)));
        let acceptor = Acceptor::start(listener, protection, gate)?;
        Ok(Self {
            acceptor: Some(acceptor),
            desk,
            address,
        })
    }

    /// The address on which it listens for near ends.
    #[must_use]
    pub const fn address(&self) -> &Address {
        &self.address
    }

    /// The addresses of VMMs, in the order of the routes.
    #[must_use]
    pub fn addresses(&self) -> Vec<Address> {
        let routes = self.desk.routes.lock();
        let routes = routes.unwrap_or_else(PoisonError::into_inner);
        routes.iter().map(|route| route.address.clone()).collect()
    }

    /// Connects streams by these routes from now on. Those that are open stay.
    pub fn set_routes(&self, routes: &[Route]) {
        let known = self.desk.routes.lock();
        *known.unwrap_or_else(PoisonError::into_inner) = routes.to_vec();
    }

    /// The sessions that are under way.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionState> {
        let sessions = self.desk.sessions();
        sessions
            .values()
            .map(|known| super::read(&known.board))
            .collect()
    }

    /// Begins no more sessions. Those that are under way go on, also over new connections.
    pub fn close(&self) {
        self.desk.closed.store(true, Ordering::Relaxed);
    }

    /// Cuts the streams of the sessions that `which` chooses.
    pub fn cancel(&self, force: bool, which: impl Fn(&SessionState) -> bool) {
        for known in self.desk.sessions().values() {
            if which(&super::read(&known.board)) {
                known.letters.post(Letter::Cancel { force });
            }
        }
    }

    /// Reads the certificates again, for connections from now on.
    ///
    /// # Errors
    /// When they do not serve. Those of before stay.
    pub fn read_certificates(&self) -> Result<(), StartError> {
        if let Some(acceptor) = &self.acceptor {
            acceptor.set_protection(self.desk.config.protection()?);
        }
        Ok(())
    }
}

impl Drop for Far {
    /// Cuts what is under way.
    fn drop(&mut self) {
        self.close();
        self.acceptor = None;
        self.cancel(true, |_| true);
        self.desk.threads.join();
    }
}

impl std::fmt::Debug for Far {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = f.debug_struct("Far");
        text.field("address", &self.address);
        text.field("sessions", &self.sessions())
            .finish_non_exhaustive()
    }
}

/// Sessions need a hold on the desk of their own.
struct Gate(Arc<Desk>);

impl Known {
    fn check(&self, key: ChannelKey, channels: u16) -> Result<(), Status> {
        if key.index > channels {
            return Err(Status::TooManyChannels);
        }
        match self.incarnations.get(&key.index) {
            Some(last) if key.incarnation < *last => Err(Status::OldGeneration),
            Some(last) if key.incarnation == *last => Err(Status::ChannelTaken),
            _ => Ok(()),
        }
    }
}

impl Desk {
    fn sessions(&self) -> MutexGuard<'_, HashMap<SessionId, Known>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_new(&self, sessions: &HashMap<SessionId, Known>) -> Result<(), Status> {
        let full = sessions.len() >= MAX_SESSIONS || self.closed.load(Ordering::Relaxed);
        if full { Err(Status::Busy) } else { Ok(()) }
    }

    /// Begins the session of an arrival, in a thread of its own.
    fn begin(self: &Arc<Self>, arrival: &Arrival) -> std::io::Result<Known> {
        let id = arrival.agreed().session;
        let letters: Letters = Arc::new(Mailbox::new().map_err(std::io::Error::other)?);
        let route = "unknown".parse().map_err(std::io::Error::other)?;
        let board = super::new_board(route, id.to_string());
        let known = Known {
            origin: arrival.origin(),
            secret: arrival.secret().clone(),
            letters: Arc::clone(&letters),
            board: Arc::clone(&board),
            incarnations: HashMap::new(),
        };
        let place = Place::Far {
            routes: Arc::clone(&self.routes),
            connected: 0,
        };
        let observer = Arc::clone(&self.observer);
        let session = Session::new(Arc::clone(&self.config), place, letters, board, observer);
        let desk = Arc::clone(self);
        let work = move || {
            session.run(Vec::new());
            desk.sessions().remove(&id);
        };
        self.threads.spawn("session", work)?;
        Ok(known)
    }
}

impl Router for Gate {
    fn route(&self, hello: &Hello, opens: bool) -> Result<Expected, Status> {
        if hello.key.role != Role::Tunnel {
            return Err(Status::BadRole);
        }
        let sessions = self.0.sessions();
        match sessions.get(&hello.session) {
            Some(known) => {
                known.check(hello.key, MAX_CHANNELS)?;
                Ok(Expected::Known(known.secret.clone()))
            }
            None if opens => {
                self.0.check_new(&sessions)?;
                Ok(Expected::New)
            }
            None => Err(Status::UnknownSession),
        }
    }

    fn accepted(&self, arrival: Arrival) -> Result<(), Box<(Arrival, Status)>> {
        let agreed = *arrival.agreed();
        let mut sessions = self.0.sessions();
        let origin = arrival.origin();
        let theirs = sessions.values().filter(|known| known.origin == origin);
        let connections: usize = theirs.clone().map(|known| known.incarnations.len()).sum();
        let known = sessions.get(&agreed.session);
        let is_new = known.is_none_or(|known| !known.incarnations.contains_key(&agreed.key.index));
        if is_new && connections >= MAX_CONNECTIONS_OF_ONE {
            return Err(arrival.refused(Status::Busy));
        }
        if !sessions.contains_key(&agreed.session) {
            if !agreed.key.opens_session() {
                return Err(arrival.refused(Status::UnknownSession));
            }
            if let Err(status) = self.0.check_new(&sessions) {
                return Err(arrival.refused(status));
            }
            if theirs.clone().count() >= MAX_SESSIONS_OF_ONE {
                return Err(arrival.refused(Status::Busy));
            }
            match self.0.begin(&arrival) {
                Ok(known) => sessions.insert(agreed.session, known),
                Err(why) => {
                    tracing::warn!(%why, "a session cannot begin");
                    return Err(arrival.refused(Status::Busy));
                }
            };
        }
        let Some(known) = sessions.get_mut(&agreed.session) else {
            return Err(arrival.refused(Status::UnknownSession));
        };
        if let Err(status) = known.check(agreed.key, MAX_CHANNELS) {
            return Err(arrival.refused(status));
        }
        known
            .incarnations
            .insert(agreed.key.index, agreed.key.incarnation);
        // A near end that is gone dials again.
        if let Ok(connection) = arrival.welcome() {
            known
                .letters
                .post(Letter::Arrived(agreed.key.index, connection));
        }
        Ok(())
    }

    fn stranger(&self, mut stranger: Stranger) {
        if let StrangerError::Refused(Status::UnknownSession) = stranger.why {
            // A near end, whose last connection comes after the end, or which says it by itself.
            tracing::debug!(peer = stranger.peer, "its session is over here");
            return;
        }
        let Some(left_out) = self.0.quota.take() else {
            return;
        };
        stranger.left_out = left_out;
        let Stranger { peer, why, .. } = &stranger;
        let left_out = match left_out {
            0 => String::new(),
            more => format!(" ({more} more were not told)"),
        };
        let text = format!("{peer}: {why}{left_out}");
        self.0.observer.event(None, &Event::Stranger(text));
    }

    fn cannot_accept(&self, error: &OpenError) {
        self.0
            .observer
            .event(None, &Event::Stranger(error.to_string()));
    }
}
