//! A virtual machine: its memory slots, its vCPUs, and the calls that change them.

use crate::error::VmError;
use crate::region::{Region, SlotData, UserfaultBits};
use crate::revoke::{Shared, Writer};
use crate::scalable::Scalable;
use crate::slots::{Begun, MemslotUpdate, Memslots};
use crate::vcpu::{Link, VcpuCore};
use core::ops::Range;
use pageferry_addr::{Hva, PAGE_SHIFT};
use pageferry_memslot::{Generation, Limits, Request, SlotFlags, SlotTable};
use pageferry_tdp::Sv48x4;
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
}

impl Default for VmConfig {
    /// 1024 vCPUs and 32 764 memory slots, as KVM on x86-64.
    fn default() -> Self {
        Self {
            max_vcpus: 1024,
            max_slots: 32_764,
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
            gfn_limit: Sv48x4::GFN_LIMIT,
            ..Limits::default()
        };
        Self {
            shared: Arc::new(Shared::new(M::new(limits), config.max_vcpus)),
            config,
        }
    }

    /// What this VM can do.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_vcpus: self.config.max_vcpus,
            max_slots: self.config.max_slots,
            slot_flags: SlotFlags::LOG_DIRTY_PAGES | SlotFlags::READONLY | SlotFlags::USERFAULT,
            gpa_bits: PAGE_SHIFT + Sv48x4::GFN_LIMIT.0.trailing_zeros(),
        }
    }

    /// Creates a vCPU, outside its guest and with all registers 0. An id is used once.
    ///
    /// # Errors
    /// If the id is too large or used.
    pub fn create_vcpu(&self, id: u32) -> Result<VcpuCore<M>, VmError> {
        let mut writer = self.shared.writer();
        let max = self.config.max_vcpus;
        let Writer { slots, vcpus } = &mut *writer;
        let used = vcpus
            .used
            .get_mut(id as usize)
            .ok_or(VmError::VcpuIdTooLarge { id, max })?;
        if core::mem::replace(used, true) {
            return Err(VmError::VcpuExists(id));
        }
        let link = Arc::new(Link::default());
        vcpus.links.push(Arc::clone(&link));
        let shared = Arc::clone(&self.shared);
        Ok(VcpuCore::new(id, shared, slots.reader(), link))
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
    pub fn set_user_memory_region(&self, region: Region) -> Result<(), VmError> {
        if region.flags.contains(SlotFlags::GUEST_MEMFD) {
            let unknown = SlotFlags::GUEST_MEMFD;
            return Err(pageferry_memslot::SlotError::UnknownFlags { unknown }.into());
        }
        let mut writer = self.shared.writer();
        let Writer { slots, vcpus } = &mut *writer;
        let data = slot_data(slots, &region)?;
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
                self.shared.unmap(vcpus, &[old]);
                update.commit();
            }
            Begun::FlagsChanged { range, old, new } => {
                update.commit();
                let came = new.without(old);
                if came.contains(SlotFlags::USERFAULT) {
                    // What is unmapped needs no write protection.
                    self.shared.unmap(vcpus, &[range]);
                } else if came.contains(SlotFlags::LOG_DIRTY_PAGES) {
                    self.shared.protect(vcpus, range);
                }
            }
        }
        slots.reclaim();
        Ok(())
    }

    /// Unmaps the guest pages whose host memory any byte of `hva` lies in, and flushes: the call of an MMU notifier,
    /// before the host changes what is mapped there. Every translation that existed when the call began is
    /// gone when it returns; later touches fault and map what the slots say. Gives how many were unmapped.
    pub fn invalidate_hva(&self, hva: Range<Hva>) -> u64 {
        let writer = self.shared.writer();
        let mut ranges = Vec::new();
        writer.slots.for_each_in_hva(hva.clone(), |slot| {
            ranges.extend(slot.frames_in_hva(hva.clone()));
        });
        if ranges.is_empty() {
            return 0;
        }
        self.shared.unmap(&writer.vcpus, &ranges)
    }

    /// How many pages are mapped in the second-stage tables; exact while no vCPU runs.
    #[must_use]
    pub fn mapped_pages(&self) -> u64 {
        self.shared.tables.mapped_pages()
    }

    /// How many of them are mapped writable; as exact.
    #[must_use]
    pub fn writable_pages(&self) -> u64 {
        self.shared.tables.writable_pages()
    }

    /// The bytes that the memory slots occupy themselves: slots and what finds them, logs and bitmaps excluded.
    #[must_use]
    pub fn slot_metadata_bytes(&self) -> usize {
        self.shared.writer().slots.metadata_bytes()
    }

    /// The bytes of all second-stage tables.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        self.shared.tables.table_bytes()
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
            .field("tables", &self.shared.tables)
            .finish_non_exhaustive()
    }
}

/// The address of the word in which the bit of the slot's first page is.
fn first_word(bits: &UserfaultBits) -> Hva {
    let word = bits.first.index() / u64::BITS as usize;
    // Where a request has no whole page, the bit may lie behind the last word: nothing is read here.
    Hva(bits.bitmap.words().as_ptr().wrapping_add(word).addr() as u64)
}

/// What the slot is to carry. Before the request is checked, so sizes may be absurd here.
fn slot_data<M: Memslots>(slots: &M, region: &Region) -> Result<SlotData, VmError> {
    let mut data = SlotData::default();
    if region.size == 0 {
        return Ok(data);
    }
    data.memory.clone_from(&region.memory);
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
        let old = slots.by_id(region.slot);
        let kept = old.and_then(|slot| slot.data.dirty.clone());
        // Memory for a log only where there is memory to be logged.
        check_memory(region)?;
        data.dirty = Some(kept.unwrap_or_else(|| Arc::new(PageBitmap::new(pages as usize))));
    }
    Ok(data)
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
