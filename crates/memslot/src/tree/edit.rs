//! Changes of a tree, made by the one writer.
//!
//! A record that replaces another with the same key and end is stored over it in its leaf. Any
//! other change goes down to the leaf of its key and makes a new leaf. On the way up, the change
//! does one of two things at each inner node:
//!
//! - It publishes the new child in the child's cell. That ends the change.
//! - It makes a new inner node and passes that up. It must if the keys of the node change (a child
//!   was split, joined or removed). It also must if a bound that reaches into the next child
//!   becomes lower.
//!
//! So one store, the last, makes the whole change visible.
//!
//! A node holds at least a quarter of its room. With less, it joins a neighbour or shares with it
//! ([`super::shape`]). The last node of a level may hold less: slots that come in ascending order
//! fill all nodes but the last.

use super::draft::Draft;
use super::kind::{INNER, LEAST, MOST, Order, Reach};
use super::leaf::{Leaf, LeafEntry, room_for};
use super::node::{Cell, Head, Inner, NEWEST, Node, upper_bound};
use super::place::Place;
use super::pool::{NodePool, Replaced};
use super::{MAX_LEVELS, Tree};
use crate::Slot;
use core::ops::Range;
use core::ptr;

/// Nodes with fewer entries are joined with a neighbour.
pub(super) const fn least(full: usize) -> usize {
    full / 4
}

/// A change of one tree.
pub(crate) struct Edit<'e, O: Order, D> {
    pub(crate) tree: &'e Tree<O, D>,
    /// The version in which the change becomes visible.
    pub(crate) version: u64,
    /// Holds the memory that the change [needs](super::Need).
    pub(crate) pool: &'e mut NodePool<O, D>,
    /// Takes the nodes that were replaced.
    pub(crate) replaced: &'e mut dyn FnMut(Replaced),
}

/// The effect of a change on a node.
pub(super) enum Effect {
    /// The node stays. The change was published below it.
    Stays,
    /// Another node takes its place.
    One(*const Head),
    /// Two nodes take its place. The key is the least of the second.
    Two(*const Head, u64, *const Head),
    /// Nothing is left of it.
    Gone,
}

impl<O: Order, D> Tree<O, D> {
    /// Stores `slot` over the slot with the same key and end, which is its predecessor. Writer
    /// only.
    ///
    /// # Safety
    /// `slot` lives until it is removed or replaced and a grace period has passed.
    pub(crate) unsafe fn replace(&self, slot: *const Slot<D>) {
        // SAFETY: alive, as the caller says.
        let key = O::key(unsafe { &*slot });
        // SAFETY: only the writer frees nodes, and the caller is the writer.
        let (leaf, index) = unsafe { self.at(NEWEST) }.find(key).expect("no such slot");
        leaf.patch(index, slot);
    }

    /// The room of its leaves.
    pub(crate) fn room(&self) -> usize {
        match view::<O, D>(&self.root.newest()) {
            Node::Leaf(leaf) => leaf.room(),
            Node::Inner(_) | Node::Empty => O::LEAF,
        }
    }

    /// Frees all nodes. Passes each slot pointer to `slot` first.
    ///
    /// # Safety
    /// Nobody uses the tree now or later. The caller frees all replaced nodes separately.
    pub(crate) unsafe fn free_all(
        &mut self,
        pool: &mut NodePool<O, D>,
        slot: &mut dyn FnMut(*const Slot<D>),
    ) {
        /// # Safety
        /// As for `free_all`.
        unsafe fn below<O: Order, D>(
            node: *const Head,
            pool: &mut NodePool<O, D>,
            slot: &mut dyn FnMut(*const Slot<D>),
        ) {
            match view::<O, D>(&node) {
                Node::Empty => {}
                Node::Leaf(leaf) => (0..leaf.len()).for_each(|i| slot(leaf.record(i))),
                Node::Inner(inner) => {
                    for cell in &inner.cells[..inner.head.len()] {
                        // SAFETY: as for the caller. Each node is in one cell.
                        unsafe { below(cell.newest(), pool, slot) };
                    }
                }
            }
            // SAFETY: nobody uses the node, and nobody reads its cell again.
            unsafe { pool.free(Replaced(node)) };
        }
        // SAFETY: as the caller promises.
        unsafe { below(self.root.newest(), pool, slot) };
    }
}

/// The node behind a pointer that the writer got from a cell, or has just made. The borrow of the
/// pointer stands for that of the node: the writer frees no node during a change.
pub(super) fn view<O: Order, D>(node: &*const Head) -> Node<'_, O, D> {
    // SAFETY: new nodes and nodes in cells are alive. Only the writer frees, and the caller is the
    // writer.
    unsafe { Node::at(*node) }
}

