//! The destination's side of the handshake: one thread that serves all pending connections.

use rustix::event::{PollFd, PollFlags};
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::pending::{Answer, Challenge, Granted, PendingPeer, Progress, Standing};
use super::secret::{Transcript, random_bytes};
use super::{
    Agreed, Arrival, Expected, HELLO_LIMIT, Protection, Router, Secret, StrangerError,
    place_to_take,
};
use crate::address::Address;
use crate::bell::Bell;
use crate::channel::{Connection, Listener};
use crate::nap::sleep_on;
use crate::wire::{Credentials, Hello, HelloReply, Side, Status, Welcome};

/// The most pending connections. One more takes the place of another.
const MAX_PENDING: usize = 96;
/// The most connections that are accepted before the bytes of all are read. They are fewer than a
/// new one outlives, so the preamble of a source that sends it at once is always read.
const AT_A_TIME: usize = MAX_PENDING / 16;
/// The longest wait at the end for peers that were refused to read why.
const PARTING: Duration = Duration::from_millis(200);
/// The pause before the next accept(2) after one failed.
const RETRY: Duration = Duration::from_millis(100);

/// Accepts connections in a thread of its own until it is dropped. [`Router`] decides about them.
#[derive(Debug)]
pub struct Acceptor {
    shared: Arc<AcceptorState>,
    thread: Option<JoinHandle<()>>,
}

/// The orders of the owner to the thread.
#[derive(Debug)]
struct AcceptorState {
    orders: Mutex<Orders>,
    /// Wakes the thread.
    wake: Bell,
}

#[derive(Debug)]
struct Orders {
    listeners: Vec<Arc<Listener>>,
    protection: Protection,
    /// Connections to close once their peers have read the last message.
    parting: Vec<Connection>,
    stop: bool,
}

impl Acceptor {
    /// Starts the thread.
    ///
    /// # Errors
    /// The kernel's error if no descriptor or no thread is left.
    pub fn start(
        listener: Listener,
        protection: Protection,
        router: Arc<dyn Router>,
    ) -> io::Result<Self> {
        Self::start_with_limit(listener, protection, router, HELLO_LIMIT)
    }

    /// Like [`start`](Self::start), with another limit for preambles than [`HELLO_LIMIT`].
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_with_limit(
        listener: Listener,
        protection: Protection,
        router: Arc<dyn Router>,
        limit: Duration,
    ) -> io::Result<Self> {
        let shared = Arc::new(AcceptorState {
            orders: Mutex::new(Orders {
                listeners: vec![Arc::new(listener)],
                protection,
                parting: Vec::new(),
                stop: false,
            }),
            wake: Bell::new()?,
        });
        let worker = Worker {
            shared: shared.clone(),
            router,
            limit,
            pending: Vec::with_capacity(MAX_PENDING),
            retry_at: None,
        };
        let thread = std::thread::Builder::new()
            .name("acceptor".into())
            .spawn(move || worker.run())?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Accepts connections of one more listener.
    pub fn listen_also(&self, listener: Listener) {
        self.shared.orders().listeners.push(Arc::new(listener));
        self.shared.wake.ring();
    }

    /// Protects later connections in another way, for example with renewed certificates.
    pub fn set_protection(&self, protection: Protection) {
        self.shared.orders().protection = protection;
    }

    /// Closes connections whose last message was sent. Each stays until its peer has closed it, for
    /// a limited time: closing with unread bytes would drop the message. The caller waits for none.
    pub fn part(&self, connections: impl IntoIterator<Item = Connection>) {
        self.shared.orders().parting.extend(connections);
        self.shared.wake.ring();
    }

    /// The addresses on which it listens.
    #[must_use]
    pub fn local_addrs(&self) -> Vec<Address> {
        let orders = self.shared.orders();
        let addresses = orders.listeners.iter();
        addresses.map(|one| one.local_addr().clone()).collect()
    }
}

/// Ends the thread and closes its listeners and pending connections. In the thread itself, as in a
/// method of [`Router`], it only asks the thread to end.
impl Drop for Acceptor {
    fn drop(&mut self) {
        self.shared.orders().stop = true;
        self.shared.wake.ring();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // The thread's own panic message was printed already.
            let _ = thread.join();
        }
    }
}

