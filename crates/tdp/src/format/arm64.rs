#![expect(unsafe_code, reason = "vouches for the constants of a format")]
//! Arm's stage 2 tables with the 4 KiB granule.
//!
//! Source: Arm Architecture Reference Manual for A-profile (DDI 0487), chapter D8 "The AArch64
//! Virtual Memory System Architecture": "Translation table descriptor formats" (VMSAv8-64
//! descriptors, stage 2 attributes), "Concatenated translation tables", "Stage 2 data and
//! instruction access permissions", "Hardware management of the Access flag" and "of the dirty
//! state", "Stage 2 memory types and Cacheability attributes", and "Using break-before-make when
//! updating translation table entries".

use super::entry::{AccessedBy, DirtyBy, MemoryType, TlbAfterFault};
use super::layout::{EntryLayout, root_address};
use pageferry_addr::Pfn;

/// Stage 2 for `IPA_BITS` of intermediate physical address (33 to 48).
///
/// - `HAFDBS`: the hardware sets the Access flag and the dirty state (VTCR_EL2.HA and HD). Without
///   it,
///   an access through a clear AF is an Access flag fault.
/// - `FWB`: memory types are those of FEAT_S2FWB (HCR_EL2.FWB).
///
/// The manual's level is 4 minus the level here. The start level is the one that KVM sets in
/// VTCR_EL2.
/// Up to 43 bits the walk starts at the manual's level 1, in up to 16 concatenated tables. Above,
/// it
/// starts at the manual's level 0.
#[derive(Clone, Copy, Debug)]
pub struct Arm64Stage2<const IPA_BITS: u32, const HAFDBS: bool, const FWB: bool>;

/// 40 bits: three levels, a root of two concatenated tables, FEAT_S2FWB.
pub type Arm64Ipa40<const HAFDBS: bool> = Arm64Stage2<40, HAFDBS, true>;
/// 44 bits: four levels, a root of 32 entries, FEAT_S2FWB.
pub type Arm64Ipa44<const HAFDBS: bool> = Arm64Stage2<44, HAFDBS, true>;
/// 48 bits: four levels, a root of one full table, FEAT_S2FWB.
pub type Arm64Ipa48<const HAFDBS: bool> = Arm64Stage2<48, HAFDBS, true>;

impl<const IPA_BITS: u32, const HAFDBS: bool, const FWB: bool> Arm64Stage2<IPA_BITS, HAFDBS, FWB> {
    /// VTTBR_EL2 of a [root](crate::Mmu::root): bits 63:48 are `vmid`, bits 47:1 the root's
    /// address, and bit 0 (CnP) is 0. Without 16-bit VMIDs (VTCR_EL2.VS) a VMID is below 256.
    ///
    /// # Flush
    ///
    /// [`Platform::flush`](crate::Platform::flush), by any one processor at EL2, whose VTTBR_EL2
    /// has the VMID meanwhile:
    ///
    /// 1. `DSB ISHST`: walks of all processors see the stores to the tables.
    /// 2. `TLBI VMALLS12E1IS` for everything. For a range it may be `TLBI IPAS2E1IS` for each page,
    ///    with the address shifted right by 12, then `DSB ISH`, then `TLBI VMALLE1IS`: the
    ///    combined entries of both stages go by the last one only. `IPAS2E1IS` removes links too
    ///    (`IPAS2LE1IS` would not).
    /// 3. `DSB ISH`: the invalidation is complete on all processors, and all stores through old
    ///    translations have happened.
    /// 4. `ISB`.
    /// 5. For [`Flush::Roots`](crate::Flush::Roots), each vCPU first leaves the guest and gets the
    ///    new VTTBR_EL2. Steps 1 to 4 come after the last of them.
    ///
    /// The broadcast reaches all processors of the inner shareable domain, so no vCPU leaves the
    /// guest for steps 1 to 4. For [`Mapped::local_flush`](crate::Mapped::local_flush) the forms
    /// without `IS` do, between `DSB NSHST` and `DSB NSH`.
    ///
    /// # Panics
    /// If `root` is at or above [`PFN_LIMIT`](EntryLayout::PFN_LIMIT), or is no multiple of the
    /// frames of a root.
    #[must_use]
    pub fn vttbr_el2(root: Pfn, vmid: u16) -> u64 {
        u64::from(vmid) << 48 | root_address::<Self>(root)
    }

    /// The fields of VTCR_EL2 that this format determines.
    ///
    /// | bits | field | value |
    /// |---|---|---|
    /// | 5:0 | T0SZ | 64 - `IPA_BITS` |
    /// | 7:6 | SL0 | 1: three levels; 2: four levels |
    /// | 9:8, 11:10 | IRGN0, ORGN0 | 1: walks are write-back, allocating |
    /// | 13:12 | SH0 | 3: inner shareable |
    /// | 15:14 | TG0 | 0: 4 KiB |
    /// | 21, 22 | HA, HD | `HAFDBS` |
    /// | 31 | RES1 | 1 |
    ///
    /// The caller adds PS (bits 18:16, the processor's physical address size) and VS (bit 19).
    /// HCR_EL2 has FWB at bit 46.
    pub const VTCR_EL2: u64 = {
        let start = Self::LEVELS as u64 - 2;
        let managed = if HAFDBS { 0b11 << 21 } else { 0 };
        1 << 31
            | managed
            | 0b11 << 12
            | 0b01 << 10
            | 0b01 << 8
            | start << 6
            | (64 - IPA_BITS) as u64
    };
}

