//! The address space that devices hold.

use crate::free_list::FreeList;
use crate::pinned::{Pinned, PinnedRef};
use crate::writer::Writer;
use crate::{RegionError, SlotMemoryGuard, SlotMemoryWriter, SlotSnapshot};
use pageferry_memslot::{Barrier, Generation, Limits, SlotTable};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use vm_memory::{GuestAddressSpace, GuestMemoryRegion};

struct MemoryInner<R: Send + Sync + 'static> {
    table: SlotTable<Arc<R>>,
    readers: Arc<FreeList<Pinned<R>>>,
    writer: Mutex<Writer<R>>,
}

impl<R: Send + Sync + 'static> Drop for MemoryInner<R> {
    fn drop(&mut self) {
        // Kept readers hold shares of the list, so the list must drop them.
        self.readers.close();
    }
}

/// Guest memory as a set of memory slots. A region `R` backs each slot, usually a
/// [`GuestRegionMmap`](vm_memory::GuestRegionMmap). It takes the place of
/// `GuestMemoryAtomic<GuestMemoryMmap>`.
///
/// Clones are handles of the same memory. Devices take a snapshot with
/// [`memory`](vm_memory::GuestAddressSpace::memory) and look up regions in it. A thread that
/// changes the memory takes [`lock`](Self::lock). Neither waits for the other: a snapshot shows the
/// version at which it was taken.
pub struct SlotMemory<R: Send + Sync + 'static> {
    shared: Arc<MemoryInner<R>>,
}

impl<R: GuestMemoryRegion + Send + Sync + 'static> SlotMemory<R> {
    /// Memory without regions. It can have up to 32 764 regions, KVM's number of slots on x86-64.
    /// Changes never wait for snapshots.
    ///
    /// # Panics
    /// If the allocator refuses memory for the slots.
    #[must_use]
    pub fn new() -> Self {
        Self::with_limits(Limits {
            max_retired: usize::MAX,
            // Nobody maps these slots by second-stage tables.
            gfn_limit: Limits::ALL_FRAMES,
            ..Limits::default()
        })
    }

    /// Memory without regions, within `limits`. Only address space 0 is used.
    ///
    /// A finite `max_retired` bounds the memory: after that many replacements since the oldest
    /// snapshot, a change waits until that snapshot goes. But then a thread that holds a snapshot
    /// must not change the memory, and no snapshot may be held for ever: the change would wait for
    /// ever.
    ///
    /// # Panics
    /// If `limits` allows no address space, or if the allocator refuses memory for the slots.
    #[must_use]
    pub fn with_limits(limits: Limits) -> Self {
        Self::with_barrier(limits, None)
    }

    /// Like [`with_limits`](Self::with_limits), but a snapshot usually needs no fence: see
    /// [`SlotWriter::with_barrier`](pageferry_memslot::SlotWriter::with_barrier).
    /// [`Barrier::membarrier`] needs the feature `membarrier`, because a VMM that filters its
    /// system calls must allow that one.
    ///
    /// # Panics
    /// As [`with_limits`](Self::with_limits).
    #[must_use]
    pub fn with_barrier(limits: Limits, barrier: Option<Barrier>) -> Self {
        let writer = Writer::new(limits, barrier);
        Self {
            shared: Arc::new(MemoryInner {
                table: writer.table(),
                readers: Arc::new(FreeList::new()),
                writer: Mutex::new(writer),
            }),
        }
    }

    /// Memory with `regions`, which may come in any order. Slot ids count from 0 in that order.
    ///
    /// # Errors
    /// The error of the first region that is refused.
    pub fn from_regions(regions: impl IntoIterator<Item = Arc<R>>) -> Result<Self, RegionError> {
        let memory = Self::new();
        let mut writer = memory.lock();
        for region in regions {
            writer.insert_region(region)?;
        }
        drop(writer);
        Ok(memory)
    }

    /// The right to change the memory. It waits for another thread that has it. Readers never wait
    /// for it.
    #[must_use]
    pub fn lock(&self) -> SlotMemoryWriter<'_, R> {
        // Ignore poison: each change is one step, so a panic elsewhere leaves nothing half-done.
        let writer = self.shared.writer.lock();
        SlotMemoryWriter::new(writer.unwrap_or_else(PoisonError::into_inner))
    }

    /// The newest version of the memory.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.shared.table.generation()
    }
}

impl<R: GuestMemoryRegion + Send + Sync + 'static> Default for SlotMemory<R> {
    fn default() -> Self {
        Self::new()
    }
}

impl<R: Send + Sync + 'static> Clone for SlotMemory<R> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<R: Send + Sync + 'static> fmt::Debug for SlotMemory<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SlotMemory({:?})", self.shared.table.generation())
    }
}

impl<R: GuestMemoryRegion + Send + Sync + 'static> GuestAddressSpace for SlotMemory<R> {
    type M = SlotSnapshot<R>;
    type T = SlotMemoryGuard<R>;

    /// A snapshot of the newest version. It takes no lock. It allocates only if this thread holds
    /// more snapshots than ever before.
    fn memory(&self) -> SlotMemoryGuard<R> {
        SlotMemoryGuard::new(SlotSnapshot::new(PinnedRef::new(
            &self.shared.readers,
            &self.shared.table,
        )))
    }
}
