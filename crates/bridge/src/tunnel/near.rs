//! The end to which VMMs connect.
//!
//! **Mechanism.** One thread waits at the listeners of all routes, however many. A session has a
//! thread of its own while it is under way. One that ends looks whether more streams have come
//! meanwhile, which are the next session's.

use super::dial::Dialler;
use super::session::{Board, Letter, Place, Session};
use super::status::{Observer, SessionState, StartError};
use super::{Config, Letters, Route, Threads};
use pageferry_hostfs::Owner;
use pageferry_transport::address::Address;
use pageferry_transport::{Bell, Connection, Listener, Mailbox, OpenError, sleep_on};
use rustix::event::{PollFd, PollFlags};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The pause after a stream that could not be accepted.
const RETRY: Duration = Duration::from_millis(50);
/// The interval at which the thread looks whether its sockets are still there.
const LOOK: Duration = Duration::from_secs(1);

/// The near end of a tunnel: a listener for each route, and one session at a time for each.
pub struct Near {
    shared: Arc<Shared>,
}

struct Shared {
    config: Arc<Config>,
    to: Address,
    observer: Arc<dyn Observer>,
    /// No session begins any more.
    closed: AtomicBool,
    /// The routes that there should be, and the addresses of those that there are.
    routes: Mutex<Vec<Route>>,
    addresses: Mutex<Vec<Address>>,
    /// Wakes the thread at the listeners.
    bell: Bell,
    sessions: Mutex<Vec<(Letters, Board)>>,
    threads: Threads,
}

/// A route at which VMMs connect.
struct Door {
    route: Route,
    listener: Option<Listener>,
    /// Whether it was told that nobody can connect.
    told: bool,
    letters: Letters,
}

impl Door {
    fn new(route: &Route) -> std::io::Result<Self> {
        Ok(Self {
            route: route.clone(),
            listener: None,
            told: false,
            letters: Arc::new(Mailbox::new()?),
        })
    }

    fn bind(&mut self, owner: &Owner) -> Result<(), OpenError> {
        self.listener = Some(Listener::bind_for(&self.route.address, owner)?);
        self.told = false;
        Ok(())
    }

    /// Binds it if VMMs do not find it. One that listens at the same path removes the socket.
    fn keep_open(&mut self, owner: &Owner) {
        let finds = self.listener.as_ref().is_some_and(Listener::is_in_place);
        if finds {
            return;
        }
        if let Err(why) = self.bind(owner)
            && !std::mem::replace(&mut self.told, true)
        {
            let address = &self.route.address;
            tracing::warn!(%why, "no VMM finds this tunnel at {address}");
        }
    }
}

impl Near {
    /// Listens for VMMs on the address of each route. A session carries the streams that a VMM
    /// opens there to the far end at `to`.
    ///
    /// # Errors
    /// When an address cannot be listened on, or the host has no room for the thread.
    pub fn listen(
        routes: &[Route],
        to: Address,
        config: Config,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        let mut doors = Vec::new();
        for route in routes {
            let mut door = Door::new(route)?;
            door.bind(&config.owner)?;
            doors.push(door);
        }
        let shared = Arc::new(Shared {
            config: Arc::new(config),
            to,
            observer,
            closed: AtomicBool::new(false),
            routes: Mutex::new(routes.to_vec()),
            addresses: Mutex::default(),
            bell: Bell::new()?,
            sessions: Mutex::default(),
            threads: Threads::default(),
        });
        shared.publish(&doors);
        let at_doors = Arc::clone(&shared);
        shared
            .threads
            .spawn("streams", move || at_doors.wait_at(doors))?;
        Ok(Self { shared })
    }

    /// The addresses on which it listens for VMMs, in the order of the routes.
    #[must_use]
    pub fn addresses(&self) -> Vec<Address> {
        locked(&self.shared.addresses).clone()
    }

    /// The address of the far end.
    #[must_use]
    pub fn to(&self) -> &Address {
        &self.shared.to
    }

    /// Listens at these routes from now on. A route that is not among them takes no new session:
    /// one that is under way goes on.
    pub fn set_routes(&self, routes: &[Route]) {
        *locked(&self.shared.routes) = routes.to_vec();
        self.shared.bell.ring();
    }

    /// The sessions that are under way.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionState> {
        let sessions = locked(&self.shared.sessions);
        sessions
            .iter()
            .map(|(_, board)| super::read(board))
            .collect()
    }

    /// Begins no more sessions. Those that are under way go on.
    pub fn close(&self) {
        self.shared.closed.store(true, Ordering::Relaxed);
        self.shared.bell.ring();
    }

    /// Cuts the streams of the sessions that `which` chooses. Those [in
    /// doubt](SessionState::in_doubt) go on, unless it is forced.
    pub fn cancel(&self, force: bool, which: impl Fn(&SessionState) -> bool) {
        for (letters, board) in locked(&self.shared.sessions).iter() {
            if which(&super::read(board)) {
                letters.post(Letter::Cancel { force });
            }
        }
    }
}

