//! Changes, all by the one writer.
//!
//! A change goes down to the leaf of its key and makes a new leaf. On the way up each inner node either publishes what
//! came in the cell of its child, which ends it, or, where its own keys must change (a child was split, joined or has
//! gone) or a reach becomes lower, makes a new node of itself and passes that on. So the whole change becomes
//! visible by the one store that ends it.
//!
//! Nodes may hold a quarter of what they could; below that they join a neighbour or share with it. The last node
//! of a level may hold less: slots that come in ascending order fill all nodes but the last.

use super::kind::{Ends, INNER, LEAF, Order, Reach};
use super::node::{Cell, Entries, Head, Inner, Leaf, Node, upper_bound};
use super::pool::{Pool, Replaced, alloc_head};
use super::{MAX_LEVELS, Tree};
use crate::Slot;
use core::ops::{Deref, DerefMut, Range};
use core::ptr;

/// Nodes with fewer entries are joined with a neighbour.
const fn least(full: usize) -> usize {
    full / 4
}

/// Joined nodes have at most this many entries; else the neighbours share.
const fn joined(full: usize) -> usize {
    full * 3 / 4
}

/// A change of one tree.
pub(crate) struct Edit<'e, O: Order, D> {
    pub(crate) tree: &'e Tree<O, D>,
    /// The version in which the change becomes visible to readers of versions.
    pub(crate) version: u64,
    pub(crate) pool: &'e mut Pool<O, D>,
    /// Takes the nodes that were replaced.
    pub(crate) replaced: &'e mut dyn FnMut(Replaced),
}

/// What goes into a leaf.
struct New<O: Order, D> {
    key: O::Key,
    end: u64,
    slot: *const Slot<D>,
}

/// A leaf in the making, which nobody else sees.
struct NewLeaf<O: Order, D>(*mut Leaf<O, D>);

impl<O: Order, D> NewLeaf<O, D> {
    /// The node, to be published or freed.
    fn done(self) -> *const Head {
        self.0.cast()
    }
}

impl<O: Order, D> Deref for NewLeaf<O, D> {
    type Target = Leaf<O, D>;

    fn deref(&self) -> &Leaf<O, D> {
        // SAFETY: written whole when it was made, and nobody else has the pointer.
        unsafe { &*self.0 }
    }
}

impl<O: Order, D> DerefMut for NewLeaf<O, D> {
    fn deref_mut(&mut self) -> &mut Leaf<O, D> {
        // SAFETY: as above.
        unsafe { &mut *self.0 }
    }
}

/// What becomes of a node.
enum Effect<O: Order> {
    /// It stays; the change is published below it.
    Stays,
    /// Another takes its place.
    One(*const Head),
    /// Two take its place; the key is the least of the second.
    Two(*const Head, O::Key, *const Head),
    /// Nothing is left of it.
    Gone,
}

impl<O: Order, D> Tree<O, D> {
    /// Frees all nodes; gives each slot pointer to `slot` first.
    ///
    /// # Safety
    /// Nobody uses the tree any more, and it is not used again. All replaced nodes are freed by somebody else.
    pub(crate) unsafe fn free_all(
        &mut self,
        pool: &mut Pool<O, D>,
        slot: &mut dyn FnMut(*const Slot<D>),
    ) {
        /// # Safety
        /// As for `free_all`.
        unsafe fn below<O: Order, D>(
            node: *const Head,
            pool: &mut Pool<O, D>,
            slot: &mut dyn FnMut(*const Slot<D>),
        ) {
            match view::<O, D>(&node) {
                Node::Empty => {}
                Node::Leaf(leaf) => {
                    for &pointer in &leaf.entries.slots[..leaf.head.len()] {
                        slot(pointer);
                    }
                }
                Node::Inner(inner) => {
                    for cell in &inner.cells[..inner.head.len()] {
                        // SAFETY: as for the caller: each node is in one cell.
                        unsafe { below(cell.newest(), pool, slot) };
                    }
                }
            }
            // SAFETY: nobody uses it, and its cell is not looked at again.
            unsafe { pool.free(Replaced(node)) };
        }
        // SAFETY: as the caller promises.
        unsafe { below(self.root.newest(), pool, slot) };
    }
}

