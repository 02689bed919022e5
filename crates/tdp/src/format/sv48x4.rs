//! The Sv48x4 format: how an address picks entries, and what the bits of an entry mean.
//!
//! Source: The RISC-V Instruction Set Manual, Volume II, "Hypervisor" extension, section "Guest Physical
//! Address Translation" (the root's two extra index bits, the U bit), and "Supervisor-Level ISA", sections
//! "Sv39" to "Sv48" (the entry's fields and their meaning).

use core::fmt;
use pageferry_addr::{Gfn, Pfn};

/// The geometry of an Sv48x4 table tree.
///
/// Four levels, numbered as in [`PageSize::level`](pageferry_addr::PageSize::level): tables of level 1 hold
/// 4 KiB leaves, the root is level 4. Under `cfg(loom)` tables shrink to two entries, so that a model's whole
/// tree stays small; the levels remain.
#[derive(Clone, Copy, Debug)]
pub struct Sv48x4;

impl Sv48x4 {
    /// How many levels there are.
    pub const LEVELS: u32 = 4;
    /// log2 of the entries of a table below the root.
    pub const INDEX_BITS: u32 = if cfg!(loom) { 1 } else { 9 };
    /// log2 of the entries of the root: two more ("x4"), so that the root fills 16 KiB.
    pub const ROOT_INDEX_BITS: u32 = if cfg!(loom) { 1 } else { 11 };
    /// The first guest frame that cannot be mapped: 2^38, as guest-physical addresses have 50 bits.
    pub const GFN_LIMIT: Gfn =
        Gfn(1 << ((Self::LEVELS - 1) * Self::INDEX_BITS + Self::ROOT_INDEX_BITS));
    /// The first host frame an entry has no room for: 2^44, as physical addresses have 56 bits.
    pub const PFN_LIMIT: Pfn = Pfn(1 << 44);

    /// How many guest frames one entry of a table of `level` covers.
    #[inline]
    #[must_use]
    pub const fn frames_per_entry(level: u32) -> u64 {
        1 << ((level - 1) * Self::INDEX_BITS)
    }

    /// Which entry of a table of `level` leads to `gfn`; bits of `gfn` above the format's are ignored.
    #[inline]
    #[must_use]
    pub const fn index(gfn: Gfn, level: u32) -> usize {
        let bits = if level == Self::LEVELS {
            Self::ROOT_INDEX_BITS
        } else {
            Self::INDEX_BITS
        };
        ((gfn.0 >> ((level - 1) * Self::INDEX_BITS)) & ((1 << bits) - 1)) as usize
    }
}

/// An entry's value.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub struct Entry(pub u64);

impl Entry {
    /// No translation, and no table either.
    pub const ABSENT: Self = Self(0);

    /// V: the entry is in use.
    pub const VALID: u64 = 1 << 0;
    /// R: loads are allowed.
    pub const READ: u64 = 1 << 1;
    /// W: stores are allowed.
    pub const WRITE: u64 = 1 << 2;
    /// X: instruction fetches are allowed.
    pub const EXECUTE: u64 = 1 << 3;
    /// U: user mode may use it. Every guest access counts as one by user mode at this stage, so leaves need it.
    pub const USER: u64 = 1 << 4;
    /// G: global; without meaning at this stage, and clear in all entries made here.
    pub const GLOBAL: u64 = 1 << 5;
    /// A: accessed.
    pub const ACCESSED: u64 = 1 << 6;
    /// D: dirty.
    pub const DIRTY: u64 = 1 << 7;
    /// The lowest bit of the frame number.
    pub const PPN_SHIFT: u32 = 10;
    /// The bits of the frame number: 53 down to 10.
    pub const PPN_MASK: u64 = ((1 << 44) - 1) << Self::PPN_SHIFT;

    /// What makes a valid entry a leaf: any of R, W, X.
    const LEAF: u64 = Self::READ | Self::WRITE | Self::EXECUTE;

    /// A leaf that maps `pfn` for loads and fetches, and for stores where `writable`.
    ///
    /// A is set, and D where stores are allowed: a hart without hardware updates of A and D (Svadu) faults
    /// on a clear one, and dirty logging here works by write protection.
    #[inline]
    #[must_use]
    pub const fn leaf(pfn: Pfn, writable: bool) -> Self {
        let write = if writable {
            Self::WRITE | Self::DIRTY
        } else {
            0
        };
        let read = Self::VALID | Self::READ | Self::EXECUTE | Self::USER | Self::ACCESSED;
        Self(Self::frame(pfn) | read | write)
    }

    /// A pointer to the next table, which fills frame `pfn`. A, D and U stay clear, as reserved there.
    #[inline]
    #[must_use]
    pub const fn table(pfn: Pfn) -> Self {
        Self(Self::frame(pfn) | Self::VALID)
    }

    const fn frame(pfn: Pfn) -> u64 {
        (pfn.0 << Self::PPN_SHIFT) & Self::PPN_MASK
    }

