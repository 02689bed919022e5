//! The two sockets of one connection, and the pipes between them.
//!
//! **Guarantee.** A step never blocks. After a reset both sides get RST. After a close both get
//! FIN.
//!
//! **Mechanism.** The target's socket connects without blocking. Pipe 0 goes to the target, pipe 1
//! comes from it. A broken socket is noticed by a read or a write. Either way the other side gets
//! RST after the bytes that came before.
//!
//! **Neighbours.** [`super::worker`] calls [`Pair::step`].

use super::Cut;
use super::line::Line;
use super::pipe::{Hold, Pipe, Step};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// The kernel's buffers for the shaper's sockets. Without a bound, they grow to megabytes.
pub(super) const KERNEL_BUFFER: usize = 128 << 10;

/// One connection.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) number: u64,
    /// The side that connected, and the target.
    sockets: [TcpStream; 2],
    connected: bool,
    pub(super) pipes: [Pipe; 2],
}

impl Pair {
    /// Connects to the target on behalf of `client`.
    pub(super) fn new(number: u64, client: TcpStream, to: SocketAddr) -> io::Result<Self> {
        let family = match to {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let target = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        sockopt::set_socket_recv_buffer_size(&target, KERNEL_BUFFER)?;
        match rustix::net::connect(&target, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(why) => {
                reset(client);
                return Err(why.into());
            }
        }
        client.set_nonblocking(true)?;
        let sockets = [client, TcpStream::from(target)];
        for socket in &sockets {
            socket.set_nodelay(true)?;
            sockopt::set_socket_send_buffer_size(socket, KERNEL_BUFFER)?;
        }
        let now = Instant::now();
        Ok(Self {
            number,
            sockets,
            connected: false,
            pipes: [Pipe::new(now), Pipe::new(now)],
        })
    }

    /// Lets the connection end after some bytes.
    pub(super) fn cut(&mut self, cut: &Cut) {
        for pipe in cut.direction.pipes() {
            self.pipes[*pipe].cut = Some((cut.after, cut.end.into()));
        }
    }

    /// Moves bytes. The connection is over if this returns anything but [`Step::On`].
    pub(super) fn step(&mut self, line: &mut Line, scratch: &mut [u8]) -> Step {
        if !self.connected && !self.connect() {
            return match self.sockets[1].take_error() {
                Ok(None) => Step::On,
                _ => Step::Reset,
            };
        }
        for way in [0, 1] {
            let now = line.now;
            if line.frozen[way].holds(now) || self.pipes[way].frozen.holds(now) {
                continue;
            }
            let (from, to) = (&self.sockets[way], &self.sockets[1 - way]);
            if self.pipes[way].wants_read() {
                let due = line.due();
                self.pipes[way].read(from, scratch, due);
            }
            let most = line.most(way);
            let (written, step) = self.pipes[way].write(to, most, now);
            line.wrote(way, written);
            match step {
                Step::On => {}
                Step::Broken => {
                    self.pipes[way].abandon();
                    self.pipes[1 - way].source_reset(now);
                }
                step => return step,
            }
        }
        match self
            .pipes
            .iter()
            .all(|pipe| pipe.source_ended && pipe.finished)
        {
            true => Step::Close,
            false => Step::On,
        }
    }

    /// Whether the target's socket is connected now.
    fn connect(&mut self) -> bool {
        self.connected = self.sockets[1].peer_addr().is_ok();
        self.connected
    }

    /// Adds what this connection waits for.
    pub(super) fn interests<'a>(&'a self, line: &Line, fds: &mut Vec<PollFd<'a>>) {
        if !self.connected {
            fds.push(PollFd::new(&self.sockets[1], PollFlags::OUT));
            return;
        }
        let mut wanted = [PollFlags::empty(); 2];
        for way in [0, 1] {
            let pipe = &self.pipes[way];
            if line.frozen[way].holds(line.now) || pipe.frozen.holds(line.now) {
                continue;
            }
            if pipe.wants_read() {
                wanted[way] |= PollFlags::IN;
            }
            if pipe.due().is_some_and(|due| due <= line.now) && line.most(way) > 0 {
                wanted[1 - way] |= PollFlags::OUT;
            }
        }
        for (socket, wanted) in self.sockets.iter().zip(wanted) {
            // Without this, a hang-up of a frozen socket would be reported again and again.
            if !wanted.is_empty() {
                fds.push(PollFd::new(socket, wanted));
            }
        }
    }

    /// When this connection is to be looked at though nothing happened.
    pub(super) fn deadline(&self, line: &Line) -> Option<Instant> {
        let pipes = self.pipes.iter().enumerate().filter(|_| self.connected);
        let times = pipes.filter_map(|(way, pipe)| {
            let freezes = [line.frozen[way], pipe.frozen];
            if freezes.iter().any(|freeze| freeze.holds(line.now)) {
                let ends = freezes.iter().filter_map(|freeze| freeze.end(line.now));
                let forever = freezes.iter().any(|freeze| matches!(freeze, Hold::Forever));
                return ends.max().filter(|_| !forever);
            }
            let throttled = line.most(way) == 0;
            let clear = Some(line.clear[way]).filter(|_| throttled);
            pipe.due()
                .max(pipe.due().and(clear))
                .filter(|due| *due > line.now)
        });
        times.min()
    }

    /// Ends the connection.
    pub(super) fn end(self, step: Step) {
        let sockets = self.sockets;
        if step == Step::Close {
            for mut socket in sockets {
                // Unread bytes would turn the FIN into RST.
                let _ = socket.shutdown(Shutdown::Write);
                let mut rest = [0; 4096];
                for _ in 0..256 {
                    if !matches!(socket.read(&mut rest), Ok(1..)) {
                        break;
                    }
                }
            }
        } else {
            sockets.into_iter().for_each(reset);
        }
    }
}

/// Closes a socket with RST.
pub(super) fn reset(socket: TcpStream) {
    // Without this option, the end is a FIN. Tests that expect RST would then say so.
    let _ = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
}
