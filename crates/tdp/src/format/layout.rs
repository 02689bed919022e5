#![expect(
    unsafe_code,
    reason = "declares what an MMU that follows links relies on"
)]
//! The definition of a format: constants for the fields and for the hardware's behaviour.

use super::entry::{AccessedBy, DirtyBy, MemoryType, TlbAfterFault};
use core::fmt::Debug;
use pageferry_addr::{Gfn, PAGE_SHIFT, Pfn};

/// The properties of one page-table format. [`Format`](super::Format) has the operations on
/// entries.
///
/// Levels are numbered as in KVM. Entries of level 1 translate 4 KiB, of level 2 2 MiB, of level 3
/// 1 GiB. The root is the table of level [`LEVELS`](Self::LEVELS). Under `cfg(loom)` and
/// `cfg(shuttle)` tables have only two entries, so that a model's tree stays small. Levels and bits
/// stay the same.
///
/// # Safety
///
/// An MMU follows each entry that [`Format`](super::Format) takes for a link, so these hold:
/// 1. The constants satisfy [`CHECKED`](Self::CHECKED), or code that makes leaves does not compile.
/// 2. [`is_leaf_kind`](Self::is_leaf_kind) is false for every [`TABLE`](Self::TABLE) value with a
///    frame number. It is true for every [`LEAF`](Self::LEAF) value with the
///    [`leaf_kind`](Self::leaf_kind) of its level, whatever other bits of a leaf are set. Both
///    depend on their arguments only.
/// 3. They match the hardware: the bits it sets ([`HARDWARE_UPDATES`](Self::HARDWARE_UPDATES)), and
///    the entries it takes for links.
pub unsafe trait EntryLayout: Copy + Debug + Send + Sync + 'static {
    /// The format's name in messages.
    const NAME: &'static str;

    // Geometry.

    /// The number of levels. The root is the table of this level.
    const LEVELS: u32;
    /// log2 of the entries of a table below the root.
    const INDEX_BITS: u32 = if cfg!(any(loom, shuttle)) { 1 } else { 9 };
    /// log2 of the entries of the root.
    const ROOT_INDEX_BITS: u32 = Self::INDEX_BITS;
    /// The highest level that may hold leaves. All levels below may hold them too. It is 3, as no
    /// [`PageSize`](pageferry_addr::PageSize) is larger. A processor may support less: leaves of 1
    /// GiB (and EPT leaves of 2 MiB) are capabilities to test for.
    const MAX_LEAF_LEVEL: u32 = 3;
    /// The number of bits of a guest frame number that can be mapped.
    const GFN_BITS: u32 = (Self::LEVELS - 1) * Self::INDEX_BITS + Self::ROOT_INDEX_BITS;
    /// The first guest frame that cannot be mapped.
    const GFN_LIMIT: Gfn = Gfn(1 << Self::GFN_BITS);
    /// The size of the root in bytes. The root is aligned to it.
    const ROOT_BYTES: usize = 8 << Self::ROOT_INDEX_BITS;

    // The hardware's behaviour.

    /// The source of the accessed state.
    const ACCESSED_BY: AccessedBy;
    /// The source of the dirty state.
    const DIRTY_BY: DirtyBy;
    /// The bits that the hardware may set in a present leaf at any time. It never clears one. A new
    /// value for such a leaf is stored by compare-exchange. Otherwise a bit that the hardware has
    /// just set is lost.
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
    /// Whether the format needs break-before-make. If so, some changes of a live entry must first
    /// store a value that faults, then flush the TLBs. Those are changes between leaf and table, of
    /// the frame, and of the memory type. [`FROZEN`](Self::FROZEN) is such a value.
    const BREAK_BEFORE_MAKE: bool;
    /// The entries that the faulting vCPU's own TLB may keep, so that the same access faults again:
    /// see [`Mapped::local_flush`](crate::Mapped::local_flush).
    const TLB_AFTER_FAULT: TlbAfterFault;

    // The positions of the fields.

    /// The lowest bit of the frame number.
    const PFN_SHIFT: u32;
    /// The width of the frame number.
    const PFN_BITS: u32;
    /// The first host frame that does not fit an entry. Higher frame numbers are truncated, so the
    /// platform must not hand them out.
    const PFN_LIMIT: Pfn = Pfn(1 << Self::PFN_BITS);
    /// The bit that all leaves and table pointers have, and no other entry has.
    const PRESENT: u64;
    /// The hardware ignores an entry in which none of these bits is set.
    const HARDWARE_PRESENT: u64;
    /// The bits of a table pointer besides the frame.
    const TABLE: u64;
    /// The bits of every accessed leaf: present, readable.
    const LEAF: u64;
    /// The bits of a leaf that allows stores. Without all of them, stores fault.
    const WRITE: u64;
    /// The bits of a leaf that allows fetches.
    const EXECUTE: u64;
    /// The bits of a leaf that does not allow fetches.
    const NO_EXECUTE: u64;
    /// The accessed bit, or 0 if there is none.
    const ACCESSED: u64;
    /// The dirty bit, or 0 if write protection keeps the dirty state.
    const DIRTY: u64;
    /// The field of the memory type.
    const MEMORY: u64;
    /// The software bit of [`Writes::MmuForbids`](super::Writes::MmuForbids) and
    /// [`Writes::Allowed`](super::Writes::Allowed).
    const HOST_WRITABLE: u64;
    /// The software bit of [`Writes::Allowed`](super::Writes::Allowed). Alone it is
    /// [`Writes::AllowedLoggedByFault`](super::Writes::AllowedLoggedByFault).
    const MMU_WRITABLE: u64;
    /// The distance by which the permissions of a leaf that is not accessed are shifted up
    /// ([`AccessedBy::SavedPermissions`] only).
    const SAVED_SHIFT: u32 = 0;
    /// The permissions that are shifted.
    const SAVED: u64 = 0;

    /// The bits of a memory type.
    fn memory_bits(memory: MemoryType) -> u64;
    /// The bits that mark a leaf of `level`, besides [`LEAF`](Self::LEAF).
    fn leaf_kind(level: u32) -> u64;
    /// Whether an entry that is present is a leaf and not a table pointer.
    fn is_leaf_kind(entry: u64, level: u32) -> bool;

    // Values that translate nothing.

    /// An empty entry.
    const NON_PRESENT: u64 = 0;
    /// The value of an entry that only the thread that stored it may change. The hardware stops at
    /// it.
    ///
    /// Like KVM's, it sets no frame bits, since the L1 Terminal Fault flaw uses frames of
    /// non-present entries. Unlike KVM's 0x5a0, it leaves bit 10 clear: under mode-based execute
    /// control EPT takes that bit as present.
    const FROZEN: u64 = 0x1a0;
    /// The bit that marks MMIO entries among entries that are not present.
    const MMIO: u64 = 1 << 3;
    /// The width of the guest frame number in an MMIO marker.
    const MMIO_GFN_BITS: u32 = 40;
    /// The width of the generation in an MMIO marker. See
    /// [`must_forget_mmio`](crate::must_forget_mmio).
    const MMIO_GENERATION_BITS: u32 = MMIO_LOW_BITS + 63 - MMIO_GFN_SHIFT - Self::MMIO_GFN_BITS;

    /// Fails to compile if fields overlap or values are ambiguous.
    /// [`Format::leaf`](super::Format::leaf) evaluates it.
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

