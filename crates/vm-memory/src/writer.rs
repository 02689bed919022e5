//! Changes of the memory.

use crate::RegionError;
use pageferry_addr::{Gpa, Hva};
use pageferry_memslot::{
    Barrier, Limits, OutOfMemory, Request, Slot, SlotError, SlotFlags, SlotTable, SlotWriter,
    Update,
};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, MutexGuard};
use vm_memory::{GuestAddress, GuestMemoryRegion, GuestUsize, MemoryRegionAddress};

/// The free slot ids: those that were given back, and all from `next` on.
#[derive(Default)]
struct Ids {
    back: BinaryHeap<Reverse<u16>>,
    next: u16,
}

impl Ids {
    /// The lowest free id.
    fn peek(&self) -> u16 {
        self.back.peek().map_or(self.next, |id| id.0)
    }

    /// Takes the id that `peek` returns.
    fn take(&mut self) {
        if self.back.pop().is_none() {
            self.next += 1;
        }
    }

    /// Reserves room to give one id back.
    fn reserve(&mut self) -> Result<(), OutOfMemory> {
        let bytes = size_of::<Reverse<u16>>();
        self.back.try_reserve(1).map_err(|_| OutOfMemory { bytes })
    }

    fn give_back(&mut self, id: u16) {
        self.back.push(Reverse(id));
    }
}

/// The state that the lock of a [`SlotMemory`](crate::SlotMemory) protects.
pub(crate) struct Writer<R: Send + Sync + 'static> {
    slots: SlotWriter<Arc<R>>,
    ids: Ids,
}

impl<R: Send + Sync + 'static> Writer<R> {
    pub(crate) fn new(limits: Limits, barrier: Option<Barrier>) -> Self {
        Self {
            slots: SlotWriter::with_barrier(limits, barrier).with_relax(std::thread::yield_now),
            ids: Ids::default(),
        }
    }

    pub(crate) fn table(&self) -> SlotTable<Arc<R>> {
        self.slots.table()
    }
}

