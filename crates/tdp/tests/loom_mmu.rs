//! Interleavings of the MMU's kernel: one entry and who changes it, a table and who still is in it when it goes.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pageferry-tdp --release --test loom_mmu`
//!
//! A format of two levels with tables of two entries; a vCPU that is in its guest holds its gate, and the platform's flush
//! takes each gate once. Freed tables and host pages that were given away are cells that loom watches, so that what
//! is not ordered is reported, and not only what is seen too late. Three preemptions, a second or less each, but for the
//! one of aging, with two.
//!
//! What fails when a rule is broken (tried by hand; each model by the name it has below):
//! - entries of a table that was cut off are read and not frozen: `a_fault_beside_a_zap_..`, `a_fault_beside_a_recovery_..`;
//! - a store for the compare-exchange in `Session::change`: `two_faults_..`, `a_fault_beside_a_zap_..`,
//!   `a_fault_beside_a_recovery_..`, `a_split_beside_the_hardware_..`;
//! - no grace period in `Worker::reclaim`, or one epoch of it: `a_table_is_not_freed_before_who_walks_it_..`,
//!   `a_fault_beside_a_zap_..`; none in `OldRoot::dismantle`: `a_tree_is_not_freed_..`;
//! - no flush in `Batch::settle`: `a_table_is_not_freed_before_hardware_..`, and all about what is lost or given away;
//! - the flush before the change: all about stores, `a_fault_beside_an_invalidation_..`, `who_protects_pays_..`;
//! - the log told before the change: `no_store_is_lost_that_a_fast_fault_allows`;
//! - the ticket checked before the lock, or not at all, or the range not looked at: `a_fault_beside_an_invalidation_..`;
//! - roots swapped without the exclusive side: `a_fault_beside_a_fast_zap_..`; a swap that is not counted as owed, or no
//!   `Flush::Roots`: `an_invalidation_beside_a_fast_zap_..`;
//! - a fault that waits for a frozen entry: `a_split_by_break_before_make_..` (it never ends);
//! - a link followed without acquire: `a_page_is_there_..`; an exchange without release and acquire: that and
//!   `who_protects_pays_..`;
//! - what was aged counted before the change, not at all, or without release: `who_protects_pays_for_who_ages`.
#![cfg(loom)]
#![expect(
    unsafe_code,
    reason = "a platform of loom's atomics, and memory that loom watches"
)]

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Mutex, MutexGuard};
use loom::thread::{self, JoinHandle};
use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_tdp::format::{
    Access, AccessedBy, DirtyBy, Ept, Format, Layout, Leaf, MemoryType, Writes,
};
use pageferry_tdp::{
    Entry, Fault, Flush, Found, How, Log, Mapped, Mmu, Platform, Refused, Target, Worker,
};
use std::collections::BTreeSet;
use std::ptr::NonNull;

/// EPT's entries in two levels of two: frames 0 and 1 share a table, or are a large page.
#[derive(Clone, Copy, Debug)]
struct Two<const AD: bool, const BREAKS: bool>;

/// Accessed and dirty bits.
type WithBits = Two<true, false>;
/// None: aging takes permissions, and dirty is what can be stored to.
type WithoutBits = Two<false, false>;
/// With bits, and sizes change by break-before-make.
type Breaking = Two<true, true>;

