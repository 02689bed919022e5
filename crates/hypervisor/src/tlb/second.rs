//! The second level of the TLB: all views and address spaces in one set-associative table.
//!
//! **Guarantee.** A look-up finds a page only for the address space for which it was filled, or a
//! global page. It finds nothing from before the last flush or fence that covers the page.
//!
//! **Mechanism.** The virtual page number alone chooses a set of [`WAYS`] ways, so a fence by
//! address looks into one set. A way is a pair of words:
//!
//! | word | bits | |
//! |---|---|---|
//! | tag | 0 to 38 | virtual page number, of which higher bits are the sign extension |
//! | | 39 to 48 | space: an ASID, [`GLOBAL`] or [`BARE`] |
//! | | 49 to 63 | the space's generation, from 1 on; a tag of 0 is empty |
//! | page | 0 to 11 | [`Rights`] of the guest's leaf; in bits 0 and 5 [`Stores`] |
//! | | 12 to 55 | host page |
//! | | 56 to 63 | the generation of stores, without which stores are not allowed |
//!
//! A fence of a whole address space, or a flush, begins new generations. It touches no way.
//!
//! The table takes 512 KiB. A vCPU allocates it when its first level first replaces a page.

use super::Stores;
use crate::hart::{Access, Rights, View};
use pageferry_addr::{Hva, PAGE_MASK, PAGE_SHIFT};

const WAYS: usize = 4;
const SETS: usize = 8192;

/// The number of address bits that a way can hold, sign included.
const ADDRESS_BITS: u32 = 51;
const SPACE_SHIFT: u32 = 39;
const GENERATION_SHIFT: u32 = 49;
const LAST_GENERATION: u16 = (1 << (64 - GENERATION_SHIFT)) - 1;
const STORES_SHIFT: u32 = 56;

/// [`Stores::Fast`], where an entry of the guest's tables has V.
const FAST: u64 = 1;
/// [`Stores::Watched`], where it has G.
const WATCHED: u64 = 1 << 5;
const _: () = assert!(Rights::ALL.bits() as u64 & (FAST | WATCHED) == 0);

/// The space of global pages. Smaller numbers are ASIDs.
pub(super) const GLOBAL: u16 = 1 << crate::hart::ASID_BITS;
/// The space of guest-physical addresses.
pub(super) const BARE: u16 = GLOBAL + 1;
const SPACES: usize = BARE as usize + 1;

#[derive(Clone, Copy, Default)]
#[repr(align(16))]
struct Way {
    tag: u64,
    page: u64,
}

/// How the current view finds pages, and what it needs of them: everything that a look-up would
/// otherwise derive from the view and the generations.
#[derive(Clone, Copy)]
pub(super) struct Probe {
    /// The tag of address 0 in the view's space, and as a global page.
    tags: [u64; 2],
    load: Need,
    store: Need,
}

/// The bits of a page word that an access needs.
#[derive(Clone, Copy)]
struct Need {
    mask: u64,
    bits: u64,
}

impl Need {
    /// No page word has it: the general look-up decides.
    const NEVER: Self = Self { mask: 0, bits: 1 };

    const fn is_met(self, page: u64) -> bool {
        page & self.mask == self.bits
    }
}

/// A page that [`Second::probe`] found.
#[derive(Clone, Copy)]
pub(super) struct Probed {
    pub(super) page: Hva,
    /// Whether the access may go through, and by hits if it is a store.
    pub(super) allowed: bool,
    /// Whether stores may go through by hits.
    pub(super) fast_stores: bool,
}

/// A cached page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cached {
    pub(super) page: Hva,
    /// What the guest's leaf allows.
    pub(super) rights: Rights,
    /// What the host allows.
    pub(super) stores: Stores,
}

pub(super) struct Second {
    /// Empty until [`Second::allocate`].
    sets: Vec<[Way; WAYS]>,
    generations: [u16; SPACES],
    stores: u8,
    /// Chooses the way to replace.
    next: usize,
}

const fn set_of(address: u64) -> usize {
    (address >> PAGE_SHIFT) as usize % SETS
}

const fn page_number(address: u64) -> u64 {
    address >> PAGE_SHIFT & ((1 << SPACE_SHIFT) - 1)
}

/// Whether the sign extension of the low [`ADDRESS_BITS`] is the whole address. No other address
/// has memory.
const fn is_representable(address: u64) -> bool {
    const UNUSED: u32 = 64 - ADDRESS_BITS;
    (address << UNUSED) as i64 >> UNUSED == address as i64
}

impl Second {
    pub(super) const fn new() -> Self {
        Self {
            sets: Vec::new(),
            generations: [1; SPACES],
            stores: 0,
            next: 0,
        }
    }

