//! Guards beside a writer that unlinks, retires, moves the epoch on and frees.
//!
//! There are two things, 0 and 1, and a word with the number of the linked thing. A free is a write
//! to a thing, and loom reports a read that is not ordered with it. Each model returns the outcomes
//! of its threads. The test names the outcomes that must occur, so a model that explores too little
//! fails.
//!
//! Broken rules and the models that fail (tried by hand):
//! - no fence in `Domain::stamp`: `two_threads_move_the_epoch`;
//! - no fence in `Reader::announce`, or a free after one advance of the epoch instead of two: all
//!   models;
//! - no fence in `Domain::try_advance`, or `Guard::epoch` without its second load:
//!   `a_cache_is_good_in_its_epoch`.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use pageferry_epoch::{Domain, Epoch, Guard, Limbo, Reader};
use pageferry_testkit::model::{Watched, explore};
use std::collections::BTreeSet;

struct Things {
    linked: AtomicUsize,
    things: [Watched; 2],
}

impl Things {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            linked: AtomicUsize::new(0),
            things: [Watched::new(), Watched::new()],
        })
    }

    /// Follows the link under a guard, which then keeps the returned thing.
    fn reach(&self, _: &Guard<'_>) -> usize {
        let thing = self.linked.load(Ordering::Acquire);
        self.use_it(thing);
        thing
    }

    fn use_it(&self, thing: usize) {
        self.things[thing].read();
    }

    /// Links thing 1, and retires thing 0.
    fn replace(&self, domain: &Domain, limbo: &mut Limbo<usize>) {
        self.linked.store(1, Ordering::Release);
        limbo.retire(domain.stamp(), 0);
    }

    /// Tries to move the epoch on, and frees. Returns whether thing 0 is gone.
    fn reclaim(&self, domain: &Domain, limbo: &mut Limbo<usize>) -> bool {
        for _ in 0..2 {
            domain.try_advance();
        }
        while let Some(thing) = limbo.next_expired(domain) {
            self.things[thing].write();
        }
        limbo.is_empty()
    }
}

/// Runs `body` on a reader's thread.
fn spawn<O: 'static>(
    things: &Arc<Things>,
    mut reader: Reader,
    body: impl FnOnce(&Things, &mut Reader) -> O + 'static,
) -> thread::JoinHandle<O> {
    let things = Arc::clone(things);
    thread::spawn(move || body(&things, &mut reader))
}

#[test]
fn what_a_guard_reached_is_not_freed() {
    let seen = explore(3, || {
        let (things, domain) = (Things::new(), Domain::new());
        let reader = spawn(&things, domain.register(), |things, reader| {
            let guard = reader.pin();
            let thing = things.reach(&guard);
            things.use_it(thing);
            thing
        });
        let mut limbo = Limbo::new();
        things.replace(&domain, &mut limbo);
        let freed = things.reclaim(&domain, &mut limbo);
        (reader.join().unwrap(), freed)
    });
    let all = [(0, false), (0, true), (1, false), (1, true)];
    assert_eq!(seen, BTreeSet::from(all));
}

#[test]
fn each_of_two_readers_holds_its_own() {
    let seen = explore(3, || {
        let (things, domain) = (Things::new(), Domain::new());
        let look = |things: &Things, reader: &mut Reader| things.reach(&reader.pin());
        let readers =
            [domain.register(), domain.register()].map(|reader| spawn(&things, reader, look));
        let mut limbo = Limbo::new();
        things.replace(&domain, &mut limbo);
        let freed = things.reclaim(&domain, &mut limbo);
        let [first, second] = readers.map(|reader| reader.join().unwrap());
        (first, second, freed)
    });
    for first in [0, 1] {
        for second in [0, 1] {
            assert!(seen.contains(&(first, second, true)), "{first} {second}");
        }
    }
}

