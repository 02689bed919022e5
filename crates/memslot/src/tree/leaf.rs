#![expect(
    unsafe_code,
    reason = "the arrays of a leaf are as long as its head says"
)]
//! Leaves, which hold the slots of a range of keys.
//!
//! A leaf begins with its [`Head`]. Arrays follow, each with a place for every slot that the leaf
//! has room for. First come the keys. If the order keeps ends, the end of each slot and the
//! greatest end so far follow. The cells of slots come last. Below inner nodes all leaves have the
//! room [`Order::LEAF`]. A leaf that is the whole tree has as much as it needs, up to
//! [`Order::FLAT`]. Searching one array is faster than going down a level.
//!
//! After the leaf was published, only its cells change: a new record replaces the record with the
//! same key and end. Like a node, the new record has a pointer to the old one and its own version
//! ([`Slot`]). A slot that comes, goes or moves needs a new leaf.

use super::kind::{ByHva, Order, Reach};
use super::node::{Head, upper_bound};
use crate::Slot;
use crate::sync::{AtomicPtr, Ordering, prefetch};
use core::alloc::Layout;
use core::marker::PhantomData;
use core::{ptr, slice};

/// The least room of a leaf. All other rooms are a power of two times this.
pub(crate) const LEAST_ROOM: usize = if cfg!(loom) { 4 } else { 16 };
/// The alignment of leaves.
const ALIGN: usize = 16;
/// The size of a cache line.
const LINE: usize = 64;
/// The number of different rooms.
pub(crate) const ROOMS: usize = 4;

/// The smallest room for `len` slots.
pub(crate) fn room_for(len: usize) -> usize {
    len.next_power_of_two().max(LEAST_ROOM)
}

/// The index of this room among all rooms.
pub(crate) const fn kind_of(room: usize) -> usize {
    (room / LEAST_ROOM).trailing_zeros() as usize
}

/// One slot of a leaf.
pub(crate) struct LeafEntry<D> {
    pub(crate) key: u64,
    /// The end of the slot, if the order keeps ends.
    pub(crate) end: u64,
    pub(crate) slot: *const Slot<D>,
}

// Not derived: a derived impl would need `D: Copy`.
impl<D> Clone for LeafEntry<D> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}
impl<D> Copy for LeafEntry<D> {}

impl<D> LeafEntry<D> {
    /// The entry of `slot` in a tree of this order.
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

/// The offsets of the parts of a leaf, in bytes from its beginning.
pub(super) struct Parts<O, D>(PhantomData<(O, fn() -> D)>);

impl<O: Order, D> Parts<O, D> {
    pub(super) const KEYS: usize = size_of::<Head>().next_multiple_of(32);
    const EACH_END: usize = if O::Reach::KEPT { size_of::<u64>() } else { 0 };

    pub(super) const fn ends(room: usize) -> usize {
        Self::KEYS + room * size_of::<u64>()
    }

    pub(super) const fn up_to(room: usize) -> usize {
        Self::ends(room) + room * Self::EACH_END
    }

    pub(super) const fn cells(room: usize) -> usize {
        Self::up_to(room) + room * Self::EACH_END
    }

    const fn size(room: usize) -> usize {
        Self::cells(room) + room * size_of::<AtomicPtr<Slot<D>>>()
    }

    pub(super) const fn layout(room: usize) -> Layout {
        match Layout::from_size_align(Self::size(room), ALIGN) {
            Ok(layout) => layout,
            Err(_) => panic!("a leaf is small"),
        }
    }
}

/// The memory of a leaf with `room`.
pub(crate) const fn layout_of<O: Order, D>(room: usize) -> Layout {
    Parts::<O, D>::layout(room)
}

/// A leaf that is or was in a tree.
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
    /// `node` is a leaf of this order and data, and is the pointer with which it was allocated. The
    /// leaf is not freed during `'g`.
    #[inline(always)]
    pub(crate) const unsafe fn at(node: *const Head) -> Self {
        Self {
            node,
            order: PhantomData,
        }
    }

