//! arc-swap over a sorted array of plain slots: what many VMMs write for themselves.
//!
//! A change copies the whole array and swaps it in. Readers take a full `load` guard. By host
//! address the array is scanned, as slots may overlap there.

use super::{ByGfn, Change, Lookup, Reader, Scheme};
use crate::slots::input::PlainSlot;
use crate::sync::Arc;
use arc_swap::{ArcSwap, Guard};
use pageferry_addr::{Gfn, Hva};
use std::ops::ControlFlow;

/// `ArcSwap<Vec<PlainSlot>>`, sorted by guest frame.
#[derive(Debug)]
pub struct ArcSwapArray(Arc<ArcSwap<Vec<PlainSlot>>>);

/// A reader of [`ArcSwapArray`].
#[derive(Debug)]
pub struct ArrayReader(Arc<ArcSwap<Vec<PlainSlot>>>);

impl ArcSwapArray {
    fn update(&self, change: impl FnOnce(&mut Vec<PlainSlot>)) {
        let old = self.0.load();
        // One allocation for the copy and a slot more.
        let mut new = Vec::with_capacity(old.len() + 1);
        new.extend_from_slice(&old);
        drop(old);
        change(&mut new);
        self.0.store(Arc::new(new));
    }
}

fn insert(slots: &mut Vec<PlainSlot>, slot: PlainSlot) {
    let at = slots.partition_point(|other| other.start < slot.start);
    assert!(
        (at == 0 || slots[at - 1].end() <= slot.start)
            && slots.get(at).is_none_or(|next| slot.end() <= next.start),
        "{slot:?} overlaps"
    );
    slots.insert(at, slot);
}

fn remove(slots: &mut Vec<PlainSlot>, slot: PlainSlot) {
    let at = slots.partition_point(|other| other.start < slot.start);
    assert_eq!(slots.get(at), Some(&slot), "no such slot");
    slots.remove(at);
}

impl Scheme for ArcSwapArray {
    const NAME: &'static str = "arc-swap array";
    type Reader = ArrayReader;

    fn reader(&self) -> ArrayReader {
        ArrayReader(Arc::clone(&self.0))
    }
}

impl Change for ArcSwapArray {
    fn empty() -> Self {
        Self(Arc::new(ArcSwap::from_pointee(Vec::new())))
    }

    fn add(&mut self, slot: PlainSlot) {
        self.update(|slots| insert(slots, slot));
    }

    fn delete(&mut self, slot: PlainSlot) {
        self.update(|slots| remove(slots, slot));
    }

    fn relocate(&mut self, slot: PlainSlot, to: Gfn) -> PlainSlot {
        let moved = PlainSlot { start: to, ..slot };
        self.update(|slots| {
            remove(slots, slot);
            insert(slots, moved);
        });
        moved
    }
}

impl Reader for ArrayReader {
    type Held<'a> = Guard<Arc<Vec<PlainSlot>>>;

    #[inline]
    fn hold(&mut self) -> Self::Held<'_> {
        self.0.load()
    }
}

impl ByGfn for Guard<Arc<Vec<PlainSlot>>> {
    #[inline]
    fn by_gfn(&self, gfn: Gfn) -> Option<Hva> {
        let above = self.partition_point(|slot| slot.start <= gfn);
        self[above.checked_sub(1)?].hva_of(gfn)
    }
}

impl Lookup for Guard<Arc<Vec<PlainSlot>>> {
    #[inline]
    fn by_hva(&self, hva: Hva, mut visit: impl FnMut(Gfn) -> ControlFlow<()>) {
        for slot in self.iter() {
            if let Some(gfn) = slot.gfn_of(hva)
                && visit(gfn).is_break()
            {
                return;
            }
        }
    }
}
