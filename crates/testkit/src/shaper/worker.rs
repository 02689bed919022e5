//! The thread of a shaper.
//!
//! **Guarantee.** It sleeps until a socket is ready, a command comes or a time is reached. It ends
//! when the [`super::Shaper`] is dropped.
//!
//! **Mechanism.** One `poll` waits for everything. After it, every connection makes one step: reads
//! and writes that cannot go on return at once. A second socket is bound to the port and never
//! listens. It keeps the port while no socket listens and connections are refused.
//!
//! **Neighbours.** [`super::pair`] moves the bytes. [`super::faults`] has the commands.

use super::line::Line;
use super::pair::{KERNEL_BUFFER, Pair, reset};
use super::pipe::{Hold, Step};
use super::schedule::{Fault, Which};
use super::{Connection, Cut, Plan};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::collections::VecDeque;
use std::io::{self, PipeReader, Read};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

/// The most open connections. Further ones wait in the kernel.
const CONNECTIONS: usize = 256;

/// How many connections that are over are remembered.
const REMEMBERED: usize = 4096;

/// A pause after a failure of the machine, such as too many open files.
const PAUSE: Duration = Duration::from_millis(10);

/// A function that runs on the thread.
pub(super) type Command = Box<dyn FnOnce(&mut Worker) + Send>;

/// The state of the thread.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) line: Line,
    pub(super) to: SocketAddr,
    pub(super) schedule: VecDeque<(Instant, Fault)>,
    pub(super) refuses: Hold,
    address: SocketAddr,
    _reserved: OwnedFd,
    listener: Option<TcpListener>,
    /// Not before this time is the listener tried again.
    again: Instant,
    cuts: Vec<Cut>,
    pub(super) pairs: Vec<Pair>,
    over: VecDeque<Connection>,
    accepted: u64,
}

impl Worker {
    pub(super) fn new(listen: SocketAddr, to: SocketAddr, plan: Plan) -> io::Result<Self> {
        let family = match listen {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
        let reserved = rustix::net::socket_with(family, kind, flags, None)?;
        sockopt::set_socket_reuseaddr(&reserved, true)?;
        rustix::net::bind(&reserved, &listen)?;
        let address = SocketAddr::try_from(rustix::net::getsockname(&reserved)?)?;
        let now = Instant::now();
        Ok(Self {
            line: Line::new(&plan),
            to,
            schedule: VecDeque::new(),
            refuses: Hold::No,
            address,
            _reserved: reserved,
            listener: Some(listen_on(address)?),
            again: now,
            cuts: plan.cuts,
            pairs: Vec::new(),
            over: VecDeque::new(),
            accepted: 0,
        })
    }

    pub(super) const fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn run(mut self, commands: &Receiver<Command>, mut wake: PipeReader) {
        let mut scratch = vec![0; 64 << 10];
        loop {
            self.line.now = Instant::now();
            self.faults();
            self.listen();
            self.steps(&mut scratch);
            let Some(woken) = self.wait(&wake) else {
                self.again = Instant::now() + PAUSE;
                std::thread::sleep(PAUSE);
                continue;
            };
            if woken {
                // One byte is one command, so that all connections make a step before the next.
                if !matches!(wake.read(&mut [0]), Ok(1)) {
                    return;
                }
                self.line.now = Instant::now();
                commands
                    .try_iter()
                    .take(1)
                    .for_each(|command| command(&mut self));
            }
        }
    }

    /// Waits. Returns whether the pipe of the commands is ready, or `None` if `poll` failed.
    fn wait(&self, wake: &PipeReader) -> Option<bool> {
        let mut fds = vec![PollFd::new(wake, PollFlags::IN)];
        if let Some(listener) = self.accepts() {
            fds.push(PollFd::new(listener, PollFlags::IN));
        }
        self.pairs
            .iter()
            .for_each(|pair| pair.interests(&self.line, &mut fds));
        let now = self.line.now;
        let times = [
            self.schedule.front().map(|(at, _)| *at),
            self.refuses.end(now),
            Some(self.again).filter(|again| *again > now),
            self.line.slow.0.end(now),
        ];
        let deadlines = self
            .pairs
            .iter()
            .filter_map(|pair| pair.deadline(&self.line));
        let deadline = times.into_iter().flatten().chain(deadlines).min();
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => Some(!fds[0].revents().is_empty()),
            Err(rustix::io::Errno::INTR) => Some(false),
            Err(_) => None,
        }
    }

    /// The listener, if a connection is to be accepted now.
    fn accepts(&self) -> Option<&TcpListener> {
        let able = self.pairs.len() < CONNECTIONS && self.again <= self.line.now;
        self.listener.as_ref().filter(|_| able)
    }

    /// Opens or closes the listener, and accepts what waits.
    fn listen(&mut self) {
        if self.refuses.holds(self.line.now) {
            self.listener = None;
            return;
        }
        if self.listener.is_none() && self.again <= self.line.now {
            self.listener = listen_on(self.address).ok();
            if self.listener.is_none() {
                self.again = self.line.now + PAUSE;
            }
        }
        while let Some(listener) = self.accepts() {
            let client = match listener.accept() {
                Ok((client, _)) => client,
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.again = self.line.now + PAUSE;
                    return;
                }
            };
            let number = self.accepted;
            self.accepted += 1;
            let Ok(mut pair) = Pair::new(number, client, self.to) else {
                self.remember(number, [0, 0]);
                continue;
            };
            for cut in &self.cuts {
                if cut.number.is_none_or(|wanted| wanted == number) {
                    pair.cut(cut);
                }
            }
            self.pairs.push(pair);
        }
    }

    fn steps(&mut self, scratch: &mut [u8]) {
        // The first one changes, so that none has an advantage at a low rate.
        if !self.pairs.is_empty() {
            self.pairs.rotate_left(1);
        }
        let mut index = 0;
        while let Some(pair) = self.pairs.get_mut(index) {
            match pair.step(&mut self.line, scratch) {
                Step::On | Step::Broken => index += 1,
                step => self.end(index, step),
            }
        }
    }

    pub(super) fn end(&mut self, index: usize, step: Step) {
        let pair = self.pairs.remove(index);
        self.remember(
            pair.number,
            pair.pipes.each_ref().map(|pipe| pipe.delivered),
        );
        pair.end(step);
    }

    fn remember(&mut self, number: u64, [forward, backward]: [u64; 2]) {
        if self.over.len() == REMEMBERED {
            self.over.pop_front();
        }
        self.over.push_back(Connection {
            number,
            forward,
            backward,
            open: false,
        });
    }

    /// All connections that are remembered, by their numbers.
    pub(super) fn connections(&self) -> Vec<Connection> {
        let open = self.pairs.iter().map(|pair| Connection {
            number: pair.number,
            forward: pair.pipes[0].delivered,
            backward: pair.pipes[1].delivered,
            open: true,
        });
        let mut all: Vec<_> = self.over.iter().copied().chain(open).collect();
        all.sort_by_key(|connection| connection.number);
        all
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The other sides see the end of the shaper, not the end of a stream.
        self.end_each(Which::All, Step::Reset);
        if let Some(listener) = self.listener.take() {
            let waiting = std::iter::from_fn(|| listener.accept().ok());
            waiting.for_each(|(client, _)| reset(client));
        }
    }
}

fn listen_on(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    // Connections inherit it.
    sockopt::set_socket_recv_buffer_size(&listener, KERNEL_BUFFER)?;
    Ok(listener)
}
