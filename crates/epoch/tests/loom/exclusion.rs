//! Shared guards against exclusive work.
//!
//! Who shares reads a cell, who excludes adds 1 to it, and loom reports what is not ordered. Each
//! model gives what its threads saw, and the test names the outcomes that must be seen. Where a
//! model tries rather than waits, it ends soon: both ways in run the same code.
//!
//! What fails when a rule is broken (tried by hand):
//! - no fence in `Reader::announce` or in `Domain::keep_out`, relaxed order in `Reader::withdraw`
//!   or at the end of `Exclusive`, `try_exclude` without its look at the readers: all models but
//!   one or two;
//! - relaxed order in `Reader::is_kept_out`: all that see what was added;
//! - relaxed order in `Reader::announce`: `a_plain_guard_after_a_shared_one` only;
//! - no acquire fence in `try_exclude`: all that try; none in `exclude`, or no wait there:
//!   `an_excluder_waits_for_a_sharer`;
//! - `Shared::refresh` without the bit: `a_refreshed_guard_still_shares`;
//! - `announce_later` without its second look: `a_sharer_waits_for_one_exclusion_after_another`;
//!   `announce_within` likewise: `who_shares_within_a_turn`.

use crate::explore::explore;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use pageferry_epoch::{Domain, Exclusive, Reader, Shared};
use std::collections::BTreeSet;

struct Cell(UnsafeCell<u32>);

// SAFETY: what is not shared correctly is what the models look for.
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

    /// Adds 1; gives what was there before.
    fn add(&self, _: &Exclusive<'_>) -> u32 {
        self.0.with_mut(|value| {
            // SAFETY: loom reports whatever races with this.
            let value = unsafe { &mut *value };
            *value += 1;
            *value - 1
        })
    }
}

/// A sharer's thread, which gives what `body` gives.
fn spawn<O: 'static>(
    cell: &Arc<Cell>,
    mut reader: Reader,
    body: impl FnOnce(&Cell, &mut Reader) -> O + 'static,
) -> thread::JoinHandle<O> {
    let cell = Arc::clone(cell);
    thread::spawn(move || body(&cell, &mut reader))
}

/// What a sharer reads, if it gets in.
fn try_read(cell: &Cell, reader: &mut Reader) -> Option<u32> {
    reader.try_share().map(|shared| cell.read(&shared))
}

/// What was there before an excluder added, if it got in.
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
    // Both get in, one after the other; or one keeps the other out; or each sees the other and
    // goes.
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

/// The reader registers while the excluder looks at all readers, so that it may be missed.
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

/// A plain guard is not waited for, and seeing it is as good as seeing the end of the shared one
/// before it.
#[test]
fn a_plain_guard_after_a_shared_one() {
    let seen = explore(3, || {
        let (cell, domain) = (Cell::new(), Domain::new());
        let sharer = spawn(&cell, domain.register(), |cell, reader| {
            let value = try_read(cell, reader);
            // Not ended before the model is over, so that its announcement is what the excluder
            // sees.
            std::mem::forget(reader.pin());
            value
        });
        let added = try_add(&cell, &domain);
        let value = sharer.join().unwrap();
        (value, added)
    });
    assert!(seen.contains(&(Some(0), Some(0))) && seen.contains(&(Some(0), None)));
}

/// A guard that goes on to another epoch goes on keeping exclusive work out.
#[test]
fn a_refreshed_guard_still_shares() {
    let seen = explore(3, || {
        let (cell, domain) = (Cell::new(), Domain::new());
        let moved = domain.clone();
        let sharer = spawn(&cell, domain.register(), move |cell, reader| {
            let mut shared = reader.try_share()?;
            let before = shared.epoch();
            // A guard allows one.
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

/// The one who waits to exclude gets in as soon as the guard has gone, whatever it was doing.
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

/// The second exclusive work begins when the sharer has just seen the first one end.
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

/// Shared work that yields reads before and after, and never while another adds.
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
