//! One version of the guest's memory, which implements `vm-memory`'s traits.

use crate::pinned::PinnedRef;
use pageferry_addr::{Gfn, Gpa, Hva};
use pageferry_memslot::{Generation, Slot, SlotView};
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;
use vm_memory::{
    GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionCollection,
    GuestRegionCollectionError, MemoryRegionAddress,
};

/// One version of the memory. It is owned, cheap to clone, and usable from any thread.
///
/// It shows the regions as they were when it was taken. All of them stay mapped while the snapshot
/// or a clone lives. Meanwhile no replaced memory can be freed: neither the records that each
/// change leaves behind (a few hundred bytes), nor the mappings of removed regions. Take a new
/// snapshot for each unit of work, as with `GuestMemoryAtomic`. To keep one for long, make a
/// [`detach`](Self::detach)ed copy.
///
/// Look-ups take O(log n) in the number of regions, and no lock. They first try the region that was
/// found last. Finding another one writes one word, which clones share. So threads that work in
/// different regions should each take a snapshot.
pub struct SlotSnapshot<R: Send + Sync + 'static>(PinnedRef<R>);

impl<R: Send + Sync + 'static> SlotSnapshot<R> {
    pub(crate) fn new(pinned: PinnedRef<R>) -> Self {
        Self(pinned)
    }

    /// The view of the slots, for look-ups that `vm-memory` does not have: by id, by host address,
    /// and of the nearest slot below.
    #[inline]
    #[must_use]
    pub fn slots(&self) -> SlotView<'_, Arc<R>> {
        self.0.view()
    }

    /// The version of this snapshot.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.slots().generation()
    }

    /// The slot that holds `addr`, with its id and flags.
    #[inline]
    #[must_use]
    pub fn find_slot(&self, addr: GuestAddress) -> Option<&Slot<Arc<R>>> {
        self.0.find(Gpa(addr.0).gfn())
    }

    /// The regions with a host address in `range`, in O(log n + their number).
    ///
    /// It is for a VMM that learns a host address from SIGBUS, userfaultfd or a balloon.
    pub fn regions_at_host(&self, range: Range<Hva>) -> impl Iterator<Item = &R> {
        self.slots().iter_hva(range).map(|slot| slot.data.as_ref())
    }
}

impl<R: GuestMemoryRegion + Send + Sync + 'static> SlotSnapshot<R> {
    /// Copies the list of regions, in O(n). The copy does not keep the writer from freeing memory
    /// that it replaces.
    ///
    /// # Errors
    /// If there is no region, because `vm-memory`'s collection is never empty.
    pub fn detach(&self) -> Result<GuestRegionCollection<R>, GuestRegionCollectionError> {
        let regions = self.slots().iter().map(|slot| Arc::clone(&slot.data));
        GuestRegionCollection::from_arc_regions(regions.collect())
    }
}

impl<R: Send + Sync + 'static> Clone for SlotSnapshot<R> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<R: Send + Sync + 'static> fmt::Debug for SlotSnapshot<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SlotSnapshot({:?})", self.generation())
    }
}

impl<R: GuestMemoryRegion + Send + Sync + 'static> GuestMemoryBackend for SlotSnapshot<R> {
    type R = R;

    /// Counts the regions in O(n).
    fn num_regions(&self) -> usize {
        self.slots().iter().count()
    }

    #[inline]
    fn find_region(&self, addr: GuestAddress) -> Option<&R> {
        self.find_slot(addr).map(|slot| slot.data.as_ref())
    }

    #[inline]
    fn to_region_addr(&self, addr: GuestAddress) -> Option<(&R, MemoryRegionAddress)> {
        let slot = self.find_slot(addr)?;
        // A region begins where its slot does.
        let offset = addr.0 - slot.range.start().gpa().0;
        Some((slot.data.as_ref(), MemoryRegionAddress(offset)))
    }

    fn iter(&self) -> impl Iterator<Item = &R> {
        self.slots().iter().map(|slot| slot.data.as_ref())
    }

    fn last_addr(&self) -> GuestAddress {
        self.slots()
            .lookup_or_below(Gfn::MAX)
            .map_or(GuestAddress(0), |slot| slot.data.last_addr())
    }
}

/// A smart pointer to a [`SlotSnapshot`], returned by
/// [`memory`](vm_memory::GuestAddressSpace::memory) of a [`SlotMemory`](crate::SlotMemory).
pub struct SlotMemoryGuard<R: Send + Sync + 'static>(SlotSnapshot<R>);

impl<R: Send + Sync + 'static> SlotMemoryGuard<R> {
    pub(crate) fn new(snapshot: SlotSnapshot<R>) -> Self {
        Self(snapshot)
    }

    /// The snapshot.
    #[must_use]
    pub fn into_inner(self) -> SlotSnapshot<R> {
        self.0
    }
}

impl<R: Send + Sync + 'static> Clone for SlotMemoryGuard<R> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<R: Send + Sync + 'static> Deref for SlotMemoryGuard<R> {
    type Target = SlotSnapshot<R>;

    #[inline]
    fn deref(&self) -> &SlotSnapshot<R> {
        &self.0
    }
}

impl<R: Send + Sync + 'static> fmt::Debug for SlotMemoryGuard<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
