#![expect(
    unsafe_code,
    reason = "page tables are raw memory, reached by the addresses in their entries"
)]
//! Memory for tables, from one allocator for all schemes, so that no figure hangs on the system's
//! allocator.
//!
//! Tables are zeroed when they are taken, which is timed, and never given back to the system. A
//! table's physical address is its address: frames of tables are those of this process's address
//! space.

use crate::sync::{AtomicU64, Mutex, Ordering};
use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::ptr::{self, NonNull};
use std::sync::PoisonError;

/// Entries of a table.
pub(super) const ENTRIES: usize = 512;

/// A table: one page of entries.
#[derive(Debug)]
#[repr(C, align(4096))]
pub(super) struct Table(pub(super) [AtomicU64; ENTRIES]);

/// A table nobody uses. Its provenance is exposed.
struct Free(NonNull<Table>);

// SAFETY: memory from the allocator may be used by any thread, and nobody else has this.
unsafe impl Send for Free {}

static FREE: Mutex<Vec<Free>> = Mutex::new(Vec::new());

fn fresh() -> NonNull<Table> {
    let layout = Layout::new::<Table>();
    // SAFETY: a table has bytes.
    let memory = unsafe { alloc_zeroed(layout) };
    let Some(memory) = NonNull::new(memory) else {
        handle_alloc_error(layout)
    };
    let table = memory.cast::<Table>();
    table.as_ptr().expose_provenance();
    table
}

/// Has the system's allocator keep what it once had: one heap, never made smaller. For schemes that
/// take tables from there, so that what the system does to back fresh memory is in nobody's
/// figures. For the rest of the process's life; where the allocator is not glibc's, nothing is
/// done.
pub(super) fn keep_heap() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_ARENA_MAX, 1),
        // The most that all versions of glibc take.
        (libc::M_MMAP_THRESHOLD, 1 << 25),
        (libc::M_TRIM_THRESHOLD, i32::MAX),
    ] {
        // SAFETY: any thread may tune the allocator at any time.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Sees to it that `tables` tables wait in the allocator, each touched once.
pub(super) fn fill(tables: usize) {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    while free.len() < tables {
        let table = fresh();
        // SAFETY: just allocated; the store makes the system back it.
        unsafe { table.as_ptr().write_bytes(0, 1) };
        free.push(Free(table));
    }
}

/// A table of zeros. Aborts where the system has no memory.
pub(super) fn take() -> NonNull<Table> {
    let free = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
    match free {
        Some(Free(table)) => {
            // SAFETY: it was in the free list, so nobody else uses it; zeros are entries.
            unsafe { table.as_ptr().write_bytes(0, 1) };
            table
        }
        None => fresh(),
    }
}

/// Takes a table back.
///
/// # Safety
/// It came from [`take`], was not given back since, and nobody uses it any more.
pub(super) unsafe fn give(table: NonNull<Table>) {
    let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
    free.push(Free(table));
}

/// Where a table is: the inverse of [`at`].
pub(super) fn address(table: NonNull<Table>) -> u64 {
    table.as_ptr().addr() as u64
}

/// The table at an address that [`address`] gave.
///
/// # Panics
/// At address 0.
#[inline]
pub(super) fn at(address: u64) -> NonNull<Table> {
    let pointer = ptr::with_exposed_provenance_mut(address as usize);
    NonNull::new(pointer).expect("the address of a table")
}

/// An x86-64 entry is present. (Intel SDM volume 3A, table 5-20.)
pub(super) const PRESENT: u64 = 1 << 0;
/// It allows stores.
pub(super) const WRITE: u64 = 1 << 1;
/// Bits 51:12: the frame.
pub(super) const FRAME: u64 = 0x000f_ffff_ffff_f000;

/// Gives a tree of four levels of x86-64 tables back, whose leaves are 4 KiB.
///
/// # Safety
/// All tables of the tree came from [`take`], and nobody uses them any more.
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
                // SAFETY: above level 1 there are links only, and the caller vouches for what is
                // below.
                unsafe { give_below(at(value & FRAME), level - 1) };
            }
        }
    }
    // SAFETY: as the caller vouches.
    unsafe { give(table) };
}
