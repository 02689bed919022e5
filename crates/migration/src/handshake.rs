//! The handshake: opens the two connections of a migration.
//!
//! **Guarantee.** Both sides end with a stream and an urgent connection of the same session,
//! version and capabilities, or with an error and no connection. At the destination no stranger
//! keeps a source out. A stranger may send garbage, open another session, stop half way or send
//! nothing at all.
//!
//! **Mechanism.** The source connects, sends [`Hello`] and waits for [`HelloReply`], first for the
//! stream, then for the urgent connection. The destination ([`accept_pair`]) serves all pending
//! connections at once. Their number is bounded, and so is the time of each.
//!
//! **Neighbours.** [`wire`](crate::wire) has the two messages, [`channel`](crate::channel) the
//! sockets. This module must not know what is sent afterwards. It does not authenticate: any
//! process that can connect can migrate.

mod acceptor;
mod pending;

use std::time::{Duration, Instant};

use self::acceptor::{Acceptor, Mode};
use crate::address::Address;
use crate::channel::{ChannelError, Connection, Listener, Wait};
use crate::wire::{
    Capabilities, HELLO_BYTES, Hello, HelloReply, Role, SessionId, Status, WireError, check_magic,
};

/// The longest time from a connection to its complete preamble.
pub const HELLO_LIMIT: Duration = Duration::from_secs(5);

/// The result of the negotiation between the two sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// The protocol version.
    pub version: u16,
    /// The capabilities that both sides use.
    pub capabilities: Capabilities,
    /// The identity of the migration.
    pub session: SessionId,
}

/// The two connections of a migration, ready for the first frame.
#[derive(Debug)]
pub struct Pair {
    /// Carries frames.
    pub stream: Connection,
    /// Carries requests for single pages, and their answers.
    pub urgent: Connection,
    /// The agreed version, capabilities and session.
    pub agreed: Agreed,
}

/// The reason why the handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// A connection could not be opened, or ended.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The peer's bytes are not a preamble, or do not fit this side.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The destination refused.
    #[error("refused: {status} (the destination speaks version {version})")]
    Refused {
        /// The destination's reason.
        status: Status,
        /// The newest protocol version that the destination speaks.
        version: u16,
    },
}

/// A stranger: a connection that the destination did not accept as that of a source.
#[derive(Debug)]
pub struct Stranger {
    /// The address of the peer.
    pub peer: String,
    /// The reason.
    pub why: StrangerError,
}

/// The reason why the destination did not accept a connection.
#[derive(Debug, thiserror::Error)]
pub enum StrangerError {
    /// The preamble is not Pageferry's, or does not fit this side.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The connection ended without a preamble, or broke.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The preamble took too long.
    #[error("no preamble within {} ms", after.as_millis())]
    Silent {
        /// The limit.
        after: Duration,
    },
    /// There were too many pending connections, and this was the oldest.
    #[error("too many connections without a preamble")]
    Crowded,
    /// The preamble was valid but came at the wrong time.
    #[error("{0}")]
    Refused(Status),
    /// The stream connection was accepted. It ended, or the time passed, before the urgent
    /// connection came.
    #[error("the urgent connection of the session did not follow")]
    HalfPair,
    /// Both connections were accepted, and no message followed.
    #[error("the session was accepted, and no message followed")]
    SilentSession,
}

