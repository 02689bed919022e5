#![expect(
    unsafe_code,
    reason = "page tables are raw memory, reached by the addresses in their entries"
)]
//! Memory for tables. All schemes use this allocator, so that no figure depends on the system's.
//!
//! Taking a table zeroes it, and that is timed. Tables are never returned to the system. A table's
//! physical address is its virtual address in this process.

use std::sync::atomic::{AtomicU64, Ordering};

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ptr::{self, NonNull};
use std::sync::Mutex;
use std::sync::PoisonError;

/// The number of entries of a table.
pub(super) const ENTRIES: usize = 512;

/// A table: one page of entries.
#[derive(Debug)]
#[repr(C, align(4096))]
pub(super) struct Table(pub(super) [AtomicU64; ENTRIES]);

/// An unused table. Its provenance is exposed.
struct Free(NonNull<Table>);

// SAFETY: any thread may use memory from the allocator, and only the free list has this table.
unsafe impl Send for Free {}

static FREE: Mutex<Vec<Free>> = Mutex::new(Vec::new());

fn fresh() -> NonNull<Table> {
    let layout = Layout::new::<Table>();
    // SAFETY: the layout's size is not 0.
    let memory = unsafe { alloc_zeroed(layout) };
    let Some(memory) = NonNull::new(memory) else {
        handle_alloc_error(layout)
    };
    let table = memory.cast::<Table>();
    table.as_ptr().expose_provenance();
    table
}

/// Makes the system's allocator keep its memory: one heap that never shrinks. Some schemes take
/// tables from there, and no figure should include the system's work to back fresh memory. The
/// setting holds for the rest of the process' life. It has no effect if the allocator is not
/// glibc's.
pub(super) fn keep_heap() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_ARENA_MAX, 1),
        // The largest value that all versions of glibc accept.
        (libc::M_MMAP_THRESHOLD, 1 << 25),
        (libc::M_TRIM_THRESHOLD, i32::MAX),
    ] {
        // SAFETY: any thread may set parameters of the allocator at any time.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Fills the allocator up to `tables` unused tables, each touched once.
pub(super) fn fill(tables: usize) {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    while free.len() < tables {
        let table = fresh();
        // SAFETY: it was just allocated. The store makes the system back it.
        unsafe { table.as_ptr().write_bytes(0, 1) };
        free.push(Free(table));
    }
}

/// Takes a zeroed table. Aborts if the system has no memory.
pub(super) fn take() -> NonNull<Table> {
    let free = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
    match free {
        Some(Free(table)) => {
            // SAFETY: it was in the free list, so nothing else uses it. Zeros are valid entries.
            unsafe { table.as_ptr().write_bytes(0, 1) };
            table
        }
        None => fresh(),
    }
}

/// Takes a table back.
///
/// # Safety
/// It came from [`take`], has not been given back since, and is no longer used.
pub(super) unsafe fn give(table: NonNull<Table>) {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    free.push(Free(table));
}

/// The address of a table: the inverse of [`at`].
pub(super) fn address(table: NonNull<Table>) -> u64 {
    table.as_ptr().addr() as u64
}

/// The table at an address from [`address`].
///
/// # Panics
/// If the address is 0.
#[inline]
pub(super) fn at(address: u64) -> NonNull<Table> {
    let pointer = ptr::with_exposed_provenance_mut(address as usize);
    NonNull::new(pointer).expect("the address of a table")
}

/// The bit of a present x86-64 entry (Intel SDM volume 3A, table 5-20).
pub(super) const PRESENT: u64 = 1 << 0;
/// The bit of an entry that allows stores.
pub(super) const WRITE: u64 = 1 << 1;
/// The frame of an entry, bits 51:12.
pub(super) const FRAME: u64 = 0x000f_ffff_ffff_f000;

/// Gives back a tree of four levels of x86-64 tables, whose leaves are 4 KiB.
///
/// # Safety
/// All tables of the tree came from [`take`], and are no longer used.
pub(super) unsafe fn give_tree(root: NonNull<Table>) {
    // SAFETY: as the caller vouches.
    unsafe { give_below(root, 4) };
}

/// # Safety
/// As [`give_tree`], for a table of `level`.
unsafe fn give_below(table: NonNull<Table>, level: u32) {
    if level > 1 {
        // SAFETY: tables of the tree are valid until they are given back, below.
        for entry in unsafe { &table.as_ref().0 } {
            let value = entry.load(Ordering::Relaxed);
            if value & PRESENT != 0 {
                // SAFETY: entries above level 1 are links only, and the caller vouches for the
                // tables below.
                unsafe { give_below(at(value & FRAME), level - 1) };
            }
        }
    }
    // SAFETY: as the caller vouches.
    unsafe { give(table) };
}
