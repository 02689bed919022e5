#![expect(
    unsafe_code,
    reason = "the workers' counts form a list without locks that lives as long as its MMU"
)]
//! The counts of leaves and tables. Each worker counts in its own cache lines.
//!
//! A worker updates its record by plain loads and stores, since no other thread writes it. A
//! negative count stands for things that another worker made. The sum over all records is exact
//! while no change is in flight.

use crate::format::Format;
use crate::sync::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use alloc::alloc::alloc;
use alloc::boxed::Box;
use core::alloc::Layout;
use core::ptr::{self, NonNull};
use pageferry_epoch::OutOfMemory;

/// The number of levels that can hold leaves in any format.
pub(crate) const LEAF_LEVELS: usize = 3;

/// The numbers of leaves and tables, and the memory that they take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Leaves by level: of 4 KiB, 2 MiB and 1 GiB.
    pub leaves: [u64; LEAF_LEVELS],
    /// Linked tables, without the root.
    pub tables: u64,
    /// The bytes of the linked tables and the root. Cached tables and tables that wait to be freed
    /// are excluded.
    pub table_bytes: u64,
    /// Tables that were cut off and wait to be freed. [`Worker::reclaim`](crate::Worker::reclaim)
    /// frees them once nobody can use them.
    pub waiting: u64,
    /// Invalidations in progress. One without an existing [`Invalidating`](crate::Invalidating) was
    /// forgotten: see [`Mmu::end_invalidations`](crate::Mmu::end_invalidations).
    pub invalidations: u64,
}

/// One worker's record.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Counts {
    leaves: [AtomicU64; LEAF_LEVELS],
    tables: AtomicU64,
    waiting: AtomicU64,
    owned: AtomicBool,
    next: *mut Counts,
}

impl Counts {
    /// A record that a worker owns, in memory that a `Box` can free.
    fn new(next: *mut Self) -> Result<NonNull<Self>, OutOfMemory> {
        const LAYOUT: Layout = Layout::new::<Counts>();
        let bytes = LAYOUT.size();
        // SAFETY: the layout's size is not 0.
        let memory = NonNull::new(unsafe { alloc(LAYOUT) }.cast()).ok_or(OutOfMemory { bytes })?;
        let counts = Self {
            leaves: core::array::from_fn(|_| AtomicU64::new(0)),
            tables: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            owned: AtomicBool::new(true),
            next,
        };
        // SAFETY: just allocated with the layout of a record.
        unsafe { memory.write(counts) };
        Ok(memory)
    }
}

/// The records of all workers, including dropped ones.
#[derive(Debug)]
pub(crate) struct AllCounts {
    first: AtomicPtr<Counts>,
}

/// The right to write one record. The record's MMU must outlive it.
#[derive(Debug)]
pub(crate) struct OwnCounts(NonNull<Counts>);

// SAFETY: a record consists of atomics, and only its owner writes the counts.
unsafe impl Send for OwnCounts {}

impl AllCounts {
    pub(crate) fn new() -> Self {
        Self {
            first: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Returns a record that no other worker writes. A reused record keeps its counts.
    ///
    /// # Errors
    /// If the allocator refuses a record.
    ///
    /// # Safety
    /// The result is dropped before `self` is.
    pub(crate) unsafe fn try_register(&self) -> Result<OwnCounts, OutOfMemory> {
        let mut first = self.first.load(Ordering::Acquire);
        let mut record = first;
        while let Some(known) = NonNull::new(record) {
            // SAFETY: records are freed with the list only, which is borrowed.
            let counts = unsafe { known.as_ref() };
            // Acquire: the last owner's counts.
            if !counts.owned.load(Ordering::Relaxed) && !counts.owned.swap(true, Ordering::Acquire)
            {
                return Ok(OwnCounts(known));
            }
            record = counts.next;
        }
        let fresh = Counts::new(first)?;
        loop {
            match self.first.compare_exchange(
                first,
                fresh.as_ptr(),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return Ok(OwnCounts(fresh)),
                Err(now) => {
                    first = now;
                    // SAFETY: not in the list yet, so no other thread knows it.
                    unsafe { (*fresh.as_ptr()).next = now };
                }
            }
        }
    }

    /// The sums of all records.
    pub(crate) fn sum(&self) -> Stats {
        let mut stats = Stats::default();
        let mut record = self.first.load(Ordering::Acquire);
        while let Some(known) = NonNull::new(record) {
            // SAFETY: as in `try_register`.
            let counts = unsafe { known.as_ref() };
            let add = |sum: &mut u64, count: &AtomicU64| {
                *sum = sum.wrapping_add(count.load(Ordering::Relaxed));
            };
            for (sum, count) in stats.leaves.iter_mut().zip(&counts.leaves) {
                add(sum, count);
            }
            add(&mut stats.tables, &counts.tables);
            add(&mut stats.waiting, &counts.waiting);
            record = counts.next;
        }
        // While changes are in flight, a sum may briefly be below zero.
        let settled = |sum: u64| if sum > i64::MAX as u64 { 0 } else { sum };
        stats.leaves = stats.leaves.map(settled);
        (stats.tables, stats.waiting) = (settled(stats.tables), settled(stats.waiting));
        stats
    }
}

impl Drop for AllCounts {
    fn drop(&mut self) {
        let mut record = self.first.load(Ordering::Relaxed);
        while !record.is_null() {
            // SAFETY: from `Counts::new`, in the list once, and no worker owns it any more.
            record = unsafe { Box::from_raw(record) }.next;
        }
    }
}

impl OwnCounts {
    const fn counts(&self) -> &Counts {
        // SAFETY: the list outlives `self`, as `try_register` demands.
        unsafe { self.0.as_ref() }
    }

    /// Adds to the leaves of `level`, which holds leaves.
    #[inline]
    pub(crate) fn leaves(&mut self, level: u32, change: i64) {
        add(&self.counts().leaves[level as usize - 1], change);
    }

    /// The frames that the leaves of this record map. Leaves that other workers made are excluded,
    /// so only differences have a meaning.
    pub(crate) fn frames<F: Format>(&self) -> i64 {
        (1..=F::MAX_LEAF_LEVEL)
            .zip(&self.counts().leaves)
            .map(|(level, count)| {
                let leaves = count.load(Ordering::Relaxed).cast_signed();
                leaves * F::frames_per_entry(level).cast_signed()
            })
            .sum()
    }

    /// Adds to the tables.
    #[inline]
    pub(crate) fn tables(&mut self, change: i64) {
        add(&self.counts().tables, change);
    }

    /// Adds to the tables that wait to be freed.
    pub(crate) fn waiting(&mut self, change: i64) {
        add(&self.counts().waiting, change);
    }
}

/// Two plain instructions suffice: there is one writer.
#[inline]
fn add(count: &AtomicU64, change: i64) {
    let now = count.load(Ordering::Relaxed).wrapping_add_signed(change);
    count.store(now, Ordering::Relaxed);
}

impl Drop for OwnCounts {
    fn drop(&mut self) {
        self.counts().owned.store(false, Ordering::Release);
    }
}
