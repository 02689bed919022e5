//! Memory slots and second-stage tables in one small hypervisor: its fault path, the removal of a
//! slot, and a dirty log.
//!
//! Three vCPUs store to RAM and to a slot beside it. Meanwhile the main thread copies RAM by its
//! dirty log until the vCPUs stop, and removes the other slot. At the end the copy must equal RAM,
//! and nothing may have been stored to the slot since its removal.
//!
//! ```sh
//! cargo run -p pageferry-tdp --example slots_and_tables
//! ```
#![expect(unsafe_code, reason = "hands out tables from the heap")]

mod heap;

use heap::Heap;
use pageferry_addr::{Gfn, GfnRange, Hva, PAGE_SHIFT, Pfn};
use pageferry_memslot::{Limits, Request, SlotFlags, SlotReader, SlotTable, SlotWriter};
use pageferry_tdp::format::{Access, Ept4NoAd, Format as _, MemoryType, Writes};
use pageferry_tdp::{Entry, Fault, Flush, Log, Mmu, Platform, Refused, Target, largest_level};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// Stores are logged by write protection. With D bits `harvest` would call `clear_dirty_mask`.
type Tables = Ept4NoAd;

/// Each slot has 16 MiB, in pages of 2 MiB where it can.
const PAGES: u64 = 4096;
const RAM: u16 = 0;
const BESIDE: u16 = 1;

fn first_gfn(slot: u16) -> Gfn {
    Gfn(u64::from(slot) * PAGES)
}

/// The host of one VM: the memory of its tables, and what its processors do.
struct Host {
    /// Held for reading while a vCPU is in the guest. So a writer has seen all of them leave.
    guest: RwLock<()>,
}

// SAFETY: 1. and 2. The tables are those of `Heap`. 3. vCPUs translate inside the guest only, at
// each access. A flush waits until they have left. 4. The threads end before the MMU is dropped.
unsafe impl Platform for Host {
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>> {
        Heap.allocate_table(entries)
    }

    unsafe fn free_table(&self, table: NonNull<Entry>, entries: usize) {
        // SAFETY: from `allocate_table`, with the same size.
        unsafe { Heap.free_table(table, entries) }
    }

    fn frame(&self, table: NonNull<Entry>) -> Pfn {
        Heap.frame(table)
    }

    fn pointer(&self, table: Pfn) -> NonNull<Entry> {
        Heap.pointer(table)
    }

    fn flush(&self, _: Flush) {
        drop(self.guest.write().unwrap());
    }

    fn relax(&self) {
        std::thread::yield_now();
    }
}

/// The dirty pages of a slot, one bit each.
struct Dirty {
    first: Gfn,
    words: Vec<AtomicU64>,
}

/// The log of a slot as a fault finds it.
struct SlotLog<'s> {
    dirty: &'s Dirty,
    is_on: bool,
}

impl Log for SlotLog<'_> {
    fn is_on(&self) -> bool {
        self.is_on
    }

    fn dirtied(&self, gfn: Gfn, pages: u64) {
        for page in gfn.0 - self.dirty.first.0..gfn.0 - self.dirty.first.0 + pages {
            let word = &self.dirty.words[page as usize / 64];
            // Release: the bit comes after the entry that lets stores through.
            word.fetch_or(1 << (page % 64), Ordering::Release);
        }
    }
}

/// A slot keeps its log beside it.
type Slot = pageferry_memslot::Slot<Arc<Dirty>>;

fn log_of(slot: &Slot) -> SlotLog<'_> {
    SlotLog {
        dirty: &slot.data,
        is_on: slot.flags.contains(SlotFlags::LOG_DIRTY_PAGES),
    }
}

struct Hypervisor {
    mmu: Arc<Mmu<Tables, Host>>,
    table: SlotTable<Arc<Dirty>>,
    writer: Mutex<SlotWriter<Arc<Dirty>>>,
    /// Held for reading during a fault, from the look-up of the slot on.
    faults: RwLock<()>,
    /// A word for each page of host memory. Host frame `n` is page `n`.
    memory: Vec<AtomicU64>,
    over: AtomicBool,
}

/// The end of a fault.
enum Fate {
    /// Enter the guest again: the access may go through now.
    Retry,
    /// No slot has the frame: the access is a device's.
    Mmio,
}

struct Vcpu<'h> {
    hypervisor: &'h Hypervisor,
    worker: pageferry_tdp::Worker<Tables, Host>,
    slots: SlotReader<Arc<Dirty>>,
}

