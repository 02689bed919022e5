//! Walks over slots in ascending order.

use super::kind::{ByHva, INNER, Order, Reach};
use super::leaf::Leaf;
use super::node::{Cell, Inner, Node, upper_bound};
use super::{At, MAX_LEVELS};
use crate::Slot;
use core::mem::MaybeUninit;

/// The inner nodes above the position of a walk, each with the children that are still to be
/// visited.
struct Path<'g, O: Order> {
    levels: [Option<(&'g Inner<O>, usize)>; MAX_LEVELS],
    depth: usize,
}

impl<'g, O: Order> Path<'g, O> {
    const fn new() -> Self {
        Self {
            levels: [None; MAX_LEVELS],
            depth: 0,
        }
    }

    fn push(&mut self, inner: &'g Inner<O>, next: usize) {
        self.levels[self.depth] = Some((inner, next));
        self.depth += 1;
    }

    /// The lowest node, and the index of its next child.
    fn top(&mut self) -> Option<(&'g Inner<O>, &mut usize)> {
        let (inner, next) = self.levels[self.depth.checked_sub(1)?].as_mut()?;
        Some((inner, next))
    }

    fn pop(&mut self) {
        self.depth -= 1;
    }
}

/// All slots from a key on, ascending.
pub(crate) struct Ascending<'g, O: Order, D> {
    at: At<'g, O, D>,
    path: Path<'g, O>,
    leaf: Option<Leaf<'g, O, D>>,
    index: usize,
}

impl<'g, O: Order, D> Ascending<'g, O, D> {
    /// Begins at the first key that is greater than `after`, or at the very first without `after`.
    pub(crate) fn new(at: At<'g, O, D>, after: Option<u64>) -> Self {
        let mut walk = Self {
            at,
            path: Path::new(),
            leaf: None,
            index: 0,
        };
        let mut cell = at.root;
        loop {
            match at.enter(cell) {
                Node::Inner(inner) => {
                    let above = after.map_or(0, |key| upper_bound(&inner.keys, key));
                    let index = above.saturating_sub(1);
                    walk.path.push(inner, index + 1);
                    cell = &inner.cells[index];
                }
                Node::Leaf(leaf) => {
                    walk.leaf = Some(leaf);
                    walk.index = after.map_or(0, |key| leaf.rank(key));
                    return walk;
                }
                Node::Empty => return walk,
            }
        }
    }

    #[cold]
    fn next_leaf(&mut self) -> Option<Leaf<'g, O, D>> {
        loop {
            let (inner, next) = self.path.top()?;
            if *next == inner.head.len() {
                self.path.pop();
                continue;
            }
            let cell = &inner.cells[*next];
            *next += 1;
            match self.at.enter(cell) {
                Node::Inner(inner) => self.path.push(inner, 0),
                Node::Leaf(leaf) => return Some(leaf),
                Node::Empty => {}
            }
        }
    }
}

impl<'g, O: Order, D> Iterator for Ascending<'g, O, D> {
    type Item = &'g Slot<D>;

    #[inline]
    fn next(&mut self) -> Option<&'g Slot<D>> {
        let mut leaf = self.leaf?;
        while self.index >= leaf.len() {
            self.leaf = self.next_leaf();
            self.index = 0;
            leaf = self.leaf?;
        }
        self.index += 1;
        Some(self.at.slot(leaf.record(self.index - 1)))
    }
}

