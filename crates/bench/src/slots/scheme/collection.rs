//! Collections of slots by guest frame, and how a scheme changes slots by editing one of them.

use super::{Change, Scheme};
use crate::slots::input::PlainSlot;
use imbl::OrdMap;
use pageferry_addr::{Gfn, Hva};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

/// Slots in ascending order of guest frames.
pub(crate) trait Collection: Default + Send + Sync + 'static {
    /// Stores `slot` under its first frame, where no slot begins.
    fn put(&mut self, slot: PlainSlot);

    /// Removes the slot that begins at `start`.
    fn take(&mut self, start: Gfn) -> Option<PlainSlot>;

    /// The last slot that begins at or below `gfn`.
    fn last_from(&self, gfn: Gfn) -> Option<&PlainSlot>;

    /// All slots.
    fn slots(&self) -> impl Iterator<Item = &PlainSlot>;

    /// Inserts `slot`.
    ///
    /// # Panics
    /// If it overlaps another slot.
    fn insert_slot(&mut self, slot: PlainSlot) {
        let last = self.last_from(Gfn(slot.end().0 - 1));
        assert!(
            last.is_none_or(|last| last.end() <= slot.start),
            "{slot:?} overlaps"
        );
        self.put(slot);
    }

    /// Removes `slot`.
    ///
    /// # Panics
    /// If there is no such slot.
    fn remove_slot(&mut self, slot: PlainSlot) {
        assert_eq!(self.take(slot.start), Some(slot), "no such slot");
    }

    /// Calls `visit` with the frame behind `hva` of every slot that has `hva`, until it breaks. It
    /// scans all slots, because they may overlap by host address.
    #[inline]
    fn scan_hva(&self, hva: Hva, mut visit: impl FnMut(Gfn) -> ControlFlow<()>) {
        for slot in self.slots() {
            if let Some(gfn) = slot.gfn_of(hva)
                && visit(gfn).is_break()
            {
                return;
            }
        }
    }
}

/// A scheme that changes slots by editing a collection.
pub(crate) trait Edit: Scheme + Default {
    /// The collection.
    type Slots: Collection;

    /// Applies `edit`. Readers see all of it or nothing.
    fn edit(&mut self, edit: impl FnOnce(&mut Self::Slots));
}

impl<S: Edit> Change for S {
    fn empty() -> Self {
        Self::default()
    }

    fn add(&mut self, slot: PlainSlot) {
        self.edit(|slots| slots.insert_slot(slot));
    }

    fn delete(&mut self, slot: PlainSlot) {
        self.edit(|slots| slots.remove_slot(slot));
    }

    fn relocate(&mut self, slot: PlainSlot, to: Gfn) -> PlainSlot {
        let moved = PlainSlot { start: to, ..slot };
        self.edit(|slots| {
            slots.remove_slot(slot);
            slots.insert_slot(moved);
        });
        moved
    }
}

impl Collection for BTreeMap<Gfn, PlainSlot> {
    fn put(&mut self, slot: PlainSlot) {
        self.insert(slot.start, slot);
    }

    fn take(&mut self, start: Gfn) -> Option<PlainSlot> {
        self.remove(&start)
    }

    #[inline]
    fn last_from(&self, gfn: Gfn) -> Option<&PlainSlot> {
        Some(self.range(..=gfn).next_back()?.1)
    }

    fn slots(&self) -> impl Iterator<Item = &PlainSlot> {
        self.values()
    }
}

impl Collection for OrdMap<Gfn, PlainSlot> {
    fn put(&mut self, slot: PlainSlot) {
        self.insert(slot.start, slot);
    }

    fn take(&mut self, start: Gfn) -> Option<PlainSlot> {
        self.remove(&start)
    }

    #[inline]
    fn last_from(&self, gfn: Gfn) -> Option<&PlainSlot> {
        Some(self.get_prev(&gfn)?.1)
    }

    fn slots(&self) -> impl Iterator<Item = &PlainSlot> {
        self.values()
    }
}

impl Collection for Vec<PlainSlot> {
    fn put(&mut self, slot: PlainSlot) {
        let at = self.partition_point(|other| other.start < slot.start);
        self.insert(at, slot);
    }

    fn take(&mut self, start: Gfn) -> Option<PlainSlot> {
        let at = self.partition_point(|other| other.start < start);
        let found = self.get(at).is_some_and(|slot| slot.start == start);
        found.then(|| self.remove(at))
    }

    #[inline]
    fn last_from(&self, gfn: Gfn) -> Option<&PlainSlot> {
        let above = self.partition_point(|slot| slot.start <= gfn);
        Some(&self[above.checked_sub(1)?])
    }

    fn slots(&self) -> impl Iterator<Item = &PlainSlot> {
        self.iter()
    }
}
