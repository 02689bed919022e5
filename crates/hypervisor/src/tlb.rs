//! The software TLB of one vCPU.
//!
//! **Guarantee.** A hit costs one comparison and one addition. It takes no lock and writes nothing
//! that another thread sees. An entry leads to host memory that was mapped when the entry was
//! filled. It stays valid until the vCPU takes a flush request at its [`crate::Gate`], for which
//! each revocation waits.
//!
//! **Mechanism.** The TLB is direct-mapped: the low bits of the frame number choose the entry.
//! Reads (with fetches) and writes have a tag each, so write protection is a write tag that never
//! matches. A tag is the address of the page. A look-up compares it with the accessed address under
//! a mask that keeps the page number *and* the bits below the access size. So a misaligned access
//! never hits, and needs no separate test.
//!
//! **Neighbours.** The vCPU's view of memory owns and fills it. It knows no slots and no tables.

use pageferry_addr::{Gpa, Hva, PAGE_MASK};
use pageferry_memslot::OutOfMemory;

/// The number of entries: 1024 reach 4 MiB, in 32 KiB of the host's cache.
pub(crate) const ENTRIES: usize = 1024;

/// A tag that matches no masked address: of the page offset, only the lowest three bits can be set
/// in those.
const NEVER: u64 = u64::MAX;

#[derive(Clone, Copy)]
#[repr(C, align(32))]
struct Entry {
    read: u64,
    write: u64,
    /// Host address minus guest-physical address of the page, wrapping.
    addend: u64,
}

const EMPTY: Entry = Entry {
    read: NEVER,
    write: NEVER,
    addend: 0,
};

pub(crate) struct Tlb {
    entries: Box<[Entry; ENTRIES]>,
}

impl Tlb {
    /// Makes an empty TLB.
    ///
    /// # Errors
    /// If the allocator refuses memory for the entries.
    pub(crate) fn try_new() -> Result<Self, OutOfMemory> {
        let mut entries = Vec::new();
        let bytes = ENTRIES * size_of::<Entry>();
        let reserved = entries.try_reserve_exact(ENTRIES);
        reserved.map_err(|_| OutOfMemory { bytes })?;
        entries.resize(ENTRIES, EMPTY);
        match entries.try_into() {
            Ok(entries) => Ok(Self { entries }),
            Err(_) => unreachable!("there are as many entries as were reserved"),
        }
    }

    #[inline(always)]
    fn entry(&self, gpa: u64) -> &Entry {
        &self.entries[(Gpa(gpa).gfn().0 as usize) % ENTRIES]
    }

    /// The host address for a read of `size` bytes (1, 2, 4 or 8) at `gpa`. `None` if the page is
    /// not cached or `gpa` is not aligned to `size`.
    #[inline(always)]
    pub(crate) fn read(&self, gpa: u64, size: u64) -> Option<*mut u8> {
        let entry = self.entry(gpa);
        (gpa & (!PAGE_MASK | (size - 1)) == entry.read).then(|| pointer(gpa, entry.addend))
    }

    /// The same for a write.
    #[inline(always)]
    pub(crate) fn write(&self, gpa: u64, size: u64) -> Option<*mut u8> {
        let entry = self.entry(gpa);
        (gpa & (!PAGE_MASK | (size - 1)) == entry.write).then(|| pointer(gpa, entry.addend))
    }

    /// Caches the translation of the page of `gpa`, and drops the old contents of its entry.
    pub(crate) fn fill(&mut self, gpa: u64, page: Hva, writable: bool) {
        let tag = gpa & !PAGE_MASK;
        self.entries[(Gpa(gpa).gfn().0 as usize) % ENTRIES] = Entry {
            read: tag,
            write: if writable { tag } else { NEVER },
            addend: page.0.wrapping_sub(tag),
        };
    }

    /// Forgets everything.
    pub(crate) fn flush(&mut self) {
        self.entries.fill(EMPTY);
    }

    /// Forgets which pages are writable. Reads still hit.
    pub(crate) fn flush_writes(&mut self) {
        for entry in self.entries.iter_mut() {
            entry.write = NEVER;
        }
    }
}

#[inline(always)]
fn pointer(gpa: u64, addend: u64) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(gpa.wrapping_add(addend) as usize)
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
        tlb.fill(0x5123, PAGE, false);
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
        tlb.fill(alias, PAGE, true);
        assert!(tlb.read(0x5000, 1).is_none() && tlb.write(alias, 8).is_some());
    }

    #[test]
    fn flushes_forget_what_they_say() {
        let mut tlb = Tlb::try_new().unwrap();
        tlb.fill(0, PAGE, true);
        tlb.flush_writes();
        assert!(tlb.write(0, 1).is_none() && tlb.read(0, 1).is_some());
        tlb.flush();
        assert!(tlb.read(0, 1).is_none());
    }

    #[test]
    fn a_page_below_its_guest_address_translates_too() {
        let mut tlb = Tlb::try_new().unwrap();
        tlb.fill(0x3_0000_0000_0000, PAGE, true);
        assert_eq!(tlb.write(0x3_0000_0000_0004, 4).unwrap() as u64, PAGE.0 + 4);
    }
}
