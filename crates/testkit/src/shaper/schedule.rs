//! Faults, and schedules of them that a seed determines.
//!
//! **Guarantee.** The same seed and duration give the same schedule. All its faults are over when
//! the duration is.
//!
//! **Mechanism.** Faults come at random times. Every third is the first of two that follow each
//! other closely: recovery from the first is then still under way.
//!
//! **Neighbours.** [`super::Shaper::play`] runs a schedule.

use crate::Random;
use std::fmt;
use std::time::Duration;

/// A direction of a connection, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the side that connected to the target.
    Forward,
    /// From the target to the side that connected.
    Backward,
    /// Both directions.
    Both,
}

impl Direction {
    /// The indexes of the pipes.
    pub(super) const fn pipes(self) -> &'static [usize] {
        match self {
            Self::Forward => &[0],
            Self::Backward => &[1],
            Self::Both => &[0, 1],
        }
    }
}

/// A choice among the open connections. It may choose none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// All.
    All,
    /// The one with this number, counted from zero in the order of acceptance.
    Number(u64),
    /// The n-th of those that are open, modulo their number.
    Open(u64),
    /// The one that was accepted last.
    Newest,
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all connections"),
            Self::Number(number) => write!(f, "connection {number}"),
            Self::Open(n) => write!(f, "open connection {n} (modulo their number)"),
            Self::Newest => f.write_str("the newest connection"),
        }
    }
}

/// A fault of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Both sides get RST.
    Reset(Which),
    /// Both sides of all connections get RST.
    ResetAll,
    /// Both sides get FIN. Bytes in the shaper are lost.
    Close(Which),
    /// Bytes pile up in the kernel.
    Freeze {
        /// Whose bytes.
        conn: Which,
        /// In which direction.
        direction: Direction,
        /// How long.
        lasts: Duration,
    },
    /// Bytes of all connections pile up in the kernel, also of new ones.
    FreezeAll {
        /// How long.
        lasts: Duration,
    },
    /// The receiver gets FIN after the bytes that came before. Later bytes of the sender are lost.
    HalfClose {
        /// Of which connection.
        conn: Which,
        /// In which direction.
        direction: Direction,
    },
    /// All connections share a rate, separately for each direction.
    Throttle {
        /// Bytes a second.
        rate: u64,
        /// How long.
        lasts: Duration,
    },
    /// Bytes arrive later.
    Delay {
        /// By how many milliseconds.
        ms: u64,
        /// How long.
        lasts: Duration,
    },
    /// New connections are refused.
    Refuse {
        /// How long.
        lasts: Duration,
    },
}

impl Fault {
    /// A fault that is over after at most `limit`.
    fn random(random: &mut Random, limit: Duration) -> Self {
        let conn = Which::Open(random.below(16));
        let direction =
            [Direction::Forward, Direction::Backward, Direction::Both][random.below(3) as usize];
        let limit = limit.as_millis().min(1000) as u64;
        let lasts = Duration::from_millis((5 + random.below(300)).min(limit));
        // From 16 KiB to 16 MiB a second, evenly over the powers of two.
        let rate = 1 << (14 + random.below(11));
        match random.below(12) {
            0..=2 => Self::Reset(conn),
            3 => Self::ResetAll,
            4 => Self::Close(conn),
            5 | 6 => Self::Freeze {
                conn,
                direction,
                lasts,
            },
            7 => Self::FreezeAll { lasts },
            8 => Self::HalfClose { conn, direction },
            9 => Self::Throttle { rate, lasts },
            10 => Self::Delay {
                ms: 1 + random.below(50),
                lasts,
            },
            _ => Self::Refuse { lasts },
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |way: &Direction| match way {
            Direction::Forward => "forward",
            Direction::Backward => "backward",
            Direction::Both => "both ways",
        };
        match self {
            Self::Reset(conn) => write!(f, "reset {conn}"),
            Self::ResetAll => f.write_str("reset all connections"),
            Self::Close(conn) => write!(f, "close {conn}"),
            Self::Freeze {
                conn,
                direction,
                lasts,
            } => write!(f, "freeze {conn} {} for {lasts:?}", name(direction)),
            Self::FreezeAll { lasts } => write!(f, "freeze all connections for {lasts:?}"),
            Self::HalfClose { conn, direction } => {
                write!(f, "half-close {conn} {}", name(direction))
            }
            Self::Throttle { rate, lasts } => write!(f, "throttle to {rate} B/s for {lasts:?}"),
            Self::Delay { ms, lasts } => write!(f, "delay by {ms} ms for {lasts:?}"),
            Self::Refuse { lasts } => write!(f, "refuse connections for {lasts:?}"),
        }
    }
}

/// Faults and their times. `Display` prints all that is needed to repeat it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The seed, or none if the events were written by hand.
    pub seed: Option<u64>,
    /// Each fault with its time after the start.
    pub events: Vec<(Duration, Fault)>,
}

impl Schedule {
    /// The schedule of a seed.
    #[must_use]
    pub fn random(seed: u64, duration: Duration) -> Self {
        // `Random` takes the seeds 0 and 1 for the same.
        let mut random = Random::new(seed.wrapping_add(1));
        let mut events = Vec::new();
        let end = duration.as_micros() as u64;
        // About ten times in the duration, if that is longer than a second.
        let mean = (end / 10).max(100_000);
        let mut at = 1 + random.below(mean);
        while at < end {
            let limit = Duration::from_micros(end - at);
            let fault = Fault::random(&mut random, limit);
            events.push((Duration::from_micros(at), fault));
            let gap = match random.below(3) {
                0 => 500 + random.below(20_000),
                _ => mean / 4 + random.below(mean * 3 / 2),
            };
            at += gap;
        }
        Self {
            seed: Some(seed),
            events,
        }
    }
}

impl From<Vec<(Duration, Fault)>> for Schedule {
    fn from(events: Vec<(Duration, Fault)>) -> Self {
        Self { seed: None, events }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.seed {
            Some(seed) => writeln!(f, "schedule of seed {seed}:")?,
            None => writeln!(f, "schedule:")?,
        }
        for (at, fault) in &self.events {
            writeln!(f, "  at {at:?}: {fault}")?;
        }
        Ok(())
    }
}
