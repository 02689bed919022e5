//! A TCP proxy that injects faults.
//!
//! **Guarantee.** Bytes arrive complete and in order until a fault ends a direction. A command has
//! taken effect when its call returns. A direction of a connection holds at most 256 KiB, besides
//! the buffers of the kernel. Dropping the shaper resets its connections and ends its thread.
//!
//! **Mechanism.** One thread accepts connections, connects each to the target, and moves the bytes
//! without blocking. A frozen direction is neither read nor written. A delayed or throttled one is
//! read until its buffer is full. A long delay therefore bounds the rate. Random numbers come from
//! a seed only; times are those of the machine's clock.
//!
//! **Neighbours.** Tests of connections use this. It needs no privileges. [`crate::two_hosts`]
//! shapes packets instead, for which it needs root. A thread in a host's namespace can start a
//! shaper there.

mod faults;
mod line;
mod pair;
mod pipe;
mod schedule;
mod worker;

pub use schedule::{Direction, Fault, Schedule, Which};

use pipe::{Hold, Step};
use std::io::{self, PipeWriter, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use worker::{Command, Worker};

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Both sides get RST.
    Reset,
    /// Both sides get FIN.
    Close,
}

impl From<End> for Step {
    fn from(end: End) -> Self {
        match end {
            End::Reset => Self::Reset,
            End::Close => Self::Close,
        }
    }
}

/// An end of a connection after a number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The connection's number, or none for every new connection.
    pub number: Option<u64>,
    /// Which direction counts. With both, each counts for itself.
    pub direction: Direction,
    /// So many bytes reach the receiver.
    pub after: u64,
    /// How the connection ends then.
    pub end: End,
}

/// The behaviour of a shaper from its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// The seed of the jitter.
    pub seed: u64,
    /// How much later bytes arrive, in each direction.
    pub delay: Duration,
    /// How much is added to the delay at most. Bytes keep their order.
    pub jitter: Duration,
    /// Bytes a second that all connections share, separately for each direction.
    pub rate: Option<u64>,
    /// Ends of connections.
    pub cuts: Vec<Cut>,
}

/// A connection, open or over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Its number, counted from zero in the order of acceptance.
    pub number: u64,
    /// Bytes that the shaper passed to the target.
    pub forward: u64,
    /// Bytes that the shaper passed from the target.
    pub backward: u64,
    /// Whether the shaper still has its sockets.
    pub open: bool,
}

/// A running proxy.
#[derive(Debug)]
pub struct Shaper {
    address: SocketAddr,
    commands: Sender<Command>,
    wake: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Shaper {
    /// Starts a proxy to `to`, on a port of the loopback device that the kernel chooses.
    ///
    /// # Errors
    /// If a socket or the thread cannot be made.
    pub fn start(to: SocketAddr, plan: Plan) -> io::Result<Self> {
        Self::start_at((Ipv4Addr::LOCALHOST, 0).into(), to, plan)
    }

    /// As [`Shaper::start`], at an address. Sockets are in the network namespace of the caller.
    ///
    /// # Errors
    /// As [`Shaper::start`].
    pub fn start_at(listen: SocketAddr, to: SocketAddr, plan: Plan) -> io::Result<Self> {
        let worker = Worker::new(listen, to, plan)?;
        let address = worker.address();
        let (commands, receiver) = channel();
        let (woken, wake) = io::pipe()?;
        let name = format!("shaper-{}", address.port());
        let thread = std::thread::Builder::new().name(name);
        let thread = thread.spawn(move || worker.run(&receiver, woken))?;
        Ok(Self {
            address,
            commands,
            wake: Some(wake),
            thread: Some(thread),
        })
    }

    /// Where to connect instead of to the target.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        self.address
    }

    /// All connections so far, by number. Of those that are over, the last 4096.
    #[must_use]
    pub fn connections(&self) -> Vec<Connection> {
        self.call(|worker| worker.connections())
    }

    /// Lets new connections go to another address.
    pub fn point_to(&self, to: SocketAddr) {
        self.call(move |worker| worker.to = to);
    }

