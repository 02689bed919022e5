//! A reader's memory of the slot it used last.

use crate::versions::{Slot, SlotTable};
use alloc::sync::Arc;
use pageferry_addr::Gfn;

/// One reader's (a vCPU's) last-used slot in one address space.
///
/// A guess, never an authority: each look-up checks it against the table it is given, so one cache serves
/// any sequence of versions, and of tables, without being told of changes. The kernel's per-vCPU
/// `last_used_slot`, which is tied to one generation instead because it keeps a pointer.
#[derive(Clone, Debug, Default)]
pub struct LastUsed {
    address_space: u16,
    place: usize,
}

impl LastUsed {
    /// A cache for a reader of `address_space`. The `Default` one reads address space 0.
    #[must_use]
    pub const fn new(address_space: u16) -> Self {
        Self {
            address_space,
            place: 0,
        }
    }

    /// The slot of `table` that holds `gfn`, as [`SlotSet::lookup`](crate::versions::SlotSet::lookup) finds it.
    ///
    /// O(1) where it is the one this reader found last, else O(log n). `None` also where `table` has no
    /// such address space.
    #[inline]
    pub fn lookup<'t, D>(&mut self, table: &'t SlotTable<D>, gfn: Gfn) -> Option<&'t Arc<Slot<D>>> {
        let set = table.space(self.address_space)?;
        if let Some(slot) = set.at(self.place, gfn) {
            return Some(slot);
        }
        let place = set.place_at_or_below(gfn)?;
        let slot = set.at(place, gfn)?;
        self.place = place;
        Some(slot)
    }
}
