//! The software TLB of one vCPU.
//!
//! **Guarantee.** A hit costs one comparison and one addition. It takes no lock and writes nothing
//! that another thread sees. An entry leads to host memory that was mapped when the entry was
//! filled. It stays valid until the vCPU takes a flush request at its [`crate::Gate`], for which
//! each revocation waits. An entry of the guest's tables also ends with each fence that covers it.
//!
//! **Mechanism.** The first level is direct-mapped: the low bits of the virtual page number choose
//! the entry. Reads and writes have a tag each, so write protection is a write tag that never
//! matches. A tag is the address of the page. A look-up compares it with the accessed address under
//! a mask that keeps the page number *and* the bits below the access size. So a misaligned access
//! never hits, and needs no separate test.
//!
//! Each view has a [`Bank`] of its own: an address space with U, S, or S with SUM, with MXR or
//! without. So an entry needs no check of rights, and a change of view swaps two pointers. One bank
//! has guest-physical addresses. It serves Bare, and the walks through the guest's tables. A view
//! without a bank takes one over, round robin.
//!
//! The second level (`second.rs`) holds what the banks replace, for all views together.
//!
//! A flush or a fence clears the current bank. It marks the others, which are cleared when a view
//! needs them.
//!
//! **Neighbours.** The vCPU's view of memory owns and fills it. It knows no slots and no tables.

mod second;

use crate::hart::{Access, Leaf, Mode, Rights, View};
use pageferry_addr::{Gpa, Hva, PAGE_MASK, PAGE_SHIFT};
use pageferry_memslot::OutOfMemory;
use second::{BARE, Cached, GLOBAL, Probe, Second};
use std::alloc::{Layout, handle_alloc_error};

/// The number of entries of a bank: 1024 reach 4 MiB, in 32 KiB of the host's cache.
pub(crate) const ENTRIES: usize = 1024;

/// The maximum number of banks beside the current one.
const PARKED: usize = 15;

/// A tag that matches no masked address: of the page offset, only the lowest three bits can be set
/// in those.
const NEVER: u64 = u64::MAX;

#[derive(Clone, Copy)]
#[repr(C, align(32))]
struct Entry {
    read: u64,
    write: u64,
    /// Host address minus virtual address of the page, wrapping.
    addend: u64,
}

const EMPTY: Entry = Entry {
    read: NEVER,
    write: NEVER,
    addend: 0,
};

/// How stores to a page may go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stores {
    /// Not now: the fault path decides.
    No,
    /// Not by a hit, since the page has LR reservations: see [`crate::hart::Reservations`].
    Watched,
    /// By a hit.
    Fast,
}

/// The result of [`Tlb::refill`].
pub(crate) enum Refill {
    /// The host address.
    Hit(*mut u8),
    /// The second level does not have the page.
    Absent,
    /// [`Tlb::second_level`] decides, or the address is misaligned.
    Undecided,
}

/// The view of a bank.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Key {
    /// No view: the entries mean nothing.
    Free,
    /// Guest-physical addresses.
    Physical,
    Virtual {
        asid: u16,
        mode: Mode,
        sum: bool,
        mxr: bool,
    },
}

impl Key {
    const fn of(view: View) -> Self {
        if view.satp.is_bare() {
            return Self::Physical;
        }
        Self::Virtual {
            asid: view.satp.asid(),
            mode: view.mode,
            // SUM has no effect in U-mode.
            sum: view.sum && matches!(view.mode, Mode::Supervisor),
            mxr: view.mxr,
        }
    }

    /// Whether a fence of `asid`, or of all address spaces, covers it.
    fn is_fenced(self, asid: Option<u16>) -> bool {
        match self {
            Self::Virtual { asid: own, .. } => asid.is_none_or(|asid| asid == own),
            Self::Free | Self::Physical => false,
        }
    }
}

struct Bank {
    key: Key,
    /// Whether the write tags are from before the last flush of writes.
    writes_stale: bool,
    entries: Box<[Entry; ENTRIES]>,
}

