#![expect(unsafe_code, reason = "vouches for the constants of a format")]
//! RISC-V's G-stage tables: Sv48x4 and Sv57x4.
//!
//! Source: The RISC-V Instruction Set Manual, volume II, "Hypervisor" extension, section "Guest
//! Physical Address Translation" (the root's two extra index bits, the U bit), "Supervisor-Level
//! ISA", sections "Sv39" to "Sv57" (the entry's fields), extensions Svpbmt (bits 62:61), Svnapot
//! (63), Svade and Svadu (A and D).

use super::entry::{AccessedBy, DirtyBy, MemoryType, TlbAfterFault};
use super::layout::{EntryLayout, root_address};
use pageferry_addr::{PAGE_SHIFT, Pfn};

/// The G-stage with `LEVELS` (4: Sv48x4, 5: Sv57x4), whose hardware sets A and D if `SVADU`.
///
/// `SVADU` is menvcfg.ADUE. Without it, a clear A is a guest-page fault, and so is a clear D at a
/// store (Svade). Memory types other than [`MemoryType::WriteBack`] need Svpbmt and menvcfg.PBMTE.
#[derive(Clone, Copy, Debug)]
pub struct RiscvX4<const LEVELS: u32, const SVADU: bool>;

/// Sv48x4, A and D set by hardware.
pub type Sv48x4Svadu = RiscvX4<4, true>;
/// Sv48x4, A and D set by software.
pub type Sv48x4Svade = RiscvX4<4, false>;
/// Sv57x4, A and D set by hardware.
pub type Sv57x4Svadu = RiscvX4<5, true>;
/// Sv57x4, A and D set by software.
pub type Sv57x4Svade = RiscvX4<5, false>;

impl<const LEVELS: u32, const SVADU: bool> RiscvX4<LEVELS, SVADU> {
    /// The first value of VMID that hgatp cannot hold. A hart may implement fewer bits: those that
    /// read back as written.
    pub const VMID_LIMIT: u16 = 1 << 14;

    /// hgatp of a [root](crate::Mmu::root), for RV64 (section "Hypervisor Guest Address Translation
    /// and Protection Register").
    ///
    /// | bits | value |
    /// |---|---|
    /// | 63:60 | MODE: 9 for Sv48x4, 10 for Sv57x4 |
    /// | 57:44 | `vmid` |
    /// | 43:0 | the root's frame, whose bits 1:0 are 0 |
    ///
    /// # Flush
    ///
    /// [`Platform::flush`](crate::Platform::flush) for the harts of the vCPUs that use `vmid`:
    ///
    /// 1. `FENCE RW, RW`: the stores to the tables come before the requests.
    /// 2. Note the request for each hart that has run a vCPU of the VMID since that hart's last
    ///    fence for it, then interrupt it.
    /// 3. Each of these harts executes `HFENCE.GVMA x0, rs2` in HS-mode, with the VMID in rs2. For
    ///    a range it may execute `HFENCE.GVMA rs1, rs2` for each page, with the guest-physical
    ///    address *shifted right by 2* in rs1. That does for leaves only: a range whose tables were
    ///    cut off needs the first form.
    /// 4. For [`Flush::Roots`](crate::Flush::Roots), each hart first writes the new hgatp, and then
    ///    executes the fence. A hart that is outside the guest may do both before it enters.
    /// 5. Return when each hart has answered, or is outside the guest with the request noted.
    ///
    /// From S-mode without interrupts of one's own, `sbi_remote_hfence_gvma_vmid` does steps 2, 3
    /// and 5. A VMID that passes to another VM needs the fence on all harts first. The fence of
    /// [`Mapped::local_flush`](crate::Mapped::local_flush) is the second form, on this hart.
    /// HFENCE.VVMA does not do, as it orders guest-virtual translations.
    ///
    /// # Panics
    /// If `root` is at or above [`PFN_LIMIT`](EntryLayout::PFN_LIMIT), or no multiple of 4 frames.
    /// If `vmid` is [`VMID_LIMIT`](Self::VMID_LIMIT) or more.
    #[must_use]
    pub fn hgatp(root: Pfn, vmid: u16) -> u64 {
        assert!(
            vmid < Self::VMID_LIMIT,
            "VMID {vmid} does not fit hgatp: expected one below {}",
            Self::VMID_LIMIT
        );
        let mode = u64::from(LEVELS + 5);
        mode << 60 | u64::from(vmid) << 44 | root_address::<Self>(root) >> PAGE_SHIFT
    }
}

