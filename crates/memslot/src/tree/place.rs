#![expect(
    unsafe_code,
    reason = "goes back to a leaf that was found before, by pointer"
)]
//! Places of keys, found once for the checks of a request and for its change.
//!
//! Most changes affect one leaf: it has room or stays large enough, and the bounds above it hold.
//! Then the change uses the way down that the checks have found. All other changes go down again
//! ([`super::edit`]).
//!
//! The writer finds all places that a request needs before it reads any of the leaves. With
//! thousands of slots each leaf is a cache miss. This way the misses overlap.

use super::edit::{Edit, rank_of_new, stays_alone};
use super::kind::{MOST, Order, Reach};
use super::leaf::{Leaf, LeafEntry};
use super::node::{Cell, Head, Node, upper_bound};
use super::{At, Inner, NEWEST, Tree};
use crate::Slot;

/// The place of a present or absent key in the newest state of a tree. Valid until the tree
/// changes.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    /// The cell that holds the leaf.
    cell: *const Cell,
    pub(super) leaf: *const Head,
    /// No key of the leaves to the right is less than this.
    pub(super) next: u64,
    /// The bound of its ends in the node above, if the order keeps ends. `MOST` without a node
    /// above.
    pub(super) reach: u64,
    /// Whether the leaf is the whole tree.
    pub(super) root: bool,
    /// Whether there is no leaf to the left.
    leftmost: bool,
    /// The number of keys of the leaf that are at most the key. `None` until `look_into` has read
    /// the leaf.
    rank: Option<u8>,
}

// SAFETY: the fields are addresses, which only the writer follows, on any thread.
unsafe impl Send for Place {}
// SAFETY: all functions that follow the addresses of a shared place are unsafe, and their contracts
// cover the use.
unsafe impl Sync for Place {}

impl Place {
    /// Whether both places are in one leaf.
    pub(crate) fn is_in_leaf_of(&self, other: &Self) -> bool {
        self.leaf == other.leaf
    }

    #[inline]
    fn rank<O: Order, D>(&self, leaf: Leaf<'_, O, D>, key: u64) -> usize {
        match self.rank {
            Some(rank) => {
                debug_assert_eq!(usize::from(rank), leaf.rank(key));
                rank.into()
            }
            None => leaf.rank(key),
        }
    }

    /// The index of the slot with the key.
    #[inline]
    fn index<O: Order, D>(&self, leaf: Leaf<'_, O, D>, key: u64) -> Option<usize> {
        leaf.index_at(self.rank(leaf, key), key)
    }

    /// Returns the rank of the key in the leaf, and remembers it.
    #[inline]
    pub(super) fn look_into<O: Order, D>(&mut self, leaf: Leaf<'_, O, D>, key: u64) -> usize {
        let rank = leaf.rank(key);
        // A leaf has at most 128 places.
        self.rank = Some(rank as u8);
        rank
    }
}

impl<'g, O: Order, D> At<'g, O, D> {
    /// The place of `key` in the newest state, or `None` in an empty tree. It begins to load the
    /// leaf. Writer only.
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
                    rank: None,
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
                // SAFETY: the children at level 1 are leaves. Only the writer frees, and the caller
                // is the writer.
                unsafe { Leaf::<'g, O, D>::at(node) }.prefetch();
                return Some(Place {
                    cell,
                    leaf: node,
                    next,
                    reach: inner.reach.get(index),
                    root: false,
                    leftmost,
                    rank: None,
                });
            }
            // SAFETY: the children at other levels are inner nodes. As above.
            inner = unsafe { &*node.cast::<Inner<O>>() };
        }
    }
}

