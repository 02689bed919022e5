#![expect(
    unsafe_code,
    reason = "writes the arrays of a leaf, which are as long as its room"
)]
//! New leaves. They are built slot by slot, or by a copy with one slot added, removed or replaced.

use super::kind::{MOST, Order, Reach};
use super::leaf::{LEAST_ROOM, Leaf, LeafEntry, Parts};
use super::node::Head;
use crate::Slot;
use crate::sync::{AtomicPtr, copy_own};
use core::marker::PhantomData;
use core::ops::Range;
use core::ptr;

/// A new leaf that no reader sees yet.
pub(crate) struct NewLeaf<O: Order, D> {
    node: *mut Head,
    room: usize,
    len: usize,
    order: PhantomData<(O, *const Slot<D>)>,
}

impl<O: Order, D> NewLeaf<O, D> {
    /// A leaf without slots.
    ///
    /// # Safety
    /// `node` is memory for a leaf with `room`. Nobody else uses it.
    #[inline]
    pub(crate) unsafe fn new(node: *mut Head, room: usize) -> Self {
        Self {
            node,
            room,
            len: 0,
            order: PhantomData,
        }
    }

    #[inline(always)]
    fn part<T>(&self, offset: usize) -> *mut T {
        // SAFETY: `offset` is the offset of a part of the leaf.
        unsafe { self.node.byte_add(offset).cast() }
    }

    #[inline(always)]
    fn keys(&self) -> *mut u64 {
        self.part(Parts::<O, D>::KEYS)
    }

    #[inline(always)]
    fn ends(&self) -> *mut u64 {
        self.part(Parts::<O, D>::ends(self.room))
    }

    #[inline(always)]
    fn up_to(&self) -> *mut u64 {
        self.part(Parts::<O, D>::up_to(self.room))
    }

    #[inline(always)]
    fn cells(&self) -> *mut AtomicPtr<Slot<D>> {
        self.part(Parts::<O, D>::cells(self.room))
    }

    /// Writes a slot to place `at`.
    ///
    /// # Safety
    /// `at` is less than the room.
    #[inline]
    unsafe fn write(&mut self, at: usize, entry: &LeafEntry<D>) {
        // SAFETY: each part has `room` places.
        unsafe {
            self.keys().add(at).write(entry.key);
            if O::Reach::KEPT {
                self.ends().add(at).write(entry.end);
            }
            let cell = AtomicPtr::new(entry.slot.cast_mut());
            self.cells().add(at).write(cell);
        }
    }

    /// Adds a slot after the others.
    #[inline]
    pub(crate) fn push(&mut self, entry: &LeafEntry<D>) {
        assert!(self.len < self.room, "a leaf is full");
        // SAFETY: less than the room.
        unsafe { self.write(self.len, entry) };
        self.len += 1;
    }

    /// Adds the slots `range` of `from` after the others.
    pub(crate) fn append(&mut self, from: Leaf<'_, O, D>, range: Range<usize>) {
        let (at, count) = (self.len, range.len());
        assert!(count <= self.room - at && range.end <= from.len());
        // SAFETY: each part has `room` places, and the assertion keeps `at + count` within them.
        // `from` is another leaf.
        unsafe {
            let keys = from.keys().as_ptr().add(range.start);
            ptr::copy_nonoverlapping(keys, self.keys().add(at), count);
            if O::Reach::KEPT {
                let ends = from.ends().as_ptr().add(range.start);
                ptr::copy_nonoverlapping(ends, self.ends().add(at), count);
            }
            let cells = from.cells(from.room()).add(range.start);
            copy_own(cells, self.cells().add(at), count);
        }
        self.len += count;
    }

    /// Completes the leaf: born at `version` in place of `previous`. The caller publishes or frees
    /// it.
    pub(crate) fn done(mut self, version: u64, previous: *const Head) -> *const Head {
        for unused in self.len..self.room {
            // SAFETY: less than the room.
            unsafe { self.clear(unused) };
        }
        self.finish(0, version, previous)
    }

    /// Marks place `at` as unused.
    ///
    /// # Safety
    /// `at` is less than the room.
    #[inline]
    unsafe fn clear(&mut self, at: usize) {
        let unused = LeafEntry {
            key: MOST,
            end: 0,
            slot: ptr::null(),
        };
        // SAFETY: as the caller says. Each part has `room` places.
        unsafe {
            self.write(at, &unused);
            if O::Reach::KEPT {
                self.up_to().add(at).write(MOST);
            }
        }
    }

