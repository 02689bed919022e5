//! Readers that check all results, beside a writer at full speed.
//!
//! It takes about six seconds, or `PAGEFERRY_STRESS_SECONDS`.

use pageferry_addr::{Gfn, GfnRange, Hva};
use pageferry_memslot::{
    Barrier, Generation, Limits, Request, Slot, SlotFlags, SlotReader, SlotView, SlotWriter,
};
use pageferry_testkit::{Random, Stop, skip, stress_time};
use std::array;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// This slot moves back and forth by less than its size.
const ROCKER: u16 = 0;
const ROCKER_PAGES: u64 = 64;
/// This frame is in `ROCKER` at both of its places.
const COVERED: u64 = 1000 + 48;
/// Each of these slots is at one of two places.
const MOVERS: std::ops::Range<u16> = 1..20;
/// A move of this slot often begins and is always aborted.
const HESITANT: u16 = 20;
/// These slots come and go, so that nodes split and join.
const PASSING: std::ops::Range<u16> = 21..400;
/// These slots change their flags.
const FLAGGED: std::ops::Range<u16> = 400..410;
/// Readers look at frames below this.
const FRAMES: u64 = 20_000;

const ALIVE: u64 = 0x600d_600d_600d_600d;
const DEAD: u64 = 0xdead_dead_dead_dead;

static CREATED: AtomicU64 = AtomicU64::new(0);
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// The data of each record: the expected contents of the record, and a check that it is alive.
#[derive(Debug)]
struct Data {
    id: u16,
    start: u64,
    flags: u32,
    serial: u64,
    alive: AtomicU64,
}

impl Data {
    fn new(id: u16, start: u64, flags: u32) -> Self {
        Self {
            id,
            start,
            flags,
            serial: CREATED.fetch_add(1, Ordering::Relaxed),
            alive: AtomicU64::new(ALIVE),
        }
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        assert_eq!(
            self.alive.swap(DEAD, Ordering::Relaxed),
            ALIVE,
            "dropped twice"
        );
        DROPPED.fetch_add(1, Ordering::Relaxed);
    }
}

/// The places at which a slot can be.
fn places(id: u16) -> [u64; 2] {
    let number = u64::from(id);
    match id {
        ROCKER => [1000, 1000 + 32],
        // The second place is in another leaf, between slots that come and go.
        _ if MOVERS.contains(&id) || id == HESITANT => [2000 + 8 * number, 4006 + 40 * number],
        _ => [4000 + 10 * number; 2],
    }
}

fn pages(id: u16) -> u64 {
    if id == ROCKER {
        ROCKER_PAGES
    } else {
        2 + u64::from(id % 2)
    }
}

/// Many slots share host memory.
fn hva(id: u16) -> u64 {
    u64::from(id % 37) << 12
}

fn request(id: u16, place: usize, flags: u32) -> Request<Data> {
    let start = places(id)[place];
    Request {
        address_space: 0,
        id,
        gpa: Gfn(start).gpa(),
        size: pages(id) << 12,
        hva: Hva(hva(id)),
        flags: SlotFlags(flags),
        userfault_bitmap: None,
        data: Data::new(id, start, flags),
    }
}

fn deletion(id: u16) -> Request<Data> {
    Request {
        size: 0,
        ..request(id, 0, 0)
    }
}

/// Asserts that a record agrees with its data and is alive. Returns the record's serial number.
fn check(slot: &Slot<Data>) -> u64 {
    let data = &slot.data;
    assert_eq!(data.alive.load(Ordering::Relaxed), ALIVE, "{slot:?}");
    assert_eq!((slot.id, slot.range.start().0), (data.id, data.start));
    assert_eq!(
        (slot.range.pages(), slot.hva.0),
        (pages(slot.id), hva(slot.id))
    );
    assert_eq!(slot.flags.0, data.flags);
    assert!(places(slot.id).contains(&data.start));
    data.serial
}

/// The number of slots at each of the last versions. Number and version share one word.
struct Counts([AtomicU64; 4096]);

impl Counts {
    fn new() -> Self {
        Self(array::from_fn(|_| AtomicU64::new(0)))
    }

    fn note(&self, version: u64, count: usize) {
        let word = version << 16 | count as u64;
        self.0[version as usize % self.0.len()].store(word, Ordering::Relaxed);
    }

    /// `None` if the version is too old.
    fn at(&self, version: u64) -> Option<usize> {
        let word = self.0[version as usize % self.0.len()].load(Ordering::Relaxed);
        (word >> 16 == version).then_some((word & 0xffff) as usize)
    }
}

#[derive(Default)]
struct Seen {
    looks: u64,
    invalid: u64,
}