    /// Allocates the table, unless it is there or the allocator refuses: the table only saves time.
    #[cold]
    pub(super) fn allocate(&mut self) {
        if self.sets.is_empty() && self.sets.try_reserve_exact(SETS).is_ok() {
            self.sets.resize(SETS, [Way::default(); WAYS]);
        }
    }

    fn tag(&self, address: u64, space: u16) -> u64 {
        let generation = u64::from(self.generations[usize::from(space)]);
        page_number(address) | u64::from(space) << SPACE_SHIFT | generation << GENERATION_SHIFT
    }

    /// The cached page of `address` in `space`, or as a global page.
    #[inline]
    pub(super) fn find(&self, address: u64, space: u16) -> Option<Cached> {
        let set = self.sets.get(set_of(address))?;
        let own = self.tag(address, space);
        let global = match space {
            BARE => own,
            _ => self.tag(address, GLOBAL),
        };
        let hits = |way: &&Way| way.tag == own || way.tag == global;
        let way = set.iter().find(hits)?;
        if !is_representable(address) {
            return None;
        }
        let stores = match way.page & (FAST | WATCHED) {
            _ if (way.page >> STORES_SHIFT) as u8 != self.stores => Stores::No,
            FAST => Stores::Fast,
            WATCHED => Stores::Watched,
            _ => Stores::No,
        };
        Some(Cached {
            page: Hva(way.page & ((1 << STORES_SHIFT) - 1) & !PAGE_MASK),
            rights: Rights::from_bits(way.page as u8),
            stores,
        })
    }

    /// The probe for `view`, whose space is `space`. It is stale after a change of the view, a
    /// fence and a flush.
    pub(super) fn probe_of(&self, view: View, space: u16) -> Probe {
        let own = self.tag(0, space);
        let global = if space == BARE {
            own
        } else {
            self.tag(0, GLOBAL)
        };
        let need = |access| match Rights::needed(view, access) {
            Some((mask, bits)) => Need {
                mask: mask.into(),
                bits: bits.into(),
            },
            None => Need::NEVER,
        };
        let (load, store) = (need(Access::Load), need(Access::Store));
        let generation = u64::from(self.stores) << STORES_SHIFT;
        Probe {
            tags: [own, global],
            load,
            store: Need {
                mask: store.mask | FAST | u64::from(u8::MAX) << STORES_SHIFT,
                bits: store.bits | FAST | generation,
            },
        }
    }

    /// The quick look-up of `address`.
    #[inline(always)]
    pub(super) fn probe(&self, address: u64, probe: &Probe, store: bool) -> Option<Probed> {
        let set = self.sets.get(set_of(address))?;
        let tags = probe.tags.map(|tag| tag | page_number(address));
        for way in set {
            if way.tag == tags[0] || way.tag == tags[1] {
                let fast_stores = probe.store.is_met(way.page);
                let allowed = if store {
                    fast_stores
                } else {
                    probe.load.is_met(way.page)
                };
                let page = Hva(way.page & ((1 << STORES_SHIFT) - 1) & !PAGE_MASK);
                return Some(Probed {
                    page,
                    allowed: allowed && is_representable(address),
                    fast_stores,
                });
            }
        }
        None
    }

    /// Caches the page of `address`.
    pub(super) fn fill(&mut self, address: u64, space: u16, cached: Cached) {
        if self.sets.is_empty() || !is_representable(address) || cached.page.0 >> STORES_SHIFT != 0
        {
            return;
        }
        let tag = self.tag(address, space);
        let set = &mut self.sets[set_of(address)];
        let with = |tag| set.iter().position(|way| way.tag == tag);
        let at = with(tag).or_else(|| with(0)).unwrap_or_else(|| {
            self.next = self.next.wrapping_add(1);
            self.next % WAYS
        });
        let stores = match cached.stores {
            Stores::No => 0,
            Stores::Watched => WATCHED,
            Stores::Fast => FAST,
        };
        set[at] = Way {
            tag,
            page: cached.page.0
                | stores
                | u64::from(cached.rights.bits())
                | u64::from(self.stores) << STORES_SHIFT,
        };
    }

    /// Forgets the page of `address` in the address space `asid`. Without one: in all address
    /// spaces, as a global page too.
    pub(super) fn forget_page(&mut self, address: u64, asid: Option<u16>) {
        let number = page_number(address);
        let Some(set) = self.sets.get_mut(set_of(address)) else {
            return;
        };
        for way in set {
            let space = (way.tag >> SPACE_SHIFT) as u16 & ((1 << 10) - 1);
            let covered = match asid {
                Some(asid) => space == asid,
                None => space != BARE,
            };
            if covered && page_number(way.tag << PAGE_SHIFT) == number {
                *way = Way::default();
            }
        }
    }

