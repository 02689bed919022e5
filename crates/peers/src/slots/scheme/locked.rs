//! A `BTreeMap` by guest frame behind the standard library's `RwLock`.
//!
//! Readers and the writer block one another. By host address the map is scanned: a second map by
//! host address answers only where slots cannot overlap there, which they may.

use super::{ByGfn, Change, Lookup, Reader, Scheme};
use crate::slots::input::PlainSlot;
use crate::sync::{Arc, RwLock, RwLockReadGuard};
use pageferry_addr::{Gfn, Hva};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::PoisonError;

type Tree = BTreeMap<Gfn, PlainSlot>;

/// `RwLock<BTreeMap<Gfn, PlainSlot>>`.
#[derive(Debug)]
pub struct LockedTree(Arc<RwLock<Tree>>);

/// A reader of [`LockedTree`].
#[derive(Debug)]
pub struct LockedReader(Arc<RwLock<Tree>>);

impl LockedTree {
    fn update<T>(&self, change: impl FnOnce(&mut Tree) -> T) -> T {
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }
}

fn insert(tree: &mut Tree, slot: PlainSlot) {
    let below = tree.range(..slot.end()).next_back();
    assert!(
        below.is_none_or(|(_, other)| other.end() <= slot.start),
        "{slot:?} overlaps"
    );
    tree.insert(slot.start, slot);
}

fn remove(tree: &mut Tree, slot: PlainSlot) {
    assert_eq!(tree.remove(&slot.start), Some(slot), "no such slot");
}

impl Scheme for LockedTree {
    const NAME: &'static str = "RwLock<BTreeMap>";
    type Reader = LockedReader;

    fn reader(&self) -> LockedReader {
        LockedReader(Arc::clone(&self.0))
    }
}

impl Change for LockedTree {
    fn empty() -> Self {
        Self(Arc::default())
    }

    fn add(&mut self, slot: PlainSlot) {
        self.update(|tree| insert(tree, slot));
    }

    fn delete(&mut self, slot: PlainSlot) {
        self.update(|tree| remove(tree, slot));
    }

    fn relocate(&mut self, slot: PlainSlot, to: Gfn) -> PlainSlot {
        let moved = PlainSlot { start: to, ..slot };
        self.update(|tree| {
            remove(tree, slot);
            insert(tree, moved);
        });
        moved
    }
}

impl Reader for LockedReader {
    type Held<'a> = RwLockReadGuard<'a, Tree>;

    #[inline]
    fn hold(&mut self) -> Self::Held<'_> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ByGfn for RwLockReadGuard<'_, Tree> {
    #[inline]
    fn by_gfn(&self, gfn: Gfn) -> Option<Hva> {
        self.range(..=gfn).next_back()?.1.hva_of(gfn)
    }
}

impl Lookup for RwLockReadGuard<'_, Tree> {
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
