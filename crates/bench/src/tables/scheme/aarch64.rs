#![expect(
    unsafe_code,
    reason = "aarch64-paging frees tables through an unsafe method of its trait"
)]
//! aarch64-paging 0.12: stage 2 tables of arm64 with four levels, never made active.
//!
//! Differences from ours:
//!
//! - Its methods take `&mut`. So one thread at a time changes tables, and two threads need a mutex.
//! - It has ranges only. A page is a range of one.
//! - Inactive tables need no break-before-make and no TLB maintenance, and it does none here. Other
//!   architectures lack the instructions anyway.
//! - It keeps no counts.
//! - Unmapping whole tables unlinks them without a look at their entries. That is why it is so much
//!   cheaper than in schemes that must know which pages they unmapped.

use super::{Found, Scheme, Worker};
use crate::tables::allocator;
use aarch64_paging::Mapping;
use aarch64_paging::descriptor::{PhysicalAddress, Stage2Attributes};
use aarch64_paging::paging::{Constraints, MemoryRegion, PageTable, Stage2, Translation};
use pageferry_addr::{Gfn, GfnRange, PAGE_SHIFT, PAGE_SIZE, Pfn};
use std::ptr::NonNull;

/// aarch64-paging's `Mapping` of the `Stage2` regime.
#[derive(Debug)]
pub(crate) struct Aarch64Paging;

/// The source of its tables.
#[derive(Debug)]
struct Tables;

impl Translation<Stage2Attributes> for Tables {
    fn allocate_table(&mut self) -> (NonNull<PageTable<Stage2Attributes>>, PhysicalAddress) {
        let table = allocator::take();
        let address = PhysicalAddress(allocator::address(table) as usize);
        (table.cast(), address)
    }

    unsafe fn deallocate_table(&mut self, table: NonNull<PageTable<Stage2Attributes>>) {
        // SAFETY: it came from `allocate_table`, as the trait requires of the caller.
        unsafe { allocator::give(table.cast()) };
    }

    fn physical_to_virtual(
        &self,
        address: PhysicalAddress,
    ) -> NonNull<PageTable<Stage2Attributes>> {
        allocator::at(address.0 as u64).cast()
    }
}

/// The tables of [`Aarch64Paging`].
#[derive(Debug)]
pub(crate) struct Aarch64Worker(Mapping<Tables, Stage2>);

impl Scheme for Aarch64Paging {
    const NAME: &'static str = "aarch64-paging 0.12";
    type Single = Aarch64Worker;

    fn single() -> Aarch64Worker {
        Aarch64Worker(Mapping::new(Tables, 0, Stage2))
    }
}

/// Write-back memory, readable and writable, with the access flag.
const READ_WRITE: Stage2Attributes = Stage2Attributes::VALID
    .union(Stage2Attributes::MEMATTR_NORMAL_INNER_WB)
    .union(Stage2Attributes::MEMATTR_NORMAL_OUTER_WB)
    .union(Stage2Attributes::S2AP_ACCESS_RW)
    .union(Stage2Attributes::SH_INNER)
    .union(Stage2Attributes::ACCESS_FLAG);

#[inline]
fn region(start: Gfn, pages: u64) -> MemoryRegion {
    let first = start.gpa().0 as usize;
    MemoryRegion::new(first, first + (pages * PAGE_SIZE) as usize)
}

#[inline]
fn address(pfn: Pfn) -> PhysicalAddress {
    PhysicalAddress((pfn.0 << PAGE_SHIFT) as usize)
}

impl Aarch64Worker {
    #[inline]
    fn set(&mut self, region: &MemoryRegion, to: PhysicalAddress, flags: Stage2Attributes) {
        let set = self
            .0
            .map_range(region, to, flags, Constraints::NO_BLOCK_MAPPINGS);
        set.expect("a range that four levels reach");
    }
}

impl Worker for Aarch64Worker {
    #[inline]
    fn map(&mut self, gfn: Gfn, pfn: Pfn) {
        self.set(&region(gfn, 1), address(pfn), READ_WRITE);
    }

    fn map_range(&mut self, range: GfnRange, pfn: Pfn) {
        self.set(
            &region(range.start(), range.pages()),
            address(pfn),
            READ_WRITE,
        );
    }

    #[inline]
    fn find(&mut self, gfn: Gfn) -> Option<Found> {
        let mut found = None;
        let walked = self.0.walk_range(&region(gfn, 1), &mut |_, entry, _| {
            if entry.is_valid() {
                found = Some(Found {
                    pfn: Pfn(entry.output_address().0 as u64 >> PAGE_SHIFT),
                    writable: entry.flags().contains(Stage2Attributes::S2AP_ACCESS_WO),
                });
            }
            Ok(())
        });
        walked.ok()?;
        found
    }

    fn protect_range(&mut self, range: GfnRange) {
        let (none, stores) = (Stage2Attributes::empty(), Stage2Attributes::S2AP_ACCESS_WO);
        let region = region(range.start(), range.pages());
        let protected = self
            .0
            .modify_range(&region, &|_, entry| entry.modify_flags(none, stores));
        protected.expect("a range that four levels reach");
    }

    fn unmap_range(&mut self, range: GfnRange) {
        let region = region(range.start(), range.pages());
        self.set(&region, PhysicalAddress(0), Stage2Attributes::empty());
    }

    #[inline]
    fn unmap(&mut self, gfn: Gfn) {
        self.set(
            &region(gfn, 1),
            PhysicalAddress(0),
            Stage2Attributes::empty(),
        );
    }
}