/// The layout of an MMIO marker, the same in all formats:
///
/// | bits | contents |
/// |---|---|
/// | 3 | [`EntryLayout::MMIO`] |
/// | 9:4 | low bits of the generation |
/// | 11:10 | clear, for EPT and its software bit |
/// | from 12 | guest frame |
/// | up to 62 | high bits of the generation |
/// | 63 | clear: with it EPT could suppress a #VE |
pub(super) const MMIO_LOW_SHIFT: u32 = 4;
pub(super) const MMIO_LOW_BITS: u32 = 6;
pub(super) const MMIO_GFN_SHIFT: u32 = 12;

pub(super) const fn low_bits(count: u32) -> u64 {
    (1 << count) - 1
}

/// The address of a root, for a register of the hardware.
///
/// # Panics
/// If an entry cannot hold the frame, or the frame does not begin at a multiple of the root's size.
pub(super) fn root_address<F: EntryLayout>(root: Pfn) -> u64 {
    assert!(
        root < F::PFN_LIMIT,
        "{root:?} is no root of {}: expected a frame below {:?}",
        F::NAME,
        F::PFN_LIMIT
    );
    let frames = (F::ROOT_BYTES as u64 >> PAGE_SHIFT).max(1);
    assert!(
        root.0.is_multiple_of(frames),
        "{root:?} is no root of {}: expected a multiple of {frames} frames",
        F::NAME
    );
    root.0 << PAGE_SHIFT
}
