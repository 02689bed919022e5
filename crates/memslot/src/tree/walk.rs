//! Walks over slots in ascending order.

use super::kind::{ByHva, Order, Reach};
use super::node::{Inner, Leaf, upper_bound};
use super::{At, MAX_LEVELS, Node};
use crate::Slot;

/// The inner nodes above where a walk is, each with the children that are still to be visited.
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

    /// The lowest node, and where its next child is kept.
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
    leaf: Option<&'g Leaf<O, D>>,
    index: usize,
}

impl<'g, O: Order, D> Ascending<'g, O, D> {
    /// From the first key that is greater than `after`; from the very first if there is none.
    pub(crate) fn new(at: At<'g, O, D>, after: Option<O::Key>) -> Self {
        let mut walk = Self {
            at,
            path: Path::new(),
            leaf: None,
            index: 0,
        };
        let mut cell = at.root;
        loop {
            let above = |keys| after.map_or(0, |key| upper_bound(keys, key));
            match at.enter(cell) {
                Node::Inner(inner) => {
                    let index = above(&inner.keys).saturating_sub(1);
                    walk.path.push(inner, index + 1);
                    cell = &inner.cells[index];
                }
                Node::Leaf(leaf) => {
                    walk.leaf = Some(leaf);
                    walk.index = above(&leaf.entries.keys);
                    return walk;
                }
                Node::Empty => return walk,
            }
        }
    }

    #[cold]
    fn next_leaf(&mut self) -> Option<&'g Leaf<O, D>> {
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
        while self.index >= leaf.head.len() {
            self.leaf = self.next_leaf();
            self.index = 0;
            leaf = self.leaf?;
        }
        self.index += 1;
        Some(self.at.slot(leaf, self.index - 1))
    }
}

/// All slots any byte of whose host memory lies in a range, ascending by start and id.
pub(crate) struct Overlapping<'g, D> {
    at: At<'g, ByHva, D>,
    /// Slots of interest end above this.
    start: u64,
    /// And start below this.
    end: u64,
    path: Path<'g, ByHva>,
    leaf: Option<&'g Leaf<ByHva, D>>,
    index: usize,
}

impl<'g, D> Overlapping<'g, D> {
    /// Those that share a byte with `start..end`; an empty range shares none.
    pub(crate) fn new(at: At<'g, ByHva, D>, start: u64, end: u64) -> Self {
        let mut walk = Self {
            at,
            start,
            end,
            path: Path::new(),
            leaf: None,
            index: 0,
        };
        if start < end {
            match at.enter(at.root) {
                Node::Inner(inner) => walk.path.push(inner, 0),
                Node::Leaf(leaf) => walk.leaf = Some(leaf),
                Node::Empty => {}
            }
        }
        walk
    }

    /// The next leaf in which there may be such a slot.
    fn next_leaf(&mut self) -> Option<&'g Leaf<ByHva, D>> {
        // A slot that starts at `end` or above is not wanted, whatever its id.
        let limit = ByHva::below(self.end);
        loop {
            let start = self.start;
            let (inner, next) = self.path.top()?;
            // From the child that is next to the last that may start low enough: those that reach above `start`.
            let candidates = (*next..inner.head.len())
                .take_while(|&i| i == 0 || inner.keys[i] < limit)
                .find(|&i| inner.reach.get(i) > start);
            let Some(index) = candidates else {
                self.path.pop();
                continue;
            };
            *next = index + 1;
            match self.at.enter(&inner.cells[index]) {
                Node::Inner(inner) => self.path.push(inner, 0),
                Node::Leaf(leaf) => return Some(leaf),
                Node::Empty => {}
            }
        }
    }
}

impl<'g, D> Iterator for Overlapping<'g, D> {
    type Item = &'g Slot<D>;

    #[inline]
    fn next(&mut self) -> Option<&'g Slot<D>> {
        let limit = ByHva::below(self.end);
        loop {
            if let Some(leaf) = self.leaf {
                let entries = &leaf.entries;
                let found = (self.index..leaf.head.len())
                    .take_while(|&i| entries.keys[i] < limit)
                    .find(|&i| entries.ends[i] > self.start);
                if let Some(index) = found {
                    self.index = index + 1;
                    return Some(self.at.slot(leaf, index));
                }
            }
            self.leaf = self.next_leaf();
            self.index = 0;
            self.leaf?;
        }
    }
}
