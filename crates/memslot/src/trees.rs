#![expect(unsafe_code, reason = "puts slots into trees by pointer")]
//! The three trees of an address space under change.

use crate::rules::Plan;
use crate::table::{Garbage, Space, WriterState};
use crate::tree::{ByGfn, ByHva, ById, Edit, MOST, NEWEST, Need, Order, Place, Tree};
use crate::{Request, Slot};
use alloc::vec::Vec;
use pageferry_addr::GfnRange;
use pageferry_epoch::OutOfMemory;

/// The three trees of one address space, under change.
pub(crate) struct Trees<'a, D> {
    pub(crate) space: &'a Space<D>,
    pub(crate) version: u64,
    pub(crate) state: &'a mut WriterState<D>,
    /// The places of the request, from [`Places::find`].
    pub(crate) places: &'a Places,
}

impl<D> Trees<'_, D> {
    fn by_gfn<T>(&mut self, change: impl FnOnce(&mut Edit<'_, ByGfn, D>) -> T) -> T {
        let replaced = &mut self.state.replaced;
        change(&mut Edit {
            tree: &self.space.by_gfn,
            version: self.version,
            pool: &mut self.state.pools.by_gfn,
            replaced: &mut |node| keep(replaced, Garbage::ByGfn(node)),
        })
    }

    fn by_id<T>(&mut self, change: impl FnOnce(&mut Edit<'_, ById, D>) -> T) -> T {
        let replaced = &mut self.state.replaced;
        change(&mut Edit {
            tree: &self.space.by_id,
            version: self.version,
            pool: &mut self.state.pools.by_id,
            replaced: &mut |node| keep(replaced, Garbage::ById(node)),
        })
    }

    fn by_hva<T>(&mut self, change: impl FnOnce(&mut Edit<'_, ByHva, D>) -> T) -> T {
        let replaced = &mut self.state.replaced;
        change(&mut Edit {
            tree: &self.space.by_hva,
            version: self.version,
            pool: &mut self.state.pools.by_hva,
            replaced: &mut |node| keep(replaced, Garbage::ByHva(node)),
        })
    }

    /// # Safety
    /// As for [`Edit::put`].
    pub(crate) unsafe fn put_by_gfn(&mut self, slot: *const Slot<D>) {
        let place = self.places.by_gfn.as_ref();
        // SAFETY: as the caller promises. The tree has not changed since the place was found.
        self.by_gfn(|edit| unsafe { put(edit, place, slot) });
    }

    /// Puts `new` in, then takes `old` out, so that look-ups always find the slot at one of the
    /// places.
    ///
    /// # Safety
    /// As for [`Edit::put`]; `old` is in the tree.
    pub(crate) unsafe fn move_by_gfn(&mut self, old: &Slot<D>, new: *const Slot<D>) {
        let (to, from) = (self.places.by_gfn.as_ref(), self.places.old.as_ref());
        let key = ByGfn::key(old);
        if let (Some(to), Some(from)) = (to, from)
            && to.is_in_leaf_of(from)
        {
            // SAFETY: as the caller promises. The tree has not changed since the places were found.
            self.by_gfn(|edit| unsafe { edit.move_at(to, from, key, new) });
            return;
        }
        // SAFETY: as the caller promises. The old place is in another leaf, which has not changed
        // if only the leaf of the new place has.
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
        // SAFETY: as the caller promises. The tree has not changed since the place was found.
        self.by_id(|edit| unsafe { put(edit, by_id, slot) });
        // SAFETY: likewise.
        self.by_hva(|edit| unsafe { put(edit, by_hva, slot) });
    }

    /// Stores `slot` over its predecessor in the tree by gfn.
    ///
    /// # Safety
    /// As for [`Edit::put`].
    pub(crate) unsafe fn replace_by_gfn(&mut self, slot: *const Slot<D>) {
        // SAFETY: as the caller promises. The tree has not changed since the place was found.
        unsafe { replace(&self.space.by_gfn, self.places.old.as_ref(), slot) };
    }

    /// Stores `slot` over its predecessor in the other two trees.
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

    /// Takes `slot` out of all three trees, each of which holds it.
    pub(crate) fn remove(&mut self, slot: &Slot<D>) {
        let Places {
            old, by_id, by_hva, ..
        } = self.places;
        let (by_gfn, by_id, by_hva) = (old.as_ref(), by_id.as_ref(), by_hva.as_ref());
        // SAFETY: the trees have not changed since the places were found.
        unsafe {
            self.by_gfn(|edit| remove(edit, by_gfn, ByGfn::key(slot)));
            self.by_id(|edit| remove(edit, by_id, ById::key(slot)));
            self.by_hva(|edit| remove(edit, by_hva, ByHva::key(slot)));
        }
    }

    /// Gives back reserved memory that was not used.
    pub(crate) fn trim(&mut self) {
        let pools = &mut self.state.pools;
        pools.by_gfn.trim(|| self.space.by_gfn.room());
        pools.by_id.trim(|| self.space.by_id.room());
        pools.by_hva.trim(|| self.space.by_hva.room());
    }
}

/// Keeps a replaced thing. The caller has reserved room.
fn keep<D>(replaced: &mut Vec<Garbage<D>>, garbage: Garbage<D>) {
    debug_assert!(replaced.len() < replaced.capacity(), "room was reserved");
    replaced.push(garbage);
}

/// Puts `slot` in. Returns whether only the leaf at `place` has changed.
///
/// # Safety
/// As for [`Edit::put`] and, if there is a place, [`Edit::put_at`].
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
/// If there is a place, as for [`Edit::remove_at`].
unsafe fn remove<O: Order, D>(edit: &mut Edit<'_, O, D>, place: Option<&Place>, key: u64) {
    // SAFETY: as the caller promises.
    let done = place.is_some_and(|place| unsafe { edit.remove_at(place, key) });
    if !done {
        edit.remove(key);
    }
}

/// # Safety
/// As for [`Tree::replace`] and, if there is a place, [`Tree::replace_at`].
unsafe fn replace<O: Order, D>(tree: &Tree<O, D>, place: Option<&Place>, slot: *const Slot<D>) {
    // SAFETY: as the caller promises.
    unsafe {
        match place {
            Some(place) => tree.replace_at(place, slot),
            None => tree.replace(slot),
        }
    }
}

/// The places of a request, found before anything is changed.
#[derive(Clone, Copy, Default)]
pub(crate) struct Places {
    /// The place of the requested frames.
    by_gfn: Option<Place>,
    /// The place of the slot's present frames.
    old: Option<Place>,
    by_id: Option<Place>,
    by_hva: Option<Place>,
}

impl Places {
    /// Finds the places for `request`, begins to load them, and finds the slot with its id.
    #[inline]
    pub(crate) fn find<D>(
        &mut self,
        space: &Space<D>,
        request: &Request<D>,
    ) -> Option<*const Slot<D>> {
        let &Request { id, gpa, hva, .. } = request;
        // SAFETY: only the writer frees, and the caller is the writer.
        let (gfns, ids, hvas) = unsafe {
            let Space {
                by_gfn,
                by_id,
                by_hva,
                ..
            } = space;
            (by_gfn.at(NEWEST), by_id.at(NEWEST), by_hva.at(NEWEST))
        };
        // The id comes first: its leaf loads while the other places are found, and is read below.
        self.by_id = ids.place(u64::from(id));
        (self.by_gfn, self.by_hva) = if request.size == 0 {
            (None, None)
        } else {
            // The request has not been checked yet, so `hva` may be any number.
            let by_hva = ByHva::starting_at(hva.0, id).min(MOST - 1);
            (gfns.place(gpa.gfn().0), hvas.place(by_hva))
        };
        self.old = None;
        let id = u64::from(id);
        let place = self.by_id.as_mut()?;
        // SAFETY: the tree has not changed since the place was found.
        let found = unsafe { space.by_id.record_at(place, id) }?;
        // SAFETY: the slot is in the tree.
        let old = unsafe { &*found };
        self.old = gfns.place(ByGfn::key(old));
        if request.size == 0 {
            self.by_hva = hvas.place(ByHva::key(old));
        }
        Some(found)
    }

    /// Whether these places show that no slot holds a frame of `range`, which begins at the
    /// requested frame.
    #[inline]
    pub(crate) fn are_free<D>(&mut self, space: &Space<D>, range: GfnRange) -> bool {
        let Some(place) = &mut self.by_gfn else {
            return true;
        };
        // SAFETY: nothing has changed since it was found.
        let Some(found) = (unsafe { space.by_gfn.neighbours(place, range.start().0) }) else {
            return false;
        };
        // SAFETY: the slot is in the tree.
        let ends = |slot: *const Slot<D>| unsafe { &*slot }.range.end() <= range.start();
        found.next >= range.end().0 && found.below.is_none_or(ends)
    }

    /// Reserves all memory that `plan` needs, so that the change cannot fail.
    #[inline]
    pub(crate) fn reserve<D, E>(
        &self,
        space: &Space<D>,
        state: &mut WriterState<D>,
        plan: Plan,
        request: &Request<E>,
        old: Option<&Slot<D>>,
    ) -> Result<(), OutOfMemory> {
        let Self {
            by_gfn: place,
            old: from,
            by_id,
            by_hva,
        } = self;
        // SAFETY: nothing has changed since the places were found.
        let needs = unsafe {
            match (plan, old) {
                (Plan::Create(range), _) => {
                    let gfn = range.start().0;
                    let id = request.id.into();
                    let hva = ByHva::starting_at(request.hva.0, request.id);
                    (
                        space.by_gfn.need_to_put(place.as_ref(), gfn),
                        space.by_id.need_to_put(by_id.as_ref(), id),
                        space.by_hva.need_to_put(by_hva.as_ref(), hva),
                    )
                }
                (Plan::Delete, Some(old)) => (
                    (space.by_gfn).need_to_remove(from.as_ref(), ByGfn::key(old)),
                    (space.by_id).need_to_remove(by_id.as_ref(), ById::key(old)),
                    (space.by_hva).need_to_remove(by_hva.as_ref(), ByHva::key(old)),
                ),
                (Plan::Move(range), Some(old)) => {
                    let (new, from) = (range.start().0, from.as_ref());
                    let need =
                        space
                            .by_gfn
                            .need_to_move(place.as_ref(), new, from, ByGfn::key(old));
                    (need, Need::NOTHING, Need::NOTHING)
                }
                _ => (Need::NOTHING, Need::NOTHING, Need::NOTHING),
            }
        };
        let (by_gfn, by_id, by_hva) = needs;
        // One more: the record of the slot.
        let replaced = by_gfn.replaced + by_id.replaced + by_hva.replaced + 1;
        state.reserve_replaced(replaced)?;
        state.pools.by_gfn.reserve(&by_gfn)?;
        state.pools.by_id.reserve(&by_id)?;
        state.pools.by_hva.reserve(&by_hva)
    }
}
