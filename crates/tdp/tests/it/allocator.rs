#![expect(unsafe_code, reason = "an allocator")]
//! The binary's allocator: the system's. It counts each thread's allocations, and can refuse them.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
}

/// The number of allocations of this thread so far.
pub(crate) fn allocations() -> u64 {
    ALLOCATIONS.get()
}

/// Calls `body`, during which this thread can allocate `count` times. Later allocations fail.
pub(crate) fn with_allocations<R>(count: u64, body: impl FnOnce() -> R) -> R {
    struct Reset;
    impl Drop for Reset {
        fn drop(&mut self) {
            LEFT.set(u64::MAX);
        }
    }
    LEFT.set(count);
    let _reset = Reset;
    body()
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Counts an allocation. Returns whether it is allowed.
fn count() -> bool {
    // A thread that ends no longer has these variables.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
    let left = LEFT.try_with(Cell::get).unwrap_or(u64::MAX);
    if left == 0 {
        return false;
    }
    if left != u64::MAX {
        LEFT.set(left - 1);
    }
    true
}

// SAFETY: each call goes to the system's allocator, or returns null, as an allocator may.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !count() {
            return ptr::null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !count() {
            return ptr::null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !count() {
            return ptr::null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}