/// Looks at random frames in the newest state, with a new guard for each.
fn look_up(stop: &Stop, reader: &mut SlotReader<Data>) -> Seen {
    let mut random = Random::new(1);
    let mut seen = Seen::default();
    while !stop.is_stopped() {
        let gfn = match random.below(4) {
            0 => COVERED,
            1 => places(1 + random.below(19) as u16)[random.below(2) as usize],
            _ => random.below(FRAMES),
        };
        let guard = reader.pin();
        let before = guard.generation();
        let slot = guard.lookup(Gfn(gfn));
        let invalid = slot.is_some_and(Slot::is_invalid);
        let after = guard.generation();
        seen.looks += 1;
        seen.invalid += u64::from(invalid);
        let quiet = before == after && !before.in_progress();
        assert!(!(invalid && quiet), "invalid, and nothing in progress");
        assert!(gfn != COVERED || slot.is_some(), "at {before:?}..{after:?}");
        if let Some(slot) = slot {
            check(slot);
            assert!(slot.range.contains(Gfn(gfn)));
            // A second look-up finds the same, or a change.
            let again = guard.lookup(Gfn(gfn)).map(check);
            let same = again == Some(slot.data.serial);
            assert!(same || guard.generation() != before || before.in_progress());
        }
    }
    seen
}

/// Asserts that all look-ups of a view agree. Returns its generation.
fn check_view(view: SlotView<'_, Data>, counts: &Counts) -> Generation {
    let slots: Vec<_> = view.iter().collect();
    let version = view.generation().number();
    if let Some(count) = counts.at(version) {
        assert_eq!(slots.len(), count, "slots at {version}");
    }
    for pair in slots.windows(2) {
        assert!(pair[0].range.end() <= pair[1].range.start(), "{pair:?}");
    }
    let mut present = [false; 410];
    for slot in &slots {
        check(slot);
        assert!(!present[usize::from(slot.id)], "two of {slot:?}");
        present[usize::from(slot.id)] = true;
        let by_id = view.by_id(slot.id).map(check);
        assert_eq!(by_id, Some(slot.data.serial));
        let last = Gfn(slot.range.end().0 - 1);
        assert_eq!(view.lookup(last).map(check), Some(slot.data.serial));
    }
    for id in (ROCKER..=HESITANT).chain(FLAGGED) {
        assert!(present[usize::from(id)], "{id} is always there");
    }
    let mut in_host: Vec<_> = view.iter_hva(Hva(0)..Hva(u64::MAX)).map(check).collect();
    let mut all: Vec<_> = slots.iter().map(|slot| slot.data.serial).collect();
    in_host.sort_unstable();
    all.sort_unstable();
    assert_eq!(in_host, all);
    let page = 5 << 12;
    let here: Vec<_> = view.iter_hva(Hva(page)..Hva(page + 1)).map(check).collect();
    let mut expected: Vec<_> = slots
        .iter()
        .filter(|slot| slot.hva.0 <= page && page < slot.hva_range().end.0)
        .collect();
    expected.sort_unstable_by_key(|slot| (slot.hva.0, slot.id));
    let expected: Vec<_> = expected.iter().map(|slot| slot.data.serial).collect();
    assert_eq!(here, expected);
    view.generation()
}

/// Takes views, and checks all of each at once and again some time later.
fn look_at_views(stop: &Stop, reader: &mut SlotReader<Data>, counts: &Counts) -> Seen {
    let mut seen = Seen::default();
    let mut last = 0;
    while !stop.is_stopped() {
        let guard = reader.pin();
        let view = guard.view();
        let version = check_view(view, counts).number();
        assert!(last <= version, "versions go backwards");
        last = version;
        check_view(view, counts);
        seen.looks += 1;
    }
    seen
}

/// Holds a found slot for long.
fn hold(stop: &Stop, reader: &mut SlotReader<Data>) -> Seen {
    let mut random = Random::new(3);
    let mut seen = Seen::default();
    let mut guard = reader.pin();
    while !stop.is_stopped() {
        let mut held = Vec::new();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_micros(500) {
            let start = random.below(FRAMES);
            let range = GfnRange::new(Gfn(start), 200).unwrap();
            held.extend(guard.view().iter_gfn(range).map(|slot| (slot, check(slot))));
            held.extend(guard.lookup(Gfn(start)).map(|slot| (slot, check(slot))));
        }
        for (slot, serial) in held {
            assert_eq!(check(slot), serial, "another record in its place");
            seen.looks += 1;
            seen.invalid += u64::from(slot.is_invalid());
        }
        guard.refresh();
    }
    seen
}

/// The writer's record of its slots.
struct World {
    place: [usize; 21],
    there: [bool; 400],
    logged: [bool; 410],
}

