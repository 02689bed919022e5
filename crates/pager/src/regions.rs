//! The memory of a VM: ranges of addresses in the VMM, each with its place in the memory file.
//!
//! Pages are numbered from 0 through all regions, in the order of the handshake.

use pageferry_addr::Hva;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A region of guest memory. All numbers are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Its address in the VMM's address space.
    pub address: u64,
    /// Its size.
    pub size: u64,
    /// Its place in the memory file. It is no guest address.
    pub offset: u64,
}

/// The regions of a VM, which do not overlap.
#[derive(Debug)]
pub(crate) struct Regions {
    page_bytes: u64,
    /// By address, each with the number of its first page.
    sorted: Vec<(Region, u64)>,
    pages: u64,
}

impl Regions {
    /// `regions` are checked: not empty, aligned to pages, apart.
    pub(crate) fn new(regions: &[Region], page_bytes: u64) -> Self {
        let mut pages = 0;
        let mut sorted: Vec<_> = regions
            .iter()
            .map(|region| {
                let first = pages;
                pages += region.size / page_bytes;
                (*region, first)
            })
            .collect();
        sorted.sort_unstable_by_key(|(region, _)| region.address);
        Self {
            page_bytes,
            sorted,
            pages,
        }
    }

    pub(crate) fn pages(&self) -> u64 {
        self.pages
    }

    pub(crate) fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// The regions by address.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Region> {
        self.sorted.iter().map(|(region, _)| region)
    }

    /// The page at an address.
    pub(crate) fn page_at(&self, address: Hva) -> Option<u64> {
        let behind = self
            .sorted
            .partition_point(|(region, _)| region.address <= address.0);
        let (region, first) = self.sorted.get(behind.checked_sub(1)?)?;
        let into = address.0 - region.address;
        (into < region.size).then(|| first + into / self.page_bytes)
    }

    /// The pages whose addresses lie in `range`, region by region.
    pub(crate) fn pages_in(&self, range: &Range<Hva>) -> impl Iterator<Item = Range<u64>> {
        self.sorted.iter().filter_map(move |(region, first)| {
            let start = range.start.0.max(region.address);
            let end = range.end.0.min(region.address + region.size);
            let page = |address: u64| first + (address - region.address) / self.page_bytes;
            (start < end).then(|| page(start)..page(end))
        })
    }

    /// The region of a page, and the number of its first page.
    fn of_page(&self, page: u64) -> (&Region, u64) {
        let (region, first) = self
            .sorted
            .iter()
            .find(|(region, first)| {
                page.checked_sub(*first)
                    .is_some_and(|into| into < region.size / self.page_bytes)
            })
            .expect("pages are numbers of this memory");
        (region, *first)
    }

    /// The address of a page, and its place in the memory file.
    pub(crate) fn place_of(&self, page: u64) -> (Hva, u64) {
        let (region, first) = self.of_page(page);
        let into = (page - first) * self.page_bytes;
        (Hva(region.address + into), region.offset + into)
    }

    /// The page at a place in the memory file.
    pub(crate) fn page_of(&self, offset: u64) -> Option<u64> {
        self.sorted.iter().find_map(|(region, first)| {
            let into = offset.checked_sub(region.offset)?;
            (into < region.size).then(|| first + into / self.page_bytes)
        })
    }

    /// The pages of the block of `bytes` bytes of the memory file in which `page` lies, as far as
    /// they are in the same region.
    pub(crate) fn block_of(&self, page: u64, bytes: u64) -> Range<u64> {
        let (region, first) = self.of_page(page);
        let block = bytes.max(self.page_bytes);
        let offset = region.offset + (page - first) * self.page_bytes;
        let start = (offset - offset % block).max(region.offset);
        let end = (offset - offset % block)
            .saturating_add(block)
            .min(region.offset + region.size);
        let page = |offset: u64| first + (offset - region.offset) / self.page_bytes;
        page(start)..page(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn regions() -> Regions {
        let region = |address, pages, offset| Region {
            address,
            size: pages * PAGE,
            offset: offset * PAGE,
        };
        // The second region lies before the first.
        Regions::new(&[region(0x90_0000, 10, 0), region(0x20_0000, 6, 10)], PAGE)
    }

    #[test]
    fn addresses_become_pages_and_pages_become_places() {
        let regions = regions();
        assert_eq!(regions.pages(), 16);
        for (address, page) in [
            (0x90_0000, Some(0)),
            (0x90_9fff, Some(9)),
            (0x90_a000, None),
            (0x8f_ffff, None),
            (0x20_0000, Some(10)),
            (0x20_5fff, Some(15)),
            (0x20_6000, None),
            (0, None),
            (u64::MAX, None),
        ] {
            assert_eq!(regions.page_at(Hva(address)), page, "{address:#x}");
        }
        assert_eq!(regions.page_of(16 * PAGE), None);
        for page in 0..16 {
            let (address, offset) = regions.place_of(page);
            assert_eq!(regions.page_at(address), Some(page));
            assert_eq!(offset, page * PAGE);
            assert_eq!(regions.page_of(offset + 1), Some(page));
        }
    }

    #[test]
    fn a_range_of_addresses_names_pages_of_each_region() {
        let regions = regions();
        let pages = |start, end| {
            let range = Hva(start)..Hva(end);
            let runs = regions.pages_in(&range).map(|run| (run.start, run.end));
            runs.collect::<Vec<_>>()
        };
        assert_eq!(pages(0x90_1000, 0x90_3000), [(1, 3)]);
        assert_eq!(pages(0, 0x90_1000), [(10, 16), (0, 1)]);
        assert_eq!(pages(0x20_6000, 0x90_0000), []);
    }

    #[test]
    fn blocks_are_of_the_file_and_stay_within_a_region() {
        let regions = regions();
        assert_eq!(regions.block_of(0, 4 * PAGE), 0..4);
        assert_eq!(regions.block_of(7, 4 * PAGE), 4..8);
        assert_eq!(regions.block_of(9, 4 * PAGE), 8..10);
        assert_eq!(regions.block_of(10, 4 * PAGE), 10..12);
        assert_eq!(regions.block_of(15, 4 * PAGE), 12..16);
        assert_eq!(regions.block_of(5, 1), 5..6);
    }
}