impl Bank {
    fn try_new(key: Key) -> Result<Self, OutOfMemory> {
        let mut entries = Vec::new();
        let bytes = ENTRIES * size_of::<Entry>();
        let reserved = entries.try_reserve_exact(ENTRIES);
        reserved.map_err(|_| OutOfMemory { bytes })?;
        entries.resize(ENTRIES, EMPTY);
        match entries.try_into() {
            Ok(entries) => Ok(Self {
                key,
                writes_stale: false,
                entries,
            }),
            Err(_) => unreachable!("there are as many entries as were reserved"),
        }
    }

    #[inline(always)]
    fn entry(&self, address: u64) -> &Entry {
        &self.entries[index(address)]
    }

    #[inline(always)]
    fn read(&self, address: u64, size: u64) -> Option<*mut u8> {
        let entry = self.entry(address);
        (address & (!PAGE_MASK | (size - 1)) == entry.read).then(|| pointer(address, entry.addend))
    }

    #[inline(always)]
    fn write(&self, address: u64, size: u64) -> Option<*mut u8> {
        let entry = self.entry(address);
        (address & (!PAGE_MASK | (size - 1)) == entry.write).then(|| pointer(address, entry.addend))
    }

    /// Caches a page. Returns whether it replaced another one.
    fn fill(&mut self, address: u64, page: Hva, readable: bool, writable: bool) -> bool {
        let tag = address & !PAGE_MASK;
        let entry = &mut self.entries[index(address)];
        let replaces = entry.read != NEVER && entry.read != tag;
        *entry = Entry {
            read: if readable { tag } else { NEVER },
            write: if writable { tag } else { NEVER },
            addend: page.0.wrapping_sub(tag),
        };
        replaces
    }

    fn forget_page(&mut self, address: u64) {
        let tag = address & !PAGE_MASK;
        let entry = &mut self.entries[index(address)];
        if entry.read == tag || entry.write == tag {
            *entry = EMPTY;
        }
    }

    fn flush(&mut self) {
        self.entries.fill(EMPTY);
        self.writes_stale = false;
    }

    fn flush_writes(&mut self) {
        for entry in self.entries.iter_mut() {
            entry.write = NEVER;
        }
        self.writes_stale = false;
    }
}

#[inline(always)]
const fn index(address: u64) -> usize {
    (Gpa(address).gfn().0 as usize) % ENTRIES
}

#[inline(always)]
fn pointer(address: u64, addend: u64) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(address.wrapping_add(addend) as usize)
}

/// The superpages of which pages are cached, as a set of hashes: one bit each. It may claim more
/// than there are.
struct Superpages([u64; 64]);

impl Superpages {
    const fn bit(address: u64, level: u32) -> (usize, u64) {
        let base = address >> (PAGE_SHIFT + 9 * level);
        let bit = (base << 2 | level as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52;
        (bit as usize / 64, 1 << (bit % 64))
    }

    const fn add(&mut self, address: u64, level: u32) {
        let (word, bit) = Self::bit(address, level);
        self.0[word] |= bit;
    }

    const fn may_have(&self, address: u64, level: u32) -> bool {
        let (word, bit) = Self::bit(address, level);
        self.0[word] & bit != 0
    }
}

pub(crate) struct Tlb {
    current: Bank,
    view: View,
    /// The number of levels of the tables that virtual addresses were translated by: an ASID means
    /// other translations in Sv39 than in Sv48. Bare does not change it.
    levels: u32,
    parked: Vec<Bank>,
    /// The place in `parked` of the next bank to take over.
    next: usize,
    /// The place in `parked` of the bank with guest-physical addresses, unless it is the current
    /// one.
    physical: usize,
    second: Second,
    /// The look-up of `view` in the second level.
    probe: Probe,
    superpages: Superpages,
}

impl Tlb {
    /// Makes an empty TLB for guest-physical addresses.
    ///
    /// # Errors
    /// If the allocator refuses memory for the entries.
    pub(crate) fn try_new() -> Result<Self, OutOfMemory> {
        let view = View {
            satp: crate::hart::Satp::BARE,
            mode: Mode::Supervisor,
            sum: false,
            mxr: false,
        };
        let second = Second::new();
        Ok(Self {
            current: Bank::try_new(Key::Physical)?,
            view,
            levels: 0,
            probe: second.probe_of(view, BARE),
            parked: Vec::new(),
            next: 0,
            physical: 0,
            second,
            superpages: Superpages([0; 64]),
        })
    }

