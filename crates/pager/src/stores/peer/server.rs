//! The server of files.
//!
//! **Guarantee.** Connections, threads and memory are bounded. Peers that have not proved who they
//! are keep out none that can, and a reader that does nothing makes room for another.
//!
//! **Mechanism.** An [`Acceptor`] opens connections, and each has a thread of its own in a
//! [`Room`]. So a peer that reads slowly delays no other.

use super::answer::{Awaits, Limited, answer};
use super::error::PeerError;
use super::shares::Shares;
use pageferry_transport::address::Address;
use pageferry_transport::channel::is_local;
use pageferry_transport::handshake::{Acceptor, Arrival, Expected, HELLO_LIMIT, Router};
use pageferry_transport::wire::{Hello, Role, Status};
use pageferry_transport::{
    Guest, Listener, OpenError, PlainPolicy, Protection, Quota, Room, Stranger, Stream, Tls,
    TlsError,
};
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Duration;

/// What peers may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// All connections. Each has a thread, and up to 512 KiB during a read.
    pub connections: usize,
    /// Those of one host.
    pub per_host: usize,
    /// The time in which a connection must prove who it is.
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
            per_host: 48,
            greeting: HELLO_LIMIT,
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
        "listening at {} without certificates would share memory with other hosts unprotected: \
         give certificates, or allow that",
        .0.authority()
    )]
    Plain(Address),
    /// The host has no descriptor or thread left.
    #[error("cannot serve: {0}")]
    Host(#[from] io::Error),
}

/// Shares files until it is dropped.
#[derive(Debug)]
pub struct Server {
    /// Dropped first: then no more connections come.
    acceptor: Option<Acceptor>,
    desk: Arc<Desk>,
    address: Address,
}

#[derive(Debug)]
struct Desk {
    shares: Arc<Shares>,
    tls: Option<Tls>,
    plain: PlainPolicy,
    limits: Limits,
    room: Room,
    /// How often a peer that was turned away is told.
    quota: Arc<Quota>,
}

impl Server {
    /// Shares files at a socket, with the usual limits. Without TLS, `plain` says with whom.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn start(
        listener: Listener,
        shares: Shares,
        tls: Option<Tls>,
        plain: PlainPolicy,
    ) -> Result<Self, ServeError> {
        Self::with_limits(listener, shares, tls, plain, Limits::default())
    }

    /// As [`Self::start`], with other limits.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn with_limits(
        listener: Listener,
        shares: Shares,
        tls: Option<Tls>,
        plain: PlainPolicy,
        limits: Limits,
    ) -> Result<Self, ServeError> {
        let address = listener.local_addr().clone();
        let open = tls.is_none() && plain == PlainPolicy::LoopbackOnly;
        if open && !is_local(&address).map_err(io::Error::other)? {
            return Err(ServeError::Plain(address));
        }
        let protection = Protection::load(tls.as_ref(), plain)?;
        let desk = Arc::new(Desk {
            shares: Arc::new(shares),
            tls,
            plain,
            limits,
            room: Room::new("share", limits.connections, limits.per_host),
            quota: Arc::default(),
        });
        let router = Arc::clone(&desk) as _;
        let acceptor = Acceptor::start_with_limit(listener, protection, router, limits.greeting)?;
        Ok(Self {
            acceptor: Some(acceptor),
            desk,
            address,
        })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> &Address {
        &self.address
    }

    /// Reads the certificates again, for connections from now on.
    ///
    /// # Errors
    /// When they do not serve. Those of before stay.
    pub fn read_certificates(&self) -> Result<(), TlsError> {
        let protection = Protection::load(self.desk.tls.as_ref(), self.desk.plain)?;
        if let Some(acceptor) = &self.acceptor {
            acceptor.set_protection(protection);
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.acceptor = None;
        self.desk.room.cut();
    }
}

impl Router for Desk {
    fn route(&self, hello: &Hello, _: bool) -> Result<Expected, Status> {
        match hello.key.role {
            Role::Share => Ok(Expected::New),
            _ => Err(Status::BadRole),
        }
    }

    fn accepted(&self, arrival: Arrival) -> Result<(), Box<(Arrival, Status)>> {
        if self.room.make_room(arrival.origin()).is_some() {
            return Err(arrival.refused(Status::Busy));
        }
        let peer = arrival.peer().to_owned();
        // A reader that is gone dials again.
        let Ok(connection) = arrival.welcome() else {
            return Ok(());
        };
        let (shares, quota) = (Arc::clone(&self.shares), Arc::clone(&self.quota));
        let limits = self.limits;
        let served = self.room.serve(connection, move |guest| {
            if let Err(why) = converse(guest, &shares, limits)
                && let Some(others) = quota.take()
            {
                let peer = guest.connection().peer();
                tracing::warn!(peer, others, "the conversation ends: {why}");
            }
        });
        if let Err(why) = served {
            tracing::warn!(peer, "no thread for a connection: {why}");
        }
        Ok(())
    }

    fn stranger(&self, stranger: Stranger) {
        if let Some(others) = self.quota.take() {
            let Stranger { peer, why, .. } = stranger;
            tracing::warn!(peer, others, "turned away: {why}");
        }
    }

    fn cannot_accept(&self, error: &OpenError) {
        tracing::warn!("cannot accept a connection: {error}");
    }
}

fn converse(guest: &Guest, shares: &Shares, limits: Limits) -> Result<(), PeerError> {
    let stream = Stream::new(Arc::clone(guest.connection()), limits.idle);
    let mut served = Served {
        stream,
        guest,
        limits,
    };
    match answer(&mut served, shares) {
        // A peer that ends, or that has nothing to ask.
        Ok(()) | Err(PeerError::Lost(_) | PeerError::TimedOut) => Ok(()),
        Err(why) => {
            guest.idle();
            served.stream.linger();
            Err(why)
        }
    }
}

/// A connection with the limits of a server.
struct Served<'a> {
    stream: Stream,
    guest: &'a Guest,
    limits: Limits,
}

impl Limited for Served<'_> {
    fn limit(&mut self, what: Awaits) {
        match what {
            Awaits::Request => {
                self.guest.idle();
                self.stream.limit(self.limits.idle);
            }
            Awaits::Exchange => {
                self.guest.busy();
                self.stream.limit(self.limits.exchange);
            }
        }
    }
}

impl Read for Served<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read(buffer)
    }
}

impl Write for Served<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
