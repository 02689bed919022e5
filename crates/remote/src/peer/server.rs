//! The server of files.
//!
//! **Guarantee.** Connections, threads and memory are bounded. Peers that have not proved who they
//! are cannot keep out those that can: the oldest of them is dropped for a newer one.
//!
//! **Mechanism.** A thread accepts, and each connection has a thread of its own. So a peer that
//! reads slowly delays no other.

use super::answer::{Awaits, Limited, answer, greet};
use super::error::PeerError;
use super::link::{Link, Protection};
use super::shares::Shares;
use crate::locked;
use pageferry_transport::tls::{TlsConfig, TlsError};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time after which the files of certificates are read again.
const RENEW: Duration = Duration::from_secs(60);
/// The longest wait for the connections' threads at the end.
const LEAVE: Duration = Duration::from_secs(5);
/// The interval of lines about peers that were turned away.
const TELL: Duration = Duration::from_secs(1);

/// What peers may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// All connections. Each has a thread, and up to 1 MiB during a read.
    pub connections: usize,
    /// Those from one address.
    pub per_address: usize,
    /// Those that have not proved yet who they are.
    pub strangers: usize,
    /// The time for that proof.
    pub greeting: Duration,
    /// The time between two requests.
    pub idle: Duration,
    /// The time in which a peer sends a request and takes its reply.
    pub exchange: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 512,
            per_address: 256,
            strangers: 64,
            greeting: Duration::from_secs(5),
            idle: Duration::from_secs(60),
            exchange: Duration::from_secs(30),
        }
    }
}

/// The server cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The certificates do not serve.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Without TLS, only this host is served.
    #[error(
        "listening at {0} without certificates would share memory with other hosts unprotected: \
         give certificates, or allow that"
    )]
    Plain(SocketAddr),
    /// The host has no descriptor or thread left.
    #[error("cannot serve: {0}")]
    Host(#[from] io::Error),
}

/// Shares files until it is dropped.
#[derive(Debug)]
pub struct Server {
    inner: Arc<Inner>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Inner {
    shares: Shares,
    protection: Protection,
    limits: Limits,
    tls: Mutex<(Option<TlsConfig>, Instant)>,
    guests: Mutex<Guests>,
    left: Condvar,
    ends: AtomicBool,
    wake: OwnedFd,
    told: Mutex<(Option<Instant>, u64)>,
}

/// The connections.
#[derive(Debug, Default)]
struct Guests {
    next: u64,
    /// The oldest is the first.
    all: BTreeMap<u64, Guest>,
    threads: usize,
}

#[derive(Debug)]
struct Guest {
    socket: Arc<TcpStream>,
    address: IpAddr,
    /// It has proved who it is.
    known: bool,
}

impl Server {
    /// Shares files at a socket, with the usual limits.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn start(
        listener: TcpListener,
        shares: Shares,
        protection: Protection,
    ) -> Result<Self, ServeError> {
        Self::with_limits(listener, shares, protection, Limits::default())
    }

    /// Shares files at a socket.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn with_limits(
        listener: TcpListener,
        shares: Shares,
        protection: Protection,
        limits: Limits,
    ) -> Result<Self, ServeError> {
        let address = listener.local_addr()?;
        if protection.check(address).is_err() {
            return Err(ServeError::Plain(address));
        }
        listener.set_nonblocking(true)?;
        let inner = Arc::new(Inner {
            shares,
            tls: Mutex::new((protection.load()?, Instant::now())),
            protection,
            limits,
            guests: Mutex::default(),
            left: Condvar::new(),
            ends: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC).map_err(io::Error::from)?,
            told: Mutex::default(),
        });
        let own = inner.clone();
        let thread = std::thread::Builder::new().name("share".into());
        let thread = thread.spawn(move || accept(&own, &listener))?;
        Ok(Self {
            inner,
            address,
            thread: Some(thread),
        })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.inner.ends.store(true, Ordering::Release);
        // The counter has room for one.
        let _ = rustix::io::write(&self.inner.wake, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let mut guests = locked(&self.inner.guests);
        for guest in guests.all.values() {
            let _ = guest.socket.shutdown(Shutdown::Both);
        }
        let until = Instant::now() + LEAVE;
        while guests.threads > 0 && Instant::now() < until {
            let waited = self.inner.left.wait_timeout(guests, LEAVE);
            guests = waited.map_or_else(|poisoned| poisoned.into_inner().0, |(guests, _)| guests);
        }
    }
}

