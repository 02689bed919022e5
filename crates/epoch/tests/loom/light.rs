//! Readers that turn a domain light, beside a thread that frees or excludes.
//!
//! Loom has no barrier in all threads. Here light guards fence after all, and the barrier is a
//! fence. So these models check the switching, and the orders that the language knows. `tso.rs`
//! models the barrier. Each model names outcomes in which the barrier was called.
//!
//! A broken rule that fails here (tried by hand): relaxed order in `Mode::include` fails two
//! models. Guards that fence hide the lack of orders that only light guards need (of l4, and of
//! exchanges of the word). Those orders rest on the proof in `mode.rs`.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering, fence};
use loom::thread;
use pageferry_epoch::{Barrier, Domain, Limbo, Reader, TryArc};
use pageferry_testkit::model::{Watched, explore};
use std::cell::Cell;

std::thread_local! {
    /// The calls of the barrier in this run. All threads of a model run on one thread of the host.
    static CALLS: Cell<u32> = const { Cell::new(0) };
}

fn domain() -> TryArc<Domain> {
    CALLS.set(0);
    // SAFETY: here light guards fence, so a fence suffices.
    let barrier = unsafe {
        Barrier::new(|| {
            CALLS.set(CALLS.get() + 1);
            fence(Ordering::SeqCst);
        })
    };
    Domain::with_barrier(Some(barrier))
}

/// Takes guards until the domain is light. The second one turns it.
fn turn(reader: &mut Reader) {
    for _ in 0..2 {
        drop(reader.pin());
    }
}

/// Reads the cell, if the sharer gets in.
fn try_read(cell: &Watched, reader: &mut Reader) -> bool {
    let shared = reader.try_share();
    if shared.is_some() {
        cell.read();
    }
    shared.is_some()
}

/// Writes the cell, if the excluder gets in.
fn try_write(cell: &Watched, domain: &Domain) -> bool {
    let exclusive = domain.try_exclude();
    if exclusive.is_some() {
        cell.write();
    }
    exclusive.is_some()
}

#[test]
fn a_light_guard_keeps_what_it_reached() {
    let seen = explore(3, move || {
        let domain = domain();
        let things = Arc::new((AtomicUsize::new(0), [Watched::new(), Watched::new()]));
        let mut reader = domain.register();
        turn(&mut reader);
        let reading = {
            let things = Arc::clone(&things);
            thread::spawn(move || {
                let _guard = reader.pin();
                let thing = things.0.load(Ordering::Acquire);
                things.1[thing].read();
                thing
            })
        };
        let mut limbo = Limbo::new();
        things.0.store(1, Ordering::Release);
        limbo.retire(domain.stamp(), 0);
        for _ in 0..2 {
            domain.try_advance();
        }
        let freed = limbo.next_expired(&domain);
        if let Some(thing) = freed {
            things.1[thing].write();
        }
        (reading.join().unwrap(), freed.is_some(), CALLS.get())
    });
    for (thing, freed) in [(0, false), (0, true), (1, false), (1, true)] {
        assert!(seen.contains(&(thing, freed, 1)), "{thing} {freed}");
    }
    assert!(
        seen.iter().all(|&(.., calls)| calls == 1),
        "the first advance calls the barrier, and readers fence from then on"
    );
}

/// The second or the third guard turns the domain, perhaps beside exclusive work.
#[test]
fn a_sharer_turns_the_domain_beside_exclusive_work() {
    let seen = explore(3, || {
        let domain = domain();
        let cell = Arc::new(Watched::new());
        let mut reader = domain.register();
        drop(reader.pin());
        let sharing = {
            let cell = Arc::clone(&cell);
            thread::spawn(move || (0..2).filter(|_| try_read(&cell, &mut reader)).count())
        };
        let excluded = (0..2).filter(|_| try_write(&cell, &domain)).count();
        (sharing.join().unwrap(), excluded, CALLS.get())
    });
    assert!(seen.contains(&(2, 2, 0)), "the exclusions came first");
    assert!(seen.contains(&(2, 2, 1)), "the domain was light");
    assert!(seen.iter().any(|&(shared, ..)| shared < 2), "kept out");
}

/// One reader turns the domain after exclusive work. The other reader is light, and only the turn
/// orders it after that work.
#[test]
fn a_light_guard_comes_after_what_came_before_the_turn() {
    let seen = explore(2, || {
        let domain = domain();
        let cell = Arc::new(Watched::new());
        let (mut turning, mut sharing) = (domain.register(), domain.register());
        let turning = thread::spawn(move || turn(&mut turning));
        let sharing = {
            let cell = Arc::clone(&cell);
            thread::spawn(move || try_read(&cell, &mut sharing))
        };
        let excluded = try_write(&cell, &domain);
        turning.join().unwrap();
        (sharing.join().unwrap(), excluded, CALLS.get())
    });
    assert!(seen.contains(&(true, true, 0)) && seen.contains(&(true, true, 1)));
}

/// Two threads scan at once. One may come during the other's barrier.
#[test]
fn two_threads_scan_at_once_beside_a_light_reader() {
    let seen = explore(2, || {
        let domain = domain();
        let cell = Arc::new(Watched::new());
        let mut reader = domain.register();
        turn(&mut reader);
        let sharing = {
            let cell = Arc::clone(&cell);
            thread::spawn(move || try_read(&cell, &mut reader))
        };
        let scanning = {
            let domain = domain.clone();
            thread::spawn(move || domain.try_advance())
        };
        let excluded = try_write(&cell, &domain);
        let moved = scanning.join().unwrap();
        (sharing.join().unwrap(), excluded, moved, CALLS.get())
    });
    assert!(
        seen.iter().any(|&(.., calls)| calls == 2),
        "one came during the other's barrier"
    );
    assert!(seen.contains(&(true, true, true, 1)));
}
