#![expect(
    unsafe_code,
    reason = "readers follow pointers into nodes and slots that the writer replaces; see `Tree`"
)]
//! A B+ tree with one writer and wait-free readers, each of which sees the tree at one version.
//!
//! **Guarantee.** A look-up at a version returns the state of the tree at that version, regardless
//! of later changes. A look-up of the newest state returns the state at some moment during the
//! look-up. Both take O(log n) steps. A look-up at an older version takes one more step for each
//! later change of the places that it visits. A change takes O(log n) steps and copies little:
//!
//! | change | copies |
//! |---|---|
//! | a record takes the place of another with the same key | nothing |
//! | any other | a leaf: at most 32 slot pointers, or 128 if the leaf is the whole tree |
//! | one that splits or joins nodes, or lowers a bound | inner nodes above the leaf as well |
//!
//! **Mechanism.** In a published node only cells change, and bounds that rise ([`node`], [`leaf`]).
//! A change makes a new leaf. One store publishes it, in a cell of the lowest ancestor
//! whose keys and bounds stay valid ([`edit`]). So readers elsewhere in the tree meet no changed
//! cache line. Plain path copying would give all of them a new root. A small tree is one leaf,
//! which may hold more than a leaf below an inner node ([`shape`]). If only one leaf changes, the
//! change uses the place that the checks of the request have found ([`place`]). All memory that a
//! change needs is reserved before it begins ([`pool`], [`need`]), so a change cannot fail half
//! way.
//!
//! **Neighbours.** [`crate::table`] keeps three trees per address space, decides which versions
//! readers may use, and frees. The tree reports each node that it has replaced ([`Replaced`]).

mod draft;
mod edit;
mod kind;
mod leaf;
mod need;
mod new_leaf;
mod node;
mod place;
mod pool;
mod shape;
mod walk;

pub(crate) use edit::Edit;
pub(crate) use kind::{ByGfn, ByHva, ById, MOST, Order};
pub(crate) use need::Need;
pub(crate) use node::NEWEST;
pub(crate) use place::Place;
pub(crate) use pool::{NodePool, Replaced};
pub(crate) use walk::{Ascending, Overlapping};

use crate::Slot;
use core::marker::PhantomData;
use leaf::Leaf;
use node::{Cell, Head, Inner, Node, upper_bound};

/// More levels than a tree of 2^16 slots can have. All nodes are at least a quarter full, except
/// the root and the last node of each level.
const MAX_LEVELS: usize = 8;

pub(crate) struct Tree<O: Order, D> {
    root: Cell,
    order: PhantomData<O>,
    slots: PhantomData<fn() -> Slot<D>>,
}

/// The tree at a version, or at [`NEWEST`].
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

/// The result of looking for the slot at or below a key in the one leaf that may hold that key.
enum Floor<'g, O: Order, D> {
    Found(&'g Slot<D>),
    Nothing,
    /// This leaf has no such slot. If the tree has one, it is the last slot below this child.
    Left(&'g Inner<O>, usize),
}

impl<O: Order, D> Tree<O, D> {
    /// An empty tree, empty in all versions. The pool has [reserved](NodePool::reserve_empty) it.
    pub(crate) fn new(pool: &mut NodePool<O, D>) -> Self {
        Self {
            root: Cell::new(pool.empty(Head::empty(0, core::ptr::null()))),
            order: PhantomData,
            slots: PhantomData,
        }
    }

    /// # Safety
    /// During `'g` nobody frees a node or slot that the tree's cells held at version `version` or
    /// at any moment since `'g` began. `version` is [`NEWEST`], or was current or in progress at a
    /// moment in `'g`.
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
    /// The node that `cell` held at this version. `cell` belongs to a node of this version.
    #[inline]
    fn enter(self, cell: &'g Cell) -> Node<'g, O, D> {
        let mut node = cell.newest();
        // SAFETY: cells are never null. By the contract of `Tree::at`, nobody frees a node in a
        // cell during `'g`. The same holds for its predecessors, down to the first that was born at
        // or before `version`. `Acquire` in `newest` makes their contents visible.
        let mut head: &'g Head = unsafe { &*node };
        head.alive.used();
        while head.born > self.version {
            node = head.previous;
            debug_assert!(!node.is_null(), "a place is younger than its node");
            // SAFETY: as above. The first node of a place was born with the tree or with the node
            // that has the place. So no reader goes back beyond it.
            head = unsafe { &*node };
            head.alive.used();
        }
        // SAFETY: as above. A tree holds only nodes of its order.
        unsafe { Node::at(node) }
    }

    /// The slot of this version in the place whose newest record is `record`, in a leaf of this
    /// version.
    #[inline]
    fn slot(self, record: *const Slot<D>) -> &'g Slot<D> {
        // SAFETY: the slot lives as long as a leaf that was reached holds it: the writer retires
        // the leaf before the slot or together with it. By the contract of `Tree::at` the same
        // holds for its predecessors, down to the first that was born at or before `version`.
        let mut slot = unsafe { &*record };
        slot.alive.used();
        while slot.born > self.version {
            debug_assert!(!slot.previous.0.is_null(), "a leaf is older than its slot");
            // SAFETY: as above. The leaf is not younger than `version`, and neither is the record
            // with which it was made. Each later record in the place replaced another.
            slot = unsafe { &*slot.previous.0 };
            slot.alive.used();
        }
        slot
    }

    /// The last of the first `count` slots of a leaf. There is one unless `count` is 0.
    #[inline]
    fn last_of(self, leaf: Leaf<'g, O, D>, count: usize) -> Option<&'g Slot<D>> {
        Some(self.slot(leaf.record(count.checked_sub(1)?)))
    }

    /// The slot with this key.
    #[inline]
    pub(crate) fn get(self, key: u64) -> Option<&'g Slot<D>> {
        let (leaf, index) = self.find(key)?;
        Some(self.slot(leaf.record(index)))
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

    /// The slot with the greatest key that is at most `key`. Do not call it at [`NEWEST`] beside a
    /// writer.
    #[inline]
    pub(crate) fn floor(self, key: u64) -> Option<&'g Slot<D>> {
        match self.descend(key) {
            Floor::Found(slot) => Some(slot),
            Floor::Nothing => None,
            Floor::Left(inner, index) => self.last(&inner.cells[index]),
        }
    }

    /// The same in the newest state. Call it at [`NEWEST`] only.
    ///
    /// Returns an error if one leaf alone cannot answer: two leaves read one after the other may be
    /// of different versions. The caller then looks at a version.
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
        // The level of a node determines the kind of its children, and a look-up of the newest
        // state needs no versions. So this loop reads no heads of children.
        let mut leftmost = true;
        for _ in 1..inner.head.level() {
            let index = upper_bound(&inner.keys, key).saturating_sub(1);
            leftmost &= index == 0;
            // SAFETY: as in `enter`. The children are one level lower, which here means inner
            // nodes.
            inner = unsafe { &*inner.cells[index].newest().cast::<Inner<O>>() };
            inner.head.alive.used();
        }
        let index = upper_bound(&inner.keys, key).saturating_sub(1);
        // SAFETY: as above. The children at level 0 are leaves.
        let leaf: Leaf<'g, O, D> = unsafe { Leaf::at(inner.cells[index].newest()) };
        leaf.head().alive.used();
        let found = leaf.usual_floor(key).map(|record| self.slot(record));
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
                    // Child 0 holds all keys below `keys[1]`.
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