/// V: the entry is in use. If it is clear, software owns all other bits.
const VALID: u64 = 1 << 0;
/// R: loads are allowed. With R, W and X clear the entry points to a table.
const READ: u64 = 1 << 1;
/// W: stores are allowed. Reserved without R.
const WRITE: u64 = 1 << 2;
/// X: fetches are allowed.
const EXECUTE: u64 = 1 << 3;
/// U: user mode may use it. Every guest access counts as a user-mode access, so leaves need it. U,
/// A and D are reserved in table pointers.
const USER: u64 = 1 << 4;
/// A: accessed.
const ACCESSED: u64 = 1 << 6;
/// D: dirty.
const DIRTY: u64 = 1 << 7;
/// RSW, bits 9:8: the only bits of a valid entry that software owns.
const HOST_WRITABLE: u64 = 1 << 8;
const MMU_WRITABLE: u64 = 1 << 9;
/// PBMT, bits 62:61: 0 as the physical address says, 1 not cacheable, 2 I/O. Reserved in table
/// pointers.
const PBMT: u64 = 0b11 << 61;
const PBMT_NC: u64 = 1 << 61;
const PBMT_IO: u64 = 2 << 61;

// SAFETY: the constants come from the specifications at the top of this file, and
// `tests/it/formats` checks them bit by bit. `is_leaf_kind` tells leaves from links.
unsafe impl<const LEVELS: u32, const SVADU: bool> EntryLayout for RiscvX4<LEVELS, SVADU> {
    const NAME: &'static str = match (LEVELS, SVADU) {
        (4, true) => "Sv48x4, Svadu",
        (4, false) => "Sv48x4, Svade",
        (5, true) => "Sv57x4, Svadu",
        _ => "Sv57x4, Svade",
    };
    const LEVELS: u32 = {
        assert!(LEVELS == 4 || LEVELS == 5, "Sv48x4 has 4 levels, Sv57x4 5");
        LEVELS
    };
    const ROOT_INDEX_BITS: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 11 };

    const ACCESSED_BY: AccessedBy = if SVADU {
        AccessedBy::Hardware
    } else {
        AccessedBy::FaultOnClear
    };
    const DIRTY_BY: DirtyBy = if SVADU {
        DirtyBy::Hardware
    } else {
        DirtyBy::WriteProtection
    };
    /// Section "Supervisor Memory-Management Fence": the hardware may use either translation until
    /// the fence.
    const BREAK_BEFORE_MAKE: bool = false;
    /// The TLB may cache entries with V clear. Only Svvptc bounds the time.
    const TLB_AFTER_FAULT: TlbAfterFault = TlbAfterFault::KeepsAbsent;

    /// Bits 53:10. Bits 60:54 are reserved, and bit 63 (N) is never set.
    const PFN_SHIFT: u32 = 10;
    const PFN_BITS: u32 = 44;
    const PRESENT: u64 = VALID;
    const HARDWARE_PRESENT: u64 = VALID;
    const TABLE: u64 = VALID;
    const LEAF: u64 = VALID | READ | USER;
    /// Under Svade a store needs D as well, so the two change together.
    const WRITE: u64 = if SVADU { WRITE } else { WRITE | DIRTY };
    const EXECUTE: u64 = EXECUTE;
    const NO_EXECUTE: u64 = 0;
    const ACCESSED: u64 = ACCESSED;
    const DIRTY: u64 = if SVADU { DIRTY } else { 0 };
    const MEMORY: u64 = PBMT;
    const HOST_WRITABLE: u64 = HOST_WRITABLE;
    const MMU_WRITABLE: u64 = MMU_WRITABLE;
    /// Guest frame numbers of Sv57x4 have 47 bits.
    const MMIO_GFN_BITS: u32 = if LEVELS == 5 { 47 } else { 40 };

    #[inline]
    fn memory_bits(memory: MemoryType) -> u64 {
        match memory {
            MemoryType::WriteBack => 0,
            MemoryType::WriteCombining => PBMT_NC,
            MemoryType::Device => PBMT_IO,
        }
    }

    #[inline]
    fn leaf_kind(_level: u32) -> u64 {
        0
    }

    #[inline]
    fn is_leaf_kind(entry: u64, _level: u32) -> bool {
        entry & (READ | WRITE | EXECUTE) != 0
    }
}
