//! A virtual machine: its memory slots, its vCPUs, and the calls that change them.

use crate::error::VmError;
use crate::log::{DirtyBy, DirtyLog, SlotLog};
use crate::memory::target_of;
use crate::region::{Region, SlotData, UserfaultBits};
use crate::revoke::{Format, Shared, Worker, Writer};
use crate::scalable::Scalable;
use crate::slots::{Begun, MemslotUpdate, Memslots};
use crate::vcpu::{Link, VcpuCore};
use pageferry_addr::{Gfn, GfnRange, Hva, PAGE_SHIFT, Pfn};
use pageferry_memslot::{Generation, Limits, Request, Slot, SlotFlags, SlotTable};
use pageferry_tdp::Log as _;
use pageferry_tdp::format::{Access, Format as _, Layout as _};
use pageferry_tdp::ring::{self, Harvester, Producer, Resetter};
use pageferry_userfault::PageBitmap;
use std::fmt;
use std::sync::Arc;

/// How large a VM may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmConfig {
    /// The ids of its vCPUs are below this.
    pub max_vcpus: u32,
    /// The ids of its memory slots are below this.
    pub max_slots: u16,
    /// How it is known that a page was written to, in slots that are logged.
    pub dirty_by: DirtyBy,
    /// What a log begins with and who clears it.
    pub dirty_protect: DirtyProtect,
    /// How many entries each vCPU's dirty ring has, if there are rings (`KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP`): a power
    /// of two from 128 to [`ring::MAX_ENTRIES`]. Pages that vCPUs dirty then go there, known by write protection,
    /// and not into the slots' bitmaps, which have what is found dirty otherwise.
    pub dirty_ring: Option<u32>,
}

/// Who protects the pages that a log names again (`KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DirtyProtect {
    /// [`Vm::get_dirty_log`], all of them, in the call that tells them.
    #[default]
    ByGet,
    /// [`Vm::clear_dirty_log`], those it is asked to, when the caller is about to copy them.
    ByClear,
    /// As `ByClear`; and a log begins with all pages dirty and none protected
    /// (`KVM_DIRTY_LOG_INITIALLY_SET`), so that turning it on costs next to nothing.
    InitiallySet,
}

impl Default for VmConfig {
    /// 1024 vCPUs and 32 764 memory slots, as KVM on x86-64.
    fn default() -> Self {
        Self {
            max_vcpus: 1024,
            max_slots: 32_764,
            dirty_by: DirtyBy::default(),
            dirty_protect: DirtyProtect::default(),
            dirty_ring: None,
        }
    }
}

/// What this hypervisor can do: the answers of `KVM_CHECK_EXTENSION`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The most vCPUs of this VM (`KVM_CAP_MAX_VCPUS`).
    pub max_vcpus: u32,
    /// The most memory slots of this VM (`KVM_CAP_NR_MEMSLOTS`).
    pub max_slots: u16,
    /// The flags a slot may have.
    pub slot_flags: SlotFlags,
    /// The bits of a guest-physical address.
    pub gpa_bits: u32,
    /// Whether stores to chosen pages can be made to leave the guest: [`Vm::track_writes`].
    pub write_tracking: bool,
}

/// A virtual machine. Cloning gives another handle to the same one.
///
/// Calls that change or revoke something may come from any thread, also one whose vCPU is outside its guest. They
/// take turns, and they return when every vCPU obeys them. How is argued in `revoke.rs`.
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
    pub(crate) shared: Arc<Shared<M>>,
    config: VmConfig,
}

impl Vm {
    /// A VM without memory and vCPUs.
    #[must_use]
    pub fn new(config: VmConfig) -> Self {
        Self::with_memslots(config)
    }

    /// A handle to the memory slots, for threads that read them: device emulation that translates addresses, a
    /// migration that walks them. Its readers see every change at once and as a whole, and wait for nobody.
    ///
    /// What a [`SlotGuard`](crate::SlotGuard) found stays: as long as the guard is held, neither the slot nor the owner
    /// of its memory is dropped, even if the slot is deleted meanwhile. Slots that are being deleted or moved are
    /// [invalid](crate::Slot::is_invalid). Hold a guard for short, and none while calling this VM or running a vCPU of
    /// it: a change that finds thousands of replaced slots waiting for a guard waits for it too.
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
        self.shared.writer().slots.table()
    }

    /// How often the memory slots have changed. Waits for a change in progress; [`Vm::slot_table`]'s generation does
    /// not, and says so.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.shared.writer().slots.writer().generation()
    }
}