// SAFETY: EPT's, with fewer levels.
unsafe impl<const AD: bool, const BREAKS: bool> Layout for Two<AD, BREAKS> {
    const NAME: &'static str = "two levels";
    const LEVELS: u32 = 2;
    const MAX_LEAF_LEVEL: u32 = 2;
    const ACCESSED_BY: AccessedBy = Ept::<4, AD>::ACCESSED_BY;
    const DIRTY_BY: DirtyBy = Ept::<4, AD>::DIRTY_BY;
    const BREAK_BEFORE_MAKE: bool = BREAKS;
    const CACHES_NON_PRESENT: bool = false;
    const PFN_SHIFT: u32 = Ept::<4, AD>::PFN_SHIFT;
    const PFN_BITS: u32 = Ept::<4, AD>::PFN_BITS;
    const PRESENT: u64 = Ept::<4, AD>::PRESENT;
    const HARDWARE_PRESENT: u64 = Ept::<4, AD>::HARDWARE_PRESENT;
    const TABLE: u64 = Ept::<4, AD>::TABLE;
    const LEAF: u64 = Ept::<4, AD>::LEAF;
    const WRITE: u64 = Ept::<4, AD>::WRITE;
    const EXECUTE: u64 = Ept::<4, AD>::EXECUTE;
    const NO_EXECUTE: u64 = Ept::<4, AD>::NO_EXECUTE;
    const ACCESSED: u64 = Ept::<4, AD>::ACCESSED;
    const DIRTY: u64 = Ept::<4, AD>::DIRTY;
    const MEMORY: u64 = Ept::<4, AD>::MEMORY;
    const HOST_WRITABLE: u64 = Ept::<4, AD>::HOST_WRITABLE;
    const MMU_WRITABLE: u64 = Ept::<4, AD>::MMU_WRITABLE;
    const SAVED_SHIFT: u32 = Ept::<4, AD>::SAVED_SHIFT;
    const SAVED: u64 = Ept::<4, AD>::SAVED;

    fn memory_bits(memory: MemoryType) -> u64 {
        Ept::<4, AD>::memory_bits(memory)
    }

    fn leaf_kind(level: u32) -> u64 {
        Ept::<4, AD>::leaf_kind(level)
    }

    fn is_leaf_kind(entry: u64, level: u32) -> bool {
        Ept::<4, AD>::is_leaf_kind(entry, level)
    }
}

/// One table. Its memory stays until the model is over, so that who uses it too late is found and not lost.
struct Slot {
    entries: Vec<Entry>,
    /// Read by whoever goes to the table and written when it is freed: loom reports the one that is not ordered before
    /// the other.
    freed: UnsafeCell<bool>,
}

/// What a TLB has of the one page that the models store to.
#[derive(Clone, Copy, Debug)]
struct Cached {
    pfn: u64,
    write: bool,
}

/// A vCPU: who holds this is in the guest, or handles its fault.
type Gate = Mutex<Option<Cached>>;

/// A platform whose frames are indices of tables, and whose flush waits for each vCPU to be out of its guest.
struct Machine {
    /// Never touched while it is held: loom's objects.
    tables: std::sync::Mutex<Vec<NonNull<Slot>>>,
    gates: Vec<Arc<Gate>>,
}

// SAFETY: slots are shared, and what is not shared correctly in them is what the models look for.
unsafe impl Send for Machine {}
// SAFETY: as above.
unsafe impl Sync for Machine {}

impl Machine {
    fn slot(&self, table: Pfn) -> &Slot {
        let slot = self.tables.lock().unwrap()[table.0 as usize - 1];
        // SAFETY: freed with `self`.
        unsafe { slot.as_ref() }
    }

    /// Tables that are not freed.
    fn live(&self) -> usize {
        let tables = self.tables.lock().unwrap().clone();
        let live = |slot: &&NonNull<Slot>| {
            // SAFETY: as in `slot`.
            let freed = unsafe { &slot.as_ref().freed };
            // SAFETY: loom reports whoever frees beside this.
            !freed.with(|freed| unsafe { *freed })
        };
        tables.iter().filter(live).count()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for slot in std::mem::take(&mut *self.tables.lock().unwrap()) {
            // SAFETY: leaked by `allocate_table`, and the MMU is gone.
            drop(unsafe { Box::from_raw(slot.as_ptr()) });
        }
    }
}

// SAFETY: frames are different and stay those of their tables; alignment and reuse do not matter where memory is
// never reused; `flush` holds each gate once.
unsafe impl Platform for Machine {
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>> {
        let slot = Box::new(Slot {
            entries: (0..entries).map(|_| Entry::new(0)).collect(),
            freed: UnsafeCell::new(false),
        });
        let slot = NonNull::from(Box::leak(slot));
        self.tables.lock().unwrap().push(slot);
        // SAFETY: just leaked.
        Some(NonNull::from(&unsafe { slot.as_ref() }.entries[0]))
    }

