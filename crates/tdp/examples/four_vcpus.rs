//! Four vCPUs fault into one set of tables, on a platform whose table memory is one vector.
//!
//! Each vCPU stores to every page of its half of a 64 MiB guest. Two vCPUs share each half. A fifth
//! thread repeatedly takes the guest's lower 8 MiB away, like a host that reclaims memory. At the
//! end every page must be mapped to its slot's frame, and every table must be accounted for.
//!
//! ```sh
//! cargo run -p pageferry-tdp --example four_vcpus
//! ```
#![expect(unsafe_code, reason = "hands out pointers into one vector of tables")]

use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_tdp::format::{Access, Ept4, MemoryType, Writes};
use pageferry_tdp::{Entry, Fault, Flush, How, Mmu, Platform, Refused, Target};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// One table: 512 entries that fill a page.
#[repr(C, align(4096))]
struct Table([Entry; 512]);

/// Table memory. Frame `n` is element `n` of the vector, so there is no frame 0 to confuse with an
/// empty entry.
struct Tables {
    tables: Vec<Table>,
    free: Mutex<Vec<usize>>,
    flushes: AtomicU64,
}

impl Tables {
    fn new(count: usize) -> Self {
        let empty = || Table([const { Entry::new(0) }; 512]);
        Self {
            tables: (0..=count).map(|_| empty()).collect(),
            free: Mutex::new((1..=count).collect()),
            flushes: AtomicU64::new(0),
        }
    }

    fn in_use(&self) -> usize {
        self.tables.len() - 1 - self.free.lock().unwrap().len()
    }
}

// SAFETY: 1. Each element of the vector is a table, aligned to its size, and given out once until
// it is given back, when its entries are cleared. The vector is never resized. 2. The frame is the
// index, and 4 KiB times the index is its "physical address". 3. There is no TLB: these vCPUs walk
// the tables for each access. 4. The threads have ended before the MMU is dropped.
unsafe impl Platform for Tables {
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>> {
        assert_eq!(entries, 512, "tables of this format");
        let index = self.free.lock().unwrap().pop()?;
        Some(self.pointer(Pfn(index as u64)))
    }

    unsafe fn free_table(&self, table: NonNull<Entry>, _: usize) {
        let Pfn(index) = self.frame(table);
        for entry in &self.tables[index as usize].0 {
            entry.store(0, Ordering::Relaxed);
        }
        self.free.lock().unwrap().push(index as usize);
    }

    fn frame(&self, table: NonNull<Entry>) -> Pfn {
        let bytes = table.addr().get() - self.tables.as_ptr().addr();
        Pfn((bytes / size_of::<Table>()) as u64)
    }

    fn pointer(&self, table: Pfn) -> NonNull<Entry> {
        // A pointer to the whole table, so that all entries can be reached from the first.
        NonNull::from(&self.tables[table.0 as usize]).cast()
    }

    fn flush(&self, _: Flush) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
    }

    fn relax(&self) {
        std::thread::yield_now();
    }
}

const PAGES: u64 = 16 << 10;
/// The first host frame of the slot: page `n` of the guest is in this frame plus `n`.
const FIRST_FRAME: u64 = 0x10_0000;

fn target(gfn: u64) -> Target {
    Target {
        pfn: Pfn(FIRST_FRAME + gfn),
        level: 1,
        access: Access::ALL,
        writes: Writes::Allowed,
        memory: MemoryType::WriteBack,
    }
}

/// Stores to every page of `pages`. Returns the number of faults that mapped a page.
fn vcpu(mmu: &Arc<Mmu<Ept4, Tables>>, pages: impl Iterator<Item = u64>) -> u64 {
    let mut worker = mmu.worker();
    let mut installed = 0;
    for gfn in pages {
        let fault = Fault {
            gfn: Gfn(gfn),
            access: Access::READ_WRITE,
        };
        while worker.translate(fault.gfn, fault.access).is_none() {
            // The ticket comes before the slot is looked up.
            let ticket = worker.ticket();
            match worker.fault(ticket, fault, target(gfn), &()) {
                Ok(mapped) => installed += u64::from(mapped.how == How::Installed),
                // The host is taking pages away: fault again.
                Err(Refused::Excluded | Refused::Invalidated) => std::thread::yield_now(),
                Err(refused) => panic!("page {gfn:#x}: {refused}"),
            }
        }
    }
    installed
}

fn main() {
    let mmu = Mmu::<Ept4, _>::new(Tables::new(256)).expect("memory for a root");
    let over = AtomicBool::new(false);
    let (installed, zapped) = std::thread::scope(|scope| {
        let host = scope.spawn(|| {
            let (mut worker, mut zapped) = (mmu.worker(), 0);
            let lower = GfnRange::new(Gfn(0), PAGES / 8).expect("a range");
            while !over.load(Ordering::Relaxed) {
                // Until the value is dropped no fault maps anything in the range.
                zapped += worker.invalidate(&[lower], &()).zapped();
                std::thread::yield_now();
            }
            zapped
        });
        let vcpus: Vec<_> = (0..4)
            .map(|number| {
                let mmu = &mmu;
                scope.spawn(move || {
                    let first = number / 2 * (PAGES / 2);
                    vcpu(mmu, first..first + PAGES / 2)
                })
            })
            .collect();
        let installed: u64 = vcpus.into_iter().map(|vcpu| vcpu.join().unwrap()).sum();
        over.store(true, Ordering::Relaxed);
        (installed, host.join().unwrap())
    });

    // Faults restore the pages that the host took last.
    let again = vcpu(&mmu, 0..PAGES);
    assert_eq!(
        installed + again - zapped,
        PAGES,
        "each page is mapped once more than it was taken"
    );
    let mut mapped = 0;
    let mut worker = mmu.worker();
    worker.scan(
        GfnRange::new(Gfn(0), PAGES).expect("a range"),
        |gfn, found| {
            assert_eq!(found.leaf.pfn, Pfn(FIRST_FRAME + gfn.0));
            mapped += 1;
        },
    );
    assert_eq!(mapped, PAGES);
    while worker.reclaim() != 0 {}
    drop(worker);
    let stats = mmu.stats();
    assert_eq!(stats.leaves, [PAGES, 0, 0]);
    assert_eq!(mmu.platform().in_use() as u64, 1 + stats.tables);
    println!(
        "{PAGES} pages mapped by 4 vCPUs in {} faults, {zapped} taken away meanwhile, {} flushes, {} tables",
        installed + again,
        mmu.platform().flushes.load(Ordering::Relaxed),
        1 + stats.tables
    );
}
