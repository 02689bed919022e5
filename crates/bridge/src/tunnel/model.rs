//! A search of all states of two ends, their VMMs, and a network that delays, cuts and loses.
//!
//! Each connection keeps the order of its records. At any moment one may break: what is under way
//! on it then arrives or is lost, and the two ends notice at different times. The near end opens
//! another as soon as it has noticed, while records of the old one may still come.
//!
//! Three things are checked in every state. A VMM gets a beginning of what the other one wrote. It
//! gets the end behind the last byte, and only if the other one has ended. A state in which nothing
//! can happen any more has all bytes and ends at their places.

use super::end::{End, Limits, Side};
use super::flow::Link;
use super::record::{Ending, Record, Start};
use bytes::Bytes;
use std::collections::{HashSet, VecDeque};
use std::time::Duration;

const NEAR: usize = 0;
const FAR: usize = 1;

/// A connection between the ends.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Wire {
    number: Link,
    urgent: bool,
    cut: bool,
    /// Which ends think that it works.
    up: [bool; 2],
    /// The records on their way to each end.
    to: [VecDeque<Record>; 2],
}

/// A stream as its two VMMs see it.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
struct Vmm {
    /// The bytes that each side's VMM has still to write, and whether it has ended.
    left: [u8; 2],
    written: [u8; 2],
    ended: [bool; 2],
    /// What each side's VMM has got.
    got: [u8; 2],
    got_end: [bool; 2],
    /// Whether it has closed its socket for reading.
    closed: [bool; 2],
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct World {
    ends: [End; 2],
    wires: Vec<Wire>,
    streams: Vec<Vmm>,
    /// The streams to be opened.
    to_open: usize,
    next_link: Link,
    cuts: u32,
    closes: u32,
    in_one_go: bool,
}

struct Setting {
    streams: usize,
    bytes: [u8; 2],
    cuts: u32,
    /// How often a VMM closes its socket without reading the rest.
    closes: u32,
    /// Whether a thread does all that it can before anything else happens. Otherwise it may stop
    /// after each step.
    in_one_go: bool,
}

/// The byte of a direction at a place.
const fn byte(side: usize, at: u8) -> u8 {
    16 * side as u8 + at
}

impl World {
    fn new(setting: &Setting) -> Self {
        let start = Start {
            route: "r".parse().unwrap(),
            window: 1 << 20,
            dead_after: Duration::from_secs(1),
        };
        let limits = Limits {
            window: 1 << 20,
            urgent: Some(vec![2]),
        };
        let end = |side| End::new(side, start.clone(), limits.clone());
        let mut world = Self {
            ends: [end(Side::Near), end(Side::Far)],
            wires: Vec::new(),
            streams: Vec::new(),
            to_open: setting.streams,
            next_link: 1,
            cuts: setting.cuts,
            closes: setting.closes,
            in_one_go: setting.in_one_go,
        };
        for _ in 0..setting.streams {
            world.streams.push(Vmm {
                left: setting.bytes,
                ..Vmm::default()
            });
        }
        for urgent in [true, false] {
            world.open(urgent);
        }
        world
    }

    /// Opens a connection. The far end leaves an older one of the same place.
    fn open(&mut self, urgent: bool) {
        let number = self.next_link;
        self.next_link += 1;
        for wire in &mut self.wires {
            if wire.urgent == urgent && wire.up[FAR] {
                wire.up[FAR] = false;
                wire.to[FAR].clear();
                self.ends[FAR].link_down(wire.number);
            }
        }
        self.wires.retain(|wire| wire.up != [false; 2]);
        for end in &mut self.ends {
            end.link_up(number, urgent);
        }
        self.wires.push(Wire {
            number,
            urgent,
            cut: false,
            up: [true; 2],
            to: Default::default(),
        });
    }

    /// The VMM at `side` sees the streams that are open there.
    fn streams_at(&self, side: usize) -> usize {
        self.ends[side].count() as usize
    }

