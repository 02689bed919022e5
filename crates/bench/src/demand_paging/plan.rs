//! The pages that each vCPU of the guest touches.

use crate::BenchError;
use pageferry_addr::PAGE_SIZE;
use pageferry_guest::{Isa, MemoryMap, Touch, TouchAccess, TouchOrder, Toucher};
use pageferry_machine::Backing;
use std::ops::Range;

/// One guest. Every vCPU stores to one word of each of its pages once, in ascending order, and then
/// reports that it has finished.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) toucher: Toucher,
    /// All touched pages, as RAM page indices.
    pub(crate) touched: Range<u64>,
    /// The number of pages that each vCPU touches.
    pub(crate) each: u64,
    /// The memory behind the guest on a machine.
    pub(crate) backing: Backing,
}

impl Plan {
    /// `pages` pages for each vCPU. With `overlap`, each vCPU touches the pages of all.
    pub(crate) fn new(isa: Isa, vcpus: u32, pages: u64, overlap: bool) -> Result<Self, BenchError> {
        let bytes = Self::memory_bytes(isa, vcpus, pages)?;
        let map = MemoryMap::new(isa, vcpus, bytes)?;
        let first = map.data().start;
        let touched = first..first + pages * u64::from(vcpus);
        let own = |vcpu: u64| first + vcpu * pages..first + (vcpu + 1) * pages;
        let ranges = (0..u64::from(vcpus))
            .map(|vcpu| if overlap { touched.clone() } else { own(vcpu) })
            .collect();
        let touch = Touch {
            access: TouchAccess::Write,
            order: TouchOrder::Ascending,
            passes: 1,
        };
        Ok(Self {
            toucher: Toucher::new(map, ranges, touch)?,
            each: if overlap {
                touched.end - touched.start
            } else {
                pages
            },
            touched,
            backing: Backing::Shmem,
        })
    }

    /// The same guest in other memory.
    pub(crate) fn on(self, backing: Backing) -> Self {
        Self { backing, ..self }
    }

    /// The RAM of such a guest, in bytes.
    pub(crate) fn memory_bytes(isa: Isa, vcpus: u32, pages: u64) -> Result<u64, BenchError> {
        let too_much = || {
            BenchError::Setting(format!(
                "{vcpus} vCPUs of {pages} pages each need more memory than a guest can address"
            ))
        };
        // A program's own page tables take less than one page for 512 others.
        let wanted = pages
            .checked_mul(u64::from(vcpus))
            .and_then(|all| all.checked_add(all / 512))
            .and_then(|all| all.checked_mul(PAGE_SIZE))
            .and_then(|bytes| bytes.checked_add(MemoryMap::minimum_memory(isa, vcpus)))
            .ok_or_else(too_much)?;
        if wanted > pageferry_guest::MAX_MEMORY_BYTES {
            return Err(too_much());
        }
        Ok(wanted)
    }

    pub(crate) fn vcpus(&self) -> u32 {
        self.toucher.memory_map().vcpus()
    }

    /// The number of touches of all vCPUs together.
    pub(crate) fn touches(&self) -> u64 {
        self.each * u64::from(self.vcpus())
    }

    /// Checks that every page holds the value that a vCPU stored. `first_word` returns a page's
    /// first word.
    pub(crate) fn check(&self, first_word: impl Fn(u64) -> u64) -> Result<(), BenchError> {
        for page in self.touched.clone() {
            let found = first_word(page);
            if found != page + 1 {
                return Err(BenchError::WrongValue(format!(
                    "page {page} begins with {found:#x} after a vCPU stored {:#x} there",
                    page + 1
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpus_have_their_own_pages_or_share_all() {
        for isa in Isa::ALL {
            for vcpus in [1, 2, 64] {
                let apart = Plan::new(isa, vcpus, 256, false).unwrap();
                let program = apart.toucher.program();
                let mut next = apart.touched.start;
                for vcpu in 0..vcpus {
                    assert_eq!(program.visited(vcpu), next..next + 256);
                    next += 256;
                }
                assert_eq!((next, apart.each), (apart.touched.end, 256));
                let shared = Plan::new(isa, vcpus, 256, true).unwrap();
                assert_eq!(shared.touched, apart.touched);
                assert_eq!(shared.each, 256 * u64::from(vcpus));
                assert_eq!(shared.toucher.program().visited(0), shared.touched);
            }
        }
    }

    #[test]
    fn a_page_that_was_not_written_is_named() {
        let plan = Plan::new(Isa::Rv64, 1, 4, false).unwrap();
        assert!(plan.check(|page| page + 1).is_ok());
        let last = plan.touched.end - 1;
        let error = plan.check(|page| if page == last { 0 } else { page + 1 });
        let said = error.unwrap_err().to_string();
        assert!(said.contains(&format!("page {last} ")), "{said}");
    }

    #[test]
    fn absurd_sizes_are_refused() {
        assert!(Plan::new(Isa::Rv64, 64, u64::MAX / 2, false).is_err());
        assert!(Plan::new(Isa::Rv64, 1024, 1 << 30, false).is_err());
    }
}
