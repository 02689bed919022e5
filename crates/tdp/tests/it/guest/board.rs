#![expect(unsafe_code, reason = "a platform of tables from the heap")]
//! The platform: tables whose memory is poisoned when it is freed, and the gates of vCPUs.

use super::sync::{AtomicBool, AtomicU64, Ordering, thread};
use pageferry_addr::{PAGE_SHIFT, Pfn};
use pageferry_tdp::format::Format;
use pageferry_tdp::{Barrier, Entry, Flush, Platform};
use std::alloc::{Layout, alloc, dealloc};
use std::cell::Cell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Mutex as PlainMutex, PoisonError};

/// The place where a vCPU receives requests.
pub(crate) struct Gate {
    requested: AtomicU64,
    acknowledged: AtomicU64,
    inside: AtomicBool,
    /// Whether it handles a fault with data that it has read about the slot.
    pub(crate) faulting: AtomicBool,
    /// Whether it stands still because all vCPUs must, or has ended.
    pub(crate) parked: AtomicBool,
    pending: PlainMutex<Vec<Flush>>,
}

impl Gate {
    fn new() -> Self {
        Self {
            requested: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            inside: AtomicBool::new(false),
            faulting: AtomicBool::new(false),
            parked: AtomicBool::new(false),
            pending: PlainMutex::new(Vec::new()),
        }
    }

    pub(crate) fn enter(&self) {
        self.inside.store(true, Ordering::SeqCst);
    }

    pub(crate) fn leave(&self) {
        self.inside.store(false, Ordering::SeqCst);
    }

    /// Takes the requests since the last call. [`acknowledge`](Self::acknowledge) must follow.
    pub(crate) fn requests(&self) -> Option<(u64, Vec<Flush>)> {
        let requested = self.requested.load(Ordering::SeqCst);
        if requested == self.acknowledged.load(Relaxed) {
            return None;
        }
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        Some((requested, std::mem::take(&mut pending)))
    }

    pub(crate) fn acknowledge(&self, requested: u64) {
        self.acknowledged.store(requested, Ordering::Release);
    }
}

/// A platform with one gate for each vCPU.
pub(crate) struct Board<F> {
    pub(crate) gates: Vec<Gate>,
    /// Tables that are allocated and not freed.
    pub(crate) live: AtomicI64,
    /// Freed tables, poisoned, so that later uses are noticed.
    freed: PlainMutex<VecDeque<(usize, usize)>>,
    format: PhantomData<F>,
}

/// The number of freed tables that are kept.
const KEPT: usize = if cfg!(pageferry_tsan) {
    0
} else if cfg!(shuttle) {
    1 << 20
} else {
    1 << 10
};

/// Lets other threads run now and then between reading a link and following it, on real threads. In
/// this window, tables must not be freed.
fn dawdle() {
    thread_local! {
        static STEPS: Cell<u32> = const { Cell::new(0) };
    }
    if cfg!(not(shuttle)) {
        let steps = STEPS.get().wrapping_add(1);
        STEPS.set(steps);
        if steps.is_multiple_of(61) {
            thread::yield_now();
        }
    }
}

impl<F: Format> Board<F> {
    pub(crate) fn new(vcpus: usize) -> Self {
        Self {
            gates: (0..vcpus).map(|_| Gate::new()).collect(),
            live: AtomicI64::new(0),
            freed: PlainMutex::new(VecDeque::new()),
            format: PhantomData,
        }
    }

    /// The frame in a poisoned entry. At level 1 the entry reads as a leaf for a frame that belongs
    /// to nobody.
    const NOWHERE: Pfn = Pfn(F::PFN_LIMIT.0 - 1);

    fn layout(entries: usize) -> Layout {
        let bytes = entries * size_of::<Entry>();
        Layout::from_size_align(bytes, bytes.next_power_of_two().max(4096)).unwrap()
    }

    fn deallocate(address: usize, entries: usize) {
        let table = ptr::with_exposed_provenance_mut::<Entry>(address);
        // SAFETY: allocated below with this layout, with initialised entries, and returned once.
        unsafe {
            ptr::drop_in_place(ptr::slice_from_raw_parts_mut(table, entries));
            dealloc(table.cast(), Self::layout(entries));
        }
    }

