#![expect(
    unsafe_code,
    reason = "readers follow pointers into nodes and slots that the writer replaces; see `Tree`"
)]
//! A B+ tree that one writer changes under readers who never wait, and who see it at one version.
//!
//! **Guarantee.** A look-up at a version gives what the tree held at that version, however many changes came since; a
//! look-up of the newest state gives what the tree held at some moment during the look-up. Both take O(log n) steps
//! and, at an older version, one or two for each change since of the places that are looked at: of one, or, where a slot at or
//! below a key is asked for, of those to the left of it in one leaf that hold none at that version. A change takes O(log n) and
//! copies a leaf of at most 128 slot pointers (32 where there is more than one leaf) and, where a node is split, joined or
//! does not reach into the next any more, inner nodes above it; never a slot. One that puts a record in the place of another copies nothing, and mostly
//! none does that puts a new slot behind all others, takes a slot out, or puts one where it was before.
//!
//! **Mechanism.** Nodes are immutable but for their cells and the unused places of leaves ([`node`], [`leaf`]). A change makes a
//! new leaf and publishes it by one store, in the cell of the lowest node above whose keys and bounds stay good ([`edit`]);
//! a record with the key of another is stored over it, a new slot behind all others of its leaf goes into an unused place, and what
//! goes leaves a tombstone ([`tombstone`](mod@tombstone)). So readers elsewhere in
//! the tree meet no cache line that has changed, other than in path copying, where all meet a new root. Few slots are in one
//! leaf, which has room for more than leaves below others have ([`shape`]). Where a change is of one leaf and nothing else, it is made
//! where the checks before it have found that leaf ([`place`]).
//!
//! **Neighbours.** [`crate::table`] keeps three trees an address space and says which versions readers may use;
//! freeing is its business too. The tree reports each node and slot that it has replaced ([`Replaced`]).

mod draft;
mod edit;
mod kind;
mod leaf;
mod new_leaf;
mod node;
mod place;
mod pool;
mod shape;
mod tombstone;
mod walk;

pub(crate) use edit::Edit;
pub(crate) use kind::{ByGfn, ByHva, ById, MOST, Order};
pub(crate) use node::NEWEST;
pub(crate) use place::Place;
pub(crate) use pool::{Out, Pool, Replaced};
pub(crate) use tombstone::{Tombstone, Tombstones, held, is_slot, tombstone};
pub(crate) use walk::{Ascending, Overlapping};

