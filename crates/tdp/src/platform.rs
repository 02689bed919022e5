#![expect(
    unsafe_code,
    reason = "declares the contract of the memory that tables are made of"
)]
//! The interface of an MMU to its platform.

use crate::Barrier;
use crate::sync::AtomicU64;
use core::ptr::NonNull;
use pageferry_addr::{GfnRange, PAGE_SHIFT, Pfn};

/// An entry of a table, as the hardware sees it: eight bytes that are read and exchanged as one.
///
/// It is an alias, so that a [`Platform`] does not depend on the atomics of a model checker.
pub type Entry = AtomicU64;

/// The cached state that a flush must remove from TLBs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Everything that was cached from entries for these frames, including pointers to tables.
    Range(GfnRange),
    /// Only the permission to store to these frames.
    Writes(GfnRange),
    /// Everything. Every vCPU must also use the new [root](crate::Mmu::root) before it continues.
    Roots,
}

/// The platform of an MMU: it provides memory for tables, knows their addresses, and flushes TLBs.
///
/// # Safety
///
/// The MMU follows the platform's pointers and frees its memory. So an implementation promises:
///
/// 1. [`allocate_table`](Self::allocate_table) returns memory that is valid for reads and writes
///    and aligned to its size. All its entries are 0. Nobody else uses it until
///    [`free_table`](Self::free_table) gets it back.
/// 2. [`frame`](Self::frame) of such a pointer is a frame number that the format can hold.
///    Different tables have different frames. [`pointer`](Self::pointer) of that frame is the same
///    pointer again, with its provenance, until the table is freed. The same holds for
///    [`pointer_at`](Self::pointer_at) of the frame's first address. The MMU checks this once for
///    each table, and panics if it is wrong.
/// 3. When [`flush`](Self::flush) has returned, no vCPU uses, or can come to use, anything that it
///    had cached of entries as they were before the call. All stores that vCPUs made through such
///    entries happen before the return.
/// 4. When the [`Mmu`](crate::Mmu) is dropped, no vCPU uses its root any more.
pub unsafe trait Platform: Send + Sync {
    /// Returns memory for a table of `entries`, all of them 0, or `None` if there is no memory.
    ///
    /// `entries` is a power of two, and at least 512: every table fills a page or more. A root
    /// whose format has fewer entries gets a page too. (Models of loom and shuttle have tables of
    /// two entries.)
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>>;

    /// Takes the memory of a table back.
    ///
    /// # Safety
    /// `table` came from [`allocate_table`](Self::allocate_table) with the same `entries`. It was
    /// not returned since, and nobody uses it any more.
    unsafe fn free_table(&self, table: NonNull<Entry>, entries: usize);

    /// The frame number for the hardware: the frame that `table` fills, or its first frame if it is
    /// larger.
    fn frame(&self, table: NonNull<Entry>) -> Pfn;

    /// The inverse of [`frame`](Self::frame).
    fn pointer(&self, table: Pfn) -> NonNull<Entry>;

    /// Returns [`pointer`](Self::pointer) of the frame that begins at physical `address`.
    ///
    /// Entries of most formats hold an address, and a walk calls this at each level. A platform
    /// whose memory is at a fixed distance from its physical address needs no shifts here.
    #[inline]
    fn pointer_at(&self, address: u64) -> NonNull<Entry> {
        self.pointer(Pfn(address >> PAGE_SHIFT))
    }

    /// Flushes the TLBs of all vCPUs and waits until that is done. The instructions of each kind of
    /// hardware are written out at its root register: [`Ept::eptp`], [`Npt::n_cr3`],
    /// [`RiscvX4::hgatp`] and [`Arm64Stage2::vttbr_el2`].
    ///
    /// [`Ept::eptp`]: crate::format::Ept::eptp
    /// [`Npt::n_cr3`]: crate::format::Npt::n_cr3
    /// [`RiscvX4::hgatp`]: crate::format::RiscvX4::hgatp
    /// [`Arm64Stage2::vttbr_el2`]: crate::format::Arm64Stage2::vttbr_el2
    ///
    /// The MMU never calls it inside [`Worker::fault`](crate::Worker::fault) or
    /// [`fast_fault`](crate::Worker::fast_fault), so it may wait for vCPUs to leave those. It does
    /// not serve the vCPU that faults: see [`Mapped::local_flush`](crate::Mapped::local_flush).
    ///
    /// If it panics, the tables keep their old or their new contents, and the flush stays owed. The
    /// worker's next call makes it.
    fn flush(&self, what: Flush);

    /// A memory barrier in all threads. With it, workers need no barrier while no thread frees
    /// tables or works exclusively. [`Mmu::new`](crate::Mmu::new) calls this once. With `None`, the
    /// default, each fault and each walk makes a barrier.
    fn barrier(&self) -> Option<Barrier> {
        None
    }

    /// Called repeatedly while the caller waits for other threads: spin, or yield the processor. It
    /// must not panic.
    fn relax(&self) {
        core::hint::spin_loop();
    }
}
