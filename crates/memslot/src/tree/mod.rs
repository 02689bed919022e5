#![expect(
    unsafe_code,
    reason = "readers follow pointers into nodes and slots that the writer replaces; see `Tree`"
)]
//! A B+ tree that one writer changes under readers who never wait, and who see it at one version.
//!
//! **Guarantee.** A look-up at a version gives what the tree held at that version, however many changes came since; a
//! look-up of the newest state gives what the tree held at some moment during the look-up. Both take O(log n) steps
//! and, at an older version, one for each change of the same place since. A change takes O(log n) and
//! copies a leaf of at most 16 slot pointers and, where a node is split, joined or ends lower, inner nodes above it; never a slot.
//!
//! **Mechanism.** Nodes are immutable but for their cells ([`node`]). A change makes a new leaf and publishes it by
//! one store, in the cell of the lowest node above whose keys and reach stay the same ([`edit`]). So readers elsewhere in
//! the tree meet no cache line that has changed, other than in path copying, where all meet a new root.
//!
//! **Neighbours.** [`crate::table`] keeps three trees an address space and says which versions readers may use;
//! freeing is its business too. The tree reports each node and slot that it has replaced ([`Replaced`]).

mod edit;
mod kind;
mod node;
mod pool;
mod walk;

pub(crate) use edit::Edit;
pub(crate) use kind::{ByGfn, ByHva, ById, Order};
pub(crate) use node::NEWEST;
pub(crate) use pool::{Pool, Replaced};
pub(crate) use walk::{Ascending, Overlapping};

use crate::Slot;
use core::marker::PhantomData;
use node::{Cell, Head, Inner, Leaf, Node, upper_bound};

/// More levels than a tree of 2^16 slots can have: nodes other than the root and the last of each level are at least
/// a quarter full.
const MAX_LEVELS: usize = 8;

pub(crate) struct Tree<O: Order, D> {
    root: Cell,
    order: PhantomData<O>,
    slots: PhantomData<fn() -> Slot<D>>,
}

/// The tree at a version; [`NEWEST`] for whatever is newest.
pub(crate) struct At<'g, O: Order, D> {
    root: &'g Cell,
    version: u64,
    order: PhantomData<(O, &'g Slot<D>)>,
}

impl<O: Order, D> Clone for At<'_, O, D> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}
impl<O: Order, D> Copy for At<'_, O, D> {}

/// What a look-up for "at or below" met in the one leaf that may hold the key.
enum Floor<'g, O: Order, D> {
    Found(&'g Slot<D>),
    Nothing,
    /// Nothing in this leaf; if there is one, it is the last below this child.
    Left(&'g Inner<O>, usize),
}

impl<O: Order, D> Tree<O, D> {
    /// An empty tree, empty in all versions.
    pub(crate) fn new() -> Self {
        Self {
            root: Cell::new(pool::alloc_head(Head::empty(0, core::ptr::null()))),
            order: PhantomData,
            slots: PhantomData,
        }
    }

    /// # Safety
    /// As long as `'g` lasts, no node and no slot is freed that the tree's cells held at version `version` or at any
    /// moment since `'g` began; and `version` is [`NEWEST`], or at a moment in `'g` was current or in the making.
    #[inline]
    pub(crate) unsafe fn at<'g>(&'g self, version: u64) -> At<'g, O, D> {
        At {
            root: &self.root,
            version,
            order: PhantomData,
        }
    }
}

