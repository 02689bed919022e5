#![expect(unsafe_code, reason = "a platform of tables from the heap")]
//! A platform that knows its live tables, and runs hooks inside a flush and on the way to a table.

use pageferry_addr::{Gfn, GfnRange, PAGE_SHIFT, Pfn};
use pageferry_tdp::format::{Access, Format, MemoryType, Writes};
use pageferry_tdp::{Entry, Fault, Flush, Log, Mapped, Mmu, Platform, Refused, Target, Worker};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// An action that runs once.
type Hook = Box<dyn FnOnce() + Send>;

/// Tables from the heap, each aligned to its own size, as in the example on the crate's front page.
#[derive(Default)]
pub(crate) struct Hooked {
    /// The address and the entries of each table that is not freed.
    live: Mutex<BTreeMap<usize, usize>>,
    flushes: Mutex<Vec<Flush>>,
    hook: Mutex<Option<Hook>>,
    /// An action before the next walk enters the table in this frame.
    at_table: Mutex<Option<(Pfn, Hook)>>,
    /// The frames of the tables that walks entered, while a test wants them.
    entered: Mutex<Option<Vec<Pfn>>>,
    relaxed: AtomicU64,
}

impl Hooked {
    pub(crate) fn take_flushes(&self) -> Vec<Flush> {
        std::mem::take(&mut self.flushes.lock().unwrap())
    }

    pub(crate) fn at_next_flush(&self, hook: impl FnOnce() + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(hook));
    }

    /// Runs `hook` when a walk has loaded the link to `table`, and has read none of its entries.
    pub(crate) fn at_table(&self, table: Pfn, hook: impl FnOnce() + Send + 'static) {
        *self.at_table.lock().unwrap() = Some((table, Box::new(hook)));
    }

    /// The frames of the tables that lead to `gfn`, from the root on.
    pub(crate) fn tables_to<F: Format>(&self, worker: &mut Worker<F, Self>, gfn: u64) -> Vec<Pfn> {
        *self.entered.lock().unwrap() = Some(Vec::new());
        _ = worker.walk(Gfn(gfn));
        self.entered.lock().unwrap().take().unwrap()
    }

    /// The number of times that a worker has waited for another.
    pub(crate) fn relaxed(&self) -> u64 {
        self.relaxed.load(Ordering::Relaxed)
    }

    /// The number of tables that are allocated and not freed.
    pub(crate) fn live(&self) -> usize {
        self.live.lock().unwrap().len()
    }

    /// The number of entries of each live table.
    pub(crate) fn sizes(&self) -> Vec<usize> {
        self.live.lock().unwrap().values().copied().collect()
    }
}

fn layout(entries: usize) -> Layout {
    Layout::from_size_align(entries * 8, entries * 8).unwrap()
}

// SAFETY: the allocator's memory is zeroed and aligned to its size, and its addresses are exposed.
// There is no hardware.
unsafe impl Platform for Hooked {
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>> {
        // SAFETY: not of size 0.
        let table = NonNull::new(unsafe { alloc_zeroed(layout(entries)) })?;
        let address = table.as_ptr().expose_provenance();
        self.live.lock().unwrap().insert(address, entries);
        Some(table.cast())
    }

    unsafe fn free_table(&self, table: NonNull<Entry>, entries: usize) {
        let address = table.as_ptr().addr();
        let allocated = self.live.lock().unwrap().remove(&address);
        assert_eq!(allocated, Some(entries), "freed as it was allocated");
        // SAFETY: from `allocate_table` with as many entries, as the caller promises.
        unsafe { dealloc(table.as_ptr().cast(), layout(entries)) };
    }

    fn frame(&self, table: NonNull<Entry>) -> Pfn {
        Pfn(table.as_ptr().addr() as u64 >> PAGE_SHIFT)
    }

    fn pointer(&self, table: Pfn) -> NonNull<Entry> {
        let address = (table.0 << PAGE_SHIFT) as usize;
        let live = self.live.lock().unwrap().contains_key(&address);
        assert!(live, "no table is at {address:#x}");
        if let Some(entered) = &mut *self.entered.lock().unwrap() {
            entered.push(table);
        }
        let hook = self
            .at_table
            .lock()
            .unwrap()
            .take_if(|hook| hook.0 == table);
        if let Some((_, hook)) = hook {
            hook();
        }
        NonNull::new(ptr::with_exposed_provenance_mut(address)).expect("a table's frame")
    }

    fn flush(&self, what: Flush) {
        self.flushes.lock().unwrap().push(what);
        let hook = self.hook.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
    }

    fn relax(&self) {
        self.relaxed.fetch_add(1, Ordering::Relaxed);
        std::thread::yield_now();
    }
}

pub(crate) fn new<F: Format>() -> Arc<Mmu<F, Hooked>> {
    Mmu::new(Hooked::default()).unwrap()
}

pub(crate) fn range(first: u64, pages: u64) -> GfnRange {
    GfnRange::new(Gfn(first), pages).unwrap()
}

pub(crate) fn target(pfn: u64, level: u32) -> Target {
    Target {
        pfn: Pfn(pfn),
        level,
        access: Access::ALL,
        writes: Writes::Allowed,
        memory: MemoryType::WriteBack,
    }
}

pub(crate) fn fault<F: Format>(
    worker: &mut Worker<F, Hooked>,
    gfn: u64,
    access: Access,
    target: Target,
) -> Result<Mapped, Refused> {
    let ticket = worker.ticket();
    let gfn = Gfn(gfn);
    worker.fault(ticket, Fault { gfn, access }, target, &())
}

/// Maps `gfn` to the frame of the same number, by 4 KiB, dirty.
pub(crate) fn map<F: Format>(worker: &mut Worker<F, Hooked>, gfn: u64) {
    fault(worker, gfn, Access::READ_WRITE, target(gfn, 1)).unwrap();
}

/// A log that calls its function with the first page of each dirty report.
pub(crate) struct OnDirty<T>(pub(crate) T);

impl<T: Fn(Gfn)> Log for OnDirty<T> {
    fn is_on(&self) -> bool {
        false
    }

    fn dirtied(&self, gfn: Gfn, _: u64) {
        (self.0)(gfn);
    }
}
