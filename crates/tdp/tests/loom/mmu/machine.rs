#![expect(
    unsafe_code,
    reason = "a platform of loom's atomics, and memory that loom watches"
)]
//! The platform: tables whose freeing loom watches, and a flush that takes each vCPU's gate once.

use loom::cell::UnsafeCell;
use loom::sync::atomic::Ordering;
use loom::sync::{Arc, Mutex, MutexGuard};
use loom::thread;
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::Format;
use pageferry_tdp::{Entry, Flush, Mmu, Platform};
use std::ptr::NonNull;

/// One table. Its memory stays until the model is over, so that a late use is found and does not
/// crash.
struct Slot {
    entries: Vec<Entry>,
    /// Read by each thread that enters the table, and written when it is freed. Loom reports an
    /// access that is not ordered before or after the other.
    freed: UnsafeCell<bool>,
}

/// The TLB's entry for the one page that the models store to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cached {
    pub(crate) pfn: u64,
    pub(crate) write: bool,
}

/// The gate of a vCPU. Its holder is in the guest, or handles its fault.
pub(crate) type Gate = Mutex<Option<Cached>>;

/// A platform whose frames are indices of tables, and whose flush waits for each vCPU to be out of
/// its guest.
pub(crate) struct Machine {
    /// The lock is not held while loom's objects are used.
    tables: std::sync::Mutex<Vec<NonNull<Slot>>>,
    gates: Vec<Arc<Gate>>,
}

// SAFETY: slots are shared, and the models look for incorrect sharing.
unsafe impl Send for Machine {}
// SAFETY: as above.
unsafe impl Sync for Machine {}

impl Machine {
    /// A platform with one vCPU, whose gate this is.
    pub(crate) fn new(gate: Arc<Gate>) -> Self {
        Self {
            tables: std::sync::Mutex::new(Vec::new()),
            gates: vec![gate],
        }
    }

    fn slot(&self, table: Pfn) -> &Slot {
        let slot = self.tables.lock().unwrap()[table.0 as usize - 1];
        // SAFETY: freed with `self`.
        unsafe { slot.as_ref() }
    }

    /// Tables that are not freed.
    pub(crate) fn live(&self) -> usize {
        let tables = self.tables.lock().unwrap().clone();
        let live = |slot: &&NonNull<Slot>| {
            // SAFETY: as in `slot`.
            let freed = unsafe { &slot.as_ref().freed };
            // SAFETY: loom reports a concurrent free.
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

// SAFETY: tables have different frames and keep them. Alignment and reuse do not matter, as memory
// is never reused. `flush` holds each gate once.
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
        // SAFETY: loom reports a concurrent or later use of the table.
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
            // SAFETY: loom reports a concurrent free.
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

/// A walk by a processor that is inside its guest.
pub(crate) fn hardware_finds<F: Format>(
    mmu: &Mmu<F, Machine>,
    _inside: &MutexGuard<'_, Option<Cached>>,
    gfn: u64,
) -> bool {
    let mut table = mmu.root();
    let mut level = F::LEVELS;
    loop {
        let entries = mmu.platform().pointer(table);
        // SAFETY: inside the table. The model tests that it is not freed.
        let entry = unsafe { entries.add(F::index(Gfn(gfn), level)).as_ref() };
        let value = entry.load(Ordering::Acquire);
        if !F::is_table(value, level) {
            return F::is_leaf(value, level);
        }
        (table, level) = (F::table_pfn(value), level - 1);
    }
}