    /// Forgets all pages of `space`.
    pub(super) fn forget_space(&mut self, space: u16) {
        let generation = &mut self.generations[usize::from(space)];
        if *generation == LAST_GENERATION {
            self.sets.fill([Way::default(); WAYS]);
            self.generations = [1; SPACES];
        } else {
            *generation += 1;
        }
    }

    /// Forgets all pages of address spaces, and global ones.
    pub(super) fn forget_virtual(&mut self) {
        for space in 0..=GLOBAL {
            self.forget_space(space);
        }
    }

    /// Forgets everything.
    pub(super) fn flush(&mut self) {
        if !self.sets.is_empty() {
            self.forget_virtual();
            self.forget_space(BARE);
        }
    }

    /// Forgets which pages the host allows to be stored to.
    pub(super) fn flush_writes(&mut self) {
        match self.stores.checked_add(1) {
            Some(stores) => self.stores = stores,
            None => {
                self.flush();
                self.stores = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: Hva = Hva(0x7fff_1234_5000);
    const CACHED: Cached = Cached {
        page: PAGE,
        rights: Rights::ALL,
        stores: Stores::Fast,
    };

    fn table() -> Second {
        let mut second = Second::new();
        second.allocate();
        second
    }

    #[test]
    fn a_page_is_found_in_its_space_only_unless_it_is_global() {
        let mut second = table();
        assert_eq!(second.find(0, 0), None, "an empty way");
        second.fill(0x5000, 3, CACHED);
        second.fill(0x6000, GLOBAL, CACHED);
        second.fill(0x7000, BARE, CACHED);
        assert_eq!(second.find(0x5123, 3), Some(CACHED));
        assert_eq!(second.find(0x5123, 4), None);
        assert_eq!(second.find(0x5123, BARE), None);
        for space in [0, 3, 511] {
            assert_eq!(second.find(0x6000, space), Some(CACHED));
            assert_eq!(second.find(0x7000, space), None);
        }
        assert_eq!(second.find(0x6000, BARE), None);
        assert_eq!(second.find(0x7000, BARE), Some(CACHED));
    }

    #[test]
    fn addresses_do_not_alias() {
        let mut second = table();
        for address in [0x5000_u64, 0xffff_ffff_8000_5000] {
            second.fill(address, 3, CACHED);
            assert!(second.find(address, 3).is_some());
            for bit in 12..64 {
                assert_eq!(second.find(address ^ 1 << bit, 3), None, "bit {bit}");
            }
        }
        second.fill(1 << 52, 3, CACHED);
        assert_eq!(second.find(1 << 52, 3), None, "has no room");
    }

    #[test]
    fn a_set_holds_as_many_spaces_as_it_has_ways() {
        let mut second = table();
        for asid in 0..4 {
            second.fill(0x5000, asid, CACHED);
        }
        assert!((0..4).all(|asid| second.find(0x5000, asid).is_some()));
        second.fill(0x5000, 4, CACHED);
        let left = (0..5).filter(|&asid| second.find(0x5000, asid).is_some());
        assert_eq!(left.count(), 4);
    }

    #[test]
    fn fences_forget_what_they_say() {
        for (address, asid, left) in [
            (None, None, [false, false, false, false]),
            (None, Some(3), [false, true, true, true]),
            (Some(0x5000), None, [false, false, false, true]),
            (Some(0x5000), Some(3), [false, true, true, true]),
            (Some(0x6000), None, [true, true, true, false]),
            (Some(0x5000), Some(5), [true, true, true, true]),
        ] {
            let mut second = table();
            let filled = [(0x5000, 3), (0x5000, 4), (0x5000, GLOBAL), (0x6000, GLOBAL)];
            for (address, space) in filled {
                second.fill(address, space, CACHED);
            }
            second.fill(0x5000, BARE, CACHED);
            match (address, asid) {
                (Some(address), asid) => second.forget_page(address, asid),
                (None, Some(asid)) => second.forget_space(asid),
                (None, None) => second.forget_virtual(),
            }
            for ((page, space), left) in filled.into_iter().zip(left) {
                // A global page hides that a space's own page is gone.
                let tag = second.tag(page, space);
                let kept = second.sets[set_of(page)].iter().any(|way| way.tag == tag);
                assert_eq!(kept, left, "{page:#x} {space} after {address:x?} {asid:?}");
            }
            assert!(second.find(0x5000, BARE).is_some());
        }
    }

    #[test]
    fn generations_run_out_without_harm() {
        let mut second = table();
        second.fill(0x5000, 3, CACHED);
        for _ in 0..70_000 {
            second.forget_space(3);
            assert_eq!(second.find(0x5000, 3), None);
        }
        second.fill(0x5000, 3, CACHED);
        for _ in 0..600 {
            second.flush_writes();
            let found = second.find(0x5000, 3);
            assert!(found.is_none_or(|found| found.stores == Stores::No));
        }
        second.flush();
        assert_eq!(second.find(0x5000, 3), None);
    }
}
