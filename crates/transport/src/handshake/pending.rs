//! A pending connection at the destination, from its accept(2) to its credentials.

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::time::{Duration, Instant};

use super::secret::Transcript;
use super::{Agreed, Expected, PlainPolicy, Protection, Secret, Stranger, StrangerError};
use crate::channel::{ChannelError, Connection, Wait};
use crate::wire::{
    CREDENTIALS_BYTES, Credentials, HELLO_BYTES, Hello, HelloReply, PATH_CHECK_BYTES, SessionId,
    Status, WELCOME_BYTES, WireError, check_magic, verify_path_check,
};

/// The first byte of TLS: the type of a record with a handshake message.
const TLS_HANDSHAKE: u8 = 0x16;

/// A connection whose source has proved nothing. The only memory for it is this buffer, and with
/// TLS the state of the TLS handshake.
pub(super) struct PendingPeer {
    pub(super) connection: Connection,
    pub(super) since: Instant,
    stage: Stage,
    bytes: [u8; CREDENTIALS_BYTES],
    filled: usize,
}

/// How far a pending peer has got, from the first to make room to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Standing {
    /// It was refused and told so.
    Refused,
    /// It has sent nothing.
    Silent,
    /// It has sent what may be a preamble.
    Speaking,
    /// It has sent a preamble. Anyone can, where there is no TLS.
    Greeted,
    /// It has shown a certificate, or named a session that this side has.
    Known,
}

/// The awaited bytes.
enum Stage {
    /// The first byte: it tells TLS from plain.
    FirstByte,
    /// The rest of the TLS handshake, and the direction that it waits for.
    Tls(PollFlags),
    /// A [`Hello`].
    Hello,
    /// The [`Credentials`] for this challenge.
    Credentials(Box<Challenge>),
    /// A `path_check`: the source has proved what it knows.
    PathCheck(Box<Granted>),
    /// The end. A refusal was sent. Later bytes are read and dropped: closing with unread bytes
    /// would reset the connection before the peer has read the refusal.
    End,
}

/// A challenge that was sent.
pub(super) struct Challenge {
    pub(super) hello: Hello,
    pub(super) reply: HelloReply,
    pub(super) transcript: Transcript,
    pub(super) expected: Expected,
}

/// The answer to a source that has proved what it knows.
pub(super) struct Granted {
    pub(super) agreed: Agreed,
    pub(super) secret: Secret,
    pub(super) welcome: [u8; WELCOME_BYTES],
}

/// The state of a pending connection after a step.
pub(super) enum Progress {
    /// More bytes are needed.
    Waiting,
    /// A refused connection has ended.
    Ended,
    /// A valid [`Hello`] came.
    Hello(Hello),
    /// [`Credentials`] came, for this challenge.
    Credentials(Box<Challenge>, Credentials),
    /// Large packets came too: the source waits for this answer.
    Granted(Box<Granted>),
    /// The peer is not acceptable. The answer is for a peer that would understand it.
    Rejected(StrangerError, Answer),
}

/// The answer to a peer that is not acceptable.
pub(super) enum Answer {
    /// None: it would not understand any.
    Nothing,
    /// TLS has sent an alert already.
    Alert,
    /// A refusal.
    Reply(HelloReply),
}

impl PendingPeer {
    pub(super) fn new(connection: Connection) -> Self {
        Self {
            connection,
            since: Instant::now(),
            stage: Stage::FirstByte,
            bytes: [0; CREDENTIALS_BYTES],
            filled: 0,
        }
    }

    /// A connection whose last message was sent.
    pub(super) fn parting(connection: Connection) -> Self {
        let mut peer = Self::new(connection);
        peer.refuse(&[]);
        peer
    }

    /// Whether the peer was refused and told so.
    pub(super) const fn is_refused(&self) -> bool {
        matches!(self.stage, Stage::End)
    }

    /// Whether nothing of the `path_check` has come, which is due.
    pub(super) const fn lacks_large_packets(&self) -> bool {
        matches!(self.stage, Stage::PathCheck(_)) && self.filled == 0
    }

