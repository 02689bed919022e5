// Tables from the heap, for no hardware: the platform of examples in the documentation.

use core::ptr::NonNull;
use pageferry_addr::{PAGE_SHIFT, Pfn};
use pageferry_tdp::{Entry, Flush, Platform};
use std::alloc::{Layout, alloc_zeroed, dealloc};

/// The platform.
pub(crate) struct Heap;

fn layout(entries: usize) -> Layout {
    Layout::from_size_align(entries * 8, entries * 8).unwrap()
}

// SAFETY: the allocator's memory is zeroed and aligned to its size, which is a page or more. Its
// addresses are exposed. There is no hardware.
unsafe impl Platform for Heap {
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>> {
        // SAFETY: not of size 0.
        let table = NonNull::new(unsafe { alloc_zeroed(layout(entries)) })?;
        table.as_ptr().expose_provenance();
        Some(table.cast())
    }
    unsafe fn free_table(&self, table: NonNull<Entry>, entries: usize) {
        // SAFETY: from `allocate_table`.
        unsafe { dealloc(table.as_ptr().cast(), layout(entries)) }
    }
    fn frame(&self, table: NonNull<Entry>) -> Pfn {
        Pfn(table.as_ptr() as u64 >> PAGE_SHIFT)
    }
    fn pointer(&self, table: Pfn) -> NonNull<Entry> {
        let address = (table.0 << PAGE_SHIFT) as usize;
        NonNull::new(core::ptr::with_exposed_provenance_mut(address)).unwrap()
    }
    fn flush(&self, _: Flush) {}
}
