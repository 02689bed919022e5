#![expect(unsafe_code, reason = "vouches for the constants of a format")]
//! x86-64's long-mode tables, as AMD's nested paging uses them.
//!
//! Source: AMD64 Architecture Programmer's Manual, volume 2, section 5.3 "Long-Mode Page
//! Translation" (figures of the PML5E, PML4E, PDPE, PDE and PTE), 5.4 "Page-Translation-Table Entry
//! Fields", and 15.25 "Nested Paging" (user access, global bit, memory types).

use super::entry::{AccessedBy, DirtyBy, MemoryType, TlbAfterFault};
use super::layout::{EntryLayout, root_address};
use pageferry_addr::Pfn;

/// Nested paging with `LEVELS` (4 or 5) of long-mode tables.
///
/// The host must set EFER.NXE (bit 63). CR4.PKE has no effect on nested tables. CPUID
/// Fn8000_0001_EDX bit 26 reports 1 GiB leaves. The host's PAT must have write-back in entry 0, UC-
/// in 2 and UC in 3, as at reset.
///
/// Every nested walk counts as a user-mode access (15.25), so all entries have U/S. The tables
/// therefore also serve as ordinary user-mode tables.
#[derive(Clone, Copy, Debug)]
pub struct Npt<const LEVELS: u32>;

/// Nested paging, four levels.
pub type Npt4 = Npt<4>;
/// Nested paging, five levels.
pub type Npt5 = Npt<5>;

impl<const LEVELS: u32> Npt<LEVELS> {
    /// nCR3 of a [root](crate::Mmu::root): the VMCB field N_CR3, at offset 0xb0 (APM volume 2,
    /// 15.25.3 and appendix B). Bits 51:12 are the root's frame. PWT and PCD (3 and 4) are 0, so
    /// walks use the host's PAT entry 0.
    ///
    /// The number of levels is that of the host: 5 if CR4.LA57 is set at VMRUN, otherwise 4. Bit 0
    /// of the field at 0x90 turns nested paging on.
    ///
    /// # Flush
    ///
    /// [`Platform::flush`](crate::Platform::flush), for a VM whose vCPUs each have an ASID:
    ///
    /// 1. Note the request for each vCPU, then make it leave the guest (an IPI). A vCPU that is
    ///    outside looks for requests after it has said that it is about to enter.
    /// 2. Each vCPU sets TLB_CONTROL (VMCB offset 0x5c) to 3 before its next VMRUN: flush the
    ///    entries of this guest's ASID. Without the feature FlushByAsid (CPUID
    ///    Fn8000_000A_EDX bit 6) the value is 1, for all entries. Or the vCPU takes a new ASID.
    /// 3. A vCPU that changes processors must not meet entries of its own earlier stay. So it does
    ///    step 2 at its first VMRUN on each processor too.
    /// 4. For [`Flush::Roots`](crate::Flush::Roots), each vCPU also writes the new N_CR3, and
    ///    clears the clean bit of nested paging (VMCB offset 0xc0, bit 4).
    /// 5. Return when each vCPU is out of the guest, or has entered it after its step 2.
    ///
    /// INVLPGA does not do: it takes guest-virtual addresses.
    ///
    /// # Panics
    /// If `root` is at or above [`PFN_LIMIT`](EntryLayout::PFN_LIMIT).
    #[must_use]
    pub fn n_cr3(root: Pfn) -> u64 {
        root_address::<Self>(root)
    }
}