/// The node behind a pointer that the writer got from a cell, or has just made. The borrow of the pointer stands
/// for that of the node: the writer frees no node while it makes a change.
fn view<O: Order, D>(node: &*const Head) -> Node<'_, O, D> {
    // SAFETY: nodes in cells, and new ones, are alive, and only the writer frees.
    unsafe { Node::at(*node) }
}

/// How many slots or children a node has.
fn len_of(node: *const Head) -> usize {
    // SAFETY: as in `view`.
    unsafe { &*node }.len()
}

/// How many slots or children a node could have.
fn full(node: *const Head) -> usize {
    // SAFETY: as in `view`.
    if unsafe { &*node }.level() == 0 {
        LEAF
    } else {
        INNER
    }
}

/// The least bound of where the slots below a node end.
fn reach_of<O: Order, D>(node: *const Head) -> u64 {
    if !O::Reach::KEPT {
        return 0;
    }
    match view::<O, D>(&node) {
        Node::Empty => 0,
        Node::Leaf(leaf) => (0..leaf.head.len())
            .map(|i| leaf.entries.ends.get(i))
            .max()
            .unwrap_or(0),
        Node::Inner(inner) => (0..inner.head.len())
            .map(|i| inner.reach.get(i))
            .max()
            .unwrap_or(0),
    }
}

/// The children of an inner node in the making, one more than fit.
struct Draft<O: Order> {
    keys: [O::Key; INNER + 1],
    nodes: [*const Head; INNER + 1],
    reach: [u64; INNER + 1],
    len: usize,
}

impl<O: Order> Draft<O> {
    const fn new() -> Self {
        Self {
            keys: [O::MOST; INNER + 1],
            nodes: [ptr::null(); INNER + 1],
            reach: [0; INNER + 1],
            len: 0,
        }
    }

    fn of(inner: &Inner<O>) -> Self {
        let mut draft = Self::new();
        for i in 0..inner.head.len() {
            draft.push(inner.keys[i], inner.cells[i].newest(), inner.reach.get(i));
        }
        draft
    }

    fn push(&mut self, key: O::Key, node: *const Head, reach: u64) {
        self.keys[self.len] = key;
        self.nodes[self.len] = node;
        self.reach[self.len] = reach;
        self.len += 1;
    }

    fn replace(&mut self, index: usize, node: *const Head, reach: u64) {
        self.nodes[index] = node;
        self.reach[index] = reach;
    }

    fn insert(&mut self, index: usize, key: O::Key, node: *const Head, reach: u64) {
        self.keys.copy_within(index..self.len, index + 1);
        self.nodes.copy_within(index..self.len, index + 1);
        self.reach.copy_within(index..self.len, index + 1);
        self.keys[index] = key;
        self.replace(index, node, reach);
        self.len += 1;
    }

    fn remove(&mut self, index: usize) {
        self.keys.copy_within(index + 1..self.len, index);
        self.nodes.copy_within(index + 1..self.len, index);
        self.reach.copy_within(index + 1..self.len, index);
        self.len -= 1;
    }
}

