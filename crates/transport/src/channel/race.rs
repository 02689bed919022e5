//! Connects to the first address of a host that answers.
//!
//! A host may have several addresses, and some may not answer. Attempts begin 250 ms apart, or at
//! once when one has failed (RFC 8305). The first that succeeds ends the others. The address that
//! worked the last time comes first. Then the name is resolved only if that address does not answer
//! soon.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, sockopt};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use super::connect::stream_socket;
use super::names::{literal, resolve};
use super::{ChannelError, OpenError, Wait};
use crate::address::Address;

/// The pause before the attempt at the next address: the recommended one of RFC 8305, section 5.
const STAGGER: Duration = Duration::from_millis(250);
/// The most attempts at once. One more ends the oldest, which has had 2 s.
const MAX_ATTEMPTS: usize = 8;
/// The interval at which a wait looks whether it is still wanted, and whether the name is resolved.
const TICK: Duration = Duration::from_millis(20);

/// An attempt under way.
struct Attempt {
    socket: OwnedFd,
    to: SocketAddr,
    since: Instant,
}

/// The addresses of the host's name.
enum Names {
    /// They are not needed yet.
    Later,
    /// A thread asks for them. The resolver cannot be interrupted, and may take many seconds.
    Asked(Receiver<Result<Vec<SocketAddr>, OpenError>>),
    /// They are known, or cannot be.
    Known,
}

/// See the module.
struct Race<'a> {
    address: &'a Address,
    host: &'a str,
    port: u16,
    wait: &'a Wait<'a>,
    names: Names,
    queue: VecDeque<SocketAddr>,
    tried: Vec<SocketAddr>,
    attempts: Vec<Attempt>,
    /// The begin of the newest attempt, unless it has failed.
    begun: Option<Instant>,
    failure: Option<OpenError>,
}

/// Connects to `host`, which is that of `address`. Tries `worked` first.
pub(super) fn connect(
    address: &Address,
    (host, port): (&str, u16),
    worked: Option<SocketAddr>,
    wait: &Wait<'_>,
) -> Result<(OwnedFd, SocketAddr), ChannelError> {
    let literal = literal(host, port).map_err(|source| OpenError::Unresolved {
        host: host.to_owned(),
        source,
    })?;
    let names = match literal {
        Some(_) => Names::Known,
        None => Names::Later,
    };
    let first = literal.or(worked).into_iter().collect();
    Race {
        address,
        host,
        port,
        wait,
        names,
        queue: first,
        tried: Vec::new(),
        attempts: Vec::new(),
        begun: None,
        failure: None,
    }
    .run()
}

