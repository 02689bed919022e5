#![expect(
    unsafe_code,
    reason = "implements an allocator that counts and refuses"
)]
//! The allocator of these tests. It counts each thread's allocated bytes, and refuses memory to a
//! thread on request.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// The bytes that the thread has requested and not freed.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    /// The number of allocations that succeed before all others fail.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
}

fn add(bytes: isize) {
    // The variable is gone while a thread ends.
    let _ = LIVE.try_with(|live| live.set(live.get() + bytes));
}

fn is_refused() -> bool {
    let left = LEFT.try_with(|left| {
        let now = left.get();
        left.set(now.map(|count| count.saturating_sub(1)));
        now
    });
    left == Ok(Some(0))
}

// SAFETY: all calls go to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_refused() {
            return std::ptr::null_mut();
        }
        add(layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        add(-(layout.size() as isize));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The bytes that this thread has allocated and not freed.
pub(crate) fn live() -> isize {
    LIVE.get()
}

/// The bytes that `make` leaves allocated, and its result.
pub(crate) fn bytes_of<T>(make: impl FnOnce() -> T) -> (usize, T) {
    let before = live();
    let made = make();
    let bytes = live() - before;
    (usize::try_from(bytes).expect("more than before"), made)
}

/// Calls `act` without counting its allocations. It is for printing, which the test harness
/// captures.
pub(crate) fn uncounted(act: impl FnOnce()) {
    let before = live();
    act();
    LIVE.set(before);
}

/// Calls `act`. On this thread the first `count` allocations succeed and all others fail.
pub(crate) fn with_allocations<T>(count: usize, act: impl FnOnce() -> T) -> T {
    struct Disarm;
    impl Drop for Disarm {
        fn drop(&mut self) {
            LEFT.set(None);
        }
    }
    let _disarm = Disarm;
    LEFT.set(Some(count));
    act()
}
