#![expect(
    unsafe_code,
    reason = "an allocator that counts, and refuses when told to"
)]
//! The allocator of these tests. It counts what each thread has allocated, and refuses memory to a
//! thread that asks for that.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// What the thread has allocated and not freed, in bytes asked for.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    /// How many allocations succeed before one fails.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
}

fn add(bytes: isize) {
    // Not there any more while a thread ends.
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

// SAFETY: the system's allocator does the work.
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

/// What this thread has allocated and not freed.
pub(crate) fn live() -> isize {
    LIVE.get()
}

/// What `make` leaves allocated.
pub(crate) fn bytes_of<T>(make: impl FnOnce() -> T) -> (usize, T) {
    let before = live();
    let made = make();
    let bytes = live() - before;
    (usize::try_from(bytes).expect("more than before"), made)
}

/// Does something whose allocations are not the table's: printing, which the test harness captures.
pub(crate) fn uncounted(act: impl FnOnce()) {
    let before = live();
    act();
    LIVE.set(before);
}

/// Does `act` on this thread, with so many allocations that succeed before all others fail.
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