impl Race<'_> {
    fn run(mut self) -> Result<(OwnedFd, SocketAddr), ChannelError> {
        loop {
            self.take_names();
            if self.wait.stop.is_some_and(|stop| stop()) {
                return Err(ChannelError::Interrupted {
                    what: self.wait.what,
                });
            }
            let due = self.begun.is_none_or(|begun| begun.elapsed() >= STAGGER);
            if due && let Some(next) = self.queue.pop_front() {
                if let Some(connected) = self.begin(next) {
                    return Ok(connected);
                }
                continue;
            }
            if due && matches!(self.names, Names::Later) {
                self.ask();
                continue;
            }
            self.expire();
            if self.attempts.is_empty() && self.queue.is_empty() {
                match self.names {
                    Names::Known => {
                        let failure = self.failure.take();
                        return Err(failure.expect("a host has an address, or an error").into());
                    }
                    Names::Later => continue,
                    Names::Asked(_) => {}
                }
            }
            if let Some(connected) = self.sleep() {
                return Ok(connected);
            }
        }
    }

    /// Asks for the addresses of the name, on a thread of its own.
    fn ask(&mut self) {
        let (sender, answer) = channel();
        let (host, port) = (self.host.to_owned(), self.port);
        let resolver = std::thread::Builder::new().name("pf-resolve".into());
        // The other end is gone if an attempt has succeeded meanwhile.
        let spawned = resolver.spawn(move || drop(sender.send(resolve(&host, port))));
        match spawned {
            Ok(_) => self.names = Names::Asked(answer),
            Err(_) => self.learn(resolve(self.host, self.port)),
        }
    }

    /// Takes the addresses of the name, if they are there.
    fn take_names(&mut self) {
        let Names::Asked(answer) = &self.names else {
            return;
        };
        let answer = match self.attempts.is_empty() {
            true => answer.recv_timeout(TICK),
            false => answer.try_recv().map_err(|error| match error {
                TryRecvError::Empty => RecvTimeoutError::Timeout,
                TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
            }),
        };
        match answer {
            Ok(found) => self.learn(found),
            Err(RecvTimeoutError::Timeout) => {}
            // The resolver has panicked.
            Err(RecvTimeoutError::Disconnected) => self.learn(Err(OpenError::Unresolved {
                host: self.host.to_owned(),
                source: std::io::Error::other("the resolver has ended without an answer"),
            })),
        }
    }

    fn learn(&mut self, found: Result<Vec<SocketAddr>, OpenError>) {
        self.names = Names::Known;
        match found {
            Ok(found) => {
                let tried = &self.tried;
                let new = |found: &SocketAddr| !tried.contains(found);
                self.queue
                    .extend(alternating(found).into_iter().filter(new));
            }
            Err(error) => self.fail(error),
        }
    }

    /// Begins an attempt. Returns the connection if it is open at once.
    fn begin(&mut self, to: SocketAddr) -> Option<(OwnedFd, SocketAddr)> {
        self.tried.push(to);
        let family = match to {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let socket = match stream_socket(family) {
            Ok(socket) => socket,
            Err(errno) => {
                self.fail_by(errno);
                return None;
            }
        };
        match rustix::net::connect(&socket, &to) {
            Ok(()) => return Some((socket, to)),
            // The kernel completes an interrupted connect in the background (connect(2)).
            Err(Errno::INPROGRESS | Errno::INTR) => {
                if self.attempts.len() == MAX_ATTEMPTS {
                    self.attempts.remove(0);
                }
                let since = Instant::now();
                self.begun = Some(since);
                self.attempts.push(Attempt { socket, to, since });
            }
            Err(errno) => self.fail_by(errno),
        }
        None
    }

    /// Ends attempts that have taken the whole limit.
    fn expire(&mut self) {
        let Some(after) = self.wait.limit else {
            return;
        };
        let before = self.attempts.len();
        self.attempts.retain(|one| one.since.elapsed() < after);
        if self.attempts.len() < before {
            let address = self.address.clone();
            self.fail(OpenError::NoAnswer { address, after });
        }
    }

    /// Waits for the next event. Returns the first connection that is open.
    fn sleep(&mut self) -> Option<(OwnedFd, SocketAddr)> {
        if self.attempts.is_empty() {
            // `take_names` waits.
            return None;
        }
        let looks = self.wait.stop.is_some() || matches!(self.names, Names::Asked(_));
        let next = self.begun.map(|begun| begun + STAGGER);
        let next = next.filter(|_| !self.queue.is_empty() || matches!(self.names, Names::Later));
        let ends = |limit| self.attempts.iter().map(move |one| one.since + limit).min();
        let end = self.wait.limit.and_then(ends);
        let now = Instant::now();
        let until = [next, end].into_iter().flatten().min();
        let pause = until.map(|until| until.saturating_duration_since(now));
        let pause = [pause, looks.then_some(TICK)].into_iter().flatten().min();
        // A pause that is too long for the kernel's clock counts as none.
        let pause = pause.and_then(|pause| Timespec::try_from(pause).ok());
        let sockets = self.attempts.iter().map(|one| &one.socket);
        let mut fds: Vec<_> = sockets.map(|fd| PollFd::new(fd, PollFlags::OUT)).collect();
        if let Err(errno) = poll(&mut fds, pause.as_ref())
            && errno != Errno::INTR
        {
            // Only a lack of kernel memory is left as the reason.
            std::thread::sleep(TICK);
        }
        let mut at = 0;
        while at < self.attempts.len() {
            let Attempt { socket, .. } = &self.attempts[at];
            match sockopt::socket_error(socket) {
                Ok(Ok(())) if rustix::net::getpeername(socket).is_ok() => {
                    let Attempt { socket, to, .. } = self.attempts.swap_remove(at);
                    return Some((socket, to));
                }
                Ok(Ok(())) => at += 1,
                Ok(Err(errno)) | Err(errno) => {
                    self.attempts.remove(at);
                    self.fail_by(errno);
                }
            }
        }
        None
    }

    fn fail_by(&mut self, errno: Errno) {
        self.fail(OpenError::from_os(self.address, errno.into()));
    }

    /// Keeps the failure that says most: an address that answers is the right one more likely. The
    /// next attempt need not wait.
    fn fail(&mut self, error: OpenError) {
        self.begun = None;
        if !matches!(self.failure, Some(OpenError::Refused { .. })) {
            self.failure = Some(error);
        }
    }
}

