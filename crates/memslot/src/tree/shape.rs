//! How nodes are split, joined and shared, and how a tree gets a level more or less.

use super::draft::Draft;
use super::edit::{Edit, Effect, full, least, reach_of, slots_of, view};
use super::kind::{LEAST, MOST, Order, Reach};
use super::leaf::{Entry, Leaf, room_for};
use super::node::{Cell, Head, Inner, Node};
use core::ops::Range;
use core::ptr;

/// Joined nodes have at most this many entries; else the neighbours share.
const fn joined(full: usize) -> usize {
    full * 3 / 4
}

/// The most slots of which new leaves are made at once: those of a leaf that is all of its tree, and a new one.
const MOST_SLOTS: usize = if cfg!(loom) { 9 } else { 129 };

/// The slots of a leaf or two, and a new one among them, or none: what new leaves are made of. Without tombstones.
struct Slots<D> {
    entries: [Entry<D>; MOST_SLOTS],
    len: usize,
}

impl<D> Slots<D> {
    fn new() -> Self {
        let none = Entry {
            key: MOST,
            end: 0,
            slot: ptr::null(),
        };
        Self {
            entries: [none; MOST_SLOTS],
            len: 0,
        }
    }

    /// Those of `leaf`, and `new`, behind those there are.
    fn add<O: Order>(&mut self, leaf: Leaf<'_, O, D>, new: Option<&Entry<D>>) {
        leaf.each_slot(None, new, |entry| {
            self.entries[self.len] = *entry;
            self.len += 1;
        });
    }
}

impl<O: Order, D> Edit<'_, O, D> {
    /// A leaf below an inner node, of those in `range`; it has a new place.
    fn leaf_of(&mut self, slots: &Slots<D>, range: Range<usize>) -> *const Head {
        let mut leaf = self.pool.leaf(O::LEAF);
        slots.entries[range].iter().for_each(|slot| leaf.push(slot));
        leaf.done(self.version, ptr::null())
    }

    /// Two leaves in place of one that is full of slots, with `new` at `at`.
    pub(super) fn split(
        &mut self,
        node: *const Head,
        leaf: Leaf<'_, O, D>,
        at: usize,
        new: &Entry<D>,
        last: bool,
    ) -> Effect {
        if last && at == leaf.len() {
            let mut second = self.pool.leaf(O::LEAF);
            second.push(new);
            return Effect::Two(node, new.key, second.done(self.version, ptr::null()));
        }
        debug_assert_eq!(leaf.tombstones(), 0);
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

    /// A root of two levels in place of `old`, which is one leaf, full of slots, and has no room for `new`, at index `at`.
    pub(super) fn unfolded(
        &mut self,
        leaf: Leaf<'_, O, D>,
        at: usize,
        new: &Entry<D>,
        old: *const Head,
    ) -> *const Head {
        let comes_last = at == leaf.len();
        debug_assert_eq!(leaf.tombstones(), 0);
        let mut slots = Slots::new();
        slots.add(leaf, Some(new));
        let len = slots.len;
        // Where slots come in ascending order, leaves are filled; else three quarters.
        let each = if comes_last {
            O::LEAF
        } else {
            len.div_ceil(len.div_ceil(joined(O::LEAF)))
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

    /// Joins the children `left` and `left + 1` of `draft`, or lets them share.
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
                    self.release_all(leaf);
                    slots.add(leaf, None);
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
            // Children of one node have one level.
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

    /// The children of two neighbours, the first `middle` of them in one node and the rest in another.
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

    /// `node`, or where it is an inner node with too little below it, what takes its place as a root in place of `old`: a
    /// copy of its only child, or one leaf of all slots where that is at most half full.
    pub(super) fn lowered(&mut self, old: *const Head, mut node: *const Head) -> *const Head {
        // Copies, since a node's `born` is when it came into its place, and the root is another place.
        loop {
            let Node::Inner(inner) = view::<O, D>(&node) else {
                return node;
            };
            let children = inner.head.len();
            let copy = if inner.head.level() == 1 {
                // Each but the last has no fewer than the least, so most roots have too many to look at each.
                if children > O::FLAT / 2 / least(O::LEAF) + 1 {
                    return node;
                }
                let slots_of = |cell: &Cell| slots_of::<O, D>(cell.newest());
                let total = inner.cells[..children].iter().map(slots_of).sum();
                if children > 1 && total > O::FLAT / 2 {
                    return node;
                }
                let mut leaf = self.pool.leaf(room_for(total));
                for cell in &inner.cells[..children] {
                    let child = cell.newest();
                    if let Node::Leaf(child) = view::<O, D>(&child) {
                        // No tombstones: those at the beginning of one leaf may lie in the last slot of the leaf before.
                        self.release_all(child);
                        child.each_slot(None, None, |slot| leaf.push(slot));
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