/// Bit 0: the descriptor is valid. If it is clear, software owns all other bits.
const VALID: u64 = 1 << 0;
/// Bit 1: a table above level 1, a page at level 1. Clear in a block. Clear is reserved at level 1.
const TABLE_OR_PAGE: u64 = 1 << 1;
/// MemAttr, bits 5:2.
const MEM_ATTR: u64 = 0b1111 << 2;
/// Normal, inner and outer write-back, without FWB.
const NORMAL_WRITE_BACK: u64 = 0b1111 << 2;
/// Write-back whatever stage 1 requests, with FWB.
const FORCED_WRITE_BACK: u64 = 0b0110 << 2;
/// Normal, inner and outer non-cacheable; the same with FWB.
const NORMAL_NON_CACHEABLE: u64 = 0b0101 << 2;
/// Device-nGnRE; the same with FWB.
const DEVICE: u64 = 0b0001 << 2;
/// S2AP bit 0: loads are allowed.
const S2AP_READ: u64 = 1 << 6;
/// S2AP bit 1: stores are allowed. Together with DBM: dirty.
const S2AP_WRITE: u64 = 1 << 7;
/// SH, bits 9:8: inner shareable.
const INNER_SHAREABLE: u64 = 0b11 << 8;
/// AF: accessed.
const ACCESS_FLAG: u64 = 1 << 10;
/// DBM: the hardware may set S2AP bit 1 at a store.
const DIRTY_BIT_MODIFIER: u64 = 1 << 51;
/// XN bit 1: fetches are not allowed at any exception level. Bit 53 (FEAT_XNX) stays clear.
const EXECUTE_NEVER: u64 = 1 << 54;
/// Software owns bits 58:55 (55 is NS in the Realm state).
const HOST_WRITABLE: u64 = 1 << 56;
const MMU_WRITABLE: u64 = 1 << 57;

// SAFETY: the constants come from the specifications at the top of this file, and
// `tests/it/formats` checks them bit by bit. `is_leaf_kind` tells leaves from links.
unsafe impl<const IPA_BITS: u32, const HAFDBS: bool, const FWB: bool> EntryLayout
    for Arm64Stage2<IPA_BITS, HAFDBS, FWB>
{
    const NAME: &'static str = match HAFDBS {
        true => "arm64 stage 2, HAFDBS",
        false => "arm64 stage 2",
    };
    const LEVELS: u32 = {
        assert!(
            33 <= IPA_BITS && IPA_BITS <= 48,
            "intermediate addresses of 33 to 48 bits"
        );
        if IPA_BITS <= 43 { 3 } else { 4 }
    };
    const ROOT_INDEX_BITS: u32 = if cfg!(any(loom, shuttle)) {
        1
    } else {
        IPA_BITS - 12 - 9 * (Self::LEVELS - 1)
    };

    const ACCESSED_BY: AccessedBy = if HAFDBS {
        AccessedBy::Hardware
    } else {
        AccessedBy::FaultOnClear
    };
    const DIRTY_BY: DirtyBy = if HAFDBS {
        DirtyBy::Hardware
    } else {
        DirtyBy::WriteProtection
    };
    /// Required without FEAT_BBM level 2. Otherwise two sizes in a TLB may conflict. The result is
    /// an abort, or a translation made of both that loses coherency and ordering.
    const BREAK_BEFORE_MAKE: bool = true;
    /// The TLB does not cache descriptors that give a Translation fault or an Access flag fault. It
    /// may keep a leaf that gives a Permission fault.
    const TLB_AFTER_FAULT: TlbAfterFault = TlbAfterFault::KeepsDenied;

    /// Bits 47:12. In blocks the frame begins at bit 21 or 30, and the bits below are reserved. The
    /// contiguous hint (52) is never set: 16 entries with it must change together, under
    /// break-before-make.
    const PFN_SHIFT: u32 = 12;
    const PFN_BITS: u32 = 36;
    const PRESENT: u64 = VALID;
    const HARDWARE_PRESENT: u64 = VALID;
    const TABLE: u64 = VALID | TABLE_OR_PAGE;
    const LEAF: u64 = VALID | S2AP_READ | INNER_SHAREABLE;
    /// With hardware management, DBM is the permission and S2AP bit 1 the dirty state.
    const WRITE: u64 = if HAFDBS {
        DIRTY_BIT_MODIFIER
    } else {
        S2AP_WRITE
    };
    const EXECUTE: u64 = 0;
    const NO_EXECUTE: u64 = EXECUTE_NEVER;
    const ACCESSED: u64 = ACCESS_FLAG;
    const DIRTY: u64 = if HAFDBS { S2AP_WRITE } else { 0 };
    const MEMORY: u64 = MEM_ATTR;
    const HOST_WRITABLE: u64 = HOST_WRITABLE;
    const MMU_WRITABLE: u64 = MMU_WRITABLE;

    #[inline]
    fn memory_bits(memory: MemoryType) -> u64 {
        match memory {
            MemoryType::WriteBack if FWB => FORCED_WRITE_BACK,
            MemoryType::WriteBack => NORMAL_WRITE_BACK,
            MemoryType::WriteCombining => NORMAL_NON_CACHEABLE,
            MemoryType::Device => DEVICE,
        }
    }

    #[inline]
    fn leaf_kind(level: u32) -> u64 {
        if level > 1 { 0 } else { TABLE_OR_PAGE }
    }

    #[inline]
    fn is_leaf_kind(entry: u64, level: u32) -> bool {
        level == 1 || entry & TABLE_OR_PAGE == 0
    }
}