fn accept(inner: &Arc<Inner>, listener: &TcpListener) {
    while !inner.ends.load(Ordering::Acquire) {
        match listener.accept() {
            Ok((socket, address)) => {
                if let Err(why) = inner.admit(socket, address) {
                    inner.tell(address, &why);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let mut both = [
                    PollFd::new(listener, PollFlags::IN),
                    PollFd::new(&inner.wake, PollFlags::IN),
                ];
                // A signal ends it early.
                let _ = poll(&mut both, None);
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

impl Inner {
    /// Gives a connection a thread, if it has room.
    fn admit(self: &Arc<Self>, socket: TcpStream, address: SocketAddr) -> Result<(), String> {
        let socket = Arc::new(socket);
        let guest = Guest {
            socket: socket.clone(),
            address: address.ip().to_canonical(),
            known: false,
        };
        let mut guests = locked(&self.guests);
        guests.make_room(guest.address, &self.limits)?;
        let number = guests.next;
        guests.next += 1;
        guests.all.insert(number, guest);
        guests.threads += 1;
        drop(guests);
        let own = self.clone();
        let thread = std::thread::Builder::new().name(format!("share-{number}"));
        let spawned = thread.spawn(move || {
            if let Err(why) = own.converse(socket, number) {
                own.tell(address, &why.to_string());
            }
            own.leave(number);
        });
        spawned.map(|_| ()).map_err(|why| {
            self.leave(number);
            why.to_string()
        })
    }

    fn converse(&self, socket: Arc<TcpStream>, number: u64) -> Result<(), PeerError> {
        let until = Instant::now() + self.limits.greeting;
        let tls = self.certificates();
        let mut link = Link::server(socket, tls.as_ref(), until)?;
        // Without an entry it has to go: its socket is shut already.
        let welcome = || {
            if let Some(guest) = locked(&self.guests).all.get_mut(&number) {
                guest.known = true;
            }
        };
        if let Err(why) = greet(&mut link, welcome) {
            link.linger();
            return Err(why);
        }
        let mut stream = WithLimits {
            link,
            limits: &self.limits,
        };
        let answered = answer(&mut stream, &self.shares);
        if answered.is_err() {
            stream.link.linger();
        }
        match answered {
            // A peer that ends, or that has nothing to ask.
            Err(PeerError::Lost(_) | PeerError::TimedOut) => Ok(()),
            answered => answered,
        }
    }

    fn leave(&self, number: u64) {
        let mut guests = locked(&self.guests);
        guests.all.remove(&number);
        guests.threads -= 1;
        drop(guests);
        self.left.notify_all();
    }

    /// The certificates, which may have been renewed.
    fn certificates(&self) -> Option<TlsConfig> {
        let mut tls = locked(&self.tls);
        if tls.0.is_some() && tls.1.elapsed() >= RENEW {
            tls.1 = Instant::now();
            match self.protection.load() {
                Ok(renewed) => tls.0 = renewed,
                Err(why) => tracing::warn!("the certificates of before stay in use: {why}"),
            }
        }
        tls.0.clone()
    }

    /// Says why a peer was turned away, not more often than a person can read.
    fn tell(&self, address: SocketAddr, why: &str) {
        let mut told = locked(&self.told);
        if told.0.is_some_and(|at| at.elapsed() < TELL) {
            told.1 += 1;
            return;
        }
        let others = std::mem::take(&mut told.1);
        told.0 = Some(Instant::now());
        drop(told);
        match others {
            0 => tracing::warn!(peer = %address, "turned away: {why}"),
            _ => tracing::warn!(peer = %address, others, "turned away: {why}"),
        }
    }
}

impl Guests {
    /// Drops a stranger if there are too many connections.
    fn make_room(&mut self, address: IpAddr, limits: &Limits) -> Result<(), String> {
        let strangers = self.all.values().filter(|guest| !guest.known).count();
        let same = |guest: &Guest| guest.address == address;
        let from_there = self.all.values().filter(|guest| same(guest)).count();
        if from_there >= limits.per_address && !self.drop_oldest(same) {
            return Err(format!(
                "there are {from_there} connections from its address already"
            ));
        }
        let full = self.all.len() >= limits.connections;
        if (full || strangers >= limits.strangers) && !self.drop_oldest(|_| true) {
            let all = self.all.len();
            return Err(format!("there are {all} connections already"));
        }
        Ok(())
    }

    fn drop_oldest(&mut self, of: impl Fn(&Guest) -> bool) -> bool {
        let mut strangers = self.all.iter().filter(|(_, guest)| !guest.known);
        let oldest = strangers.find(|(_, guest)| of(guest));
        let Some(number) = oldest.map(|(&number, _)| number) else {
            return false;
        };
        if let Some(guest) = self.all.remove(&number) {
            let _ = guest.socket.shutdown(Shutdown::Both);
        }
        true
    }
}

/// A connection with the limits of a server.
struct WithLimits<'a> {
    link: Link,
    limits: &'a Limits,
}

impl Limited for WithLimits<'_> {
    fn limit(&mut self, what: Awaits) {
        let limit = match what {
            Awaits::Request => self.limits.idle,
            Awaits::Exchange => self.limits.exchange,
        };
        self.link.limit(Instant::now() + limit);
    }
}

impl io::Read for WithLimits<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.link.read(buffer)
    }
}

impl io::Write for WithLimits<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.link.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.link.flush()
    }
}