/// The number of slots of a leaf with keys below `key`. No slot has `key`.
#[inline]
pub(super) fn rank_of_new<O: Order, D>(leaf: Leaf<'_, O, D>, key: u64) -> usize {
    let at = leaf.rank(key);
    debug_assert!(at == 0 || leaf.key(at - 1) < key, "a slot with this key");
    at
}

/// The number of slots or children of a node.
pub(super) fn len_of(node: *const Head) -> usize {
    // SAFETY: as in `view`.
    unsafe { &*node }.len()
}

/// Whether a slot can leave the leaf at `place` without a change of any other node.
#[inline]
pub(super) fn stays_alone<O: Order, D>(place: &Place, leaf: Leaf<'_, O, D>) -> bool {
    let (left, room) = (leaf.len() - 1, leaf.room());
    if place.root {
        left > 0 && (left >= least(room) || room == room_for(left))
    } else {
        // Otherwise bounds further up may have to be lowered.
        left >= least(O::LEAF) && !O::Reach::passes(place.reach, place.next)
    }
}

/// The most slots or children that a node below an inner node can have.
pub(super) fn full<O: Order>(node: *const Head) -> usize {
    // SAFETY: as in `view`.
    if unsafe { &*node }.level() == 0 {
        O::LEAF
    } else {
        INNER
    }
}

/// The greatest end of a leaf's slots, or the greatest bound of an inner node.
pub(super) fn reach_of<O: Order, D>(node: *const Head) -> u64 {
    if !O::Reach::KEPT {
        return 0;
    }
    match view::<O, D>(&node) {
        Node::Empty => 0,
        Node::Leaf(leaf) => leaf.reach(),
        Node::Inner(inner) => (0..inner.head.len())
            .map(|i| inner.reach.get(i))
            .max()
            .unwrap_or(0),
    }
}