    /// All states that may follow.
    fn next(&self) -> Vec<Self> {
        let mut all = Vec::new();
        let mut add = |change: &dyn Fn(&mut Self) -> bool| {
            let mut world = self.clone();
            if change(&mut world) {
                if world.in_one_go {
                    world.settle();
                }
                all.push(world);
            }
        };
        add(&|w| {
            let opens = w.to_open > 0;
            if opens {
                w.to_open -= 1;
                w.ends[NEAR].opened().unwrap();
            }
            opens
        });
        for side in [NEAR, FAR] {
            for at in 0..self.streams_at(side) {
                add(&|w| w.write(side, at));
                add(&|w| !w.in_one_go && w.take(side, at));
                add(&|w| w.close(side, at));
            }
            for at in 0..self.wires.len() {
                add(&|w| w.deliver(side, at));
                add(&|w| !w.in_one_go && w.send(side, at));
                add(&|w| w.notice(side, at));
            }
        }
        for at in 0..self.wires.len() {
            add(&|w| {
                let cuts = w.cuts > 0 && !w.wires[at].cut;
                if cuts {
                    w.cuts -= 1;
                    w.wires[at].cut = true;
                }
                cuts
            });
        }
        for urgent in [true, false] {
            let works = |wire: &Wire| wire.urgent == urgent && wire.up[NEAR];
            if !self.wires.iter().any(works) {
                add(&|w| {
                    w.open(urgent);
                    true
                });
            }
        }
        all
    }

    fn write(&mut self, side: usize, at: usize) -> bool {
        let (number, vmm) = (at as u32 + 1, &mut self.streams[at]);
        let end = &mut self.ends[side];
        if vmm.ended[side] {
            return false;
        }
        if end.is_unwanted(number) {
            // The VMM's write fails.
            (vmm.ended[side], vmm.left[side]) = (true, 0);
            end.finished(number, Ending::Finished);
            return true;
        }
        if vmm.left[side] > 0 {
            if end.wants(number) == 0 {
                return false;
            }
            end.bytes(
                number,
                Bytes::copy_from_slice(&[byte(side, vmm.written[side])]),
            );
            vmm.left[side] -= 1;
            vmm.written[side] += 1;
        } else {
            vmm.ended[side] = true;
            end.finished(number, Ending::Finished);
        }
        true
    }

    fn take(&mut self, side: usize, at: usize) -> bool {
        let (number, vmm) = (at as u32 + 1, &mut self.streams[at]);
        let end = &mut self.ends[side];
        if let Some(front) = end.front(number) {
            for found in front.clone() {
                assert_eq!(found, byte(1 - side, vmm.got[side]), "a wrong byte");
                vmm.got[side] += 1;
            }
            let taken = front.len();
            end.wrote(number, taken);
            assert!(
                vmm.got[side] <= vmm.written[1 - side],
                "a byte that nobody wrote"
            );
            return true;
        }
        if end.next_end(number).is_none() {
            return false;
        }
        assert!(vmm.ended[1 - side], "an end that nobody made");
        assert_eq!(
            vmm.got[side],
            vmm.written[1 - side],
            "an end before the last byte"
        );
        assert!(!vmm.got_end[side], "a second end");
        vmm.got_end[side] = true;
        end.ended(number);
        true
    }

    fn close(&mut self, side: usize, at: usize) -> bool {
        let vmm = &mut self.streams[at];
        if self.closes == 0 || vmm.closed[side] || vmm.got_end[side] {
            return false;
        }
        self.closes -= 1;
        vmm.closed[side] = true;
        self.ends[side].stopped(at as u32 + 1);
        true
    }

    /// VMMs take what has come, and ends send what they have. A thread of a session does both in
    /// one go.
    fn settle(&mut self) {
        for side in [NEAR, FAR] {
            for at in 0..self.streams_at(side) {
                while self.take(side, at) {}
            }
            for at in 0..self.wires.len() {
                while self.send(side, at) {}
            }
        }
    }