    /// Returns how far the peer has got.
    pub(super) fn standing(&self) -> Standing {
        match &self.stage {
            Stage::End => Standing::Refused,
            Stage::FirstByte => Standing::Silent,
            Stage::Tls(_) => Standing::Speaking,
            // Behind TLS it has a certificate.
            _ if self.connection.is_tls() => Standing::Known,
            Stage::Hello => Standing::Speaking,
            // A stranger does not know the number of a session.
            Stage::Credentials(challenge) => match challenge.expected {
                Expected::Known(_) => Standing::Known,
                Expected::New => Standing::Greeted,
            },
            Stage::PathCheck(granted) if granted.agreed.key.opens_session() => Standing::Greeted,
            Stage::PathCheck(_) => Standing::Known,
        }
    }

    /// The event that the next step needs.
    pub(super) const fn events(&self) -> PollFlags {
        match self.stage {
            Stage::Tls(events) => events,
            _ => PollFlags::IN,
        }
    }

    /// Takes the bytes that have arrived. Bytes after the preamble stay in the connection.
    pub(super) fn advance(&mut self, protection: &Protection) -> Progress {
        if let Stage::FirstByte = self.stage {
            match self.choose(protection) {
                Ok(true) => {}
                Ok(false) => return Progress::Waiting,
                Err(error) => return rejected(error),
            }
        }
        if let Stage::Tls(events) = &mut self.stage {
            match self.connection.step_tls("TLS handshake") {
                Ok(None) => self.stage = Stage::Hello,
                Ok(Some(needed)) => {
                    *events = needed;
                    return Progress::Waiting;
                }
                Err(error @ ChannelError::Tls(_)) => {
                    return Progress::Rejected(error.into(), Answer::Alert);
                }
                Err(error) => return rejected(error),
            }
        }
        match self.stage {
            Stage::Hello => self.read_hello(protection),
            Stage::Credentials(_) => self.read_credentials(),
            Stage::PathCheck(_) => self.read_path_check(),
            _ => self.discard(),
        }
    }

    /// Begins TLS if the first byte is that of TLS and this side uses it. Returns false if no byte
    /// has come.
    fn choose(&mut self, protection: &Protection) -> Result<bool, ChannelError> {
        let mut first = [0];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match recv(&self.connection, &mut first, flags) {
            Ok(_) => {}
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(errno) => {
                return Err(ChannelError::Lost {
                    what: "Hello",
                    source: errno.into(),
                });
            }
        }
        self.stage = Stage::Hello;
        if let Protection::Tls(config) = protection
            && first[0] == TLS_HANDSHAKE
        {
            self.connection.begin_tls_server(config)?;
            self.stage = Stage::Tls(PollFlags::IN);
        }
        Ok(true)
    }

    fn read_hello(&mut self, protection: &Protection) -> Progress {
        let full = match self.read(HELLO_BYTES, "Hello") {
            Ok(full) => full,
            // The first bytes of a peer that is gone already tell what it was.
            Err(error) => {
                return match check_magic(&self.bytes[..self.filled]) {
                    Err(other) => rejected(other),
                    Ok(()) => rejected(error),
                };
            }
        };
        if let Err(error) = check_magic(&self.bytes[..self.filled]) {
            // A peer with TLS understands that this is not TLS.
            let answer = HelloReply::refuse(SessionId([0; 16]), Status::Malformed);
            return match self.bytes[0] {
                TLS_HANDSHAKE if !self.connection.is_tls() => {
                    Progress::Rejected(StrangerError::SpeaksTls, Answer::Reply(answer))
                }
                _ => rejected(error),
            };
        }
        if !full {
            return Progress::Waiting;
        }
        let bytes = self.hello_bytes();
        let hello = match Hello::decode(&bytes) {
            Ok(hello) => hello,
            Err(error) => {
                let answer = HelloReply::refusal_of(&bytes, &error);
                let answer = answer.map_or(Answer::Nothing, Answer::Reply);
                return Progress::Rejected(error.into(), answer);
            }
        };
        let plain_allowed = match protection {
            Protection::Tls(_) => false,
            Protection::Plain(PlainPolicy::Anywhere) => true,
            Protection::Plain(PlainPolicy::LoopbackOnly) => self.connection.is_local(),
        };
        if !self.connection.is_tls() && !plain_allowed {
            let answer = HelloReply::refuse(hello.session, Status::TlsRequired);
            return Progress::Rejected(StrangerError::SpeaksPlain, Answer::Reply(answer));
        }
        Progress::Hello(hello)
    }