    unsafe fn free_table(&self, table: NonNull<Entry>, _: usize) {
        let slot = self.slot(self.frame(table));
        // SAFETY: loom reports whoever may use the table beside this, or later.
        slot.freed
            .with_mut(|freed| assert!(!std::mem::replace(unsafe { &mut *freed }, true)));
    }

    fn frame(&self, table: NonNull<Entry>) -> Pfn {
        let tables = self.tables.lock().unwrap();
        // SAFETY: as in `slot`.
        let is = |slot: &NonNull<Slot>| unsafe { slot.as_ref() }.entries.as_ptr() == table.as_ptr();
        Pfn(tables.iter().position(is).expect("a table") as u64 + 1)
    }

    fn pointer(&self, table: Pfn) -> NonNull<Entry> {
        let slot = self.slot(table);
        assert!(
            // SAFETY: loom reports whoever frees it beside this.
            !slot.freed.with(|freed| unsafe { *freed }),
            "a freed table is used"
        );
        NonNull::from(&slot.entries[0])
    }

    fn flush(&self, what: Flush) {
        for gate in &self.gates {
            let mut tlb = gate.lock().unwrap();
            match what {
                Flush::Writes(_) => tlb.iter_mut().for_each(|cached| cached.write = false),
                Flush::Range(_) | Flush::Roots => *tlb = None,
            }
        }
    }

    fn relax(&self) {
        thread::yield_now();
    }
}

type W<F> = Worker<F, Machine>;
/// A thread, which gives its worker back.
type Run<F, O> = JoinHandle<(O, W<F>)>;

/// Tables, one vCPU's TLB, a page's contents, and a log of four frames.
struct Vm<F: Format> {
    mmu: std::sync::Arc<Mmu<F, Machine>>,
    gate: Arc<Gate>,
    log: Bits,
    /// What the guest stored last.
    memory: Arc<AtomicU64>,
}

impl<F: Format> Clone for Vm<F> {
    fn clone(&self) -> Self {
        Self {
            mmu: self.mmu.clone(),
            gate: self.gate.clone(),
            log: self.log.clone(),
            memory: self.memory.clone(),
        }
    }
}

/// A log: a bit a frame.
#[derive(Clone)]
struct Bits(Arc<AtomicU64>);

impl Log for Bits {
    fn dirtied(&self, gfn: Gfn, pages: u64) {
        let bits = ((1 << pages) - 1) << gfn.0;
        self.0.fetch_or(bits, Ordering::AcqRel);
    }
}

impl Bits {
    fn take(&self) -> u64 {
        self.0.swap(0, Ordering::AcqRel)
    }
}

const BOTH: u64 = 2;
/// Behind frame 0; frame 1 is behind by one more.
const OLD: u64 = 8;
const NEW: u64 = 12;

fn range(pages: u64) -> GfnRange {
    GfnRange::new(Gfn(0), pages).unwrap()
}

fn target(pfn: u64, level: u32) -> Target {
    Target {
        pfn: Pfn(pfn),
        level,
        access: Access::READ_WRITE,
        writes: Writes::Allowed,
        memory: MemoryType::WriteBack,
    }
}

fn fault<F: Format>(
    worker: &mut W<F>,
    gfn: u64,
    access: Access,
    target: Target,
    log: &impl Log,
) -> Result<Mapped, Refused> {
    let fault = Fault {
        gfn: Gfn(gfn),
        access,
    };
    worker.fault(worker.ticket(), fault, target, log)
}

impl<F: Format> Vm<F> {
    fn new() -> Self {
        let gate = Arc::new(Mutex::new(None));
        let machine = Machine {
            tables: std::sync::Mutex::new(Vec::new()),
            gates: vec![gate.clone()],
        };
        Self {
            mmu: Mmu::new(machine).unwrap(),
            gate,
            log: Bits(Arc::new(AtomicU64::new(0))),
            memory: Arc::new(AtomicU64::new(0)),
        }
    }

