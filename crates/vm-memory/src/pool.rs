#![expect(unsafe_code, reason = "boxes change hands as raw pointers")]
//! Things that are costly to make, parked for the next who needs one.
//!
//! **Guarantee.** What is taken is owned by the taker alone. Nobody waits: a full row means that the thing
//! is dropped, an empty one that a new thing must be made. After [`Pool::close`] nothing stays parked.
//!
//! **Mechanism.** A row of places a thread, each row in cache lines of its own, so that threads that park
//! and take do not disturb each other. A place goes from null to a pointer (park), from the pointer to null
//! (take), and to [`CLOSED`](closed) once and for ever. Each step is one compare-exchange or swap on that
//! place: parking releases, taking and closing acquire, so a taker sees all that the parker did.
//!
//! **Neighbours.** `pinned` parks readers here. This file knows nothing of them.

use crate::sync::{AtomicPtr, Ordering, statics};
use std::cell::Cell;
use std::ptr::null_mut;

/// How many rows; threads beyond that share.
const ROWS: usize = if cfg!(loom) { 1 } else { 32 };
/// Places a row: a row fills the 128 bytes that adjacent-line prefetch pulls together.
const PLACES: usize = if cfg!(loom) { 1 } else { 16 };

/// What a place holds once its pool is closed; never the address of anything.
fn closed<T>() -> *mut T {
    std::ptr::without_provenance_mut(1)
}

#[repr(align(128))]
struct Row<T>([AtomicPtr<T>; PLACES]);

/// The pool. Nothing but atomics, so that a shared reference to it may outlive it by the return of a call;
/// see [`Pool::park`].
pub(crate) struct Pool<T>([Row<T>; ROWS]);

// SAFETY: a pool owns the things that are parked in it and moves them between threads; it hands out no
// reference to them.
unsafe impl<T: Send> Send for Pool<T> {}
// SAFETY: as for Send: what is taken by one thread was given up by the one that parked it.
unsafe impl<T: Send> Sync for Pool<T> {}

/// The row of the calling thread.
pub(crate) fn own_row() -> usize {
    /// Where the next new thread begins.
    static NEXT: statics::AtomicUsize = statics::AtomicUsize::new(0);
    thread_local! {
        static OWN: Cell<Option<usize>> = const { Cell::new(None) };
    }
    OWN.get().unwrap_or_else(|| {
        let row = NEXT.fetch_add(1, Ordering::Relaxed) % ROWS;
        OWN.set(Some(row));
        row
    })
}

impl<T> Pool<T> {
    /// A pool with nothing in it.
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| {
            Row(std::array::from_fn(|_| AtomicPtr::new(null_mut())))
        }))
    }

    /// Takes a thing out of `row`, if there is one.
    pub(crate) fn take(&self, row: usize) -> Option<Box<T>> {
        self.0[row].0.iter().find_map(|place| {
            let found = place.load(Ordering::Relaxed);
            if found.is_null() || found == closed() {
                return None;
            }
            place
                .compare_exchange(found, null_mut(), Ordering::Acquire, Ordering::Relaxed)
                .ok()
                // SAFETY: the pointer came from `Box::into_raw` in `park`, and whoever takes it out of its
                // place, which is us, owns it.
                .map(|taken| unsafe { Box::from_raw(taken) })
        })
    }

    /// Parks `thing` in `row`, or drops it where there is no place or the pool is closed.
    ///
    /// `thing` may own the last share of the pool: from the step that parks it on, another thread may close
    /// the pool, drop `thing` and with it the pool, and that step is the last access made here.
    pub(crate) fn park(&self, row: usize, thing: Box<T>) {
        let parked = Box::into_raw(thing);
        for place in &self.0[row].0 {
            if place.load(Ordering::Relaxed).is_null()
                && place
                    .compare_exchange(null_mut(), parked, Ordering::Release, Ordering::Relaxed)
                    .is_ok()
            {
                return;
            }
        }
        // SAFETY: the pointer came from the box above and was put nowhere.
        drop(unsafe { Box::from_raw(parked) });
    }

    /// Drops all that is parked; whatever is parked later is dropped at once.
    pub(crate) fn close(&self) {
        for place in self.0.iter().flat_map(|row| &row.0) {
            let found = place.swap(closed(), Ordering::AcqRel);
            if !found.is_null() && found != closed() {
                // SAFETY: as in `take`: the swap took the pointer out of its place.
                drop(unsafe { Box::from_raw(found) });
            }
        }
    }
}

impl<T> Drop for Pool<T> {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn what_is_parked_is_taken_and_a_closed_pool_keeps_nothing() {
        let (pool, counted) = (Pool::new(), Arc::new(()));
        assert!(pool.take(3).is_none());
        for _ in 0..PLACES + 1 {
            pool.park(3, Box::new(Arc::clone(&counted)));
        }
        assert_eq!(Arc::strong_count(&counted), 1 + PLACES, "a full row drops");
        assert!(pool.take(4).is_none(), "rows are apart");
        let taken = pool.take(3).unwrap();
        pool.close();
        assert_eq!(Arc::strong_count(&counted), 2);
        pool.park(3, taken);
        assert_eq!(Arc::strong_count(&counted), 1);
        assert!(pool.take(3).is_none());
    }

    #[test]
    fn threads_that_share_a_row_never_hold_the_same_thing() {
        let pool = Pool::new();
        for value in 0..4u64 {
            pool.park(0, Box::new(value));
        }
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        if let Some(mut thing) = pool.take(0) {
                            let before = *thing;
                            *thing = u64::MAX;
                            std::hint::black_box(&mut thing);
                            *thing = before;
                            pool.park(0, thing);
                        }
                    }
                });
            }
        });
        let mut left: Vec<u64> = std::iter::from_fn(|| pool.take(0)).map(|b| *b).collect();
        left.sort_unstable();
        assert_eq!(left, [0, 1, 2, 3]);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;

    /// A pool is closed while a thing that holds a share of it is parked.
    #[test]
    fn closing_beside_parking_drops_the_thing_exactly_once() {
        loom::model(|| {
            let pool = Arc::new(Pool::new());
            let counted = Arc::new(());
            let parker = loom::thread::spawn({
                let (pool, thing) = (Arc::clone(&pool), Box::new(Arc::clone(&counted)));
                move || pool.park(0, thing)
            });
            pool.close();
            parker.join().unwrap();
            assert!(pool.take(0).is_none());
            assert_eq!(Arc::strong_count(&counted), 1);
        });
    }

    /// One place, two takers and parkers: the value is never held twice.
    #[test]
    fn one_thing_has_one_owner() {
        loom::model(|| {
            let pool = Arc::new(Pool::new());
            pool.park(0, Box::new(loom::cell::UnsafeCell::new(0usize)));
            let work = |pool: &Pool<loom::cell::UnsafeCell<usize>>| {
                if let Some(thing) = pool.take(0) {
                    // SAFETY: a box's owner is alone with it; loom checks just that.
                    thing.with_mut(|value| unsafe { *value += 1 });
                    pool.park(0, thing);
                }
            };
            let other = loom::thread::spawn({
                let pool = Arc::clone(&pool);
                move || work(&pool)
            });
            work(&pool);
            other.join().unwrap();
            let thing = pool.take(0).expect("nobody closed the pool");
            // SAFETY: as above.
            let times = thing.with(|value| unsafe { *value });
            assert!((1..=2).contains(&times));
        });
    }
}
