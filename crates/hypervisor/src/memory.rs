#![expect(
    unsafe_code,
    reason = "accesses guest memory through the pointers of the TLB"
)]
//! Guest memory as one vCPU sees it: its TLB, and the fault path behind it.
//!
//! **Guarantee.** Guest code reads and writes bytes inside memory slots only. The slot's flags, its
//! userfault bits, its write-tracked pages and its dirty log decide which accesses go through. The
//! path takes no lock that another vCPU takes.
//!
//! **Mechanism.** A hit in the TLB is the whole access. A miss ([`VcpuMemory::fault`]) walks the
//! guest's tables, if they are on. Then it looks the frame up in the slots, maps it in the
//! second-stage tables, and fills the TLB. A walk loads entries through the TLB too, by
//! guest-physical address: the same requests flush them, and the same faults leave the guest for
//! missing ones. [`MemslotReader`] is the only part that depends on the scheme of slots.
//!
//! The dirty log is complete because of the order of the steps. The fault path
//! 1. makes the SPTE writable,
//! 2. sets the dirty bit,
//! 3. lets the TLB know that the page is writable.
//!
//! The thread that reads the log goes the other way. It
//! 1. takes the bit,
//! 2. write-protects the SPTE,
//! 3. flushes what TLBs know of writable pages.
//!
//! So wherever a TLB entry lets a write through, one of two things holds. Either the dirty bit was
//! set after the last reader that took it began to wait for this vCPU. Or that reader still waits
//! for this vCPU, and will report the page. `revoke.rs` has the whole proof.
//!
//! # Why accesses through the TLB are sound
//!
//! 1. *Mapped.* The fault path fills the TLB only with addresses inside a slot's host range. At
//!    that time the slot holds its [`HostMemory`](crate::HostMemory). Before a slot drops it, the
//!    slot is invalid and unmapped, and every vCPU has left its guest and flushed its TLB. See
//!    `revoke.rs`, and the contract of [`Memslots`](crate::Memslots). The vCPU accesses memory only
//!    inside its gate.
//! 2. *Aligned.* The comparison of tags makes only accesses hit that are aligned to their size. So
//!    no access leaves its page.
//! 3. *Raced.* Other vCPUs and the VMM access the same bytes. By the contract of `HostMemory` all
//!    use atomics, volatile accesses or system calls. Accesses of different widths to the same
//!    bytes may race. Rust's memory model leaves that open where it sees both sides. Here the
//!    addresses come from integers, the memory is a mapping and no Rust object, and each access
//!    becomes one machine instruction. So the host's memory model applies, which defines such
//!    races.
//! 4. *Ordered.* Relaxed accesses satisfy RVWMO's rules for plain loads and stores. The guest's
//!    fences, LR, SC and AMOs become host fences and host atomics.
//!
//! **Neighbours.** [`crate::hart`] drives this as its [`Bus`]. [`crate::VcpuCore`] flushes it at
//! the gate.

use crate::hart::{
    self, AmoInt, AmoOp, Bus, BusFault, GuestInt, Leaf, MemoryFault, PAGE_WORDS, Reservations,
    Reserved, View,
};
use crate::log::SlotLog;
use crate::platform::{Format, Worker};
use crate::region::SlotData;
use crate::slots::{Found, MemslotReader};
use crate::state::VmState;
use crate::tlb::{Refill, Stores, Tlb};
use pageferry_addr::{Gfn, Gpa, Hva, PAGE_MASK, PAGE_SHIFT, PAGE_SIZE, Pfn, RamPage, first_access};
use pageferry_memslot::{OutOfMemory, Slot, SlotFlags};
use pageferry_tdp::format::{Access, Format as _, MemoryType, Writes};
use pageferry_tdp::ring::Producer;
use pageferry_tdp::{Fault, Log as _, Look, Refused, Target, Ticket, largest_level};
use std::hint::spin_loop;
use std::sync::Arc;

/// [`MemoryFault::flags`]: the page's userfault bit is set.
pub(crate) const USERFAULT: u64 = 1;
/// [`MemoryFault::flags`]: the page is write-tracked.
pub(crate) const WRITE_TRACKED: u64 = 2;

/// The number of slow stores of a vCPU after which it unwatches all pages.
const SLOW_STORES: u32 = 1 << 18;

/// The number of tries of a fault before the vCPU leaves its guest and yields.
const TRIES: u32 = 4;