    /// The current view.
    #[inline]
    pub(crate) const fn view(&self) -> View {
        self.view
    }

    /// Makes `view` the current one.
    #[inline]
    pub(crate) fn set_view(&mut self, view: View) {
        if self.view != view {
            self.change_view(view);
        }
    }

    fn change_view(&mut self, view: View) {
        self.view = view;
        let levels = view.satp.levels();
        if levels != 0 && levels != self.levels {
            self.levels = levels;
            self.forget_spaces(None);
        }
        let key = Key::of(view);
        if self.current.key != key {
            self.switch(key);
        }
        self.renew_probe();
    }

    fn renew_probe(&mut self) {
        self.probe = self.second.probe_of(self.view, self.space());
    }

    fn switch(&mut self, key: Key) {
        let with = |bank: &Bank| bank.key == key;
        let at = match self.parked.iter().position(with) {
            Some(at) => at,
            None => self.bank_for(key),
        };
        // The current bank moves to where the new one was.
        if self.current.key == Key::Physical {
            self.physical = at;
        }
        core::mem::swap(&mut self.current, &mut self.parked[at]);
        if self.current.writes_stale {
            self.current.flush_writes();
        }
    }

    /// Parks an empty bank with `key`. Returns its place. Aborts the process if there is no memory
    /// for it, like Rust's own allocations.
    #[cold]
    fn bank_for(&mut self, key: Key) -> usize {
        if self.parked.len() < PARKED {
            let Ok(bank) = Bank::try_new(key) else {
                handle_alloc_error(Layout::new::<[Entry; ENTRIES]>());
            };
            self.parked.push(bank);
            return self.parked.len() - 1;
        }
        let free = |bank: &Bank| bank.key == Key::Free;
        let at = self.parked.iter().position(free).unwrap_or_else(|| {
            self.next = (self.next + 1) % PARKED;
            if self.parked[self.next].key == Key::Physical {
                self.next = (self.next + 1) % PARKED;
            }
            self.next
        });
        self.parked[at].flush();
        self.parked[at].key = key;
        at
    }

    fn physical(&mut self) -> &mut Bank {
        if self.current.key == Key::Physical {
            &mut self.current
        } else {
            &mut self.parked[self.physical]
        }
    }

    /// The host address for a read of `size` bytes (1, 2, 4 or 8) at `address`. `None` if the page
    /// is not in the first level or `address` is not aligned to `size`.
    #[inline(always)]
    pub(crate) fn read(&self, address: u64, size: u64) -> Option<*mut u8> {
        self.current.read(address, size)
    }

    /// The same for a write.
    #[inline(always)]
    pub(crate) fn write(&self, address: u64, size: u64) -> Option<*mut u8> {
        self.current.write(address, size)
    }

    /// The host address for a read of 8 bytes at the guest-physical address `gpa`, which is
    /// aligned. `None` if the page is in neither level.
    #[inline]
    pub(crate) fn read_physical(&mut self, gpa: u64) -> Option<*mut u8> {
        if let Some(pointer) = self.physical().read(gpa, 8) {
            return Some(pointer);
        }
        let cached = self.second.find(gpa, BARE)?;
        let bank = self.physical();
        bank.fill(gpa, cached.page, true, cached.stores == Stores::Fast);
        bank.read(gpa, 8)
    }

