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

use super::edit::{Edit, Effect, knows, least};
use super::kind::{MOST, Order, Reach};
use super::leaf::{Entry, Leaf, room_for};
use super::node::{Cell, Head, Node, upper_bound};
use super::tombstone::{Tombstone, held, is_slot};
use super::{At, Inner, NEWEST, Tree};
use crate::Slot;
use crate::slot::Predecessor;

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
    /// How many keys of the leaf are at most the key, once it was looked into.
    rank: Option<u8>,
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

    /// Where the slot with the key, or its tombstone, is.
    #[inline]
    fn index<O: Order, D>(&self, leaf: Leaf<'_, O, D>, key: u64) -> Option<usize> {
        leaf.index_at(self.rank(leaf, key), key)
    }

    /// Looks into the leaf, and remembers what it finds.
    #[inline]
    fn look_into<O: Order, D>(&mut self, leaf: Leaf<'_, O, D>, key: u64) -> usize {
        let rank = leaf.rank(key);
        // A leaf has 128 places at most.
        self.rank = Some(rank as u8);
        rank
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
                // SAFETY: the children at level 1 are leaves, and the writer, who is here, frees none.
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
            // SAFETY: the children at other levels are inner nodes; as above.
            inner = unsafe { &*node.cast::<Inner<O>>() };
        }
    }
}