impl<O: Order, D> Tree<O, D> {
    /// The pointer with which the record of the slot with this key was put in. The slab can free
    /// the record by it.
    ///
    /// # Safety
    /// `place` is the place of `key` in this tree, which has not changed since.
    #[inline]
    pub(crate) unsafe fn record_at(&self, place: &mut Place, key: u64) -> Option<*const Slot<D>> {
        // SAFETY: as the caller says, the leaf is alive.
        let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(place.leaf) };
        let index = leaf.index_at(place.look_into(leaf, key), key);
        index.map(|index| leaf.record(index))
    }

    /// Stores `slot` over the slot with the same key, like [`Tree::replace`].
    ///
    /// # Safety
    /// As for [`Tree::replace`] and [`record_at`](Self::record_at).
    #[inline]
    pub(crate) unsafe fn replace_at(&self, place: &Place, slot: *const Slot<D>) {
        // SAFETY: as the caller says, slot and leaf are alive.
        let (key, leaf): (_, Leaf<'_, O, D>) = unsafe { (O::key(&*slot), Leaf::at(place.leaf)) };
        let index = place.index(leaf, key).expect("no such slot");
        leaf.patch(index, slot);
    }

    /// The last slot with a key up to `key`, and a lower bound of the next slot's key. `None` if
    /// this leaf alone cannot answer.
    ///
    /// # Safety
    /// As for [`record_at`](Self::record_at).
    #[inline]
    pub(crate) unsafe fn neighbours(&self, place: &mut Place, key: u64) -> Option<Neighbours<D>> {
        // SAFETY: as the caller says, the leaf is alive.
        let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(place.leaf) };
        let rank = place.look_into(leaf, key);
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
    /// Does a [`put`](Self::put) if it changes only the leaf at `place`. Otherwise returns false
    /// and does nothing.
    ///
    /// # Safety
    /// As for `put`. `place` is the place of the slot's key, and the tree has not changed since.
    pub(crate) unsafe fn put_at(&mut self, place: &Place, slot: *const Slot<D>) -> bool {
        // SAFETY: alive, as the caller says.
        let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(place.leaf) };
        // SAFETY: as above.
        let new = unsafe { LeafEntry::of::<O>(slot) };
        // Otherwise bounds further up may have to be raised, or the leaf is full.
        if new.end > place.reach || leaf.len() == leaf.room() {
            return false;
        }
        let copy = self.put_in_room(leaf, place.rank(leaf, new.key), &new);
        // SAFETY: the node that has the cell is alive.
        unsafe { self.exchange(place, copy) };
        true
    }

    /// Does a [`remove`](Self::remove) if it changes only the leaf at `place`. Otherwise returns
    /// false and does nothing.
    ///
    /// # Safety
    /// `place` is the place of `key`, and the tree has not changed since.
    pub(crate) unsafe fn remove_at(&mut self, place: &Place, key: u64) -> bool {
        // SAFETY: as the caller says, alive.
        let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(place.leaf) };
        if !stays_alone(place, leaf) {
            return false;
        }
        let at = place.index(leaf, key).expect("no such slot");
        let copy = self.pool.leaf(leaf.room());
        // SAFETY: the node that has the cell is alive.
        unsafe { self.exchange(place, copy.without(leaf, at, self.version)) };
        true
    }

    /// Puts `slot` in at `to` and takes the slot with key `old` out at `from`. Both places are in
    /// the same leaf.
    ///
    /// # Safety
    /// As for [`put_at`](Self::put_at) and [`remove_at`](Self::remove_at). The order keeps no ends.
    pub(crate) unsafe fn move_at(
        &mut self,
        to: &Place,
        from: &Place,
        old: u64,
        slot: *const Slot<D>,
    ) {
        const { assert!(!O::Reach::KEPT) };
        // SAFETY: as the caller says, alive.
        let (new, leaf): (_, Leaf<'_, O, D>) =
            unsafe { (LeafEntry::of::<O>(slot), Leaf::at(to.leaf)) };
        let at = from.index(leaf, old).expect("no such slot");
        let rank = rank_of_new(leaf, new.key);
        let copy = self.pool.leaf(leaf.room());
        let leaf = copy.with_other(leaf, at, rank, &new, self.version);
        // SAFETY: the node that has the cell is alive.
        unsafe { self.exchange(to, leaf) };
    }

    /// # Safety
    /// The tree has not changed since `place` was found.
    unsafe fn exchange(&mut self, place: &Place, leaf: *const Head) {
        // SAFETY: the cell lies in the tree or in an inner node. The node is alive as long as the
        // tree does not change.
        unsafe { &*place.cell }.publish(leaf);
        self.retire(place.leaf);
    }
}
