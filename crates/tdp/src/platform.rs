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
    /// Whatever was cached from entries for these frames, pointers to tables included.
    Range(GfnRange),
    /// That stores to these frames are allowed, and nothing else.
    Writes(GfnRange),
    /// Everything; and every vCPU must use the new [root](crate::Mmu::root) before it goes on.
    Roots,
}

/// Where an MMU runs: who gives it table memory, knows addresses, and reaches the TLBs.
///
/// # Safety
///
/// The MMU follows the pointers and frees the memory it is told about, so:
/// 1. [`allocate_table`](Self::allocate_table) gives memory that is valid for reads and writes, aligned to its size, all
///    of whose entries are 0, and that nobody else uses, until it is given back to
///    [`free_table`](Self::free_table).
/// 2. [`frame`](Self::frame) of such a pointer is a frame number that the format can hold, different for different
///    tables, and [`pointer`](Self::pointer) of it is that pointer again, with its provenance, as long as it
///    is not freed; and so is [`pointer_at`](Self::pointer_at) of the frame's first address.
/// 3. When [`flush`](Self::flush) has returned, no vCPU uses, or can come to use, what it had cached of entries as they
///    were before the call. Whatever a vCPU stored through such an entry happens before the return.
/// 4. When the [`Mmu`](crate::Mmu) is dropped, no vCPU uses its root any more.
pub unsafe trait Platform: Send + Sync {
    /// Memory for a table of `entries`, a power of two; all of them 0. `None` where there is no memory.
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>>;

    /// Takes memory back.
    ///
    /// # Safety
    /// `table` came from [`allocate_table`](Self::allocate_table) with the same `entries`, was not given back since, and
    /// nobody uses it any more.
    unsafe fn free_table(&self, table: NonNull<Entry>, entries: usize);

    /// The frame that `table` fills, or starts in if it is larger: what the hardware is told.
    fn frame(&self, table: NonNull<Entry>) -> Pfn;

    /// The inverse of [`frame`](Self::frame).
    fn pointer(&self, table: Pfn) -> NonNull<Entry>;

    /// [`pointer`](Self::pointer) of the frame that begins at physical `address`, which is what entries of most formats hold: walks ask for
    /// it at each level, and where memory is at a fixed distance from its physical address this needs no shifts.
    #[inline]
    fn pointer_at(&self, address: u64) -> NonNull<Entry> {
        self.pointer(Pfn(address >> PAGE_SHIFT))
    }

    /// Flushes the TLBs of all vCPUs and waits until that is done.
    ///
    /// It is never called inside [`Worker::fault`](crate::Worker::fault) or
    /// [`fast_fault`](crate::Worker::fast_fault), so it may wait for vCPUs to leave those.
    fn flush(&self, what: Flush);

    /// A memory barrier in all threads, so that workers need none of their own where nobody frees tables or works exclusively.
    /// Asked for once, when an [`Mmu`](crate::Mmu) is made. `None` by default: each fault and each walk goes through a barrier then.
    fn barrier(&self) -> Option<Barrier> {
        None
    }

    /// Called again and again while something is waited for that other threads do: spin, or yield the processor.
    fn relax(&self) {
        core::hint::spin_loop();
    }
}
