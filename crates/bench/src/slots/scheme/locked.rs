//! A `BTreeMap` by guest frame behind the standard library's `RwLock`.
//!
//! Readers and the writer block each other. Look-ups by host address scan the map. A second map by
//! host address would need slots that do not overlap there, but they may.

use super::collection::{Collection, Edit};
use super::{ByGfn, Lookup, Reader, Scheme};
use crate::slots::input::PlainSlot;
use pageferry_addr::{Gfn, Hva};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::PoisonError;
use std::sync::{Arc, RwLock, RwLockReadGuard};

type Tree = BTreeMap<Gfn, PlainSlot>;

/// `RwLock<BTreeMap<Gfn, PlainSlot>>`.
#[derive(Debug, Default)]
pub(crate) struct LockedTree(Arc<RwLock<Tree>>);

/// A reader of [`LockedTree`].
#[derive(Debug)]
pub(crate) struct LockedReader(Arc<RwLock<Tree>>);

impl Scheme for LockedTree {
    const NAME: &'static str = "RwLock<BTreeMap>";
    type Reader = LockedReader;

    fn reader(&self) -> LockedReader {
        LockedReader(Arc::clone(&self.0))
    }
}

impl Edit for LockedTree {
    type Slots = Tree;

    fn edit(&mut self, edit: impl FnOnce(&mut Tree)) {
        edit(&mut self.0.write().unwrap_or_else(PoisonError::into_inner));
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
        self.last_from(gfn)?.hva_of(gfn)
    }
}

impl Lookup for RwLockReadGuard<'_, Tree> {
    #[inline]
    fn by_hva(&self, hva: Hva, visit: impl FnMut(Gfn) -> ControlFlow<()>) {
        self.scan_hva(hva, visit);
    }
}