    fn send(&mut self, side: usize, at: usize) -> bool {
        let wire = &mut self.wires[at];
        if !wire.up[side] {
            return false;
        }
        let Some(record) = self.ends[side].next(wire.number, 1) else {
            return false;
        };
        // Receipts are for the governor, which is not here.
        let is_receipt = matches!(record, Record::Received { streams, .. } if streams <= self.ends[1 - side].count());
        // On a connection that is cut, nothing more arrives.
        if !wire.cut && wire.up[1 - side] && !is_receipt {
            wire.to[1 - side].push_back(record);
        }
        true
    }

    fn deliver(&mut self, side: usize, at: usize) -> bool {
        let wire = &mut self.wires[at];
        let Some(record) = wire.to[side].pop_front() else {
            return false;
        };
        let taken = self.ends[side].record(wire.number, record);
        taken.expect("no end breaks the protocol");
        true
    }

    /// An end notices that a connection is cut. What was on its way there is lost.
    fn notice(&mut self, side: usize, at: usize) -> bool {
        let wire = &mut self.wires[at];
        if !wire.cut || !wire.up[side] {
            return false;
        }
        wire.up[side] = false;
        wire.to[side].clear();
        self.ends[side].link_down(wire.number);
        self.wires.retain(|wire| wire.up != [false; 2]);
        true
    }

    /// Whether everything has arrived.
    fn is_complete(&self) -> bool {
        let arrived = |vmm: &Vmm| {
            [NEAR, FAR].into_iter().all(|side| {
                vmm.ended[side]
                    && (vmm.closed[side]
                        || vmm.got_end[side] && vmm.got[side] == vmm.written[1 - side])
            })
        };
        self.streams.iter().all(arrived) && self.ends.iter().all(End::is_over)
    }
}

/// Looks at all states. Returns their number.
fn search(setting: &Setting) -> usize {
    let mut seen = HashSet::new();
    let mut open = vec![World::new(setting)];
    seen.insert(fingerprint(&open[0]));
    let mut complete = false;
    while let Some(world) = open.pop() {
        let next = world.next();
        if next.is_empty() {
            assert!(
                world.is_complete(),
                "it stands still before all has arrived"
            );
        }
        complete |= world.is_complete();
        for world in next {
            if seen.insert(fingerprint(&world)) {
                open.push(world);
            }
        }
    }
    assert!(complete);
    seen.len()
}

/// Two states with the same 128 bits count as one.
fn fingerprint(world: &World) -> u128 {
    use std::hash::{Hash, Hasher};
    struct Both(xxhash_rust::xxh3::Xxh3Default);
    impl Hasher for Both {
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }
        fn finish(&self) -> u64 {
            self.0.digest()
        }
    }
    let mut hasher = Both(xxhash_rust::xxh3::Xxh3Default::new());
    world.hash(&mut hasher);
    hasher.0.digest128()
}

/// Searches with these bytes of the two VMMs, cuts and closes.
fn search_all(settings: &[(usize, [u8; 2], u32, u32, bool)]) {
    for &(streams, bytes, cuts, closes, in_one_go) in settings {
        let states = search(&Setting {
            streams,
            bytes,
            cuts,
            closes,
            in_one_go,
        });
        println!(
            "{streams} streams of {bytes:?} bytes, {cuts} cuts, {closes} closes, steps in one go: \
             {in_one_go}: {states} states"
        );
    }
}

#[test]
fn no_cut_loses_repeats_or_reorders_a_byte() {
    search_all(&[(1, [1, 0], 1, 0, true), (1, [1, 1], 0, 1, true)]);
}

#[test]
#[ignore = "slow: .ci/slow runs it"]
fn larger_searches_lose_nothing() {
    search_all(&[
        (1, [0, 0], 1, 0, false),
        (1, [2, 0], 1, 0, true),
        (1, [1, 1], 1, 0, true),
    ]);
}