    /// Does something with a worker that is gone afterwards.
    fn before<O>(&self, body: impl FnOnce(&mut W<F>) -> O) -> O {
        body(&mut self.mmu.worker())
    }

    fn spawn<O: 'static>(&self, body: impl FnOnce(&Self, &mut W<F>) -> O + 'static) -> Run<F, O>
    where
        W<F>: 'static,
    {
        let (vm, mut worker) = (self.clone(), self.mmu.worker());
        thread::spawn(move || (body(&vm, &mut worker), worker))
    }

    /// Two threads, of which loom starts the second first where `swap`; what they give, and their workers.
    fn race<A: 'static, B: 'static>(
        &self,
        swap: bool,
        a: impl FnOnce(&Self, &mut W<F>) -> A + 'static,
        b: impl FnOnce(&Self, &mut W<F>) -> B + 'static,
    ) -> (A, B, [W<F>; 2])
    where
        W<F>: 'static,
    {
        let (a, b) = if swap {
            let b = self.spawn(b);
            (self.spawn(a), b)
        } else {
            (self.spawn(a), self.spawn(b))
        };
        let ((a, first), (b, second)) = (a.join().unwrap(), b.join().unwrap());
        (a, b, [first, second])
    }

    /// The vCPU's store of `value` to `gfn`, by the TLB or the tables; `fix` handles the fault. Whether it was made.
    fn store(
        &self,
        worker: &mut W<F>,
        gfn: u64,
        value: u64,
        fix: impl FnOnce(&mut W<F>) -> bool,
    ) -> bool {
        let mut tlb = self.gate.lock().unwrap();
        if !tlb.is_some_and(|cached| cached.write) {
            *tlb = seen(worker, gfn);
            if tlb.is_none() && fix(worker) {
                *tlb = seen(worker, gfn);
            }
            if tlb.is_none() {
                return false;
            }
        }
        self.memory.store(value, Ordering::Relaxed);
        true
    }

    /// The counts are what is there, and all tables that are not in use are free.
    fn check<const N: usize>(&self, mut workers: [W<F>; N]) {
        let mut leaves = [0; 3];
        let all = GfnRange::new(Gfn(0), F::GFN_LIMIT.0).unwrap();
        workers[0].scan(all, |_, found| leaves[found.level as usize - 1] += 1);
        drop(workers);
        let stats = self.mmu.stats();
        assert_eq!(stats.leaves, leaves);
        assert_eq!(self.mmu.platform().live() as u64, 1 + stats.tables);
    }

    /// Which frames the tables or the log know to be dirty.
    fn dirty(&self, worker: &mut W<F>) -> u64 {
        worker.clear_dirty(range(4), &self.log);
        self.log.take()
    }
}

/// What a vCPU's TLB has after a store that was let through.
fn seen<F: Format>(worker: &mut W<F>, gfn: u64) -> Option<Cached> {
    let Found { leaf, .. } = worker.translate(Gfn(gfn), Access::READ_WRITE)?;
    let Leaf { pfn, .. } = leaf;
    Some(Cached {
        pfn: pfn.0,
        write: true,
    })
}

/// All that `model` can give. It runs twice, with its threads in either order: loom remembers one last access of an
/// atomic, so that a thread that loads before it exchanges can hide an earlier load of another's, and one order alone
/// explores less than it seems to.
fn explore<O: Ord + std::fmt::Debug + Send + 'static>(
    model: impl Fn(bool) -> O + Copy + Sync + Send + 'static,
) -> BTreeSet<O> {
    explore_preempting(3, model)
}

fn explore_preempting<O: Ord + std::fmt::Debug + Send + 'static>(
    preemptions: usize,
    model: impl Fn(bool) -> O + Copy + Sync + Send + 'static,
) -> BTreeSet<O> {
    let seen = std::sync::Arc::new(std::sync::Mutex::new(BTreeSet::new()));
    for swap in [false, true] {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(preemptions);
        builder.max_branches = 5000;
        let outcomes = std::sync::Arc::clone(&seen);
        builder.check(move || {
            let outcome = model(swap);
            outcomes.lock().unwrap().insert(outcome);
        });
    }
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    println!("{seen:?}");
    seen
}