impl<O: Order, D> Tree<O, D> {
    /// What the place of this key holds: the pointer to the slot's record, as it was put in, by which it may be freed one day,
    /// or a tombstone.
    ///
    /// # Safety
    /// `place` is that of `key` in this tree, which has not changed since.
    #[inline]
    pub(crate) unsafe fn held_at(&self, place: &mut Place, key: u64) -> Option<*const Slot<D>> {
        // SAFETY: as the caller says, the leaf is alive.
        let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(place.leaf) };
        let index = leaf.index_at(place.look_into(leaf, key), key);
        index.map(|index| leaf.record(index))
    }

    /// Stores `slot` over the slot with the same key, as [`Tree::replace`].
    ///
    /// # Safety
    /// As for both.
    #[inline]
    pub(crate) unsafe fn replace_at(&self, place: &Place, slot: *const Slot<D>) {
        // SAFETY: as the caller says, slot and leaf are alive.
        let (key, leaf): (_, Leaf<'_, O, D>) = unsafe { (O::key(&*slot), Leaf::at(place.leaf)) };
        let index = place.index(leaf, key).expect("no such slot");
        debug_assert!(is_slot(leaf.record(index)), "no such slot");
        leaf.patch(index, slot);
    }

    /// The slots on both sides of `key`, where this leaf can tell: the record of the last with a key up to `key`, and a bound
    /// below which no key of the next is.
    ///
    /// # Safety
    /// As for [`held_at`](Self::held_at).
    #[inline]
    pub(crate) unsafe fn neighbours(&self, place: &mut Place, key: u64) -> Option<Neighbours<D>> {
        // SAFETY: as the caller says, the leaf is alive.
        let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(place.leaf) };
        let (rank, len) = (place.look_into(leaf, key), leaf.len());
        let (mut below, mut above) = (rank, rank);
        while below > 0 && !is_slot(leaf.record(below - 1)) {
            below -= 1;
        }
        while above < len && !is_slot(leaf.record(above)) {
            above += 1;
        }
        if below == 0 && !place.leftmost {
            return None;
        }
        let next = (above < len).then(|| leaf.key(above));
        Some(Neighbours {
            below: below.checked_sub(1).map(|index| leaf.record(index)),
            next: next.unwrap_or(place.next),
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
        if new.end > place.reach {
            return false;
        }
        match self.put_in_room(leaf, place.rank(leaf, new.key), &new) {
            None => return false,
            Some(Effect::One(leaf)) => {
                // SAFETY: the node that has the cell is alive.
                unsafe { self.exchange(place, leaf) };
            }
            Some(_) => {}
        }
        true
    }

    /// [`remove`](Self::remove), likewise; with `tombstone` in the slot's place, where it is best to leave one.
    ///
    /// # Safety
    /// `place` is that of `key`, and the tree has not changed since; `tombstone` is alive, and if it was put into the tree, until it is
    /// [given back](super::Out) and a grace period has passed.
    pub(crate) unsafe fn remove_at(
        &mut self,
        place: &Place,
        key: u64,
        tombstone: *const Tombstone<D>,
    ) -> bool {
        // SAFETY: as the caller says, alive.
        let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(place.leaf) };
        let at = place.index(leaf, key).expect("no such slot");
        match after_removal(place, leaf) {
            After::Elsewhere => return false,
            // SAFETY: as the caller says.
            After::Tombstone => unsafe { leaf.bury(at, tombstone) },
            After::Copy => {
                let copy = self.rebuilt(leaf, leaf.room(), Some(at), None);
                // SAFETY: the node that has the cell is alive.
                unsafe { self.exchange(place, copy) };
            }
        }
        true
    }

    /// Puts `slot`, which moves, in at `to` by storing it over a tombstone, and takes its record `old` out at `from` by storing
    /// `tombstone` over it. False where that cannot be, and nothing is done.
    ///
    /// # Safety
    /// As for `put_at` and `remove_at`; `slot` and `tombstone`, which is that of its move, are seen by nobody else yet.
    pub(crate) unsafe fn swap_at(
        &mut self,
        to: &Place,
        from: &Place,
        old: &Slot<D>,
        slot: *mut Slot<D>,
        tombstone: *mut Tombstone<D>,
    ) -> bool {
        const { assert!(!O::Reach::KEPT && O::BY_FRAME) };
        // SAFETY: as the caller says, alive.
        let (leaf, left): (Leaf<'_, O, D>, Leaf<'_, O, D>) =
            unsafe { (Leaf::at(to.leaf), Leaf::at(from.leaf)) };
        // SAFETY: alive, and nobody stores to it.
        let (key, own_keys) = unsafe { (O::key(&*slot), O::own_keys(&*slot)) };
        let Some(index) = to.index(leaf, key) else {
            return false;
        };
        let before = leaf.record(index);
        assert!(!is_slot(before), "a slot with this key");
        // In one leaf, look-ups would miss a slot that moves over itself: they see the tombstone at the new place, and later the one at the
        // old. (That cannot be here, as no tombstone lies in a slot of its leaf; but nothing else would go wrong if one did.)
        let over_itself =
            left.node() == leaf.node() && (O::key(old)..O::own_keys(old)).contains(&key);
        let covers = index + 1 < leaf.len() && leaf.key(index + 1) < own_keys;
        if covers || over_itself || !matches!(after_removal(from, left), After::Tombstone) {
            return false;
        }
        let at = from.index(left, O::key(old)).expect("no such slot");
        // SAFETY: nobody else sees them yet.
        unsafe {
            (*tombstone).before = before;
            (*slot).previous = Predecessor(held(tombstone));
        }
        debug_assert!(knows::<O, D>(slot, before));
        leaf.raise(index, slot);
        // SAFETY: as the caller says.
        unsafe { left.bury(at, tombstone) };
        self.release_held(before);
        true
    }

    /// The same where both are in one leaf, of which it makes another, with the tombstone or without.
    ///
    /// # Safety
    /// As for `swap_at`.
    pub(crate) unsafe fn move_at(
        &mut self,
        to: &Place,
        from: &Place,
        old: &Slot<D>,
        slot: *const Slot<D>,
        tombstone: *const Tombstone<D>,
    ) {
        const { assert!(!O::Reach::KEPT && O::BY_FRAME) };
        // SAFETY: as the caller says, alive.
        let (new, leaf): (_, Leaf<'_, O, D>) = unsafe { (Entry::of::<O>(slot), Leaf::at(to.leaf)) };
        // SAFETY: as above.
        let own_keys = O::own_keys(unsafe { &*slot });
        let at = from.index(leaf, O::key(old)).expect("no such slot");
        let (rank, len, room) = (to.rank(leaf, new.key), leaf.len(), leaf.room());
        let comes_again = to.index(leaf, new.key).is_some();
        let covers = rank < len && leaf.key(rank) < own_keys;
        let stays = matches!(after_removal(from, leaf), After::Tombstone);
        let node = if comes_again || covers || !stays || len == room {
            if leaf.tombstones() == 0 {
                let copy = self.pool.leaf(room);
                copy.with_other(leaf, at, rank, &new, self.version)
            } else {
                self.rebuilt(leaf, room, Some(at), Some(&new))
            }
        } else {
            let copy = self.pool.leaf(room);
            let node = copy.with(leaf, rank, &new, self.version);
            // SAFETY: just made.
            let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(node) };
            // SAFETY: as the caller says.
            unsafe { leaf.bury(at + usize::from(rank <= at), tombstone) };
            node
        };
        // SAFETY: the node that has the cell is alive.
        unsafe { self.exchange(to, node) };
    }

    /// # Safety
    /// The tree has not changed since `place` was found.
    unsafe fn exchange(&mut self, place: &Place, leaf: *const Head) {
        // SAFETY: cells lie in the tree or in inner nodes, which are alive as long as the tree does not change.
        unsafe { &*place.cell }.publish(leaf);
        self.retire(place.leaf);
    }
}

/// How a slot goes from a leaf.
enum After {
    /// Nodes above the leaf may change too.
    Elsewhere,
    Tombstone,
    Copy,
}

/// How one of the slots of the leaf at `place` is to go.
#[inline]
fn after_removal<O: Order, D>(place: &Place, leaf: Leaf<'_, O, D>) -> After {
    let (len, room) = (leaf.len(), leaf.room());
    let tombstones = leaf.tombstones() + 1;
    let left = len - tombstones;
    let stays = if place.root {
        left > 0 && (left >= least(room) || room == room_for(left))
    } else {
        // Else bounds further up may have to be lowered.
        left >= least(O::LEAF) && !O::Reach::passes(place.reach, place.next)
    };
    if !stays {
        After::Elsewhere
    } else if tombstones <= left {
        After::Tombstone
    } else {
        After::Copy
    }
}
