//! The end to which VMMs connect.

use super::dial::Dialler;
use super::session::{Board, Letter, Place, Session};
use super::status::{Observer, SessionState, StartError};
use super::{Config, Letters, Route};
use pageferry_transport::address::Address;
use pageferry_transport::{Connection, Listener, Mailbox, sleep_on};
use rustix::event::{PollFd, PollFlags};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The interval at which threads look whether they should end.
const INTERVAL: Duration = Duration::from_millis(50);

/// The interval at which a listener looks whether its socket is still there.
const LOOK: Duration = Duration::from_secs(1);

/// The near end of a tunnel: a listener for each route, and one session at a time for each.
pub struct Near {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    addresses: Vec<Address>,
}

struct Shared {
    config: Arc<Config>,
    to: Address,
    observer: Arc<dyn Observer>,
    /// No session begins any more.
    closed: AtomicBool,
    sessions: Mutex<Vec<(Letters, Board)>>,
}

impl Near {
    /// Listens for VMMs on the address of each route. A session carries the streams that a VMM
    /// opens there to the far end at `to`.
    ///
    /// # Errors
    /// When an address cannot be listened on, or the host has no room for the threads.
    pub fn listen(
        routes: &[Route],
        to: Address,
        config: Config,
        observer: Arc<dyn Observer>,
    ) -> Result<Self, StartError> {
        let shared = Arc::new(Shared {
            config: Arc::new(config),
            to,
            observer,
            closed: AtomicBool::new(false),
            sessions: Mutex::default(),
        });
        let mut near = Self {
            shared,
            threads: Vec::new(),
            addresses: Vec::new(),
        };
        for route in routes {
            let listener = Listener::bind_for(&route.address, &near.shared.config.owner)?;
            near.addresses.push(listener.local_addr().clone());
            let letters: Letters = Arc::new(Mailbox::new().map_err(std::io::Error::other)?);
            let (shared, opened) = (Arc::clone(&near.shared), Arc::clone(&letters));
            let of_session = route.clone();
            let of_listener = route.address.clone();
            near.spawn("streams", move || {
                shared.accept(listener, &of_listener, &opened);
            })?;
            let shared = Arc::clone(&near.shared);
            near.spawn("session", move || shared.serve(&of_session, &letters))?;
        }
        Ok(near)
    }

    fn spawn(
        &mut self,
        name: &str,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<(), StartError> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(work);
        self.threads.push(thread?);
        Ok(())
    }

    /// The addresses on which it listens for VMMs, in the order of the routes.
    #[must_use]
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// The sessions that are under way.
    #[must_use]
    pub fn sessions(&self) -> Vec<SessionState> {
        let sessions = self.shared.sessions();
        sessions
            .iter()
            .map(|(_, board)| super::read(board))
            .collect()
    }

    /// Begins no more sessions. Those that are under way go on.
    pub fn close(&self) {
        self.shared.closed.store(true, Ordering::Relaxed);
    }

    /// Cuts the streams of all sessions.
    pub fn cancel(&self) {
        for (letters, _) in self.shared.sessions().iter() {
            letters.post(Letter::Cancel);
        }
    }
}

impl Drop for Near {
    /// Cuts what is under way.
    fn drop(&mut self) {
        self.close();
        self.cancel();
        for thread in self.threads.drain(..) {
            // Its panic message was printed already.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Near {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = f.debug_struct("Near");
        text.field("addresses", &self.addresses);
        text.field("sessions", &self.sessions())
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn sessions(&self) -> std::sync::MutexGuard<'_, Vec<(Letters, Board)>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Gives the streams that VMMs open to the session, in their order.
    fn accept(&self, mut listener: Listener, address: &Address, letters: &Letters) {
        let mut looked = Instant::now();
        let mut told = false;
        // A session that is under way may get more streams.
        while !self.is_closed() || self.is_served(letters) {
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                if !listener.is_in_place() {
                    // A VMM that listens at the same path has removed it.
                    match Listener::bind_for(address, &self.config.owner) {
                        Ok(anew) => (listener, told) = (anew, false),
                        Err(why) if !told => {
                            told = true;
                            tracing::warn!(%why, "no VMM finds this tunnel at {address}");
                        }
                        Err(_) => {}
                    }
                }
            }
            let mut fds = [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
            sleep_on(&mut fds, INTERVAL);
            match listener.try_accept() {
                Ok(Some(connection)) => letters.post(Letter::Opened(connection)),
                Ok(None) => {}
                Err(why) => {
                    tracing::warn!(%why, "a stream cannot be accepted");
                    std::thread::sleep(INTERVAL);
                }
            }
        }
    }

    fn is_served(&self, letters: &Letters) -> bool {
        let sessions = self.sessions();
        sessions
            .iter()
            .any(|(served, _)| Arc::ptr_eq(served, letters))
    }

    /// Runs one session after the other.
    fn serve(&self, route: &Route, letters: &Letters) {
        let mut late: Vec<Connection> = Vec::new();
        while !self.is_closed() {
            if late.is_empty() {
                let mut fds = [PollFd::from_borrowed_fd(letters.as_fd(), PollFlags::IN)];
                sleep_on(&mut fds, INTERVAL);
                match letters.take() {
                    Some(Letter::Opened(connection)) => late.push(connection),
                    // Of a session that is over.
                    Some(_) | None => continue,
                }
            }
            let dialler = Dialler::new(&self.config, self.to.clone(), letters);
            let board = super::new_board(route.name.clone(), String::new());
            self.sessions()
                .push((Arc::clone(letters), Arc::clone(&board)));
            let session = Session::new(
                Arc::clone(&self.config),
                Place::Near { dialler },
                Arc::clone(letters),
                board,
                Arc::clone(&self.observer),
            );
            late = session.run(late);
            self.sessions()
                .retain(|(served, _)| !Arc::ptr_eq(served, letters));
        }
    }
}
