#![expect(unsafe_code, reason = "vouches for the constants of a format")]
//! Intel's extended page tables.
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3C, chapter "VMX
//! Support for Address Translation" (29 in the editions around 2024, 28 before), section "The
//! Extended Page Table Mechanism": tables 29-1 (PML5E), 29-2 (PML4E), 29-3 (PDPTE of a 1-GByte
//! page), 29-4 (PDPTE of a page directory), 29-5 (PDE of a 2-MByte page), 29-6 (PDE of a page
//! table), 29-7 (PTE).

use super::entry::{AccessedBy, DirtyBy, MemoryType, TlbAfterFault};
use super::layout::{EntryLayout, root_address};
use pageferry_addr::Pfn;

/// EPT with `LEVELS` (4 or 5), with accessed and dirty flags if `AD`.
///
/// `AD` is bit 6 of the EPT pointer. IA32_VMX_EPT_VPID_CAP reports support:
///
/// | bit | for |
/// |---|---|
/// | 7 | five levels |
/// | 16, 17 | leaves of 2 MiB, of 1 GiB |
/// | 21 | `AD` |
///
/// Entries leave the bits of these controls clear, so the controls must be off:
///
/// - the VM-execution controls "mode-based execute control" (bit 10), "EPT-violation #VE" (63),
///   "guest-paging verification" (57), "EPT paging-write control" (58) and "sub-page write
///   permissions" (61);
/// - the EPT pointer's supervisor-shadow-stack control (60).
#[derive(Clone, Copy, Debug)]
pub struct Ept<const LEVELS: u32, const AD: bool>;

/// EPT, four levels, with accessed and dirty flags.
pub type Ept4 = Ept<4, true>;
/// EPT, four levels, without accessed and dirty flags.
pub type Ept4NoAd = Ept<4, false>;
/// EPT, five levels, with accessed and dirty flags.
pub type Ept5 = Ept<5, true>;
/// EPT, five levels, without accessed and dirty flags.
pub type Ept5NoAd = Ept<5, false>;

/// The caching of the processor's own accesses to tables (bits 2:0 of the EPT pointer).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum EptWalks {
    /// Type 0, uncacheable, on processors with IA32_VMX_EPT_VPID_CAP bit 8.
    Uncacheable,
    /// Type 6, write-back, on processors with bit 14.
    #[default]
    WriteBack,
}

impl<const LEVELS: u32, const AD: bool> Ept<LEVELS, AD> {
    /// The EPT pointer of a [root](crate::Mmu::root): the VMCS field 0x201a (SDM volume 3C, 25.6.11
    /// "Extended-Page-Table Pointer (EPTP)").
    ///
    /// | bits | value |
    /// |---|---|
    /// | 2:0 | `walks` |
    /// | 5:3 | levels - 1 |
    /// | 6 | `AD` |
    /// | 51:12 | the root's frame |
    ///
    /// All others are 0: bit 7 is the control for supervisor shadow stacks.
    ///
    /// A processor tags the mappings of EPT by bits 51:12 of the pointer. [`INVEPT`](Self#flush)
    /// takes the whole value.
    ///
    /// # Flush
    ///
    /// [`Platform::flush`](crate::Platform::flush) for vCPUs that run under this pointer:
    ///
    /// 1. Note the request for each vCPU, then make it leave the guest (an IPI). A vCPU that is
    ///    outside looks for requests after it has said that it is about to enter.
    /// 2. Each processor that may have mappings of the pointer executes INVEPT, type 1
    ///    (single-context), with the pointer. These are the processors that have run one of the
    ///    vCPUs since the processor's last such INVEPT. A processor that will run one first may
    ///    execute it then.
    /// 3. For [`Flush::Roots`](crate::Flush::Roots), each vCPU also writes the new pointer to its
    ///    VMCS before it enters the guest. INVEPT is for the old pointer. A later root may have the
    ///    frame of an old one.
    /// 4. Return when each of these vCPUs is out of the guest, or has entered it after its INVEPT.
    ///
    /// A range does not matter: INVEPT takes none. INVVPID does not do, as it keeps guest-physical
    /// mappings. VM entries and exits invalidate no mappings of EPT.
    ///
    /// # Panics
    /// If `root` is at or above [`PFN_LIMIT`](EntryLayout::PFN_LIMIT).
    #[must_use]
    pub fn eptp(root: Pfn, walks: EptWalks) -> u64 {
        let memory = match walks {
            EptWalks::Uncacheable => 0,
            EptWalks::WriteBack => 6,
        };
        root_address::<Self>(root) | u64::from(AD) << 6 | u64::from(LEVELS - 1) << 3 | memory
    }
}