impl<O: Order, D> Edit<'_, O, D> {
    /// Puts `slot` in, in place of the slot with the same key if there is one (which must have the same end).
    ///
    /// # Safety
    /// `slot` is alive until it is removed or replaced and a grace period has passed.
    pub(crate) unsafe fn put(&mut self, slot: *const Slot<D>) {
        let old = self.tree.root.newest();
        // SAFETY: alive, as the caller says.
        let entry = unsafe { &*slot };
        let new = New {
            key: O::key(entry),
            end: O::end(entry),
            slot,
        };
        let effect = self.put_below(old, &new, true);
        self.settle_root(old, effect);
    }

    /// Takes the slot with this key out; it must be there.
    pub(crate) fn remove(&mut self, key: O::Key) {
        let old = self.tree.root.newest();
        let effect = self.remove_below(old, key);
        self.settle_root(old, effect);
    }

    fn settle_root(&mut self, old: *const Head, effect: Effect<O>) {
        let root = match effect {
            Effect::Stays => return,
            Effect::One(node) => self.collapsed(old, node),
            Effect::Gone => alloc_head(Head::empty(self.version, old)),
            Effect::Two(first, key, second) => {
                let mut draft = Draft::new();
                draft.push(O::LEAST, first, reach_of::<O, D>(first));
                draft.push(key, second, reach_of::<O, D>(second));
                // SAFETY: as in `view`.
                let level = unsafe { &*first }.level() + 1;
                assert!(usize::from(level) < MAX_LEVELS, "a tree of so many levels");
                let root = self.inner(&draft, 0..2, level, old);
                self.tree.root.publish(root);
                if first != old {
                    self.retire_child(old);
                }
                return;
            }
        };
        self.tree.root.publish(root);
        self.retire_child(old);
    }

    /// `node`, or where it is an inner node with one child only, a copy of that child, as a root in place of `old`.
    fn collapsed(&mut self, old: *const Head, mut node: *const Head) -> *const Head {
        loop {
            let Node::Inner(inner) = view::<O, D>(&node) else {
                return node;
            };
            if inner.head.len() > 1 {
                return node;
            }
            // A copy, since a node's `born` is when it came into its place, and the root is another place.
            let child = inner.cells[0].newest();
            let copy: *const Head = match view::<O, D>(&child) {
                Node::Leaf(leaf) => self.leaf_like(leaf, old).done(),
                Node::Inner(inner) => {
                    let draft = Draft::of(inner);
                    self.inner(&draft, 0..draft.len, inner.head.level(), old)
                }
                Node::Empty => return node,
            };
            self.retire(node);
            self.retire(child);
            node = copy;
        }
    }

    fn retire(&mut self, node: *const Head) {
        (self.replaced)(Replaced(node));
    }

    /// A copy of `leaf` to take the place of `previous`.
    fn leaf_like(&mut self, leaf: &Leaf<O, D>, previous: *const Head) -> NewLeaf<O, D> {
        self.new_leaf(previous, leaf.head.len(), &leaf.entries)
    }

    fn empty_leaf(&mut self, previous: *const Head) -> NewLeaf<O, D> {
        self.new_leaf(previous, 0, &Entries::none())
    }

    #[inline]
    fn new_leaf(
        &mut self,
        previous: *const Head,
        len: usize,
        entries: &Entries<O, D>,
    ) -> NewLeaf<O, D> {
        let new = self.pool.leaf();
        // SAFETY: the pool gives memory for a leaf that nobody else uses; both fields are written before anybody makes
        // a reference.
        unsafe {
            (&raw mut (*new).head).write(Head::new(self.version, previous, 0, len));
            (&raw mut (*new).entries).write(*entries);
        }
        NewLeaf(new)
    }

    /// An inner node of the children `range` of `draft`.
    fn inner(
        &mut self,
        draft: &Draft<O>,
        range: Range<usize>,
        level: u8,
        previous: *const Head,
    ) -> *const Head {
        let len = range.len();
        let from = range.start;
        let has = |i: usize| i < len;
        let inner = Inner::<O> {
            head: Head::new(self.version, previous, level, len),
            keys: core::array::from_fn(|i| {
                if has(i) {
                    draft.keys[from + i]
                } else {
                    O::MOST
                }
            }),
            cells: core::array::from_fn(|i| {
                Cell::new(if has(i) {
                    draft.nodes[from + i]
                } else {
                    ptr::null()
                })
            }),
            reach: O::Reach::new(&draft.reach[range]),
        };
        let new = self.pool.inner();
        // SAFETY: the pool gives memory for an inner node that nobody else uses.
        unsafe { new.write(inner) };
        new.cast()
    }

    /// One or two inner nodes of `draft`, in place of `old`. `append` where the last child is the last of the tree.
    fn inners(&mut self, draft: &Draft<O>, old: *const Head, append: bool) -> Effect<O> {
        // SAFETY: as in `view`.
        let level = unsafe { &*old }.level();
        self.retire(old);
        if draft.len <= INNER {
            return Effect::One(self.inner(draft, 0..draft.len, level, old));
        }
        let middle = if append { INNER } else { draft.len / 2 };
        let first = self.inner(draft, 0..middle, level, ptr::null());
        let second = self.inner(draft, middle..draft.len, level, ptr::null());
        Effect::Two(first, draft.keys[middle], second)
    }
}

