//! The leaf sizes of page tables.

use crate::{Gfn, PAGE_SHIFT};

/// A leaf size: 4 KiB, 2 MiB or 1 GiB (a 4 KiB granule, 512 entries per table).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageSize {
    /// 4 KiB, level 1.
    Size4K,
    /// 2 MiB, level 2.
    Size2M,
    /// 1 GiB, level 3.
    Size1G,
}

impl PageSize {
    /// All sizes, smallest first.
    pub const ALL: [Self; 3] = [Self::Size4K, Self::Size2M, Self::Size1G];

    /// The page-table level whose leaves have this size, counting from 1.
    #[inline]
    #[must_use]
    pub const fn level(self) -> u32 {
        match self {
            Self::Size4K => 1,
            Self::Size2M => 2,
            Self::Size1G => 3,
        }
    }

    /// The size in base pages.
    ///
    /// ```
    /// use pageferry_addr::PageSize;
    /// assert_eq!(PageSize::Size2M.pages(), 512);
    /// assert_eq!(PageSize::Size1G.bytes(), 1 << 30);
    /// ```
    #[inline]
    #[must_use]
    pub const fn pages(self) -> u64 {
        1 << (9 * (self.level() - 1))
    }

    /// The size in bytes.
    #[inline]
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.pages() << PAGE_SHIFT
    }

    /// `gfn` rounded down to a multiple of this size.
    #[inline]
    #[must_use]
    pub const fn align_down(self, gfn: Gfn) -> Gfn {
        Gfn(gfn.0 & !(self.pages() - 1))
    }

    /// Whether `gfn` is a multiple of this size.
    #[inline]
    #[must_use]
    pub const fn is_aligned(self, gfn: Gfn) -> bool {
        gfn.0 & (self.pages() - 1) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_follows_the_size() {
        assert_eq!(PageSize::Size2M.align_down(Gfn(1023)), Gfn(512));
        assert!(PageSize::Size2M.is_aligned(Gfn(1024)));
        assert!(!PageSize::Size1G.is_aligned(Gfn(1024)));
        assert!(PageSize::Size4K.is_aligned(Gfn(7)));
    }
}
