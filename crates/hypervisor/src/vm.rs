//! A virtual machine: its memory slots, its vCPUs, and the calls that change them.

use crate::config::{Capabilities, DirtyProtect, VmConfig};
use crate::dirty_log::{DirtyBy, DirtyLog};
use crate::error::VmError;
use crate::gate::Gate;
use crate::log::SlotLog;
use crate::memory::{VcpuMemory, target_of};
use crate::platform::{Format, Worker};
use crate::region::{Region, SlotData, UserfaultBits};
use crate::scalable::Scalable;
use crate::slots::{Begun, MemslotUpdate, Memslots};
use crate::state::{Changes, VmState, Writer};
use crate::vcpu::VcpuCore;
use pageferry_addr::{Gfn, GfnRange, Hva, PAGE_SHIFT, Pfn};
use pageferry_memslot::{Generation, Limits, Request, Slot, SlotFlags, SlotTable};
use pageferry_tdp::Log as _;
use pageferry_tdp::format::{Access, EntryLayout as _, Format as _};
use pageferry_tdp::ring::{self, Harvester, Producer, Resetter};
use pageferry_userfault::PageBitmap;
use std::fmt;
use std::sync::Arc;

/// A virtual machine. Cloning gives another handle to the same machine.
///
/// Any thread may make calls that change or revoke something, also a thread whose vCPU is outside
/// its guest. The calls run one at a time. Each returns when it holds for every vCPU.
///
/// ```
/// use pageferry_hypervisor::{Exit, Vm, VmConfig};
///
/// let vm = Vm::new(VmConfig::default());
/// let mut vcpu = vm.create_vcpu(0)?;
/// vcpu.kick_handle().kick();
/// assert_eq!(vcpu.run(), Exit::Kicked);
/// # Ok::<(), pageferry_hypervisor::VmError>(())
/// ```
pub struct Vm<M: Memslots = Scalable> {
    pub(crate) state: Arc<VmState>,
    pub(crate) changes: Arc<Changes<M>>,
    config: VmConfig,
}

impl Vm {
    /// Makes a VM without memory and vCPUs.
    #[must_use]
    pub fn new(config: VmConfig) -> Self {
        Self::with_memslots(config)
    }

    /// A handle to the memory slots, for threads that read them. Examples are device emulation,
    /// which translates addresses, and a migration, which walks the slots. Its readers are
    /// wait-free, and see every change at once and as a whole.
    ///
    /// A slot that a [`SlotGuard`](crate::SlotGuard) found stays: while the guard is held, neither
    /// the slot nor its memory's owner is dropped, even if the slot is deleted meanwhile. Slots
    /// that are being deleted or moved are [invalid](crate::Slot::is_invalid).
    ///
    /// Hold a guard briefly, and hold none while you call this VM or run a vCPU of it. If thousands
    /// of replaced slots wait for a guard, the next change waits for that guard too.
    ///
    /// ```
    /// use pageferry_addr::{Gfn, Hva};
    /// use pageferry_hypervisor::{Vm, VmConfig};
    ///
    /// let vm = Vm::new(VmConfig::default());
    /// let mut reader = vm.slot_table().reader();
    /// let guard = reader.pin();
    /// assert!(guard.lookup(Gfn(0x80000)).is_none());
    /// assert!(guard.view().by_id(0).is_none());
    /// assert_eq!(guard.view().iter_hva(Hva(0)..Hva(u64::MAX)).count(), 0);
    /// ```
    #[must_use]
    pub fn slot_table(&self) -> SlotTable<SlotData> {
        self.changes.lock().slots.table()
    }

    /// The number of changes of the memory slots. The call waits for a change in progress. The
    /// generation of [`Vm::slot_table`] does not wait.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.changes.lock().slots.writer().generation()
    }
}

impl<M: Memslots> Vm<M> {
    /// Makes a VM without memory and vCPUs. The scheme `M` keeps its memory slots.
    #[must_use]
    pub fn with_memslots(config: VmConfig) -> Self {
        let limits = Limits {
            address_spaces: 1,
            max_slots: config.max_slots,
            gfn_limit: Format::GFN_LIMIT,
            ..Limits::default()
        };
        let state = Arc::new(VmState::new(&config));
        let changes = Changes::new(M::new(limits), config.max_vcpus, state.mmu.worker());
        Self {
            state,
            changes: Arc::new(changes),
            config,
        }
    }

    /// The configuration from which the VM was made.
    #[must_use]
    pub const fn config(&self) -> VmConfig {
        self.config
    }