impl AcceptorState {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The state of the thread.
struct Worker {
    shared: Arc<AcceptorState>,
    router: Arc<dyn Router>,
    limit: Duration,
    /// In the order in which they connected.
    pending: Vec<PendingPeer>,
    /// The time of the next accept(2), after one failed.
    retry_at: Option<Instant>,
}

impl Worker {
    fn run(mut self) {
        loop {
            let listeners = self.shared.orders().listeners.clone();
            self.sleep(&listeners);
            self.shared.wake.hush();
            // Read after the sleep: an order that was given before a connection applies to it.
            let protection = {
                let mut orders = self.shared.orders();
                let parting = core::mem::take(&mut orders.parting);
                let (protection, stop) = (orders.protection.clone(), orders.stop);
                drop(orders);
                for connection in parting {
                    self.take(PendingPeer::parting(connection));
                }
                if stop {
                    return self.finish(&protection);
                }
                protection
            };
            self.accept_from(&listeners);
            self.advance_all(&protection);
        }
    }

    /// Sleeps until a descriptor is ready or the time of a pending connection is over.
    fn sleep(&self, listeners: &[Arc<Listener>]) {
        let now = Instant::now();
        let listeners = match self.retry_at {
            Some(at) if at > now => &[],
            _ => listeners,
        };
        let input = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds: Vec<PollFd<'_>> = std::iter::once(input(self.shared.wake.as_fd()))
            .chain(listeners.iter().map(|one| input(one.as_fd())))
            .chain(
                self.pending
                    .iter()
                    .map(|peer| PollFd::from_borrowed_fd(peer.connection.as_fd(), peer.events())),
            )
            .collect();
        let ends = self.pending.iter().map(|peer| peer.since + self.limit);
        let next = ends.chain(self.retry_at).min();
        // The longest has no end.
        let pause = next.map_or(Duration::MAX, |next| next.saturating_duration_since(now));
        sleep_on(&mut fds, pause);
    }

    fn accept_from(&mut self, listeners: &[Arc<Listener>]) {
        let now = Instant::now();
        if self.retry_at.is_some_and(|at| at > now) {
            return;
        }
        for listener in listeners {
            for _ in 0..AT_A_TIME {
                match listener.try_accept() {
                    Ok(None) => break,
                    Ok(Some(connection)) => {
                        self.retry_at = None;
                        self.take(PendingPeer::new(connection));
                    }
                    Err(error) => {
                        if self.retry_at.is_none() {
                            self.router.cannot_accept(&error);
                        }
                        self.retry_at = Some(now + RETRY);
                        return;
                    }
                }
            }
        }
        self.retry_at = None;
    }

    /// Takes one more connection. If there are too many, one makes room, as [`in_the_way`] says.
    fn take(&mut self, peer: PendingPeer) {
        let whose = if self.pending.len() < MAX_PENDING {
            None
        } else if let Some(at) = in_the_way(&self.pending) {
            Some(self.pending.remove(at))
        } else {
            return self.crowded(&peer);
        };
        self.pending.push(peer);
        if let Some(dropped) = whose {
            self.crowded(&dropped);
        }
    }

    fn crowded(&self, peer: &PendingPeer) {
        if peer.standing() > Standing::Refused {
            self.router.stranger(peer.stranger(StrangerError::Crowded));
        }
    }