    /// Makes a copy of `from` with one more slot, at index `at`. There is room for it.
    #[inline]
    pub(crate) fn with(
        mut self,
        from: Leaf<'_, O, D>,
        at: usize,
        entry: &LeafEntry<D>,
        version: u64,
    ) -> *const Head {
        let len = from.len();
        assert!(len < from.room() && at <= len, "a leaf is full");
        self.copy(from);
        // SAFETY: all places below `len` are written, and there is one more place.
        unsafe {
            self.shift(at..len, at + 1);
            self.write(at, entry);
        }
        self.len = len + 1;
        self.finish(at, version, from.node())
    }

    /// Makes a copy of `from` without the slot at index `at`.
    #[inline]
    pub(crate) fn without(mut self, from: Leaf<'_, O, D>, at: usize, version: u64) -> *const Head {
        let len = from.len();
        assert!(at < len, "no such slot");
        self.copy(from);
        // SAFETY: all places below `len` are written.
        unsafe {
            self.shift(at + 1..len, at);
            self.clear(len - 1);
        }
        self.len = len - 1;
        self.finish(at, version, from.node())
    }

    /// Makes a copy of `from` with `entry` instead of the slot at index `at`. `rank` slots of
    /// `from` have keys below the key of `entry`.
    #[inline]
    pub(crate) fn with_other(
        mut self,
        from: Leaf<'_, O, D>,
        at: usize,
        rank: usize,
        entry: &LeafEntry<D>,
        version: u64,
    ) -> *const Head {
        let len = from.len();
        assert!(at < len && rank <= len, "no such slot");
        self.copy(from);
        let to = rank - usize::from(rank > at);
        // SAFETY: all places below `len` are written, and no index is above `len`.
        unsafe {
            if to > at {
                self.shift(at + 1..to + 1, at);
            } else {
                self.shift(to..at, to + 1);
            }
            self.write(to, entry);
        }
        self.len = len;
        self.finish(at.min(to), version, from.node())
    }

    /// Copies all of `from` except its head. `from` has the same room.
    #[inline]
    fn copy(&mut self, from: Leaf<'_, O, D>) {
        let room = self.room;
        assert_eq!(room, from.room(), "room for a copy");
        // Copies of constant size are faster. SAFETY: both leaves have this room.
        unsafe {
            match room {
                _ if room == O::LEAF => self.copy_parts(from, O::LEAF),
                LEAST_ROOM => self.copy_parts(from, LEAST_ROOM),
                _ => self.copy_parts(from, room),
            }
        }
    }

    /// # Safety
    /// `room` is the room of both leaves.
    #[inline(always)]
    unsafe fn copy_parts(&mut self, from: Leaf<'_, O, D>, room: usize) {
        let start = Parts::<O, D>::KEYS;
        // Under loom each cell is an object, so the cells are copied one by one.
        let end = if cfg!(loom) {
            Parts::<O, D>::cells(room)
        } else {
            Parts::<O, D>::layout(room).size()
        };
        // SAFETY: all parts follow the keys, the cells last. Only the writer stores to them, and
        // the caller is the writer.
        unsafe {
            let source = from.node().byte_add(start).cast::<u8>();
            ptr::copy_nonoverlapping(source, self.part::<u8>(start), end - start);
            if cfg!(loom) {
                copy_own(from.cells(room), self.cells(), room);
            }
        }
    }

    /// Moves the slots in `from` to the places from `to` on.
    ///
    /// # Safety
    /// There is room for them there.
    #[inline]
    unsafe fn shift(&mut self, from: Range<usize>, to: usize) {
        let count = from.len();
        if count == 0 {
            return;
        }
        let (keys, ends, cells) = (self.keys(), self.ends(), self.cells());
        // SAFETY: each part has `room` places.
        unsafe {
            ptr::copy(keys.add(from.start), keys.add(to), count);
            if O::Reach::KEPT {
                ptr::copy(ends.add(from.start), ends.add(to), count);
            }
            copy_own(cells.add(from.start), cells.add(to), count);
        }
    }

    /// Writes the head, and the greatest ends from index `changed` on.
    #[inline]
    fn finish(self, changed: usize, version: u64, previous: *const Head) -> *const Head {
        // SAFETY: each part has `room` places. All places below `len` are written, and the greatest
        // ends below `changed`.
        unsafe {
            let head = Head::leaf(version, previous, self.len, self.room);
            self.node.write(head);
            if O::Reach::KEPT {
                let (ends, up_to) = (self.ends(), self.up_to());
                let before = changed.checked_sub(1);
                let mut highest = before.map_or(0, |i| *up_to.add(i));
                for i in changed..self.len {
                    highest = highest.max(*ends.add(i));
                    up_to.add(i).write(highest);
                }
            }
        }
        self.node
    }
}