pub(crate) struct VcpuMemory<R> {
    pub(crate) tlb: Tlb,
    pub(crate) state: Arc<VmState>,
    pub(crate) slots: R,
    pub(crate) worker: Worker,
    /// The ring for pages of logged slots that this vCPU dirties. Without a ring, those pages go
    /// into the slots' bitmaps.
    ring: Option<Producer>,
    /// The reason to retry the last fault, if there is one.
    pub(crate) again: Option<Again>,
    /// The host address of an LR in a page that is not watched yet.
    pub(crate) unwatched: Option<u64>,
    slow: SlowStores,
}

/// The number of stores to watched pages since a vCPU last unwatched all pages.
#[derive(Default)]
struct SlowStores {
    count: u32,
    /// The number of times that all pages were unwatched, when `count` was 0.
    era: u64,
}

impl SlowStores {
    /// Counts a store. Returns whether it is time to unwatch all pages.
    fn add(&mut self, reservations: &Reservations) -> bool {
        let era = reservations.unwatched();
        if era != self.era {
            *self = Self { count: 0, era };
        }
        self.count += 1;
        self.count > SLOW_STORES
    }
}

impl<R: MemslotReader> VcpuMemory<R> {
    /// Makes a vCPU's view of memory, without a ring.
    ///
    /// # Errors
    /// If the allocator refuses memory for the worker or the TLB.
    pub(crate) fn try_new(state: Arc<VmState>, slots: R) -> Result<Self, OutOfMemory> {
        Ok(Self {
            worker: state.mmu.try_worker()?,
            tlb: Tlb::try_new()?,
            ring: None,
            state,
            slots,
            again: None,
            unwatched: None,
            slow: SlowStores::default(),
        })
    }

    /// This view for a vCPU with a ring, if there are rings.
    pub(crate) fn with_ring(self, ring: Option<Producer>) -> Self {
        Self { ring, ..self }
    }

    #[inline(always)]
    fn read_pointer(&mut self, address: u64, size: u64) -> Result<*mut u8, BusFault> {
        match self.tlb.read(address, size) {
            Some(pointer) => Ok(pointer),
            None => self.read_missed(address, size),
        }
    }

    /// A load that missed the first level of the TLB. Returns the host address.
    #[cold]
    #[inline(never)]
    fn read_missed(&mut self, address: u64, size: u64) -> Result<*mut u8, BusFault> {
        match self.tlb.refill(address, size, false) {
            Refill::Hit(pointer) => Ok(pointer),
            Refill::Absent => self.fault(address, hart::Access::Load),
            Refill::Undecided => self.missed(address, size, hart::Access::Load),
        }
    }

    /// A store that missed the first level of the TLB.
    #[cold]
    #[inline(never)]
    fn store_missed<T: GuestInt>(&mut self, address: u64, value: T) -> Result<(), BusFault> {
        let pointer = match self.tlb.refill(address, T::BYTES, true) {
            Refill::Hit(pointer) => {
                // SAFETY: as in `store`.
                T::store(unsafe { cell::<T>(pointer) }, value);
                return Ok(());
            }
            Refill::Absent => self.fault(address, hart::Access::Store),
            Refill::Undecided => self.missed(address, T::BYTES, hart::Access::Store),
        }?;
        // SAFETY: just translated for writing `T::BYTES`; the reference lives for this store.
        let cell = unsafe { cell::<T>(pointer) };
        let write = || T::store(cell, value);
        self.state
            .reservations
            .write(pointer as u64, T::BYTES, write);
        Ok(())
    }

    /// Translates an access of `size` bytes at `address` that missed the first level of the TLB.
    /// Returns the host address.
    #[inline(never)]
    fn missed(
        &mut self,
        address: u64,
        size: u64,
        access: hart::Access,
    ) -> Result<*mut u8, BusFault> {
        if address & (size - 1) != 0 {
            return Err(BusFault::Misaligned);
        }
        match self.tlb.second_level(address, access) {
            Some((pointer, Stores::Watched)) if access == hart::Access::Store => {
                self.watched_store(address, pointer)
            }
            Some((pointer, _)) => Ok(pointer),
            None => self.fault(address, access),
        }
    }

    /// A store at `address` through a cached translation to `pointer`, whose page was watched.
    fn watched_store(&mut self, address: u64, pointer: *mut u8) -> Result<*mut u8, BusFault> {
        let reservations = &self.state.reservations;
        if !reservations.is_announced(pointer as u64) {
            // It no longer is: the fault fills the TLB for writing.
            return self.fault(address, hart::Access::Store);
        }
        if self.slow.add(reservations) {
            self.again = Some(Again::Watched);
            return Err(BusFault::Requested);
        }
        Ok(pointer)
    }

