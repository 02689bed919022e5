#![expect(unsafe_code, reason = "boxes change hands as raw pointers")]
//! A list that keeps expensive boxes for reuse.
//!
//! **Guarantee.** A thread that takes a box owns it alone. No thread waits. If a row is full, the
//! list drops a box that is put back. If a row is empty, the caller makes a new box. After
//! [`FreeList::close`] the list keeps nothing.
//!
//! **Mechanism.** Each thread has a row of places. Rows have separate cache lines, so that threads
//! do not disturb each other. A place goes from null to a pointer (put back), from the pointer to
//! null (take), and finally to [`CLOSED`](closed). Each step is one compare-exchange or swap on
//! that place. Putting back releases, taking and closing acquire. So a taker sees all writes of the
//! thread before it.
//!
//! **Neighbours.** `pinned` keeps readers here. This file does not know them.

use crate::sync::{AtomicPtr, Ordering, statics};
use std::cell::Cell;
use std::ptr::null_mut;

/// The number of rows. With more threads, threads share rows.
const ROWS: usize = if cfg!(loom) { 1 } else { 32 };
/// The places of a row. A row fills the 128 bytes that adjacent-line prefetch loads together.
const PLACES: usize = if cfg!(loom) { 1 } else { 16 };

/// The pointer in the places of a closed list. It is never the address of a box.
fn closed<T>() -> *mut T {
    std::ptr::without_provenance_mut(1)
}

#[repr(align(128))]
struct Row<T>([AtomicPtr<T>; PLACES]);

/// The list. It has only atomics, so a shared reference to it may outlive it until a call returns:
/// see [`FreeList::put_back`].
pub(crate) struct FreeList<T>([Row<T>; ROWS]);

// SAFETY: a list owns its boxes and moves them between threads. It hands out no reference to them.
unsafe impl<T: Send> Send for FreeList<T> {}
// SAFETY: as for `Send`. A thread takes only boxes that another has given up.
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
    /// An empty list.
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
                // SAFETY: the pointer came from `Box::into_raw` in `put_back`. This thread took it
                // out of its place and owns it.
                .map(|taken| unsafe { Box::from_raw(taken) })
        })
    }

    /// Puts `thing` into `row`, or drops it if there is no place or the list is closed.
    ///
    /// `thing` may own the last share of the list. After the step that puts it into a place,
    /// another thread may close the list, and drop `thing` and with it the list. So that step is
    /// the last access of this call.
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
        // SAFETY: the pointer came from the box above and is in no place.
        drop(unsafe { Box::from_raw(put) });
    }

    /// Drops all kept boxes. Boxes that are put back later are dropped at once.
    pub(crate) fn close(&self) {
        for place in self.0.iter().flat_map(|row| &row.0) {
            let found = place.swap(closed(), Ordering::AcqRel);
            if !found.is_null() && found != closed() {
                // SAFETY: as in `take`. The swap took the pointer out of its place.
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
        assert!(list.take(4).is_none(), "rows are separate");
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

    /// One thread closes the list while another puts back a box with a share of it.
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

    /// Two threads take from and put back to one place. No value is ever held twice.
    #[test]
    fn one_thing_has_one_owner() {
        loom::model(|| {
            let list = Arc::new(FreeList::new());
            list.put_back(0, Box::new(loom::cell::UnsafeCell::new(0usize)));
            let work = |list: &FreeList<loom::cell::UnsafeCell<usize>>| {
                if let Some(thing) = list.take(0) {
                    // SAFETY: the owner of a box is alone with it. Loom checks that.
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
            let thing = list.take(0).expect("no thread closed the list");
            // SAFETY: as above.
            let times = thing.with(|value| unsafe { *value });
            assert!((1..=2).contains(&times));
        });
    }
}
