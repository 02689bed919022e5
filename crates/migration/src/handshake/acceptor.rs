//! The destination's side: many callers looked at in turn, one pair accepted.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::caller::{Caller, Look};
use super::{Agreed, HELLO_LIMIT, HandshakeError, Pair, Stranger, StrangerError};
use crate::channel::{ChannelError, Connection, Listener, OpenError, Wait};
use crate::wire::{Hello, HelloReply, Role, Status};

/// The most callers looked at at once; one more sends the oldest away.
const MAX_CALLERS: usize = 32;
/// How often `stop` and the limits are looked at.
const TICK: Duration = Duration::from_millis(50);
/// What all this waits for.
const WHAT: &str = "a source to connect";

pub(super) struct Acceptor<'a> {
    listener: &'a Listener,
    stranger: &'a mut dyn FnMut(&Stranger),
    callers: Vec<Caller>,
    half: Option<Half>,
}

/// A stream connection that was accepted and waits for its urgent one.
struct Half {
    stream: Connection,
    agreed: Agreed,
    since: Instant,
}

impl<'a> Acceptor<'a> {
    pub(super) fn new(listener: &'a Listener, stranger: &'a mut dyn FnMut(&Stranger)) -> Self {
        Self {
            listener,
            stranger,
            callers: Vec::with_capacity(MAX_CALLERS),
            half: None,
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
            if let Some(pair) = self.look_at_callers() {
                return Ok(pair);
            }
            self.drop_a_half_that_waited_in_vain();
        }
    }

    /// Sleeps until something may have happened, at most a tick.
    fn sleep(&self) -> Result<(), HandshakeError> {
        let half = self.half.iter().map(|half| half.stream.as_fd());
        let callers = self.callers.iter().map(|caller| caller.connection.as_fd());
        let mut fds: Vec<PollFd<'_>> = std::iter::once(self.listener.as_fd())
            .chain(callers)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            // The first frame may have come on an accepted stream: only its end is of interest here.
            .chain(half.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::RDHUP)))
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

    fn look_at_callers(&mut self) -> Option<Pair> {
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
                    if let Some(pair) = self.hear(caller, &hello) {
                        return Some(pair);
                    }
                    // A refused caller was put at the end of the list.
                }
            }
        }
        None
    }

    /// A caller with a good preamble: accepts it if it is its turn.
    fn hear(&mut self, mut caller: Caller, hello: &Hello) -> Option<Pair> {
        self.drop_a_half_that_waited_in_vain();
        let same = self
            .half
            .as_ref()
            .map(|half| half.agreed.session == hello.session);
        let refusal = match (hello.role, same) {
            (Role::Stream, None) | (Role::Urgent, Some(true)) => None,
            (Role::Stream, Some(true)) => Some(Status::BadRole),
            (Role::Stream, Some(false)) => Some(Status::Busy),
            (Role::Urgent, _) => Some(Status::UnknownSession),
        };
        if let Some(status) = refusal {
            let stranger = caller.refuse_as(hello.session, status);
            (self.stranger)(&stranger);
            self.callers.push(caller);
            return None;
        }
        let reply = HelloReply::accept(hello);
        let at_once = Wait::block("HelloReply").within(TICK);
        if let Err(error) = caller.connection.send_small(&reply.encode(), &at_once) {
            (self.stranger)(&caller.stranger(error.into()));
            return None;
        }
        match hello.role {
            Role::Stream => {
                self.half = Some(Half {
                    stream: caller.connection,
                    agreed: Agreed {
                        version: reply.version,
                        capabilities: reply.capabilities,
                        session: hello.session,
                    },
                    since: Instant::now(),
                });
                None
            }
            Role::Urgent => self.half.take().map(|half| Pair {
                stream: half.stream,
                urgent: caller.connection,
                agreed: half.agreed,
            }),
        }
    }

    /// A source that died, or lets us wait, must not keep others out.
    fn drop_a_half_that_waited_in_vain(&mut self) {
        let Some(half) = &self.half else { return };
        if half.since.elapsed() >= HELLO_LIMIT || has_ended(&half.stream) {
            (self.stranger)(&Stranger {
                peer: half.stream.peer().to_owned(),
                why: StrangerError::HalfPair,
            });
            self.half = None;
        }
    }
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