    /// Translates an access at `address` by the tables of guest and host, and fills the TLB.
    #[cold]
    #[inline(never)]
    fn fault(&mut self, address: u64, access: hart::Access) -> Result<*mut u8, BusFault> {
        let leaf = self.walk(address, access)?;
        let gpa = leaf.map_or(address, |leaf| leaf.gpa | address & PAGE_MASK);
        let write = access == hart::Access::Store;
        let (hva, stores) = self
            .reach(gpa, write)
            .map_err(|fault| fault.for_access(address, gpa))?;
        self.tlb.fill(address, leaf, hva, stores);
        Ok(pointer_into(hva, address))
    }

    /// Walks the guest's tables. Returns the leaf that allows the access, or `None` if there is no
    /// translation.
    #[inline]
    fn walk(&mut self, address: u64, access: hart::Access) -> Result<Option<Leaf>, BusFault> {
        if self.tlb.view().satp.is_bare() {
            return Ok(None);
        }
        self.walk_tables(address, access).map(Some)
    }

    fn walk_tables(&mut self, address: u64, access: hart::Access) -> Result<Leaf, BusFault> {
        let view = self.tlb.view();
        let entry = |gpa| match self.table_entry(gpa) {
            Ok(entry) => Ok(entry),
            // A table where there is no memory is an access fault of the access that needs it.
            Err(Unreached::Mmio) => Err(BusFault::Access { address }),
            Err(fault) => Err(fault.for_access(address, gpa)),
        };
        match hart::walk(view.satp, address, entry)? {
            Some(leaf) if leaf.allows(view, access) => Ok(leaf),
            _ => Err(BusFault::Page { address }),
        }
    }

    /// The entry of the guest's tables at `gpa`.
    fn table_entry(&mut self, gpa: u64) -> Result<u64, Unreached> {
        let pointer = match self.tlb.read_physical(gpa) {
            Some(pointer) => pointer,
            None => self.reach_physical(gpa)?,
        };
        // SAFETY: just translated; entries are aligned; the reference lives for this load.
        Ok(u64::load(unsafe { cell::<u64>(pointer) }))
    }

    /// The host address of a load at the guest-physical address `gpa`, which fills the TLB.
    #[cold]
    fn reach_physical(&mut self, gpa: u64) -> Result<*mut u8, Unreached> {
        let (hva, stores) = self.reach(gpa, false)?;
        self.tlb.fill_physical(gpa, hva, stores);
        Ok(pointer_into(hva, gpa))
    }

    /// Translates the guest-physical address `gpa` by the slots and the second-stage tables.
    /// Returns the host address of its page, and how the TLB may let stores to it through.
    #[inline]
    fn reach(&mut self, gpa: u64, write: bool) -> Result<(Hva, Stores), Unreached> {
        let gfn = Gpa(gpa).gfn();
        let (state, worker, ring) = (&*self.state, &mut self.worker, self.ring.as_ref());
        let mut tries = TRIES;
        let reached = loop {
            tries -= 1;
            // Taken before the look-up of the slot.
            let ticket = worker.ticket();
            let reached = self.slots.lookup(gfn, |found| match found {
                Found::Slot(slot) => {
                    let log = SlotLog::of(slot).with_ring(ring);
                    state.resolve(worker, ticket, (slot, &log), gfn, write)
                }
                Found::Nothing => Err(Unreached::Mmio),
                Found::Invalid => Err(Unreached::Again(Again::Slots)),
            });
            match reached {
                Err(Unreached::Again(Again::Tables)) if tries > 0 => spin_loop(),
                reached => break reached,
            }
        };
        if let Err(Unreached::Again(again)) = reached {
            self.again = Some(again);
        }
        reached
    }
}

/// The place in the page at `hva` that `address` has in its page.
fn pointer_into(hva: Hva, address: u64) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut((hva.0 + (address & PAGE_MASK)) as usize)
}

/// The reason for which a fault reaches no memory.
enum Unreached {
    /// No slot holds the frame, or the access is a store and the slot is read-only.
    Mmio,
    /// The VMM holds the page for now: [`USERFAULT`] or [`WRITE_TRACKED`].
    Held(u64),
    /// A change is in progress: leave the guest, and retry.
    Again(Again),
}

