#![expect(
    unsafe_code,
    reason = "tombstones are shared by pointer, as the records are in whose cells they stand"
)]
//! Tombstones: what stands in a leaf where a slot has gone.
//!
//! A slot that goes seldom takes its place with it: a tombstone is stored over it, and nothing is copied. When the same slot comes
//! again (a device's window, a slot that moves to and fro) it is stored over the tombstone. A leaf
//! that is full, or would hold more tombstones than slots, is copied without them. So is one in which a slot comes whose frames
//! hold those of a tombstone of the same leaf: look-ups of frames go from the right to the left until they find a slot, and what lies in a
//! slot would be looked at each time. (The last slot of a leaf may hold those of the first tombstones of the next. So leaves that become
//! one leave theirs behind.)
//!
//! A tombstone is one more thing in the chain of what was in a place ([`Slot`]): it is born in the version in which the slot
//! went, and knows its record. A slot that is stored over a tombstone knows it as its predecessor, so that readers of older versions
//! come past it. A record has one predecessor for all three trees. So:
//!
//! - One deletion makes one tombstone for all three, and only a slot that knows it is stored over it.
//! - A slot that moves has its old record as predecessor, by id and by host address. By frame it leaves a
//!   tombstone at its old place, and may be stored over another at its new. Then its predecessor is the one it leaves, which
//!   tells both ways on: the old record, and what was [before](Tombstone::before) it at the new place.
//!
//! It is retired when it is in no leaf of the newest trees any more; if it never was in one, it is freed at once. Who comes to it by a slot that was stored over it, or from
//! a slot that moved, looks at a version before that slot's, and has its guard since then: so it is not freed before.

use crate::Slot;
use crate::sync::{Alive, AtomicU8, Ordering};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr;

/// In a pointer to what is in a place: that is no slot.
const TAG: usize = 1;
/// How many are kept for the next deletions.
const KEPT: usize = 64;

pub(crate) struct Tombstone<D> {
    /// The version in which the slot went.
    pub(super) born: u64,
    /// The record that was here.
    pub(super) was: *const Slot<D>,
    /// Of a slot that moved: the tombstone over which it was stored at its new place by frame, or null.
    pub(super) before: *const Slot<D>,
    /// The first frame of the slot.
    start: u64,
    /// Whether the slot moved; else it was deleted.
    pub(super) moved: bool,
    /// In how many trees it stands. The writer's.
    places: AtomicU8,
    pub(super) alive: Alive,
}

/// What is in a place of a leaf, or was before something else.
pub(crate) enum Held<D> {
    Nothing,
    Slot(*const Slot<D>),
    Tombstone(*const Tombstone<D>),
}

/// What a place of a leaf holds that is not used, or not yet. Tagged like a tombstone, so that readers ask one question.
#[inline]
pub(crate) const fn nothing<D>() -> *const Slot<D> {
    ptr::without_provenance(TAG)
}

/// Whether a place of a leaf holds a slot.
#[inline(always)]
pub(crate) fn is_slot<D>(held: *const Slot<D>) -> bool {
    held.addr() & TAG == 0
}

#[inline]
pub(crate) fn tombstone<D>(held: *const Slot<D>) -> Option<*const Tombstone<D>> {
    let tombstone: *const Tombstone<D> = held.map_addr(|address| address & !TAG).cast();
    (!is_slot(held) && !tombstone.is_null()).then_some(tombstone)
}

/// As a place holds it.
#[inline]
pub(crate) fn held<D>(tombstone: *const Tombstone<D>) -> *const Slot<D> {
    const { assert!(align_of::<Slot<D>>() > TAG && align_of::<Tombstone<D>>() > TAG) };
    tombstone
        .cast::<Slot<D>>()
        .map_addr(|address| address | TAG)
}

impl<D> Held<D> {
    #[inline]
    pub(super) fn of(held: *const Slot<D>) -> Self {
        match tombstone(held) {
            Some(tombstone) => Self::Tombstone(tombstone),
            None if held.is_null() || !is_slot(held) => Self::Nothing,
            None => Self::Slot(held),
        }
    }
}

impl<D> Tombstone<D> {
    /// Of a slot that was deleted in `version`.
    pub(crate) fn deleted(version: u64, slot: &Slot<D>, was: *const Slot<D>) -> Self {
        Self {
            born: version,
            was,
            before: ptr::null(),
            start: slot.range.start().0,
            moved: false,
            places: AtomicU8::new(0),
            alive: Alive::new(),
        }
    }

    /// Of one that moved.
    pub(crate) fn moved(version: u64, slot: &Slot<D>, was: *const Slot<D>) -> Self {
        Self {
            moved: true,
            ..Self::deleted(version, slot, was)
        }
    }

    /// The first frame of the slot that went.
    pub(crate) const fn start(&self) -> u64 {
        self.start
    }

