//! Shared guards against exclusive work.
//!
//! Sharers read a cell, and excluders add 1 to it. Loom reports accesses that are not ordered. Each
//! model returns the outcomes of its threads, and the test names the outcomes that must occur. Most
//! models try instead of waiting, so they end soon. Both ways run the same code.
//!
//! Broken rules and the models that fail (tried by hand):
//! - no fence in `Reader::announce` or in `Domain::keep_out`, relaxed order in `Reader::withdraw`
//!   or at the end of `Exclusive`, `try_exclude` without its scan of the readers: all models but
//!   one or two;
//! - relaxed order in `Reader::is_kept_out`: all models in which a sharer may see an added 1;
//! - relaxed order in `Reader::announce`: `a_plain_guard_after_a_shared_one` only;
//! - no acquire fence in `try_exclude`: all models that call it; no acquire fence or no wait in
//!   `exclude`: `an_excluder_waits_for_a_sharer`;
//! - `Shared::refresh` without the bit: `a_refreshed_guard_still_shares`;
//! - `announce_later` without its second load of the word:
//!   `a_sharer_waits_for_one_exclusion_after_another`; `announce_within` likewise:
//!   `who_shares_within_a_turn`.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use pageferry_epoch::{Domain, Exclusive, Reader, Shared};
use pageferry_testkit::model::explore;
use std::collections::BTreeSet;

struct Cell(UnsafeCell<u32>);

// SAFETY: the models look for accesses that are not shared correctly.
unsafe impl Sync for Cell {}
// SAFETY: as above.
unsafe impl Send for Cell {}

impl Cell {
    fn new() -> Arc<Self> {
        Arc::new(Self(UnsafeCell::new(0)))
    }

    fn read(&self, _: &Shared<'_>) -> u32 {
        // SAFETY: loom reports a write that races with this read.
        self.0.with(|value| unsafe { *value })
    }

    /// Adds 1. Returns the value before.
    fn add(&self, _: &Exclusive<'_>) -> u32 {
        self.0.with_mut(|value| {
            // SAFETY: loom reports any access that races with this.
            let value = unsafe { &mut *value };
            *value += 1;
            *value - 1
        })
    }
}

/// Runs `body` on a sharer's thread.
fn spawn<O: 'static>(
    cell: &Arc<Cell>,
    mut reader: Reader,
    body: impl FnOnce(&Cell, &mut Reader) -> O + 'static,
) -> thread::JoinHandle<O> {
    let cell = Arc::clone(cell);
    thread::spawn(move || body(&cell, &mut reader))
}

/// The value that a sharer reads, if it gets in.
fn try_read(cell: &Cell, reader: &mut Reader) -> Option<u32> {
    reader.try_share().map(|shared| cell.read(&shared))
}

/// The value before an excluder added 1, if it got in.
fn try_add(cell: &Cell, domain: &Domain) -> Option<u32> {
    domain.try_exclude().map(|exclusive| cell.add(&exclusive))
}

#[test]
fn one_shares_and_one_excludes() {
    let seen = explore(3, || {
        let (cell, domain) = (Cell::new(), Domain::new());
        let sharer = spawn(&cell, domain.register(), try_read);
        let added = try_add(&cell, &domain);
        (sharer.join().unwrap(), added)
    });
    // Both get in, one after the other. Or one keeps the other out. Or each sees the other, and
    // both withdraw.
    let all = [
        (Some(0), Some(0)),
        (Some(1), Some(0)),
        (Some(0), None),
        (None, Some(0)),
        (None, None),
    ];
    assert_eq!(seen, BTreeSet::from(all));
}

#[test]
fn two_share_and_one_excludes() {
    let seen = explore(3, || {
        let (cell, domain) = (Cell::new(), Domain::new());
        let sharers =
            [domain.register(), domain.register()].map(|reader| spawn(&cell, reader, try_read));
        let added = try_add(&cell, &domain);
        let [first, second] = sharers.map(|sharer| sharer.join().unwrap());
        (first, second, added)
    });
    for first in [None, Some(0), Some(1)] {
        for second in [None, Some(0), Some(1)] {
            assert!(
                seen.contains(&(first, second, Some(0))),
                "{first:?} {second:?}"
            );
        }
    }
    assert!(seen.contains(&(Some(0), Some(0), None)));
}

#[test]
fn one_shares_and_two_exclude() {
    let seen = explore(3, || {
        let (cell, domain) = (Cell::new(), Domain::new());
        let sharer = spawn(&cell, domain.register(), try_read);
        let other = {
            let (cell, domain) = (Arc::clone(&cell), domain.clone());
            thread::spawn(move || try_add(&cell, &domain))
        };
        let added = try_add(&cell, &domain);
        (sharer.join().unwrap(), added, other.join().unwrap())
    });
    for value in [0, 1, 2] {
        for (added, other) in [(0, 1), (1, 0)] {
            let outcome = (Some(value), Some(added), Some(other));
            assert!(seen.contains(&outcome), "{outcome:?}");
        }
    }
}

