#![expect(
    unsafe_code,
    reason = "accesses guest memory through the pointers of the TLB"
)]
//! Guest memory as one vCPU sees it: its TLB, and the fault path behind it.
//!
//! **Guarantee.** Guest code reads and writes bytes inside memory slots only, and only where the slot's
//! flags, its userfault bits, its write-tracked pages and its dirty log let it. No lock is shared with other vCPUs on the way.
//!
//! **Mechanism.** A hit in the TLB is the whole access. A miss ([`Memory::fault`]) goes through the slots to the
//! second-stage tables and fills the TLB, in an order that makes the dirty log complete:
//! first the SPTE becomes writable, then the dirty bit is set, then the TLB learns that the page is writable.
//! The log's reader goes the other way: takes the bit, write-protects the SPTE, flushes what TLBs know of
//! writable pages. So whenever a TLB entry lets a write through, the dirty bit was set after the last reader who
//! took it began to wait for this vCPU, or that reader still waits for this vCPU and will report the page.
//! The whole argument is in `revoke.rs`.
//!
//! # Why accesses through the TLB are sound
//!
//! 1. *Mapped.* The TLB is filled with addresses inside a slot's host range only. The slot held its
//!    [`HostMemory`](crate::HostMemory) then, and before a slot lets its owner go, the slot is invalid and
//!    unmapped and every vCPU has left its guest and flushed its TLB (`revoke.rs`, and the contract of
//!    [`Memslots`]). The vCPU accesses memory only inside its gate.
//! 2. *Aligned.* A hit is aligned to its size (the tag's comparison says so), so no access leaves its page.
//! 3. *Raced.* Other vCPUs and the VMM access the same bytes; by the contract of `HostMemory` all use atomics,
//!    volatile accesses or system calls. Accesses of different widths to the same bytes may race; Rust's
//!    memory model leaves those open where both sides are visible to it. Here the addresses come from
//!    integers, the memory is a mapping and no Rust object, and every access becomes one machine
//!    instruction, so what holds is the host's own memory model, in which they are defined.
//! 4. *Ordered.* Relaxed accesses give the guest what RVWMO asks of plain loads and stores; its fences, LR, SC
//!    and AMOs become the host's.
//!
//! **Neighbours.** [`crate::hart`] drives this as its [`Bus`]; [`crate::VcpuCore`] flushes it at the gate.

use crate::hart::{AmoInt, AmoOp, Bus, BusFault, GuestInt, MemoryFault, PAGE_WORDS, Reserved};
use crate::log::SlotLog;
use crate::region::SlotData;
use crate::revoke::{Format, Shared, Worker};
use crate::slots::{Found, MemslotReader, Memslots};
use crate::tlb::Tlb;
use pageferry_addr::{Gfn, Gpa, Hva, PAGE_MASK, PAGE_SHIFT, PAGE_SIZE, Pfn, RamPage};
use pageferry_memslot::{Slot, SlotFlags};
use pageferry_tdp::format::{Access, Format as _, MemoryType, Writes};
use pageferry_tdp::ring::Producer;
use pageferry_tdp::{Fault, Log as _, Look, Refused, Target, Ticket, largest_level};
use std::hint::spin_loop;
use std::sync::Arc;

/// [`MemoryFault::flags`]: the page's userfault bit is set.
pub(crate) const USERFAULT: u64 = 1;
/// [`MemoryFault::flags`]: the page is write-tracked.
pub(crate) const WRITE_TRACKED: u64 = 2;

/// How often a fault is tried before the vCPU leaves its guest for others' sake.
const TRIES: u32 = 4;

pub(crate) struct Memory<M: Memslots> {
    pub(crate) tlb: Tlb,
    pub(crate) vm: Arc<Shared<M>>,
    pub(crate) slots: M::Reader,
    pub(crate) worker: Worker,
    /// Where pages of logged slots go that this vCPU dirties, if not into the slots' bitmaps.
    ring: Option<Producer>,
    /// Why a fault has to come again, where it has.
    pub(crate) again: Option<Again>,
    /// The host address of an LR in a page that has to be watched first.
    pub(crate) unwatched: Option<u64>,
}