fn change(writer: &mut SlotWriter<Data>, world: &mut World, counts: &Counts, random: &mut Random) {
    let next = writer.generation().number() + 1;
    let pick = |range: std::ops::Range<u16>, random: &mut Random| {
        range.start + random.below(u64::from(range.end - range.start)) as u16
    };
    let (id, count) = match random.below(8) {
        kind @ (0 | 1) => (
            if kind == 0 {
                ROCKER
            } else {
                pick(MOVERS, random)
            },
            writer.len(),
        ),
        2 => (HESITANT, writer.len()),
        3 => (pick(FLAGGED, random), writer.len()),
        _ => {
            let id = pick(PASSING, random);
            let there = world.there[usize::from(id)];
            (
                id,
                if there {
                    writer.len() - 1
                } else {
                    writer.len() + 1
                },
            )
        }
    };
    counts.note(next, count);
    let index = usize::from(id);
    if id <= HESITANT {
        let place = 1 - world.place[index];
        let update = writer.begin(request(id, place, 0)).unwrap();
        if id == HESITANT && random.below(8) > 0 {
            return drop(update);
        }
        update.commit();
        world.place[index] = place;
    } else if FLAGGED.contains(&id) {
        world.logged[index] ^= true;
        let flags = u32::from(world.logged[index]);
        writer.set(request(id, 0, flags)).unwrap();
    } else {
        let there = world.there[index];
        let asked = if there {
            deletion(id)
        } else {
            request(id, 0, 0)
        };
        writer.set(asked).unwrap();
        world.there[index] = !there;
    }
}

#[test]
#[cfg_attr(miri, ignore = "too slow there")]
fn what_readers_see_is_one_state_and_alive() {
    let long = stress_time(Duration::from_secs(3));
    run(long, None, Duration::ZERO);
    let barrier = Barrier::membarrier();
    if barrier.is_none() {
        skip("membarrier", "this kernel refuses it; readers always fence");
        return;
    }
    // Readers are light again after each pause.
    run(long, barrier, Duration::from_micros(50));
}

/// Runs for `long`, with pauses of `pause`.
fn run(long: Duration, barrier: Option<Barrier>, pause: Duration) {
    let limits = Limits {
        shared_last_used: true,
        ..Limits::default()
    };
    let mut writer = SlotWriter::with_barrier(limits, barrier).with_relax(thread::yield_now);
    for id in (ROCKER..=HESITANT).chain(FLAGGED) {
        writer.set(request(id, 0, 0)).unwrap();
    }
    let table = writer.table();
    let (stop, counts) = (Stop::new(), Counts::new());
    let (stop, counts) = (&stop, &counts);
    let mut readers: Vec<_> = (0..3).map(|_| table.reader()).collect();
    let (changes, seen) = thread::scope(|scope| {
        let [first, second, third] = &mut readers[..] else {
            unreachable!("three readers")
        };
        let threads = [
            scope.spawn(move || look_up(stop, first)),
            scope.spawn(move || look_at_views(stop, second, counts)),
            scope.spawn(move || hold(stop, third)),
        ];
        let stopping = stop.on_drop();
        let mut world = World {
            place: [0; 21],
            there: [false; 400],
            logged: [false; 410],
        };
        let (begun, mut random, mut changes) = (Instant::now(), Random::new(7), 0_u64);
        while begun.elapsed() < long {
            for _ in 0..64 {
                change(&mut writer, &mut world, counts, &mut random);
                changes += 1;
                let paused = Instant::now();
                while changes.is_multiple_of(4) && paused.elapsed() < pause {
                    std::hint::spin_loop();
                }
            }
            assert!(writer.retired() <= writer.limits().max_retired + 200);
        }
        drop(stopping);
        let seen = threads.map(|thread| thread.join().expect("no reader saw an error"));
        (changes, seen)
    });
    for (name, seen) in ["newest", "views", "held"].iter().zip(&seen) {
        println!("{name}: {} looks, {} invalid", seen.looks, seen.invalid);
        assert!(seen.looks > 0, "{name} saw nothing");
    }
    println!("{changes} changes");
    assert!(
        seen[0].invalid + seen[2].invalid > 0,
        "no look-up met an incomplete change"
    );

    // Only present slots have data that is alive.
    assert_eq!(writer.reclaim(), 0);
    let alive = || CREATED.load(Ordering::Relaxed) - DROPPED.load(Ordering::Relaxed);
    assert_eq!(alive(), writer.len() as u64);
    drop((writer, table));
    assert!(alive() > 0, "readers keep the table");
    drop(readers);
    assert_eq!(alive(), 0);
}
