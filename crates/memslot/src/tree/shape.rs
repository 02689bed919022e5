//! Splitting and joining nodes, sharing between neighbours, and adding or removing a level.

use super::draft::Draft;
use super::edit::{Edit, Effect, full, least, len_of, reach_of, view};
use super::kind::{LEAST, MOST, Order, Reach};
use super::leaf::{Leaf, LeafEntry, room_for};
use super::node::{Head, Inner, Node};
use core::ops::Range;
use core::ptr;

/// The most entries of a joined node. With more, the neighbours share.
const fn joined(full: usize) -> usize {
    full * 3 / 4
}

/// The most slots from which leaves are built at once: those of a leaf that is the whole tree, and
/// a new one.
const MOST_SLOTS: usize = if cfg!(loom) { 9 } else { 129 };

/// The number of leaves that replace a full leaf which is the whole tree and gets one more slot.
pub(super) const fn leaves_of_unfolded<O: Order>() -> usize {
    (O::FLAT + 1).div_ceil(joined(O::LEAF))
}

/// The slots from which new leaves are built.
struct Slots<D> {
    entries: [LeafEntry<D>; MOST_SLOTS],
    len: usize,
}

impl<D> Slots<D> {
    fn new() -> Self {
        let none = LeafEntry {
            key: MOST,
            end: 0,
            slot: ptr::null(),
        };
        Self {
            entries: [none; MOST_SLOTS],
            len: 0,
        }
    }

    fn push(&mut self, entry: LeafEntry<D>) {
        self.entries[self.len] = entry;
        self.len += 1;
    }

    /// Adds the slots `range` of `leaf`.
    fn add<O: Order>(&mut self, leaf: Leaf<'_, O, D>, range: Range<usize>) {
        range.for_each(|index| self.push(leaf.entry(index)));
    }
}