    /// Whether it translates.
    #[inline]
    #[must_use]
    pub const fn is_leaf(self) -> bool {
        self.0 & Self::VALID != 0 && self.0 & Self::LEAF != 0
    }

    /// Whether it points to a table.
    #[inline]
    #[must_use]
    pub const fn is_table(self) -> bool {
        self.0 & Self::VALID != 0 && self.0 & Self::LEAF == 0
    }

    /// Whether it translates stores.
    #[inline]
    #[must_use]
    pub const fn is_writable(self) -> bool {
        self.is_leaf() && self.0 & Self::WRITE != 0
    }

    /// The frame it leads to.
    #[inline]
    #[must_use]
    pub const fn pfn(self) -> Pfn {
        Pfn((self.0 & Self::PPN_MASK) >> Self::PPN_SHIFT)
    }

    /// The same leaf without permission to store, and clean.
    #[inline]
    #[must_use]
    pub const fn write_protected(self) -> Self {
        Self(self.0 & !(Self::WRITE | Self::DIRTY))
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "entry {:#018x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Figure "Sv48 page table entry": N 63, PBMT 62:61, reserved 60:54, PPN[3] 53:37, PPN[2] 36:28,
    // PPN[1] 27:19, PPN[0] 18:10, RSW 9:8, D 7, A 6, G 5, U 4, X 3, W 2, R 1, V 0.
    #[test]
    fn permission_bits_are_where_the_figure_has_them() {
        let bits = [
            Entry::VALID,
            Entry::READ,
            Entry::WRITE,
            Entry::EXECUTE,
            Entry::USER,
            Entry::GLOBAL,
            Entry::ACCESSED,
            Entry::DIRTY,
        ];
        for (position, bit) in bits.into_iter().enumerate() {
            assert_eq!(bit, 1 << position);
        }
        assert_eq!(Entry::PPN_MASK, 0x003f_ffff_ffff_fc00);
    }

    #[test]
    fn each_bit_of_the_frame_number_has_its_place() {
        for bit in 0..44 {
            let pfn = Pfn(1 << bit);
            assert_eq!(Entry::table(pfn).0, 1 << (bit + 10) | 1);
            assert_eq!(Entry::leaf(pfn, false).0, 1 << (bit + 10) | 0b0101_1011);
            assert_eq!(Entry::leaf(pfn, true).0, 1 << (bit + 10) | 0b1101_1111);
            assert_eq!(Entry::leaf(pfn, true).pfn(), pfn);
            assert_eq!(Entry::table(pfn).pfn(), pfn);
        }
    }

    #[test]
    fn a_frame_number_never_reaches_the_reserved_bits() {
        let all = Entry::leaf(Pfn(u64::MAX), true);
        assert_eq!(all.0 >> 54, 0);
        assert_eq!(all.0 & 0b11_0000_0000, 0, "RSW is software's");
    }

    #[test]
    fn valid_and_rwx_decide_the_kind() {
        // Table "Encoding of PTE R/W/X fields": R=W=X=0 points to the next level, all else is a leaf.
        for low in 0..16u64 {
            let entry = Entry(low);
            let valid = low & 1 != 0;
            assert_eq!(entry.is_leaf(), valid && low & 0b1110 != 0);
            assert_eq!(entry.is_table(), valid && low & 0b1110 == 0);
        }
        assert!(!Entry::ABSENT.is_leaf() && !Entry::ABSENT.is_table());
    }

    #[test]
    fn write_protection_is_the_read_only_leaf() {
        let leaf = Entry::leaf(Pfn(0x1234), true);
        assert!(leaf.is_writable());
        assert_eq!(leaf.write_protected(), Entry::leaf(Pfn(0x1234), false));
        assert!(!leaf.write_protected().is_writable());
    }

    // Figure "Sv48x4 guest physical address": VPN[3] 49:39 (11 bits), VPN[2] 38:30, VPN[1] 29:21,
    // VPN[0] 20:12, page offset 11:0.
    #[test]
    fn each_address_bit_picks_at_its_level() {
        for bit in 12..50u32 {
            let gfn = Gfn(1 << (bit - 12));
            let (level, low) = match bit {
                12..=20 => (1, 12),
                21..=29 => (2, 21),
                30..=38 => (3, 30),
                _ => (4, 39),
            };
            for other in 1..=Sv48x4::LEVELS {
                let expected = if other == level { 1 << (bit - low) } else { 0 };
                assert_eq!(Sv48x4::index(gfn, other), expected, "bit {bit}");
            }
        }
        assert_eq!(Sv48x4::GFN_LIMIT.0 << 12, 1 << 50);
        assert_eq!(Sv48x4::PFN_LIMIT.0 << 12, 1 << 56);
        let spans = [1, 2, 3, 4].map(|level| Sv48x4::frames_per_entry(level) << 12);
        assert_eq!(spans, [4096, 2 << 20, 1 << 30, 512 << 30]);
    }
}
