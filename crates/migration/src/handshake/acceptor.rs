//! The destination's side of the handshake. It serves all pending connections in turn, and accepts
//! several sessions at once.
//!
//! A session is ready when both connections are accepted. In [`Mode::Speaking`] its source must
//! also have sent a byte after the preamble. So an idle stranger keeps no source out: it holds one
//! of the places for at most [`HELLO_LIMIT`].

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::pending::{HelloState, PendingPeer};
use super::{Agreed, HELLO_LIMIT, HandshakeError, Pair, Stranger, StrangerError};
use crate::channel::{ChannelError, Connection, Listener, OpenError, Wait};
use crate::wire::{ErrorCode, ErrorMessage, Frame, Hello, HelloReply, Role, Status};

/// The most pending connections. One more drops the oldest.
const MAX_PENDING: usize = 32;
/// The most accepted sessions at once that are not ready.
const MAX_SESSIONS: usize = 8;
/// The longest interval between two checks of `stop` and of the limits.
const TICK: Duration = Duration::from_millis(50);
/// The awaited event, for errors.
const WHAT: &str = "a source to connect";

pub(super) struct Acceptor<'a> {
    listener: &'a Listener,
    stranger: &'a mut dyn FnMut(&Stranger),
    pending: Vec<PendingPeer>,
    sessions: Vec<Session>,
    mode: Mode,
}

/// The sessions that an [`Acceptor`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Returns the first session that has both connections.
    Paired,
    /// Returns the first session that has both connections and whose source has sent a byte after
    /// the preamble.
    Speaking,
    /// Refuses all sessions, since another migration is under way.
    Refusing,
}

/// A session whose stream connection was accepted.
struct Session {
    stream: Connection,
    urgent: Option<Connection>,
    agreed: Agreed,
    since: Instant,
}

impl Session {
    /// Returns the reason to drop the session, if there is one.
    fn ended(&self) -> Option<StrangerError> {
        let gone = has_ended(&self.stream);
        if !gone && self.since.elapsed() < HELLO_LIMIT {
            return None;
        }
        Some(match self.urgent {
            None => StrangerError::HalfPair,
            Some(_) => StrangerError::SilentSession,
        })
    }

    fn is_ready(&self, mode: Mode) -> bool {
        self.urgent.is_some() && (mode == Mode::Paired || has_sent(&self.stream))
    }
}

impl<'a> Acceptor<'a> {
    pub(super) fn new(
        listener: &'a Listener,
        mode: Mode,
        stranger: &'a mut dyn FnMut(&Stranger),
    ) -> Self {
        Self {
            listener,
            stranger,
            pending: Vec::with_capacity(MAX_PENDING),
            sessions: Vec::with_capacity(MAX_SESSIONS),
            mode,
        }
    }

    pub(super) fn run(
        mut self,
        limit: Option<Duration>,
        stop: &dyn Fn() -> bool,
    ) -> Result<Pair, HandshakeError> {
        let started = Instant::now();
        loop {
            if stop() {
                return Err(ChannelError::Interrupted { what: WHAT }.into());
            }
            if let Some(after) = limit.filter(|limit| started.elapsed() >= *limit) {
                return Err(ChannelError::TimedOut { what: WHAT, after }.into());
            }
            self.sleep()?;
            self.accept_new_peers()?;
            self.read_hellos();
            if let Some(pair) = self.take_ready_session() {
                return Ok(pair);
            }
            self.drop_ended_sessions();
        }
    }

    /// Sleeps until a descriptor is ready, for at most [`TICK`].
    fn sleep(&self) -> Result<(), HandshakeError> {
        let sessions = self.sessions.iter().map(|session| {
            // While the urgent connection is missing, only the end of the stream matters: a source
            // may send its first frame too early.
            let events = match session.urgent {
                None => PollFlags::RDHUP,
                Some(_) => PollFlags::IN | PollFlags::RDHUP,
            };
            PollFd::from_borrowed_fd(session.stream.as_fd(), events)
        });
        let pending = self.pending.iter().map(|peer| peer.connection.as_fd());
        let mut fds: Vec<PollFd<'_>> = std::iter::once(self.listener.as_fd())
            .chain(pending)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .chain(sessions)
            .collect();
        let tick = Timespec::try_from(TICK).expect("a short time");
        match poll(&mut fds, Some(&tick)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => {
                let address = self.listener.local_addr().clone();
                let source = errno.into();
                Err(ChannelError::Open(OpenError::Os { address, source }).into())
            }
        }
    }

    fn accept_new_peers(&mut self) -> Result<(), HandshakeError> {
        // At most as many at a time as fit: preambles that have arrived are read before more
        // connections are accepted.
        for _ in 0..MAX_PENDING {
            let Some(connection) = self.listener.try_accept().map_err(ChannelError::from)? else {
                break;
            };
            if self.pending.len() == MAX_PENDING {
                // They are in the order in which they connected.
                let oldest = self.pending.remove(0);
                if !oldest.is_refused() {
                    (self.stranger)(&oldest.stranger(StrangerError::Crowded));
                }
            }
            self.pending.push(PendingPeer::new(connection));
        }
        Ok(())
    }