impl<M: Memslots> Memory<M> {
    pub(crate) fn new(vm: Arc<Shared<M>>, slots: M::Reader, ring: Option<Producer>) -> Self {
        Self {
            tlb: Tlb::new(),
            worker: vm.mmu.worker(),
            ring,
            vm,
            slots,
            again: None,
            unwatched: None,
        }
    }

    #[inline(always)]
    fn read_pointer(&mut self, gpa: u64, size: u64) -> Result<*mut u8, BusFault> {
        match self.tlb.read(gpa, size) {
            Some(pointer) => Ok(pointer),
            None => self.fault(gpa, size, false),
        }
    }

    /// A store that missed the TLB.
    #[cold]
    #[inline(never)]
    fn store_missed<T: GuestInt>(&mut self, gpa: u64, value: T) -> Result<(), BusFault> {
        let pointer = self.fault(gpa, T::BYTES, true)?;
        // SAFETY: just translated for writing `T::BYTES`; the reference lives for this store.
        let cell = unsafe { cell::<T>(pointer) };
        let write = || T::store(cell, value);
        self.vm.reservations.write(pointer as u64, T::BYTES, write);
        Ok(())
    }

    /// The TLB has no answer for `size` bytes at `gpa`: finds one, remembers it and gives the host address.
    #[cold]
    #[inline(never)]
    fn fault(&mut self, gpa: u64, size: u64, write: bool) -> Result<*mut u8, BusFault> {
        if gpa & (size - 1) != 0 {
            return Err(BusFault::Misaligned);
        }
        let gfn = Gpa(gpa).gfn();
        let (vm, worker, ring) = (&*self.vm, &mut self.worker, self.ring.as_ref());
        let mut tries = TRIES;
        let reached = loop {
            tries -= 1;
            // Before the slots are looked at.
            let ticket = worker.ticket();
            let reached = self.slots.lookup(gfn, |found| match found {
                Found::Slot(slot) => {
                    let log = SlotLog::of(slot).with_ring(ring);
                    vm.resolve(worker, ticket, (slot, &log), gfn, write)
                }
                Found::Nothing => Err(Unreached::Mmio),
                Found::Invalid => Err(Unreached::Again(Again::Slots)),
            });
            match reached {
                Err(Unreached::Again(Again::Tables)) if tries > 0 => spin_loop(),
                reached => break reached,
            }
        };
        let (hva, may_write) = match reached {
            Ok(reached) => reached,
            Err(Unreached::Mmio) => return Err(BusFault::Mmio { gpa }),
            Err(Unreached::Held(flags)) => {
                return Err(BusFault::Memory(MemoryFault {
                    gpa: gfn.gpa().0,
                    size: PAGE_SIZE,
                    flags,
                }));
            }
            Err(Unreached::Again(again)) => {
                self.again = Some(again);
                return Err(BusFault::Requested);
            }
        };
        self.tlb.fill(gpa, hva, may_write);
        Ok(core::ptr::with_exposed_provenance_mut(
            (hva.0 + (gpa & PAGE_MASK)) as usize,
        ))
    }
}

/// Why a fault reaches no memory.
enum Unreached {
    /// No slot is there, or a read-only one is stored to.
    Mmio,
    /// The VMM has the page for now: [`USERFAULT`] or [`WRITE_TRACKED`].
    Held(u64),
    /// Something is being changed: leave the guest, and come again.
    Again(Again),
}

/// What a fault has to wait for, outside the guest.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Again {
    /// The slot is being deleted or moved, or its memory is being invalidated.
    Slots,
    /// Exclusive work on the tables goes on.
    Tables,
    /// The vCPU's dirty ring is nearly full.
    Ring,
}