const AT_0: Fault = Fault {
    gfn: Gfn(0),
    access: Access::READ_WRITE,
};

#[test]
fn two_faults_of_one_frame_agree_on_one_leaf() {
    let seen = explore(|swap| {
        let vm = Vm::<WithBits>::new();
        let map = |_: &Vm<_>, worker: &mut W<_>| {
            let mapped = fault(worker, 0, Access::READ, target(OLD, 1), &());
            mapped.unwrap().how == How::Installed
        };
        let (mine, theirs, workers) = vm.race(swap, map, map);
        vm.check(workers);
        (mine, theirs)
    });
    assert_eq!(seen, BTreeSet::from([(true, false), (false, true)]));
}

/// The table that the fault goes to is cut off before it, beside it, or after it.
#[test]
fn a_fault_beside_a_zap_that_cuts_its_table_off() {
    let seen = explore(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap());
        let (mapped, zapped, mut workers) = vm.race(
            swap,
            |_, worker| fault(worker, 1, Access::READ, target(OLD + 1, 1), &()),
            |_, worker| worker.zap(range(BOTH), &()),
        );
        assert_eq!(mapped.unwrap().how, How::Installed);
        let there = workers[0].walk(Gfn(1)).is_some();
        assert_eq!(workers[0].walk(Gfn(0)), None);
        vm.check(workers);
        (zapped, there)
    });
    // Mapped after the zap, or found by it.
    assert_eq!(seen, BTreeSet::from([(1, true), (2, false)]));
}

/// Host memory that is given away when an invalidation says it may be.
struct Ram([UnsafeCell<()>; 2]);

// SAFETY: loom reports accesses that race.
unsafe impl Sync for Ram {}
// SAFETY: as above.
unsafe impl Send for Ram {}

impl Ram {
    fn new() -> Arc<Self> {
        Arc::new(Self([UnsafeCell::new(()), UnsafeCell::new(())]))
    }

    /// The guest uses the frame.
    fn touch(&self, pfn: u64) {
        self.0[usize::from(pfn == NEW)].with(|_| ());
    }

    /// The host puts the old frame to another use.
    fn give_away(&self) {
        self.0[0].with_mut(|_| ());
    }
}

#[test]
fn a_fault_beside_an_invalidation_never_maps_what_is_given_away() {
    let seen = explore(|swap| {
        let vm = Vm::<WithBits>::new();
        let (ram, host) = (Ram::new(), Arc::new(AtomicU64::new(OLD)));
        let (ram_too, host_too) = (ram.clone(), host.clone());
        let (used, (), mut workers) = vm.race(
            swap,
            move |vm, worker| {
                let _inside = vm.gate.lock().unwrap();
                let ticket = worker.ticket();
                let pfn = host.load(Ordering::Relaxed);
                let answer = worker.fault(ticket, AT_0, target(pfn, 1), &());
                if answer.is_ok() {
                    ram.touch(worker.translate(Gfn(0), Access::READ)?.leaf.pfn.0);
                }
                Some(answer.map(|mapped| mapped.leaf.pfn.0))
            },
            move |_, worker| {
                let invalidating = worker.invalidate(&[range(1)], &());
                // The host moves the page.
                ram_too.give_away();
                host_too.store(NEW, Ordering::Relaxed);
                drop(invalidating);
            },
        );
        let left = workers[0].walk(Gfn(0)).map(|found| found.leaf.pfn.0);
        assert!(left.is_none_or(|pfn| pfn == NEW));
        vm.check(workers);
        used.map(|answer| answer.map_err(|refused| format!("{refused:?}")))
    });
    let refused = |why: &str| Some(Err(why.to_owned()));
    let all = [
        // Zapped between the fault and the look, which is over before the flush.
        None,
        Some(Ok(OLD)),
        Some(Ok(NEW)),
        refused("Excluded"),
        refused("Invalidated"),
    ];
    assert_eq!(seen, BTreeSet::from(all));
}

