#![expect(
    unsafe_code,
    reason = "walks tables as hardware does: by what entries say"
)]
//! A vCPU: hardware that walks tables and caches translations, and a hypervisor's loop around it.

use super::board::{Board, Gate};
use super::host::Host;
use super::machine::{Machine, SlotLog};
use super::sync::{Ordering, Random, point, thread};
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{Access, DirtyBy, Format, Leaf, MemoryType, Writes};
use pageferry_tdp::{Entry, Fault, Flush, Log, Platform, Refused, Target, Worker};
use std::slice;

/// A cached translation.
#[derive(Clone, Copy)]
struct Cached {
    first: u64,
    frames: u64,
    pfn: Pfn,
    /// Whether stores succeed without a look at the tables.
    stores: bool,
}

/// A cached pointer to a table of level 1.
#[derive(Clone, Copy)]
struct CachedTable {
    first: u64,
    frames: u64,
    table: Pfn,
}

pub(crate) struct Vcpu<'m, F: Format> {
    machine: &'m Machine<F>,
    worker: Worker<F, Board<F>>,
    number: usize,
    root: Pfn,
    tlb: Vec<Cached>,
    tables: Option<CachedTable>,
    /// The last value that it stored in each page.
    stored: Vec<u64>,
    random: Random,
}

/// The number of cached translations.
const TLB: usize = if cfg!(shuttle) { 4 } else { 64 };

fn overlaps(first: u64, frames: u64, what: Flush) -> bool {
    match what {
        Flush::Range(range) | Flush::Writes(range) => {
            first < range.end().0 && range.start().0 < first + frames
        }
        Flush::Roots => true,
    }
}

impl<'m, F: Format> Vcpu<'m, F> {
    pub(crate) fn new(machine: &'m Machine<F>, number: usize) -> Self {
        Self {
            machine,
            worker: machine.mmu.worker(),
            number,
            root: machine.mmu.root(),
            tlb: Vec::new(),
            tables: None,
            stored: vec![0; machine.host.pages() as usize],
            random: Random::new(number as u64 + 1),
        }
    }

