#![expect(unsafe_code, reason = "an allocator")]
//! The allocator of these tests: the system's, which can refuse memory to a thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;

struct Refusing;

#[global_allocator]
static ALLOCATOR: Refusing = Refusing;

thread_local! {
    /// The number of allocations that still succeed.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Calls `act` with `count` allocations of this thread that succeed before all others fail.
pub(crate) fn with_allocations<R>(count: usize, act: impl FnOnce() -> R) -> R {
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

fn is_refused() -> bool {
    // A thread that ends no longer has the variable.
    let left = LEFT.try_with(|left| {
        let now = left.get();
        left.set(now.map(|count| count.saturating_sub(1)));
        now
    });
    left == Ok(Some(0))
}

// SAFETY: each call goes to the system's allocator, or returns null, which an allocator may do.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_refused() {
            return ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_refused() {
            return ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if is_refused() {
            return ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(pointer, layout) };
    }
}