impl<O: Order, D> Edit<'_, O, D> {
    /// Puts `slot` in. The tree must have no slot with the same key.
    ///
    /// # Safety
    /// `slot` lives until it is removed or replaced and a grace period has passed.
    pub(crate) unsafe fn put(&mut self, slot: *const Slot<D>) {
        let old = self.tree.root.newest();
        // SAFETY: alive, as the caller says.
        let new = unsafe { LeafEntry::of::<O>(slot) };
        let effect = match view::<O, D>(&old) {
            // Only a leaf that is the whole tree grows. Others are split when they are full.
            Node::Leaf(leaf) if leaf.len() == leaf.room() => {
                let at = rank_of_new(leaf, new.key);
                Effect::One(if leaf.room() == O::FLAT {
                    self.unfolded(leaf, at, &new, old)
                } else {
                    self.grown(leaf, at, &new)
                })
            }
            _ => self.put_below(old, &new, true),
        };
        let root = match effect {
            Effect::Stays => return,
            Effect::One(node) => node,
            Effect::Gone => unreachable!("a tree with one more slot"),
            Effect::Two(first, key, second) => {
                let mut draft = Draft::new();
                draft.push(LEAST, first, reach_of::<O, D>(first));
                draft.push(key, second, MOST);
                // SAFETY: as in `view`.
                let level = unsafe { &*first }.level() + 1;
                assert!(usize::from(level) < MAX_LEVELS, "a tree of so many levels");
                self.inner(&draft, 0..2, level, old)
            }
        };
        self.tree.root.publish(root);
        self.retire_child(old);
    }

    /// Takes the slot with this key out. The tree must have it.
    pub(crate) fn remove(&mut self, key: u64) {
        let old = self.tree.root.newest();
        let effect = self.remove_below(old, key, true, MOST);
        let root = match effect {
            Effect::Stays => return,
            Effect::One(node) => self.lowered(old, node),
            Effect::Gone => self.pool.empty(Head::empty(self.version, old)),
            Effect::Two(..) => unreachable!("a tree with one slot less"),
        };
        self.tree.root.publish(root);
        self.retire_child(old);
    }

    pub(super) fn retire(&mut self, node: *const Head) {
        (self.replaced)(Replaced(node));
    }

    /// Retires a replaced child, unless the change below has done so.
    fn retire_child(&mut self, old: *const Head) {
        if !matches!(view::<O, D>(&old), Node::Inner(_)) {
            self.retire(old);
        }
    }

    /// Makes an inner node of the children `range` of `draft`.
    pub(super) fn inner(
        &mut self,
        draft: &Draft,
        range: Range<usize>,
        level: u8,
        previous: *const Head,
    ) -> *const Head {
        let len = range.len();
        let from = range.start;
        let has = |i: usize| i < len;
        let inner = Inner::<O> {
            head: Head::new(self.version, previous, level, len),
            keys: core::array::from_fn(|i| if has(i) { draft.keys[from + i] } else { MOST }),
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

    /// Makes one or two inner nodes of `draft`, in place of `old`. `append`: the last child is the
    /// last of the tree.
    fn inners(&mut self, draft: &Draft, old: *const Head, append: bool) -> Effect {
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

/// These functions return `One`, `Two` or `Gone` for a replaced node. If it is an inner node, they
/// have retired it. If it is a leaf or the empty tree, the caller retires it.
impl<O: Order, D> Edit<'_, O, D> {
    /// `last`: there is no node to the right of this one on its level.
    fn put_below(&mut self, node: *const Head, new: &LeafEntry<D>, last: bool) -> Effect {
        match view::<O, D>(&node) {
            Node::Empty => {
                let mut leaf = self.pool.leaf(room_for(1));
                leaf.push(new);
                Effect::One(leaf.done(self.version, node))
            }
            Node::Leaf(leaf) => self.put_in_leaf(node, leaf, new, last),
            Node::Inner(inner) => {
                let index = upper_bound(&inner.keys, new.key).saturating_sub(1);
                let last = last && index + 1 == inner.head.len();
                // Raise the bound before any reader that needs it can see the slot. Slots usually
                // come in ascending order, and a reader that looks beyond the last child must look
                // there anyway. So the last bound is raised to `MOST`, once.
                inner.reach.raise(index, if last { MOST } else { new.end });
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
                        let reach = if last { MOST } else { reach_of::<O, D>(second) };
                        draft.insert(index + 1, key, second, reach);
                        if first != old {
                            self.retire_child(old);
                        }
                        self.inners(&draft, node, last)
                    }
                }
            }
        }
    }

    fn put_in_leaf(
        &mut self,
        node: *const Head,
        leaf: Leaf<'_, O, D>,
        new: &LeafEntry<D>,
        last: bool,
    ) -> Effect {
        let at = rank_of_new(leaf, new.key);
        if leaf.len() < leaf.room() {
            return Effect::One(self.put_in_room(leaf, at, new));
        }
        self.split(node, leaf, at, new, last)
    }

    /// Makes a leaf with twice the room of `leaf` and with `new` at index `at`. `leaf` is full and
    /// is the whole tree.
    fn grown(&mut self, leaf: Leaf<'_, O, D>, at: usize, new: &LeafEntry<D>) -> *const Head {
        let len = leaf.len();
        let mut copy = self.pool.leaf(room_for(len + 1));
        copy.append(leaf, 0..at);
        copy.push(new);
        copy.append(leaf, at..len);
        copy.done(self.version, leaf.node())
    }

    /// Makes a copy of `leaf`, which has room, with `new` at index `at`.
    #[inline(always)]
    pub(super) fn put_in_room(
        &mut self,
        leaf: Leaf<'_, O, D>,
        at: usize,
        new: &LeafEntry<D>,
    ) -> *const Head {
        let copy = self.pool.leaf(leaf.room());
        copy.with(leaf, at, new, self.version)
    }

    /// `root`: the node is the root. `next`: a lower bound of the keys to the right of the node.
    fn remove_below(&mut self, node: *const Head, key: u64, root: bool, next: u64) -> Effect {
        match view::<O, D>(&node) {
            Node::Empty => unreachable!("no such slot"),
            Node::Leaf(leaf) => {
                let at = leaf.index_of(key).expect("no such slot");
                let (len, room) = (leaf.len(), leaf.room());
                if len == 1 {
                    return Effect::Gone;
                }
                if root && len - 1 < least(room) && room > room_for(len - 1) {
                    let mut copy = self.pool.leaf(room / 2);
                    copy.append(leaf, 0..at);
                    copy.append(leaf, at + 1..len);
                    return Effect::One(copy.done(self.version, node));
                }
                let copy = self.pool.leaf(room);
                Effect::One(copy.without(leaf, at, self.version))
            }
            Node::Inner(inner) => {
                let index = upper_bound(&inner.keys, key).saturating_sub(1);
                let next = inner.next_key(index, next);
                let old = inner.cells[index].newest();
                match self.remove_below(old, key, false, next) {
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
                        if len_of(new) < least(full::<O>(new)) && inner.head.len() > 1 {
                            let mut draft = Draft::of(inner);
                            draft.replace(index, new, 0);
                            self.join(&mut draft, index.saturating_sub(1));
                            return self.inners(&draft, node, false);
                        }
                        let bound = inner.reach.get(index);
                        if O::Reach::passes(bound, next) {
                            let reach = reach_of::<O, D>(new);
                            if reach < bound {
                                let mut draft = Draft::of(inner);
                                draft.replace(index, new, reach);
                                return self.inners(&draft, node, false);
                            }
                        }
                        inner.cells[index].publish(new);
                        Effect::Stays
                    }
                }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::kind::ByHva;
    use super::*;
    use crate::{Limits, Request, SlotWriter};
    use pageferry_addr::{Gfn, Hva, PAGE_SIZE};

    fn request(id: u16, hva: u64, pages: u64) -> Request<()> {
        Request {
            gpa: Gfn(u64::from(id) << 20).gpa(),
            size: pages * PAGE_SIZE,
            hva: Hva(hva),
            ..Request::delete(0, id)
        }
    }

    /// The number of children, at all levels below `node`, whose bounds pass the keys to their
    /// right.
    fn passing(node: *const Head, next: u64) -> usize {
        let Node::Inner(inner) = view::<ByHva, ()>(&node) else {
            return 0;
        };
        let below = |child: usize| {
            let next = inner.next_key(child, next);
            let passes = <ByHva as Order>::Reach::passes(inner.reach.get(child), next);
            usize::from(passes) + passing(inner.cells[child].newest(), next)
        };
        (0..inner.head.len()).map(below).sum()
    }

    const SLOTS: u16 = if cfg!(miri) { 90 } else { 3000 };
    const THIRD: u16 = SLOTS / 3;
    const START: u64 = 1 << 30;

    /// Returns a writer with adjacent slots of one page each, put in by `order`, and a function
    /// that checks the bounds.
    fn side_by_side(order: impl Fn(u16) -> u16) -> (SlotWriter<()>, impl Fn() -> usize) {
        let mut writer = SlotWriter::new(Limits::default());
        for id in (0..SLOTS).map(order) {
            let hva = START + u64::from(id) * PAGE_SIZE;
            writer.set(request(id, hva, 1)).expect("a free place");
        }
        let table = writer.table();
        let passing = move || passing(table.shared.spaces[0].by_hva.root.newest(), MOST);
        (writer, passing)
    }

    #[test]
    fn no_bound_passes_the_next_child_in_whatever_order_slots_come() {
        let orders: [fn(u16) -> u16; 3] = [
            |i| i,
            |i| SLOTS - 1 - i,
            |i| (u32::from(i) * 7919 % u32::from(SLOTS)) as u16,
        ];
        for order in orders {
            let (mut writer, passing) = side_by_side(order);
            assert_eq!(passing(), 0);
            // Remove the last slot again and again, so that other nodes become the last.
            for id in (THIRD..SLOTS).rev() {
                writer.set(Request::delete(0, id)).expect("it");
            }
            assert_eq!(passing(), 0);
            for id in THIRD..SLOTS {
                let hva = START + u64::from(id) * PAGE_SIZE;
                writer.set(request(id, hva, 1)).expect("a free place");
            }
            assert_eq!(passing(), 0);
        }
    }

    #[test]
    fn a_bound_that_passes_the_next_child_is_lowered_with_the_slot_it_was_for() {
        let (mut writer, passing) = side_by_side(|i| i);
        // Add one slot that overlaps all others, and slots that overlap some.
        let (all, third) = (u64::from(SLOTS), u64::from(THIRD));
        let over = [(0, all), (0, 40), (third, third / 2), (all - 10, 20)];
        // Under Miri there are so few slots that the last of these passes no other child.
        let over = &over[..if cfg!(miri) { 3 } else { 4 }];
        for (number, &(first, pages)) in (0..).zip(over) {
            let hva = START + first * PAGE_SIZE;
            writer
                .set(request(SLOTS + number, hva, pages))
                .expect("a free place");
            assert!(passing() > 0, "{first}");
            writer.set(Request::delete(0, SLOTS + number)).expect("it");
            assert_eq!(passing(), 0, "{first}");
        }
        // Toggle random slots, which also adds and removes ends of leaves. No bound may pass then
        // either.
        let mut there = alloc::vec![true; usize::from(SLOTS)];
        for step in 0..if cfg!(miri) { 60 } else { 20_000_u64 } {
            let id = (step * step % u64::from(SLOTS)) as u16;
            let there = &mut there[usize::from(id)];
            *there = !*there;
            let pages = u64::from(*there);
            let hva = START + u64::from(id) * PAGE_SIZE;
            writer.set(request(id, hva, pages)).expect("in or out");
        }
        assert_eq!(passing(), 0);
    }
}
