//! Collections of slots by guest frame, and how a scheme changes slots by editing one of them.

use super::{Change, Scheme};
use crate::slots::input::PlainSlot;
use imbl::OrdMap;
use pageferry_addr::{Gfn, Hva};
use std::collections::BTreeMap;
use std::ops::ControlFlow;

/// Slots in ascending order of guest frames.
pub trait Collection: Default + Send + Sync + 'static {
    /// Inserts `slot`.
    ///
    /// # Panics
    /// If it overlaps another slot.
    fn insert(&mut self, slot: PlainSlot);

    /// Removes `slot`.
    ///
    /// # Panics
    /// If there is no such slot.
    fn remove(&mut self, slot: PlainSlot);

    /// The last slot that begins at or below `gfn`.
    fn last_from(&self, gfn: Gfn) -> Option<&PlainSlot>;

    /// All slots.
    fn slots(&self) -> impl Iterator<Item = &PlainSlot>;

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
pub trait Edit: Scheme + Default {
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
        self.edit(|slots| slots.insert(slot));
    }

    fn delete(&mut self, slot: PlainSlot) {
        self.edit(|slots| slots.remove(slot));
    }

    fn relocate(&mut self, slot: PlainSlot, to: Gfn) -> PlainSlot {
        let moved = PlainSlot { start: to, ..slot };
        self.edit(|slots| {
            slots.remove(slot);
            slots.insert(moved);
        });
        moved
    }
}

/// Panics if `slot` overlaps `last`, the last slot that begins before its end.
fn assert_apart(slot: &PlainSlot, last: Option<&PlainSlot>) {
    assert!(
        last.is_none_or(|other| other.end() <= slot.start),
        "{slot:?} overlaps"
    );
}

impl Collection for BTreeMap<Gfn, PlainSlot> {
    fn insert(&mut self, slot: PlainSlot) {
        assert_apart(
            &slot,
            self.range(..slot.end()).next_back().map(|last| last.1),
        );
        self.insert(slot.start, slot);
    }

    fn remove(&mut self, slot: PlainSlot) {
        assert_eq!(self.remove(&slot.start), Some(slot), "no such slot");
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
    fn insert(&mut self, slot: PlainSlot) {
        assert_apart(
            &slot,
            self.range(..slot.end()).next_back().map(|last| last.1),
        );
        self.insert(slot.start, slot);
    }

    fn remove(&mut self, slot: PlainSlot) {
        assert_eq!(self.remove(&slot.start), Some(slot), "no such slot");
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
    fn insert(&mut self, slot: PlainSlot) {
        let at = self.partition_point(|other| other.start < slot.start);
        assert!(
            (at == 0 || self[at - 1].end() <= slot.start)
                && self.get(at).is_none_or(|next| slot.end() <= next.start),
            "{slot:?} overlaps"
        );
        self.insert(at, slot);
    }

    fn remove(&mut self, slot: PlainSlot) {
        let at = self.partition_point(|other| other.start < slot.start);
        assert_eq!(self.get(at), Some(&slot), "no such slot");
        self.remove(at);
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
