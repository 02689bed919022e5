#![expect(
    unsafe_code,
    reason = "the arrays of a leaf are as long as its head says"
)]
//! Leaves: the slots of a stretch of keys.
//!
//! A leaf is its [`Head`], then as many keys as it has room for, then (where the order keeps them) the end of each slot and
//! the greatest end so far, then the cells of slots, and how many tombstones are among them. Below inner nodes all leaves have the order's usual room,
//! [`Order::LEAF`]; a leaf that is all of its tree has as much as it needs, up to [`Order::FLAT`], as searching one
//! array takes less time than going down a level.
//!
//! What a place of a leaf says never changes after the leaf was published, but for the cell: that changes when another record takes
//! the place of the one with the same key, or a [tombstone](mod@super::tombstone), which says that the slot has gone. The new one knows the old
//! one, and since which version it has its place ([`Slot`]), as nodes do.
//!
//! # Slots that come behind the others
//!
//! A new slot (one without predecessor) whose key is greater than all others is put into the first unused place of the leaf
//! in the tree: [`Leaf::extend`] stores ends, key and number of slots, and the cell last. So slots that come in ascending order
//! copy nothing until a leaf is full. Readers may be in that leaf:
//!
//! - The cell makes the slot visible, as one store. Until then it holds nothing, and whoever finds the key, or counts the
//!   place, finds no slot there. Who has seen the slot (`Acquire`) sees key and number from then on, by whatever look-up.
//! - A reader of an older version learns from the record that it was born later and had no predecessor: there is no
//!   such slot. (A record with a predecessor elsewhere, of a slot that moves, comes by a copy of the leaf, or over a tombstone.) In each
//!   version a leaf has a slot at least, so a walk downwards ends.
//! - Keys of several such slots may be seen out of order: see [`upper_bound`]. Then what is found is the last slot of a state
//!   between the creations, which all run beside the look-up.
//! - Who finds nothing in a cell, or a tombstone, takes the slot before, which may have been replaced since: *that* slot is the last up to the
//!   key no longer, but by frame slots do not overlap. If it does not hold the frame, then no slot did at some moment of the
//!   look-up: the cells were looked at from the right to the left, and between one slot that held the frame and the next, the first must
//!   have gone before the second came. (One slot that moves over itself would be no such case. It does so by a copy of the leaf,
//!   or from leaf to leaf.) So [`newest_floor`](super::At::newest_floor) is for who asks whether the slot holds the frame.
//! - Walks by host address read keys, ends and greatest ends in any order. All of a slot that a version has was there before that
//!   version was published, and whatever is read of one that is coming, it is not looked for. The greatest end so far may be too high
//!   for an older version, which costs a look in vain. (Until it comes it is `MOST`: no slot before it is passed by.)

use super::kind::{ByHva, Order, Reach};
use super::node::{Head, Key, upper_bound};
use super::tombstone::{Tombstone, held, is_slot};
use crate::Slot;
use crate::sync::{AtomicPtr, AtomicU64, Ordering, prefetch};
use core::alloc::Layout;
use core::marker::PhantomData;
use core::{ptr, slice};

/// The least room of a leaf; all others are this times a power of two.
pub(crate) const LEAST_ROOM: usize = if cfg!(loom) { 4 } else { 16 };
/// What leaves are aligned to.
const ALIGN: usize = 16;
/// What caches load at once.
const LINE: usize = 64;
/// How many kinds of room there are.
pub(crate) const ROOMS: usize = 4;

/// The least room for `len` slots.
pub(crate) fn room_for(len: usize) -> usize {
    len.next_power_of_two().max(LEAST_ROOM)
}

/// Which kind of room this is, from 0 on.
pub(crate) const fn kind_of(room: usize) -> usize {
    (room / LEAST_ROOM).trailing_zeros() as usize
}

/// One slot of a leaf.
pub(crate) struct Entry<D> {
    pub(crate) key: u64,
    /// Where the slot ends, where the order keeps ends.
    pub(crate) end: u64,
    pub(crate) slot: *const Slot<D>,
}

// By hand, since derived ones would ask for `D: Copy`.
impl<D> Clone for Entry<D> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}
impl<D> Copy for Entry<D> {}

impl<D> Entry<D> {
    /// That of `slot` in a tree of this order.
    ///
    /// # Safety
    /// `slot` is alive.
    #[inline]
    pub(crate) unsafe fn of<O: Order>(slot: *const Slot<D>) -> Self {
        // SAFETY: alive, as the caller says.
        let record = unsafe { &*slot };
        Self {
            key: O::key(record),
            end: O::end(record),
            slot,
        }
    }
}

/// Where the parts of a leaf are, in bytes from its beginning.
pub(super) struct Parts<O, D>(PhantomData<(O, fn() -> D)>);

