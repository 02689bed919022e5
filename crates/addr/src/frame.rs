//! Addresses and frame numbers.

use core::fmt;

/// log2 of the base page size.
pub const PAGE_SHIFT: u32 = 12;
/// The base page size in bytes: 4096.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;
/// The bits of an address inside its base page.
pub const PAGE_MASK: u64 = PAGE_SIZE - 1;

macro_rules! word {
    ($(#[$doc:meta])* $name:ident, $show:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// The value plus `delta`, or `None` past `u64::MAX`.
            #[inline]
            #[must_use]
            pub const fn checked_add(self, delta: u64) -> Option<Self> {
                match self.0.checked_add(delta) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// The distance of `self` above `base`, or `None` if it lies below.
            #[inline]
            #[must_use]
            pub const fn checked_offset_from(self, base: Self) -> Option<u64> {
                self.0.checked_sub(base.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($show, " {:#x}"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

word!(
    /// A guest-physical address, in bytes.
    Gpa, "gpa"
);
word!(
    /// A guest frame number: a guest-physical address in base pages.
    Gfn, "gfn"
);
word!(
    /// A host-virtual address, in bytes.
    Hva, "hva"
);
word!(
    /// A frame number on the host's side of a second-stage table, in base pages.
    ///
    /// The platform of the table chooses the address space in which it counts.
    Pfn, "pfn"
);
word!(
    /// The index of a base page in a VM's RAM, counted from its first byte and without holes.
    ///
    /// It is the index into bitmaps of page states. A [`Gfn`] counts guest-physical address space,
    /// which has holes. The VM's memory layout translates between the two.
    RamPage, "ram page"
);

impl Gpa {
    /// The frame that holds this address.
    #[inline]
    #[must_use]
    pub const fn gfn(self) -> Gfn {
        Gfn(self.0 >> PAGE_SHIFT)
    }

    /// The offset inside the base page, in bytes.
    #[inline]
    #[must_use]
    pub const fn page_offset(self) -> u64 {
        self.0 & PAGE_MASK
    }

    /// Whether the address is the first byte of a base page.
    #[inline]
    #[must_use]
    pub const fn is_page_aligned(self) -> bool {
        self.page_offset() == 0
    }
}

impl Gfn {
    /// The largest frame number whose address still fits 64 bits.
    pub const MAX: Self = Self(u64::MAX >> PAGE_SHIFT);

    /// The address of the frame's first byte.
    ///
    /// A frame number above [`Gfn::MAX`] loses its top bits, as an address has no room for them.
    ///
    /// ```
    /// use pageferry_addr::{Gfn, Gpa};
    /// assert_eq!(Gfn(3).gpa(), Gpa(0x3000));
    /// assert_eq!(Gpa(0x3fff).gfn(), Gfn(3));
    /// ```
    #[inline]
    #[must_use]
    pub const fn gpa(self) -> Gpa {
        Gpa(self.0 << PAGE_SHIFT)
    }
}

impl Hva {
    /// Whether the address is the first byte of a base page.
    #[inline]
    #[must_use]
    pub const fn is_page_aligned(self) -> bool {
        self.0 & PAGE_MASK == 0
    }
}

impl RamPage {
    /// The byte offset of this page from the start of RAM.
    #[inline]
    #[must_use]
    pub const fn byte_offset(self) -> u64 {
        self.0 << PAGE_SHIFT
    }

    /// The index as `usize`, for bitmaps and slices.
    #[inline]
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::format;

    #[test]
    fn addresses_and_frames_convert() {
        assert_eq!(Gpa(0x1234).gfn(), Gfn(1));
        assert_eq!(Gpa(0x1234).page_offset(), 0x234);
        assert!(!Gpa(0x1234).is_page_aligned());
        assert!(Gpa(0x2000).is_page_aligned());
        assert_eq!(Gfn::MAX.gpa().gfn(), Gfn::MAX);
    }

    #[test]
    fn overflow_is_an_answer_not_a_wrap() {
        assert_eq!(Gpa(u64::MAX).checked_add(1), None);
        assert_eq!(Gfn(5).checked_offset_from(Gfn(6)), None);
        assert_eq!(Gfn(6).checked_offset_from(Gfn(5)), Some(1));
    }

    #[test]
    fn shown_in_hexadecimal_with_the_kind() {
        assert_eq!(format!("{:?} {}", Gfn(16), Gfn(16)), "gfn 0x10 0x10");
    }
}
