//! arc-swap over a collection: a sorted array, as many VMMs implement it, and imbl's persistent
//! `OrdMap`, whose snapshots share unchanged nodes.
//!
//! A change copies the collection and swaps the copy in: the whole array, or O(log n) nodes of the
//! `OrdMap`. Readers take a full `load` guard. Look-ups by host address scan the collection.

use super::collection::{Collection, Edit};
use super::{ByGfn, Lookup, Reader, Scheme};
use crate::slots::input::PlainSlot;
use arc_swap::{ArcSwap, Guard};
use imbl::OrdMap;
use pageferry_addr::{Gfn, Hva};
use std::ops::ControlFlow;
use std::sync::Arc;

/// `ArcSwap<Vec<PlainSlot>>`.
pub(crate) type ArcSwapArray = Swapped<Vec<PlainSlot>>;

/// `ArcSwap<OrdMap<Gfn, PlainSlot>>`.
pub(crate) type ArcSwapImbl = Swapped<OrdMap<Gfn, PlainSlot>>;

/// A collection that is copied for each change.
pub(crate) trait Snapshot: Collection {
    /// The name of the scheme.
    const NAME: &'static str;

    /// A copy to be edited.
    fn copy(&self) -> Self;
}

impl Snapshot for Vec<PlainSlot> {
    const NAME: &'static str = "arc-swap array";

    fn copy(&self) -> Self {
        // One allocation for the copy and one more slot.
        let mut new = Self::with_capacity(self.len() + 1);
        new.extend_from_slice(self);
        new
    }
}

impl Snapshot for OrdMap<Gfn, PlainSlot> {
    const NAME: &'static str = "arc-swap imbl";

    fn copy(&self) -> Self {
        self.clone()
    }
}

/// `ArcSwap` of a collection.
#[derive(Debug, Default)]
pub(crate) struct Swapped<C>(Arc<ArcSwap<C>>);

/// A reader of [`Swapped`].
#[derive(Debug)]
pub(crate) struct SwappedReader<C>(Arc<ArcSwap<C>>);

impl<C: Snapshot> Scheme for Swapped<C> {
    const NAME: &'static str = C::NAME;
    type Reader = SwappedReader<C>;

    fn reader(&self) -> SwappedReader<C> {
        SwappedReader(Arc::clone(&self.0))
    }
}

impl<C: Snapshot> Edit for Swapped<C> {
    type Slots = C;

    fn edit(&mut self, edit: impl FnOnce(&mut C)) {
        let mut new = self.0.load().copy();
        edit(&mut new);
        self.0.store(Arc::new(new));
    }
}

impl<C: Snapshot> Reader for SwappedReader<C> {
    type Held<'a> = Guard<Arc<C>>;

    #[inline]
    fn hold(&mut self) -> Self::Held<'_> {
        self.0.load()
    }
}

impl<C: Snapshot> ByGfn for Guard<Arc<C>> {
    #[inline]
    fn by_gfn(&self, gfn: Gfn) -> Option<Hva> {
        self.last_from(gfn)?.hva_of(gfn)
    }
}

impl<C: Snapshot> Lookup for Guard<Arc<C>> {
    #[inline]
    fn by_hva(&self, hva: Hva, visit: impl FnMut(Gfn) -> ControlFlow<()>) {
        self.scan_hva(hva, visit);
    }
}