    /// The capabilities of this VM.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_vcpus: self.config.max_vcpus,
            max_slots: self.config.max_slots,
            slot_flags: SlotFlags::LOG_DIRTY_PAGES | SlotFlags::READONLY | SlotFlags::USERFAULT,
            gpa_bits: PAGE_SHIFT + Format::GFN_LIMIT.0.trailing_zeros(),
            write_tracking: true,
        }
    }

    /// Creates a vCPU, outside its guest and with all registers 0. An id is used once.
    ///
    /// # Errors
    /// - If the id is too large or in use.
    /// - If the size of the dirty rings is not possible.
    /// - [`VmError::OutOfMemory`] if the allocator refuses memory for the vCPU's records or its
    ///   TLB. The few small allocations after them abort the process on a lack of memory, like
    ///   Rust's own.
    ///
    /// The id is still free then.
    pub fn create_vcpu(&self, id: u32) -> Result<VcpuCore<M>, VmError> {
        let mut writer = self.changes.lock();
        let max = self.config.max_vcpus;
        let Writer {
            slots, used, rings, ..
        } = &mut *writer;
        let used = used
            .get_mut(id as usize)
            .ok_or(VmError::VcpuIdTooLarge { id, max })?;
        if *used {
            return Err(VmError::VcpuExists(id));
        }
        let memory = VcpuMemory::try_new(Arc::clone(&self.state), slots.try_reader()?)?;
        let ring = self.config.dirty_ring.map(new_ring).transpose()?;
        *used = true;
        let (producer, harvester) = ring
            .map(|(producer, harvester, resetter)| {
                rings.push(resetter);
                (producer, harvester)
            })
            .unzip();
        let gate = Arc::new(Gate::new());
        self.state.mmu.platform().add(id, Arc::clone(&gate));
        let memory = memory.with_ring(producer);
        let changes = Arc::clone(&self.changes);
        Ok(VcpuCore::new(id, memory, changes, gate, harvester))
    }

    /// Creates, deletes or moves a memory slot, or changes its flags, by the rules of
    /// `KVM_SET_USER_MEMORY_REGION2`.
    ///
    /// When the call returns, no vCPU uses the old state:
    /// - No access reaches the memory of a deleted or moved slot through its old place.
    /// - With `LOG_DIRTY_PAGES` newly set, every later write is logged.
    /// - With `USERFAULT` newly set, every later access to a page whose bit is set leaves the
    ///   guest.
    ///
    /// A slot that stays logged keeps its log. A slot that keeps `USERFAULT` keeps its bitmap. To
    /// replace the bitmap, take the flag off and set it again.
    ///
    /// A vCPU that accesses a slot while it is deleted or moved waits outside its guest until the
    /// call returns.
    ///
    /// The slot keeps its memory's owner. A deletion or a move drops the old owner before it
    /// returns, unless a reader of [`Vm::slot_table`] holds a guard. In that case, and if only
    /// flags changed, one of the next changes drops it, or the VM and the last reader do.
    ///
    /// # Errors
    /// - [`VmError::Slot`] if the region breaks those rules. `GUEST_MEMFD` is an unknown flag.
    /// - [`VmError::NotOwned`] if the host range is outside the given memory.
    /// - [`VmError::NoUserfaultBitmap`], [`VmError::UserfaultBitmapTooSmall`] or
    ///   [`VmError::UserfaultBitsUnaligned`].
    /// - [`VmError::OutOfMemory`] if the allocator refuses memory for the dirty log.
    ///
    /// Nothing has changed then.
    pub fn set_user_memory_region2(&self, region: Region) -> Result<(), VmError> {
        if region.flags.contains(SlotFlags::GUEST_MEMFD) {
            let unknown = SlotFlags::GUEST_MEMFD;
            return Err(pageferry_memslot::SlotError::UnknownFlags { unknown }.into());
        }
        let mut writer = self.changes.lock();
        let Writer { slots, worker, .. } = &mut *writer;
        let data = self.slot_data(slots, &region)?;
        let logged = SlotFlags::LOG_DIRTY_PAGES;
        let is_logged = |old: &Slot<SlotData>| old.flags.contains(logged);
        let was_logged = |_: &_| slots.by_id(region.slot).is_some_and(is_logged);
        let kept = data.dirty.clone().filter(was_logged);
        let update = slots.begin(Request {
            address_space: 0,
            id: region.slot,
            gpa: region.gpa,
            size: region.size,
            hva: region.hva,
            flags: region.flags,
            userfault_bitmap: data.userfault.as_ref().and_then(first_word),
            data,
        })?;
        if region.size != 0 {
            // An error drops the update, which gives it up.
            check_memory(&region)?;
        }
        match update.begun() {
            Begun::Nothing => return Ok(()),
            Begun::Created { .. } => {
                update.commit();
                return Ok(());
            }
            Begun::Deleted { old } | Begun::Moved { old, .. } => {
                // If the slot keeps its log, the log gets the dirty bits of the entries.
                let log = SlotLog::leaving(region.slot, old, kept.as_ref());
                self.state.unmap(worker, old, &log);
                update.commit();
            }
            Begun::FlagsChanged { range, old, new } => {
                update.commit();
                let came = new.without(old);
                let went = old.without(new);
                let now = slots.by_id(region.slot);
                if came.contains(SlotFlags::USERFAULT) {
                    // Unmapped pages need no write protection. Their dirty bits go into the log.
                    match now.map(SlotLog::of) {
                        Some(log) => self.state.unmap(worker, range, &log),
                        None => self.state.unmap(worker, range, &()),
                    };
                } else if came.contains(SlotFlags::LOG_DIRTY_PAGES) {
                    self.start_log(slots, worker, range);
                } else if let Some(now) = now
                    && went.without(SlotFlags::READONLY) != SlotFlags::EMPTY
                {
                    self.recover(slots, worker, now, range);
                }
            }
        }
        slots.reclaim();
        Ok(())
    }

    /// The number of pages of 4 KiB that the second-stage tables map. Exact while no vCPU runs.
    #[must_use]
    pub fn mapped_pages(&self) -> u64 {
        let leaves = self.state.mmu.stats().leaves;
        let pages = |level| Format::frames_per_entry(level);
        (1..).zip(leaves).map(|(level, n)| n * pages(level)).sum()
    }

    /// The numbers of leaves of 4 KiB, 2 MiB and 1 GiB. Exact while no vCPU runs.
    #[must_use]
    pub fn mapped_leaves(&self) -> [u64; 3] {
        self.state.mmu.stats().leaves
    }

    /// The number of pages that are mapped writable. Exact while no vCPU runs. The call reads every
    /// entry.
    #[must_use]
    pub fn writable_pages(&self) -> u64 {
        let mut pages = 0;
        let all = GfnRange::new(Gfn(0), Format::GFN_LIMIT.0);
        let mut writer = self.changes.lock();
        if let Some(all) = all {
            writer.worker.scan(all, |_, found| {
                if found.leaf.access.write {
                    pages += Format::frames_per_entry(found.level);
                }
            });
        }
        pages
    }

    /// The number of bytes of the slots and their index, without logs and bitmaps.
    #[must_use]
    pub fn slot_metadata_bytes(&self) -> usize {
        self.changes.lock().slots.metadata_bytes()
    }

    /// The number of bytes of all second-stage tables.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        self.state.mmu.stats().table_bytes
    }

    /// The number of second-stage tables that are cut off and wait to be freed, until no fault can
    /// use them. Usually, the call that cuts tables off frees them before it returns. Otherwise a
    /// vCPU frees them when it leaves its guest with [`Exit::Halted`](crate::Exit::Halted) or
    /// [`Exit::Kicked`](crate::Exit::Kicked), or a later call of the VM does.
    #[must_use]
    pub fn waiting_tables(&self) -> u64 {
        self.state.mmu.stats().waiting
    }

    /// The number of pages with LR reservations, now or lately. Stores to them are slow. Pages that
    /// share a hash count once.
    #[must_use]
    pub fn watched_pages(&self) -> u32 {
        self.state.reservations.watched()
    }

    /// The VM's clock, which the `time` CSR reads, in ticks of [`crate::hart::TIMEBASE_HZ`].
    #[must_use]
    pub fn time(&self) -> u64 {
        self.state.clock.ticks()
    }

    /// Moves the VM's clock forward to `ticks`, for a VM that has arrived by migration. The call
    /// does nothing if the clock is already past `ticks`.
    pub fn advance_time(&self, ticks: u64) {
        self.state.clock.advance_to(ticks);
    }

    /// Makes the data for a requested slot. The request is not checked yet, so sizes may be absurd.
    fn slot_data(&self, slots: &M, region: &Region) -> Result<SlotData, VmError> {
        let mut data = SlotData::default();
        if region.size == 0 {
            return Ok(data);
        }
        data.memory.clone_from(&region.memory);
        let old = slots.by_id(region.slot);
        if let Some(old) = old {
            data.track_as(&old.data);
        }
        let pages = region.size >> PAGE_SHIFT;
        if region.flags.contains(SlotFlags::USERFAULT) {
            let bits = region
                .userfault
                .clone()
                .ok_or(VmError::NoUserfaultBitmap(region.slot))?;
            if !bits.first.0.is_multiple_of(u64::BITS.into()) {
                return Err(VmError::UserfaultBitsUnaligned {
                    slot: region.slot,
                    first: bits.first,
                });
            }
            let end = bits.first.checked_add(pages);
            if end.is_none_or(|end| end.0 > bits.bitmap.pages() as u64) {
                return Err(VmError::UserfaultBitmapTooSmall {
                    slot: region.slot,
                    bits: bits.bitmap.pages(),
                    first: bits.first,
                    pages,
                });
            }
            data.userfault = Some(bits);
        }
        if region.flags.contains(SlotFlags::LOG_DIRTY_PAGES) {
            let kept = old.and_then(|slot| slot.data.dirty.clone());
            // The check comes first, so that a log is allocated only for memory that exists.
            check_memory(region)?;
            data.dirty = Some(match kept {
                Some(log) => log,
                None => self.new_log(pages as usize)?,
            });
        }
        Ok(data)
    }

    /// The way in which logs learn of dirty pages. With rings, faults report them.
    const fn dirty_by(&self) -> DirtyBy {
        match self.config.dirty_ring {
            Some(_) => DirtyBy::WriteProtection,
            None => self.config.dirty_by,
        }
    }

    fn new_log(&self, pages: usize) -> Result<DirtyLog, VmError> {
        let bits = PageBitmap::try_new(pages)?;
        if self.config.dirty_protect == DirtyProtect::InitiallySet {
            bits.set_range(0..pages);
        }
        Ok(DirtyLog {
            bits: Arc::new(bits),
            by: self.dirty_by(),
        })
    }

    /// Makes later stores to `range` be logged. Its slot has just got a log.
    fn start_log(&self, slots: &M, worker: &mut Worker, range: GfnRange) {
        self.state.quiesce();
        if self.config.dirty_protect == DirtyProtect::InitiallySet {
            // All pages are in the log. A call that clears a part of the log protects it.
            return;
        }
        worker.deferred(|worker| {
            let _held = slots.exclude();
            // Splitting here saves later faults the work.
            let Ok(_) = worker.split(range, 1, &()) else {
                unreachable!("the platform aborts where there is no memory");
            };
            match self.dirty_by() {
                DirtyBy::WriteProtection => worker.log_by_fault(range, &()),
                DirtyBy::Bits => worker.clear_dirty(range, &()),
            }
        });
    }

    /// Undoes the changes that a log, userfault bits or tracked pages made in the tables. The slot
    /// has just lost its log, its userfault bits or its last tracked page.
    pub(crate) fn recover(
        &self,
        slots: &M,
        worker: &mut Worker,
        slot: &Slot<SlotData>,
        range: GfnRange,
    ) {
        // Faults that saw the old state may still map small pages.
        self.state.quiesce();
        let log = SlotLog::of(slot);
        worker.deferred(|worker| {
            let _held = slots.exclude();
            if !log.is_on() {
                worker.unlog(range, &());
            }
            if !log.is_on() && slot.data.userfault.is_none() && slot.data.backing() > 1 {
                worker.recover(range, &(), |gfn, _| {
                    let pages = gfn.0 - slot.range.start().0;
                    let pfn = Pfn((slot.hva.0 >> PAGE_SHIFT) + pages);
                    Some(target_of(slot, gfn, pfn, Access::READ_WRITE, &log, false))
                });
            }
        });
    }
}