impl Unreached {
    /// The fault of an access at the virtual address `address` that needs `gpa`.
    fn for_access(self, address: u64, gpa: u64) -> BusFault {
        match self {
            Self::Mmio => BusFault::Mmio { address, gpa },
            Self::Held(flags) => BusFault::Memory(MemoryFault {
                gpa: gpa & !PAGE_MASK,
                size: PAGE_SIZE,
                flags,
            }),
            Self::Again(_) => BusFault::Requested,
        }
    }
}

/// The event for which a fault has to wait outside the guest.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Again {
    /// The slot is being deleted or moved, or its memory is being invalidated.
    Slots,
    /// A thread does exclusive work on the tables.
    Tables,
    /// The vCPU's dirty ring is nearly full.
    Ring,
    /// Stores to watched pages have cost enough: unwatch them first.
    Watched,
}

impl VmState {
    /// Maps the page of `gfn`, which `slot` holds, with the rights that an access needs. Returns
    /// the page's host address, and how the TLB may let stores to it through.
    ///
    /// # Panics
    /// If another slot's page is mapped there. That is a bug: the writer zaps it before it commits
    /// `slot` (see `revoke.rs`).
    #[inline]
    fn resolve(
        &self,
        worker: &mut Worker,
        ticket: Ticket,
        (slot, log): (&Slot<SlotData>, &SlotLog<'_>),
        gfn: Gfn,
        write: bool,
    ) -> Result<(Hva, Stores), Unreached> {
        let readonly = slot.flags.contains(SlotFlags::READONLY);
        if write && readonly {
            return Err(Unreached::Mmio);
        }
        let index = gfn.0 - slot.range.start().0;
        let hva = Hva(slot.hva.0 + (index << PAGE_SHIFT));
        let pfn = Pfn(hva.0 >> PAGE_SHIFT);
        // Without a log, the page is marked dirty at once: that saves a fault at the first store.
        let mut access = Access {
            write: write || !(readonly || log.is_on()),
            execute: false,
        };
        let leaf = loop {
            let seen = worker.look(gfn, access);
            if let Look::Allowed(found) = seen {
                break found;
            }
            let tracked = slot.data.tracked().is_some_and(|t| t.any(index, 1));
            if tracked && write {
                return Err(Unreached::Held(held_by(slot, gfn)));
            }
            access.write &= !tracked;
            if access.write && log.is_ring_full() {
                return Err(Unreached::Again(Again::Ring));
            }
            // The fast path gives a present leaf more rights without the MMU lock.
            let fast = match seen {
                Look::Denied(_) => worker.fast_fault(Fault { gfn, access }, log),
                _ => None,
            };
            let found = match fast {
                Some(mapped) => mapped.found(),
                None => self.map(worker, ticket, (slot, gfn, pfn), access, log, tracked)?,
            };
            // A leaf that another vCPU's load has just mapped may allow the store, but be clean.
            // The next walk marks it dirty.
            if found.leaf.accessed && (found.leaf.dirty || !access.write) {
                break found;
            }
        };
        let offset = gfn.0 & (Format::frames_per_entry(leaf.level) - 1);
        assert!(
            leaf.leaf.pfn.0 + offset == pfn.0,
            "{gfn:?} is mapped by {leaf:?} while its slot says {pfn:?}"
        );
        // The first store to a clean page goes through the tables, which then mark it dirty.
        let dirty = leaf.leaf.access.write && leaf.leaf.dirty;
        let stores = if !(dirty && log.admits_writes(RamPage(index), write)) {
            Stores::No
        } else if self.reservations.is_announced(hva.0) {
            // See `hart::Reservations`, rule 1.
            Stores::Watched
        } else {
            Stores::Fast
        };
        Ok((hva, stores))
    }

    /// Makes the tables allow `access`, unless the page's userfault bit is set.
    fn map(
        &self,
        worker: &mut Worker,
        ticket: Ticket,
        (slot, gfn, pfn): (&Slot<SlotData>, Gfn, Pfn),
        access: Access,
        log: &SlotLog<'_>,
        tracked: bool,
    ) -> Result<pageferry_tdp::Found, Unreached> {
        if is_missing(slot, gfn) {
            return Err(Unreached::Held(USERFAULT));
        }
        let fault = Fault { gfn, access };
        let target = target_of(slot, gfn, pfn, access, log, tracked);
        match worker.fault(ticket, fault, target, log) {
            Ok(mapped) => Ok(mapped.found()),
            Err(Refused::Excluded) => Err(Unreached::Again(Again::Tables)),
            Err(Refused::Invalidated) => Err(Unreached::Again(Again::Slots)),
            Err(refused) => panic!("{gfn:?}, whose slot says {pfn:?}: {refused}"),
        }
    }
}

/// Whether the page's userfault bit is set. Acquire: if it is clear, the page's bytes are visible.
#[inline]
fn is_missing(slot: &Slot<SlotData>, gfn: Gfn) -> bool {
    slot.data.userfault.as_ref().is_some_and(|bits| {
        let page = bits.first.0 + (gfn.0 - slot.range.start().0);
        bits.bitmap.test(RamPage(page))
    })
}

/// The reason for which a store may not reach a write-tracked page. Missing comes first: a missing
/// page has no contents yet.
#[cold]
fn held_by(slot: &Slot<SlotData>, gfn: Gfn) -> u64 {
    if is_missing(slot, gfn) {
        USERFAULT
    } else {
        WRITE_TRACKED
    }
}

/// The mapping that `slot` allows for `gfn`. `tracked` is whether the page is write-tracked.
#[inline]
pub(crate) fn target_of(
    slot: &Slot<SlotData>,
    gfn: Gfn,
    pfn: Pfn,
    access: Access,
    log: &SlotLog<'_>,
    tracked: bool,
) -> Target {
    let readonly = slot.flags.contains(SlotFlags::READONLY);
    // Missing pages and logged pages are mapped by 4 KiB.
    let small = slot.data.userfault.is_some() || log.is_on();
    let backing = if small { 1 } else { slot.data.backing() };
    let mut level = largest_level::<Format>(slot.range, gfn, pfn, backing);
    if let Some(tracked) = slot.data.tracked()
        && level > 1
    {
        level = tracked.largest_level(slot.range.start(), gfn, level);
    }
    Target {
        pfn,
        level,
        access: Access {
            write: !readonly && !tracked && (access.write || !log.is_by_fault()),
            execute: true,
        },
        writes: match () {
            () if readonly => Writes::HostForbids,
            () if tracked => Writes::MmuForbids,
            () if log.is_by_fault() => Writes::AllowedLoggedByFault,
            () => Writes::Allowed,
        },
        memory: MemoryType::WriteBack,
    }
}

impl<R: MemslotReader> VcpuMemory<R> {
    /// Stores bytes at `pointer`, which was translated for writing, by accesses that are naturally
    /// aligned. All of the bytes lie in its page.
    fn write_bytes(&self, pointer: *mut u8, bytes: &[u8]) {
        self.state
            .reservations
            .write(pointer as u64, bytes.len() as u64, || {
                let (mut at, mut rest) = (pointer, bytes);
                while !rest.is_empty() {
                    let size = first_access(at as u64, rest.len() as u64);
                    let (part, behind) = rest.split_at(size as usize);
                    let mut value = [0; 8];
                    value[..part.len()].copy_from_slice(part);
                    let value = u64::from_le_bytes(value);
                    // SAFETY: bytes of the page that `pointer` was translated for, naturally
                    // aligned.
                    unsafe {
                        match size {
                            1 => u8::store(cell::<u8>(at), value as u8),
                            2 => u16::store(cell::<u16>(at), value as u16),
                            4 => u32::store(cell::<u32>(at), value as u32),
                            _ => u64::store(cell::<u64>(at), value),
                        }
                    }
                    (at, rest) = (at.wrapping_add(part.len()), behind);
                }
            });
    }
}

/// # Safety
/// 1. `pointer` came from the TLB or the fault path for an access of `T::BYTES`, since the vCPU
///    last entered its guest.
/// 2. The caller drops the reference before the vCPU leaves the guest.
#[inline(always)]
unsafe fn cell<'a, T: GuestInt>(pointer: *mut u8) -> &'a T::Atomic {
    // SAFETY: mapped, aligned and shared as the module's first lines say, points 1 to 3.
    unsafe { &*pointer.cast::<T::Atomic>() }
}

impl<R: MemslotReader> Bus for VcpuMemory<R> {
    #[inline(always)]
    fn load<T: GuestInt>(&mut self, address: u64) -> Result<T, BusFault> {
        let pointer = self.read_pointer(address, T::BYTES)?;
        // SAFETY: just translated for `T::BYTES`; the reference lives for this load.
        Ok(T::load(unsafe { cell::<T>(pointer) }))
    }