    fn read_hellos(&mut self) {
        let now = Instant::now();
        let mut index = 0;
        while let Some(peer) = self.pending.get_mut(index) {
            match peer.read_hello() {
                HelloState::Waiting if peer.is_late(now) => {
                    let peer = self.pending.remove(index);
                    if !peer.is_refused() {
                        let why = StrangerError::Silent { after: HELLO_LIMIT };
                        (self.stranger)(&peer.stranger(why));
                    }
                }
                HelloState::Waiting => index += 1,
                HelloState::Closed => drop(self.pending.remove(index)),
                HelloState::Rejected(why, answer) => {
                    (self.stranger)(&peer.stranger(why));
                    match answer {
                        Some(answer) => {
                            peer.refuse(&answer);
                            index += 1;
                        }
                        None => drop(self.pending.remove(index)),
                    }
                }
                HelloState::Complete(hello) => {
                    let peer = self.pending.remove(index);
                    self.handle_hello(peer, &hello);
                    // `handle_hello` puts a refused connection at the end of the list.
                }
            }
        }
    }

    /// Accepts a connection with a valid preamble if there is room for it, and refuses it
    /// otherwise.
    fn handle_hello(&mut self, mut peer: PendingPeer, hello: &Hello) {
        self.drop_ended_sessions();
        let same = self
            .sessions
            .iter()
            .position(|session| session.agreed.session == hello.session);
        let refusal = match (hello.role, same) {
            _ if self.mode == Mode::Refusing => Some(Status::Busy),
            (Role::Stream, None) if self.sessions.len() == MAX_SESSIONS => Some(Status::Busy),
            (Role::Stream, None) => None,
            (Role::Stream, Some(_)) => Some(Status::BadRole),
            (Role::Urgent, None) => Some(Status::UnknownSession),
            (Role::Urgent, Some(at)) => {
                let taken = self.sessions[at].urgent.is_some();
                taken.then_some(Status::BadRole)
            }
        };
        if let Some(status) = refusal {
            let stranger = peer.refuse_as(hello.session, status);
            (self.stranger)(&stranger);
            self.pending.push(peer);
            return;
        }
        let reply = HelloReply::accept(hello);
        let at_once = Wait::block("HelloReply").within(TICK);
        if let Err(error) = peer.connection.send_small(&reply.encode(), &at_once) {
            (self.stranger)(&peer.stranger(error.into()));
            return;
        }
        match same {
            None => self.sessions.push(Session {
                stream: peer.connection,
                urgent: None,
                agreed: Agreed {
                    version: reply.version,
                    capabilities: reply.capabilities,
                    session: hello.session,
                },
                since: Instant::now(),
            }),
            Some(at) => {
                self.sessions[at].urgent = Some(peer.connection);
                // The limit starts anew for the first byte after the preamble.
                self.sessions[at].since = Instant::now();
            }
        }
    }

    /// Takes the first session that is ready, and tells all other sources to retry.
    fn take_ready_session(&mut self) -> Option<Pair> {
        let mode = self.mode;
        let at = self.sessions.iter().position(|s| s.is_ready(mode))?;
        let Session {
            stream,
            urgent,
            agreed,
            ..
        } = self.sessions.remove(at);
        for session in self.sessions.drain(..) {
            send_busy(&session.stream);
        }
        Some(Pair {
            stream,
            urgent: urgent?,
            agreed,
        })
    }

    /// Drops sessions whose source died or took too long, so that they keep no other source out.
    fn drop_ended_sessions(&mut self) {
        let mut at = 0;
        while let Some(session) = self.sessions.get(at) {
            let Some(why) = session.ended() else {
                at += 1;
                continue;
            };
            (self.stranger)(&Stranger {
                peer: session.stream.peer().to_owned(),
                why,
            });
            self.sessions.remove(at);
        }
    }
}

/// Tells a source whose connections were accepted that the destination took another source.
fn send_busy(stream: &Connection) {
    let message = "another source was taken; try again";
    let frame = Frame::Error(ErrorMessage::new(ErrorCode::Busy, message));
    let mut bytes = Vec::new();
    if frame.encode(&mut bytes).is_ok() {
        // Nothing was sent on this connection before, so the frame fits. A source that is gone
        // needs no answer.
        let _ = stream.send_small(&bytes, &Wait::block("Error").within(Duration::ZERO));
    }
    stream.shutdown_write();
}

/// Whether unread bytes of the peer have arrived.
fn has_sent(connection: &Connection) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    rustix::net::recv(connection.as_fd(), &mut [0; 1], flags).is_ok_and(|(bytes, _)| bytes > 0)
}

/// Whether the peer has closed the connection, even if unread bytes remain.
fn has_ended(connection: &Connection) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(
        connection.as_fd(),
        PollFlags::RDHUP,
    )];
    let at_once = Timespec::try_from(Duration::ZERO).expect("no time");
    let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    // The next tick repeats an interrupted `poll`.
    poll(&mut fds, Some(&at_once)).is_ok() && fds[0].revents().intersects(ended)
}