    /// Injects a fault now.
    pub fn inject(&self, fault: Fault) {
        self.call(move |worker| worker.inject(fault));
    }

    /// Ends connections by RST.
    pub fn reset(&self, which: Which) {
        self.inject(Fault::Reset(which));
    }

    /// Ends connections by FIN.
    pub fn close(&self, which: Which) {
        self.inject(Fault::Close(which));
    }

    /// Gives the receiver FIN after the bytes that came before. Later bytes of the sender are lost.
    pub fn half_close(&self, conn: Which, direction: Direction) {
        self.inject(Fault::HalfClose { conn, direction });
    }

    /// Freezes connections until [`Shaper::thaw`]. [`Which::All`] includes connections to come.
    pub fn freeze(&self, which: Which, way: Direction) {
        self.call(move |worker| worker.freeze(which, way, None));
    }

    /// Ends every freeze of these connections. [`Which::All`] also ends that of connections to
    /// come.
    pub fn thaw(&self, which: Which, way: Direction) {
        self.call(move |worker| {
            for pipe in way.pipes() {
                if which == Which::All {
                    worker.line.frozen[*pipe] = Hold::No;
                }
                worker.each(which, |pair| pair.pipes[*pipe].frozen = Hold::No);
            }
        });
    }

    /// Sets the delay and the jitter of bytes that are read from now on.
    pub fn delay(&self, delay: Duration, jitter: Duration) {
        self.call(move |worker| (worker.line.delay, worker.line.jitter) = (delay, jitter));
    }

    /// Sets the rate in bytes a second. `None` is no limit.
    pub fn throttle(&self, rate: Option<u64>) {
        self.call(move |worker| {
            worker.line.rate = rate;
            // A very low rate before must not hold the next bytes.
            worker.line.clear = [worker.line.now; 2];
        });
    }

    /// Refuses new connections, or accepts them again. Those that are open go on.
    pub fn refuse(&self, refuses: bool) {
        let hold = if refuses { Hold::Forever } else { Hold::No };
        self.call(move |worker| worker.refuses = hold);
        // The listener changes before the thread takes the next command.
        self.call(|_| ());
    }

    /// Ends a connection when so many bytes of a direction, counted from its start, have passed. It
    /// ends at once if they have already.
    pub fn cut_after(&self, which: Which, direction: Direction, bytes: u64, end: End) {
        self.call(move |worker| {
            worker.each(which, |pair| {
                pair.cut(&Cut {
                    number: None,
                    direction,
                    after: bytes,
                    end,
                });
            });
        });
    }

    /// Runs a schedule from now on, beside those that run already. Returns at once.
    pub fn play(&self, schedule: &Schedule) {
        let start = Instant::now();
        let events = schedule.events.iter();
        let events: Vec<_> = events.map(|(at, fault)| (start + *at, *fault)).collect();
        self.call(move |worker| {
            worker.schedule.extend(events);
            // The sort keeps the order of faults at the same time.
            worker.schedule.make_contiguous().sort_by_key(|(at, _)| *at);
        });
    }

    /// How many faults of schedules are to come.
    #[must_use]
    pub fn faults_left(&self) -> usize {
        self.call(|worker| worker.schedule.len())
    }

    /// Drops what is left of schedules and ends all that lasts: freezes, refusal, and what faults
    /// did to rate and delay.
    pub fn heal(&self) {
        self.call(Worker::heal);
        self.call(|_| ());
    }

    /// Runs `work` on the thread. Between two commands all connections make a step.
    fn call<T: Send + 'static>(&self, work: impl FnOnce(&mut Worker) -> T + Send + 'static) -> T {
        let (reply, answer) = sync_channel(1);
        let command: Command = Box::new(move |worker| {
            let _ = reply.send(work(worker));
        });
        self.commands
            .send(command)
            .expect("the shaper's thread runs");
        let wake = self.wake.as_ref().expect("only a drop takes it");
        (&*wake).write_all(&[0]).expect("the shaper's thread runs");
        answer.recv().expect("the shaper's thread runs")
    }
}

impl Drop for Shaper {
    fn drop(&mut self) {
        // The thread ends at the end of this pipe.
        self.wake = None;
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}
