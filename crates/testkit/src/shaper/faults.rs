//! The effects of commands and faults on connections.
//!
//! **Guarantee.** A fault that lasts ends by itself, and never earlier than another of its kind.
//!
//! **Mechanism.** It is a time in the state, which every step reads.
//!
//! **Neighbours.** [`super::worker`] calls this on its thread.

use super::pair::Pair;
use super::pipe::{Hold, Step};
use super::schedule::{Direction, Fault, Which};
use super::worker::Worker;
use std::time::Duration;

impl Worker {
    /// The numbers of the open connections that are meant.
    fn numbers(&self, which: Which) -> Vec<u64> {
        let mut open: Vec<u64> = self.pairs.iter().map(|pair| pair.number).collect();
        open.sort_unstable();
        match which {
            Which::All => open,
            Which::Number(number) => open.into_iter().filter(|open| *open == number).collect(),
            Which::Open(_) if open.is_empty() => open,
            Which::Open(n) => vec![open[(n % open.len() as u64) as usize]],
            Which::Newest => open.into_iter().max().into_iter().collect(),
        }
    }

    pub(super) fn each(&mut self, which: Which, mut work: impl FnMut(&mut Pair)) {
        let numbers = self.numbers(which);
        let meant = self
            .pairs
            .iter_mut()
            .filter(|pair| numbers.contains(&pair.number));
        meant.for_each(&mut work);
    }

    pub(super) fn end_each(&mut self, which: Which, step: Step) {
        for number in self.numbers(which) {
            let found = self.pairs.iter().position(|pair| pair.number == number);
            found.into_iter().for_each(|index| self.end(index, step));
        }
    }

    pub(super) fn freeze(&mut self, which: Which, way: Direction, lasts: Option<Duration>) {
        let now = self.line.now;
        for pipe in way.pipes() {
            if which == Which::All {
                self.line.frozen[*pipe] = self.line.frozen[*pipe].extended(now, lasts);
            } else {
                self.each(which, |pair| {
                    let pipe = &mut pair.pipes[*pipe];
                    pipe.frozen = pipe.frozen.extended(now, lasts);
                });
            }
        }
    }

    pub(super) fn heal(&mut self) {
        self.schedule.clear();
        self.refuses = Hold::No;
        self.line.frozen = [Hold::No; 2];
        (self.line.late.0, self.line.slow.0) = (Hold::No, Hold::No);
        self.line.clear = [self.line.now; 2];
        for pipe in self.pairs.iter_mut().flat_map(|pair| &mut pair.pipes) {
            pipe.frozen = Hold::No;
        }
    }

    /// Injects the faults of schedules that are due.
    pub(super) fn faults(&mut self) {
        while let Some((at, fault)) = self.schedule.front().copied()
            && at <= self.line.now
        {
            self.schedule.pop_front();
            self.inject(fault);
        }
    }

    pub(super) fn inject(&mut self, fault: Fault) {
        let now = self.line.now;
        match fault {
            Fault::Reset(conn) => self.end_each(conn, Step::Reset),
            Fault::ResetAll => self.end_each(Which::All, Step::Reset),
            Fault::Close(conn) => self.end_each(conn, Step::Close),
            Fault::Freeze {
                conn,
                direction,
                lasts,
            } => self.freeze(conn, direction, Some(lasts)),
            Fault::FreezeAll { lasts } => self.freeze(Which::All, Direction::Both, Some(lasts)),
            Fault::HalfClose { conn, direction } => self.each(conn, |pair| {
                for pipe in direction.pipes() {
                    pair.pipes[*pipe].half_close(now);
                }
            }),
            Fault::Throttle { rate, lasts } => {
                self.line.slow = (self.line.slow.0.extended(now, Some(lasts)), rate);
            }
            Fault::Delay { ms, lasts } => {
                let until = self.line.late.0.extended(now, Some(lasts));
                self.line.late = (until, Duration::from_millis(ms));
            }
            Fault::Refuse { lasts } => {
                self.refuses = self.refuses.extended(now, Some(lasts));
            }
        }
    }
}