impl<'g, O: Order, D> At<'g, O, D> {
    /// The node that `cell`, which belongs to a node of this version, held at this version.
    #[inline]
    fn enter(self, cell: &'g Cell) -> Node<'g, O, D> {
        let mut node = cell.newest();
        // SAFETY: cells are never null. A node in a cell, and by the contract of `Tree::at` its predecessors down to
        // the first that was born at or before `version`, are not freed during `'g`; `Acquire` in `newest`
        // makes what they are visible.
        let mut head: &'g Head = unsafe { &*node };
        head.alive.used();
        while head.born > self.version {
            node = head.previous;
            debug_assert!(!node.is_null(), "a place is younger than its node");
            // SAFETY: as above. The first node of a place was born with the node that has the place, or with the tree,
            // so nobody goes back beyond it.
            head = unsafe { &*node };
            head.alive.used();
        }
        // SAFETY: as above; trees hold nodes of their own order only.
        unsafe { Node::at(node) }
    }

    #[inline]
    fn slot(self, leaf: &'g Leaf<O, D>, index: usize) -> &'g Slot<D> {
        debug_assert!(index < leaf.head.len());
        // SAFETY: the first `len` pointers of a leaf are slots, and live as long as the leaf: a slot is retired
        // together with, or after, the last leaf that points at it.
        let slot = unsafe { &*leaf.entries.slots[index] };
        slot.alive.used();
        slot
    }

    /// The slot with this key.
    #[inline]
    pub(crate) fn get(self, key: O::Key) -> Option<&'g Slot<D>> {
        let (leaf, index) = self.find(key)?;
        Some(self.slot(leaf, index))
    }

    /// The pointer to the slot with this key, as it was put in: by it the slot may be freed one day.
    pub(crate) fn record(self, key: O::Key) -> Option<*const Slot<D>> {
        let (leaf, index) = self.find(key)?;
        Some(leaf.entries.slots[index])
    }

    #[inline]
    fn find(self, key: O::Key) -> Option<(&'g Leaf<O, D>, usize)> {
        let mut cell = self.root;
        loop {
            match self.enter(cell) {
                Node::Inner(inner) => {
                    cell = &inner.cells[upper_bound(&inner.keys, key).saturating_sub(1)];
                }
                Node::Leaf(leaf) => {
                    let index = upper_bound(&leaf.entries.keys, key).checked_sub(1)?;
                    return (leaf.entries.keys[index] == key).then_some((leaf, index));
                }
                Node::Empty => return None,
            }
        }
    }

    /// The slot with the greatest key that is at most `key`. Not for [`NEWEST`] beside a writer.
    #[inline]
    pub(crate) fn floor(self, key: O::Key) -> Option<&'g Slot<D>> {
        match self.descend(key) {
            Floor::Found(slot) => Some(slot),
            Floor::Nothing => None,
            Floor::Left(inner, index) => self.last(&inner.cells[index]),
        }
    }

    /// The same in the newest state, or an error where one leaf alone cannot tell: two leaves read one after the
    /// other may be of different versions. Look at a version then.
    #[inline]
    pub(crate) fn newest_floor(self, key: O::Key) -> Result<Option<&'g Slot<D>>, TwoLeaves> {
        let mut leftmost = true;
        let mut cell = self.root;
        loop {
            match self.enter(cell) {
                Node::Inner(inner) => {
                    let index = upper_bound(&inner.keys, key).saturating_sub(1);
                    leftmost &= index == 0;
                    cell = &inner.cells[index];
                }
                Node::Leaf(leaf) => {
                    return match upper_bound(&leaf.entries.keys, key) {
                        0 if leftmost => Ok(None),
                        0 => Err(TwoLeaves),
                        above => Ok(Some(self.slot(leaf, above - 1))),
                    };
                }
                Node::Empty => return Ok(None),
            }
        }
    }

    #[inline]
    fn descend(self, key: O::Key) -> Floor<'g, O, D> {
        let mut left = Floor::Nothing;
        let mut cell = self.root;
        loop {
            match self.enter(cell) {
                Node::Inner(inner) => {
                    // Child 0 takes all keys below `keys[1]`.
                    let index = upper_bound(&inner.keys, key).saturating_sub(1);
                    if index > 0 {
                        left = Floor::Left(inner, index - 1);
                    }
                    cell = &inner.cells[index];
                }
                Node::Leaf(leaf) => {
                    return match upper_bound(&leaf.entries.keys, key) {
                        0 => left,
                        above => Floor::Found(self.slot(leaf, above - 1)),
                    };
                }
                Node::Empty => return Floor::Nothing,
            }
        }
    }

    /// The slot with the greatest key below `cell`.
    #[cold]
    fn last(self, mut cell: &'g Cell) -> Option<&'g Slot<D>> {
        loop {
            match self.enter(cell) {
                Node::Inner(inner) => cell = &inner.cells[inner.head.len() - 1],
                Node::Leaf(leaf) => return Some(self.slot(leaf, leaf.head.len() - 1)),
                Node::Empty => return None,
            }
        }
    }
}

/// See [`At::newest_floor`].
#[derive(Debug)]
pub(crate) struct TwoLeaves;
