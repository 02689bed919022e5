//! The place of RAM in guest-physical address space.
//!
//! A VMM may choose its regions ([`RamLayout::new`]). By default ([`RamLayout::for_memory`]) RAM
//! starts at address 0. A hole from 3 GiB to 4 GiB is left for devices. RAM that does not fit below
//! the hole continues at 4 GiB. Both engines use the same layout.
//!
//! In a bitmap of RAM pages, the bits of each region begin with a 64-bit word. So a part of such a
//! bitmap can be a slot's dirty log or userfault bitmap, whose words KVM counts from the slot.

use crate::Backing;
use core::ops::Range;
use pageferry_addr::{Gfn, Gpa, PAGE_SIZE, RamPage};

/// The most vCPUs that a machine may have.
pub const MAX_VCPUS: u32 = 1024;
/// The doorbell: a guest that stores here leaves with an MMIO exit. It is inside the hole, so never
/// RAM.
pub const DOORBELL_GPA: Gpa = Gpa(0xD000_0000);

/// First address of the hole.
const HOLE_START: u64 = 3 << 30;
/// First address behind the hole.
const HOLE_END: u64 = 4 << 30;
/// The pages of a word of a bitmap.
const PAGES_PER_WORD: u64 = u64::BITS as u64;
const _: () = assert!((HOLE_START / PAGE_SIZE).is_multiple_of(PAGES_PER_WORD));
/// The most RAM that a machine may have: 16 TiB.
const MAX_MEMORY: u64 = 16 << 40;
/// The most regions that RAM may have.
const MAX_REGIONS: usize = 64;

/// A piece of RAM that is contiguous in guest-physical address space. Each has a memory slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RamRegion {
    /// The id of its memory slot.
    pub slot: u32,
    /// Its first frame.
    pub gfn: Gfn,
    /// The number of pages.
    pub pages: u64,
    /// The RAM index of its first page, a multiple of 64.
    pub first: RamPage,
}

impl RamRegion {
    /// The indices of its words in a bitmap of all RAM pages. No other region has bits there.
    ///
    /// ```
    /// use pageferry_machine::RamLayout;
    ///
    /// let layout = RamLayout::for_memory((3 << 30) + 65 * 4096)?;
    /// assert_eq!(layout.regions()[1].words(), 12_288..12_290);
    /// # Ok::<(), pageferry_machine::LayoutError>(())
    /// ```
    #[must_use]
    pub const fn words(&self) -> Range<usize> {
        let first = (self.first.0 / PAGES_PER_WORD) as usize;
        first..first + self.pages.div_ceil(PAGES_PER_WORD) as usize
    }
}

/// All regions of a machine's RAM, ascending both in gfn and in RAM index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamLayout {
    regions: Vec<RamRegion>,
    pages: u64,
}

/// A size that no machine can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// Zero bytes.
    #[error("a machine needs at least one page of memory, not 0 bytes")]
    Empty,
    /// Not a multiple of the page size.
    #[error("memory must be a multiple of 4096 bytes, not {0} bytes")]
    Unaligned(u64),
    /// More than any machine may have.
    #[error("{0} bytes of memory are more than the maximum of a machine, 16 TiB")]
    TooLarge(u64),
    /// Not a multiple of the page of its backing.
    #[error(
        "memory backed by {backing} must be a multiple of {} bytes, not {bytes} bytes",
        backing.page_size().bytes()
    )]
    Backing {
        /// The backing.
        backing: Backing,
        /// The memory.
        bytes: u64,
    },
    /// Too many regions.
    #[error("RAM has at most {MAX_REGIONS} regions, not {0}")]
    Regions(usize),
    /// A region of RAM that cannot be where it is.
    #[error("a region of {bytes} bytes at {start} {why}")]
    Region {
        /// Its guest-physical address.
        start: Gpa,
        /// Its size.
        bytes: u64,
        /// What is wrong, and what would be right.
        why: &'static str,
    },
    /// Zero or too many vCPUs.
    #[error("a machine has 1 to {MAX_VCPUS} vCPUs, not {0}")]
    Vcpus(u32),
}

