//! The search: breadth first, over all that can happen. So a counterexample is the shortest one.

use super::moves::{Move, moves};
use super::step::step;
use super::world::{Breach, Without, World};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::hash::{BuildHasherDefault, Hasher};

/// A state that does not exist.
const NONE: u32 = u32::MAX;

/// A state that was found.
struct Known {
    parent: u32,
    by: Option<Move>,
    /// The state after the first move that is due.
    next: u32,
}

/// The findings of a search: the number of states, and a broken property with the moves to it.
pub(super) struct Findings {
    pub(super) states: usize,
    pub(super) broken: Option<(Breach, String)>,
}

#[derive(Default)]
struct Search {
    ids: HashMap<World, u32, BuildHasherDefault<Multiply>>,
    known: Vec<Known>,
    waiting: VecDeque<World>,
}

/// Searches all states with up to so many deaths. It stops at the first breach of those that count.
pub(super) fn search(without: Without, deaths: u8, count: &[Breach]) -> Findings {
    let mut search = Search::default();
    let broken = search.run(without, deaths, |breach| count.contains(&breach));
    Findings {
        states: search.known.len(),
        broken: broken.map(|(what, id)| (what, search.trace(id))),
    }
}

impl Search {
    fn run(
        &mut self,
        without: Without,
        deaths: u8,
        counts: impl Fn(Breach) -> bool,
    ) -> Option<(Breach, u32)> {
        self.add(World::new(deaths), NONE, None);
        let mut at = 0;
        while let Some(world) = self.waiting.pop_front() {
            let (due, free) = moves(without, &world);
            for (breach, found) in [
                (Breach::Stale, world.is_stale()),
                (Breach::TwoPlace, world.two_place()),
                (
                    Breach::Sleeps,
                    due.is_empty() && world.sleeps_while_served(),
                ),
            ] {
                if found && counts(breach) {
                    return Some((breach, at));
                }
            }
            for (place, next) in due.iter().chain(&free).enumerate() {
                let id = self.add(step(without, &world, *next), at, Some(*next));
                if place == 0 && !due.is_empty() {
                    self.known[at as usize].next = id;
                }
            }
            at += 1;
        }
        let round = self.goes_round().filter(|_| counts(Breach::GoesRound));
        round.map(|id| (Breach::GoesRound, id))
    }

    fn add(&mut self, world: World, parent: u32, by: Option<Move>) -> u32 {
        let new = u32::try_from(self.known.len()).expect("fewer states");
        match self.ids.entry(world) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => {
                self.waiting.push_back(entry.key().clone());
                entry.insert(new);
                let next = NONE;
                self.known.push(Known { parent, by, next });
                new
            }
        }
    }

    /// Finds a state from which the moves that are due never end.
    fn goes_round(&self) -> Option<u32> {
        let mut passed = vec![NONE; self.known.len()];
        for start in 0..self.known.len() {
            let walk = u32::try_from(start).expect("fewer states");
            let mut at = walk;
            while at != NONE && passed[at as usize] == NONE {
                passed[at as usize] = walk;
                at = self.known[at as usize].next;
            }
            if at != NONE && passed[at as usize] == walk {
                return Some(at);
            }
        }
        None
    }

    /// The moves that lead to a state.
    fn trace(&self, id: u32) -> String {
        let mut moves = Vec::new();
        let mut at = &self.known[id as usize];
        while let Some(by) = at.by {
            moves.push(by);
            at = &self.known[at.parent as usize];
        }
        let mut text = String::new();
        for by in moves.iter().rev() {
            writeln!(text, "{by:?}").expect("a string takes all");
        }
        text
    }
}

/// A fast hasher. The map compares whole states, so a collision costs time only.
#[derive(Default)]
struct Multiply(u64);

impl Hasher for Multiply {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u8(*byte));
    }

    fn write_u8(&mut self, byte: u8) {
        self.0 = (self.0.rotate_left(5) ^ u64::from(byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_isize(&mut self, discriminant: isize) {
        // Discriminants are small.
        self.write_u8(discriminant.to_le_bytes()[0]);
    }

    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }
}