impl SessionId {
    /// Returns a new identity, made of the kernel's random numbers.
    ///
    /// # Errors
    /// The error of getrandom(2).
    pub fn random() -> std::io::Result<Self> {
        let mut id = [0; 16];
        let mut filled = 0;
        while filled < id.len() {
            match rustix::rand::getrandom(&mut id[filled..], rustix::rand::GetRandomFlags::empty())
            {
                Ok(more) => filled += more,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(Self(id))
    }
}

/// Opens the two connections of `session` to the destination at `address`. This takes at most
/// `limit`, name resolution not counted, and ends early if `stop` returns true.
///
/// # Errors
/// [`HandshakeError`]. No connection is left open then.
pub fn connect_pair(
    address: &Address,
    session: SessionId,
    limit: Duration,
    stop: &dyn Fn() -> bool,
) -> Result<Pair, HandshakeError> {
    let until = Instant::now() + limit;
    let (stream, agreed) = connect_one(address, Role::Stream, session, until, stop)?;
    let (urgent, again) = connect_one(address, Role::Urgent, session, until, stop)?;
    if again != agreed {
        return Err(WireError::BadField {
            what: "HelloReply",
            field: "capabilities",
            value: again.capabilities.bits(),
        }
        .into());
    }
    Ok(Pair {
        stream,
        urgent,
        agreed,
    })
}

fn connect_one(
    address: &Address,
    role: Role,
    session: SessionId,
    until: Instant,
    stop: &dyn Fn() -> bool,
) -> Result<(Connection, Agreed), HandshakeError> {
    let left = |what| {
        let left = until.saturating_duration_since(Instant::now());
        Wait::block(what).within(left).unless(stop)
    };
    let hello = Hello::ours(role, session);
    let connection = Connection::connect(address, &left("connection"))?;
    connection.write_all(&hello.encode(), &left("Hello"))?;
    let reply = read_reply(&connection, &left("HelloReply"))?;
    let reply = HelloReply::decode(&reply, &hello)?;
    if reply.status != Status::Accepted {
        return Err(HandshakeError::Refused {
            status: reply.status,
            version: reply.version,
        });
    }
    let agreed = Agreed {
        version: reply.version,
        capabilities: reply.capabilities,
        session,
    };
    Ok((connection, agreed))
}

/// Reads 64 bytes, and fails at the first byte that cannot be Pageferry's.
fn read_reply(
    connection: &Connection,
    wait: &Wait<'_>,
) -> Result<[u8; HELLO_BYTES], HandshakeError> {
    let started = Instant::now();
    let mut bytes = [0; HELLO_BYTES];
    let mut filled = 0;
    while filled < HELLO_BYTES {
        match connection.recv_pending(&mut bytes[filled..], "HelloReply") {
            Ok(Some(more)) => {
                filled += more;
                check_magic(&bytes[..filled])?;
            }
            Ok(None) => connection.wait_readable(&wait.less(started.elapsed()))?,
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

/// Waits on `listener` for the two connections of one migration. The wait ends after `limit`, if
/// there is one, or when `stop` returns true. It calls `stop` at least every 50 ms.
///
/// Every connection that is not accepted is reported to `stranger`.
///
/// # Errors
/// [`ChannelError::TimedOut`], [`ChannelError::Interrupted`], and [`ChannelError::Open`] if the
/// host has no descriptors left.
pub fn accept_pair(
    listener: &Listener,
    limit: Option<Duration>,
    stop: &dyn Fn() -> bool,
    stranger: &mut dyn FnMut(&Stranger),
) -> Result<Pair, HandshakeError> {
    Acceptor::new(listener, Mode::Paired, stranger).run(limit, stop)
}

/// Like [`accept_pair`] without a limit, but returns the first session whose source has sent a byte
/// after the preamble.
pub(crate) fn accept_speaking(
    listener: &Listener,
    stop: &dyn Fn() -> bool,
    stranger: &mut dyn FnMut(&Stranger),
) -> Result<Pair, HandshakeError> {
    Acceptor::new(listener, Mode::Speaking, stranger).run(None, stop)
}

/// Tells every source that connects to `listener` that this destination is busy, until `stop`
/// returns true. Such a source retries for a while.
///
/// # Errors
/// [`ChannelError::Open`] if the host has no descriptors left.
pub fn refuse_callers(
    listener: &Listener,
    stop: &dyn Fn() -> bool,
    stranger: &mut dyn FnMut(&Stranger),
) -> Result<(), HandshakeError> {
    match Acceptor::new(listener, Mode::Refusing, stranger).run(None, stop) {
        Err(HandshakeError::Channel(ChannelError::Interrupted { .. })) | Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}