/// The right to change the memory of a [`SlotMemory`](crate::SlotMemory).
///
/// Each change is one step for readers: a snapshot has it or has not. It costs O(log n), even while
/// snapshots are held.
pub struct SlotMemoryWriter<'a, R: Send + Sync + 'static>(MutexGuard<'a, Writer<R>>);

impl<'a, R: GuestMemoryRegion + Send + Sync + 'static> SlotMemoryWriter<'a, R> {
    pub(crate) fn new(writer: MutexGuard<'a, Writer<R>>) -> Self {
        Self(writer)
    }

    /// Adds `region`. Returns the id of its slot, the lowest free one.
    ///
    /// # Errors
    /// If the region has no bytes or no host address, overlaps another, or breaks another rule of
    /// slots.
    pub fn insert_region(&mut self, region: Arc<R>) -> Result<u16, RegionError> {
        Ok(self.begin_insert(region, SlotFlags::EMPTY)?.commit())
    }

    /// Removes the region that begins at `base` and has `size` bytes, and returns it. The mapping
    /// goes after the last snapshot that shows it and the caller's share, when the writer
    /// [reclaims](Self::reclaim).
    ///
    /// # Errors
    /// If there is no such region.
    pub fn remove_region(
        &mut self,
        base: GuestAddress,
        size: GuestUsize,
    ) -> Result<Arc<R>, RegionError> {
        let region = Arc::clone(&self.find(base, size)?.data);
        self.begin_remove(base, size)?.commit();
        Ok(region)
    }

    /// Moves the region that begins at `base`, in one step. `moved` is the same host memory at
    /// another address and takes the region's slot. Returns the old region.
    ///
    /// For a `GuestRegionMmap`, `moved` is `GuestRegionMmap::with_arc(region.get_mmap(),
    /// new_base)`.
    ///
    /// # Errors
    /// If there is no region at `base` with that size, if `moved` is other host memory, or if its
    /// place is taken.
    pub fn move_region(
        &mut self,
        base: GuestAddress,
        moved: Arc<R>,
    ) -> Result<Arc<R>, RegionError> {
        let old = Arc::clone(&self.find(base, moved.len())?.data);
        self.begin_move(base, moved)?.commit();
        Ok(old)
    }

    /// Sets the flags of the slot at `base`, for example [`SlotFlags::LOG_DIRTY_PAGES`].
    ///
    /// # Errors
    /// If there is no such region, or if the flags cannot be set.
    pub fn set_flags(
        &mut self,
        base: GuestAddress,
        size: GuestUsize,
        flags: SlotFlags,
    ) -> Result<(), RegionError> {
        self.begin_flags(base, size, flags)?.commit();
        Ok(())
    }

    /// [`insert_region`](Self::insert_region) with flags and in two steps, so that the caller can
    /// tell the kernel in between.
    ///
    /// # Errors
    /// As for the call in one step.
    pub fn begin_insert(
        &mut self,
        region: Arc<R>,
        flags: SlotFlags,
    ) -> Result<RegionUpdate<'_, R>, RegionError> {
        let Writer { slots, ids } = &mut *self.0;
        let (id, max_slots) = (ids.peek(), slots.limits().max_slots);
        if id >= max_slots {
            return Err(RegionError::NoFreeSlot { max_slots });
        }
        let request = request(id, region, flags)?;
        RegionUpdate::begin(slots, ids, request)
    }

    /// [`remove_region`](Self::remove_region) in two steps. Between them readers still see the
    /// region.
    ///
    /// # Errors
    /// As for the call in one step.
    pub fn begin_remove(
        &mut self,
        base: GuestAddress,
        size: GuestUsize,
    ) -> Result<RegionUpdate<'_, R>, RegionError> {
        let slot = self.find(base, size)?;
        let mut request = request(slot.id, Arc::clone(&slot.data), SlotFlags::EMPTY)?;
        request.size = 0;
        let Writer { slots, ids } = &mut *self.0;
        RegionUpdate::begin(slots, ids, request)
    }

    /// [`move_region`](Self::move_region) in two steps. Between them readers still see the old
    /// place.
    ///
    /// # Errors
    /// As for the call in one step.
    pub fn begin_move(
        &mut self,
        base: GuestAddress,
        moved: Arc<R>,
    ) -> Result<RegionUpdate<'_, R>, RegionError> {
        let slot = self.find(base, moved.len())?;
        let request = request(slot.id, moved, slot.flags)?;
        let Writer { slots, ids } = &mut *self.0;
        RegionUpdate::begin(slots, ids, request)
    }

    /// [`set_flags`](Self::set_flags) in two steps.
    ///
    /// # Errors
    /// As for the call in one step.
    pub fn begin_flags(
        &mut self,
        base: GuestAddress,
        size: GuestUsize,
        flags: SlotFlags,
    ) -> Result<RegionUpdate<'_, R>, RegionError> {
        let slot = self.find(base, size)?;
        let request = request(slot.id, Arc::clone(&slot.data), flags)?;
        let Writer { slots, ids } = &mut *self.0;
        RegionUpdate::begin(slots, ids, request)
    }

    /// The number of regions.
    #[must_use]
    pub fn num_regions(&self) -> usize {
        self.0.slots.len()
    }

    /// Frees replaced records that no snapshot can show any more. Returns the number of records
    /// that still wait for a snapshot. Each change frees some records. A call after the last change
    /// of a burst unmaps removed regions.
    pub fn reclaim(&mut self) -> usize {
        self.0.slots.reclaim()
    }

    /// The bytes of slots and their trees, including retired ones and excluding regions.
    #[must_use]
    pub fn metadata_bytes(&self) -> usize {
        self.0.slots.metadata_bytes()
    }

    fn find(&self, base: GuestAddress, size: GuestUsize) -> Result<&Slot<Arc<R>>, RegionError> {
        let found = self.0.slots.view().lookup(Gpa(base.0).gfn());
        found
            .filter(|slot| slot.data.start_addr() == base && slot.data.len() == size)
            .ok_or(RegionError::NoSuchRegion { base, size })
    }
}