impl RamLayout {
    /// The layout with these regions: their guest-physical addresses and sizes in bytes, ascending.
    ///
    /// ```
    /// use pageferry_addr::{Gfn, Gpa, RamPage};
    /// use pageferry_machine::RamLayout;
    ///
    /// let layout = RamLayout::new(&[(Gpa(0), 512 << 10), (Gpa(1 << 30), 4096)])?;
    /// assert_eq!(layout.pages(), 129);
    /// assert_eq!(layout.gfn_of(RamPage(128)), Some(Gfn(1 << 18)));
    /// assert!(RamLayout::new(&[(Gpa(0), 4096), (Gpa(1 << 30), 4096)]).is_err());
    /// # Ok::<(), pageferry_machine::LayoutError>(())
    /// ```
    ///
    /// # Errors
    /// When there is no region, or more than 64 or 16 TiB of them. When a region has no whole
    /// pages, begins before the end of the one before, or leaves the address space. When a region
    /// before the last is no multiple of 256 KiB, so that it would share a word of bitmaps with the
    /// next.
    pub fn new(regions: &[(Gpa, u64)]) -> Result<Self, LayoutError> {
        if regions.len() > MAX_REGIONS {
            return Err(LayoutError::Regions(regions.len()));
        }
        let mut layout = Self {
            regions: Vec::with_capacity(regions.len()),
            pages: 0,
        };
        let mut free = 0;
        for (slot, &(start, bytes)) in (0..).zip(regions) {
            let end = start.0.checked_add(bytes);
            let whole = |value: u64| value.is_multiple_of(PAGE_SIZE);
            let wrong = if bytes == 0 || !whole(start.0) || !whole(bytes) {
                Some("is not of whole pages: use multiples of 4096")
            } else if start.0 < free {
                Some("begins before the end of the region before: sort the regions")
            } else if !layout.pages.is_multiple_of(PAGES_PER_WORD) {
                Some("follows a region that is no multiple of 262144 bytes: only the last may be")
            } else if end.is_none() {
                Some("leaves the address space")
            } else {
                None
            };
            if let Some(why) = wrong {
                return Err(LayoutError::Region { start, bytes, why });
            }
            layout.regions.push(RamRegion {
                slot,
                gfn: start.gfn(),
                pages: bytes / PAGE_SIZE,
                first: RamPage(layout.pages),
            });
            free = end.unwrap_or(u64::MAX);
            layout.pages = layout.pages.saturating_add(bytes / PAGE_SIZE);
            if layout.pages > MAX_MEMORY / PAGE_SIZE {
                return Err(LayoutError::TooLarge(
                    layout.pages.saturating_mul(PAGE_SIZE),
                ));
            }
        }
        match layout.pages {
            0 => Err(LayoutError::Empty),
            _ => Ok(layout),
        }
    }

    /// The layout of `bytes` bytes of RAM.
    ///
    /// ```
    /// use pageferry_addr::{Gfn, RamPage};
    /// use pageferry_machine::RamLayout;
    ///
    /// let layout = RamLayout::for_memory(4 << 30)?;
    /// assert_eq!(layout.regions().len(), 2);
    /// assert_eq!(layout.gfn_of(RamPage((3 << 30) / 4096)), Some(Gfn((4 << 30) / 4096)));
    /// # Ok::<(), pageferry_machine::LayoutError>(())
    /// ```
    ///
    /// # Errors
    /// When `bytes` is zero, not a multiple of 4096, or more than 16 TiB.
    pub fn for_memory(bytes: u64) -> Result<Self, LayoutError> {
        if bytes == 0 {
            return Err(LayoutError::Empty);
        }
        if !bytes.is_multiple_of(PAGE_SIZE) {
            return Err(LayoutError::Unaligned(bytes));
        }
        if bytes > MAX_MEMORY {
            return Err(LayoutError::TooLarge(bytes));
        }
        let low = bytes.min(HOLE_START);
        let (low, high) = ((Gpa(0), low), (Gpa(HOLE_END), bytes - low));
        match high {
            (_, 0) => Self::new(&[low]),
            _ => Self::new(&[low, high]),
        }
    }

    /// The regions, ascending.
    #[must_use]
    pub fn regions(&self) -> &[RamRegion] {
        &self.regions
    }

