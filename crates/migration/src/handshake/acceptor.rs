//! The destination's side: it looks at all callers in turn, and accepts several sessions at once.
//!
//! A session is taken when both connections are there and, where the caller wants that, its source
//! has begun to speak. So an idle stranger blocks nobody: it has one of the places for
//! [`HELLO_LIMIT`].

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::caller::{Caller, Look};
use super::{Agreed, HELLO_LIMIT, HandshakeError, Pair, Stranger, StrangerError};
use crate::channel::{ChannelError, Connection, Listener, OpenError, Wait};
use crate::wire::{ErrorCode, ErrorMessage, Frame, Hello, HelloReply, Role, Status};

/// The most callers looked at at once; one more sends the oldest away.
const MAX_CALLERS: usize = 32;
/// The most accepted sessions at once whose source has yet to speak.
const MAX_SESSIONS: usize = 8;
/// How often `stop` and the limits are looked at.
const TICK: Duration = Duration::from_millis(50);
/// What all this waits for.
const WHAT: &str = "a source to connect";

pub(super) struct Acceptor<'a> {
    listener: &'a Listener,
    stranger: &'a mut dyn FnMut(&Stranger),
    callers: Vec<Caller>,
    sessions: Vec<Session>,
    mode: Mode,
}

/// What an [`Acceptor`] does with a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Takes the first that has both connections.
    Paired,
    /// Takes the first that has both connections and whose source has begun to speak.
    Speaking,
    /// Refuses all, as another migration is under way.
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
    /// Why it is not waited for any longer, if so.
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
        self.urgent.is_some() && (mode == Mode::Paired || has_spoken(&self.stream))
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
            callers: Vec::with_capacity(MAX_CALLERS),
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
            self.take_new_callers()?;
            self.look_at_callers();
            if let Some(pair) = self.take_ready_session() {
                return Ok(pair);
            }
            self.drop_ended_sessions();
        }
    }

    /// Sleeps until something may have happened, at most a tick.
    fn sleep(&self) -> Result<(), HandshakeError> {
        let sessions = self.sessions.iter().map(|session| {
            // Only the end of a stream without its urgent connection is of interest: its source may
            // have spoken too early.
            let events = match session.urgent {
                None => PollFlags::RDHUP,
                Some(_) => PollFlags::IN | PollFlags::RDHUP,
            };
            PollFd::from_borrowed_fd(session.stream.as_fd(), events)
        });
        let callers = self.callers.iter().map(|caller| caller.connection.as_fd());
        let mut fds: Vec<PollFd<'_>> = std::iter::once(self.listener.as_fd())
            .chain(callers)
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

    fn take_new_callers(&mut self) -> Result<(), HandshakeError> {
        // No more at a time than fit: those who called and spoke are heard before the next come.
        for _ in 0..MAX_CALLERS {
            let Some(connection) = self.listener.try_accept().map_err(ChannelError::from)? else {
                break;
            };
            if self.callers.len() == MAX_CALLERS {
                // They are in the order in which they called.
                let oldest = self.callers.remove(0);
                if !oldest.is_refused() {
                    (self.stranger)(&oldest.stranger(StrangerError::Crowded));
                }
            }
            self.callers.push(Caller::new(connection));
        }
        Ok(())
    }

    fn look_at_callers(&mut self) {
        let now = Instant::now();
        let mut index = 0;
        while let Some(caller) = self.callers.get_mut(index) {
            match caller.look() {
                Look::Waiting if caller.is_late(now) => {
                    let caller = self.callers.remove(index);
                    if !caller.is_refused() {
                        let why = StrangerError::Silent { after: HELLO_LIMIT };
                        (self.stranger)(&caller.stranger(why));
                    }
                }
                Look::Waiting => index += 1,
                Look::Gone => drop(self.callers.remove(index)),
                Look::Bad(why, answer) => {
                    (self.stranger)(&caller.stranger(why));
                    match answer {
                        Some(answer) => {
                            caller.refuse(&answer);
                            index += 1;
                        }
                        None => drop(self.callers.remove(index)),
                    }
                }
                Look::Says(hello) => {
                    let caller = self.callers.remove(index);
                    self.hear(caller, &hello);
                    // A refused caller was put at the end of the list.
                }
            }
        }
    }

    /// A caller with a good preamble: accepts it if there is room for it.
    fn hear(&mut self, mut caller: Caller, hello: &Hello) {
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
            let stranger = caller.refuse_as(hello.session, status);
            (self.stranger)(&stranger);
            self.callers.push(caller);
            return;
        }
        let reply = HelloReply::accept(hello);
        let at_once = Wait::block("HelloReply").within(TICK);
        if let Err(error) = caller.connection.send_small(&reply.encode(), &at_once) {
            (self.stranger)(&caller.stranger(error.into()));
            return;
        }
        match same {
            None => self.sessions.push(Session {
                stream: caller.connection,
                urgent: None,
                agreed: Agreed {
                    version: reply.version,
                    capabilities: reply.capabilities,
                    session: hello.session,
                },
                since: Instant::now(),
            }),
            Some(at) => {
                self.sessions[at].urgent = Some(caller.connection);
                // Its source has as long again for its first byte.
                self.sessions[at].since = Instant::now();
            }
        }
    }

    /// Takes the first session that is ready, and tells all others that they may try again.
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
            tell_busy(&session.stream);
        }
        Some(Pair {
            stream,
            urgent: urgent?,
            agreed,
        })
    }

    /// A source that died, or lets this side wait, must not keep others out.
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

/// Tells a source whose connections were accepted that another one was taken.
fn tell_busy(stream: &Connection) {
    let message = "another source was taken; try again";
    let frame = Frame::Error(ErrorMessage::new(ErrorCode::Busy, message));
    let mut bytes = Vec::new();
    if frame.encode(&mut bytes).is_ok() {
        // Nothing was sent on it before, so the frame fits. A source that is gone needs no answer.
        let _ = stream.send_small(&bytes, &Wait::block("Error").within(Duration::ZERO));
    }
    stream.shutdown_write();
}

/// Whether bytes of the peer wait to be read.
fn has_spoken(connection: &Connection) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    rustix::net::recv(connection.as_fd(), &mut [0; 1], flags).is_ok_and(|(bytes, _)| bytes > 0)
}

/// Whether the peer has closed the connection, whatever it may have sent before.
fn has_ended(connection: &Connection) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(
        connection.as_fd(),
        PollFlags::RDHUP,
    )];
    let at_once = Timespec::try_from(Duration::ZERO).expect("no time");
    let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    // An interrupted look is repeated at the next tick.
    poll(&mut fds, Some(&at_once)).is_ok() && fds[0].revents().intersects(ended)
}
