#![expect(
    unsafe_code,
    reason = "goes back to a leaf that was found before, by pointer"
)]
//! Places: where a key is, found once and used for a check and for the change after it.
//!
//! Most changes are of one leaf and nothing else: it has room, or stays large enough, and the bounds above it hold. Then the way down that the checks of
//! a request need is the way to the change too. All others go down again ([`super::edit`]).
//!
//! The writer finds all places that a request needs one after the other, before it looks into any: with
//! thousands of slots each is a wait for memory, and so they are waited for together.

use super::edit::{Edit, least, rank_of_new};
use super::kind::{MOST, Order, Reach};
use super::leaf::{Entry, Leaf, room_for};
use super::node::{Cell, Head, Node, upper_bound};
use super::{At, Inner, NEWEST, Tree};
use crate::Slot;

/// Where in the newest state of a tree a key is or would be. Good until the tree changes.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    /// Where the leaf hangs.
    cell: *const Cell,
    leaf: *const Head,
    /// No key of the leaves to the right is less than this.
    next: u64,
    /// The bound of its ends in the node above, where those are kept; `MOST` where there is none above.
    reach: u64,
    /// Whether the leaf is all of its tree.
    root: bool,
    /// Whether there is no leaf to the left.
    leftmost: bool,
}

// SAFETY: addresses, which the writer follows while it has the tree, on whatever thread it is.
unsafe impl Send for Place {}
// SAFETY: nothing is done by a shared reference to a place but what the contracts of the functions that take one allow.
unsafe impl Sync for Place {}

impl Place {
    /// Whether both are in one leaf.
    pub(crate) fn is_in_leaf_of(&self, other: &Self) -> bool {
        self.leaf == other.leaf
    }
}

impl<'g, O: Order, D> At<'g, O, D> {
    /// The place of `key`, and its leaf begins to be loaded; none in an empty tree. Of the newest state, for the writer.
    #[inline]
    pub(crate) fn place(self, key: u64) -> Option<Place> {
        debug_assert_eq!(self.version, NEWEST);
        let mut inner = match self.enter(self.root) {
            Node::Inner(inner) => inner,
            Node::Leaf(leaf) => {
                return Some(Place {
                    cell: self.root,
                    leaf: leaf.node(),
                    next: MOST,
                    reach: MOST,
                    root: true,
                    leftmost: true,
                });
            }
            Node::Empty => return None,
        };
        let (mut next, mut leftmost) = (MOST, true);
        loop {
            let index = upper_bound(&inner.keys, key).saturating_sub(1);
            leftmost &= index == 0;
            next = inner.next_key(index, next);
            let cell = &inner.cells[index];
            let node = cell.newest();
            if inner.head.level() == 1 {
                // SAFETY: the children at level 1 are leaves, and the writer, who is here, frees none.
                unsafe { Leaf::<'g, O, D>::at(node) }.prefetch();
                return Some(Place {
                    cell,
                    leaf: node,
                    next,
                    reach: inner.reach.get(index),
                    root: false,
                    leftmost,
                });
            }
            // SAFETY: the children at other levels are inner nodes; as above.
            inner = unsafe { &*node.cast::<Inner<O>>() };
        }
    }
}

impl<O: Order, D> Tree<O, D> {
    /// The pointer to the record of the slot with this key, as it was put in: by it the slot may be freed one day.
    ///
    /// # Safety
    /// `place` is that of `key` in this tree, which has not changed since.
    #[inline]
    pub(crate) unsafe fn record_at(&self, place: &Place, key: u64) -> Option<*const Slot<D>> {
        // SAFETY: as the caller says, the leaf is alive.
        let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(place.leaf) };
        let index = leaf.rank(key).checked_sub(1)?;
        (leaf.key(index) == key).then(|| leaf.record(index))
    }

