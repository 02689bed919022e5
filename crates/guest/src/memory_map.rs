//! The plan of a program's memory.
//!
//! RAM starts at guest-physical address 0. The part that does not fit below 3 GiB continues at 4
//! GiB. In order of RAM page index the plan is:
//!
//! 1. one page left zero, so that a null pointer reads no data,
//! 2. the code page,
//! 3. a control page for every vCPU,
//! 4. a stack page for every vCPU,
//! 5. the page tables (x86-64 only),
//! 6. the data pages in equal shares,
//! 7. the remainder of that division.

use crate::address_space::{self, MAX_MEMORY_BYTES, MAX_VCPUS};
use crate::tables;
use crate::{GuestError, Isa};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use std::ops::Range;

/// RAM page index of the code.
const CODE_PAGE: u64 = 1;
/// RAM page index of the first control page.
const CONTROL_PAGE: u64 = 2;

/// The plan of a program's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryMap {
    isa: Isa,
    vcpus: u32,
    memory_bytes: u64,
    share_pages: u64,
}

impl MemoryMap {
    /// Plans `memory_bytes` bytes of RAM for `vcpus` vCPUs.
    ///
    /// ```
    /// use pageferry_guest::{Isa, MemoryMap};
    ///
    /// let map = MemoryMap::new(Isa::Rv64, 2, 1 << 20)?;
    /// assert_eq!(map.share(0), 6..131);
    /// assert_eq!(map.share(1), 131..256);
    /// # Ok::<(), pageferry_guest::GuestError>(())
    /// ```
    ///
    /// # Errors
    /// When there are no vCPUs or more than [`MAX_VCPUS`]. When the memory is not a multiple of
    /// 4096 bytes, less than [`MemoryMap::minimum_memory`] or more than [`MAX_MEMORY_BYTES`].
    pub fn new(isa: Isa, vcpus: u32, memory_bytes: u64) -> Result<Self, GuestError> {
        if vcpus == 0 {
            return Err(GuestError::NoVcpus);
        }
        if vcpus > MAX_VCPUS {
            return Err(GuestError::TooManyVcpus { vcpus });
        }
        if !memory_bytes.is_multiple_of(PAGE_SIZE) {
            return Err(GuestError::MemoryNotPageAligned {
                bytes: memory_bytes,
            });
        }
        if memory_bytes > MAX_MEMORY_BYTES {
            return Err(GuestError::MemoryTooLarge {
                bytes: memory_bytes,
            });
        }
        let minimum = Self::minimum_memory(isa, vcpus);
        if memory_bytes < minimum {
            return Err(GuestError::MemoryTooSmall {
                bytes: memory_bytes,
                vcpus,
                minimum,
            });
        }
        let mut map = Self {
            isa,
            vcpus,
            memory_bytes,
            share_pages: 0,
        };
        map.share_pages = (map.ram_pages() - map.first_data_page()) / u64::from(vcpus);
        Ok(map)
    }

    /// The smallest memory for `vcpus` vCPUs, in bytes: the low area and one data page per vCPU.
    #[must_use]
    pub fn minimum_memory(isa: Isa, vcpus: u32) -> u64 {
        // The low area of the largest plan ends far below 1 GiB, so its tables are those of 1 GiB.
        let tables = match isa {
            Isa::X86_64 => tables::count(1 << 30),
            Isa::Rv64 => 0,
        };
        (CONTROL_PAGE + 3 * u64::from(vcpus) + tables) * PAGE_SIZE
    }

    /// The instruction set.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The number of vCPUs.
    #[must_use]
    pub fn vcpus(&self) -> u32 {
        self.vcpus
    }

    /// The size of RAM in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// The size of RAM in pages.
    #[must_use]
    pub fn ram_pages(&self) -> u64 {
        self.memory_bytes / PAGE_SIZE
    }

    /// The guest-physical address of a RAM page.
    #[must_use]
    pub fn gpa_of(page: RamPage) -> Gpa {
        address_space::gpa_of(page)
    }

    /// The code page.
    #[must_use]
    pub fn code_page(&self) -> RamPage {
        RamPage(CODE_PAGE)
    }

    /// The control page of a vCPU.
    ///
    /// # Panics
    /// When there is no such vCPU.
    #[must_use]
    pub fn control_page(&self, vcpu: u32) -> RamPage {
        self.assert_vcpu(vcpu);
        RamPage(CONTROL_PAGE + u64::from(vcpu))
    }

    /// The vCPU whose control page this is, if it is a control page.
    #[must_use]
    pub fn control_owner(&self, page: RamPage) -> Option<u32> {
        let vcpu = page.0.checked_sub(CONTROL_PAGE)?;
        u32::try_from(vcpu).ok().filter(|&vcpu| vcpu < self.vcpus)
    }

    /// The stack page of a vCPU. The programs of this crate push nothing, so it stays zero.
    ///
    /// # Panics
    /// When there is no such vCPU.
    #[must_use]
    pub fn stack_page(&self, vcpu: u32) -> RamPage {
        self.assert_vcpu(vcpu);
        RamPage(CONTROL_PAGE + u64::from(self.vcpus) + u64::from(vcpu))
    }