// By hand: a derived implementation would require `M: Clone`.
impl<M: Memslots> Clone for Vm<M> {
    fn clone(&self) -> Self {
        Self {
            state: Arc::clone(&self.state),
            changes: Arc::clone(&self.changes),
            config: self.config,
        }
    }
}

impl<M: Memslots> fmt::Debug for Vm<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm")
            .field("config", &self.config)
            .field("tables", &self.state.mmu)
            .finish_non_exhaustive()
    }
}

/// The address of the word that holds the bit of the slot's first page.
fn first_word(bits: &UserfaultBits) -> Option<Hva> {
    let word = bits.bitmap.address_from(bits.first)?;
    Some(Hva(word.addr() as u64))
}

/// Makes a ring. Its vCPU leaves the guest while the ring still has room for all pages that one run
/// can dirty.
fn new_ring(entries: u32) -> Result<(Producer, Harvester, Resetter), VmError> {
    ring::new(entries, ring::RESERVED_ENTRIES).map_err(VmError::DirtyRing)
}

fn check_memory(region: &Region) -> Result<(), VmError> {
    let memory = region.memory.as_ref().map(|memory| memory.hva_range());
    let end = region.hva.checked_add(region.size);
    let inside = memory
        .as_ref()
        .zip(end)
        .is_some_and(|(memory, end)| memory.start <= region.hva && end <= memory.end);
    if inside {
        Ok(())
    } else {
        Err(VmError::NotOwned {
            slot: region.slot,
            hva: region.hva,
            size: region.size,
            memory,
        })
    }
}

#[cfg(test)]
mod tests;
