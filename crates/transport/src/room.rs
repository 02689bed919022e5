//! A bounded number of clients that are served by a thread each.
//!
//! **Guarantee.** There are at most so many clients, and so many of one host. A client that does
//! nothing makes room for a new one. No client takes the place of one whose request is served.
//!
//! **Mechanism.** A client is idle from its last answer on, or from its beginning. If there is no
//! room, the one that has been idle for the longest time loses its connection, unless that time is
//! shorter than [`MIN_IDLE`]: it may be about to send a request.
//!
//! **Neighbours.** One thread at a time admits clients: an [`Acceptor`](crate::handshake::Acceptor)
//! or a loop around [`Listener::accept`](crate::Listener::accept).

use crate::channel::{Connection, Origin};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A client that has been idle for this long may lose its place.
pub const MIN_IDLE: Duration = Duration::from_millis(50);

/// The places of clients. Dropping it ends those that are idle, and waits for the others.
#[derive(Debug)]
pub struct Room {
    name: &'static str,
    places: usize,
    of_one: usize,
    guests: Mutex<Vec<(Arc<Guest>, JoinHandle<()>)>>,
}

/// A client in a [`Room`].
#[derive(Debug)]
pub struct Guest {
    connection: Arc<Connection>,
    /// The start of its idle time; `None` while a request is served.
    idle: Mutex<Option<Instant>>,
}

impl Guest {
    /// Its connection.
    #[must_use]
    pub const fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }

    /// A request is served from now on.
    pub fn busy(&self) {
        *self.lock() = None;
    }

    /// The next request is awaited from now on.
    pub fn idle(&self) {
        *self.lock() = Some(Instant::now());
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connection if the client is idle.
    fn end(&self) -> bool {
        // The lock is held: no request begins meanwhile.
        let since = self.lock();
        if since.is_some() {
            self.connection.shutdown();
        }
        since.is_some()
    }
}

impl Room {
    /// A room of `places`, of which one host has at most `of_one`. `name` is that of its threads.
    #[must_use]
    pub fn new(name: &'static str, places: usize, of_one: usize) -> Self {
        Self {
            name,
            places,
            of_one,
            guests: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Arc<Guest>, JoinHandle<()>)>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for a client of this host. Returns how long it takes until there may be some:
    /// `None` if there is room, zero if nobody knows.
    pub fn make_room(&self, origin: Origin) -> Option<Duration> {
        let mut guests = self.lock();
        guests.retain(|(_, thread)| !thread.is_finished());
        let same = |guest: &Guest| guest.connection.origin() == origin;
        let theirs = guests.iter().filter(|(guest, _)| same(guest)).count();
        let crowds_itself = theirs >= self.of_one;
        if guests.len() < self.places && !crowds_itself {
            return None;
        }
        let longest = guests
            .iter()
            .enumerate()
            .filter(|(_, (guest, _))| !crowds_itself || same(guest))
            .filter_map(|(at, (guest, _))| Some((at, (*guest.lock())?)))
            .min_by_key(|(_, since)| *since);
        let Some((at, since)) = longest else {
            return Some(Duration::ZERO);
        };
        let early = MIN_IDLE.saturating_sub(since.elapsed());
        if !early.is_zero() {
            return Some(early);
        }
        if !guests[at].0.end() {
            return Some(Duration::ZERO);
        }
        let (_, thread) = guests.swap_remove(at);
        drop(guests);
        // Its own panic message was printed already.
        let _ = thread.join();
        None
    }

    /// As [`Self::make_room`], and waits for a client that has just come. Returns whether there is
    /// room.
    pub fn wait_for_room(&self, origin: Origin) -> bool {
        match self.make_room(origin) {
            None => true,
            Some(early) => {
                std::thread::sleep(early);
                !early.is_zero() && self.make_room(origin).is_none()
            }
        }
    }

    /// Serves a client on a thread of its own. Its connection ends with `work`.
    ///
    /// # Errors
    /// When the host has no room for a thread.
    pub fn serve(
        &self,
        connection: Connection,
        work: impl FnOnce(&Guest) + Send + 'static,
    ) -> io::Result<()> {
        let guest = Arc::new(Guest {
            connection: Arc::new(connection),
            idle: Mutex::new(Some(Instant::now())),
        });
        let ours = Arc::clone(&guest);
        let thread = std::thread::Builder::new().name(self.name.into());
        let thread = thread.spawn(move || {
            work(&ours);
            // The room has it too, until it looks the next time.
            ours.connection.shutdown();
        })?;
        self.lock().push((guest, thread));
        Ok(())
    }

    /// Ends the connections of all clients, also of those that are served.
    pub fn cut(&self) {
        for (guest, _) in self.lock().iter() {
            guest.connection.shutdown();
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        for (guest, thread) in std::mem::take(&mut *self.lock()) {
            guest.end();
            // As above.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::Wait;

    /// Serves requests of a byte until the client leaves.
    fn echo(guest: &Guest) {
        let mut byte = [0];
        while guest
            .connection()
            .read_exact(&mut byte, &Wait::block("byte"))
            .is_ok()
        {
            guest.busy();
            let answered = guest.connection().write_all(&byte, &Wait::block("byte"));
            guest.idle();
            if answered.is_err() {
                return;
            }
        }
    }

    fn come(room: &Room) -> Option<Connection> {
        let (ours, theirs) = Connection::pair().unwrap();
        room.wait_for_room(ours.origin()).then(|| {
            room.serve(ours, echo).unwrap();
            theirs
        })
    }

    fn is_served(client: &Connection) -> bool {
        let limit = Wait::block("byte").within(Duration::from_secs(60));
        client.write_all(b"x", &limit).is_ok() && client.read_exact(&mut [0], &limit).is_ok()
    }

    #[test]
    fn the_client_that_is_idle_for_the_longest_time_makes_room() {
        let room = Room::new("client", 3, 3);
        let clients: Vec<_> = (0..3).map(|_| come(&room).unwrap()).collect();
        assert!(is_served(&clients[0]));
        std::thread::sleep(MIN_IDLE);
        let fourth = come(&room).unwrap();
        assert!(!is_served(&clients[1]), "it was idle since it came");
        for client in [&clients[0], &clients[2], &fourth] {
            assert!(is_served(client));
        }
    }

    #[test]
    fn nobody_takes_the_place_of_a_request() {
        let room = Room::new("client", 1, 1);
        let (ours, theirs) = Connection::pair().unwrap();
        let (begun, begins) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        room.serve(ours, move |guest| {
            guest.busy();
            begun.send(()).unwrap();
            // An error is the end of the test.
            let _ = ends.recv();
        })
        .unwrap();
        begins.recv().unwrap();
        assert!(come(&room).is_none());
        drop(end);
        drop(theirs);
        pageferry_testkit::wait_until("the place", || come(&room).is_some());
    }

    #[test]
    fn one_host_takes_no_places_of_others() {
        let room = Room::new("client", 4, 2);
        let clients: Vec<_> = (0..4).filter_map(|_| come(&room)).collect();
        assert_eq!(clients.len(), 4, "each took the place of an earlier one");
        assert_eq!(room.lock().len(), 2);
        let other = Origin::new(Some("192.0.2.1".parse().unwrap()));
        assert_eq!(room.make_room(other), None);
        assert_eq!(room.lock().len(), 2, "there are places left");
    }
}