    /// The writer's: in one place more.
    #[inline]
    pub(super) fn put(&self) {
        let places = self.places.load(Ordering::Relaxed);
        self.places.store(places + 1, Ordering::Relaxed);
    }

    /// The writer's: in one place less; whether it was the last.
    #[inline]
    pub(crate) fn take(&self) -> bool {
        let places = self.places.load(Ordering::Relaxed) - 1;
        self.places.store(places, Ordering::Relaxed);
        places == 0
    }

    /// The writer's: whether it is in no place.
    pub(crate) fn is_nowhere(&self) -> bool {
        self.places.load(Ordering::Relaxed) == 0
    }
}

/// Where tombstones come from and go to.
pub(crate) struct Tombstones<D> {
    kept: Vec<*mut Tombstone<D>>,
    bytes: usize,
}

impl<D> Tombstones<D> {
    pub(crate) const fn new() -> Self {
        Self {
            kept: Vec::new(),
            bytes: 0,
        }
    }

    /// What those occupy that were made here, those that wait for reuse included.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    #[inline]
    pub(crate) fn make(&mut self, tombstone: Tombstone<D>) -> *mut Tombstone<D> {
        if let Some(kept) = self.kept.pop() {
            // SAFETY: memory of one, which nobody uses.
            unsafe { kept.write(tombstone) };
            return kept;
        }
        self.bytes += size_of::<Tombstone<D>>();
        Box::into_raw(Box::new(tombstone))
    }

    /// Takes one back.
    ///
    /// # Safety
    /// It was made here, nobody can reach it any more, and it is freed once.
    pub(crate) unsafe fn free(&mut self, tombstone: *const Tombstone<D>) {
        let tombstone = tombstone.cast_mut();
        // SAFETY: as the caller says, alive until now. Dropping it does nothing but what a model tracks.
        unsafe {
            (*tombstone).alive.freed();
            if self.kept.len() < KEPT {
                ptr::drop_in_place(tombstone);
                self.kept.push(tombstone);
            } else {
                self.bytes -= size_of::<Tombstone<D>>();
                drop(Box::from_raw(tombstone));
            }
        }
    }
}