impl<O: Order, D> Parts<O, D> {
    pub(super) const KEYS: usize = size_of::<Head>().next_multiple_of(32);
    const EACH_END: usize = if O::Reach::KEPT {
        size_of::<AtomicU64>()
    } else {
        0
    };

    pub(super) const fn ends(room: usize) -> usize {
        Self::KEYS + room * size_of::<AtomicU64>()
    }

    pub(super) const fn up_to(room: usize) -> usize {
        Self::ends(room) + room * Self::EACH_END
    }

    pub(super) const fn cells(room: usize) -> usize {
        Self::up_to(room) + room * Self::EACH_END
    }

    /// How many words of keys and ends there are.
    pub(super) const fn words(room: usize) -> usize {
        (Self::cells(room) - Self::KEYS) / size_of::<AtomicU64>()
    }

    pub(super) const fn count(room: usize) -> usize {
        Self::cells(room) + room * size_of::<AtomicPtr<Slot<D>>>()
    }

    pub(super) const fn layout(room: usize) -> Layout {
        let size = Self::count(room) + size_of::<AtomicU64>();
        match Layout::from_size_align(size, ALIGN) {
            Ok(layout) => layout,
            Err(_) => panic!("a leaf is small"),
        }
    }
}

/// The memory of a leaf with `room`.
pub(crate) const fn layout_of<O: Order, D>(room: usize) -> Layout {
    Parts::<O, D>::layout(room)
}

/// A leaf in a tree, or one that was.
pub(crate) struct Leaf<'g, O: Order, D> {
    node: *const Head,
    order: PhantomData<(O, &'g Slot<D>)>,
}

impl<O: Order, D> Clone for Leaf<'_, O, D> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}
impl<O: Order, D> Copy for Leaf<'_, O, D> {}

impl<'g, O: Order, D> Leaf<'g, O, D> {
    /// # Safety
    /// `node` is a leaf of this order and data, by the pointer it was allocated with; during `'g` it is not freed.
    #[inline(always)]
    pub(crate) const unsafe fn at(node: *const Head) -> Self {
        Self {
            node,
            order: PhantomData,
        }
    }

    /// The pointer it was allocated with.
    #[inline(always)]
    pub(crate) const fn node(self) -> *const Head {
        self.node
    }