impl Vcpu<'_> {
    /// Adds 1 to the word of a page. Returns whether a slot has the page.
    fn store(&mut self, gfn: Gfn) -> bool {
        let fault = Fault {
            gfn,
            access: Access::READ_WRITE,
        };
        loop {
            let inside = self.hypervisor.mmu.platform().guest.read().unwrap();
            if let Some(found) = self.worker.translate(gfn, fault.access) {
                let within = gfn.0 % Tables::frames_per_entry(found.level);
                let pfn = found.leaf.pfn.0 + within;
                self.hypervisor.memory[pfn as usize].fetch_add(1, Ordering::Relaxed);
                return true;
            }
            // A fault waits for no flush, and a flush waits for this lock.
            drop(inside);
            match self.fault(fault) {
                Fate::Retry => {}
                Fate::Mmio => return false,
            }
        }
    }

    fn fault(&mut self, fault: Fault) -> Fate {
        let _in_fault = self.hypervisor.faults.read().unwrap();
        // The ticket comes first: what the host takes from here on, the fault does not map.
        let ticket = self.worker.ticket();
        let guard = self.slots.pin();
        let Some(slot) = guard.lookup(fault.gfn) else {
            return Fate::Mmio;
        };
        if slot.is_invalid() {
            // It is being removed or moved. Its frames may belong to nobody, or elsewhere.
            return Fate::Retry;
        }
        let log = log_of(slot);
        if self.worker.fast_fault(fault, &log).is_some() {
            return Fate::Retry;
        }
        let hva = slot.hva_of(fault.gfn).expect("it has the frame");
        let pfn = Pfn(hva.0 >> PAGE_SHIFT);
        let is_store = fault.access.write;
        let target = Target {
            pfn,
            level: match log.is_on && is_store {
                true => 1,
                false => largest_level::<Tables>(slot.range, fault.gfn, pfn, 2),
            },
            access: match log.is_on && !is_store {
                true => Access::READ_EXECUTE,
                false => Access::ALL,
            },
            writes: match log.is_on {
                true => Writes::AllowedLoggedByFault,
                false => Writes::Allowed,
            },
            memory: MemoryType::WriteBack,
        };
        match self.worker.fault(ticket, fault, target, &log) {
            Ok(_) => {}
            Err(Refused::Excluded | Refused::Invalidated) => std::thread::yield_now(),
            Err(refused) => panic!("{:?}: {refused}", fault.gfn),
        }
        Fate::Retry
    }
}

impl Hypervisor {
    fn new() -> Self {
        let host = Host {
            guest: RwLock::new(()),
        };
        let limits = Limits::default();
        let writer = SlotWriter::new(limits).with_relax(std::thread::yield_now);
        Self {
            mmu: Mmu::new(host).expect("memory for a root"),
            table: writer.table(),
            writer: Mutex::new(writer),
            faults: RwLock::new(()),
            memory: (0..2 * PAGES).map(|_| AtomicU64::new(0)).collect(),
            over: AtomicBool::new(false),
        }
    }

    fn vcpu(&self) -> Vcpu<'_> {
        Vcpu {
            hypervisor: self,
            worker: self.mmu.worker(),
            slots: self.table.reader(),
        }
    }

    /// The host memory of a slot's pages begins at the frame of the same number.
    fn request(slot: u16) -> Request<Arc<Dirty>> {
        let first = first_gfn(slot);
        Request {
            address_space: 0,
            id: slot,
            gpa: first.gpa(),
            size: PAGES << PAGE_SHIFT,
            hva: Hva(first.0 << PAGE_SHIFT),
            flags: SlotFlags::EMPTY,
            userfault_bitmap: None,
            data: Arc::new(Dirty {
                first,
                words: (0..PAGES / 64).map(|_| AtomicU64::new(0)).collect(),
            }),
        }
    }

    fn add(&self, slot: u16) -> Arc<Dirty> {
        let request = Self::request(slot);
        let dirty = Arc::clone(&request.data);
        let mut writer = self.writer.lock().unwrap();
        let _ = writer.set(request).expect("a free place");
        dirty
    }

    /// Waits until all faults are over that began before.
    fn quiesce(&self) {
        drop(self.faults.write().unwrap());
    }

    /// Takes a slot away. When this returns, no vCPU reaches its memory.
    fn remove(&self, slot: u16) {
        let mut writer = self.writer.lock().unwrap();
        let delete = Request {
            size: 0,
            ..Self::request(slot)
        };
        // 1. Each look-up finds the slot invalid from here on.
        let update = writer.begin(delete).expect("it exists");
        // 2. Faults that found it valid are over.
        self.quiesce();
        // 3. Their translations go, and no TLB has them any more.
        let range = GfnRange::new(first_gfn(slot), PAGES).expect("a range");
        let taken = self.mmu.worker().invalidate(&[range], &());
        // 4. The slot is gone, and faults in its range may look again.
        update.commit();
        drop(taken);
    }

    /// Starts or stops the log of a slot.
    fn set_log(&self, slot: u16, dirty: &Arc<Dirty>, on: bool) {
        let mut writer = self.writer.lock().unwrap();
        let flags = match on {
            true => SlotFlags::LOG_DIRTY_PAGES,
            false => SlotFlags::EMPTY,
        };
        let change = Request {
            flags,
            data: Arc::clone(dirty),
            ..Self::request(slot)
        };
        // 1. Each look-up finds the new flags from here on.
        let _ = writer.set(change).expect("flags alone change");
        // 2. Faults that found the old flags are over.
        self.quiesce();
        let range = GfnRange::new(first_gfn(slot), PAGES).expect("a range");
        let (mut worker, log) = (self.mmu.worker(), SlotLog { dirty, is_on: on });
        if on {
            // 3. Split now, so that vCPUs need not. Then the first store to each page faults.
            worker.split(range, 1, &log).expect("memory for tables");
            worker.log_by_fault(range, &log);
        } else {
            // 3. Stores fault once more at most. Large pages come back.
            worker.unlog(range, &log);
            worker.recover(range, &log, |gfn, level| {
                Some(Target {
                    pfn: Pfn(gfn.0),
                    level,
                    access: Access::ALL,
                    writes: Writes::Allowed,
                    memory: MemoryType::WriteBack,
                })
            });
        }
    }

    /// Copies the pages that were stored to since the last call. Returns their number.
    fn harvest(&self, dirty: &Dirty, copy: &mut [u64]) -> u64 {
        let log = SlotLog { dirty, is_on: true };
        // 1. Take the bits.
        let taken: Vec<u64> = dirty
            .words
            .iter()
            .map(|w| w.swap(0, Ordering::AcqRel))
            .collect();
        // 2. Protect those pages again, with one flush for all.
        let bases = (dirty.first.0..).step_by(64).map(Gfn);
        self.mmu.worker().deferred(|worker| {
            for (base, word) in bases.zip(&taken) {
                worker.write_protect_mask(base, *word, &log);
            }
        });
        // 3. Copy. A store from here on sets the page's bit again.
        let pages = (0..PAGES).filter(|page| taken[*page as usize / 64] >> (page % 64) & 1 != 0);
        pages.fold(0, |count, page| {
            let at = dirty.first.0 + page;
            copy[page as usize] = self.memory[at as usize].load(Ordering::Relaxed);
            count + 1
        })
    }
}