/// The request that gives slot `id` to `region`.
fn request<R: GuestMemoryRegion>(
    id: u16,
    region: Arc<R>,
    flags: SlotFlags,
) -> Result<Request<Arc<R>>, RegionError> {
    let (start, size) = (region.start_addr(), region.len());
    if size == 0 {
        return Err(RegionError::Empty { start });
    }
    let host = region
        .get_host_address(MemoryRegionAddress(0))
        .map_err(|_| RegionError::NoHostAddress { start })?;
    Ok(Request {
        address_space: 0,
        id,
        gpa: Gpa(start.0),
        size,
        hva: Hva(host as u64),
        flags,
        userfault_bitmap: None,
        data: region,
    })
}

/// The arguments of `KVM_SET_USER_MEMORY_REGION` for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSlot {
    /// The slot's id.
    pub id: u16,
    /// Its flags, as `KVM_MEM_*`.
    pub flags: u32,
    /// The first guest-physical address.
    pub guest_phys_addr: u64,
    /// The size in bytes. Zero removes the slot.
    pub memory_size: u64,
    /// The host address of its first byte.
    pub userspace_addr: u64,
}

/// A change that is checked and has begun. Dropping it aborts the change and leaves the memory as
/// it was.
///
/// A VMM on KVM tells the kernel between begin and commit. So the two always agree: the VMM does
/// not ask the kernel for changes that these rules refuse, and does not commit changes that the
/// kernel refuses.
///
/// ```no_run
/// # use pageferry_vm_memory::{KernelSlot, SlotMemoryWriter, RegionError};
/// # use vm_memory::GuestRegionMmap;
/// # use std::sync::Arc;
/// # fn tell_kvm(_: KernelSlot) -> std::io::Result<()> { Ok(()) }
/// # fn hotplug(
/// #     mut memory: SlotMemoryWriter<'_, GuestRegionMmap>,
/// #     region: Arc<GuestRegionMmap>,
/// # ) -> Result<(), Box<dyn std::error::Error>> {
/// let update = memory.begin_insert(region, pageferry_memslot::SlotFlags::EMPTY)?;
/// tell_kvm(update.kernel_slot())?; // an error drops the update
/// update.commit();
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping a change aborts it"]
pub struct RegionUpdate<'w, R: Send + Sync + 'static> {
    update: Update<'w, Arc<R>>,
    ids: &'w mut Ids,
    kernel: KernelSlot,
    /// Whether the id was free before.
    creates: bool,
}

impl<'w, R: Send + Sync + 'static> RegionUpdate<'w, R> {
    fn begin(
        slots: &'w mut SlotWriter<Arc<R>>,
        ids: &'w mut Ids,
        request: Request<Arc<R>>,
    ) -> Result<Self, RegionError> {
        let kernel = KernelSlot {
            id: request.id,
            flags: request.flags.0,
            guest_phys_addr: request.gpa.0,
            memory_size: request.size,
            userspace_addr: request.hva.0,
        };
        // Reserve here, so that the commit allocates nothing.
        ids.reserve().map_err(SlotError::from)?;
        let creates = kernel.memory_size != 0 && slots.view().by_id(kernel.id).is_none();
        Ok(Self {
            update: slots.begin(request)?,
            ids,
            kernel,
            creates,
        })
    }

    /// The slot to tell the kernel before the commit.
    #[must_use]
    pub fn kernel_slot(&self) -> KernelSlot {
        self.kernel
    }

    /// Makes the change and returns the slot's id. It allocates nothing.
    #[expect(clippy::must_use_candidate, reason = "the change is what is wanted")]
    pub fn commit(self) -> u16 {
        // Snapshots keep the regions that they show alive, so the old slot needs no more work.
        let _ = self.update.commit();
        if self.creates {
            self.ids.take();
        } else if self.kernel.memory_size == 0 {
            self.ids.give_back(self.kernel.id);
        }
        self.kernel.id
    }
}