impl<M: Memslots> Vm<M> {
    /// A VM without memory and vCPUs that keeps its memory slots by the scheme `M`.
    #[must_use]
    pub fn with_memslots(config: VmConfig) -> Self {
        let limits = Limits {
            address_spaces: 1,
            max_slots: config.max_slots,
            gfn_limit: Format::GFN_LIMIT,
            ..Limits::default()
        };
        Self {
            shared: Arc::new(Shared::new(M::new(limits), config.max_vcpus)),
            config,
        }
    }

    /// How it was made.
    #[must_use]
    pub const fn config(&self) -> VmConfig {
        self.config
    }

    /// What this VM can do.
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
    /// If the id is too large or used.
    pub fn create_vcpu(&self, id: u32) -> Result<VcpuCore<M>, VmError> {
        let mut writer = self.shared.writer();
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
        let ring = self.config.dirty_ring.map(new_ring).transpose()?;
        *used = true;
        let ring = ring.map(|(producer, harvester, resetter)| {
            rings.push(resetter);
            (producer, harvester)
        });
        let link = Arc::new(Link::default());
        self.shared.mmu.platform().add(Arc::clone(&link));
        let shared = Arc::clone(&self.shared);
        Ok(VcpuCore::new(id, shared, slots.reader(), link, ring))
    }

