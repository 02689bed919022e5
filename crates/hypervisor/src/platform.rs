#![expect(unsafe_code, reason = "gives the MMU its tables from the heap")]
//! The platform of a VM's MMU: table memory from the heap, and the vCPUs whose TLBs it flushes.
//!
//! **Guarantee.** When a request has returned, every vCPU that was inside its guest has left, and
//! serves the request before it enters again.
//!
//! **Mechanism.** A request goes to every vCPU's [`Gate`]. The requester asks all gates before it
//! waits for any. The frame of a table is an address in this process: physical equals virtual.
//!
//! **Neighbours.** `pageferry-tdp` calls the platform for tables and flushes. `revoke.rs` calls it
//! to quiesce vCPUs.

use crate::gate::{Gate, Requests};
use pageferry_addr::{PAGE_SHIFT, Pfn};
use pageferry_tdp::format::Sv48x4Svadu;
use pageferry_tdp::{Barrier, Entry, Flush, Platform};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::{self, NonNull};
use std::sync::{Arc, PoisonError, RwLock};

/// The format of the second-stage tables.
pub(crate) type Format = Sv48x4Svadu;

/// Changes and reads the tables.
pub(crate) type Worker = pageferry_tdp::Worker<Format, Harts>;

/// The gates of a VM's vCPUs. A vCPU that is created after a request has nothing to flush.
#[derive(Default)]
pub(crate) struct Harts {
    gates: RwLock<Vec<(u32, Arc<Gate>)>>,
}

impl Harts {
    pub(crate) fn add(&self, id: u32, gate: Arc<Gate>) {
        let mut gates = self.gates.write().unwrap_or_else(PoisonError::into_inner);
        gates.push((id, gate));
    }

    /// Makes the request at every gate and waits until all vCPUs that were inside have left.
    pub(crate) fn request(&self, requests: Requests) {
        self.request_of(requests, |_| true);
    }

    /// The same, at the gates of the vCPUs whose ids `includes` accepts.
    pub(crate) fn request_of(&self, requests: Requests, includes: impl Fn(u32) -> bool) {
        let gates = self.gates.read().unwrap_or_else(PoisonError::into_inner);
        // All gates get the request before the first wait, so that vCPUs leave in parallel.
        let tickets: Vec<_> = gates
            .iter()
            .filter(|(id, _)| includes(*id))
            .filter_map(|(_, gate)| gate.request(requests))
            .collect();
        for ticket in tickets {
            ticket.wait();
        }
    }
}

fn layout(entries: usize) -> Layout {
    let bytes = entries * size_of::<u64>();
    Layout::from_size_align(bytes, bytes)
        .unwrap_or_else(|_| unreachable!("tables are powers of two of bytes"))
}

// SAFETY: 1. Tables are memory from the allocator, zeroed, aligned to its size, and not used
// otherwise. 2. An address aligned to 4096 or more loses nothing by the shift, and its provenance
// is exposed. Addresses of user space have at most 56 bits, frames in entries 44. 3. A vCPU uses
// its cached translations inside its gate only. A vCPU that enters after the request has dropped
// them. 4. Each vCPU holds the VM, and so the MMU.
unsafe impl Platform for Harts {
    /// Aborts the process if there is no memory, like Rust's own allocations.
    fn allocate_table(&self, entries: usize) -> Option<NonNull<Entry>> {
        let layout = layout(entries);
        // SAFETY: tables are not of size 0.
        let Some(table) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            handle_alloc_error(layout);
        };
        table.as_ptr().expose_provenance();
        Some(table.cast())
    }

    unsafe fn free_table(&self, table: NonNull<Entry>, entries: usize) {
        // SAFETY: from `allocate_table` with as many entries, by the caller.
        unsafe { dealloc(table.as_ptr().cast(), layout(entries)) };
    }

    fn frame(&self, table: NonNull<Entry>) -> Pfn {
        Pfn(table.as_ptr().addr() as u64 >> PAGE_SHIFT)
    }

    fn pointer(&self, table: Pfn) -> NonNull<Entry> {
        self.pointer_at(table.0 << PAGE_SHIFT)
    }

    #[inline]
    fn pointer_at(&self, address: u64) -> NonNull<Entry> {
        NonNull::new(ptr::with_exposed_provenance_mut(address as usize))
            .unwrap_or_else(|| unreachable!("no table is at address 0"))
    }

    fn flush(&self, what: Flush) {
        self.request(match what {
            Flush::Writes(_) => Requests::FLUSH_WRITES,
            // vCPUs read the root at each walk, so it is enough to drop translations.
            Flush::Range(_) | Flush::Roots => Requests::FLUSH,
        });
    }

    fn barrier(&self) -> Option<Barrier> {
        Barrier::membarrier()
    }

    fn relax(&self) {
        std::thread::yield_now();
    }
}
