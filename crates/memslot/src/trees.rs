#![expect(unsafe_code, reason = "puts slots into trees by pointer")]
//! The three trees of an address space under change.

use crate::table::{Garbage, Space, State};
use crate::tree::{
    ByGfn, ByHva, ById, Edit, MOST, NEWEST, Order, Out, Place, Replaced, Tombstone, Tree, is_slot,
};
use crate::{Request, Slot};
use pageferry_addr::GfnRange;

/// The three trees of one address space, under change.
pub(crate) struct Trees<'a, D> {
    pub(crate) space: &'a Space<D>,
    pub(crate) version: u64,
    pub(crate) state: &'a mut State<D>,
    /// Of the request, as [`Places::find`] left them.
    pub(crate) places: &'a Places,
}

impl<D> Trees<'_, D> {
    fn by_gfn<T>(&mut self, change: impl FnOnce(&mut Edit<'_, ByGfn, D>) -> T) -> T {
        let replaced = &mut self.state.replaced;
        change(&mut Edit {
            tree: &self.space.by_gfn,
            version: self.version,
            pool: &mut self.state.pools.by_gfn,
            out: &mut |out| replaced.push(garbage(out, Garbage::ByGfn)),
        })
    }

    fn by_id<T>(&mut self, change: impl FnOnce(&mut Edit<'_, ById, D>) -> T) -> T {
        let replaced = &mut self.state.replaced;
        change(&mut Edit {
            tree: &self.space.by_id,
            version: self.version,
            pool: &mut self.state.pools.by_id,
            out: &mut |out| replaced.push(garbage(out, Garbage::ById)),
        })
    }

    fn by_hva<T>(&mut self, change: impl FnOnce(&mut Edit<'_, ByHva, D>) -> T) -> T {
        let replaced = &mut self.state.replaced;
        change(&mut Edit {
            tree: &self.space.by_hva,
            version: self.version,
            pool: &mut self.state.pools.by_hva,
            out: &mut |out| replaced.push(garbage(out, Garbage::ByHva)),
        })
    }

    /// # Safety
    /// As for [`Edit::put`].
    pub(crate) unsafe fn put_by_gfn(&mut self, slot: *const Slot<D>) {
        let place = self.places.by_gfn.as_ref();
        // SAFETY: as the caller promises; the tree is as it was when the place was found.
        self.by_gfn(|edit| unsafe { put(edit, place, slot) });
    }

    /// `new` in, and `old` out: look-ups find the slot at one of both places.
    ///
    /// # Safety
    /// As for [`Edit::put`]; `new` is seen by nobody else yet, and `old` is its predecessor.
    pub(crate) unsafe fn move_by_gfn(&mut self, old: *const Slot<D>, new: *mut Slot<D>) {
        let (to, from) = (self.places.by_gfn.as_ref(), self.places.old.as_ref());
        // SAFETY: alive, as the caller says.
        let slot = unsafe { &*old };
        let tombstone = Tombstone::moved(self.version, slot, old);
        let tombstone = self.state.pools.tombstones.make(tombstone);
        // SAFETY: as the caller promises; the tree is as it was when the places were found, and a leaf other than that of the new place
        // still is after that has changed, unless more than one leaf has.
        self.by_gfn(|edit| unsafe {
            if let (Some(to), Some(from)) = (to, from) {
                if edit.swap_at(to, from, slot, new, tombstone) {
                    return;
                }
                if to.is_in_leaf_of(from) {
                    edit.move_at(to, from, slot, new, tombstone);
                    return;
                }
            }
            let alone = put(edit, to, new);
            remove(edit, from.filter(|_| alone), ByGfn::key(slot), tombstone);
        });
        self.free_unused(tombstone);
    }

    /// # Safety
    /// As for [`Edit::put`].
    pub(crate) unsafe fn put_elsewhere(&mut self, slot: *const Slot<D>) {
        let Places { by_id, by_hva, .. } = self.places;
        let (by_id, by_hva) = (by_id.as_ref(), by_hva.as_ref());
        // SAFETY: as the caller promises; the tree is as it was when the place was found.
        self.by_id(|edit| unsafe { put(edit, by_id, slot) });
        // SAFETY: likewise.
        self.by_hva(|edit| unsafe { put(edit, by_hva, slot) });
    }

    /// The slot in place of its predecessor, in the tree by gfn.
    ///
    /// # Safety
    /// As for [`Edit::put`].
    pub(crate) unsafe fn replace_by_gfn(&mut self, slot: *const Slot<D>) {
        // SAFETY: as the caller promises; the tree is as it was when the place was found.
        unsafe { replace(&self.space.by_gfn, self.places.old.as_ref(), slot) };
    }

    /// The same in the others.
    ///
    /// # Safety
    /// As for [`Edit::put`].
    pub(crate) unsafe fn replace_elsewhere(&mut self, slot: *const Slot<D>) {
        let Places { by_id, by_hva, .. } = self.places;
        // SAFETY: as in `replace_by_gfn`.
        unsafe {
            replace(&self.space.by_id, by_id.as_ref(), slot);
            replace(&self.space.by_hva, by_hva.as_ref(), slot);
        }
    }

    /// # Safety
    /// `slot` is in the trees.
    pub(crate) unsafe fn remove(&mut self, slot: *const Slot<D>) {
        let Places {
            old, by_id, by_hva, ..
        } = self.places;
        let (by_gfn, by_id, by_hva) = (old.as_ref(), by_id.as_ref(), by_hva.as_ref());
        // SAFETY: alive, as the caller says.
        let old = unsafe { &*slot };
        let tombstone = Tombstone::deleted(self.version, old, slot);
        let tombstone = self.state.pools.tombstones.make(tombstone);
        // SAFETY: the trees are as they were when the places were found.
        unsafe {
            self.by_gfn(|edit| remove(edit, by_gfn, ByGfn::key(old), tombstone));
            self.by_id(|edit| remove(edit, by_id, ById::key(old), tombstone));
            self.by_hva(|edit| remove(edit, by_hva, ByHva::key(old), tombstone));
        }
        self.free_unused(tombstone);
    }

    /// Where a tombstone that was made for a change is in no tree.
    fn free_unused(&mut self, tombstone: *const Tombstone<D>) {
        // SAFETY: just made; if it is in no tree now, it was not.
        unsafe {
            if (*tombstone).is_nowhere() {
                self.state.pools.tombstones.free(tombstone);
            }
        }
    }
}

fn garbage<D>(out: Out<D>, node: impl FnOnce(Replaced) -> Garbage<D>) -> Garbage<D> {
    match out {
        Out::Node(replaced) => node(replaced),
        Out::Tombstone(tombstone) => Garbage::Tombstone(tombstone),
    }
}

/// Whether nothing but the leaf at `place` has changed.
///
/// # Safety
/// As for [`Edit::put`] and, where there is a place, [`Edit::put_at`].
unsafe fn put<O: Order, D>(
    edit: &mut Edit<'_, O, D>,
    place: Option<&Place>,
    slot: *const Slot<D>,
) -> bool {
    // SAFETY: as the caller promises.
    unsafe {
        let done = place.is_some_and(|place| edit.put_at(place, slot));
        if !done {
            edit.put(slot);
        }
        done
    }
}

/// # Safety
/// Where there is a place, as for [`Edit::remove_at`].
unsafe fn remove<O: Order, D>(
    edit: &mut Edit<'_, O, D>,
    place: Option<&Place>,
    key: u64,
    tombstone: *const Tombstone<D>,
) {
    // SAFETY: as the caller promises.
    let done = place.is_some_and(|place| unsafe { edit.remove_at(place, key, tombstone) });
    if !done {
        edit.remove(key);
    }
}

/// # Safety
/// As for [`Tree::replace`] and, where there is a place, [`Tree::replace_at`].
unsafe fn replace<O: Order, D>(tree: &Tree<O, D>, place: Option<&Place>, slot: *const Slot<D>) {
    // SAFETY: as the caller promises.
    unsafe {
        match place {
            Some(place) => tree.replace_at(place, slot),
            None => tree.replace(slot),
        }
    }
}

/// The places that a request is about, found before anything is changed.
#[derive(Clone, Copy, Default)]
pub(crate) struct Places {
    /// Of the frames asked for.
    by_gfn: Option<Place>,
    /// Of the frames that the slot has now.
    old: Option<Place>,
    by_id: Option<Place>,
    by_hva: Option<Place>,
}

impl Places {
    /// Finds the places for `request`, all of which begin to be loaded, and the slot with its id, or its tombstone.
    #[inline]
    pub(crate) fn find<D>(
        &mut self,
        space: &Space<D>,
        request: &Request<D>,
    ) -> Option<*const Slot<D>> {
        let &Request { id, gpa, hva, .. } = request;
        // SAFETY: only the writer frees, and it is here.
        let (gfns, ids, hvas) = unsafe {
            let Space {
                by_gfn,
                by_id,
                by_hva,
                ..
            } = space;
            (by_gfn.at(NEWEST), by_id.at(NEWEST), by_hva.at(NEWEST))
        };
        // The id's first, as its leaf is looked into here: it comes while the others are found.
        self.by_id = ids.place(u64::from(id));
        (self.by_gfn, self.by_hva) = if request.size == 0 {
            (None, None)
        } else {
            // The request may be one that is refused.
            let by_hva = ByHva::starting_at(hva.0, id).min(MOST - 1);
            (gfns.place(gpa.gfn().0), hvas.place(by_hva))
        };
        self.old = None;
        let id = u64::from(id);
        let place = self.by_id.as_mut()?;
        // SAFETY: nothing has changed.
        let found = unsafe { space.by_id.held_at(place, id) }?;
        if !is_slot(found) {
            return Some(found);
        }
        // SAFETY: in the tree.
        let old = unsafe { &*found };
        self.old = gfns.place(ByGfn::key(old));
        if request.size == 0 {
            self.by_hva = hvas.place(ByHva::key(old));
        }
        Some(found)
    }

    /// Whether it is sure that no slot holds any of `range`, which begins at the frames asked for.
    #[inline]
    pub(crate) fn are_free<D>(&mut self, space: &Space<D>, range: GfnRange) -> bool {
        let Some(place) = &mut self.by_gfn else {
            return true;
        };
        // SAFETY: nothing has changed since it was found.
        let Some(found) = (unsafe { space.by_gfn.neighbours(place, range.start().0) }) else {
            return false;
        };
        let ends = |slot: *const Slot<D>| {
            debug_assert!(is_slot(slot));
            // SAFETY: in the tree.
            unsafe { &*slot }.range.end() <= range.start()
        };
        found.next >= range.end().0 && found.below.is_none_or(ends)
    }
}