impl<M: Memslots> Shared<M> {
    /// Maps the page of `gfn`, which `slot` holds, as far as an access needs it. Gives the page's host address, and
    /// whether the TLB may let writes to it through.
    ///
    /// # Panics
    /// If another slot's page is mapped there. It was zapped before `slot` was committed; see `revoke.rs`.
    #[inline]
    fn resolve(
        &self,
        worker: &mut Worker,
        ticket: Ticket,
        (slot, log): (&Slot<SlotData>, &SlotLog<'_>),
        gfn: Gfn,
        write: bool,
    ) -> Result<(Hva, bool), Unreached> {
        let readonly = slot.flags.contains(SlotFlags::READONLY);
        if write && readonly {
            return Err(Unreached::Mmio);
        }
        let index = gfn.0 - slot.range.start().0;
        let hva = Hva(slot.hva.0 + (index << PAGE_SHIFT));
        let pfn = Pfn(hva.0 >> PAGE_SHIFT);
        // Where nobody asks which pages are written to, a page may as well be dirty before it is: that saves a fault.
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
            // A leaf that is there may allow more without the MMU lock.
            let fast = match seen {
                Look::Denied(_) => worker.fast_fault(Fault { gfn, access }, log),
                _ => None,
            };
            let found = match fast {
                Some(mapped) => mapped.found(),
                None => self.map(worker, ticket, (slot, gfn, pfn), access, log, tracked)?,
            };
            // What another vCPU's load has just mapped allows the store and is clean: the next walk marks it.
            if found.leaf.accessed && (found.leaf.dirty || !access.write) {
                break found;
            }
        };
        let offset = gfn.0 & (Format::frames_per_entry(leaf.level) - 1);
        assert!(
            leaf.leaf.pfn.0 + offset == pfn.0,
            "{gfn:?} is mapped by {leaf:?} while its slot says {pfn:?}"
        );
        // A clean page is written to through the tables, which then say that it is dirty.
        let dirty = leaf.leaf.access.write && leaf.leaf.dirty;
        let may_write = dirty && log.admits_writes(RamPage(index), write);
        // Writes to a page with LR reservations always come here; see `hart::Reservations`, rule 1.
        Ok((hva, may_write && !self.reservations.is_announced(hva.0)))
    }

