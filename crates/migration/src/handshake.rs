//! How the two connections of a migration come about.
//!
//! **Guarantee.** Both sides end with a stream and an urgent connection of the same session,
//! version and capabilities, or with an error and no connection. At the destination no stranger
//! keeps a source out: neither by garbage, nor by another session, nor by stopping half way or
//! saying nothing at all.
//!
//! **Mechanism.** The source connects, says [`Hello`] and waits for [`HelloReply`], first for the
//! stream, then for the urgent connection. The destination looks at all its callers at once
//! ([`accept_pair`]), a bounded number of them, each for a bounded time.
//!
//! **Neighbours.** [`wire`](crate::wire) has the two messages, [`channel`](crate::channel) the
//! sockets. It must not know what is sent afterwards. It does not authenticate: whoever can connect
//! can migrate.

mod acceptor;
mod caller;

use std::time::{Duration, Instant};

use self::acceptor::{Acceptor, Mode};
use crate::address::Address;
use crate::channel::{ChannelError, Connection, Listener, Wait};
use crate::wire::{
    Capabilities, HELLO_BYTES, Hello, HelloReply, Role, SessionId, Status, WireError, check_magic,
};

/// How long a caller may take for its preamble.
pub const HELLO_LIMIT: Duration = Duration::from_secs(5);

/// What the two sides agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreed {
    /// The protocol version.
    pub version: u16,
    /// The capabilities both use.
    pub capabilities: Capabilities,
    /// The migration's identity.
    pub session: SessionId,
}

/// The two connections of a migration, ready for the first frame.
#[derive(Debug)]
pub struct Pair {
    /// Frames.
    pub stream: Connection,
    /// Requests for single pages, and their answers.
    pub urgent: Connection,
    /// What was agreed on.
    pub agreed: Agreed,
}

/// Why there is no pair of connections.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// A connection could not be made, or ended.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// What came is no preamble, or does not fit ours.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The destination said no.
    #[error("refused: {status} (it speaks version {version})")]
    Refused {
        /// Its reason.
        status: Status,
        /// The newest protocol version it speaks.
        version: u16,
    },
}

/// A caller that the destination did not accept.
#[derive(Debug)]
pub struct Stranger {
    /// Where it called from.
    pub peer: String,
    /// What it did.
    pub why: StrangerError,
}

/// What a caller did that the destination did not accept.
#[derive(Debug, thiserror::Error)]
pub enum StrangerError {
    /// Its preamble is not Pageferry's, or does not fit ours.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// It ended without a word, or broke.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// It was too slow.
    #[error("no preamble within {} ms", after.as_millis())]
    Silent {
        /// How long it was given.
        after: Duration,
    },
    /// There were too many callers, and it had been waiting the longest.
    #[error("too many connections without a preamble")]
    Crowded,
    /// Its preamble was good and came at the wrong time.
    #[error("{0}")]
    Refused(Status),
    /// Its stream connection was accepted and the urgent one did not come, or the first ended
    /// before.
    #[error("the urgent connection of its session did not follow")]
    HalfPair,
    /// Both of its connections were accepted, and it said nothing.
    #[error("its session was accepted, and no message followed")]
    SilentSession,
}

impl SessionId {
    /// A new one, from the kernel's random numbers.
    ///
    /// # Errors
    /// What getrandom(2) says.
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

/// Makes the two connections of `session` to the destination at `address`, all within `limit` (the
/// resolving of a name aside), unless `stop` returns true.
///
/// # Errors
/// [`HandshakeError`]; no connection is left open then.
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

/// Reads 64 bytes, and gives up at the first that cannot be Pageferry's.
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

/// Waits on `listener` for the two connections of one migration: for at most `limit` (without one,
/// for ever), and until `stop` returns true, which is asked every 50 ms.
///
/// `stranger` hears of every caller that was not accepted.
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

/// As [`accept_pair`] without a limit, for the first session whose source has begun to speak.
pub(crate) fn accept_speaking(
    listener: &Listener,
    stop: &dyn Fn() -> bool,
    stranger: &mut dyn FnMut(&Stranger),
) -> Result<Pair, HandshakeError> {
    Acceptor::new(listener, Mode::Speaking, stranger).run(None, stop)
}

/// Answers every source that calls at `listener` that this destination is busy, until `stop`
/// returns true. A source that hears that tries again for a while.
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
