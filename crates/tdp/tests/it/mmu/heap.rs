//! A platform in this process: tables from the heap, addresses as frames, flushes recorded.

use pageferry_addr::{PAGE_SHIFT, Pfn};
use pageferry_tdp::{Entry, Flush, Platform};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::{self, NonNull};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

/// Tables from the heap.
#[derive(Default)]
pub(crate) struct Heap {
    /// Tables that are allocated and not freed.
    pub(crate) live: AtomicI64,
    /// The number of allocations left plus one. 0 stands for no limit.
    pub(crate) limit: AtomicUsize,
    /// The requested flushes.
    pub(crate) flushes: Mutex<Vec<Flush>>,
}

impl Heap {
    /// Takes the flushes since the last call.
    pub(crate) fn take_flushes(&self) -> Vec<Flush> {
        std::mem::take(&mut self.flushes.lock().unwrap())
    }
}

fn layout(entries: usize) -> Layout {
    Layout::from_size_align(entries * 8, entries * 8).unwrap()
}

// SAFETY: the allocator's memory is zeroed and aligned to its size. Frames are addresses without
// their lowest bits, which are clear. There is no hardware.
unsafe impl Platform for Heap {
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>> {
        match self.limit.load(Ordering::Relaxed) {
            0 => {}
            1 => return None,
            left => self.limit.store(left - 1, Ordering::Relaxed),
        }
        // SAFETY: not of size 0.
        let table = NonNull::new(unsafe { alloc_zeroed(layout(entries)) })?;
        table.as_ptr().expose_provenance();
        self.live.fetch_add(1, Ordering::Relaxed);
        Some(table.cast())
    }

    unsafe fn free_table(&self, table: NonNull<Entry>, entries: usize) {
        self.live.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: from `allocate_table` with as many entries, as the caller promises.
        unsafe { dealloc(table.as_ptr().cast(), layout(entries)) };
    }

    fn frame(&self, table: NonNull<Entry>) -> Pfn {
        Pfn(table.as_ptr() as u64 >> PAGE_SHIFT)
    }

    fn pointer(&self, table: Pfn) -> NonNull<Entry> {
        let address = (table.0 << PAGE_SHIFT) as usize;
        NonNull::new(ptr::with_exposed_provenance_mut(address)).expect("a table's frame")
    }

    fn flush(&self, what: Flush) {
        self.flushes.lock().unwrap().push(what);
    }

    fn relax(&self) {
        std::thread::yield_now();
    }
}