impl Drop for Near {
    /// Cuts what is under way.
    fn drop(&mut self) {
        self.close();
        self.cancel(true, |_| true);
        self.shared.threads.join();
    }
}

impl std::fmt::Debug for Near {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = f.debug_struct("Near");
        text.field("addresses", &self.addresses());
        text.field("sessions", &self.sessions())
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    fn publish(&self, doors: &[Door]) {
        let listeners = doors.iter().filter_map(|door| door.listener.as_ref());
        let addresses = listeners.map(|one| one.local_addr().clone()).collect();
        *locked(&self.addresses) = addresses;
    }

    /// Gives the streams that VMMs open to the sessions, in their order.
    fn wait_at(self: &Arc<Self>, mut doors: Vec<Door>) {
        let mut looked = Instant::now();
        loop {
            self.bell.hush();
            let routes = locked(&self.routes).clone();
            let is_new = |route: &&Route| doors.iter().all(|door| door.route != **route);
            let new: Vec<&Route> = routes.iter().filter(is_new).collect();
            if !new.is_empty() || looked.elapsed() >= LOOK {
                looked = Instant::now();
                // Without a descriptor it is tried again.
                doors.extend(new.into_iter().flat_map(Door::new));
                for door in &mut doors {
                    door.keep_open(&self.config.owner);
                }
            }
            // A session that is under way may get more streams.
            doors.retain(|door| {
                !self.is_closed() && routes.contains(&door.route) || self.is_served(&door.letters)
            });
            self.publish(&doors);
            if self.is_closed() && doors.is_empty() {
                return;
            }
            for at in self.sleep(&doors) {
                let door = &doors[at];
                match door.listener.as_ref().map(Listener::try_accept) {
                    Some(Ok(Some(connection))) => self.opened(door, connection),
                    Some(Ok(None)) | None => {}
                    Some(Err(why)) => {
                        tracing::warn!(%why, "a stream cannot be accepted");
                        std::thread::sleep(RETRY);
                    }
                }
            }
        }
    }

    /// Sleeps until something happens. Returns the places of doors at which a VMM waits.
    fn sleep(&self, doors: &[Door]) -> Vec<usize> {
        let input = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let open = doors.iter().enumerate();
        let open = open.filter_map(|(at, door)| Some((at, door.listener.as_ref()?)));
        let open: Vec<_> = open.collect();
        let mut fds: Vec<_> = open.iter().map(|(_, one)| input(one.as_fd())).collect();
        fds.push(input(self.bell.as_fd()));
        sleep_on(&mut fds, LOOK);
        let ready = fds.iter().map(|fd| !fd.revents().is_empty());
        let ready = open.iter().zip(ready).filter(|(_, ready)| *ready);
        ready.map(|((at, _), _)| *at).collect()
    }

    fn is_served(&self, letters: &Letters) -> bool {
        let sessions = locked(&self.sessions);
        sessions.iter().any(|one| Arc::ptr_eq(&one.0, letters))
    }

    /// A VMM has opened a stream: of the route's session, which it may begin.
    fn opened(self: &Arc<Self>, door: &Door, connection: Connection) {
        let mut sessions = locked(&self.sessions);
        let letters = &door.letters;
        if sessions.iter().any(|one| Arc::ptr_eq(&one.0, letters)) {
            return letters.post(Letter::Opened(connection));
        }
        if self.is_closed() {
            return;
        }
        let shared = Arc::clone(self);
        let (route, of_session) = (door.route.clone(), Arc::clone(letters));
        let board = super::new_board(route.name.clone(), String::new());
        sessions.push((Arc::clone(letters), Arc::clone(&board)));
        let work = move || shared.serve(&route, &of_session, board, connection);
        if let Err(why) = self.threads.spawn("session", work) {
            sessions.pop();
            tracing::warn!(%why, "a session cannot begin");
        }
    }

    /// Runs a session, and those of streams that came too late for the one before.
    fn serve(&self, route: &Route, letters: &Letters, mut board: Board, first: Connection) {
        let mut streams = vec![first];
        loop {
            let place = Place::Near {
                dialler: Dialler::new(&self.config, self.to.clone(), letters),
            };
            let (config, observer) = (Arc::clone(&self.config), Arc::clone(&self.observer));
            streams =
                Session::new(config, place, Arc::clone(letters), board, observer).run(streams);
            let mut sessions = locked(&self.sessions);
            // The other letters are of the session that is over.
            while let Some(letter) = letters.take() {
                if let Letter::Opened(connection) = letter {
                    streams.push(connection);
                }
            }
            sessions.retain(|one| !Arc::ptr_eq(&one.0, letters));
            if streams.is_empty() || self.is_closed() {
                self.bell.ring();
                return;
            }
            board = super::new_board(route.name.clone(), String::new());
            sessions.push((Arc::clone(letters), Arc::clone(&board)));
        }
    }
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