/// (W): an entry is writable, then the log says so, then a TLB has it; the reader takes the bit, protects, flushes.
fn no_store_is_lost_to_a_reader_of_the_log(mapped: bool) -> BTreeSet<(u64, u64, bool)> {
    explore(move |swap| {
        let vm = Vm::<WithoutBits>::new();
        vm.before(|worker| {
            let access = if mapped {
                Access::READ_WRITE
            } else {
                Access::READ
            };
            fault(worker, 0, access, target(OLD, 1), &vm.log).unwrap();
            if !mapped {
                worker.write_protect(range(1), &());
                vm.log.take();
            }
        });
        let (last, (copied, bit), workers) = vm.race(
            swap,
            |vm, worker| {
                let fix = |worker: &mut W<_>| worker.fast_fault(AT_0, &vm.log).is_some();
                // Where it is protected in the middle of its fault, the guest would fault again.
                (1..=2)
                    .take_while(|&value| vm.store(worker, 0, value, fix))
                    .count() as u64
            },
            |vm, worker| {
                let bit = vm.log.take() != 0;
                if bit {
                    worker.write_protect(range(1), &());
                }
                (vm.memory.load(Ordering::Relaxed), bit)
            },
        );
        assert!(
            copied == last || vm.log.take() != 0,
            "the store of {last} is lost"
        );
        vm.check(workers);
        (last, copied, bit)
    })
}

#[test]
fn no_store_is_lost_that_a_fast_fault_allows() {
    let seen = no_store_is_lost_to_a_reader_of_the_log(false);
    let some = [(2, 0, false), (2, 1, true), (2, 2, true)];
    assert!(seen.is_superset(&BTreeSet::from(some)));
}

#[test]
fn no_store_is_lost_that_was_allowed_before() {
    let seen = no_store_is_lost_to_a_reader_of_the_log(true);
    let some = [(2, 0, true), (2, 1, true), (2, 2, true)];
    assert!(seen.is_superset(&BTreeSet::from(some)));
}

#[test]
fn no_store_is_lost_that_only_a_dirty_bit_tells_of() {
    let seen = explore(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &vm.log).unwrap());
        let ((), (copied, bit), mut workers) = vm.race(
            swap,
            |vm, worker| {
                for value in 1..=2 {
                    assert!(vm.store(worker, 0, value, |_| false));
                }
            },
            |vm, worker| {
                let bit = vm.dirty(worker) != 0;
                (vm.memory.load(Ordering::Relaxed), bit)
            },
        );
        assert!(
            copied == 2 || vm.dirty(&mut workers[0]) != 0,
            "the last store is lost"
        );
        vm.check(workers);
        (copied, bit)
    });
    // The flush waits for what the bit tells of.
    assert!(!seen.contains(&(0, true)));
    assert!(seen.is_superset(&BTreeSet::from([(0, false), (1, true), (2, true)])));
}

#[test]
fn a_split_beside_the_hardware_keeps_its_dirty_bit() {
    let seen = explore(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 2), &()).unwrap());
        let (stored, split, mut workers) = vm.race(
            swap,
            // A lost exchange reads as absent, and the guest would fault.
            |vm, worker| vm.store(worker, 1, 1, |_| false),
            |vm, worker| worker.split(range(BOTH), 1, &vm.log),
        );
        assert_eq!(split, Ok(1));
        let found = [0, 1].map(|gfn| workers[0].walk(Gfn(gfn)).unwrap());
        let found = found.map(|found| (found.leaf.pfn.0, found.level));
        assert_eq!(found, [(OLD, 1), (OLD + 1, 1)]);
        let dirty = vm.dirty(&mut workers[0]);
        vm.check(workers);
        (stored, dirty)
    });
    // Of the large page, or of the small one.
    let all = [(true, 0b11), (true, 0b10), (false, 0)];
    assert_eq!(seen, BTreeSet::from(all));
}