/// All slots with a byte of host memory in a range, ascending by start and id.
pub(crate) struct Overlapping<'g, D> {
    at: At<'g, ByHva, D>,
    /// The root, until the walk begins. It begins with the first call of `next`, because moving a
    /// walk that has begun is expensive.
    root: Option<&'g Cell>,
    /// Wanted slots end above this.
    start: u64,
    /// Wanted slots have keys up to this.
    last: u64,
    /// The inner nodes above the position of the walk, each with a bit for each child that is still
    /// to be visited. Only the entries below `depth` are initialised, as most walks need none.
    levels: [MaybeUninit<(&'g Inner<ByHva>, u64)>; MAX_LEVELS],
    depth: usize,
    leaf: Option<Leaf<'g, ByHva, D>>,
    /// The index in `leaf` at which the walk continues.
    index: usize,
}

impl<'g, D> Overlapping<'g, D> {
    /// The slots that share a byte with `start..end`. An empty range shares none.
    #[inline]
    pub(crate) fn new(at: At<'g, ByHva, D>, start: u64, end: u64) -> Self {
        Self {
            at,
            root: (start < end).then_some(at.root),
            start,
            // No slot that starts at `end` or above is wanted, with any id.
            last: ByHva::up_to(end.wrapping_sub(1)),
            levels: [const { MaybeUninit::uninit() }; MAX_LEVELS],
            depth: 0,
            leaf: None,
            index: 0,
        }
    }

    /// Begins with the node of `cell`.
    #[inline]
    fn enter(&mut self, cell: &'g Cell) {
        let start = self.start;
        match self.at.enter(cell) {
            Node::Inner(inner) => {
                // Child 0 may hold any key below `keys[1]`.
                let low = upper_bound(&inner.keys, self.last).max(1);
                let last = low - 1;
                // If slots do not overlap, only the last child can be wanted.
                let mut children = u64::from(inner.reach.get(last) > start) << last;
                if last > 0 && inner.reach.up_to(last - 1) > start {
                    children |= bits(last, |i| inner.reach.get(i) > start);
                }
                self.levels[self.depth].write((inner, children));
                self.depth += 1;
            }
            Node::Leaf(leaf) => {
                self.index = leaf.first_above(start);
                self.leaf = Some(leaf);
            }
            Node::Empty => {}
        }
    }

    /// Moves to the next leaf that may have a wanted slot. Returns false if there is none.
    #[inline]
    fn next_leaf(&mut self) -> bool {
        self.leaf = None;
        if let Some(root) = self.root.take() {
            self.enter(root);
        }
        while self.leaf.is_none() {
            let Some(top) = self.depth.checked_sub(1) else {
                return false;
            };
            // SAFETY: the levels below `depth` were written by `enter`.
            let (inner, children) = unsafe { self.levels[top].assume_init_mut() };
            if *children == 0 {
                self.depth = top;
                continue;
            }
            let child = children.trailing_zeros() as usize;
            *children &= *children - 1;
            let cell = &inner.cells[child];
            if inner.head.level() == 1 {
                // Keys, ends and cells lie in different cache lines. Load all at the same time.
                // SAFETY: the children at level 1 are leaves. Nodes in cells are alive (see
                // `At::enter`).
                unsafe { Leaf::<'g, ByHva, D>::at(cell.newest()) }.prefetch();
            }
            self.enter(cell);
        }
        true
    }
}

/// A bitmap of the indices below `end` for which `wanted` holds, without branches that depend on
/// it.
#[inline(always)]
fn bits(end: usize, wanted: impl Fn(usize) -> bool) -> u64 {
    const { assert!(ByHva::FLAT <= 64 && INNER <= 64) };
    (0..end).fold(0, |bits, i| bits | u64::from(wanted(i)) << i)
}

/// The next wanted slot of `leaf` from `index` on.
#[inline(always)]
fn next_in<'g, D>(
    walk: (At<'g, ByHva, D>, u64, u64),
    leaf: Leaf<'g, ByHva, D>,
    index: &mut usize,
) -> Option<&'g Slot<D>> {
    let (at, start, last) = walk;
    loop {
        let overlaps = leaf.overlaps(*index, start, last)?;
        *index += 1;
        if overlaps {
            return Some(at.slot(leaf.record(*index - 1)));
        }
    }
}

impl<'g, D> Iterator for Overlapping<'g, D> {
    type Item = &'g Slot<D>;

    #[inline]
    fn next(&mut self) -> Option<&'g Slot<D>> {
        let walk = (self.at, self.start, self.last);
        loop {
            if let Some(leaf) = self.leaf
                && let Some(slot) = next_in(walk, leaf, &mut self.index)
            {
                return Some(slot);
            }
            if !self.next_leaf() {
                return None;
            }
        }
    }

    /// Like repeated calls of [`next`](Self::next), but keeps the position in registers. A small
    /// tree is one leaf.
    #[inline]
    fn fold<B, F: FnMut(B, &'g Slot<D>) -> B>(self, init: B, mut f: F) -> B {
        let mut folded = init;
        if let Some(root) = self.root
            && let Node::Leaf(leaf) = self.at.enter(root)
        {
            let walk = (self.at, self.start, self.last);
            let mut index = leaf.first_above(self.start);
            while let Some(slot) = next_in(walk, leaf, &mut index) {
                folded = f(folded, slot);
            }
            return folded;
        }
        for slot in self {
            folded = f(folded, slot);
        }
        folded
    }
}
