//! The current version of the memory slots, and each vCPU's view of it.
//!
//! **Guarantee.** A look-up takes no lock and writes nothing shared while the slots stay as they are. A vCPU
//! that enters its guest after a version was published and the vCPU's gate was requested sees that version
//! or a later one.
//!
//! **Mechanism.** A version is immutable and shared by `Arc`. A view keeps the `Arc` it used last and compares
//! generations by one acquire load; only when they differ does it take the mutex around the current `Arc`,
//! which nobody holds longer than a clone takes.

use crate::region::SlotData;
use crate::sync::{AtomicU64, Ordering};
use pageferry_addr::Gfn;
use pageferry_memslot::{LastUsed, Slot, SlotTable};
use std::sync::{Arc, Mutex, PoisonError};

pub(crate) type Table = SlotTable<SlotData>;

pub(crate) struct Published {
    generation: AtomicU64,
    table: Mutex<Arc<Table>>,
}

impl Published {
    pub(crate) fn new(table: Arc<Table>) -> Self {
        Self {
            generation: AtomicU64::new(table.generation()),
            table: Mutex::new(table),
        }
    }

    pub(crate) fn publish(&self, table: Arc<Table>) {
        let mut current = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = table.generation();
        *current = table;
        self.generation.store(generation, Ordering::Release);
    }

    pub(crate) fn current(&self) -> Arc<Table> {
        Arc::clone(&self.table.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// One vCPU's view.
pub(crate) struct View {
    table: Arc<Table>,
    last: LastUsed,
}

impl View {
    pub(crate) fn new(published: &Published) -> Self {
        Self {
            table: published.current(),
            last: LastUsed::default(),
        }
    }

    /// Takes up the current version, if there is a newer one.
    #[inline]
    pub(crate) fn refresh(&mut self, published: &Published) {
        if published.generation.load(Ordering::Acquire) != self.table.generation() {
            self.table = published.current();
        }
    }

    /// The slot that holds `gfn` in the current version.
    #[inline]
    pub(crate) fn lookup(&mut self, published: &Published, gfn: Gfn) -> Option<&Slot<SlotData>> {
        self.refresh(published);
        self.last.lookup(&self.table, gfn).map(|slot| &**slot)
    }
}
