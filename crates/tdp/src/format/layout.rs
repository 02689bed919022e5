#![expect(
    unsafe_code,
    reason = "declares what an MMU that follows links relies on"
)]
//! What a format is: constants that say where the fields are and what the hardware does with them.

use super::entry::{AccessedBy, DirtyBy, MemoryType, TlbAfterFault};
use core::fmt::Debug;
use pageferry_addr::{Gfn, Pfn};

/// What distinguishes a page-table format from others; [`Format`](super::Format) is what can be
/// done with it.
///
/// Levels are numbered as KVM numbers them: entries of level 1 translate 4 KiB, of level 2 2 MiB,
/// of level 3 1 GiB; the root is the table of level [`LEVELS`](Self::LEVELS). Under `cfg(loom)` and
/// `cfg(shuttle)` tables shrink to two entries, so that a model's whole tree stays small; the
/// levels and the bits remain.
///
/// # Safety
///
/// An MMU follows what [`Format`](super::Format) takes for a link, so these hold:
/// 1. The constants satisfy [`CHECKED`](Self::CHECKED), or code that makes leaves does not compile.
/// 2. [`is_leaf_kind`](Self::is_leaf_kind) is false for every [`TABLE`](Self::TABLE) value with a
///    frame number, and true for every [`LEAF`](Self::LEAF) value with
///    [`leaf_kind`](Self::leaf_kind) of its level and whatever else a leaf may have. Both depend on
///    their arguments only.
/// 3. They are the hardware's: what it sets ([`HARDWARE_UPDATES`](Self::HARDWARE_UPDATES)), and
///    what it takes for a link.
pub unsafe trait EntryLayout: Copy + Debug + Send + Sync + 'static {
    /// What to call it in messages.
    const NAME: &'static str;

    // Geometry.

    /// How many levels there are; the root is the table of this level.
    const LEVELS: u32;
    /// log2 of the entries of a table below the root.
    const INDEX_BITS: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 9 };
    /// log2 of the entries of the root.
    const ROOT_INDEX_BITS: u32 = Self::INDEX_BITS;
    /// The highest level that may hold leaves, all levels below included: 3, as no
    /// [`PageSize`](pageferry_addr::PageSize) is larger. Processors may support less: 1 GiB leaves
    /// (and 2 MiB ones of EPT) are capabilities to ask for.
    const MAX_LEAF_LEVEL: u32 = 3;
    /// The bits of a guest frame number that can be mapped.
    const GFN_BITS: u32 = (Self::LEVELS - 1) * Self::INDEX_BITS + Self::ROOT_INDEX_BITS;
    /// The first guest frame that cannot be mapped.
    const GFN_LIMIT: Gfn = Gfn(1 << Self::GFN_BITS);
    /// The bytes of the root, which is aligned to its size.
    const ROOT_BYTES: usize = 8 << Self::ROOT_INDEX_BITS;

    // What the hardware does.

    /// How the accessed state is known.
    const ACCESSED_BY: AccessedBy;
    /// How the dirty state is known.
    const DIRTY_BY: DirtyBy;
    /// The bits the hardware may set in a present leaf at any time; it never clears one. A new
    /// value for such a leaf is stored by compare-exchange, or state the hardware reported is lost.
    const HARDWARE_UPDATES: u64 = {
        let accessed = match Self::ACCESSED_BY {
            AccessedBy::Hardware => Self::ACCESSED,
            AccessedBy::FaultOnClear | AccessedBy::SavedPermissions => 0,
        };
        let dirty = match Self::DIRTY_BY {
            DirtyBy::Hardware => Self::DIRTY,
            DirtyBy::WriteProtection => 0,
        };
        accessed | dirty
    };
    /// Whether a live entry that changes between leaf and table, or changes its frame or memory
    /// type, has to pass through a value that faults, with a TLB flush between the two stores.
    /// [`FROZEN`](Self::FROZEN) is such a value.
    const BREAK_BEFORE_MAKE: bool;
    /// What the faulting vCPU's own TLB may keep, so that the same access faults again: see
    /// [`Mapped::local_flush`](crate::Mapped::local_flush).
    const TLB_AFTER_FAULT: TlbAfterFault;

    // Where the fields are.

    /// The lowest bit of the frame number.
    const PFN_SHIFT: u32;
    /// The width of the frame number.
    const PFN_BITS: u32;
    /// The first host frame an entry has no room for. Frames above are cut off, so the platform
    /// must not hand out any.
    const PFN_LIMIT: Pfn = Pfn(1 << Self::PFN_BITS);
    /// The one bit that all leaves and table pointers have and nothing else has.
    const PRESENT: u64;
    /// The hardware takes an entry into account only if one of these is set.
    const HARDWARE_PRESENT: u64;
    /// What a table pointer has beside the frame.
    const TABLE: u64;
    /// What every accessed leaf has: present, readable.
    const LEAF: u64;
    /// What a leaf that allows stores has; without all of it, stores fault.
    const WRITE: u64;
    /// What a leaf that allows fetches has.
    const EXECUTE: u64;
    /// What a leaf that does not allow fetches has.
    const NO_EXECUTE: u64;
    /// The accessed bit, 0 where there is none.
    const ACCESSED: u64;
    /// The dirty bit, where it is not one with [`WRITE`](Self::WRITE).
    const DIRTY: u64;
    /// The field of the memory type.
    const MEMORY: u64;
    /// The software bit of [`Writes::MmuForbids`](super::Writes::MmuForbids) and
    /// [`Writes::Allowed`](super::Writes::Allowed).
    const HOST_WRITABLE: u64;
    /// The software bit of [`Writes::Allowed`](super::Writes::Allowed); alone it is
    /// [`Writes::AllowedLoggedByFault`](super::Writes::AllowedLoggedByFault).
    const MMU_WRITABLE: u64;
    /// How far the permissions of a leaf that is not accessed are moved up
    /// ([`AccessedBy::SavedPermissions`] only).
    const SAVED_SHIFT: u32 = 0;
    /// The permissions that are moved.
    const SAVED: u64 = 0;

    /// The bits of a memory type.
    fn memory_bits(memory: MemoryType) -> u64;
    /// What distinguishes a leaf of `level`, beside [`LEAF`](Self::LEAF).
    fn leaf_kind(level: u32) -> u64;
    /// Whether an entry that is present is a leaf and not a table pointer.
    fn is_leaf_kind(entry: u64, level: u32) -> bool;

    // Values that translate nothing.

    /// Nothing is known here.
    const NON_PRESENT: u64 = 0;
    /// The value of an entry that only the thread which stored it may change. The hardware stops at
    /// it.
    ///
    /// As KVM's it sets no frame bits (the L1 Terminal Fault flaw uses frames of non-present
    /// entries); unlike KVM's 0x5a0 it leaves bit 10 clear, which EPT takes as present under
    /// mode-based execute control.
    const FROZEN: u64 = 0x1a0;
    /// Marks MMIO entries among those that are not present.
    const MMIO: u64 = 1 << 3;
    /// The room for a guest frame number in an MMIO marker.
    const MMIO_GFN_BITS: u32 = 40;
    /// The room for a generation in an MMIO marker. See
    /// [`must_forget_mmio`](crate::must_forget_mmio).
    const MMIO_GENERATION_BITS: u32 = MMIO_LOW_BITS + 63 - MMIO_GFN_SHIFT - Self::MMIO_GFN_BITS;

    /// Fails to compile where fields overlap or values are ambiguous;
    /// [`Format::leaf`](super::Format::leaf) forces it.
    const CHECKED: () = {
        let frame = low_bits(Self::PFN_BITS) << Self::PFN_SHIFT;
        let saved = Self::SAVED << Self::SAVED_SHIFT;
        let fields = [
            frame,
            Self::LEAF,
            Self::WRITE | Self::DIRTY,
            Self::EXECUTE | Self::NO_EXECUTE,
            Self::ACCESSED,
            Self::MEMORY,
            Self::HOST_WRITABLE,
            Self::MMU_WRITABLE,
            saved,
        ];
        let mut used = 0;
        let mut field = 0;
        while field < fields.len() {
            assert!(used & fields[field] == 0, "two fields overlap");
            used |= fields[field];
            field += 1;
        }
        assert!(Self::TABLE & frame == 0);
        assert!(Self::PRESENT.is_power_of_two());
        assert!(Self::HOST_WRITABLE.is_power_of_two() && Self::MMU_WRITABLE.is_power_of_two());
        assert!(Self::TABLE & Self::PRESENT != 0 && Self::LEAF & Self::PRESENT != 0);
        assert!(Self::TABLE & Self::HARDWARE_PRESENT != 0);
        assert!(Self::LEAF & Self::HARDWARE_PRESENT != 0);
        let stop = Self::PRESENT | Self::HARDWARE_PRESENT;
        assert!(Self::FROZEN != Self::NON_PRESENT && Self::FROZEN & (stop | Self::MMIO) == 0);
        assert!(Self::MMIO.is_power_of_two() && Self::MMIO & stop == 0);
        assert!(stop < 1 << MMIO_GFN_SHIFT && Self::GFN_BITS <= Self::MMIO_GFN_BITS);
        let payload = low_bits(MMIO_LOW_BITS) << MMIO_LOW_SHIFT;
        assert!(payload & (stop | Self::MMIO) == 0);
        assert!(Self::MAX_LEAF_LEVEL <= Self::LEVELS);
        match Self::ACCESSED_BY {
            AccessedBy::SavedPermissions => {
                let read_and_execute = (Self::LEAF | Self::EXECUTE) & Self::HARDWARE_PRESENT;
                assert!(Self::ACCESSED == 0 && Self::PRESENT & Self::HARDWARE_PRESENT == 0);
                assert!(
                    Self::SAVED == read_and_execute && saved >> Self::SAVED_SHIFT == Self::SAVED
                );
                assert!(saved & Self::HARDWARE_PRESENT == 0);
                assert!(Self::WRITE & !Self::HARDWARE_PRESENT == 0);
            }
            AccessedBy::Hardware | AccessedBy::FaultOnClear => {
                assert!(Self::ACCESSED.is_power_of_two());
            }
        }
        match Self::DIRTY_BY {
            DirtyBy::Hardware => {
                assert!(Self::DIRTY.is_power_of_two() && Self::DIRTY & Self::WRITE == 0);
            }
            DirtyBy::WriteProtection => assert!(Self::DIRTY == 0),
        }
    };
}

/// An MMIO marker: [`EntryLayout::MMIO`] in bit 3, generation from bit 4 to 9, guest frame from bit
/// 12 on, the rest of the generation up to bit 62. Bits 10 and 11 stay clear, as EPT and its
/// software bit need; so does bit 63, with which EPT could suppress a #VE, to keep the layout one
/// for all.
pub(super) const MMIO_LOW_SHIFT: u32 = 4;
pub(super) const MMIO_LOW_BITS: u32 = 6;
pub(super) const MMIO_GFN_SHIFT: u32 = 12;

pub(super) const fn low_bits(count: u32) -> u64 {
    (1 << count) - 1
}