/// The reader registers while the writer works, so that a scan may miss it.
#[test]
fn a_reader_that_has_just_come() {
    let seen = explore(3, || {
        let (things, domain) = (Things::new(), Domain::new());
        let late = {
            let (things, domain) = (Arc::clone(&things), domain.clone());
            thread::spawn(move || things.reach(&domain.register().pin()))
        };
        let mut limbo = Limbo::new();
        things.replace(&domain, &mut limbo);
        let freed = things.reclaim(&domain, &mut limbo);
        (late.join().unwrap(), freed)
    });
    let all = [(0, false), (0, true), (1, false), (1, true)];
    assert_eq!(seen, BTreeSet::from(all));
}

/// A reader takes the record of a dropped one. All accesses of the first happen before the second
/// announces.
#[test]
fn a_record_is_used_again() {
    let seen = explore(3, || {
        let (things, domain) = (Things::new(), Domain::new());
        let first = spawn(&things, domain.register(), |things, reader| {
            things.reach(&reader.pin())
        });
        let second = {
            let (things, domain) = (Arc::clone(&things), domain.clone());
            thread::spawn(move || {
                let mut reader = domain.register();
                let guard = reader.pin();
                things.reach(&guard)
            })
        };
        let mut limbo = Limbo::new();
        things.replace(&domain, &mut limbo);
        let freed = things.reclaim(&domain, &mut limbo);
        (first.join().unwrap(), second.join().unwrap(), freed)
    });
    assert!(seen.contains(&(0, 0, true)) && seen.contains(&(0, 1, true)));
}

/// A reader that refreshes its guard gives up things that it reached before, and keeps things that
/// it reaches afterwards.
#[test]
fn a_refreshed_guard_holds_what_comes_after() {
    let seen = explore(3, || {
        let (things, domain) = (Things::new(), Domain::new());
        let reader = spawn(&things, domain.register(), |things, reader| {
            let mut guard = reader.pin();
            let before = things.reach(&guard);
            guard.refresh();
            (before, things.reach(&guard))
        });
        let mut limbo = Limbo::new();
        things.replace(&domain, &mut limbo);
        let freed = things.reclaim(&domain, &mut limbo) || things.reclaim(&domain, &mut limbo);
        let (before, after) = reader.join().unwrap();
        assert!(before <= after, "the link goes from 0 to 1");
        (before, after, freed)
    });
    for pair in [(0, 0), (0, 1), (1, 1)] {
        assert!(seen.contains(&(pair.0, pair.1, true)), "{pair:?}");
    }
}

/// A reader uses a thing from one guard under its next guard of the same epoch, without following
/// the link again.
#[test]
fn a_cache_is_good_in_its_epoch() {
    let seen = explore(3, || {
        let (things, domain) = (Things::new(), Domain::new());
        let reader = spawn(&things, domain.register(), |things, reader| {
            let guard = reader.pin();
            let (cached, epoch) = (things.reach(&guard), guard.epoch());
            drop(guard);
            let guard = reader.pin();
            let good = guard.epoch() == epoch && epoch != Epoch::NEVER;
            if good {
                things.use_it(cached);
            }
            (cached, good, things.reach(&guard))
        });
        let mut limbo = Limbo::new();
        things.replace(&domain, &mut limbo);
        let freed = things.reclaim(&domain, &mut limbo);
        let (cached, good, after) = reader.join().unwrap();
        (cached, good, after, freed)
    });
    // The reader uses the cache though the link has changed. It does not after the epoch has moved.
    assert!(seen.contains(&(0, true, 1, false)));
    assert!(seen.contains(&(0, false, 1, true)));
}

/// Any thread may move the epoch. One advance each by two threads is as safe as two by one thread.
#[test]
fn two_threads_move_the_epoch() {
    let seen = explore(3, || {
        let (things, domain) = (Things::new(), Domain::new());
        let reader = spawn(&things, domain.register(), |things, reader| {
            things.reach(&reader.pin())
        });
        let other = {
            let domain = domain.clone();
            thread::spawn(move || domain.try_advance())
        };
        let mut limbo = Limbo::new();
        things.replace(&domain, &mut limbo);
        let freed = things.reclaim(&domain, &mut limbo);
        let (thing, moved) = (reader.join().unwrap(), other.join().unwrap());
        (thing, moved, freed)
    });
    for thing in [0, 1] {
        assert!(seen.contains(&(thing, true, true)) && seen.contains(&(thing, true, false)));
    }
}