    #[inline(always)]
    fn store<T: GuestInt>(&mut self, address: u64, value: T) -> Result<(), BusFault> {
        let Some(pointer) = self.tlb.write(address, T::BYTES) else {
            return self.store_missed(address, value);
        };
        // SAFETY: just translated for `T::BYTES`; the reference lives for this store.
        T::store(unsafe { cell::<T>(pointer) }, value);
        Ok(())
    }

    #[cold]
    fn store_bytes(&mut self, address: u64, bytes: &[u8]) -> Result<(), BusFault> {
        let Some(last) = (bytes.len() as u64).checked_sub(1) else {
            return Ok(());
        };
        let end = address
            .checked_add(last)
            .ok_or(BusFault::Access { address })?;
        // All or nothing: both pages are writable before the first byte is stored. The vCPU stays
        // inside and so serves no flush. So the pointers stay valid.
        let in_first = bytes
            .len()
            .min((PAGE_SIZE - (address & PAGE_MASK)) as usize);
        let (head, tail) = bytes.split_at(in_first);
        let first = self.missed(address, 1, hart::Access::Store)?;
        let second = match tail {
            [] => None,
            _ => Some(self.missed(end & !PAGE_MASK, 1, hart::Access::Store)?),
        };
        self.write_bytes(first, head);
        if let Some(second) = second {
            self.write_bytes(second, tail);
        }
        Ok(())
    }