impl<D> Drop for Tombstones<D> {
    fn drop(&mut self) {
        for &kept in &self.kept {
            // SAFETY: made by `make` out of a box of this layout; its content was dropped.
            drop(unsafe { Box::from_raw(kept.cast::<core::mem::MaybeUninit<Tombstone<D>>>()) });
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::leaf::Leaf;
    use super::super::node::{Cell, Node};
    use super::super::{ByGfn, ByHva, ById, Order, Tree};
    use super::*;
    use crate::{Limits, Request, SlotWriter};
    use alloc::collections::BTreeMap;
    use pageferry_addr::{Gfn, Hva, PAGE_SIZE};

    type Places = BTreeMap<*const Tombstone<()>, u8>;

    fn look_at<O: Order>(leaf: Leaf<'_, O, ()>, alone: bool, places: &mut Places) {
        let (mut slots, mut tombstones, mut end) = (0, 0, 0);
        for index in 0..leaf.len() {
            let held = leaf.record(index);
            let Some(tombstone) = tombstone(held) else {
                // SAFETY: in a tree, and nothing changes.
                end = O::own_keys(unsafe { &*held });
                slots += 1;
                continue;
            };
            assert!(leaf.key(index) >= end || !O::BY_FRAME, "inside a slot");
            *places.entry(tombstone).or_default() += 1;
            tombstones += 1;
        }
        assert_eq!(tombstones, leaf.tombstones());
        assert!(slots > 0 && tombstones <= slots && (alone || slots >= O::LEAF / 4));
    }

    /// The last of a level may have less.
    fn look_below<O: Order>(cell: &Cell, alone: bool, places: &mut Places) {
        let node = cell.newest();
        // SAFETY: in a tree, and nothing changes.
        match unsafe { Node::<O, ()>::at(node) } {
            Node::Empty => assert!(alone),
            Node::Leaf(leaf) => look_at(leaf, alone, places),
            Node::Inner(inner) => {
                let children = inner.head.len();
                for (index, cell) in inner.cells[..children].iter().enumerate() {
                    look_below::<O>(cell, alone && index + 1 == children, places);
                }
            }
        }
    }

    fn look_at_tree<O: Order>(tree: &Tree<O, ()>, places: &mut Places) {
        look_below::<O>(&tree.root, true, places);
    }

    /// How many tombstones there are, all of which must be where they may.
    fn look(writer: &SlotWriter<()>) -> usize {
        let table = writer.table();
        let (space, mut places) = (&table.shared.spaces[0], Places::new());
        look_at_tree::<ByGfn>(&space.by_gfn, &mut places);
        look_at_tree::<ById>(&space.by_id, &mut places);
        look_at_tree::<ByHva>(&space.by_hva, &mut places);
        for (&tombstone, &count) in &places {
            // SAFETY: in a tree, and nothing changes.
            let said = unsafe { &*tombstone }.places.load(Ordering::Relaxed);
            assert_eq!(said, count);
        }
        places.len()
    }

    fn request(id: u16, at: u64, pages: u64) -> Request<()> {
        Request {
            gpa: Gfn(at).gpa(),
            size: pages * PAGE_SIZE,
            hva: Hva((u64::from(id) * 25_717 % 65_536) * PAGE_SIZE),
            ..Request::delete(0, id)
        }
    }

    #[test]
    fn tombstones_are_fewer_than_slots_and_apart_from_them() {
        for slots in [4, 12, 60, 700_u16] {
            let mut writer = SlotWriter::new(Limits::default());
            let home = |id: u16| u64::from(id) * 8;
            for id in 0..slots {
                writer.set(request(id, home(id), 2)).expect("a free place");
            }
            assert_eq!(look(&writer), 0);
            let (mut random, mut most) = (1_u64, 0);
            let mut below = |end: u64| {
                random = random.wrapping_mul(6_364_136_223_846_793_005) + 1;
                (random >> 33) % end
            };
            for step in 0..4000 {
                let id = below(u64::from(slots)) as u16;
                // Refusals are as good: something is there already.
                let _ = match below(6) {
                    0 | 1 => writer.set(Request::delete(0, id)),
                    2 => writer.set(request(id, home(id) + 4, 2)),
                    // Over the homes of others.
                    3 => writer.set(request(id, home(id), 2 + below(3) * 15)),
                    _ => writer.set(request(id, home(id), 2)),
                };
                if step % 4 == 0 {
                    most = most.max(look(&writer));
                }
            }
            assert!(most >= usize::from(slots / 8), "{slots}: at most {most}");
            for id in 0..slots {
                let _ = writer.set(Request::delete(0, id));
                look(&writer);
                // Some come again while the tree becomes lower, over what was in the next leaf.
                let id = (u64::from(id) * 7 % u64::from(slots)) as u16;
                let again = request(id, home(id) + 4, 2 + below(3) * 15);
                if writer.set(again).is_ok() {
                    look(&writer);
                    writer.set(Request::delete(0, id)).expect("it");
                }
            }
            look(&writer);
            for id in 0..slots {
                let _ = writer.set(Request::delete(0, id));
            }
            assert_eq!(look(&writer), 0);
        }
    }

    /// A slot that is the last of its leaf lies over a tombstone, which is the first of the next; then all become one leaf.
    #[test]
    fn leaves_that_become_one_leave_their_tombstones_behind() {
        let mut writer = SlotWriter::new(Limits::default());
        let home = |id: u16| u64::from(id) * 8;
        for id in 0..129 {
            writer.set(request(id, home(id), 2)).expect("free");
        }
        for first in [0, 33, 65, 97] {
            for id in first..first + 17 {
                writer.set(Request::delete(0, id)).expect("it");
            }
        }
        writer.set(Request::delete(0, 32)).expect("it");
        let across = request(0, home(32) - 4, 8);
        writer.set(across).expect("free");
        assert!(look(&writer) > 0);
        // The last leaf goes, and the rest fits into one.
        writer.set(Request::delete(0, 128)).expect("it");
        look(&writer);
        let there = writer.view().lookup(Gfn(home(32) + 2));
        assert_eq!(there.map(|slot| slot.range.start()), Some(across.gpa.gfn()));
    }

    #[test]
    fn what_comes_again_copies_nothing() {
        let mut writer = SlotWriter::new(Limits::default());
        for id in 0..2000 {
            writer.set(request(id, u64::from(id) * 8, 2)).expect("free");
        }
        writer.reclaim();
        let before = writer.metadata_bytes();
        for id in (0..2000).step_by(50) {
            let (home, away) = (u64::from(id) * 8, u64::from(id) * 8 + 4);
            writer.set(Request::delete(0, id)).expect("it");
            writer.set(request(id, home, 2)).expect("free");
            assert_eq!(writer.reclaim(), 0);
            // Once there and back, so that both places are in the leaf.
            writer.set(request(id, away, 2)).expect("free");
            writer.set(request(id, home, 2)).expect("free");
            assert_eq!(writer.reclaim(), 0);
            let waiting = |writer: &mut SlotWriter<()>, request| {
                writer.set(request).expect("allowed");
                let waiting = writer.retired();
                writer.reclaim();
                waiting
            };
            // A record; then the tombstone; a record and a tombstone.
            assert_eq!(waiting(&mut writer, Request::delete(0, id)), 1);
            assert_eq!(waiting(&mut writer, request(id, home, 2)), 1);
            assert_eq!(waiting(&mut writer, request(id, away, 2)), 2);
            assert_eq!(waiting(&mut writer, request(id, home, 2)), 2);
        }
        let after = writer.metadata_bytes();
        assert!(after < before + 64 * 1024, "{before} to {after}");
    }
}
