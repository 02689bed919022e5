//! The source's side of the handshake.

use std::time::{Duration, Instant};

use super::secret::Transcript;
use super::{Agreed, HandshakeError, Identity, PlainPolicy, Protection};
use crate::address::Address;
use crate::channel::{ChannelError, Connection, Wait};
use crate::wire::{
    ChannelKey, Credentials, HELLO_BYTES, Hello, HelloReply, PATH_CHECK_BYTES, Side, Status,
    WELCOME_BYTES, Welcome, WireError, check_magic, path_check, verify_path_check,
};

/// The time for which a failed write waits for the reason in an alert of the peer.
const REASON_LIMIT: Duration = Duration::from_millis(100);

/// A channel that is open at both sides, at the source.
#[derive(Debug)]
pub struct Opened {
    /// The connection. The next byte is the first after the handshake.
    pub connection: Connection,
    /// The result of the negotiation.
    pub agreed: Agreed,
    /// The shorter of the handshake's two round trips.
    pub round_trip: Duration,
}

/// The limits of the waits: one end for all of them, so that a peer that drips bytes does not
/// postpone it.
#[derive(Clone, Copy)]
struct Limits<'a> {
    all: Duration,
    deadline: Instant,
    stop: &'a dyn Fn() -> bool,
}

impl<'a> Limits<'a> {
    fn wait(&self, what: &'static str) -> Wait<'a> {
        Wait::block(what)
            .until(self.deadline, self.all)
            .unless(self.stop)
    }
}

/// Dials `address` and opens the channel `key` of the session. Fails if connecting (name
/// resolution not counted) takes longer than `connect`, or the handshake after it longer than
/// `limit`. The kernel of a busy host connects soon, and its process answers late. Ends early if
/// `stop` returns true.
///
/// The first control channel of generation 1 opens the session: it carries the secret.
///
/// # Errors
/// [`HandshakeError`]. No connection is left open then.
pub fn dial(
    address: &Address,
    protection: &Protection,
    identity: &Identity,
    key: ChannelKey,
    [connect, limit]: [Duration; 2],
    stop: &dyn Fn() -> bool,
) -> Result<Opened, HandshakeError> {
    protection.allows(address)?;
    let wait = Wait::block("connection").within(connect).unless(stop);
    let connection = Connection::connect(address, &wait)?;
    let host = match address {
        Address::Tcp { host, .. } => Some(host.as_str()),
        Address::Unix(_) => None,
    };
    open_on(connection, host, protection, identity, key, limit, stop)
}

/// Like [`dial`], on a connection on which nothing was sent yet. `host` is the name by which TLS
/// checks the peer, unless the files give one.
///
/// # Errors
/// [`HandshakeError`]. The connection is closed then.
pub fn open_on(
    connection: Connection,
    host: Option<&str>,
    protection: &Protection,
    identity: &Identity,
    key: ChannelKey,
    limit: Duration,
    stop: &dyn Fn() -> bool,
) -> Result<Opened, HandshakeError> {
    let limits = Limits {
        all: limit,
        deadline: Instant::now() + limit,
        stop,
    };
    let mut connection = protect(connection, host, protection, limits)?;
    let hello = Hello::ours(key, identity.session);
    let sent = hello.encode();
    let began = Instant::now();
    write(&connection, &sent, limits.wait("Hello"))?;
    let received = read_reply(&connection, &limits.wait("HelloReply"))?;
    let first = began.elapsed();
    let reply = HelloReply::decode(&received, &hello)?;
    if reply.status != Status::Accepted {
        return Err(HandshakeError::Refused {
            status: reply.status,
            version: reply.version,
        });
    }
    let transcript = Transcript {
        hello: sent,
        reply: received,
        exporter: connection.exporter()?,
    };
    let credentials = Credentials {
        secret: key.opens_session().then(|| identity.secret.bytes()),
        proof: identity.secret.prove(Side::Source, &transcript),
    };
    let wait = limits.wait("Credentials");
    let began = Instant::now();
    // Two writes, so that the credentials are in a small packet of their own.
    write(&connection, &credentials.encode(), wait)?;
    write(&connection, path_check(), limits.wait("PathCheck"))?;
    let mut bytes = [0; WELCOME_BYTES];
    let read = connection.read_exact(&mut bytes, &limits.wait("Welcome"));
    read.map_err(|error| match error {
        // A peer that stands still has received the bytes all the same: its kernel did.
        ChannelError::TimedOut { .. } | ChannelError::Closed { .. }
            if connection.has_unacknowledged() =>
        {
            large_packets_lost(&connection)
        }
        error => error.into(),
    })?;
    let round_trip = first.min(began.elapsed());
    let welcome = Welcome::decode(&bytes)?;
    if welcome.status == Status::LargePacketsLost {
        return Err(large_packets_lost(&connection));
    }
    if welcome.status != Status::Accepted {
        return Err(HandshakeError::Refused {
            status: welcome.status,
            version: reply.version,
        });
    }
    let destination = Side::Destination;
    if !identity
        .secret
        .verify(destination, &transcript, &welcome.proof)
    {
        return Err(HandshakeError::BadProof);
    }
    read_path_check(&connection, &limits.wait("PathCheck"))?;
    connection.version = reply.version;
    Ok(Opened {
        connection,
        agreed: Agreed {
            version: reply.version,
            capabilities: reply.capabilities,
            session: identity.session,
            key,
        },
        round_trip,
    })
}

/// Begins TLS, or checks that none is needed. Nothing was sent before.
fn protect(
    connection: Connection,
    host: Option<&str>,
    protection: &Protection,
    limits: Limits<'_>,
) -> Result<Connection, HandshakeError> {
    match protection {
        Protection::Tls(config) => {
            let connection = connection.begin_tls_client(config, host)?;
            connection.finish_tls(&limits.wait("TLS handshake"))?;
            Ok(connection)
        }
        Protection::Plain(PlainPolicy::LoopbackOnly) if !connection.is_local() => {
            Err(HandshakeError::PlainForbidden {
                peer: connection.peer().to_owned(),
            })
        }
        Protection::Plain(_) => Ok(connection),
    }
}

/// Sends `bytes`. If the peer has ended the connection, its reason may have arrived.
fn write(connection: &Connection, bytes: &[u8], wait: Wait<'_>) -> Result<(), HandshakeError> {
    let Err(error) = connection.write_all(bytes, &wait) else {
        return Ok(());
    };
    let reason = Wait::block("TLS alert").within(REASON_LIMIT);
    if matches!(error, ChannelError::Lost { .. })
        && let Err(told @ ChannelError::Tls(_)) = connection.read_exact(&mut [0], &reason)
    {
        return Err(told.into());
    }
    Err(error.into())
}

/// Reads the destination's `path_check`, which follows its [`Welcome`] at once.
fn read_path_check(connection: &Connection, wait: &Wait<'_>) -> Result<(), HandshakeError> {
    let mut bytes = vec![0; PATH_CHECK_BYTES];
    match connection.read_exact(&mut bytes, wait) {
        Ok(()) => Ok(verify_path_check(0, &bytes)?),
        Err(ChannelError::TimedOut { .. }) => Err(large_packets_lost(connection)),
        Err(error) => Err(error.into()),
    }
}

fn large_packets_lost(connection: &Connection) -> HandshakeError {
    HandshakeError::LargePacketsLost {
        peer: connection.peer().to_owned(),
    }
}

/// Reads 64 bytes, and fails at the first byte that cannot be Pageferry's.
fn read_reply(
    connection: &Connection,
    wait: &Wait<'_>,
) -> Result<[u8; HELLO_BYTES], HandshakeError> {
    let mut bytes = [0; HELLO_BYTES];
    let mut filled = 0;
    while filled < HELLO_BYTES {
        match connection.recv_pending(&mut bytes[filled..], "HelloReply") {
            Ok(Some(more)) => {
                filled += more;
                check_magic(&bytes[..filled])?;
            }
            Ok(None) => connection.wait_readable(wait)?,
            Err(ChannelError::Closed { .. }) if filled > 0 => {
                return Err(ChannelError::Wire(WireError::Truncated {
                    what: "HelloReply",
                    needed: HELLO_BYTES as u64,
                    got: filled as u64,
                })
                .into());
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}
