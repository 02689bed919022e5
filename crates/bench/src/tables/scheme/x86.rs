#![expect(
    unsafe_code,
    reason = "creating x86_64's mapper and its mappings is unsafe"
)]
//! Two crates for a kernel's own x86-64 tables: x86_64 0.15 and page_table_multiarch 0.6.
//!
//! Differences of both from ours:
//!
//! - Their methods take `&mut`. So one thread at a time changes tables, and two threads need a
//!   mutex.
//! - They store entries plainly, keep no counts, and free no table before all are dropped.
//! - Their range operations are loops.
//! - No TLB is flushed here. x86_64 returns flush tokens, which are ignored. page_table_multiarch
//!   gathers addresses, but flushes on bare metal only.

use super::{Found, Scheme, Worker};
use crate::tables::allocator::{self, Table};
use memory_addr::{PAGE_SIZE_4K, PhysAddr, VirtAddr as MultiarchVirtAddr};
use page_table_multiarch::x86_64::X64PageTable;
use page_table_multiarch::{MappingFlags, PageSize, PagingHandler};
use pageferry_addr::{Gfn, GfnRange, PAGE_SHIFT, PAGE_SIZE, Pfn};
use std::ptr::NonNull;
use x86_64::VirtAddr;
use x86_64::structures::paging::mapper::{MapToError, TranslateResult};
use x86_64::structures::paging::{
    FrameAllocator, Mapper, OffsetPageTable, Page, PageTable, PageTableFlags, PhysFrame, Size4KiB,
    Translate,
};

/// x86_64's `OffsetPageTable`.
#[derive(Debug)]
pub(crate) struct OffsetTable;

