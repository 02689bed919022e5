#![expect(
    unsafe_code,
    reason = "declares the contract of the memory that tables are made of"
)]
//! What an MMU needs from where it runs.

use crate::Barrier;
use crate::sync::AtomicU64;
use core::ptr::NonNull;
use pageferry_addr::{GfnRange, PAGE_SHIFT, Pfn};

/// An entry of a table, as the hardware sees it: eight bytes that are read and exchanged as one.
///
/// An alias, so that a [`Platform`] need not care which atomics a model checker puts in its place.
pub type Entry = AtomicU64;

/// What a TLB flush has to reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// All that was cached from entries for these frames, pointers to tables included.
    Range(GfnRange),
    /// That stores to these frames are allowed, and nothing else.
    Writes(GfnRange),
    /// Everything; and every vCPU must use the new [root](crate::Mmu::root) before it goes on.
    Roots,
}

/// Where an MMU runs: it provides memory for tables, knows their addresses, and reaches the TLBs.
///
/// # Safety
///
/// The MMU follows the pointers and frees the memory that it is told about. So an implementation
/// promises:
///
/// 1. [`allocate_table`](Self::allocate_table) returns memory that is valid for reads and writes
///    and aligned to its size. All its entries are 0. Nobody else uses it until
///    [`free_table`](Self::free_table) gets it back.
/// 2. [`frame`](Self::frame) of such a pointer is a frame number that the format can hold.
///    Different tables have different frames. [`pointer`](Self::pointer) of that frame is the same
///    pointer again, with its provenance, until the table is freed. The same holds for
///    [`pointer_at`](Self::pointer_at) of the frame's first address. The MMU checks this once for
///    each table it is given, and panics if it is wrong.
/// 3. When [`flush`](Self::flush) has returned, no vCPU uses, or can come to use, what it had
///    cached of entries as they were before the call. All that a vCPU stored through such an entry
///    happens before the return.
/// 4. When the [`Mmu`](crate::Mmu) is dropped, no vCPU uses its root any more.
pub unsafe trait Platform: Send + Sync {
    /// Memory for a table of `entries`, all of them 0, or `None` if there is no memory.
    ///
    /// `entries` is a power of two, and at least 512: every table fills a page or more. A root
    /// whose format has fewer entries gets a page too. (Models of loom and shuttle have tables of
    /// two entries.)
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>>;

    /// Takes memory back.
    ///
    /// # Safety
    /// `table` came from [`allocate_table`](Self::allocate_table) with the same `entries`. It was
    /// not given back since, and nobody uses it any more.
    unsafe fn free_table(&self, table: NonNull<Entry>, entries: usize);

    /// The frame that `table` fills, or the first one if it is larger: the hardware gets this
    /// number.
    fn frame(&self, table: NonNull<Entry>) -> Pfn;

    /// The inverse of [`frame`](Self::frame).
    fn pointer(&self, table: Pfn) -> NonNull<Entry>;

    /// [`pointer`](Self::pointer) of the frame that begins at physical `address`.
    ///
    /// Entries of most formats hold an address, and a walk asks for the pointer at each level. A
    /// platform whose memory is at a fixed distance from its physical address needs no shifts here.
    #[inline]
    fn pointer_at(&self, address: u64) -> NonNull<Entry> {
        self.pointer(Pfn(address >> PAGE_SHIFT))
    }

    /// Flushes the TLBs of all vCPUs and waits until that is done.
    ///
    /// The MMU never calls it inside [`Worker::fault`](crate::Worker::fault) or
    /// [`fast_fault`](crate::Worker::fast_fault), so it may wait for vCPUs to leave those. It is
    /// not for the vCPU that faults: see [`Mapped::local_flush`](crate::Mapped::local_flush).
    ///
    /// If it panics, the tables stay as they were or as they became, and the flush stays owed: the
    /// worker's next call makes it.
    fn flush(&self, what: Flush);

    /// A memory barrier in all threads, so that workers need none of their own while nobody frees
    /// tables or works exclusively. [`Mmu::new`](crate::Mmu::new) asks for it once. With `None`,
    /// the default, each fault and each walk makes a barrier.
    fn barrier(&self) -> Option<Barrier> {
        None
    }

    /// Called again and again while the caller waits for other threads: spin, or yield the
    /// processor. It must not panic.
    fn relax(&self) {
        core::hint::spin_loop();
    }
}