fn main() {
    let hypervisor = &Hypervisor::new();
    let dirty = hypervisor.add(RAM);
    hypervisor.add(BESIDE);
    let at = |slot: u16| first_gfn(slot).0 as usize..first_gfn(slot).0 as usize + PAGES as usize;
    let mut copy = vec![0; PAGES as usize];
    let (copied, left, stores) = std::thread::scope(|scope| {
        let vcpus: Vec<_> = (0..3)
            .map(|number| {
                scope.spawn(move || {
                    let (mut vcpu, mut stores) = (hypervisor.vcpu(), 0);
                    let mut page = number * PAGES / 3;
                    while !hypervisor.over.load(Ordering::Relaxed) {
                        page = (page + 7) % (2 * PAGES);
                        stores += u64::from(vcpu.store(Gfn(page)));
                    }
                    stores
                })
            })
            .collect();
        let wait = |stores: u64| {
            let sum = || {
                hypervisor
                    .memory
                    .iter()
                    .map(|w| w.load(Ordering::Relaxed))
                    .sum::<u64>()
            };
            let until = sum() + stores;
            while sum() < until {
                std::thread::yield_now();
            }
        };
        wait(3 * PAGES);
        assert!(hypervisor.mmu.stats().leaves[1] > 0, "large pages");
        hypervisor.set_log(RAM, &dirty, true);
        // All of it once, and then what changes.
        for (page, word) in hypervisor.memory[at(RAM)].iter().enumerate() {
            copy[page] = word.load(Ordering::Relaxed);
        }
        let mut copied = PAGES;
        for _ in 0..5 {
            wait(500);
            copied += hypervisor.harvest(&dirty, &mut copy);
        }
        hypervisor.remove(BESIDE);
        let left: Vec<u64> = (hypervisor.memory[at(BESIDE)].iter())
            .map(|word| word.load(Ordering::Relaxed))
            .collect();
        wait(500);
        hypervisor.over.store(true, Ordering::Relaxed);
        let stores: u64 = vcpus.into_iter().map(|vcpu| vcpu.join().unwrap()).sum();
        copied += hypervisor.harvest(&dirty, &mut copy);
        (copied, left, stores)
    });
    let words = |slot| {
        hypervisor.memory[at(slot)]
            .iter()
            .map(|w| w.load(Ordering::Relaxed))
    };
    assert!(words(RAM).eq(copy), "the copy lacks stores");
    assert!(words(BESIDE).eq(left), "a store to a slot that was gone");
    assert_eq!(words(RAM).chain(words(BESIDE)).sum::<u64>(), stores);
    hypervisor.set_log(RAM, &dirty, false);
    let stats = hypervisor.mmu.stats();
    assert_eq!(stats.leaves, [0, PAGES / 512, 0], "large pages again");
    println!(
        "{stores} stores by 3 vCPUs, {copied} pages copied by the log, one slot removed meanwhile"
    );
}