use crate::Slot;
use core::marker::PhantomData;
use leaf::Leaf;
use node::{Cell, Head, Inner, Node, upper_bound};
use tombstone::Held;

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

    /// The slot of this version in the place that holds `newest`; none where it has come later, is coming, or has gone.
    #[inline]
    fn slot(self, newest: *const Slot<D>) -> Option<&'g Slot<D>> {
        if !is_slot(newest) {
            return self.before(newest);
        }
        // SAFETY: it lives as long as a leaf that was reached holds it: it is retired together with, or after, what takes it out or
        // its place.
        let slot = unsafe { &*newest };
        slot.alive.used();
        if slot.born > self.version {
            return self.before(newest);
        }
        Some(slot)
    }

    /// The same, where `held` is no slot or too new.
    #[cold]
    #[inline(never)]
    fn before(self, mut held: *const Slot<D>) -> Option<&'g Slot<D>> {
        // The slot that `held` is the predecessor of, if that is how we came to it.
        let mut by_slot = false;
        loop {
            match Held::of(held) {
                Held::Nothing => return None,
                Held::Slot(slot) => {
                    // SAFETY: as in `slot`. As with nodes, by the contract of `Tree::at` that holds for its predecessors
                    // down to the first that was born at or before `version`.
                    let slot = unsafe { &*slot };
                    slot.alive.used();
                    if slot.born <= self.version {
                        return Some(slot);
                    }
                    held = slot.previous.0;
                    by_slot = true;
                }
                Held::Tombstone(tombstone) => {
                    // SAFETY: likewise.
                    let tombstone = unsafe { &*tombstone };
                    tombstone.alive.used();
                    // A slot that moved knows the one that it left elsewhere, in the tree by frame, in its own version.
                    let elsewhere = by_slot && tombstone.moved;
                    if !elsewhere && tombstone.born <= self.version {
                        return None;
                    }
                    held = if elsewhere && O::BY_FRAME {
                        tombstone.before
                    } else {
                        tombstone.was
                    };
                    by_slot = false;
                }
            }
        }
    }

    /// The last slot of this version among the first `count` of a leaf. There is one where `count` is all of it.
    #[inline]
    fn last_of(self, leaf: Leaf<'g, O, D>, count: usize) -> Option<&'g Slot<D>> {
        let last = count.checked_sub(1)?;
        self.slot(leaf.record(last))
            .or_else(|| self.earlier(leaf, last))
    }

    /// The same, for where some have come later or gone.
    #[cold]
    #[inline(never)]
    fn earlier(self, leaf: Leaf<'g, O, D>, count: usize) -> Option<&'g Slot<D>> {
        (0..count)
            .rev()
            .find_map(|index| self.slot(leaf.record(index)))
    }

    /// The slot with this key.
    #[inline]
    pub(crate) fn get(self, key: u64) -> Option<&'g Slot<D>> {
        let (leaf, index) = self.find(key)?;
        self.slot(leaf.record(index))
    }

    #[inline]
    pub(super) fn find(self, key: u64) -> Option<(Leaf<'g, O, D>, usize)> {
        let mut cell = self.root;
        loop {
            match self.enter(cell) {
                Node::Inner(inner) => {
                    cell = &inner.cells[upper_bound(&inner.keys, key).saturating_sub(1)];
                }
                Node::Leaf(leaf) => {
                    return leaf.index_of(key).map(|index| (leaf, index));
                }
                Node::Empty => return None,
            }
        }
    }

    /// The slot with the greatest key that is at most `key`. Not for [`NEWEST`] beside a writer.
    #[inline]
    pub(crate) fn floor(self, key: u64) -> Option<&'g Slot<D>> {
        match self.descend(key) {
            Floor::Found(slot) => Some(slot),
            Floor::Nothing => None,
            Floor::Left(inner, index) => self.last(&inner.cells[index]),
        }
    }

    /// The same in the newest state, for who asks whether the slot holds `key`: where it does not, it may have been the last some
    /// moments ago (see `leaf.rs`). An error where one leaf alone cannot tell: two leaves read one after the other may
    /// be of different versions. Look at a version then. For [`NEWEST`] only.
    #[inline]
    pub(crate) fn newest_floor(self, key: u64) -> Result<Option<&'g Slot<D>>, TwoLeaves> {
        debug_assert_eq!(self.version, NEWEST);
        let mut inner = match self.enter(self.root) {
            Node::Inner(inner) => inner,
            Node::Leaf(leaf) => {
                return Ok(self.last_of(leaf, leaf.rank(key)));
            }
            Node::Empty => return Ok(None),
        };
        // Below, nodes need not tell what they are, and whoever wants the newest does not ask since when they are there.
        let mut leftmost = true;
        for _ in 1..inner.head.level() {
            let index = upper_bound(&inner.keys, key).saturating_sub(1);
            leftmost &= index == 0;
            // SAFETY: as in `enter`. The children of an inner node are a level lower, and at level 1 and above inner nodes.
            inner = unsafe { &*inner.cells[index].newest().cast::<Inner<O>>() };
            inner.head.alive.used();
        }
        let index = upper_bound(&inner.keys, key).saturating_sub(1);
        // SAFETY: as above; the children at level 0 are leaves.
        let leaf: Leaf<'g, O, D> = unsafe { Leaf::at(inner.cells[index].newest()) };
        leaf.head().alive.used();
        let found = leaf.usual_floor(key).and_then(|newest| {
            self.slot(newest)
                .or_else(|| self.earlier(leaf, leaf.rank(key)))
        });
        if found.is_none() && !(leftmost && index == 0) {
            return Err(TwoLeaves);
        }
        Ok(found)
    }

    #[inline]
    fn descend(self, key: u64) -> Floor<'g, O, D> {
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
                    return match self.last_of(leaf, leaf.rank(key)) {
                        None => left,
                        Some(slot) => Floor::Found(slot),
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
                Node::Leaf(leaf) => return self.last_of(leaf, leaf.len()),
                Node::Empty => return None,
            }
        }
    }
}

/// See [`At::newest_floor`].
#[derive(Debug)]
pub(crate) struct TwoLeaves;
