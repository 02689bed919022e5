#![expect(unsafe_code, reason = "looks into leaves by pointer")]
//! The number of nodes that a change takes, computed before it begins.
//!
//! **Guarantee.** A change takes no more than its [`Need`] says. `tests/it/no_memory.rs` checks
//! that changes allocate nothing after the reservation.
//!
//! **Mechanism.** Most changes copy one leaf, the one at the [`Place`] of the key. For the others,
//! the number of levels above the leaves bounds the need:
//!
//! | change | leaves | inner nodes |
//! |---|---|---|
//! | split of a leaf | 2 | 2 for each full ancestor in a row, and 1 |
//! | a full leaf that is the whole tree becomes a tree of two levels | its slots, with leaves three quarters full | 1 |
//! | removal with joins | 1, 2 for a join, 1 if the tree becomes one leaf | 1, and for each level above the lowest 3 and 1 if the root goes |

use super::edit::stays_alone;
use super::kind::{INNER, Order};
use super::leaf::{LEAST_ROOM, Leaf, ROOMS, kind_of, room_for};
use super::node::{NEWEST, Node, upper_bound};
use super::place::Place;
use super::shape::leaves_of_unfolded;
use super::{At, Tree};

/// Nodes that a change takes at most, and replaces at most.
#[derive(Clone, Copy)]
pub(crate) struct Need {
    pub(super) leaves: [u8; ROOMS],
    pub(super) inners: u8,
    /// Whether the tree may become empty.
    pub(super) empty: bool,
    /// Whether the need is more than one leaf. Then the pool gives back unused memory after the
    /// change.
    pub(super) is_many: bool,
    /// The number of nodes that the change replaces.
    pub(crate) replaced: usize,
}

impl Need {
    pub(crate) const NOTHING: Self = Self {
        leaves: [0; ROOMS],
        inners: 0,
        empty: false,
        is_many: false,
        replaced: 0,
    };

    /// The need for one leaf that replaces another node.
    const fn leaf(room: usize) -> Self {
        let mut need = Self::NOTHING;
        need.leaves[kind_of(room)] = 1;
        need.replaced = 1;
        need
    }

    const fn many(mut self) -> Self {
        self.is_many = true;
        self
    }

    /// The need for both changes, one after the other.
    fn and(mut self, other: Self) -> Self {
        for (sum, leaves) in self.leaves.iter_mut().zip(other.leaves) {
            *sum += leaves;
        }
        self.inners += other.inners;
        self.empty |= other.empty;
        self.is_many |= other.is_many;
        self.replaced += other.replaced;
        self
    }

    /// The need to take a slot out of a tree with `levels` levels above the leaves, where nodes may
    /// be joined.
    fn removal_with_joins<O: Order>(levels: u8) -> Self {
        let mut need = Self::NOTHING.many();
        need.leaves[kind_of(O::LEAF)] = 3;
        // The tree may become one leaf with one of these rooms.
        let most = LEAST_ROOM.max(O::LEAF).max(O::FLAT / 2);
        for leaves in &mut need.leaves[..=kind_of(most)] {
            *leaves += 1;
        }
        need.inners = 1 + 4 * levels.saturating_sub(1);
        need.empty = true;
        // Each level replaces up to 4 nodes: two that join, the former version of one of them, and
        // the node above. If the tree becomes one leaf, the root's children go too: fewer than 20.
        need.replaced = 4 * (1 + usize::from(levels)) + 20;
        need
    }
}

impl<O: Order, D> Tree<O, D> {
    /// The number of levels above the leaves, and the number of full inner nodes in a row above the
    /// leaf of `key`.
    fn levels_above(&self, key: u64) -> (u8, u8) {
        // SAFETY: only the writer frees nodes, and it is here.
        let at: At<'_, O, D> = unsafe { self.at(NEWEST) };
        let (mut levels, mut full, mut cell) = (0, 0, at.root);
        while let Node::Inner(inner) = at.enter(cell) {
            levels += 1;
            full = if inner.head.len() == INNER {
                full + 1
            } else {
                0
            };
            cell = &inner.cells[upper_bound(&inner.keys, key).saturating_sub(1)];
        }
        (levels, full)
    }

    /// The need to put a slot in.
    ///
    /// # Safety
    /// `place` is the place of its key in this tree, which has not changed since.
    #[inline]
    pub(crate) unsafe fn need_to_put(&self, place: Option<&Place>, key: u64) -> Need {
        let Some(place) = place else {
            return Need::leaf(room_for(1));
        };
        // SAFETY: as the caller says, the leaf is alive.
        let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(place.leaf) };
        let room = leaf.room();
        if leaf.len() < room {
            return Need::leaf(room);
        }
        self.need_to_split(place.root, room, key)
    }

    #[cold]
    fn need_to_split(&self, root: bool, room: usize, key: u64) -> Need {
        if !root {
            let (_, full) = self.levels_above(key);
            let mut need = Need::NOTHING.many();
            need.leaves[kind_of(O::LEAF)] = 2;
            need.inners = 2 * full + 1;
            need.replaced = 2 + usize::from(full);
            return need;
        }
        if room < O::FLAT {
            return Need::leaf(2 * room).many();
        }
        let mut need = Need::NOTHING.many();
        need.leaves[kind_of(O::LEAF)] = leaves_of_unfolded::<O>() as u8;
        need.inners = 1;
        need.replaced = 1;
        need
    }

    /// The need to take the slot at `place` out.
    ///
    /// # Safety
    /// As for [`need_to_put`](Self::need_to_put).
    #[inline]
    pub(crate) unsafe fn need_to_remove(&self, place: Option<&Place>, key: u64) -> Need {
        let place = place.expect("no such slot");
        // SAFETY: as the caller says, the leaf is alive.
        let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(place.leaf) };
        let room = leaf.room();
        if stays_alone(place, leaf) {
            return Need::leaf(room);
        }
        if place.root {
            let mut need = Need::leaf(LEAST_ROOM.max(room / 2)).many();
            need.empty = true;
            return need;
        }
        Need::removal_with_joins::<O>(self.levels_above(key).0)
    }

    /// The need to move a slot from `from` to another key, whose place is `to`.
    ///
    /// # Safety
    /// As for [`need_to_put`](Self::need_to_put), for both.
    #[inline]
    pub(crate) unsafe fn need_to_move(
        &self,
        to: Option<&Place>,
        new: u64,
        from: Option<&Place>,
        old: u64,
    ) -> Need {
        if let (Some(to), Some(from)) = (to, from)
            && to.is_in_leaf_of(from)
        {
            // SAFETY: as the caller says, the leaf is alive.
            let leaf: Leaf<'_, O, D> = unsafe { Leaf::at(from.leaf) };
            return Need::leaf(leaf.room());
        }
        // SAFETY: as the caller says.
        let put = unsafe { self.need_to_put(to, new) };
        let remove = if put.is_many {
            // The put may have added a level.
            Need::removal_with_joins::<O>(self.levels_above(old).0 + 1)
        } else {
            // SAFETY: as the caller says.
            unsafe { self.need_to_remove(from, old) }
        };
        put.and(remove)
    }
}