    /// Stores `slot` over the slot with the same key, as [`Tree::replace`].
    ///
    /// # Safety
    /// As for both.
    #[inline]
    pub(crate) unsafe fn replace_at(&self, place: &Place, slot: *const Slot<D>) {
        // SAFETY: as the caller says, slot and leaf are alive.
        let (key, leaf): (_, Leaf<'_, O, D>) = unsafe { (O::key(&*slot), Leaf::at(place.leaf)) };
        let index = leaf.rank(key).checked_sub(1);
        let index = index.filter(|&index| leaf.key(index) == key);
        leaf.patch(index.expect("no such slot"), slot);
    }

    /// The slots on both sides of `key`, where this leaf can tell: the record of the last with a key up to `key`, and a bound
    /// below which no key of the next is.
    ///
    /// # Safety
    /// As for [`record_at`](Self::record_at).
    #[inline]
    pub(crate) unsafe fn neighbours(&self, place: &Place, key: u64) -> Option<Neighbours<D>> {
        // SAFETY: as the caller says, the leaf is alive.
        let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(place.leaf) };
        let rank = leaf.rank(key);
        if rank == 0 && !place.leftmost {
            return None;
        }
        let above = (rank < leaf.len()).then(|| leaf.key(rank));
        Some(Neighbours {
            below: rank.checked_sub(1).map(|index| leaf.record(index)),
            next: above.unwrap_or(place.next),
        })
    }
}

/// See [`Tree::neighbours`].
pub(crate) struct Neighbours<D> {
    pub(crate) below: Option<*const Slot<D>>,
    pub(crate) next: u64,
}

impl<O: Order, D> Edit<'_, O, D> {
    /// [`put`](Self::put), where only the leaf at `place` changes; else false, and nothing is done.
    ///
    /// # Safety
    /// As for `put`; `place` is that of the slot's key, and the tree has not changed since.
    pub(crate) unsafe fn put_at(&mut self, place: &Place, slot: *const Slot<D>) -> bool {
        // SAFETY: alive, as the caller says.
        let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(place.leaf) };
        // SAFETY: as above.
        let new = unsafe { Entry::of::<O>(slot) };
        // Bounds further up may have to be raised.
        if new.end > place.reach || leaf.len() == leaf.room() {
            return false;
        }
        if let Some(leaf) = self.put_in_room(leaf, rank_of_new(leaf, new.key), &new) {
            // SAFETY: the node that has the cell is alive.
            unsafe { self.exchange(place, leaf) };
        }
        true
    }

    /// [`remove`](Self::remove), likewise.
    ///
    /// # Safety
    /// `place` is that of `key`, and the tree has not changed since.
    pub(crate) unsafe fn remove_at(&mut self, place: &Place, key: u64) -> bool {
        // SAFETY: as the caller says, alive.
        let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(place.leaf) };
        let (left, room) = (leaf.len() - 1, leaf.room());
        let stays = if place.root {
            left > 0 && (left >= least(room) || room == room_for(left))
        } else {
            // Else bounds further up may have to be lowered.
            left >= least(O::LEAF) && !O::Reach::passes(place.reach, place.next)
        };
        if !stays {
            return false;
        }
        let at = leaf.rank(key);
        assert!(at > 0 && leaf.key(at - 1) == key, "no such slot");
        let copy = self.pool.leaf(room);
        // SAFETY: the node that has the cell is alive.
        unsafe { self.exchange(place, copy.without(leaf, at - 1, self.version)) };
        true
    }

    /// Puts `slot` in and takes the slot with key `old` out, which is in the same leaf. There must be none with the key of `slot`
    /// already.
    ///
    /// # Safety
    /// As for [`put_at`](Self::put_at); `place` is that of both keys. Reaches are not kept.
    pub(crate) unsafe fn move_at(&mut self, place: &Place, old: u64, slot: *const Slot<D>) {
        const { assert!(!O::Reach::KEPT) };
        // SAFETY: as the caller says, alive.
        let (new, leaf): (_, Leaf<'_, O, D>) =
            unsafe { (Entry::of::<O>(slot), Leaf::at(place.leaf)) };
        let at = leaf.rank(old).checked_sub(1);
        let at = at.filter(|&at| leaf.key(at) == old);
        let (at, rank) = (at.expect("no such slot"), leaf.rank(new.key));
        let copy = self.pool.leaf(leaf.room());
        let leaf = copy.with_other(leaf, at, rank, &new, self.version);
        // SAFETY: the node that has the cell is alive.
        unsafe { self.exchange(place, leaf) };
    }

    /// # Safety
    /// The tree has not changed since `place` was found.
    unsafe fn exchange(&mut self, place: &Place, leaf: *const Head) {
        // SAFETY: cells lie in the tree or in inner nodes, which are alive as long as the tree does not change.
        unsafe { &*place.cell }.publish(leaf);
        self.retire(place.leaf);
    }
}