/// Which nodes retire when: a node that gives `One`, `Two` or `Gone` up has *not* retired itself if it is a leaf or the
/// empty tree, and has if it is an inner node.
impl<O: Order, D> Edit<'_, O, D> {
    /// `last`: there is no node to the right of this one on its level.
    fn put_below(&mut self, node: *const Head, new: &New<O, D>, last: bool) -> Effect<O> {
        match view::<O, D>(&node) {
            Node::Empty => {
                let mut leaf = self.empty_leaf(node);
                insert(&mut leaf, 0, new);
                Effect::One(leaf.done())
            }
            Node::Leaf(leaf) => self.put_in_leaf(node, leaf, new, last),
            Node::Inner(inner) => {
                let index = upper_bound(&inner.keys, new.key).saturating_sub(1);
                // Before the slot can be seen by anybody who needs it.
                inner.reach.raise(index, new.end);
                let last = last && index + 1 == inner.head.len();
                let old = inner.cells[index].newest();
                match self.put_below(old, new, last) {
                    Effect::Stays => Effect::Stays,
                    Effect::Gone => unreachable!("a node with one more slot"),
                    Effect::One(new) => {
                        inner.cells[index].publish(new);
                        self.retire_child(old);
                        Effect::Stays
                    }
                    Effect::Two(first, key, second) => {
                        let mut draft = Draft::of(inner);
                        draft.replace(index, first, reach_of::<O, D>(first));
                        draft.insert(index + 1, key, second, reach_of::<O, D>(second));
                        if first != old {
                            self.retire_child(old);
                        }
                        self.inners(&draft, node, last)
                    }
                }
            }
        }
    }

    /// Retires a node that was replaced, if it has not done so itself.
    fn retire_child(&mut self, old: *const Head) {
        if !matches!(view::<O, D>(&old), Node::Inner(_)) {
            self.retire(old);
        }
    }

    fn put_in_leaf(
        &mut self,
        node: *const Head,
        leaf: &Leaf<O, D>,
        new: &New<O, D>,
        last: bool,
    ) -> Effect<O> {
        let at = upper_bound(&leaf.entries.keys, new.key);
        if at > 0 && leaf.entries.keys[at - 1] == new.key {
            let mut copy = self.leaf_like(leaf, node);
            copy.entries.slots[at - 1] = new.slot;
            return Effect::One(copy.done());
        }
        if leaf.head.len() < LEAF {
            let mut copy = self.leaf_like(leaf, node);
            insert(&mut copy, at, new);
            return Effect::One(copy.done());
        }
        let mut second = self.empty_leaf(ptr::null());
        if last && at == LEAF {
            insert(&mut second, 0, new);
            return Effect::Two(node, new.key, second.done());
        }
        let middle = LEAF / 2;
        let mut first = self.empty_leaf(ptr::null());
        append(&mut first, leaf, 0..middle);
        append(&mut second, leaf, middle..LEAF);
        if at <= middle {
            insert(&mut first, at, new);
        } else {
            insert(&mut second, at - middle, new);
        }
        let key = second.entries.keys[0];
        Effect::Two(first.done(), key, second.done())
    }

    fn remove_below(&mut self, node: *const Head, key: O::Key) -> Effect<O> {
        match view::<O, D>(&node) {
            Node::Empty => unreachable!("no such slot"),
            Node::Leaf(leaf) => {
                let at = upper_bound(&leaf.entries.keys, key);
                assert!(at > 0 && leaf.entries.keys[at - 1] == key, "no such slot");
                if leaf.head.len() == 1 {
                    return Effect::Gone;
                }
                let mut new = self.leaf_like(leaf, node);
                let len = new.head.len();
                new.head.len -= 1;
                let entries = &mut new.entries;
                entries.keys.copy_within(at..len, at - 1);
                entries.ends.copy_within(at..len, at - 1);
                entries.slots.copy_within(at..len, at - 1);
                entries.keys[len - 1] = O::MOST;
                Effect::One(new.done())
            }
            Node::Inner(inner) => {
                let index = upper_bound(&inner.keys, key).saturating_sub(1);
                let old = inner.cells[index].newest();
                match self.remove_below(old, key) {
                    Effect::Stays => Effect::Stays,
                    Effect::Two(..) => unreachable!("a node with one slot less"),
                    Effect::Gone => {
                        self.retire_child(old);
                        if inner.head.len() == 1 {
                            self.retire(node);
                            return Effect::Gone;
                        }
                        let mut draft = Draft::of(inner);
                        draft.remove(index);
                        self.inners(&draft, node, false)
                    }
                    Effect::One(new) => {
                        self.retire_child(old);
                        if len_of(new) < least(full(new)) && inner.head.len() > 1 {
                            return self.joined(node, inner, index, new);
                        }
                        let reach = reach_of::<O, D>(new);
                        if O::Reach::KEPT && reach < inner.reach.get(index) {
                            let mut draft = Draft::of(inner);
                            draft.replace(index, new, reach);
                            return self.inners(&draft, node, false);
                        }
                        inner.cells[index].publish(new);
                        Effect::Stays
                    }
                }
            }
        }
    }

    /// `inner`, with `new` as child `index` joined to a neighbour.
    fn joined(
        &mut self,
        node: *const Head,
        inner: &Inner<O>,
        index: usize,
        new: *const Head,
    ) -> Effect<O> {
        let mut draft = Draft::of(inner);
        draft.replace(index, new, 0);
        let left = index.saturating_sub(1);
        let (first, second) = (draft.nodes[left], draft.nodes[left + 1]);
        let total = len_of(first) + len_of(second);
        let middle = if total <= joined(full(first)) {
            total
        } else {
            total / 2
        };
        let (one, key, other) = match (view::<O, D>(&first), view::<O, D>(&second)) {
            (Node::Leaf(first), Node::Leaf(second)) => {
                let mut one = self.empty_leaf(ptr::null());
                let len = first.head.len();
                let (here, there) = (len.min(middle), middle.saturating_sub(len));
                append(&mut one, first, 0..here);
                append(&mut one, second, 0..there);
                let mut key = O::MOST;
                let other = (middle < total).then(|| {
                    let mut other = self.empty_leaf(ptr::null());
                    append(&mut other, first, here..len);
                    append(&mut other, second, there..second.head.len());
                    key = other.entries.keys[0];
                    other.done()
                });
                (one.done(), key, other)
            }
            (Node::Inner(first), Node::Inner(second)) => self.shared(
                first,
                second,
                draft.keys[left],
                draft.keys[left + 1],
                middle,
            ),
            // Children of one node have one level.
            _ => unreachable!("neighbours of different levels"),
        };
        draft.replace(left, one, reach_of::<O, D>(one));
        match other {
            Some(other) => {
                draft.keys[left + 1] = key;
                draft.replace(left + 1, other, reach_of::<O, D>(other));
            }
            None => draft.remove(left + 1),
        }
        self.retire(first);
        self.retire(second);
        self.inners(&draft, node, false)
    }

    /// The children of two neighbours, the first `middle` of them in one node and the rest in another.
    fn shared(
        &mut self,
        first: &Inner<O>,
        second: &Inner<O>,
        first_key: O::Key,
        second_key: O::Key,
        middle: usize,
    ) -> (*const Head, O::Key, Option<*const Head>) {
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
            return (node, O::MOST, None);
        }
        let second = self.inner(&other, 0..other.len, level, ptr::null());
        (node, other.keys[0], Some(second))
    }
}

