//! A destination that takes every channel, and ways to reach it.

use crate::certificates::{Authority, Validity};
use crate::{LIMIT, wait_for};
use pageferry_transport::address::Address;
use pageferry_transport::channel::{Connection, Listener, OpenError};
use pageferry_transport::handshake::*;
use pageferry_transport::wire::*;
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn never() -> bool {
    false
}

/// No TLS, within this host.
pub const PLAIN: Protection = Protection::Plain(PlainPolicy::LoopbackOnly);

/// A router that follows the rules of [`Admission`] for one session at a time.
#[derive(Default)]
pub struct Desk {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    session: Option<(SessionId, Secret)>,
    admission: Admission,
    channels: Vec<(ChannelKey, Connection)>,
    strangers: Vec<String>,
    failures: Vec<String>,
}

impl Router for Desk {
    fn route(&self, hello: &Hello, opens: bool) -> Result<Expected, Status> {
        let state = self.state.lock().unwrap();
        match &state.session {
            Some((session, _)) if *session != hello.session => Err(Status::Busy),
            Some((_, secret)) => {
                state.admission.check(hello.key)?;
                Ok(Expected::Known(secret.clone()))
            }
            None if opens => Ok(Expected::New),
            None => Err(Status::UnknownSession),
        }
    }

    fn accepted(&self, arrival: Arrival) -> Result<(), Box<(Arrival, Status)>> {
        let mut state = self.state.lock().unwrap();
        let agreed = *arrival.agreed();
        if let Some((session, _)) = &state.session
            && *session != agreed.session
        {
            return Err(arrival.refused(Status::Busy));
        }
        if let Err(status) = state.admission.admit(agreed.key) {
            return Err(arrival.refused(status));
        }
        if agreed.key.opens_session() {
            state.session = Some((agreed.session, arrival.secret().clone()));
            state.admission.announce(2, 1);
        }
        if let Ok(connection) = arrival.welcome() {
            state.channels.push((agreed.key, connection));
        }
        Ok(())
    }

    fn stranger(&self, stranger: Stranger) {
        let why = stranger.why.to_string();
        self.state.lock().unwrap().strangers.push(why);
    }

    fn cannot_accept(&self, error: &OpenError) {
        let why = error.to_string();
        self.state.lock().unwrap().failures.push(why);
    }
}

/// A destination that listens on a loopback port.
pub struct Destination {
    /// Its router.
    pub desk: Arc<Desk>,
    /// Its acceptor.
    pub acceptor: Acceptor,
    /// The address of its first listener.
    pub address: Address,
}

impl Destination {
    /// Listens, with the usual limit of a preamble.
    ///
    /// # Panics
    /// When the host has no port or thread left.
    #[must_use]
    pub fn start(protection: Protection) -> Self {
        Self::with_limit(protection, HELLO_LIMIT)
    }

    /// As [`Self::start`], with another limit.
    ///
    /// # Panics
    /// As [`Self::start`].
    #[must_use]
    pub fn with_limit(protection: Protection, limit: Duration) -> Self {
        let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        Self::on(listener, protection, limit)
    }

    /// As [`Self::with_limit`], on a listener of the caller.
    ///
    /// # Panics
    /// As [`Self::start`].
    #[must_use]
    pub fn on(listener: Listener, protection: Protection, limit: Duration) -> Self {
        let address = listener.local_addr().clone();
        let desk = Arc::new(Desk::default());
        let acceptor =
            Acceptor::start_with_limit(listener, protection, desk.clone(), limit).unwrap();
        Self {
            desk,
            acceptor,
            address,
        }
    }

    /// Waits for the channel, and takes it.
    ///
    /// # Panics
    /// When it does not come.
    #[must_use]
    pub fn take(&self, key: ChannelKey) -> Connection {
        wait_for("a channel", || {
            let channels = &mut self.desk.state.lock().unwrap().channels;
            let at = channels.iter().position(|(found, _)| *found == key)?;
            Some(channels.remove(at).1)
        })
    }

    /// The channels that nobody has taken.
    ///
    /// # Panics
    /// After a panic of the acceptor's thread.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.desk.state.lock().unwrap().channels.len()
    }

    /// The reasons of all strangers so far.
    ///
    /// # Panics
    /// As [`Self::channels`].
    #[must_use]
    pub fn strangers(&self) -> Vec<String> {
        self.desk.state.lock().unwrap().strangers.clone()
    }

    /// The reasons for which no connection could be accepted.
    ///
    /// # Panics
    /// As [`Self::channels`].
    #[must_use]
    pub fn failures(&self) -> Vec<String> {
        self.desk.state.lock().unwrap().failures.clone()
    }

    /// Waits until a stranger was reported with `text` in the reason.
    ///
    /// # Panics
    /// When none comes.
    pub fn wait_for_stranger(&self, text: &str) -> String {
        wait_for(text, || {
            let found = self.strangers();
            found.into_iter().find(|why| why.contains(text))
        })
    }
}

/// Opens a channel.
///
/// # Errors
/// As for [`dial`].
pub fn open(
    address: &Address,
    protection: &Protection,
    identity: &Identity,
    key: ChannelKey,
) -> Result<Opened, HandshakeError> {
    dial(address, protection, identity, key, [LIMIT; 2], &never)
}

/// The key of a bulk channel.
#[must_use]
pub fn bulk(index: u16, generation: u32, incarnation: u32) -> ChannelKey {
    ChannelKey {
        role: Role::Bulk,
        index,
        generation,
        incarnation,
    }
}

/// Returns both ends of a connection with TLS over TCP.
///
/// # Panics
/// When they do not meet.
#[must_use]
pub fn tls_pair() -> (Connection, Connection) {
    let authority = Authority::new("test CA");
    let config = || {
        authority
            .issue(&["localhost"], Validity::Now)
            .protection(Some("localhost"))
    };
    let destination = Destination::start(config());
    let identity = Identity::random().unwrap();
    let key = ChannelKey::control(1);
    let opened = open(&destination.address, &config(), &identity, key).unwrap();
    (opened.connection, destination.take(key))
}

/// Connects to a TCP address. Reads have a limit.
///
/// # Panics
/// When nobody listens there.
#[must_use]
pub fn socket_of(address: &Address) -> std::net::TcpStream {
    let Address::Tcp { host, port } = address else {
        panic!("a TCP address");
    };
    let socket = std::net::TcpStream::connect((host.as_str(), *port)).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}