    /// The quick way for an access of `size` bytes at `address` that missed the first level: brings
    /// the page there and returns the host address, if nothing but the second level is needed.
    #[inline(never)]
    pub(crate) fn refill(&mut self, address: u64, size: u64, store: bool) -> Refill {
        if address & (size - 1) != 0 {
            return Refill::Undecided;
        }
        let probed = match self.second.probe(address, &self.probe, store) {
            Some(probed) if probed.allowed => probed,
            Some(_) => return Refill::Undecided,
            None => return Refill::Absent,
        };
        let tag = address & !PAGE_MASK;
        let addend = probed.page.0.wrapping_sub(tag);
        self.current.entries[index(address)] = Entry {
            read: tag,
            write: if probed.fast_stores { tag } else { NEVER },
            addend,
        };
        Refill::Hit(pointer(address, addend))
    }

    /// Looks `address` up in the second level, and brings its page to the first. Returns the host
    /// address if the view allows the access there, and how stores go through.
    #[inline]
    pub(crate) fn second_level(
        &mut self,
        address: u64,
        access: Access,
    ) -> Option<(*mut u8, Stores)> {
        let cached = self.second.find(address, self.space())?;
        let [readable, writable] = self.allowed(cached.rights);
        let fast = writable && cached.stores == Stores::Fast;
        self.current.fill(address, cached.page, readable, fast);
        let allowed = match access {
            Access::Store => writable && cached.stores != Stores::No,
            Access::Load | Access::Fetch => readable,
        };
        let host = pointer(address & PAGE_MASK, cached.page.0);
        allowed.then_some((host, cached.stores))
    }

    /// Whether the view may read and write with `rights`.
    fn allowed(&self, rights: Rights) -> [bool; 2] {
        [Access::Load, Access::Store].map(|access| rights.allow(self.view, access))
    }

    const fn space(&self) -> u16 {
        if self.view.satp.is_bare() {
            BARE
        } else {
            self.view.satp.asid()
        }
    }

    /// Caches the page of `address`, and drops the old contents of its entry. `leaf` is the guest's
    /// leaf, if there is translation.
    pub(crate) fn fill(&mut self, address: u64, leaf: Option<Leaf>, page: Hva, stores: Stores) {
        let rights = leaf.map_or(Rights::ALL, Leaf::rights);
        let [readable, writable] = self.allowed(rights);
        let fast = writable && stores == Stores::Fast;
        // A watched page needs the second level: it never hits in the first.
        if self.current.fill(address, page, readable, fast) || stores == Stores::Watched {
            self.second.allocate();
        }
        let space = match leaf {
            Some(leaf) if leaf.global => GLOBAL,
            _ => self.space(),
        };
        let cached = Cached {
            page,
            rights,
            stores,
        };
        self.second.fill(address, space, cached);
        if let Some(leaf) = leaf
            && leaf.level > 0
        {
            self.superpages.add(address, leaf.level);
        }
    }

    /// Caches the page of the guest-physical address `gpa`.
    pub(crate) fn fill_physical(&mut self, gpa: u64, page: Hva, stores: Stores) {
        if self
            .physical()
            .fill(gpa, page, true, stores == Stores::Fast)
        {
            self.second.allocate();
        }
        let cached = Cached {
            page,
            rights: Rights::ALL,
            stores,
        };
        self.second.fill(gpa, BARE, cached);
    }

    /// Forgets translations by the guest's tables, as
    /// [`Bus::fence_translations`](crate::hart::Bus::fence_translations) says.
    pub(crate) fn fence(&mut self, address: Option<u64>, asid: Option<u16>) {
        let Some(address) = address else {
            return self.forget_spaces(asid);
        };
        // Pages of a superpage go with it. If it is larger than 2 MiB, all others go too.
        if self.superpages.may_have(address, 2) || self.superpages.may_have(address, 3) {
            return self.forget_spaces(asid);
        }
        if !self.superpages.may_have(address, 1) {
            return self.forget_page(address, asid);
        }
        let superpage = 1 << (PAGE_SHIFT + 9);
        let start = address & !(superpage - 1);
        for offset in (0..superpage).step_by(1 << PAGE_SHIFT) {
            self.forget_page(start + offset, asid);
        }
    }