/// Old and new say the same, so nobody notices.
#[test]
fn a_page_is_there_while_it_is_split() {
    let seen = explore(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 2), &()).unwrap());
        let (found, split, workers) = vm.race(
            swap,
            |_, worker| {
                worker
                    .walk(Gfn(1))
                    .map(|found| (found.leaf.pfn.0, found.level))
            },
            |_, worker| worker.split(range(BOTH), 1, &()),
        );
        assert_eq!(split, Ok(1));
        vm.check(workers);
        found
    });
    assert_eq!(seen, BTreeSet::from([Some((OLD, 2)), Some((OLD + 1, 1))]));
}

/// The flush between break and make waits for the vCPU, which must not wait for the entry.
#[test]
fn a_split_by_break_before_make_and_a_fault_do_not_wait_for_each_other() {
    let seen = explore(|swap| {
        let vm = Vm::<Breaking>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 2), &()).unwrap());
        let (stored, split, mut workers) = vm.race(
            swap,
            |vm, worker| {
                let mut refused = false;
                let stored = vm.store(worker, 1, 1, |worker| {
                    let answer = fault(worker, 1, Access::READ_WRITE, target(OLD + 1, 1), &());
                    refused = answer.is_err();
                    answer.is_ok()
                });
                assert!(stored || refused);
                stored
            },
            |vm, worker| worker.split(range(BOTH), 1, &vm.log),
        );
        assert_eq!(split, Ok(1));
        let dirty = vm.dirty(&mut workers[0]);
        vm.check(workers);
        (stored, dirty)
    });
    assert_eq!(
        seen,
        BTreeSet::from([(true, 0b11), (true, 0b10), (false, 0)])
    );
}

#[test]
fn a_fault_beside_a_recovery_finds_the_page_and_loses_no_dirty_bit() {
    let seen = explore(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap());
        let (stored, recovered, mut workers) = vm.race(
            swap,
            |vm, worker| {
                // What it mapped may be gone before it looks; it would fault again.
                vm.store(worker, 1, 1, |worker| {
                    let answer = fault(worker, 1, Access::READ_WRITE, target(OLD + 1, 1), &());
                    answer.unwrap();
                    true
                })
            },
            |vm, worker| {
                let large = |gfn: Gfn, level| Some(target(OLD + gfn.0, level));
                worker.recover(range(BOTH), &vm.log, large)
            },
        );
        let found = workers[0].walk(Gfn(1)).unwrap();
        assert_eq!((recovered, found.leaf.pfn.0, found.level), (1, OLD, 2));
        let dirty = vm.dirty(&mut workers[0]);
        assert!(!stored || dirty & 0b10 != 0, "the dirty bit is lost");
        vm.check(workers);
        (stored, dirty)
    });
    assert!(seen.is_superset(&BTreeSet::from([(true, 0b10), (true, 0b11)])));
}

#[test]
fn a_fault_beside_a_fast_zap_is_in_the_old_tree_or_in_the_new() {
    let seen = explore(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap());
        let (mapped, zapped, mut workers) = vm.race(
            swap,
            |vm, worker| {
                let _inside = vm.gate.lock().unwrap();
                fault(worker, 1, Access::READ, target(OLD + 1, 1), &()).is_ok()
            },
            |_, worker| worker.zap_all(&()).unwrap(),
        );
        let left = workers[0].walk(Gfn(1)).is_some();
        assert_eq!(u64::from(left) + zapped, 1 + u64::from(mapped));
        vm.check(workers);
        (mapped, left)
    });
    let all = [(true, false), (true, true), (false, false)];
    assert_eq!(seen, BTreeSet::from(all));
}

/// An invalidation that finds nothing in the new tree must not think that vCPUs have left the old one.
#[test]
fn an_invalidation_beside_a_fast_zap_waits_for_the_old_tree_as_well() {
    let seen = explore(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| {
            fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap();
            *vm.gate.lock().unwrap() = seen(worker, 0);
        });
        let (zapped, old, workers) = vm.race(
            swap,
            |vm, worker| {
                let invalidating = worker.invalidate(&[range(1)], &());
                // What a vCPU has in its TLB now it uses, while the frame is another's.
                let tlb = *vm.gate.lock().unwrap();
                assert!(
                    tlb.is_none_or(|cached| cached.pfn != OLD),
                    "it is given away"
                );
                invalidating.zapped()
            },
            |_, worker| worker.zap_all(&()).unwrap(),
        );
        assert_eq!(zapped + old, 1);
        vm.check(workers);
        zapped
    });
    assert_eq!(seen, BTreeSet::from([0, 1]));
}