#[test]
fn who_shares_within_a_turn() {
    let seen = explore(3, || {
        let (cell, domain) = (Cell::new(), Domain::new());
        let sharer = spawn(&cell, domain.register(), |cell, reader| {
            let shared = reader.share_within(1, thread::yield_now);
            shared.map(|shared| cell.read(&shared))
        });
        let added = [(); 2].map(|()| try_add(&cell, &domain));
        (sharer.join().unwrap(), added)
    });
    for value in [0, 1, 2] {
        assert!(seen.contains(&(Some(value), [Some(0), Some(1)])), "{value}");
    }
    assert!(seen.contains(&(None, [Some(0), Some(1)])));
    assert!(seen.contains(&(Some(0), [None, Some(0)])));
}

/// The reader registers during the excluder's scan, so the scan may miss it.
#[test]
fn a_sharer_that_has_just_come() {
    let seen = explore(3, || {
        let (cell, domain) = (Cell::new(), Domain::new());
        let late = {
            let (cell, domain) = (Arc::clone(&cell), domain.clone());
            thread::spawn(move || try_read(&cell, &mut domain.register()))
        };
        let added = try_add(&cell, &domain);
        (late.join().unwrap(), added)
    });
    assert!(seen.contains(&(Some(0), Some(0))) && seen.contains(&(Some(1), Some(0))));
    assert!(seen.contains(&(None, Some(0))) && seen.contains(&(Some(0), None)));
}

/// An excluder does not wait for a plain guard. Its announcement orders as much as the end of the
/// shared guard before it.
#[test]
fn a_plain_guard_after_a_shared_one() {
    let seen = explore(3, || {
        let (cell, domain) = (Cell::new(), Domain::new());
        let sharer = spawn(&cell, domain.register(), |cell, reader| {
            let value = try_read(cell, reader);
            // The guard does not end during the model, so the excluder sees its announcement.
            std::mem::forget(reader.pin());
            value
        });
        let added = try_add(&cell, &domain);
        let value = sharer.join().unwrap();
        (value, added)
    });
    assert!(seen.contains(&(Some(0), Some(0))) && seen.contains(&(Some(0), None)));
}

/// A guard that moves to another epoch still keeps exclusive work out.
#[test]
fn a_refreshed_guard_still_shares() {
    let seen = explore(3, || {
        let (cell, domain) = (Cell::new(), Domain::new());
        let moved = domain.clone();
        let sharer = spawn(&cell, domain.register(), move |cell, reader| {
            let mut shared = reader.try_share()?;
            let before = shared.epoch();
            // A guard allows one advance.
            assert!(moved.try_advance());
            shared.refresh();
            assert_ne!(shared.epoch(), before);
            Some(cell.read(&shared))
        });
        let added = try_add(&cell, &domain);
        (sharer.join().unwrap(), added)
    });
    assert!(seen.contains(&(Some(0), Some(0))) && seen.contains(&(Some(0), None)));
}

/// A thread that waits to exclude gets in as soon as the guard has ended.
#[test]
fn an_excluder_waits_for_a_sharer() {
    let seen = explore(3, || {
        let (cell, domain) = (Cell::new(), Domain::new());
        let sharer = spawn(&cell, domain.register(), try_read);
        let added = cell.add(&domain.exclude(thread::yield_now));
        (sharer.join().unwrap(), added)
    });
    assert_eq!(
        seen,
        BTreeSet::from([(None, 0), (Some(0), 0), (Some(1), 0)])
    );
}

#[test]
fn a_sharer_waits_for_an_excluder() {
    let seen = explore(3, || {
        let (cell, domain) = (Cell::new(), Domain::new());
        let sharer = spawn(&cell, domain.register(), |cell, reader| {
            cell.read(&reader.share(thread::yield_now))
        });
        let added = try_add(&cell, &domain);
        (sharer.join().unwrap(), added)
    });
    let all = [(0, Some(0)), (1, Some(0)), (0, None)];
    assert_eq!(seen, BTreeSet::from(all));
}

/// The second exclusive work may begin when the sharer has just seen the first one end.
#[test]
fn a_sharer_waits_for_one_exclusion_after_another() {
    let seen = explore(3, || {
        let (cell, domain) = (Cell::new(), Domain::new());
        let sharer = spawn(&cell, domain.register(), |cell, reader| {
            cell.read(&reader.share(thread::yield_now))
        });
        let added = [(); 2].map(|()| try_add(&cell, &domain));
        (sharer.join().unwrap(), added)
    });
    for value in [0, 1, 2] {
        assert!(seen.contains(&(value, [Some(0), Some(1)])), "{value}");
    }
}

/// Shared work that yields reads before and after the yield, and never beside an addition.
#[test]
fn a_sharer_yields_to_an_excluder() {
    let seen = explore(3, || {
        let (cell, domain) = (Cell::new(), Domain::new());
        let sharer = spawn(&cell, domain.register(), |cell, reader| {
            let mut shared = reader.try_share()?;
            let before = cell.read(&shared);
            if shared.is_wanted() {
                shared.yield_now(thread::yield_now);
            }
            Some((before, cell.read(&shared)))
        });
        let added = try_add(&cell, &domain);
        (sharer.join().unwrap(), added)
    });
    assert!(seen.contains(&(Some((0, 0)), None)) && seen.contains(&(Some((1, 1)), Some(0))));
    assert!(seen.contains(&(Some((0, 1)), Some(0))), "{seen:?}");
}
