#![expect(
    unsafe_code,
    reason = "a layout for tables that are as small as can be"
)]
//! A format of two levels.

use pageferry_tdp::format::{AccessedBy, DirtyBy, EntryLayout, Ept, MemoryType, TlbAfterFault};

/// EPT's entries in two levels of two. Frames 0 and 1 share a table, or are a large page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Two<const AD: bool, const BREAKS: bool>;

/// With accessed and dirty bits.
pub(crate) type WithBits = Two<true, false>;
/// Without these bits: aging takes permissions, and dirty equals writable.
pub(crate) type WithoutBits = Two<false, false>;
/// With these bits, and with break-before-make for changes of size.
pub(crate) type Breaking = Two<true, true>;

// SAFETY: EPT's, with fewer levels.
unsafe impl<const AD: bool, const BREAKS: bool> EntryLayout for Two<AD, BREAKS> {
    const NAME: &'static str = "two levels";
    const LEVELS: u32 = 2;
    const MAX_LEAF_LEVEL: u32 = 2;
    const ACCESSED_BY: AccessedBy = Ept::<4, AD>::ACCESSED_BY;
    const DIRTY_BY: DirtyBy = Ept::<4, AD>::DIRTY_BY;
    const BREAK_BEFORE_MAKE: bool = BREAKS;
    const TLB_AFTER_FAULT: TlbAfterFault = TlbAfterFault::Forgets;
    const PFN_SHIFT: u32 = Ept::<4, AD>::PFN_SHIFT;
    const PFN_BITS: u32 = Ept::<4, AD>::PFN_BITS;
    const PRESENT: u64 = Ept::<4, AD>::PRESENT;
    const HARDWARE_PRESENT: u64 = Ept::<4, AD>::HARDWARE_PRESENT;
    const TABLE: u64 = Ept::<4, AD>::TABLE;
    const LEAF: u64 = Ept::<4, AD>::LEAF;
    const WRITE: u64 = Ept::<4, AD>::WRITE;
    const EXECUTE: u64 = Ept::<4, AD>::EXECUTE;
    const NO_EXECUTE: u64 = Ept::<4, AD>::NO_EXECUTE;
    const ACCESSED: u64 = Ept::<4, AD>::ACCESSED;
    const DIRTY: u64 = Ept::<4, AD>::DIRTY;
    const MEMORY: u64 = Ept::<4, AD>::MEMORY;
    const HOST_WRITABLE: u64 = Ept::<4, AD>::HOST_WRITABLE;
    const MMU_WRITABLE: u64 = Ept::<4, AD>::MMU_WRITABLE;
    const SAVED_SHIFT: u32 = Ept::<4, AD>::SAVED_SHIFT;
    const SAVED: u64 = Ept::<4, AD>::SAVED;

    fn memory_bits(memory: MemoryType) -> u64 {
        Ept::<4, AD>::memory_bits(memory)
    }

    fn leaf_kind(level: u32) -> u64 {
        Ept::<4, AD>::leaf_kind(level)
    }

    fn is_leaf_kind(entry: u64, level: u32) -> bool {
        Ept::<4, AD>::is_leaf_kind(entry, level)
    }
}
