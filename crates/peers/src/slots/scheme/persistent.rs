//! arc-swap over imbl's persistent `OrdMap`: snapshots that share what did not change.
//!
//! A change copies O(log n) nodes and swaps the map in. Readers take a full `load` guard. By host
//! address the map is scanned, as slots may overlap there.

use super::{ByGfn, Change, Lookup, Reader, Scheme};
use crate::slots::input::PlainSlot;
use crate::sync::Arc;
use arc_swap::{ArcSwap, Guard};
use imbl::OrdMap;
use pageferry_addr::{Gfn, Hva};
use std::ops::ControlFlow;

type Map = OrdMap<Gfn, PlainSlot>;

/// `ArcSwap<OrdMap<Gfn, PlainSlot>>`.
#[derive(Debug)]
pub struct ArcSwapImbl(Arc<ArcSwap<Map>>);

/// A reader of [`ArcSwapImbl`].
#[derive(Debug)]
pub struct ImblReader(Arc<ArcSwap<Map>>);

impl ArcSwapImbl {
    fn update(&self, change: impl FnOnce(&mut Map)) {
        let mut map = Map::clone(&self.0.load());
        change(&mut map);
        self.0.store(Arc::new(map));
    }
}

fn insert(map: &mut Map, slot: PlainSlot) {
    let below = map.range(..slot.end()).next_back();
    assert!(
        below.is_none_or(|(_, other)| other.end() <= slot.start),
        "{slot:?} overlaps"
    );
    map.insert(slot.start, slot);
}

fn remove(map: &mut Map, slot: PlainSlot) {
    assert_eq!(map.remove(&slot.start), Some(slot), "no such slot");
}

impl Scheme for ArcSwapImbl {
    const NAME: &'static str = "arc-swap imbl";
    type Reader = ImblReader;

    fn reader(&self) -> ImblReader {
        ImblReader(Arc::clone(&self.0))
    }
}

impl Change for ArcSwapImbl {
    fn empty() -> Self {
        Self(Arc::new(ArcSwap::from_pointee(Map::new())))
    }

    fn add(&mut self, slot: PlainSlot) {
        self.update(|map| insert(map, slot));
    }

    fn delete(&mut self, slot: PlainSlot) {
        self.update(|map| remove(map, slot));
    }

    fn relocate(&mut self, slot: PlainSlot, to: Gfn) -> PlainSlot {
        let moved = PlainSlot { start: to, ..slot };
        self.update(|map| {
            remove(map, slot);
            insert(map, moved);
        });
        moved
    }
}

impl Reader for ImblReader {
    type Held<'a> = Guard<Arc<Map>>;

    #[inline]
    fn hold(&mut self) -> Self::Held<'_> {
        self.0.load()
    }
}

impl ByGfn for Guard<Arc<Map>> {
    #[inline]
    fn by_gfn(&self, gfn: Gfn) -> Option<Hva> {
        self.get_prev(&gfn)?.1.hva_of(gfn)
    }
}

impl Lookup for Guard<Arc<Map>> {
    #[inline]
    fn by_hva(&self, hva: Hva, mut visit: impl FnMut(Gfn) -> ControlFlow<()>) {
        for slot in self.values() {
            if let Some(gfn) = slot.gfn_of(hva)
                && visit(gfn).is_break()
            {
                return;
            }
        }
    }
}
