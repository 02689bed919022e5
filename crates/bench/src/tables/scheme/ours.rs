#![expect(
    unsafe_code,
    reason = "implements the unsafe trait that provides the MMU's table memory"
)]
//! `pageferry-tdp`: EPT tables with accessed and dirty flags, changed by faults and sweeps as in a
//! hypervisor.
//!
//! Mapping a page takes the whole path of a fault: ticket, MMU lock (the shared side), check of the
//! ticket, walk, links, leaf, counts. The hypervisor's look-ups of the memory slot and of the
//! host's frame are not included. No call maps many 4 KiB pages. So a range is mapped by faults for
//! 2 MiB pages, which are then split, as when dirty logging begins. Unmapping is zapping. Every
//! call that takes translations away requests a TLB flush before it returns. This platform has no
//! TLBs, and counts the requests.

use super::{Found, Parallel, Scheme, Worker};
use crate::kit::CacheLine;
use crate::tables::allocator::{self, ENTRIES};
use pageferry_addr::{Gfn, GfnRange, PAGE_SHIFT, PageSize, Pfn};
use pageferry_tdp::format::{Access, Ept4, Format, MemoryType, Writes};
use pageferry_tdp::{
    Barrier, Entry, Fault, Flush, Mmu, Platform, Refused, Target, Worker as TdpWorker,
};
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// `pageferry_tdp::Mmu` of [`Ept4`].
#[derive(Debug)]
pub(crate) struct Tdp;

/// The platform: tables come from the allocator, and flushes are counted.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    flushes: CacheLine<AtomicU64>,
}

// SAFETY:
// 1. The allocator's tables are zeroed pages, aligned to their size. Nothing else uses them.
// 2. A table's address is its physical address, and its provenance is exposed. User addresses have
//    47 bits, EPT's have 52.
// 3. There are no vCPUs and no TLBs.
unsafe impl Platform for Heap {
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>> {
        (entries == ENTRIES).then(|| allocator::take().cast())
    }

    unsafe fn free_table(&self, table: NonNull<Entry>, _: usize) {
        // SAFETY: it came from `allocate_table` and is unused, as the trait requires of the caller.
        unsafe { allocator::give(table.cast()) };
    }

    fn frame(&self, table: NonNull<Entry>) -> Pfn {
        Pfn(allocator::address(table.cast()) >> PAGE_SHIFT)
    }

    #[inline]
    fn pointer(&self, table: Pfn) -> NonNull<Entry> {
        self.pointer_at(table.0 << PAGE_SHIFT)
    }

    #[inline]
    fn pointer_at(&self, address: u64) -> NonNull<Entry> {
        allocator::at(address).cast()
    }

    fn barrier(&self) -> Option<Barrier> {
        Barrier::membarrier()
    }

    fn flush(&self, _: Flush) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
    }
}

/// A thread's handle to the tables of [`Tdp`].
#[derive(Debug)]
pub(crate) struct Vcpu(TdpWorker<Ept4, Heap>);

impl Scheme for Tdp {
    const NAME: &'static str = "pageferry tdp";
    type Single = Vcpu;

    fn single() -> Vcpu {
        Self::worker(&Self::tables())
    }
}

impl Parallel for Tdp {
    type Tables = Arc<Mmu<Ept4, Heap>>;
    type Worker = Vcpu;

    fn tables() -> Self::Tables {
        Mmu::new(Heap::default()).expect("the allocator has tables")
    }

    fn worker(tables: &Self::Tables) -> Vcpu {
        Vcpu(tables.worker())
    }
}

impl Vcpu {
    #[inline]
    fn fault(&mut self, gfn: Gfn, pfn: Pfn, level: u32) {
        let fault = Fault {
            gfn,
            access: Access::READ_WRITE,
        };
        let target = Target {
            pfn,
            level,
            access: Access::ALL,
            writes: Writes::Allowed,
            memory: MemoryType::WriteBack,
        };
        loop {
            let ticket = self.0.ticket();
            match self.0.fault(ticket, fault, target, &()) {
                Ok(mapped) => {
                    // The data of a hypervisor's TLB fill, and the result of `find`.
                    black_box((mapped.leaf.pfn, mapped.leaf.access.write));
                    return;
                }
                Err(Refused::Excluded | Refused::Invalidated) => self.0.wait(),
                Err(refused) => panic!("{gfn:?} cannot be mapped: {refused}"),
            }
        }
    }
}

impl Worker for Vcpu {
    #[inline]
    fn map(&mut self, gfn: Gfn, pfn: Pfn) {
        self.fault(gfn, pfn, 1);
    }

    fn map_range(&mut self, range: GfnRange, pfn: Pfn) {
        let large = PageSize::Size2M;
        for page in 0..range.pages() / large.pages() {
            let skipped = page * large.pages();
            let gfn = Gfn(range.start().0 + skipped);
            self.fault(gfn, Pfn(pfn.0 + skipped), large.level());
        }
        let split = self.0.split(range, 1, &());
        split.expect("the allocator has tables");
    }

    #[inline]
    fn find(&mut self, gfn: Gfn) -> Option<Found> {
        let found = self.0.walk(gfn)?;
        let skipped = gfn.0 & (Ept4::frames_per_entry(found.level) - 1);
        Some(Found {
            pfn: Pfn(found.leaf.pfn.0 + skipped),
            writable: found.leaf.access.write,
        })
    }

    fn protect_range(&mut self, range: GfnRange) {
        self.0.write_protect(range, &());
    }

    fn unmap_range(&mut self, range: GfnRange) {
        self.0.zap(range, &());
    }

    #[inline]
    fn unmap(&mut self, gfn: Gfn) {
        if let Some(page) = GfnRange::new(gfn, 1) {
            self.0.zap(page, &());
        }
    }

    fn flushes(&self) -> u64 {
        self.0.mmu().platform().flushes.load(Ordering::Relaxed)
    }
}