impl<O: Order, D> Edit<'_, O, D> {
    /// Makes a leaf below an inner node from the slots in `range`. It has a new place, so no
    /// predecessor.
    fn leaf_of(&mut self, slots: &Slots<D>, range: Range<usize>) -> *const Head {
        let mut leaf = self.pool.leaf(O::LEAF);
        slots.entries[range].iter().for_each(|slot| leaf.push(slot));
        leaf.done(self.version, ptr::null())
    }

    /// Makes two leaves in place of a full one, with `new` at index `at`.
    pub(super) fn split(
        &mut self,
        node: *const Head,
        leaf: Leaf<'_, O, D>,
        at: usize,
        new: &LeafEntry<D>,
        last: bool,
    ) -> Effect {
        if last && at == leaf.len() {
            let mut second = self.pool.leaf(O::LEAF);
            second.push(new);
            return Effect::Two(node, new.key, second.done(self.version, ptr::null()));
        }
        let (len, version) = (leaf.len(), self.version);
        let [mut first, mut second] = [(), ()].map(|()| self.pool.leaf(O::LEAF));
        let middle = len.div_ceil(2);
        let key = if at < middle {
            first.append(leaf, 0..at);
            first.push(new);
            first.append(leaf, at..middle - 1);
            second.append(leaf, middle - 1..len);
            leaf.key(middle - 1)
        } else {
            first.append(leaf, 0..middle);
            second.append(leaf, middle..at);
            second.push(new);
            second.append(leaf, at..len);
            if at == middle {
                new.key
            } else {
                leaf.key(middle)
            }
        };
        let [first, second] = [first, second].map(|half| half.done(version, ptr::null()));
        Effect::Two(first, key, second)
    }

    /// Makes a tree of two levels in place of `old`, which is one full leaf, with `new` at index
    /// `at`. Returns its root.
    pub(super) fn unfolded(
        &mut self,
        leaf: Leaf<'_, O, D>,
        at: usize,
        new: &LeafEntry<D>,
        old: *const Head,
    ) -> *const Head {
        let comes_last = at == leaf.len();
        let mut slots = Slots::new();
        slots.add(leaf, 0..at);
        slots.push(*new);
        slots.add(leaf, at..leaf.len());
        let len = slots.len;
        // If slots come in ascending order, leaves are filled. Otherwise they are filled to three
        // quarters.
        let each = if comes_last {
            O::LEAF
        } else {
            len.div_ceil(leaves_of_unfolded::<O>())
        };
        let mut draft = Draft::new();
        for start in (0..len).step_by(each) {
            let leaf = self.leaf_of(&slots, start..len.min(start + each));
            let key = if start == 0 {
                LEAST
            } else {
                slots.entries[start].key
            };
            draft.push(key, leaf, reach_of::<O, D>(leaf));
        }
        self.inner(&draft, 0..draft.len, 1, old)
    }

    /// Joins the children `left` and `left + 1` of `draft`, or distributes their entries evenly.
    pub(super) fn join(&mut self, draft: &mut Draft, left: usize) {
        let (first, second) = (draft.nodes[left], draft.nodes[left + 1]);
        let middle_of = |total| {
            if total <= joined(full::<O>(first)) {
                total
            } else {
                total / 2
            }
        };
        let (one, other) = match (view::<O, D>(&first), view::<O, D>(&second)) {
            (Node::Leaf(first), Node::Leaf(second)) => {
                let mut slots = Slots::new();
                for leaf in [first, second] {
                    slots.add(leaf, 0..leaf.len());
                }
                let total = slots.len;
                let middle = middle_of(total);
                let one = self.leaf_of(&slots, 0..middle);
                let other = (middle < total).then(|| {
                    (
                        slots.entries[middle].key,
                        self.leaf_of(&slots, middle..total),
                    )
                });
                (one, other)
            }
            (Node::Inner(first), Node::Inner(second)) => {
                let (left_key, right_key) = (draft.keys[left], draft.keys[left + 1]);
                let middle = middle_of(first.head.len() + second.head.len());
                self.shared(first, second, left_key, right_key, middle)
            }
            // All children of a node have the same level.
            _ => unreachable!("neighbours of different levels"),
        };
        draft.replace(left, one, reach_of::<O, D>(one));
        match other {
            Some((key, other)) => {
                draft.keys[left + 1] = key;
                draft.replace(left + 1, other, reach_of::<O, D>(other));
            }
            None => draft.remove(left + 1),
        }
        self.retire(first);
        self.retire(second);
    }

    /// Distributes the children of two neighbours: the first `middle` into one node and the rest
    /// into another.
    fn shared(
        &mut self,
        first: &Inner<O>,
        second: &Inner<O>,
        first_key: u64,
        second_key: u64,
        middle: usize,
    ) -> (*const Head, Option<(u64, *const Head)>) {
        let level = first.head.level();
        let (mut one, mut other) = (Draft::new(), Draft::new());
        for (inner, key) in [(first, first_key), (second, second_key)] {
            for i in 0..inner.head.len() {
                let key = if i == 0 { key } else { inner.keys[i] };
                let draft = if one.len < middle {
                    &mut one
                } else {
                    &mut other
                };
                draft.push(key, inner.cells[i].newest(), inner.reach.get(i));
            }
        }
        let node = self.inner(&one, 0..one.len, level, ptr::null());
        if other.len == 0 {
            return (node, None);
        }
        let second = self.inner(&other, 0..other.len, level, ptr::null());
        (node, Some((other.keys[0], second)))
    }

    /// The new root in place of `old`. Usually that is `node`. If there is too little below an
    /// inner `node`, the root is a copy of its only child or one leaf of all slots. Such a leaf is
    /// at most half full.
    pub(super) fn lowered(&mut self, old: *const Head, mut node: *const Head) -> *const Head {
        // The child is copied because `born` is the version in which a node came into its place,
        // and the root is another place.
        loop {
            let Node::Inner(inner) = view::<O, D>(&node) else {
                return node;
            };
            let children = inner.head.len();
            let copy = if inner.head.level() == 1 {
                // All children but the last have at least `least` slots. So this many children have
                // too many slots.
                if children > O::FLAT / 2 / least(O::LEAF) + 1 {
                    return node;
                }
                let lens = inner.cells[..children].iter().map(|c| len_of(c.newest()));
                let total = lens.sum();
                if children > 1 && total > O::FLAT / 2 {
                    return node;
                }
                let mut leaf = self.pool.leaf(room_for(total));
                for cell in &inner.cells[..children] {
                    let child = cell.newest();
                    if let Node::Leaf(child) = view::<O, D>(&child) {
                        leaf.append(child, 0..child.len());
                    }
                    self.retire(child);
                }
                leaf.done(self.version, old)
            } else {
                if children > 1 {
                    return node;
                }
                let child = inner.cells[0].newest();
                let Node::Inner(below) = view::<O, D>(&child) else {
                    return node;
                };
                let draft = Draft::of(below);
                let level = below.head.level();
                let copy = self.inner(&draft, 0..draft.len, level, old);
                self.retire(child);
                copy
            };
            self.retire(node);
            node = copy;
        }
    }
}