    /// Gives peers that were refused a little time to read why.
    fn finish(&mut self, protection: &Protection) {
        self.pending.retain(PendingPeer::is_refused);
        let until = Instant::now() + PARTING;
        while !self.pending.is_empty() && Instant::now() < until {
            self.advance_all(protection);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn advance_all(&mut self, protection: &Protection) {
        for mut peer in core::mem::take(&mut self.pending) {
            while let Some(kept) = self.advance(peer, protection) {
                peer = match kept {
                    Kept::Waiting(peer) => {
                        self.pending.push(peer);
                        break;
                    }
                    Kept::Again(peer) => peer,
                };
            }
        }
    }

    /// Takes a step of `peer`. Returns it unless it is gone.
    fn advance(&self, mut peer: PendingPeer, protection: &Protection) -> Option<Kept> {
        match peer.advance(protection) {
            Progress::Waiting
                if peer.since.elapsed() >= self.limit && peer.lacks_large_packets() =>
            {
                let why = StrangerError::LargePacketsLost;
                self.router.stranger(peer.stranger(why));
                // It is small, so it arrives.
                peer.refuse(&Welcome::refuse(Status::LargePacketsLost).encode());
                Some(Kept::Waiting(peer))
            }
            Progress::Waiting if peer.since.elapsed() >= self.limit => {
                if !peer.is_refused() {
                    let why = StrangerError::Silent { after: self.limit };
                    self.router.stranger(peer.stranger(why));
                }
                None
            }
            Progress::Waiting => Some(Kept::Waiting(peer)),
            Progress::Ended => None,
            Progress::Rejected(why, answer) => {
                self.router.stranger(peer.stranger(why));
                match answer {
                    Answer::Nothing => return None,
                    Answer::Alert => peer.refuse(&[]),
                    Answer::Reply(reply) => peer.refuse(&reply.encode()),
                }
                Some(Kept::Waiting(peer))
            }
            Progress::Hello(hello) => self.handle_hello(peer, hello),
            Progress::Credentials(challenge, credentials) => {
                Some(self.handle_credentials(peer, *challenge, &credentials))
            }
            Progress::Granted(granted) => self.admit(peer, *granted),
        }
    }

    /// Sends a challenge, or a refusal.
    fn handle_hello(&self, mut peer: PendingPeer, hello: Hello) -> Option<Kept> {
        let expected = match self.router.route(&hello, hello.key.opens_session()) {
            Ok(expected) => expected,
            Err(status) => {
                let refusal = HelloReply::refuse(hello.session, status).encode();
                return Some(self.refuse(peer, &refusal, status));
            }
        };
        let nonce = match random_bytes() {
            Ok(nonce) => nonce,
            Err(error) => {
                let why = StrangerError::NoRandom(error);
                self.router.stranger(peer.stranger(why));
                return None;
            }
        };
        let reply = HelloReply::accept(&hello, nonce);
        let sent = peer
            .connection
            .exporter()
            .map_err(Into::into)
            .and_then(|exporter| {
                let transcript = Transcript {
                    hello: peer.hello_bytes(),
                    reply: reply.encode(),
                    exporter,
                };
                peer.challenge(Challenge {
                    hello,
                    reply,
                    transcript,
                    expected,
                })
            });
        match sent {
            Ok(()) => Some(Kept::Again(peer)),
            Err(error) => {
                self.router.stranger(peer.stranger(error.into()));
                None
            }
        }
    }

    /// Checks the proof, and awaits large packets.
    fn handle_credentials(
        &self,
        mut peer: PendingPeer,
        challenge: Challenge,
        credentials: &Credentials,
    ) -> Kept {
        let secret = match (challenge.expected, credentials.secret) {
            (Expected::New, Some(secret)) => Secret::of_bytes(secret),
            (Expected::Known(secret), None) => secret,
            _ => return self.refuse_last(peer, Status::Malformed),
        };
        let transcript = &challenge.transcript;
        if !secret.verify(Side::Source, transcript, &credentials.proof) {
            return self.refuse_last(peer, Status::BadProof);
        }
        let proof = secret.prove(Side::Destination, transcript);
        peer.await_path_check(Granted {
            agreed: Agreed {
                version: challenge.reply.version,
                capabilities: challenge.reply.capabilities,
                session: challenge.hello.session,
                key: challenge.hello.key,
            },
            secret,
            welcome: Welcome::accept(proof).encode(),
        });
        Kept::Again(peer)
    }

    /// Lets the router decide.
    fn admit(&self, peer: PendingPeer, granted: Granted) -> Option<Kept> {
        let since = peer.since;
        let arrival = Arrival {
            connection: peer.connection,
            agreed: granted.agreed,
            secret: granted.secret,
            welcome: granted.welcome,
        };
        let (arrival, status) = *self.router.accepted(arrival).err()?;
        let mut peer = PendingPeer::new(arrival.connection);
        peer.since = since;
        Some(self.refuse_last(peer, status))
    }

    fn refuse_last(&self, peer: PendingPeer, status: Status) -> Kept {
        self.refuse(peer, &Welcome::refuse(status).encode(), status)
    }

    fn refuse(&self, mut peer: PendingPeer, message: &[u8], status: Status) -> Kept {
        let why = StrangerError::Refused(status);
        self.router.stranger(peer.stranger(why));
        peer.refuse(message);
        Kept::Waiting(peer)
    }
}

/// Returns the connection that makes room: a refused one, or else one that [`crowd`] chooses. It
/// chooses among those of the least [`Standing`] that are half of the places together. So a peer
/// that gets on is safe from a flood of others that do not, and a new one has time to get on. Peers
/// that are known make room for nobody.
///
/// [`crowd`]: super::crowd
fn in_the_way(pending: &[PendingPeer]) -> Option<usize> {
    let of = |most: Standing| {
        let these = pending.iter().enumerate();
        let these = these.filter(move |(_, peer)| peer.standing() <= most);
        these.map(|(at, peer)| (at, peer.connection.origin()))
    };
    if let Some((at, _)) = of(Standing::Refused).next() {
        return Some(at);
    }
    let mut those = Vec::new();
    for most in [Standing::Silent, Standing::Speaking, Standing::Greeted] {
        those = of(most).collect();
        if those.len() >= MAX_PENDING / 2 {
            break;
        }
    }
    place_to_take(&those)
}

/// A pending connection after a step.
enum Kept {
    /// It needs more bytes.
    Waiting(PendingPeer),
    /// More bytes may have arrived already.
    Again(PendingPeer),
}
