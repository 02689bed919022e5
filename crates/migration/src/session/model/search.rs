//! The search: breadth first, over all that can happen. A state is kept as a hash of 128 bits and a
//! link to the state before it. So a counterexample is the shortest one, and is replayed to print.

use std::collections::{HashMap, VecDeque};
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};

use xxhash_rust::xxh3::xxh3_128;

use super::config::Config;
use super::moves::{Cause, Move, apply, moves};
use super::network::Message;
use super::world::World;

/// The findings of a search.
pub(super) struct SearchResult {
    pub states: usize,
    pub moves: usize,
    /// The number of moves to the farthest state.
    pub depth: usize,
    /// The states in which nobody has given up: completion was shown from each.
    pub completing: usize,
    /// The broken property, and the moves that lead to it.
    pub found: Option<(&'static str, String)>,
}

type Id = u32;

/// A state that does not exist.
const NONE: Id = Id::MAX;

/// A state that was found. There are many: it is kept small.
struct Known {
    parent: Id,
    /// The next state in each of the two systems without faults.
    next: [Id; 2],
    depth: u16,
    /// Which of the parent's moves leads here.
    choice: u8,
    goal: bool,
    /// The operator's business from here on.
    given_up: bool,
}

struct Search<'a> {
    config: &'a Config,
    ids: HashMap<u128, Id>,
    known: Vec<Known>,
    waiting: VecDeque<World>,
    bytes: Bytes,
    moves: usize,
}

/// Searches all states. It stops at the first that breaks a property.
pub(super) fn search(config: &Config) -> SearchResult {
    let mut search = Search {
        config,
        ids: HashMap::new(),
        known: Vec::new(),
        waiting: VecDeque::new(),
        bytes: Bytes::default(),
        moves: 0,
    };
    let found = search.run();
    SearchResult {
        states: search.known.len(),
        moves: search.moves,
        depth: search.known.last().map_or(0, |last| last.depth.into()),
        completing: search.known.iter().filter(|each| !each.given_up).count(),
        found,
    }
}

impl Search<'_> {
    fn run(&mut self) -> Option<(&'static str, String)> {
        self.add(World::new(self.config), NONE, 0);
        let mut id: Id = 0;
        while let Some(world) = self.waiting.pop_front() {
            if let Some(what) = self.expand(id, &world) {
                return Some(what);
            }
            id += 1;
        }
        (0..2).find_map(|system| self.check_completion(system))
    }

    /// Follows all moves from a state.
    fn expand(&mut self, id: Id, world: &World) -> Option<(&'static str, String)> {
        let moves = moves(self.config, world);
        self.moves += moves.len();
        let progress = |(_, cause): &&(Move, Cause)| *cause == Cause::Progress;
        let first = moves.iter().find(progress).map(|(step, _)| *step);
        let last = moves.iter().rfind(progress).map(|(step, _)| *step);
        let waits = world.pages.iter().any(|page| page.requested);
        if waits && matches!(first, Some(Move::Push(..))) {
            return Some(self.broken(id, "a vCPU waits for a page that nobody has on request"));
        }
        for (choice, (step, _)) in moves.into_iter().enumerate() {
            let next = apply(self.config, world, step);
            let broken = next.broken;
            let to = self.add(next, id, choice);
            if let Some(what) = broken {
                return Some(self.broken(to, what));
            }
            for (system, taken) in [first, last].into_iter().enumerate() {
                if taken == Some(step) {
                    self.known[id as usize].next[system] = to;
                }
            }
        }
        None
    }

    fn add(&mut self, world: World, parent: Id, choice: usize) -> Id {
        self.bytes.0.clear();
        world.hash(&mut self.bytes);
        let hash = xxh3_128(&self.bytes.0);
        let new = Id::try_from(self.known.len()).expect("fewer states");
        assert!(
            self.known.len() < self.config.most_states,
            "the search is too large"
        );
        let id = *self.ids.entry(hash).or_insert(new);
        if id == new {
            let before = self.known.get(parent as usize);
            let depth = before.map_or(0, |before| before.depth + 1);
            self.known.push(Known {
                parent,
                next: [NONE; 2],
                depth,
                choice: u8::try_from(choice).expect("few moves"),
                goal: world.is_goal(),
                given_up: world.given_up,
            });
            self.waiting.push_back(world);
        }
        id
    }

    /// Checks that a system without faults reaches the end from every state.
    fn check_completion(&self, system: usize) -> Option<(&'static str, String)> {
        // The walk that has passed a state last. All states before the current walk are good.
        let mut passed = vec![NONE; self.known.len()];
        for start in 0..self.known.len() {
            let walk = Id::try_from(start).expect("fewer states");
            let mut at = start;
            while passed[at] == NONE && !self.known[at].given_up {
                passed[at] = walk;
                match self.known[at].next[system] {
                    NONE if self.known[at].goal => break,
                    NONE => {
                        let end = Id::try_from(at).expect("fewer states");
                        let what = "without faults, it comes to a standstill before its end";
                        return Some(self.broken(end, what));
                    }
                    next if passed[next as usize] == walk => {
                        let what = "without faults, it goes round for ever";
                        return Some(self.broken(walk, what));
                    }
                    next => at = next as usize,
                }
            }
        }
        None
    }

    fn broken(&self, id: Id, what: &'static str) -> (&'static str, String) {
        let mut choices = Vec::new();
        let mut at = &self.known[id as usize];
        while at.parent != NONE {
            choices.push(at.choice);
            at = &self.known[at.parent as usize];
        }
        let mut world = World::new(self.config);
        let mut text = String::new();
        for (number, choice) in choices.into_iter().rev().enumerate() {
            let (step, _) = moves(self.config, &world)[usize::from(choice)];
            let message = match step {
                Move::Deliver(key, _) => first_message(&world, step, key),
                _ => None,
            };
            world = apply(self.config, &world, step);
            describe(&mut text, number + 1, step, message, &world);
        }
        (what, text)
    }
}

fn first_message(world: &World, step: Move, key: super::network::Key) -> Option<Message> {
    use super::network::Place;
    let at = world.connections.iter().find(|each| each.key == key)?;
    match step {
        Move::Deliver(_, Place::Source) => at.to_source.first().copied(),
        _ => at.to_destination.first().copied(),
    }
}

fn describe(text: &mut String, number: usize, step: Move, message: Option<Message>, world: &World) {
    let (source, destination) = (&world.source, &world.destination);
    let said = message.map_or(String::new(), |message| format!(": {message:?}"));
    let pages: Vec<String> = world
        .pages
        .iter()
        .map(|page| {
            let there = if page.placed { "placed" } else { "missing" };
            let freed = if page.freed { ", freed" } else { "" };
            format!("{:?}{freed}, {there}", page.sent)
        })
        .collect();
    writeln!(
        text,
        "{number:3}. {step:?}{said}\n     source {:?} {:?} {} | destination {:?} {:?} {} | {}",
        source.stage,
        source.link,
        source.generation,
        destination.stage,
        destination.link,
        destination.generation,
        pages.join(" | "),
    )
    .expect("a string takes all");
}

/// Collects what a value feeds to a hash.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Hasher for Bytes {
    fn write(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn write_isize(&mut self, discriminant: isize) {
        // Discriminants are small.
        self.0.push(discriminant.to_le_bytes()[0]);
    }

    fn finish(&self) -> u64 {
        unreachable!("only the bytes are wanted")
    }
}