    /// The tables do not let `access` through: makes them, if the slot's bits do.
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

/// What keeps a store from a write-tracked page: nobody asks what a page held that is missing.
#[cold]
fn held_by(slot: &Slot<SlotData>, gfn: Gfn) -> u64 {
    if is_missing(slot, gfn) {
        USERFAULT
    } else {
        WRITE_TRACKED
    }
}

/// What may be mapped for `gfn` in `slot`, whose page there is `tracked` or not.
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
    // Missing pages are 4 KiB each, and so are logged ones.
    let small = slot.data.userfault.is_some() || log.is_on();
    let backing = if small { 1 } else { slot.data.backing() };
    let mut level = largest_level::<Format>(slot.range, gfn, pfn, backing);
    if let Some(tracked) = slot.data.tracked()
        && level > 1
    {
        level = tracked.largest_level(slot, gfn, level);
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

impl<M: Memslots> Memory<M> {
    /// Stores bytes at `pointer`, which was translated for writing and has as many left in its page.
    fn write_bytes(&self, pointer: *mut u8, bytes: &[u8]) {
        self.vm
            .reservations
            .write(pointer as u64, bytes.len() as u64, || {
                for (i, &byte) in bytes.iter().enumerate() {
                    // SAFETY: a byte of the page that `pointer` was translated for.
                    u8::store(unsafe { cell::<u8>(pointer.wrapping_add(i)) }, byte);
                }
            });
    }
}

/// # Safety
/// `pointer` came from the TLB or the fault path for an access of `T::BYTES`, since the vCPU last entered
/// its guest, and the reference is dropped before it leaves.
#[inline(always)]
unsafe fn cell<'a, T: GuestInt>(pointer: *mut u8) -> &'a T::Atomic {
    // SAFETY: mapped, aligned and shared as the module's first lines say, points 1 to 3.
    unsafe { &*pointer.cast::<T::Atomic>() }
}

impl<M: Memslots> Bus for Memory<M> {
    #[inline(always)]
    fn load<T: GuestInt>(&mut self, gpa: u64) -> Result<T, BusFault> {
        let pointer = self.read_pointer(gpa, T::BYTES)?;
        // SAFETY: just translated for `T::BYTES`; the reference lives for this load.
        Ok(T::load(unsafe { cell::<T>(pointer) }))
    }

    #[inline(always)]
    fn store<T: GuestInt>(&mut self, gpa: u64, value: T) -> Result<(), BusFault> {
        let Some(pointer) = self.tlb.write(gpa, T::BYTES) else {
            return self.store_missed(gpa, value);
        };
        // SAFETY: just translated for `T::BYTES`; the reference lives for this store.
        T::store(unsafe { cell::<T>(pointer) }, value);
        Ok(())
    }

    #[cold]
    fn store_bytes(&mut self, gpa: u64, bytes: &[u8]) -> Result<(), BusFault> {
        let Some(last) = (bytes.len() as u64).checked_sub(1) else {
            return Ok(());
        };
        let end = gpa.checked_add(last).ok_or(BusFault::Access { gpa })?;
        // All or nothing: both pages are writable before the first byte goes. The pointers stay good: no flush comes
        // between, as the vCPU stays inside.
        let in_first = bytes.len().min((PAGE_SIZE - (gpa & PAGE_MASK)) as usize);
        let (head, tail) = bytes.split_at(in_first);
        let first = self.fault(gpa, 1, true)?;
        let second = match tail {
            [] => None,
            _ => Some(self.fault(end & !PAGE_MASK, 1, true)?),
        };
        self.write_bytes(first, head);
        if let Some(second) = second {
            self.write_bytes(second, tail);
        }
        Ok(())
    }

    fn amo<T: AmoInt>(&mut self, gpa: u64, op: AmoOp, operand: T) -> Result<T, BusFault> {
        if let Some(pointer) = self.tlb.write(gpa, T::BYTES) {
            // SAFETY: just translated for writing `T::BYTES`; the reference lives for this operation.
            return Ok(T::amo(unsafe { cell::<T>(pointer) }, op, operand));
        }
        let pointer = self.fault(gpa, T::BYTES, true)?;
        // SAFETY: as above.
        let cell = unsafe { cell::<T>(pointer) };
        let write = || T::amo(cell, op, operand);
        Ok(self.vm.reservations.write(pointer as u64, T::BYTES, write))
    }

    fn load_reserved<T: AmoInt>(&mut self, gpa: u64) -> Result<Reserved<T>, BusFault> {
        let pointer = self.read_pointer(gpa, T::BYTES)?;
        let address = pointer as u64;
        if !self.vm.reservations.is_watched(address) {
            self.unwatched = Some(address);
            return Err(BusFault::Requested);
        }
        // SAFETY: just translated for `T::BYTES`; the reference lives for this load.
        let cell = unsafe { cell::<T>(pointer) };
        Ok(self.vm.reservations.load_reserved(address, cell))
    }

    fn store_conditional<T: AmoInt>(
        &mut self,
        gpa: u64,
        reserved: Reserved<T>,
        value: T,
    ) -> Result<bool, BusFault> {
        let pointer = self.fault(gpa, T::BYTES, true)?;
        // SAFETY: just translated for writing `T::BYTES`; the reference lives for this operation.
        let cell = unsafe { cell::<T>(pointer) };
        let reservations = &self.vm.reservations;
        Ok(reservations.store_conditional(pointer as u64, cell, reserved, value))
    }

    #[cold]
    fn fetch_page(&mut self, gpa: u64, words: &mut [u32; PAGE_WORDS]) -> Result<(), BusFault> {
        let page = self.read_pointer(gpa, 4)?;
        for (i, word) in words.iter_mut().enumerate() {
            // SAFETY: `gpa` is page-aligned, so all words lie in the page that was just translated.
            *word = u32::load(unsafe { cell::<u32>(page.wrapping_add(4 * i)) });
        }
        Ok(())
    }

    fn time(&mut self) -> u64 {
        self.vm.clock.ticks()
    }
}