    fn gate(&self) -> &'m Gate {
        &self.machine.mmu.platform().gates[self.number]
    }

    fn host(&self) -> &'m Host {
        &self.machine.host
    }

    /// Accesses pages until the machine ends the run.
    pub(crate) fn run(mut self) {
        // The vCPU does not hear of a root that was replaced before.
        self.gate().enter();
        self.root = self.machine.mmu.root();
        let (mut done, mut gfn) = (0, 0);
        while self.machine.goes_on(done) {
            done += 1;
            self.park();
            // Often the same page again: this finds translations that should be gone.
            if self.random.one_in(2) {
                gfn = self.random.below(self.host().pages());
            }
            let new = (!self.random.one_in(3)).then_some(done);
            self.access(gfn, new);
        }
        self.gate().leave();
    }

    /// Stands still while all vCPUs must.
    fn park(&mut self) {
        let paused = &self.machine.paused;
        // Repeat this after each time: the pausing thread may have seen the vCPU parked from the
        // time before.
        while paused.load(Ordering::SeqCst) {
            self.gate().leave();
            self.gate().parked.store(true, Ordering::SeqCst);
            while paused.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            self.gate().parked.store(false, Ordering::SeqCst);
            self.gate().enter();
        }
    }

    /// One load, or one store of `new`. It may take several faults.
    fn access(&mut self, gfn: u64, new: Option<u64>) {
        let mut faults = 0_u32;
        loop {
            self.poll();
            let Some(pfn) = self.translate(gfn, new.is_some()) else {
                self.fault(gfn, new.is_some());
                faults += 1;
                if faults.is_multiple_of(4) {
                    // It may walk from a replaced root, and fault until it hears of the new one.
                    // For that, others must run.
                    thread::yield_now();
                }
                continue;
            };
            // Requests that arrive here wait until after the access.
            point();
            let found = self.host().access(pfn, Gfn(gfn), self.number, new);
            let last = &mut self.stored[gfn as usize];
            *last = new.unwrap_or(*last);
            assert_eq!(found, *last, "page {gfn:#x}: not what was stored last");
            return;
        }
    }

    /// Does the requests, between two instructions.
    fn poll(&mut self) {
        let Some((number, requests)) = self.gate().requests() else {
            return;
        };
        for what in requests {
            match what {
                Flush::Writes(_) => {
                    for cached in &mut self.tlb {
                        cached.stores &= !overlaps(cached.first, cached.frames, what);
                    }
                }
                Flush::Range(_) | Flush::Roots => {
                    self.tlb
                        .retain(|cached| !overlaps(cached.first, cached.frames, what));
                    self.tables = self
                        .tables
                        .filter(|cached| !overlaps(cached.first, cached.frames, what));
                    if what == Flush::Roots {
                        self.root = self.machine.mmu.root();
                    }
                }
            }
        }
        self.gate().acknowledge(number);
    }

    /// The hardware's translation, from its TLB or by a walk. `None` is a fault.
    fn translate(&mut self, gfn: u64, store: bool) -> Option<Pfn> {
        let hit = |cached: &&Cached| gfn.wrapping_sub(cached.first) < cached.frames;
        let cached = self.tlb.iter().rfind(hit).copied();
        let cached = match cached.filter(|cached| cached.stores || !store) {
            Some(cached) => cached,
            None => self.walk(Gfn(gfn), store)?,
        };
        Some(Pfn(cached.pfn.0 + (gfn - cached.first)))
    }

    fn table(&self, pfn: Pfn, level: u32) -> &'m [Entry] {
        let table = self.machine.mmu.platform().pointer(pfn);
        // SAFETY: hardware may do this. The vCPU received the root, has read the links, and no
        // flush covered either since. So none of the tables is freed, if the MMU is right.
        unsafe { slice::from_raw_parts(table.as_ptr(), F::entries(level)) }
    }

    fn walk(&mut self, gfn: Gfn, store: bool) -> Option<Cached> {
        let access = if store {
            Access::READ_WRITE
        } else {
            Access::READ
        };
        let (mut table, mut level) = match self.tables {
            Some(cached) if gfn.0.wrapping_sub(cached.first) < cached.frames => (cached.table, 1),
            _ => (self.root, F::LEVELS),
        };
        loop {
            let entry = &self.table(table, level)[F::index(gfn, level)];
            let value = entry.load(Ordering::Acquire);
            let frames = F::frames_per_entry(level);
            let first = gfn.0 & !(frames - 1);
            if F::is_table(value, level) {
                table = F::table_pfn(value);
                level -= 1;
                if level == 1 {
                    self.tables = Some(CachedTable {
                        first,
                        frames,
                        table,
                    });
                }
                continue;
            }
            if !F::is_leaf(value, level) || !F::allows(value, access) {
                return None;
            }
            let dirty = if store { F::DIRTY } else { 0 };
            let new = value | (F::ACCESSED | dirty) & F::HARDWARE_UPDATES;
            if new != value
                && entry
                    .compare_exchange(value, new, Ordering::AcqRel, Ordering::Acquire)
                    .is_err()
            {
                continue;
            }
            return Some(self.cache(Cached {
                first,
                frames,
                pfn: F::pfn(new, level),
                stores: F::is_writable(new) && F::is_dirty(new),
            }));
        }
    }

    fn cache(&mut self, cached: Cached) -> Cached {
        // A new translation replaces a cached one for the same page.
        self.tlb
            .retain(|old| old.first != cached.first || old.frames != cached.frames);
        if self.tlb.len() == TLB {
            let victim = self.random.below(TLB as u64);
            self.tlb.remove(victim as usize);
        }
        self.tlb.push(cached);
        cached
    }

    /// The hypervisor's side. A fault drops the cached translations of its page.
    fn fault(&mut self, gfn: u64, store: bool) {
        self.tlb
            .retain(|cached| gfn.wrapping_sub(cached.first) >= cached.frames);
        self.tables = None;
        // Some hypervisors handle faults where their vCPU cannot receive a flush, some outside.
        let outside = self.random.one_in(2);
        if outside {
            self.gate().leave();
        }
        self.gate().faulting.store(true, Ordering::SeqCst);
        let fault = Fault {
            gfn: Gfn(gfn),
            access: if store {
                Access::READ_WRITE
            } else {
                Access::READ
            },
        };
        let log = &self.machine.log;
        let found = self.handle(fault, log);
        self.gate().faulting.store(false, Ordering::SeqCst);
        match found {
            Ok(Some((leaf, level))) if !outside => {
                // A software hypervisor does the same, and need not walk again.
                let frames = F::frames_per_entry(level);
                self.cache(Cached {
                    first: gfn & !(frames - 1),
                    frames,
                    pfn: leaf.pfn,
                    stores: leaf.access.write
                        && (leaf.dirty || F::DIRTY_BY == DirtyBy::WriteProtection),
                });
            }
            Ok(_) => {}
            Err(refused) => {
                self.gate().leave();
                match refused {
                    Refused::TooLarge { .. } => {
                        let page = pageferry_addr::GfnRange::new(Gfn(gfn), 1);
                        self.worker
                            .split(page.expect("a page"), 1, log)
                            .expect("memory");
                    }
                    _ => self.worker.wait(),
                }
                thread::yield_now();
            }
        }
        self.gate().enter();
    }

    /// One attempt. `None` asks for another.
    fn handle(&mut self, fault: Fault, log: &SlotLog) -> Result<Option<(Leaf, u32)>, Refused> {
        if self.random.one_in(2)
            && let Some(mapped) = self.worker.fast_fault(fault, log)
        {
            return Ok(Some((mapped.leaf, mapped.level)));
        }
        let ticket = self.worker.ticket();
        let gfn = fault.gfn.0;
        point();
        let Some(pfn) = self.host().pfn(gfn) else {
            return Err(Refused::Invalidated);
        };
        let is_on = log.is_on();
        let mut level = if is_on || self.machine.small {
            1
        } else {
            F::MAX_LEAF_LEVEL
        };
        while level > 1 && self.host().piece::<F>(gfn, level).is_none() {
            level -= 1;
        }
        point();
        let target = Target {
            pfn,
            level,
            access: Access {
                write: !is_on || fault.access.write,
                execute: true,
            },
            writes: Writes::Allowed,
            memory: MemoryType::WriteBack,
        };
        match self.worker.fault(ticket, fault, target, log) {
            Ok(mapped) => Ok(Some((mapped.leaf, mapped.level))),
            // Either the host moved the page between two looks of `piece`, or another vCPU's old
            // leaf is about to be removed.
            Err(
                refused @ (Refused::Excluded | Refused::Invalidated | Refused::TooLarge { .. }),
            ) => Err(refused),
            Err(refused) => panic!("{fault:?}, {target:?}: {refused}"),
        }
    }
}

impl<F: Format> Drop for Vcpu<'_, F> {
    fn drop(&mut self) {
        // Also after a panic, so that nobody waits for it.
        self.gate().leave();
        self.gate().parked.store(true, Ordering::SeqCst);
    }
}