    /// The pointer with which the leaf was allocated.
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
    unsafe fn array(self, offset: usize, count: usize) -> &'g [u64] {
        // SAFETY: as the caller says. The leaf lives during `'g` and is one allocation.
        unsafe { slice::from_raw_parts(self.node.byte_add(offset).cast(), count) }
    }

    #[inline(always)]
    fn keys_of(self, room: usize) -> &'g [u64] {
        debug_assert_eq!(room, self.room());
        // SAFETY: all keys were written before the leaf was published.
        unsafe { self.array(Parts::<O, D>::KEYS, room) }
    }

    /// The keys, ascending. Keys of unused places are `MOST`.
    #[inline]
    pub(super) fn keys(self) -> &'g [u64] {
        self.keys_of(self.room())
    }

    /// The key of a slot, or `MOST` in an unused place.
    #[inline]
    pub(crate) fn key(self, index: usize) -> u64 {
        self.keys()[index]
    }

    /// The end of each slot. Empty if the order keeps no ends.
    #[inline]
    pub(super) fn ends(self) -> &'g [u64] {
        let room = if O::Reach::KEPT { self.room() } else { 0 };
        // SAFETY: as above.
        unsafe { self.array(Parts::<O, D>::ends(self.room()), room) }
    }

    /// The greatest end up to and including each slot, and `MOST` in unused places. Empty if the
    /// order keeps no ends.
    #[inline]
    fn up_to(self) -> &'g [u64] {
        self.up_to_of(self.room())
    }

    #[inline(always)]
    fn up_to_of(self, room: usize) -> &'g [u64] {
        debug_assert_eq!(room, self.room());
        let count = if O::Reach::KEPT { room } else { 0 };
        // SAFETY: as above.
        unsafe { self.array(Parts::<O, D>::up_to(room), count) }
    }

    /// The greatest end of all slots, if the order keeps ends.
    pub(crate) fn reach(self) -> u64 {
        match self.len().checked_sub(1) {
            Some(last) if O::Reach::KEPT => self.up_to()[last],
            _ => 0,
        }
    }

    #[inline(always)]
    pub(super) fn cells(self, room: usize) -> *const AtomicPtr<Slot<D>> {
        // SAFETY: the offset is that of a part of the leaf.
        unsafe { self.node.byte_add(Parts::<O, D>::cells(room)).cast() }
    }

    #[inline(always)]
    fn cell(self, room: usize, index: usize) -> &'g AtomicPtr<Slot<D>> {
        debug_assert!(room == self.room() && index < room);
        // SAFETY: as above. A cell changes only through its atomic.
        unsafe { &*self.cells(room).add(index) }
    }

    /// The newest record of a slot. `Acquire`: the contents of the record were written before.
    #[inline(always)]
    pub(crate) fn record(self, index: usize) -> *const Slot<D> {
        self.cell(self.room(), index).load(Ordering::Acquire)
    }

    /// The number of keys that are at most `key`.
    #[inline(always)]
    pub(crate) fn rank(self, key: u64) -> usize {
        // Constant rooms let the compiler unroll. They cover most leaves: those of large trees, and
        // the smallest.
        match self.room() {
            room if room == O::LEAF => upper_bound(self.keys_of(O::LEAF), key),
            LEAST_ROOM => upper_bound(self.keys_of(LEAST_ROOM), key),
            _ => self.rank_of_any(key),
        }
    }

    /// The same for any room. Not inlined, because it is large.
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

    /// The [`record`](Self::record) of the slot with the greatest key that is at most `key`. It is
    /// for leaves below inner nodes: their room is known, so this does not read the head.
    #[inline(always)]
    pub(crate) fn usual_floor(self, key: u64) -> Option<*const Slot<D>> {
        // Cells and keys lie in different cache lines. Load both at the same time.
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
        for offset in (offset..Parts::<O, D>::size(O::LEAF)).step_by(LINE) {
            prefetch(self.node.wrapping_byte_add(offset));
        }
    }

    /// Publishes `slot` in place of the record at `index`, which has the same key and end. Writer
    /// only.
    pub(crate) fn patch(self, index: usize, slot: *const Slot<D>) {
        self.cell(self.room(), index)
            .store(slot.cast_mut(), Ordering::Release);
    }

    /// The index of the slot with this key.
    #[inline]
    pub(crate) fn index_of(self, key: u64) -> Option<usize> {
        self.index_at(self.rank(key), key)
    }

    /// The same for callers that know the rank of the key.
    #[inline]
    pub(crate) fn index_at(self, rank: usize, key: u64) -> Option<usize> {
        let index = rank.checked_sub(1)?;
        (self.key(index) == key).then_some(index)
    }

    /// The slot at `index`. Writer only.
    pub(crate) fn entry(self, index: usize) -> LeafEntry<D> {
        LeafEntry {
            key: self.key(index),
            end: self.ends().get(index).copied().unwrap_or(0),
            slot: self.record(index),
        }
    }
}

impl<D> Leaf<'_, ByHva, D> {
    /// The index of the first slot that ends above `start`, where `start` is less than `MOST`. If
    /// there is no such slot, the place at the index has no key.
    #[inline(always)]
    pub(crate) fn first_above(self, start: u64) -> usize {
        // From that slot on, the greatest end so far is above `start`.
        match self.room() {
            LEAST_ROOM => upper_bound(self.up_to_of(LEAST_ROOM), start),
            _ => self.first_above_in_any(start),
        }
    }

    /// The same for any room.
    #[inline(never)]
    fn first_above_in_any(self, start: u64) -> usize {
        const { assert!(ByHva::FLAT <= 4 * LEAST_ROOM) };
        match kind_of(self.room()) {
            0 => upper_bound(self.up_to_of(LEAST_ROOM), start),
            1 => upper_bound(self.up_to_of(2 * LEAST_ROOM), start),
            _ => upper_bound(self.up_to_of(4 * LEAST_ROOM), start),
        }
    }

    /// Whether the slot at `index` ends above `start`. `None` if its key is above `last`: then so
    /// are all keys after it.
    #[inline(always)]
    pub(crate) fn overlaps(self, index: usize, start: u64, last: u64) -> Option<bool> {
        let key = *self.keys().get(index)?;
        (key <= last).then(|| self.ends()[index] > start)
    }
}

/// Drops the objects that loom tracks in a leaf, so that its memory can be reused.
///
/// # Safety
/// As for [`Leaf::at`]. Nobody uses the leaf any more.
pub(crate) unsafe fn drop_leaf<O: Order, D>(node: *mut Head) {
    // SAFETY: all parts were written, and each is dropped once.
    unsafe {
        let room = (*node).room();
        if core::mem::needs_drop::<AtomicPtr<Slot<D>>>() {
            let cells: *mut AtomicPtr<Slot<D>> = node.byte_add(Parts::<O, D>::cells(room)).cast();
            ptr::drop_in_place(ptr::slice_from_raw_parts_mut(cells, room));
        }
        ptr::drop_in_place(node);
    }
}