    /// Waits until every fault in progress has ended that may have read older settings.
    pub(crate) fn wait_for_faults(&self) {
        for gate in &self.gates {
            while gate.faulting.load(Ordering::SeqCst) {
                thread::yield_now();
            }
        }
    }
}

// SAFETY: the allocator's memory is initialised to 0 and aligned to at least a page. Frames are
// addresses without their lowest bits. `flush` waits for each vCPU to be outside, where it uses
// nothing cached, or to have done the request.
unsafe impl<F: Format> Platform for Board<F> {
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>> {
        // SAFETY: not of size 0.
        let table = NonNull::new(unsafe { alloc(Self::layout(entries)) })?.cast::<Entry>();
        for index in 0..entries {
            // SAFETY: inside the memory just allocated.
            unsafe { table.add(index).write(Entry::new(0)) };
        }
        table.as_ptr().expose_provenance();
        self.live.fetch_add(1, Relaxed);
        Some(table)
    }

    unsafe fn free_table(&self, table: NonNull<Entry>, entries: usize) {
        self.live.fetch_sub(1, Relaxed);
        let poison = F::table(Self::NOWHERE);
        for index in 0..entries {
            // SAFETY: the caller returns the memory, of that many entries.
            unsafe { table.add(index).as_ref() }.store(poison, Relaxed);
        }
        let address = table.as_ptr().expose_provenance();
        let oldest = {
            let mut freed = self.freed.lock().unwrap_or_else(PoisonError::into_inner);
            freed.push_back((address, entries));
            if freed.len() > KEPT {
                freed.pop_front()
            } else {
                None
            }
        };
        if let Some((address, entries)) = oldest {
            Self::deallocate(address, entries);
        }
    }

    fn frame(&self, table: NonNull<Entry>) -> Pfn {
        Pfn(table.as_ptr() as u64 >> PAGE_SHIFT)
    }

    fn pointer(&self, table: Pfn) -> NonNull<Entry> {
        assert_ne!(table, Self::NOWHERE, "a freed table was reached");
        #[cfg(shuttle)]
        {
            let address = (table.0 << PAGE_SHIFT) as usize;
            let freed = self.freed.lock().unwrap_or_else(PoisonError::into_inner);
            let is_freed = freed.iter().any(|&(freed, _)| freed == address);
            drop(freed);
            assert!(!is_freed, "a link leads to a freed table");
        }
        dawdle();
        let address = (table.0 << PAGE_SHIFT) as usize;
        NonNull::new(ptr::with_exposed_provenance_mut(address)).expect("a table's frame")
    }

    /// Under shuttle all accesses are seen at once, so this does nothing.
    fn barrier(&self) -> Option<Barrier> {
        #[cfg(shuttle)]
        // SAFETY: the caller promises it.
        let barrier = Some(unsafe { Barrier::new(|| ()) });
        #[cfg(not(shuttle))]
        let barrier = Barrier::membarrier();
        barrier
    }

    fn flush(&self, what: Flush) {
        let asked: Vec<u64> = self
            .gates
            .iter()
            .map(|gate| {
                gate.pending
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(what);
                gate.requested.fetch_add(1, Ordering::SeqCst) + 1
            })
            .collect();
        for (gate, asked) in self.gates.iter().zip(asked) {
            while gate.inside.load(Ordering::SeqCst)
                && gate.acknowledged.load(Ordering::Acquire) < asked
            {
                thread::yield_now();
            }
        }
    }

    fn relax(&self) {
        thread::yield_now();
    }
}

impl<F> Drop for Board<F> {
    fn drop(&mut self) {
        if thread::panicking() {
            return;
        }
        let poison = self.freed.get_mut().unwrap_or_else(PoisonError::into_inner);
        for &mut (address, entries) in poison {
            let bytes = entries * size_of::<Entry>();
            let layout =
                Layout::from_size_align(bytes, bytes.next_power_of_two().max(4096)).unwrap();
            let table = ptr::with_exposed_provenance_mut::<Entry>(address);
            // SAFETY: as in `deallocate`. Nobody is left to use it.
            unsafe {
                ptr::drop_in_place(ptr::slice_from_raw_parts_mut(table, entries));
                dealloc(table.cast(), layout);
            }
        }
    }
}