    fn amo<T: AmoInt>(&mut self, address: u64, op: AmoOp, operand: T) -> Result<T, BusFault> {
        if let Some(pointer) = self.tlb.write(address, T::BYTES) {
            // SAFETY: just translated for writing `T::BYTES`; the reference lives for this
            // operation.
            return Ok(T::amo(unsafe { cell::<T>(pointer) }, op, operand));
        }
        let pointer = self.missed(address, T::BYTES, hart::Access::Store)?;
        // SAFETY: as above.
        let cell = unsafe { cell::<T>(pointer) };
        let write = || T::amo(cell, op, operand);
        Ok(self
            .state
            .reservations
            .write(pointer as u64, T::BYTES, write))
    }

    fn load_reserved<T: AmoInt>(&mut self, address: u64) -> Result<Reserved<T>, BusFault> {
        let pointer = self.read_pointer(address, T::BYTES)?;
        let place = pointer as u64;
        if !self.state.reservations.is_watched(place) {
            self.unwatched = Some(place);
            return Err(BusFault::Requested);
        }
        // SAFETY: just translated for `T::BYTES`; the reference lives for this load.
        let cell = unsafe { cell::<T>(pointer) };
        Ok(self.state.reservations.load_reserved(place, cell))
    }

    fn store_conditional<T: AmoInt>(
        &mut self,
        address: u64,
        reserved: Reserved<T>,
        value: T,
    ) -> Result<bool, BusFault> {
        let pointer = self.missed(address, T::BYTES, hart::Access::Store)?;
        // SAFETY: just translated for writing `T::BYTES`; the reference lives for this operation.
        let cell = unsafe { cell::<T>(pointer) };
        let reservations = &self.state.reservations;
        Ok(reservations.store_conditional(pointer as u64, cell, reserved, value))
    }

    #[cold]
    fn locate_code(&mut self, address: u64) -> Result<u64, BusFault> {
        let leaf = self.walk(address, hart::Access::Fetch)?;
        Ok(leaf.map_or(address & !PAGE_MASK, |leaf| leaf.gpa))
    }

    #[cold]
    fn fetch_page(&mut self, gpa: u64, words: &mut [u32; PAGE_WORDS]) -> Result<(), BusFault> {
        let page = match self.tlb.read_physical(gpa) {
            Some(page) => page,
            None => self
                .reach_physical(gpa)
                .map_err(|fault| fault.for_access(gpa, gpa))?,
        };
        for (i, word) in words.iter_mut().enumerate() {
            // SAFETY: `gpa` is page-aligned, so all words lie in the page that was just translated.
            *word = u32::load(unsafe { cell::<u32>(page.wrapping_add(4 * i)) });
        }
        Ok(())
    }

    fn set_view(&mut self, view: View) {
        self.tlb.set_view(view);
    }

    fn fence_translations(&mut self, address: Option<u64>, asid: Option<u16>) {
        self.tlb.fence(address, asid);
    }

    fn time(&mut self) -> u64 {
        self.state.clock.ticks()
    }
}