    fn read_credentials(&mut self) -> Progress {
        match self.read(CREDENTIALS_BYTES, "Credentials") {
            Ok(true) => {}
            Ok(false) => return Progress::Waiting,
            Err(error) => return rejected(error),
        }
        let credentials = match Credentials::decode(&self.bytes) {
            Ok(credentials) => credentials,
            Err(error) => return rejected(error),
        };
        self.bytes.fill(0);
        match core::mem::replace(&mut self.stage, Stage::End) {
            Stage::Credentials(challenge) => Progress::Credentials(challenge, credentials),
            _ => unreachable!("the stage that awaits them"),
        }
    }

    /// Awaits large packets. They have the whole time for themselves.
    pub(super) fn await_path_check(&mut self, granted: Granted) {
        self.stage = Stage::PathCheck(Box::new(granted));
        self.filled = 0;
        self.since = Instant::now();
    }

    /// Compares the bytes as they come, and keeps none.
    fn read_path_check(&mut self) -> Progress {
        while self.filled < PATH_CHECK_BYTES {
            let mut bytes = [0; 4096];
            let room = (PATH_CHECK_BYTES - self.filled).min(bytes.len());
            let got = match self
                .connection
                .recv_pending(&mut bytes[..room], "PathCheck")
            {
                Ok(None) => return Progress::Waiting,
                Ok(Some(got)) => got,
                Err(error) => return rejected(error),
            };
            if let Err(error) = verify_path_check(self.filled, &bytes[..got]) {
                return rejected(error);
            }
            self.filled += got;
        }
        match core::mem::replace(&mut self.stage, Stage::End) {
            Stage::PathCheck(granted) => Progress::Granted(granted),
            _ => unreachable!("the stage that awaits them"),
        }
    }

    /// Reads until the message has `needed` bytes. Returns whether it has.
    fn read(&mut self, needed: usize, what: &'static str) -> Result<bool, ChannelError> {
        while self.filled < needed {
            let room = &mut self.bytes[self.filled..needed];
            match self.connection.recv_pending(room, what) {
                Ok(None) => return Ok(false),
                Ok(Some(more)) => self.filled += more,
                Err(ChannelError::Closed { .. }) if self.filled > 0 => {
                    return Err(ChannelError::Wire(WireError::Truncated {
                        what,
                        needed: needed as u64,
                        got: self.filled as u64,
                    }));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Returns the bytes of the complete [`Hello`].
    pub(super) fn hello_bytes(&self) -> [u8; HELLO_BYTES] {
        *self.bytes.first_chunk().expect("a long buffer")
    }

    /// Sends a challenge, and awaits the credentials for it.
    pub(super) fn challenge(&mut self, challenge: Challenge) -> Result<(), ChannelError> {
        send(&self.connection, &challenge.transcript.reply, "HelloReply")?;
        self.stage = Stage::Credentials(Box::new(challenge));
        self.filled = 0;
        Ok(())
    }

    /// Sends `message` as the last one, if there is one. Awaits the end of the connection.
    pub(super) fn refuse(&mut self, message: &[u8]) {
        // If the send fails, the peer has left already.
        let _ = send(&self.connection, message, "refusal");
        self.connection.shutdown_write();
        self.stage = Stage::End;
        self.since = Instant::now();
    }

    fn discard(&self) -> Progress {
        // A bounded number of bytes in each step: others wait.
        let mut bytes = [0; 4096];
        match recv(&self.connection, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((_, 1..)) | Err(Errno::AGAIN | Errno::INTR) => Progress::Waiting,
            Ok(_) | Err(_) => Progress::Ended,
        }
    }

    pub(super) fn stranger(&self, why: StrangerError) -> Stranger {
        Stranger::new(self.connection.peer().to_owned(), why)
    }
}

fn rejected(error: impl Into<StrangerError>) -> Progress {
    Progress::Rejected(error.into(), Answer::Nothing)
}

/// Sends a message without waiting. The socket's buffer is empty, so it fits.
fn send(connection: &Connection, bytes: &[u8], what: &'static str) -> Result<(), ChannelError> {
    connection.write_all(bytes, &Wait::block(what).within(Duration::ZERO))
}
