#![expect(unsafe_code, reason = "puts slots into trees by pointer")]
//! The three trees of an address space under change.

use crate::table::{Garbage, Space, State};
use crate::tree::{ByGfn, ByHva, ById, Edit, MOST, NEWEST, Order, Place, Tree};
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
            replaced: &mut |node| replaced.push(Garbage::ByGfn(node)),
        })
    }

    fn by_id<T>(&mut self, change: impl FnOnce(&mut Edit<'_, ById, D>) -> T) -> T {
        let replaced = &mut self.state.replaced;
        change(&mut Edit {
            tree: &self.space.by_id,
            version: self.version,
            pool: &mut self.state.pools.by_id,
            replaced: &mut |node| replaced.push(Garbage::ById(node)),
        })
    }

    fn by_hva<T>(&mut self, change: impl FnOnce(&mut Edit<'_, ByHva, D>) -> T) -> T {
        let replaced = &mut self.state.replaced;
        change(&mut Edit {
            tree: &self.space.by_hva,
            version: self.version,
            pool: &mut self.state.pools.by_hva,
            replaced: &mut |node| replaced.push(Garbage::ByHva(node)),
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
    /// As for [`Edit::put`].
    pub(crate) unsafe fn move_by_gfn(&mut self, old: &Slot<D>, new: *const Slot<D>) {
        let (to, from) = (self.places.by_gfn.as_ref(), self.places.old.as_ref());
        let key = ByGfn::key(old);
        if let (Some(to), Some(from)) = (to, from)
            && to.is_in_leaf_of(from)
        {
            // SAFETY: as the caller promises; the tree is as it was when the places were found.
            self.by_gfn(|edit| unsafe { edit.move_at(from, key, new) });
            return;
        }
        // SAFETY: as the caller promises; a leaf other than that of the new place is as it was, unless more than one leaf
        // has changed.
        self.by_gfn(|edit| unsafe {
            let alone = put(edit, to, new);
            remove(edit, from.filter(|_| alone), key);
        });
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

    pub(crate) fn remove_by_gfn(&mut self, slot: &Slot<D>) {
        let (key, place) = (ByGfn::key(slot), self.places.old.as_ref());
        // SAFETY: the tree is as it was when the place was found.
        self.by_gfn(|edit| unsafe { remove(edit, place, key) });
    }

    pub(crate) fn remove_elsewhere(&mut self, slot: &Slot<D>) {
        let Places { by_id, by_hva, .. } = self.places;
        let (by_id, by_hva) = (by_id.as_ref(), by_hva.as_ref());
        // SAFETY: the tree is as it was when the place was found.
        self.by_id(|edit| unsafe { remove(edit, by_id, ById::key(slot)) });
        // SAFETY: likewise.
        self.by_hva(|edit| unsafe { remove(edit, by_hva, ByHva::key(slot)) });
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
unsafe fn remove<O: Order, D>(edit: &mut Edit<'_, O, D>, place: Option<&Place>, key: u64) {
    // SAFETY: as the caller promises.
    let done = place.is_some_and(|place| unsafe { edit.remove_at(place, key) });
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
    /// Finds the places for `request`, all of which begin to be loaded, and the slot with its id.
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
        // SAFETY: nothing has changed.
        let find = |place: &Place| unsafe { space.by_id.record_at(place, id) };
        let found = self.by_id.as_ref().and_then(find)?;
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
    pub(crate) fn are_free<D>(&self, space: &Space<D>, range: GfnRange) -> bool {
        let Some(place) = &self.by_gfn else {
            return true;
        };
        // SAFETY: nothing has changed since it was found.
        let Some(found) = (unsafe { space.by_gfn.neighbours(place, range.start().0) }) else {
            return false;
        };
        // SAFETY: in the tree.
        let ends = |slot: *const Slot<D>| unsafe { &*slot }.range.end() <= range.start();
        found.next >= range.end().0 && found.below.is_none_or(ends)
    }
}
