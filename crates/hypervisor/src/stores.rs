//! Stores of the VMM to guest memory, by the rules of guest stores.
//!
//! **Guarantee.** A store through [`Stores`] ends the LR reservations of the bytes that it changes:
//! no SC succeeds whose LR came before the store. The VMM learns which pages are write-tracked. A
//! page that it found untracked stays so while the [`Stores`] lives.
//!
//! **Mechanism.** A [`Stores`] holds the shared side of one lock, whose value says whether any page
//! was ever tracked.
//!
//! - *Reservations.* A store to a page that is not announced is plain. To another page it goes
//!   through [`Reservations::write`](crate::hart::Reservations::write), 8 bytes at a time. A thread
//!   that announces a page takes the exclusive side before it confirms the page. So a plain store
//!   is over before the first LR in the page, and a later one finds the page announced.
//! - *Tracking.* The first call that tracks a page takes the exclusive side. From then on a
//!   [`Stores`] also holds the lock of the VM's changes, which a call that tracks pages needs.
//!
//! The order of the two locks is: changes, then this one.
//!
//! **Neighbours.** `hart/reservations.rs` has the rules for guest stores, `track.rs` the tracking.

use crate::slots::Memslots;
use crate::state::{StoreLock, Turn, VmState};
use crate::vm::Vm;
use core::ops::Range;
use pageferry_addr::{Hva, PAGE_SIZE};
use std::sync::RwLockReadGuard;

/// The right to store to guest memory. See [`Vm::stores`].
pub struct Stores<'a, M> {
    state: &'a VmState,
    /// The slots, once any page was tracked.
    slots: Option<Turn<'a, M>>,
    _shared: RwLockReadGuard<'a, bool>,
}

impl<M: Memslots> Vm<M> {
    /// Lets the VMM store to guest memory, by the rules of guest stores. Take it for one store at a
    /// time: while it lives, no page becomes watched, so a vCPU's first LR in a page waits.
    ///
    /// Once a page of the VM was [tracked](Vm::track_writes), the call waits for changes of the VM
    /// under way, and other changes wait for the result.
    #[must_use]
    pub fn stores(&self) -> Stores<'_, M> {
        let shared = self.state.vmm_stores.share();
        let (slots, shared) = if *shared {
            drop(shared);
            (Some(self.changes.lock()), self.state.vmm_stores.share())
        } else {
            (None, shared)
        };
        Stores {
            state: &self.state,
            slots,
            _shared: shared,
        }
    }
}

impl<M: Memslots> Stores<'_, M> {
    /// The first of `pages` of `slot` that is write-tracked. Pages that the slot does not have are
    /// not.
    #[must_use]
    pub fn first_tracked(&self, slot: u16, pages: Range<u64>) -> Option<u64> {
        let slot = self.slots.as_ref()?.slots.by_id(slot)?;
        let tracked = slot.data.tracked()?;
        let mut pages = pages.start..pages.end.min(slot.range.pages());
        pages.find(|page| tracked.any(*page, 1))
    }

    /// Stores to `bytes` bytes of host memory from `at`. It calls `store` for one part of them
    /// after another: a range of offsets from `at`. `store` stores to that part, and to nothing
    /// else.
    pub fn store(&self, at: Hva, bytes: u64, mut store: impl FnMut(Range<u64>)) {
        let reservations = &self.state.reservations;
        let mut from = 0;
        while from < bytes {
            let address = at.0 + from;
            let unit = if reservations.is_announced(address) {
                8
            } else {
                PAGE_SIZE
            };
            let end = (from + unit - address % unit).min(bytes);
            reservations.write(address, (end - from).min(8), || store(from..end));
            from = end;
        }
    }
}

impl StoreLock {
    /// The shared side: a store of the VMM.
    fn share(&self) -> RwLockReadGuard<'_, bool> {
        self.0
            .read()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