/// Who was in a table when it was cut off may stay there until its guard ends.
#[test]
fn a_table_is_not_freed_before_who_walks_it_has_gone() {
    let seen = explore(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap());
        let (found, left, workers) = vm.race(
            swap,
            |_, worker| worker.walk(Gfn(0)).is_some(),
            |_, worker| {
                assert_eq!(worker.zap(range(BOTH), &()), 1);
                worker.reclaim();
                worker.reclaim()
            },
        );
        vm.check(workers);
        (found, left)
    });
    assert!(seen.is_superset(&BTreeSet::from([(true, 1), (true, 0), (false, 0)])));
}

/// The same for a tree whose root was replaced.
#[test]
fn a_tree_is_not_freed_before_who_walks_it_has_gone() {
    let seen = explore(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap());
        let (found, zapped, workers) = vm.race(
            swap,
            |_, worker| worker.walk(Gfn(0)).is_some(),
            |_, worker| worker.zap_all(&()),
        );
        assert_eq!(zapped, Ok(1));
        vm.check(workers);
        found
    });
    assert_eq!(seen, BTreeSet::from([false, true]));
}

/// Hardware holds no guard: it is made to leave by the flush.
#[test]
fn a_table_is_not_freed_before_hardware_has_left_it() {
    let seen = explore(|swap| {
        let vm = Vm::<WithBits>::new();
        vm.before(|worker| fault(worker, 0, Access::READ, target(OLD, 1), &()).unwrap());
        let (found, (), workers) = vm.race(
            swap,
            |vm, _| hardware_finds(&vm.mmu, &vm.gate.lock().unwrap(), 0),
            |_, worker| {
                assert_eq!(worker.zap(range(BOTH), &()), 1);
                // Nobody has a guard for long.
                (0..4).for_each(|_| _ = worker.reclaim());
            },
        );
        vm.check(workers);
        found
    });
    assert_eq!(seen, BTreeSet::from([false, true]));
}

/// A walk by a processor that is inside its guest.
fn hardware_finds<F: Format>(
    mmu: &Mmu<F, Machine>,
    _inside: &MutexGuard<'_, Option<Cached>>,
    gfn: u64,
) -> bool {
    let mut table = mmu.root();
    let mut level = F::LEVELS;
    loop {
        let entries = mmu.platform().pointer(table);
        // SAFETY: in the table; that it is not freed is what the model is about.
        let entry = unsafe { entries.add(F::index(Gfn(gfn), level)).as_ref() };
        let value = entry.load(Ordering::Acquire);
        if !F::is_table(value, level) {
            return F::is_leaf(value, level);
        }
        (table, level) = (F::table_pfn(value), level - 1);
    }
}

/// Aging takes the permission to store and does not flush; who has to know flushes, even if it finds nothing to take.
#[test]
fn who_protects_pays_for_who_ages() {
    let seen = explore_preempting(2, |swap| {
        let vm = Vm::<WithoutBits>::new();
        vm.before(|worker| {
            fault(worker, 0, Access::READ_WRITE, target(OLD, 1), &vm.log).unwrap();
        });
        let guest = vm.spawn(|vm, worker| vm.store(worker, 0, 1, |_| false));
        let (young, (), workers) = vm.race(
            swap,
            |_, worker| worker.age(range(1), true, &()),
            |vm, worker| {
                worker.flush();
                worker.write_protect(range(1), &());
                let tlb = *vm.gate.lock().unwrap();
                assert!(
                    !tlb.is_some_and(|cached| cached.write),
                    "a store would go unnoticed"
                );
            },
        );
        let (stored, other) = guest.join().unwrap();
        drop(other);
        vm.check(workers);
        (young, stored)
    });
    assert_eq!(seen, BTreeSet::from([(1, false), (1, true)]));
}
