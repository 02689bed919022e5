#![expect(unsafe_code, reason = "puts slots into trees by pointer")]
//! The three trees of an address space under change.

use crate::Slot;
use crate::table::{Garbage, Space, State};
use crate::tree::{ByGfn, ByHva, ById, Edit, Order};

/// The three trees of one address space, under change.
pub(crate) struct Trees<'a, D> {
    pub(crate) space: &'a Space<D>,
    pub(crate) version: u64,
    pub(crate) state: &'a mut State<D>,
}

impl<D> Trees<'_, D> {
    fn by_gfn(&mut self, change: impl FnOnce(&mut Edit<'_, ByGfn, D>)) {
        let replaced = &mut self.state.replaced;
        change(&mut Edit {
            tree: &self.space.by_gfn,
            version: self.version,
            pool: &mut self.state.pools.by_gfn,
            replaced: &mut |node| replaced.push(Garbage::ByGfn(node)),
        });
    }

    fn by_id(&mut self, change: impl FnOnce(&mut Edit<'_, ById, D>)) {
        let replaced = &mut self.state.replaced;
        change(&mut Edit {
            tree: &self.space.by_id,
            version: self.version,
            pool: &mut self.state.pools.by_id,
            replaced: &mut |node| replaced.push(Garbage::ById(node)),
        });
    }

    fn by_hva(&mut self, change: impl FnOnce(&mut Edit<'_, ByHva, D>)) {
        let replaced = &mut self.state.replaced;
        change(&mut Edit {
            tree: &self.space.by_hva,
            version: self.version,
            pool: &mut self.state.pools.by_hva,
            replaced: &mut |node| replaced.push(Garbage::ByHva(node)),
        });
    }

    /// # Safety
    /// As for [`Edit::put`].
    pub(crate) unsafe fn put_by_gfn(&mut self, slot: *const Slot<D>) {
        // SAFETY: as the caller promises.
        self.by_gfn(|edit| unsafe { edit.put(slot) });
    }

    /// # Safety
    /// As for [`Edit::put`].
    pub(crate) unsafe fn put_elsewhere(&mut self, slot: *const Slot<D>) {
        // SAFETY: as the caller promises.
        self.by_id(|edit| unsafe { edit.put(slot) });
        // SAFETY: as the caller promises.
        self.by_hva(|edit| unsafe { edit.put(slot) });
    }

    /// The slot in place of its predecessor, in the tree by gfn.
    ///
    /// # Safety
    /// As for [`Edit::put`].
    pub(crate) unsafe fn replace_by_gfn(&mut self, slot: *const Slot<D>) {
        // SAFETY: as the caller promises.
        unsafe { self.space.by_gfn.replace(slot) };
    }

    /// The same in the others.
    ///
    /// # Safety
    /// As for [`Edit::put`].
    pub(crate) unsafe fn replace_elsewhere(&mut self, slot: *const Slot<D>) {
        // SAFETY: as the caller promises.
        unsafe {
            self.space.by_id.replace(slot);
            self.space.by_hva.replace(slot);
        }
    }

    pub(crate) fn remove_by_gfn(&mut self, slot: &Slot<D>) {
        self.by_gfn(|edit| edit.remove(ByGfn::key(slot)));
    }

    pub(crate) fn remove_elsewhere(&mut self, slot: &Slot<D>) {
        self.by_id(|edit| edit.remove(ById::key(slot)));
        self.by_hva(|edit| edit.remove(ByHva::key(slot)));
    }
}