    fn banks(&mut self) -> impl Iterator<Item = &mut Bank> {
        core::iter::once(&mut self.current).chain(&mut self.parked)
    }

    fn forget_page(&mut self, address: u64, asid: Option<u16>) {
        for bank in self.banks() {
            if bank.key.is_fenced(asid) {
                bank.forget_page(address);
            }
        }
        self.second.forget_page(address, asid);
    }

    fn forget_spaces(&mut self, asid: Option<u16>) {
        if self.current.key.is_fenced(asid) {
            self.current.flush();
        }
        for bank in &mut self.parked {
            if bank.key.is_fenced(asid) {
                bank.key = Key::Free;
            }
        }
        match asid {
            Some(asid) => self.second.forget_space(asid),
            None => {
                self.second.forget_virtual();
                self.superpages = Superpages([0; 64]);
            }
        }
        self.renew_probe();
    }

    /// Forgets everything.
    pub(crate) fn flush(&mut self) {
        self.current.flush();
        for bank in &mut self.parked {
            if bank.key == Key::Physical {
                bank.flush();
            } else {
                bank.key = Key::Free;
            }
        }
        self.second.flush();
        self.renew_probe();
        self.superpages = Superpages([0; 64]);
    }

    /// Forgets which pages are writable. Reads still hit.
    pub(crate) fn flush_writes(&mut self) {
        self.current.flush_writes();
        for bank in &mut self.parked {
            bank.writes_stale = true;
        }
        self.second.flush_writes();
        self.renew_probe();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: Hva = Hva(0x7000_0000_0000);

    #[test]
    fn hits_are_for_the_page_the_kind_and_the_alignment() {
        let mut tlb = Tlb::try_new().unwrap();
        assert!(
            tlb.read(0, 1).is_none()
                && tlb.read(u64::MAX, 8).is_none()
                && tlb.write(u64::MAX, 1).is_none()
        );
        tlb.fill(0x5123, None, PAGE, Stores::No);
        assert_eq!(tlb.read(0x5ff8, 8).unwrap() as u64, PAGE.0 + 0xff8);
        assert_eq!(tlb.read(0x5fff, 1).unwrap() as u64, PAGE.0 + 0xfff);
        for misaligned in [0x5001, 0x5002, 0x5004, 0x5ffc] {
            assert!(tlb.read(misaligned, 8).is_none());
        }
        assert!(tlb.read(0x5ffc, 4).is_some() && tlb.read(0x5001, 2).is_none());
        assert!(tlb.write(0x5000, 1).is_none(), "read-only");
        assert!(tlb.read(0x6000, 1).is_none());
        let alias = 0x5000 + ENTRIES as u64 * 4096;
        assert!(tlb.read(alias, 1).is_none());
        tlb.fill(alias, None, PAGE, Stores::Fast);
        assert!(tlb.read(0x5000, 1).is_none() && tlb.write(alias, 8).is_some());
    }

    #[test]
    fn flushes_forget_what_they_say() {
        let mut tlb = Tlb::try_new().unwrap();
        tlb.fill(0, None, PAGE, Stores::Fast);
        tlb.flush_writes();
        assert!(tlb.write(0, 1).is_none() && tlb.read(0, 1).is_some());
        tlb.flush();
        assert!(tlb.read(0, 1).is_none());
    }

    #[test]
    fn a_page_below_its_guest_address_translates_too() {
        let mut tlb = Tlb::try_new().unwrap();
        tlb.fill(0x3_0000_0000_0000, None, PAGE, Stores::Fast);
        assert_eq!(tlb.write(0x3_0000_0000_0004, 4).unwrap() as u64, PAGE.0 + 4);
    }
}
