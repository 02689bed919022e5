#![expect(unsafe_code, reason = "boxes change hands as raw pointers")]
//! Boxes that are costly to make, kept for reuse.
//!
//! **Guarantee.** A thread that takes a box owns it alone. Nobody waits. If a row is full, a box
//! that is put back is dropped; if a row is empty, the caller makes a new one. After
//! [`FreeList::close`] nothing is kept.
//!
//! **Mechanism.** A row of places a thread. Each row has cache lines of its own, so that threads do
//! not disturb each other. A place goes from null to a pointer (put back), from the pointer to null
//! (take), and to [`CLOSED`](closed) once and for ever. Each step is one compare-exchange or swap
//! on that place. Putting back releases, taking and closing acquire. So a taker sees all that the
//! thread before it did.
//!
//! **Neighbours.** `pinned` keeps readers here. This file knows nothing of them.

use crate::sync::{AtomicPtr, Ordering, statics};
use std::cell::Cell;
use std::ptr::null_mut;

/// How many rows; threads beyond that share.
const ROWS: usize = if cfg!(loom) { 1 } else { 32 };
/// Places a row: a row fills the 128 bytes that adjacent-line prefetch pulls together.
const PLACES: usize = if cfg!(loom) { 1 } else { 16 };

/// What a place of a closed list holds; never the address of anything.
fn closed<T>() -> *mut T {
    std::ptr::without_provenance_mut(1)
}

#[repr(align(128))]
struct Row<T>([AtomicPtr<T>; PLACES]);

/// The list. It has nothing but atomics, so that a shared reference to it may outlive it by the
/// return of a call; see [`FreeList::put_back`].
pub(crate) struct FreeList<T>([Row<T>; ROWS]);

// SAFETY: a list owns what it keeps and moves it between threads; it hands out no reference to it.
unsafe impl<T: Send> Send for FreeList<T> {}
// SAFETY: as for `Send`: one thread takes only what another has given up.
unsafe impl<T: Send> Sync for FreeList<T> {}

/// The row of the calling thread.
pub(crate) fn own_row() -> usize {
    /// The row of the next new thread.
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

impl<T> FreeList<T> {
    /// A list with nothing in it.
    pub(crate) fn new() -> Self {
        Self(std::array::from_fn(|_| {
            Row(std::array::from_fn(|_| AtomicPtr::new(null_mut())))
        }))
    }

    /// Takes a box out of `row`, if there is one.
    pub(crate) fn take(&self, row: usize) -> Option<Box<T>> {
        self.0[row].0.iter().find_map(|place| {
            let found = place.load(Ordering::Relaxed);
            if found.is_null() || found == closed() {
                return None;
            }
            place
                .compare_exchange(found, null_mut(), Ordering::Acquire, Ordering::Relaxed)
                .ok()
                // SAFETY: the pointer came from `Box::into_raw` in `put_back`, and the thread that
                // takes it out of its place, this one, owns it.
                .map(|taken| unsafe { Box::from_raw(taken) })
        })
    }

    /// Puts `thing` into `row`, or drops it if there is no place or the list is closed.
    ///
    /// `thing` may own the last share of the list. From the step that puts it there, another thread
    /// may close the list, drop `thing` and with it the list. That step is the last access made
    /// here.
    pub(crate) fn put_back(&self, row: usize, thing: Box<T>) {
        let put = Box::into_raw(thing);
        for place in &self.0[row].0 {
            if place.load(Ordering::Relaxed).is_null()
                && place
                    .compare_exchange(null_mut(), put, Ordering::Release, Ordering::Relaxed)
                    .is_ok()
            {
                return;
            }
        }
        // SAFETY: the pointer came from the box above and was put nowhere.
        drop(unsafe { Box::from_raw(put) });
    }

    /// Drops all that is kept. What is put back later is dropped at once.
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

impl<T> Drop for FreeList<T> {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn what_is_put_back_is_taken_and_a_closed_list_keeps_nothing() {
        let (list, counted) = (FreeList::new(), Arc::new(()));
        assert!(list.take(3).is_none());
        for _ in 0..PLACES + 1 {
            list.put_back(3, Box::new(Arc::clone(&counted)));
        }
        assert_eq!(Arc::strong_count(&counted), 1 + PLACES, "a full row drops");
        assert!(list.take(4).is_none(), "rows are apart");
        let taken = list.take(3).unwrap();
        list.close();
        assert_eq!(Arc::strong_count(&counted), 2);
        list.put_back(3, taken);
        assert_eq!(Arc::strong_count(&counted), 1);
        assert!(list.take(3).is_none());
    }

    #[test]
    fn threads_that_share_a_row_never_hold_the_same_thing() {
        let list = FreeList::new();
        for value in 0..4u64 {
            list.put_back(0, Box::new(value));
        }
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        if let Some(mut thing) = list.take(0) {
                            let before = *thing;
                            *thing = u64::MAX;
                            std::hint::black_box(&mut thing);
                            *thing = before;
                            list.put_back(0, thing);
                        }
                    }
                });
            }
        });
        let mut left: Vec<u64> = std::iter::from_fn(|| list.take(0)).map(|b| *b).collect();
        left.sort_unstable();
        assert_eq!(left, [0, 1, 2, 3]);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;

    /// A list is closed while a box that holds a share of it is put back.
    #[test]
    fn closing_beside_putting_back_drops_the_thing_exactly_once() {
        loom::model(|| {
            let list = Arc::new(FreeList::new());
            let counted = Arc::new(());
            let other = loom::thread::spawn({
                let (list, thing) = (Arc::clone(&list), Box::new(Arc::clone(&counted)));
                move || list.put_back(0, thing)
            });
            list.close();
            other.join().unwrap();
            assert!(list.take(0).is_none());
            assert_eq!(Arc::strong_count(&counted), 1);
        });
    }

    /// One place, two threads that take and put back: the value is never held twice.
    #[test]
    fn one_thing_has_one_owner() {
        loom::model(|| {
            let list = Arc::new(FreeList::new());
            list.put_back(0, Box::new(loom::cell::UnsafeCell::new(0usize)));
            let work = |list: &FreeList<loom::cell::UnsafeCell<usize>>| {
                if let Some(thing) = list.take(0) {
                    // SAFETY: a box's owner is alone with it; loom checks just that.
                    thing.with_mut(|value| unsafe { *value += 1 });
                    list.put_back(0, thing);
                }
            };
            let other = loom::thread::spawn({
                let list = Arc::clone(&list);
                move || work(&list)
            });
            work(&list);
            other.join().unwrap();
            let thing = list.take(0).expect("nobody closed the list");
            // SAFETY: as above.
            let times = thing.with(|value| unsafe { *value });
            assert!((1..=2).contains(&times));
        });
    }
}