    #[inline(always)]
    pub(crate) const fn head(self) -> &'g Head {
        // SAFETY: alive during `'g`.
        unsafe { &*self.node }
    }

    #[inline]
    pub(crate) fn len(self) -> usize {
        self.head().len()
    }

    #[inline]
    pub(crate) const fn room(self) -> usize {
        self.head().room()
    }

    /// # Safety
    /// `count` words begin `offset` bytes into the leaf.
    #[inline(always)]
    unsafe fn array(self, offset: usize, count: usize) -> &'g [AtomicU64] {
        // SAFETY: as the caller says; alive during `'g`, and allocated as one piece.
        unsafe { slice::from_raw_parts(self.node.byte_add(offset).cast(), count) }
    }

    #[inline(always)]
    fn keys_of(self, room: usize) -> &'g [AtomicU64] {
        debug_assert_eq!(room, self.room());
        // SAFETY: written whole before the leaf was published.
        unsafe { self.array(Parts::<O, D>::KEYS, room) }
    }

    /// Ascending; unused ones are `MOST`.
    #[inline]
    pub(super) fn keys(self) -> &'g [AtomicU64] {
        self.keys_of(self.room())
    }

    /// The key of a slot; `MOST` of an unused place.
    #[inline]
    pub(crate) fn key(self, index: usize) -> u64 {
        self.keys()[index].value()
    }

    /// Where each slot ends; empty where ends are not kept.
    #[inline]
    pub(super) fn ends(self) -> &'g [AtomicU64] {
        let room = if O::Reach::KEPT { self.room() } else { 0 };
        // SAFETY: as above.
        unsafe { self.array(Parts::<O, D>::ends(self.room()), room) }
    }

    /// The greatest end up to and with each slot, likewise; `MOST` of unused places.
    #[inline]
    fn up_to(self) -> &'g [AtomicU64] {
        self.up_to_of(self.room())
    }

    #[inline(always)]
    fn up_to_of(self, room: usize) -> &'g [AtomicU64] {
        debug_assert_eq!(room, self.room());
        let count = if O::Reach::KEPT { room } else { 0 };
        // SAFETY: as above.
        unsafe { self.array(Parts::<O, D>::up_to(room), count) }
    }

    /// The greatest end of all, where ends are kept.
    pub(crate) fn reach(self) -> u64 {
        match self.len().checked_sub(1) {
            Some(last) if O::Reach::KEPT => self.up_to()[last].value(),
            _ => 0,
        }
    }

    #[inline(always)]
    pub(super) fn cells(self, room: usize) -> *const AtomicPtr<Slot<D>> {
        // SAFETY: a part of the leaf.
        unsafe { self.node.byte_add(Parts::<O, D>::cells(room)).cast() }
    }

    #[inline(always)]
    fn cell(self, room: usize, index: usize) -> &'g AtomicPtr<Slot<D>> {
        debug_assert!(room == self.room() && index < room);
        // SAFETY: as above; what changes of a cell is behind its atomic.
        unsafe { &*self.cells(room).add(index) }
    }

    /// What a place holds: the newest record of a slot, or a [tombstone](mod@super::tombstone); nothing where the slot is coming.
    /// `Acquire`: what it says was written before.
    #[inline(always)]
    pub(crate) fn record(self, index: usize) -> *const Slot<D> {
        self.cell(self.room(), index).load(Ordering::Acquire)
    }

    /// How many keys are at most `key`.
    #[inline(always)]
    pub(crate) fn rank(self, key: u64) -> usize {
        // Of most leaves the compiler knows the room: of those of large trees, and of those of the smallest.
        match self.room() {
            room if room == O::LEAF => upper_bound(self.keys_of(O::LEAF), key),
            LEAST_ROOM => upper_bound(self.keys_of(LEAST_ROOM), key),
            _ => self.rank_of_any(key),
        }
    }

    /// The same, for any room. Apart, so that all these are in few places.
    #[inline(never)]
    fn rank_of_any(self, key: u64) -> usize {
        const { assert!(ROOMS == 4) };
        match kind_of(self.room()) {
            0 => upper_bound(self.keys_of(LEAST_ROOM), key),
            1 => upper_bound(self.keys_of(2 * LEAST_ROOM), key),
            2 => upper_bound(self.keys_of(4 * LEAST_ROOM), key),
            _ => upper_bound(self.keys_of(8 * LEAST_ROOM), key),
        }
    }

    /// [`record`](Self::record) of the slot with the greatest key that is at most `key`. For leaves below inner nodes, whose
    /// room is known: the head is not even read.
    #[inline(always)]
    pub(crate) fn usual_floor(self, key: u64) -> Option<*const Slot<D>> {
        // Cells lie in other lines than keys: wait for both at the same time.
        self.prefetch_from(Parts::<O, D>::cells(O::LEAF));
        let at = upper_bound(self.keys_of(O::LEAF), key).checked_sub(1)?;
        Some(self.cell(O::LEAF, at).load(Ordering::Acquire))
    }

    /// Begins to load a leaf below an inner node into this core's cache.
    #[inline]
    pub(crate) fn prefetch(self) {
        self.prefetch_from(0);
    }

    /// The same from `offset` on.
    #[inline(always)]
    fn prefetch_from(self, offset: usize) {
        for offset in (offset..Parts::<O, D>::count(O::LEAF)).step_by(LINE) {
            prefetch(self.node.wrapping_byte_add(offset));
        }
    }

    /// The writer's: publishes `slot`, whose key and end are those of the record at `index`, in its place.
    pub(crate) fn patch(self, index: usize, slot: *const Slot<D>) {
        self.cell(self.room(), index)
            .store(slot.cast_mut(), Ordering::Release);
    }

    /// The writer's: puts a slot, whose key is greater than theirs, behind those there are, for which there is room, if it has no
    /// predecessor. False if it has, and nothing is done.
    #[inline]
    pub(crate) fn extend(self, new: &Entry<D>) -> bool {
        let len = self.len();
        // SAFETY: alive, as it is about to be found.
        let predecessor = unsafe { &*new.slot }.previous.0;
        if !predecessor.is_null() {
            return false;
        }
        debug_assert!(len > 0 && self.key(len - 1) < new.key);
        if O::Reach::KEPT {
            let highest = self.reach().max(new.end);
            self.ends()[len].store(new.end, Ordering::Relaxed);
            self.up_to()[len].store(highest, Ordering::Relaxed);
        }
        self.keys()[len].store(new.key, Ordering::Release);
        self.head().grow(len + 1);
        // From now on it is there.
        self.patch(len, new.slot);
        true
    }

    /// The writer's: how many tombstones there are. Behind the cells, where no reader looks.
    #[inline]
    fn count(self) -> &'g AtomicU64 {
        let offset = Parts::<O, D>::count(self.room());
        // SAFETY: a part of the leaf, written before it was published.
        unsafe { &*self.node.byte_add(offset).cast() }
    }

    /// The writer's: how many places are those of slots that have gone.
    #[inline]
    pub(crate) fn tombstones(self) -> usize {
        self.count().value() as usize
    }

    /// The writer's: stores a tombstone over the slot at `index`.
    ///
    /// # Safety
    /// It is alive until it is [given back](super::Out) and a grace period has passed.
    #[inline]
    pub(crate) unsafe fn bury(self, index: usize, tombstone: *const Tombstone<D>) {
        debug_assert!(is_slot(self.record(index)));
        // SAFETY: alive, as the caller says.
        unsafe { &*tombstone }.put();
        self.count()
            .store(self.count().value() + 1, Ordering::Relaxed);
        self.patch(index, held(tombstone));
    }

    /// The writer's: stores a slot over the tombstone at `index`.
    #[inline]
    pub(crate) fn raise(self, index: usize, slot: *const Slot<D>) {
        debug_assert!(!is_slot(self.record(index)));
        self.count()
            .store(self.count().value() - 1, Ordering::Relaxed);
        self.patch(index, slot);
    }

    /// The writer's: whether a slot can be stored over the tombstone with its key.
    #[inline]
    pub(crate) fn may_hold(self, index: usize, new: &Entry<D>) -> bool {
        let end = self.ends().get(index);
        end.is_none_or(|end| end.value() == new.end)
    }

    /// Where the slot with this key is, or its tombstone.
    #[inline]
    pub(crate) fn index_of(self, key: u64) -> Option<usize> {
        self.index_at(self.rank(key), key)
    }

    /// The same for who knows the rank of the key.
    #[inline]
    pub(crate) fn index_at(self, rank: usize, key: u64) -> Option<usize> {
        let index = rank.checked_sub(1)?;
        (self.key(index) == key).then_some(index)
    }

    /// The writer's: visits the slots in order, but for that at index `without`, and with `new` among them; tombstones are none.
    pub(crate) fn each_slot(
        self,
        without: Option<usize>,
        mut new: Option<&Entry<D>>,
        mut visit: impl FnMut(&Entry<D>),
    ) {
        for index in (0..self.len()).filter(|&index| Some(index) != without) {
            let entry = self.entry(index);
            if !is_slot(entry.slot) {
                continue;
            }
            if let Some(first) = new.take_if(|new| new.key < entry.key) {
                visit(first);
            }
            visit(&entry);
        }
        if let Some(last) = new {
            visit(last);
        }
    }

    /// The writer's.
    pub(crate) fn entry(self, index: usize) -> Entry<D> {
        Entry {
            key: self.key(index),
            end: self.ends().get(index).map_or(0, Key::value),
            slot: self.record(index),
        }
    }
}

