#![expect(
    unsafe_code,
    reason = "a global allocator that counts is an unsafe trait's impl"
)]
//! Dropping the tables gives all of their memory back, and losers of link races have kept none.

use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_tdp::StageTwo;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;

/// Bytes in blocks aligned to a page, as tables are and nothing else here is.
static TABLES: AtomicI64 = AtomicI64::new(0);

struct Counting;

impl Counting {
    fn count(layout: Layout, sign: i64) {
        if layout.align() >= 4096 {
            TABLES.fetch_add(sign * layout.size() as i64, Ordering::Relaxed);
        }
    }
}

// SAFETY: all is handed on to the system's allocator; counting touches an atomic only.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count(layout, 1);
        // SAFETY: the caller's contract is that of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        Self::count(layout, -1);
        // SAFETY: the caller's contract, and `alloc` above took the block from there.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// One test, as the count is the process's.
#[test]
fn live_table_bytes_are_those_reported_and_none_after_drop() {
    let live = || TABLES.load(Ordering::Relaxed);
    for round in 0..50u64 {
        assert_eq!(live(), 0);
        let tables = StageTwo::new();
        let start = Barrier::new(3);
        thread::scope(|scope| {
            for thread in 0..3 {
                let (tables, start) = (&tables, &start);
                scope.spawn(move || {
                    start.wait();
                    for i in 0..64 {
                        tables.map(Gfn((i << 25) + round * 513 + thread), Pfn(i), true);
                    }
                });
            }
        });
        assert_eq!(live() as u64, tables.table_bytes());
        assert_eq!(tables.zap(GfnRange::new(Gfn(0), 1 << 38).unwrap()), 3 * 64);
        assert_eq!(live() as u64, tables.table_bytes());
    }
    assert_eq!(live(), 0);
}