/// Bit 0: loads are allowed. An entry whose bits 2:0 are all clear is not present.
const READ: u64 = 1 << 0;
/// Bit 1: stores are allowed. Without bit 0 the entry is misconfigured.
const WRITE: u64 = 1 << 1;
/// Bit 2: fetches are allowed. Without bit 0 this needs IA32_VMX_EPT_VPID_CAP bit 0.
const EXECUTE: u64 = 1 << 2;
/// Bits 5:3: the memory type of a leaf. Bit 6: ignore the guest's PAT.
const MEMORY: u64 = 0b1111 << 3;
/// Type 6, write-back. Bit 6 is set too, so that the guest cannot make uncached aliases of ordinary
/// memory.
const WRITE_BACK: u64 = 6 << 3 | 1 << 6;
/// Type 1: write-combining.
const WRITE_COMBINING: u64 = 1 << 3;
/// Bit 7: an entry of level 2 or 3 is a leaf. Ignored at level 1, reserved at levels 4 and 5.
const PAGE: u64 = 1 << 7;
/// Bit 8: accessed, in leaves and in table pointers. Ignored where the flags are off.
const ACCESSED: u64 = 1 << 8;
/// Bit 9: dirty, in leaves. Ignored where the flags are off.
const DIRTY: u64 = 1 << 9;
/// Bit 11, ignored at all levels. A leaf without permissions needs a software bit for "present".
/// KVM uses the same one.
const PRESENT: u64 = 1 << 11;
/// Bits 56:52, 59 and 62 are ignored under all controls. Two of them hold the class of writes.
const HOST_WRITABLE: u64 = 1 << 52;
const MMU_WRITABLE: u64 = 1 << 53;
/// Bits 54 and 56 save the read and execute permissions, as in KVM. The frame number stays in the
/// entry. On a processor with the L1 Terminal Fault flaw a guest can read its own page through it,
/// and no other.
const SAVED_SHIFT: u32 = 54;

// SAFETY: the constants come from the specifications at the top of this file, and
// `tests/it/formats` checks them bit by bit. `is_leaf_kind` tells leaves from links.
unsafe impl<const LEVELS: u32, const AD: bool> EntryLayout for Ept<LEVELS, AD> {
    const NAME: &'static str = match (LEVELS, AD) {
        (4, true) => "EPT, 4 levels, A/D",
        (4, false) => "EPT, 4 levels, no A/D",
        (5, true) => "EPT, 5 levels, A/D",
        _ => "EPT, 5 levels, no A/D",
    };
    const LEVELS: u32 = {
        assert!(LEVELS == 4 || LEVELS == 5, "EPT walks have length 4 or 5");
        LEVELS
    };
    /// Level 5 covers 57 bits, but guest-physical addresses have at most 52 (the limit of
    /// MAXPHYADDR).
    const GFN_BITS: u32 = if LEVELS == 5 && !cfg!(any(loom, shuttle)) {
        40
    } else {
        LEVELS * Self::INDEX_BITS
    };

    const ACCESSED_BY: AccessedBy = if AD {
        AccessedBy::Hardware
    } else {
        AccessedBy::SavedPermissions
    };
    const DIRTY_BY: DirtyBy = if AD {
        DirtyBy::Hardware
    } else {
        DirtyBy::WriteProtection
    };
    /// Section "Caching Translation Information": the processor may use either page size until
    /// INVEPT, and both are legal.
    const BREAK_BEFORE_MAKE: bool = false;
    /// Section "Caching Translation Information": the processor creates no mapping from an entry
    /// that is not present or misconfigured. An EPT violation invalidates the mappings of its
    /// address.
    const TLB_AFTER_FAULT: TlbAfterFault = TlbAfterFault::Forgets;

    /// Bits 51:12. Those from MAXPHYADDR on are reserved.
    const PFN_SHIFT: u32 = 12;
    const PFN_BITS: u32 = 40;
    const PRESENT: u64 = PRESENT;
    /// Bit 10 counts only under mode-based execute control, and is always clear here.
    const HARDWARE_PRESENT: u64 = READ | WRITE | EXECUTE;
    /// Bits 7:3 are reserved. Accessed is set, so that the hardware never writes to a link.
    const TABLE: u64 = PRESENT | READ | WRITE | EXECUTE | if AD { ACCESSED } else { 0 };
    const LEAF: u64 = PRESENT | READ;
    const WRITE: u64 = WRITE;
    const EXECUTE: u64 = EXECUTE;
    const NO_EXECUTE: u64 = 0;
    const ACCESSED: u64 = if AD { ACCESSED } else { 0 };
    const DIRTY: u64 = if AD { DIRTY } else { 0 };
    const MEMORY: u64 = MEMORY;
    const HOST_WRITABLE: u64 = HOST_WRITABLE;
    const MMU_WRITABLE: u64 = MMU_WRITABLE;
    const SAVED_SHIFT: u32 = if AD { 0 } else { SAVED_SHIFT };
    const SAVED: u64 = if AD { 0 } else { READ | EXECUTE };

    #[inline]
    fn memory_bits(memory: MemoryType) -> u64 {
        match memory {
            MemoryType::WriteBack => WRITE_BACK,
            MemoryType::WriteCombining => WRITE_COMBINING,
            // Type 0: uncacheable.
            MemoryType::Device => 0,
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
