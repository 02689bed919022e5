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
        // Kept readers hold shares of the list that keeps them.
        self.readers.close();
    }
}

/// Guest memory as a set of memory slots, each backed by a region `R`, usually
/// [`GuestRegionMmap`](vm_memory::GuestRegionMmap): what `GuestMemoryAtomic<GuestMemoryMmap>` is
/// elsewhere.
///
/// Clones are handles of the same memory. Devices take a snapshot with
/// [`memory`](vm_memory::GuestAddressSpace::memory) and look up regions in it. A thread that
/// changes the memory takes [`lock`](Self::lock). Neither waits for the other: a snapshot shows the
/// version it was taken of.
pub struct SlotMemory<R: Send + Sync + 'static> {
    shared: Arc<MemoryInner<R>>,
}

impl<R: GuestMemoryRegion + Send + Sync + 'static> SlotMemory<R> {
    /// Memory without regions, of at most 32 764 (KVM's number of slots on x86-64) to come. Changes
    /// never wait for snapshots.
    #[must_use]
    pub fn new() -> Self {
        Self::with_limits(Limits {
            max_retired: usize::MAX,
            ..Limits::default()
        })
    }

    /// Memory without regions, within `limits`. Only address space 0 is used.
    ///
    /// With a finite `max_retired`, a change waits for the oldest snapshot to go when that much has
    /// been replaced since it was taken. That bounds the memory. But then a thread that holds a
    /// snapshot must not change the memory, and no snapshot may be held for as long as the
    /// machine runs: the change would wait for ever.
    #[must_use]
    pub fn with_limits(limits: Limits) -> Self {
        Self::with_barrier(limits, None)
    }

    /// [`with_limits`](Self::with_limits), but taking a snapshot usually needs no fence: see
    /// [`SlotWriter::with_barrier`](pageferry_memslot::SlotWriter::with_barrier).
    /// [`Barrier::membarrier`] is behind the feature `membarrier`, as a VMM that filters its
    /// system calls must allow that one.
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

    /// Memory of `regions`, in any order, with slot ids counted from 0 in theirs.
    ///
    /// # Errors
    /// The first region that is refused.
    pub fn from_regions(regions: impl IntoIterator<Item = Arc<R>>) -> Result<Self, RegionError> {
        let memory = Self::new();
        let mut writer = memory.lock();
        for region in regions {
            writer.insert_region(region)?;
        }
        drop(writer);
        Ok(memory)
    }

    /// The right to change the memory; waits for another thread that has it. Readers never wait for
    /// it.
    #[must_use]
    pub fn lock(&self) -> SlotMemoryWriter<'_, R> {
        // A change is made in one step or not at all, so a panic elsewhere leaves nothing
        // half-done.
        let writer = self.shared.writer.lock();
        SlotMemoryWriter::new(writer.unwrap_or_else(PoisonError::into_inner))
    }

    /// Which version of the memory is the newest.
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

    /// The newest version. Takes no lock, and no allocation once this thread has held as many
    /// snapshots at a time before.
    fn memory(&self) -> SlotMemoryGuard<R> {
        SlotMemoryGuard::new(SlotSnapshot::new(PinnedRef::new(
            &self.shared.readers,
            &self.shared.table,
        )))
    }
}