/// The tables of [`OffsetTable`].
#[derive(Debug)]
pub(crate) struct OffsetWorker(OffsetPageTable<'static>);

impl Scheme for OffsetTable {
    const NAME: &'static str = "x86_64 0.15 Offset";
    type Single = OffsetWorker;

    fn single() -> OffsetWorker {
        let mut root = allocator::take().cast::<PageTable>();
        // SAFETY: a zeroed page from the allocator that nothing else uses is an empty table.
        // Dropping the worker gives it back. Physical addresses are virtual addresses here, so the
        // offset is 0.
        OffsetWorker(unsafe { OffsetPageTable::new(root.as_mut(), VirtAddr::zero()) })
    }
}

impl Drop for OffsetWorker {
    fn drop(&mut self) {
        let root = NonNull::from(self.0.level_4_table_mut()).cast::<Table>();
        // SAFETY: the mapper took all tables from the allocator, its leaves are 4 KiB, and it is
        // not used again.
        unsafe { allocator::give_tree(root) };
    }
}

/// Frames for tables.
struct Frames;

// SAFETY: the allocator's tables are unused.
unsafe impl FrameAllocator<Size4KiB> for Frames {
    fn allocate_frame(&mut self) -> Option<PhysFrame> {
        Some(physical(Pfn(
            allocator::address(allocator::take()) >> PAGE_SHIFT
        )))
    }
}

#[inline]
fn page(gfn: Gfn) -> Page {
    Page::containing_address(VirtAddr::new_truncate(gfn.gpa().0))
}

#[inline]
fn physical(pfn: Pfn) -> PhysFrame {
    PhysFrame::containing_address(x86_64::PhysAddr::new_truncate(pfn.0 << PAGE_SHIFT))
}

const READ_WRITE: PageTableFlags = PageTableFlags::PRESENT.union(PageTableFlags::WRITABLE);

impl Worker for OffsetWorker {
    #[inline]
    fn map(&mut self, gfn: Gfn, pfn: Pfn) {
        // SAFETY: no processor uses these tables.
        let mapped = unsafe {
            self.0
                .map_to(page(gfn), physical(pfn), READ_WRITE, &mut Frames)
        };
        match mapped {
            Ok(flush) => flush.ignore(),
            Err(error) => debug_assert!(matches!(error, MapToError::PageAlreadyMapped(_))),
        }
    }

    fn map_range(&mut self, range: GfnRange, pfn: Pfn) {
        for (gfn, frame) in range.iter().zip(pfn.0..) {
            self.map(gfn, Pfn(frame));
        }
    }

    #[inline]
    fn find(&mut self, gfn: Gfn) -> Option<Found> {
        match self.0.translate(VirtAddr::new_truncate(gfn.gpa().0)) {
            TranslateResult::Mapped { frame, flags, .. } => Some(Found {
                pfn: Pfn(frame.start_address().as_u64() >> PAGE_SHIFT),
                writable: flags.contains(PageTableFlags::WRITABLE),
            }),
            _ => None,
        }
    }

    fn protect_range(&mut self, range: GfnRange) {
        for gfn in range.iter() {
            // SAFETY: no processor uses these tables.
            let protected = unsafe { self.0.update_flags(page(gfn), PageTableFlags::PRESENT) };
            protected.expect("a page that is mapped").ignore();
        }
    }

    fn unmap_range(&mut self, range: GfnRange) {
        range.iter().for_each(|gfn| self.unmap(gfn));
    }

    #[inline]
    fn unmap(&mut self, gfn: Gfn) {
        let (_, flush) = self.0.unmap(page(gfn)).expect("a page that is mapped");
        flush.ignore();
    }
}

/// page_table_multiarch's x86-64 tables.
#[derive(Debug)]
pub(crate) struct Multiarch;

/// The source of its tables.
#[derive(Debug)]
struct Handler;

impl PagingHandler for Handler {
    fn alloc_frames(count: usize, align: usize) -> Option<PhysAddr> {
        (count == 1 && align == PAGE_SIZE_4K)
            .then(|| PhysAddr::from(allocator::address(allocator::take()) as usize))
    }

    fn dealloc_frames(frame: PhysAddr, count: usize) {
        assert_eq!(count, 1, "tables are taken one by one");
        // SAFETY: the tables free each frame that they took above once.
        unsafe { allocator::give(allocator::at(frame.as_usize() as u64)) };
    }

    #[inline]
    fn phys_to_virt(frame: PhysAddr) -> MultiarchVirtAddr {
        MultiarchVirtAddr::from(frame.as_usize())
    }
}

/// The tables of [`Multiarch`].
pub(crate) struct MultiarchWorker(X64PageTable<Handler>);

impl Scheme for Multiarch {
    const NAME: &'static str = "page_table_multiarch";
    type Single = MultiarchWorker;

    fn single() -> MultiarchWorker {
        MultiarchWorker(X64PageTable::try_new().expect("the allocator has tables"))
    }
}

const BOTH: MappingFlags = MappingFlags::READ.union(MappingFlags::WRITE);

#[inline]
fn address(gfn: Gfn) -> MultiarchVirtAddr {
    MultiarchVirtAddr::from(gfn.gpa().0 as usize)
}

#[inline]
fn frame(pfn: Pfn) -> PhysAddr {
    PhysAddr::from((pfn.0 << PAGE_SHIFT) as usize)
}

const fn bytes(range: GfnRange) -> usize {
    (range.pages() * PAGE_SIZE) as usize
}

impl Worker for MultiarchWorker {
    #[inline]
    fn map(&mut self, gfn: Gfn, pfn: Pfn) {
        let mut cursor = self.0.cursor();
        // If the page is mapped, this is an error, and the mapping is the same.
        let _ = cursor.map(address(gfn), frame(pfn), PageSize::Size4K, BOTH);
    }

    fn map_range(&mut self, range: GfnRange, pfn: Pfn) {
        let first = address(range.start());
        let to = frame(pfn);
        let mut cursor = self.0.cursor();
        let mapped = cursor.map_region(
            first,
            |at| PhysAddr::from(to.as_usize() + (at.as_usize() - first.as_usize())),
            bytes(range),
            BOTH,
            false,
        );
        mapped.expect("pages that are not mapped");
    }

    #[inline]
    fn find(&mut self, gfn: Gfn) -> Option<Found> {
        let (frame, flags, _) = self.0.query(address(gfn)).ok()?;
        Some(Found {
            pfn: Pfn(frame.as_usize() as u64 >> PAGE_SHIFT),
            writable: flags.contains(MappingFlags::WRITE),
        })
    }

    fn protect_range(&mut self, range: GfnRange) {
        let mut cursor = self.0.cursor();
        let protected =
            cursor.protect_region(address(range.start()), bytes(range), MappingFlags::READ);
        protected.expect("pages of 4 KiB");
    }

    fn unmap_range(&mut self, range: GfnRange) {
        let mut cursor = self.0.cursor();
        let unmapped = cursor.unmap_region(address(range.start()), bytes(range));
        unmapped.expect("pages that are mapped");
    }

    #[inline]
    fn unmap(&mut self, gfn: Gfn) {
        let unmapped = self.0.cursor().unmap(address(gfn));
        unmapped.expect("a page that is mapped");
    }
}