/// Lets the families take turns, beginning with that of the first address: one of them may not work
/// here at all. No address comes twice.
fn alternating(found: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let Some(first) = found.first() else {
        return found;
    };
    let leads = first.is_ipv4();
    let (a, b): (VecDeque<_>, VecDeque<_>) = found.iter().partition(|one| one.is_ipv4() == leads);
    let mut turns = [a, b];
    let mut order: Vec<SocketAddr> = Vec::new();
    while turns.iter().any(|turn| !turn.is_empty()) {
        for turn in &mut turns {
            if let Some(next) = turn.pop_front()
                && !order.contains(&next)
            {
                order.push(next);
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    const LIMIT: Duration = Duration::from_secs(60);

    /// A listener that drops all further connections, as its queue is full.
    struct Dead {
        listener: TcpListener,
        _queue: Vec<TcpStream>,
    }

    impl Dead {
        fn new() -> Self {
            let socket = stream_socket(AddressFamily::INET).unwrap();
            rustix::net::bind(&socket, &"127.0.0.1:0".parse::<SocketAddr>().unwrap()).unwrap();
            rustix::net::listen(&socket, 0).unwrap();
            let listener = TcpListener::from(socket);
            let to = listener.local_addr().unwrap();
            let mut queue = Vec::new();
            while let Ok(one) = TcpStream::connect_timeout(&to, Duration::from_millis(300)) {
                queue.push(one);
            }
            Self {
                listener,
                _queue: queue,
            }
        }

        fn address(&self) -> SocketAddr {
            self.listener.local_addr().unwrap()
        }
    }

    fn race<'a>(address: &'a Address, wait: &'a Wait<'a>, queue: &[SocketAddr]) -> Race<'a> {
        Race {
            address,
            host: "host",
            port: 1,
            wait,
            names: Names::Known,
            queue: queue.iter().copied().collect(),
            tried: Vec::new(),
            attempts: Vec::new(),
            begun: None,
            failure: None,
        }
    }

    fn refusing() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    }

    fn name() -> Address {
        "host:1".parse().unwrap()
    }

    #[test]
    fn dead_addresses_cost_a_quarter_of_a_second_each() {
        let (dead, other) = (Dead::new(), Dead::new());
        let alive = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = alive.local_addr().unwrap();
        let (address, wait) = (name(), Wait::block("connection").within(LIMIT));
        let queue = [dead.address(), refusing(), other.address(), to];
        let began = Instant::now();
        let (_, found) = race(&address, &wait, &queue).run().unwrap();
        assert_eq!(found, to);
        assert!(began.elapsed() >= STAGGER, "{:?}", began.elapsed());
        assert!(began.elapsed() < LIMIT / 2, "{:?}", began.elapsed());
    }

    #[test]
    fn more_dead_addresses_than_attempts_at_once_do_not_hide_the_last() {
        let dead: Vec<Dead> = (0..MAX_ATTEMPTS + 2).map(|_| Dead::new()).collect();
        let alive = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = alive.local_addr().unwrap();
        let (address, wait) = (name(), Wait::block("connection").within(LIMIT));
        let mut queue: Vec<_> = dead.iter().map(Dead::address).collect();
        queue.push(to);
        let began = Instant::now();
        let (_, found) = race(&address, &wait, &queue).run().unwrap();
        assert_eq!(found, to);
        assert!(began.elapsed() < LIMIT / 2, "{:?}", began.elapsed());
    }

    #[test]
    fn no_answer_and_a_refusal_are_told_apart() {
        let dead = Dead::new();
        let limit = Duration::from_millis(300);
        let (address, wait) = (name(), Wait::block("connection").within(limit));
        let failed = |queue: &[SocketAddr]| match race(&address, &wait, queue).run() {
            Err(ChannelError::Open(error)) => error,
            other => panic!("{other:?}"),
        };
        let error = failed(&[dead.address()]);
        assert!(matches!(error, OpenError::NoAnswer { .. }), "{error:?}");
        assert!(error.to_string().contains("tcp:host:1"), "{error}");
        for queue in [[dead.address(), refusing()], [refusing(), dead.address()]] {
            let error = failed(&queue);
            assert!(matches!(error, OpenError::Refused { .. }), "{error:?}");
        }
    }

    #[test]
    fn a_wait_for_a_dead_address_is_interrupted() {
        let dead = Dead::new();
        let began = Instant::now();
        let stop = || began.elapsed() > Duration::from_millis(50);
        let (address, wait) = (
            name(),
            Wait::block("connection").within(LIMIT).unless(&stop),
        );
        let stopped = race(&address, &wait, &[dead.address()]).run();
        assert!(matches!(stopped, Err(ChannelError::Interrupted { .. })));
    }

    #[test]
    fn the_address_that_worked_needs_no_resolver_and_a_dead_one_does_no_harm() {
        let alive = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = alive.local_addr().unwrap();
        let (port, wait) = (to.port(), Wait::block("connection").within(LIMIT));
        let of = |host: &str| Address::Tcp {
            host: host.into(),
            port,
        };
        // No resolver knows this name (RFC 6761).
        let unknown = of("no-such-host.invalid");
        let (_, found) =
            connect(&unknown, ("no-such-host.invalid", port), Some(to), &wait).unwrap();
        assert_eq!(found, to);
        let dead = Dead::new();
        for worked in [None, Some(refusing()), Some(dead.address())] {
            let local = of("localhost");
            let (_, found) = connect(&local, ("localhost", port), worked, &wait).unwrap();
            assert_eq!(found, to, "{worked:?}");
        }
    }

    #[test]
    fn families_take_turns_and_no_address_comes_twice() {
        let all = |texts: &[&str]| -> Vec<SocketAddr> {
            texts.iter().map(|text| text.parse().unwrap()).collect()
        };
        let found = all(&["[::1]:1", "[::2]:1", "[::1]:1", "1.1.1.1:1", "1.1.1.2:1"]);
        let order = all(&["[::1]:1", "1.1.1.1:1", "[::2]:1", "1.1.1.2:1"]);
        assert_eq!(alternating(found), order);
        assert_eq!(alternating(Vec::new()), []);
    }
}