    /// The page table pages, the root first; empty for RV64. All lie below the hole.
    #[must_use]
    pub fn table_pages(&self) -> Range<u64> {
        let first = CONTROL_PAGE + 2 * u64::from(self.vcpus);
        let count = match self.isa {
            Isa::X86_64 => tables::count(self.memory_bytes),
            Isa::Rv64 => 0,
        };
        first..first + count
    }

    /// The pages of all shares, as RAM page indices.
    #[must_use]
    pub fn data(&self) -> Range<u64> {
        let first = self.first_data_page();
        first..first + self.share_pages * u64::from(self.vcpus)
    }

    /// The data pages of a vCPU, as RAM page indices. All shares are equally long.
    ///
    /// # Panics
    /// When there is no such vCPU.
    #[must_use]
    pub fn share(&self, vcpu: u32) -> Range<u64> {
        self.assert_vcpu(vcpu);
        let first = self.first_data_page() + u64::from(vcpu) * self.share_pages;
        first..first + self.share_pages
    }

    /// The number of pages in a share, at least 1.
    #[must_use]
    pub fn share_pages(&self) -> u64 {
        self.share_pages
    }

    /// The vCPU whose share has this page, if it is a data page.
    #[must_use]
    pub fn data_owner(&self, page: RamPage) -> Option<u32> {
        let offset = page.0.checked_sub(self.first_data_page())?;
        u32::try_from(offset / self.share_pages)
            .ok()
            .filter(|&vcpu| vcpu < self.vcpus)
    }

    fn first_data_page(&self) -> u64 {
        self.table_pages().end
    }

    fn assert_vcpu(&self, vcpu: u32) {
        assert!(
            vcpu < self.vcpus,
            "vCPU {vcpu} of a program for {} vCPUs",
            self.vcpus
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address_space::{HOLE_END, HOLE_START};

    #[test]
    fn the_minimum_is_enough_and_a_page_less_is_not() {
        for isa in Isa::ALL {
            for vcpus in [1, 2, 7, 64, MAX_VCPUS] {
                let minimum = MemoryMap::minimum_memory(isa, vcpus);
                assert_eq!(
                    MemoryMap::new(isa, vcpus, minimum).unwrap().share_pages(),
                    1
                );
                assert_eq!(
                    MemoryMap::new(isa, vcpus, minimum - PAGE_SIZE),
                    Err(GuestError::MemoryTooSmall {
                        bytes: minimum - PAGE_SIZE,
                        vcpus,
                        minimum
                    })
                );
            }
        }
    }

    #[test]
    fn impossible_sizes_are_named() {
        let new = |vcpus, bytes| MemoryMap::new(Isa::X86_64, vcpus, bytes);
        assert_eq!(new(0, 1 << 20), Err(GuestError::NoVcpus));
        assert_eq!(
            new(1025, 1 << 30),
            Err(GuestError::TooManyVcpus { vcpus: 1025 })
        );
        assert_eq!(
            new(1, (1 << 20) + 8),
            Err(GuestError::MemoryNotPageAligned {
                bytes: (1 << 20) + 8
            })
        );
        assert_eq!(
            new(1, MAX_MEMORY_BYTES + PAGE_SIZE),
            Err(GuestError::MemoryTooLarge {
                bytes: MAX_MEMORY_BYTES + PAGE_SIZE
            })
        );
        assert!(matches!(new(1, 0), Err(GuestError::MemoryTooSmall { .. })));
    }

    #[test]
    fn every_page_has_one_use() {
        let map = MemoryMap::new(Isa::X86_64, 3, 1 << 20).unwrap();
        let mut uses = vec![0; map.ram_pages() as usize];
        uses[0] += 1;
        uses[map.code_page().index()] += 1;
        for vcpu in 0..3 {
            uses[map.control_page(vcpu).index()] += 1;
            assert_eq!(map.control_owner(map.control_page(vcpu)), Some(vcpu));
            uses[map.stack_page(vcpu).index()] += 1;
            for page in map.share(vcpu) {
                uses[page as usize] += 1;
                assert_eq!(map.data_owner(RamPage(page)), Some(vcpu));
            }
        }
        map.table_pages().for_each(|page| uses[page as usize] += 1);
        let end = map.data().end as usize;
        assert!(uses[..end].iter().all(|&count| count == 1), "{uses:?}");
        assert!(uses[end..].iter().all(|&count| count == 0));
        assert!(uses.len() - end < 3, "less than a page a vCPU is left over");
        assert_eq!(map.data_owner(RamPage(end as u64)), None);
        assert_eq!(map.data_owner(RamPage(0)), None);
    }

    #[test]
    fn ram_continues_behind_the_hole() {
        let last = HOLE_START / PAGE_SIZE - 1;
        assert_eq!(
            MemoryMap::gpa_of(RamPage(last)),
            Gpa(HOLE_START - PAGE_SIZE)
        );
        assert_eq!(MemoryMap::gpa_of(RamPage(last + 1)), Gpa(HOLE_END));
    }
}