    /// The number of pages of RAM.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The number of bytes of RAM.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pages * PAGE_SIZE
    }

    /// The RAM index of a guest frame, or `None` where there is no RAM.
    #[must_use]
    pub fn page_of(&self, gfn: Gfn) -> Option<RamPage> {
        self.regions.iter().find_map(|r| {
            let offset = gfn.checked_offset_from(r.gfn)?;
            (offset < r.pages).then_some(RamPage(r.first.0 + offset))
        })
    }

    /// Whether all of `bytes` bytes from `gpa` are RAM, in one region.
    ///
    /// ```
    /// use pageferry_addr::Gpa;
    /// use pageferry_machine::RamLayout;
    ///
    /// let layout = RamLayout::for_memory(1 << 20)?;
    /// assert!(layout.contains(Gpa((1 << 20) - 8), 8));
    /// assert!(!layout.contains(Gpa((1 << 20) - 8), 9));
    /// assert!(!layout.contains(Gpa(u64::MAX), 2));
    /// # Ok::<(), pageferry_machine::LayoutError>(())
    /// ```
    #[must_use]
    pub fn contains(&self, gpa: Gpa, bytes: u64) -> bool {
        let Some(end) = gpa.0.checked_add(bytes) else {
            return false;
        };
        self.regions.iter().any(|region| {
            let start = region.gfn.gpa().0;
            start <= gpa.0 && end <= start + region.pages * PAGE_SIZE
        })
    }

    /// The guest frame of a RAM index, or `None` behind the last page.
    #[must_use]
    pub fn gfn_of(&self, page: RamPage) -> Option<Gfn> {
        self.regions.iter().find_map(|r| {
            let offset = page.checked_offset_from(r.first)?;
            (offset < r.pages).then_some(Gfn(r.gfn.0 + offset))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_cannot_be_are_refused_with_their_value() {
        assert_eq!(RamLayout::for_memory(0), Err(LayoutError::Empty));
        assert_eq!(
            RamLayout::for_memory(4097),
            Err(LayoutError::Unaligned(4097))
        );
        let huge = MAX_MEMORY + PAGE_SIZE;
        assert_eq!(
            RamLayout::for_memory(huge),
            Err(LayoutError::TooLarge(huge))
        );
    }

    #[test]
    fn regions_that_cannot_be_are_refused_with_what_would_be_right() {
        let why = |regions: &[(u64, u64)]| {
            let regions: Vec<_> = regions.iter().map(|&(at, n)| (Gpa(at), n)).collect();
            RamLayout::new(&regions).unwrap_err().to_string()
        };
        const WORD: u64 = 256 << 10;
        assert!(why(&[]).contains("at least one page"));
        for odd in [[(0, 0)], [(0, 4097)], [(1, 4096)]] {
            assert!(why(&odd).contains("multiples of 4096"), "{odd:?}");
        }
        for order in [[(WORD, WORD), (0, 4096)], [(0, 2 * WORD), (WORD, WORD)]] {
            assert!(why(&order).contains("sort the regions"), "{order:?}");
        }
        assert!(why(&[(0, 4096), (WORD, WORD)]).contains("only the last"));
        assert!(why(&[(u64::MAX - 4095, 8192)]).contains("address space"));
        assert!(why(&[(0, MAX_MEMORY), (MAX_MEMORY, 4096)]).contains("16 TiB"));
        let many: Vec<_> = (0..65).map(|n| (n * WORD, WORD)).collect();
        assert!(why(&many).contains("at most 64 regions, not 65"));
        assert!(RamLayout::new(&[(Gpa(WORD), WORD), (Gpa(WORD * 9), 4096)]).is_ok());
    }

    #[test]
    fn each_region_has_words_of_its_own() {
        for bytes in [PAGE_SIZE, 3 << 30, (3 << 30) + PAGE_SIZE, MAX_MEMORY] {
            let layout = RamLayout::for_memory(bytes).unwrap();
            let mut next = 0;
            for region in layout.regions() {
                assert!(region.first.0.is_multiple_of(64), "{region:?}");
                assert_eq!(region.words().start, next, "{region:?}");
                next = region.words().end;
            }
            assert_eq!(next as u64, layout.pages().div_ceil(64));
        }
    }

    #[test]
    fn the_hole_is_never_ram() {
        let layout = RamLayout::for_memory(5 << 30).unwrap();
        assert_eq!(layout.page_of(DOORBELL_GPA.gfn()), None);
        for page in [0, 1, 786_431, 786_432, layout.pages() - 1].map(RamPage) {
            assert_eq!(layout.page_of(layout.gfn_of(page).unwrap()), Some(page));
        }
        assert_eq!(layout.gfn_of(RamPage(layout.pages())), None);
        let end = layout.gfn_of(RamPage(layout.pages() - 1)).unwrap();
        assert_eq!(layout.page_of(Gfn(end.0 + 1)), None);
    }
}
