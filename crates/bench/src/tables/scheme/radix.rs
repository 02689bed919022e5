#![expect(
    unsafe_code,
    reason = "dereferences the addresses of tables in entries"
)]
//! The tree of the floors: four levels of x86-64 tables. A walk creates missing tables. All tables
//! are freed when the tree is dropped.

use crate::tables::allocator::{self, ENTRIES, FRAME, PRESENT, Table, WRITE};
use pageferry_addr::Gfn;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Four levels of tables.
#[derive(Debug)]
pub(crate) struct Radix {
    root: NonNull<Table>,
}

// SAFETY: tables consist of atomics, links are only added, and any thread may use the memory.
unsafe impl Send for Radix {}
// SAFETY: as above.
unsafe impl Sync for Radix {}

/// The index of the entry for `gfn` in a table of `level`.
#[inline]
pub(super) const fn index(gfn: Gfn, level: u32) -> usize {
    (gfn.0 >> (9 * (level - 1))) as usize % ENTRIES
}

impl Radix {
    pub(super) fn new() -> Self {
        Self {
            root: allocator::take(),
        }
    }

    /// The entries of the level 1 table for `gfn`, if it exists.
    #[inline]
    pub(super) fn leaves(&self, gfn: Gfn) -> Option<&[AtomicU64; ENTRIES]> {
        self.descend(gfn, |_| None)
    }

    /// The entries of the level 1 table for `gfn`. Creates missing tables.
    #[inline]
    pub(super) fn leaves_or_new(&self, gfn: Gfn) -> &[AtomicU64; ENTRIES] {
        let leaves = self.descend(gfn, |entry| Some(link(entry)));
        leaves.expect("tables that were just made")
    }

    /// Walks down to level 1. `missing` may replace an empty entry, and returns its new value.
    #[inline]
    fn descend(
        &self,
        gfn: Gfn,
        missing: impl Fn(&AtomicU64) -> Option<u64>,
    ) -> Option<&[AtomicU64; ENTRIES]> {
        let mut table = self.root;
        for level in [4, 3, 2] {
            // SAFETY: tables live until `self` is dropped.
            let entry = unsafe { &table.as_ref().0[index(gfn, level)] };
            let mut value = entry.load(Ordering::Acquire);
            if value == 0 {
                value = missing(entry)?;
            }
            table = allocator::at(value & FRAME);
        }
        // SAFETY: as above.
        Some(unsafe { &table.as_ref().0 })
    }
}

/// Links a table into an empty entry. A thread that loses the exchange gives its own table back.
#[cold]
fn link(entry: &AtomicU64) -> u64 {
    let table = allocator::take();
    let value = allocator::address(table) | PRESENT | WRITE;
    match entry.compare_exchange(0, value, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => value,
        Err(other) => {
            // SAFETY: it was taken above, and no entry links it.
            unsafe { allocator::give(table) };
            other
        }
    }
}

impl Drop for Radix {
    fn drop(&mut self) {
        // SAFETY: all tables came from the allocator, and no reference into them outlives `self`.
        unsafe { allocator::give_tree(self.root) };
    }
}