impl<D> Leaf<'_, ByHva, D> {
    /// Where the first slot is that ends above `start`, which is less than `MOST`; there may be none, and then no key there, or one
    /// that is coming. No slot before it does.
    #[inline(always)]
    pub(crate) fn first_above(self, start: u64) -> usize {
        // The greatest end so far is greater from the first such slot on.
        match self.room() {
            LEAST_ROOM => upper_bound(self.up_to_of(LEAST_ROOM), start),
            _ => self.first_above_in_any(start),
        }
    }

    /// The same, for any room.
    #[inline(never)]
    fn first_above_in_any(self, start: u64) -> usize {
        const { assert!(ByHva::FLAT <= 4 * LEAST_ROOM) };
        match kind_of(self.room()) {
            0 => upper_bound(self.up_to_of(LEAST_ROOM), start),
            1 => upper_bound(self.up_to_of(2 * LEAST_ROOM), start),
            _ => upper_bound(self.up_to_of(4 * LEAST_ROOM), start),
        }
    }

    /// Whether the slot at `index` has a key up to `last`, and whether it ends above `start`; nothing where it has not, nor one behind
    /// it.
    #[inline(always)]
    pub(crate) fn overlaps(self, index: usize, start: u64, last: u64) -> Option<bool> {
        let key = self.keys().get(index)?.value();
        (key <= last).then(|| self.ends()[index].value() > start)
    }
}

/// Drops what a model tracks of a leaf; its memory can be used again.
///
/// # Safety
/// As for [`Leaf::at`], and nobody uses the leaf any more.
pub(crate) unsafe fn drop_leaf<O: Order, D>(node: *mut Head) {
    // SAFETY: written whole, and dropped once.
    unsafe {
        let room = (*node).room();
        if core::mem::needs_drop::<AtomicPtr<Slot<D>>>() {
            let words: *mut AtomicU64 = node.byte_add(Parts::<O, D>::KEYS).cast();
            let cells: *mut AtomicPtr<Slot<D>> = node.byte_add(Parts::<O, D>::cells(room)).cast();
            let tombstones: *mut AtomicU64 = node.byte_add(Parts::<O, D>::count(room)).cast();
            let count = Parts::<O, D>::words(room);
            ptr::drop_in_place(tombstones);
            ptr::drop_in_place(ptr::slice_from_raw_parts_mut(words, count));
            ptr::drop_in_place(ptr::slice_from_raw_parts_mut(cells, room));
        }
        ptr::drop_in_place(node);
    }
}