/// Bit 0, P: the entry is in use. If it is clear, software owns all other bits.
const PRESENT: u64 = 1 << 0;
/// Bit 1, R/W: stores are allowed.
const WRITE: u64 = 1 << 1;
/// Bit 2, U/S: user mode may use it.
const USER: u64 = 1 << 2;
/// Bit 3, PWT, and bit 4, PCD: the low bits of the index into the PAT. Its high bit stays clear.
const PWT: u64 = 1 << 3;
const PCD: u64 = 1 << 4;
/// Bit 5, A: accessed, in leaves and in table pointers.
const ACCESSED: u64 = 1 << 5;
/// Bit 6, D: dirty, in leaves.
const DIRTY: u64 = 1 << 6;
/// Bit 7, PS: an entry of level 2 or 3 is a leaf. It is the PAT bit at level 1, and reserved at
/// levels 4 and 5.
const PAGE: u64 = 1 << 7;
/// Software owns bits 11:9 at all levels. KVM uses these two as well.
const HOST_WRITABLE: u64 = 1 << 9;
const MMU_WRITABLE: u64 = 1 << 10;
/// Bit 63, NX: fetches are not allowed.
const NO_EXECUTE: u64 = 1 << 63;

// SAFETY: the constants come from the specifications at the top of this file, and
// `tests/it/formats` checks them bit by bit. `is_leaf_kind` tells leaves from links.
unsafe impl<const LEVELS: u32> EntryLayout for Npt<LEVELS> {
    const NAME: &'static str = match LEVELS {
        4 => "NPT, 4 levels",
        _ => "NPT, 5 levels",
    };
    const LEVELS: u32 = {
        assert!(LEVELS == 4 || LEVELS == 5, "long mode has 4 or 5 levels");
        LEVELS
    };
    /// Level 5 covers 57 bits, but guest-physical addresses have at most 52.
    const GFN_BITS: u32 = if LEVELS == 5 && !cfg!(any(loom, shuttle)) {
        40
    } else {
        LEVELS * Self::INDEX_BITS
    };

    const ACCESSED_BY: AccessedBy = AccessedBy::Hardware;
    const DIRTY_BY: DirtyBy = DirtyBy::Hardware;
    /// The processor may use either size until the flush. Family 10h is not supported: it raises a
    /// machine check over two sizes in one TLB (erratum 383).
    const BREAK_BEFORE_MAKE: bool = false;
    /// Section 5.5 "Translation-Lookaside Buffer": the TLB does not cache entries with P clear. A
    /// page fault invalidates the entries of its address.
    const TLB_AFTER_FAULT: TlbAfterFault = TlbAfterFault::Forgets;

    /// Bits 51:12. In leaves of 2 MiB and 1 GiB, bit 12 is PAT, and the other bits below the page's
    /// size are reserved.
    const PFN_SHIFT: u32 = 12;
    const PFN_BITS: u32 = 40;
    const PRESENT: u64 = PRESENT;
    const HARDWARE_PRESENT: u64 = PRESENT;
    /// Accessed is set, so that the hardware never writes to a link.
    const TABLE: u64 = PRESENT | WRITE | USER | ACCESSED;
    const LEAF: u64 = PRESENT | USER;
    const WRITE: u64 = WRITE;
    const EXECUTE: u64 = 0;
    const NO_EXECUTE: u64 = NO_EXECUTE;
    const ACCESSED: u64 = ACCESSED;
    const DIRTY: u64 = DIRTY;
    const MEMORY: u64 = PWT | PCD;
    const HOST_WRITABLE: u64 = HOST_WRITABLE;
    const MMU_WRITABLE: u64 = MMU_WRITABLE;

    #[inline]
    fn memory_bits(memory: MemoryType) -> u64 {
        match memory {
            // PAT entry 0: write-back.
            MemoryType::WriteBack => 0,
            // PAT entry 2, UC-: uncached, but write-combining where the guest's PAT asks for it.
            MemoryType::WriteCombining => PCD,
            // PAT entry 3: uncacheable.
            MemoryType::Device => PCD | PWT,
        }
    }

    #[inline]
    fn leaf_kind(level: u32) -> u64 {
        if level > 1 { PAGE } else { 0 }
    }

    #[inline]
    fn is_leaf_kind(entry: u64, level: u32) -> bool {
        level == 1 || entry & PAGE != 0
    }
}