    /// Creates, deletes or moves a memory slot, or changes its flags; the rules are those of
    /// `KVM_SET_USER_MEMORY_REGION2`.
    ///
    /// When this returns, no vCPU uses what was there before: memory of a deleted or moved slot is no longer
    /// reached through its old place; with `LOG_DIRTY_PAGES` newly set, every later write is logged; with
    /// `USERFAULT` newly set, every later touch of a page whose bit is set leaves the guest. A slot that stays
    /// logged keeps its log. A slot that keeps `USERFAULT` keeps its bitmap: to give it another, take the flag off and set
    /// it again.
    ///
    /// A vCPU that touches a slot while it is deleted or moved waits outside its guest, for as long as the call takes.
    ///
    /// The memory's owner is kept while the slot exists. When a deletion or a move has returned no vCPU reaches what
    /// was there, and the owner the slot had until then is dropped by the time this returns, unless a reader of
    /// [`Vm::slot_table`] held a guard then. In that case, and where only flags changed, it is dropped by one of
    /// the next changes, or with the VM and the last reader.
    ///
    /// # Errors
    /// [`VmError::Slot`] by the slots' rules (guest_memfd is refused as an unknown flag);
    /// [`VmError::NotOwned`]; and for a bitmap that is missing or too small. Nothing has changed then.
    pub fn set_user_memory_region2(&self, region: Region) -> Result<(), VmError> {
        if region.flags.contains(SlotFlags::GUEST_MEMFD) {
            let unknown = SlotFlags::GUEST_MEMFD;
            return Err(pageferry_memslot::SlotError::UnknownFlags { unknown }.into());
        }
        let mut writer = self.shared.writer();
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
            userfault_bitmap: data.userfault.as_ref().map(first_word),
            data,
        })?;
        if region.size != 0 {
            // Dropping the update gives it up.
            check_memory(&region)?;
        }
        match update.begun() {
            Begun::Nothing => return Ok(()),
            Begun::Created { .. } => {
                update.commit();
                return Ok(());
            }
            Begun::Deleted { old } | Begun::Moved { old, .. } => {
                // A log that is kept hears of what the entries know, which is not in it yet; any other goes.
                let log = SlotLog::leaving(region.slot, old, kept.as_ref());
                self.shared.unmap(worker, old, &log);
                update.commit();
            }
            Begun::FlagsChanged { range, old, new } => {
                update.commit();
                let came = new.without(old);
                let went = old.without(new);
                let now = slots.by_id(region.slot);
                if came.contains(SlotFlags::USERFAULT) {
                    // What is unmapped needs no write protection. What its dirty bits say is not lost.
                    match now.map(SlotLog::of) {
                        Some(log) => self.shared.unmap(worker, range, &log),
                        None => self.shared.unmap(worker, range, &()),
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

    /// How many pages of 4 KiB are mapped in the second-stage tables; exact while no vCPU runs.
    #[must_use]
    pub fn mapped_pages(&self) -> u64 {
        let leaves = self.shared.mmu.stats().leaves;
        let pages = |level| Format::frames_per_entry(level);
        (1..).zip(leaves).map(|(level, n)| n * pages(level)).sum()
    }

    /// How many leaves of 4 KiB, 2 MiB and 1 GiB those are.
    #[must_use]
    pub fn mapped_leaves(&self) -> [u64; 3] {
        self.shared.mmu.stats().leaves
    }

    /// How many of the mapped pages are mapped writable; as exact. It looks at every entry.
    #[must_use]
    pub fn writable_pages(&self) -> u64 {
        let mut pages = 0;
        let all = GfnRange::new(Gfn(0), Format::GFN_LIMIT.0);
        let mut writer = self.shared.writer();
        if let Some(all) = all {
            writer.worker.scan(all, |_, found| {
                if found.leaf.access.write {
                    pages += Format::frames_per_entry(found.level);
                }
            });
        }
        pages
    }

    /// The bytes that the memory slots occupy themselves: slots and what finds them, logs and bitmaps excluded.
    #[must_use]
    pub fn slot_metadata_bytes(&self) -> usize {
        self.shared.writer().slots.metadata_bytes()
    }

    /// The bytes of all second-stage tables.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        self.shared.mmu.stats().table_bytes
    }

    /// The VM's clock: what the `time` CSR reads, in ticks of [`crate::hart::TIMEBASE_HZ`].
    #[must_use]
    pub fn time(&self) -> u64 {
        self.shared.clock.ticks()
    }

    /// Moves the VM's clock forward to `ticks`; does nothing if it is past that. For a VM that was somewhere else before.
    pub fn advance_time(&self, ticks: u64) {
        self.shared.clock.advance_to(ticks);
    }

    /// What the slot is to carry. Before the request is checked, so sizes may be absurd here.
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
            // Memory for a log only where there is memory to be logged.
            check_memory(region)?;
            data.dirty = Some(kept.unwrap_or_else(|| self.new_log(pages as usize)));
        }
        Ok(data)
    }

    /// Rings are filled by faults.
    const fn dirty_by(&self) -> DirtyBy {
        match self.config.dirty_ring {
            Some(_) => DirtyBy::WriteProtection,
            None => self.config.dirty_by,
        }
    }

    fn new_log(&self, pages: usize) -> DirtyLog {
        let bits = PageBitmap::new(pages);
        if self.config.dirty_protect == DirtyProtect::InitiallySet {
            bits.set_range(0..pages);
        }
        DirtyLog {
            bits: Arc::new(bits),
            by: self.dirty_by(),
        }
    }

    /// The slot of `range` has just got its log: makes later stores tell.
    fn start_log(&self, slots: &M, worker: &mut Worker, range: GfnRange) {
        self.shared.quiesce();
        if self.config.dirty_protect == DirtyProtect::InitiallySet {
            // All pages are in the log. Clearing parts of it protects those.
            return;
        }
        worker.deferred(|worker| {
            let _held = slots.exclude();
            // Eagerly, so that the faults to come need not.
            let Ok(_) = worker.split(range, 1, &()) else {
                unreachable!("the platform aborts where there is no memory");
            };
            match self.dirty_by() {
                DirtyBy::WriteProtection => worker.log_by_fault(range, &()),
                DirtyBy::Bits => worker.clear_dirty(range, &()),
            }
        });
    }

    /// The slot has lost its log or its userfault bits, or no page of it is tracked any more: undoes what these asked of
    /// the tables.
    pub(crate) fn recover(
        &self,
        slots: &M,
        worker: &mut Worker,
        slot: &Slot<SlotData>,
        range: GfnRange,
    ) {
        // Faults that saw it otherwise may still map small pages.
        self.shared.quiesce();
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

// By hand, since a derived one would ask for `M: Clone`.
impl<M: Memslots> Clone for Vm<M> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            config: self.config,
        }
    }
}

impl<M: Memslots> fmt::Debug for Vm<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vm")
            .field("config", &self.config)
            .field("tables", &self.shared.mmu)
            .finish_non_exhaustive()
    }
}

/// The address of the word in which the bit of the slot's first page is.
fn first_word(bits: &UserfaultBits) -> Hva {
    let word = bits.first.index() / u64::BITS as usize;
    // Where a request has no whole page, the bit may lie behind the last word: nothing is read here.
    Hva(bits.bitmap.words().as_ptr().wrapping_add(word).addr() as u64)
}

/// A vCPU leaves its guest with room for all that one run can dirty.
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