/// Puts `new` at `at` into a leaf that is not full.
#[inline]
fn insert<O: Order, D>(leaf: &mut Leaf<O, D>, at: usize, new: &New<O, D>) {
    let len = leaf.head.len();
    let entries = &mut leaf.entries;
    entries.keys.copy_within(at..len, at + 1);
    entries.ends.copy_within(at..len, at + 1);
    entries.slots.copy_within(at..len, at + 1);
    entries.keys[at] = new.key;
    entries.ends.set(at, new.end);
    entries.slots[at] = new.slot;
    leaf.head.len += 1;
    note_overlap(leaf, at);
}

/// Takes note of whether the slot at `at`, which has just come, overlaps a neighbour. If others do not overlap each other, it
/// overlaps none if it overlaps no neighbour.
#[inline]
fn note_overlap<O: Order, D>(leaf: &mut Leaf<O, D>, at: usize) {
    if !O::Reach::KEPT {
        return;
    }
    let entries = &mut leaf.entries;
    let meets = |i: usize| entries.ends.get(i) > O::start(entries.keys[i + 1]);
    let before = at > 0 && meets(at - 1);
    let behind = at + 1 < leaf.head.len() && meets(at);
    if before || behind {
        entries.ends.overlap();
    }
}

/// Adds the slots `range` of `from` at the end of `to`.
fn append<O: Order, D>(to: &mut Leaf<O, D>, from: &Leaf<O, D>, range: Range<usize>) {
    for i in range {
        let len = to.head.len();
        to.entries.keys[len] = from.entries.keys[i];
        to.entries.ends.set(len, from.entries.ends.get(i));
        to.entries.slots[len] = from.entries.slots[i];
        to.head.len += 1;
        note_overlap(to, len);
    }
}
