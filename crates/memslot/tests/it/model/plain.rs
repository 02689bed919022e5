//! The plain model of a table of slots: a map by id, a map by first frame, and scans.

use pageferry_addr::{Gfn, GfnRange, Hva};
use pageferry_memslot::{Change, Limits, Request, Slot, SlotGuard, SlotView};
use std::collections::BTreeMap;

/// The contents of a slot, without types of the crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plain {
    pub(crate) space: u16,
    pub(crate) id: u16,
    pub(crate) start: u64,
    pub(crate) pages: u64,
    pub(crate) hva: u64,
    pub(crate) flags: u32,
    pub(crate) bitmap: Option<u64>,
    pub(crate) data: u32,
}

impl Plain {
    pub(crate) fn of(slot: &Slot<u32>) -> Self {
        Self {
            space: slot.address_space,
            id: slot.id,
            start: slot.range.start().0,
            pages: slot.range.pages(),
            hva: slot.hva.0,
            flags: slot.flags.0,
            bitmap: slot.userfault_bitmap().map(|bitmap| bitmap.0),
            data: slot.data,
        }
    }

    pub(crate) fn end(&self) -> u64 {
        self.start + self.pages
    }

    fn holds(&self, gfn: u64) -> bool {
        self.start <= gfn && gfn < self.end()
    }

    /// Whether the slot shares a byte with `start..end`.
    fn backed_in(&self, start: u64, end: u64) -> bool {
        start.max(self.hva) < end.min(self.hva + self.pages * 4096)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Nothing,
    Created,
    Deleted,
    Moved,
    Flags,
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    limits: Limits,
    /// The slots by address space and id.
    slots: BTreeMap<(u16, u16), Plain>,
    /// The same slots by address space and first frame.
    starts: BTreeMap<(u16, u64), Plain>,
    generation: u64,
}

impl Model {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            slots: BTreeMap::new(),
            starts: BTreeMap::new(),
            generation: 0,
        }
    }

    pub(crate) fn slots(&self) -> impl ExactSizeIterator<Item = &Plain> {
        self.slots.values()
    }

    pub(crate) fn get(&self, space: u16, id: u16) -> Option<&Plain> {
        self.slots.get(&(space, id))
    }

    /// Records an aborted operation: nothing changes but the generation.
    pub(crate) fn give_up(&mut self) {
        self.generation += 1;
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    pub(crate) fn pages(&self) -> u64 {
        self.slots().map(|slot| slot.pages).sum()
    }

    /// The slots of `space`, ascending by frame.
    fn by_frame(&self, space: u16) -> impl DoubleEndedIterator<Item = &Plain> {
        let slots = self.starts.range((space, 0)..=(space, u64::MAX));
        slots.map(|(_, slot)| slot)
    }

    fn or_below(&self, space: u16, gfn: u64) -> Option<&Plain> {
        let (_, slot) = self.starts.range((space, 0)..=(space, gfn)).next_back()?;
        Some(slot)
    }

    fn at(&self, space: u16, gfn: u64) -> Option<&Plain> {
        self.or_below(space, gfn).filter(|slot| slot.holds(gfn))
    }

    /// Ascending by host address, then id.
    fn in_hva(&self, space: u16, start: u64, end: u64) -> Vec<Plain> {
        let slots = self.slots.range((space, 0)..=(space, u16::MAX));
        let mut found: Vec<_> = slots
            .map(|(_, slot)| *slot)
            .filter(|slot| slot.backed_in(start, end))
            .collect();
        found.sort_by_key(|slot| (slot.hva, slot.id));
        found
    }

    fn in_frames(&self, space: u16, start: u64, pages: u64) -> Vec<Plain> {
        let end = start + pages;
        let meets = |slot: &&Plain| start.max(slot.start) < end.min(slot.end());
        // Slots do not overlap, so only the last one that starts below `start` may pass it.
        let first = self.or_below(space, start).map_or(0, |slot| slot.start);
        let slots = self.starts.range((space, first)..(space, end.max(first)));
        slots.map(|(_, slot)| slot).filter(meets).copied().collect()
    }

    /// The effect of `request`, or `None` if it must be refused.
    pub(crate) fn plan(&self, request: &Request<u32>) -> Option<Kind> {
        let flags = request.flags.0;
        let (memfd, userfault) = (flags & 4 != 0, flags & 8 != 0);
        let (gpa, size, hva) = (request.gpa.0, request.size, request.hva.0);
        let known = flags < 16 && !(memfd && flags & 3 != 0);
        let aligned = gpa % 4096 == 0 && size % 4096 == 0 && hva % 4096 == 0;
        let exists = request.address_space < self.limits.address_spaces
            && request.id < self.limits.max_slots;
        let end = u128::from(hva) + u128::from(size);
        let (half, last) = (1 << 59, end.max(u128::from(hva) + 1) - 1);
        let canonical = last < half || u128::from(hva) >= (1 << 64) - half;
        if !(known && aligned && exists && end < 1 << 64 && canonical) {
            return None;
        }
        let key = (request.address_space, request.id);
        let old = self.slots.get(&key);
        if size == 0 {
            return old.map(|_| Kind::Deleted);
        }
        let (start, pages) = (gpa / 4096, size / 4096);
        if userfault {
            let words = pages.div_ceil(64);
            let bitmap = request.userfault_bitmap?.0;
            if bitmap % 8 != 0 || u128::from(bitmap) + 8 * u128::from(words) >= 1 << 64 {
                return None;
            }
        }
        if start + pages > self.limits.gfn_limit.0 || pages > self.limits.max_slot_pages {
            return None;
        }
        let kind = match old {
            None => Kind::Created,
            Some(old) => {
                let moved = old.start != start;
                let other_bitmap = userfault
                    && old.flags & 8 != 0
                    && old.bitmap != request.userfault_bitmap.map(|bitmap| bitmap.0);
                let kept = old.pages == pages
                    && old.hva == hva
                    && (old.flags ^ flags) & 6 == 0
                    && !(memfd && moved)
                    && !other_bitmap;
                match (kept, moved, old.flags != flags) {
                    (false, _, _) => return None,
                    (_, true, _) => Kind::Moved,
                    (_, _, true) => Kind::Flags,
                    _ => Kind::Nothing,
                }
            }
        };
        // Slots do not overlap, so of the other slots that start below the end the last one ends
        // last.
        let below = self.starts.range((key.0, 0)..(key.0, start + pages)).rev();
        let taken = below
            .map(|(_, slot)| slot)
            .find(|slot| slot.id != key.1)
            .is_some_and(|slot| slot.end() > start);
        (!taken).then_some(kind)
    }

    /// The slot that `request` asks for.
    pub(crate) fn asked(request: &Request<u32>) -> Plain {
        let flags = request.flags.0;
        let bitmap = request.userfault_bitmap.filter(|_| flags & 8 != 0);
        Plain {
            space: request.address_space,
            id: request.id,
            start: request.gpa.0 / 4096,
            pages: request.size / 4096,
            hva: request.hva.0,
            flags,
            bitmap: bitmap.map(|bitmap| bitmap.0),
            data: request.data,
        }
    }

    /// Applies the effect that `plan` returned.
    pub(crate) fn apply(&mut self, request: &Request<u32>, kind: Kind) {
        if kind == Kind::Nothing {
            return;
        }
        self.generation += 1;
        let key = (request.address_space, request.id);
        if let Some(old) = self.slots.remove(&key) {
            self.starts.remove(&(old.space, old.start));
        }
        if kind != Kind::Deleted {
            let new = Self::asked(request);
            self.slots.insert(key, new);
            self.starts.insert((new.space, new.start), new);
        }
    }
}

/// Asserts that `change` is the change from `old` to the slot that `request` asks for.
pub(crate) fn assert_change(
    change: Change<'_, u32>,
    kind: Kind,
    old: Option<Plain>,
    request: &Request<u32>,
) {
    let asked = Model::asked(request);
    let (is, from, to) = match change {
        Change::Nothing => (Kind::Nothing, old, Some(asked)),
        Change::Created { new } => (Kind::Created, None, Some(Plain::of(new))),
        Change::Deleted { old } => (Kind::Deleted, Some(Plain::of(old)), Some(asked)),
        Change::Moved { old, new } => (Kind::Moved, Some(Plain::of(old)), Some(Plain::of(new))),
        Change::FlagsChanged { old, new } => {
            (Kind::Flags, Some(Plain::of(old)), Some(Plain::of(new)))
        }
    };
    assert_eq!(is, kind, "{request:?}");
    assert_eq!((from, to), (old, Some(asked)), "{request:?}");
    if let Change::Deleted { old } | Change::Moved { old, .. } = change {
        assert!(old.is_invalid());
    }
}

fn plain<'a>(slots: impl Iterator<Item = &'a Slot<u32>>) -> Vec<Plain> {
    slots.map(Plain::of).collect()
}

/// Compares every look-up at each frame and page below the bounds, and at each id.
pub(crate) fn compare_all(view: SlotView<'_, u32>, model: &Model, frames: u64, host_pages: u64) {
    let limits = &model.limits;
    assert_eq!(view.generation().number(), model.generation);
    assert!(view.space(limits.address_spaces).is_none());
    for space in 0..limits.address_spaces {
        let view = view.space(space).expect("the address space exists");
        let all: Vec<_> = model.by_frame(space).copied().collect();
        assert_eq!(plain(view.iter()), all);
        assert_eq!(view.is_empty(), all.is_empty());
        for id in 0..=limits.max_slots {
            assert_eq!(
                view.by_id(id).map(Plain::of).as_ref(),
                model.get(space, id),
                "id {id}"
            );
        }
        for gfn in (0..frames + 4).chain([Gfn::MAX.0, Gfn::MAX.0 + 1, u64::MAX]) {
            compare_frame(view, model, space, gfn);
        }
        for gfn in (0..frames + 4).step_by(3) {
            for pages in [0, 1, 2, 17] {
                compare_frames(view, model, space, gfn, pages);
            }
        }
        compare_frames(view, model, space, 0, Gfn::MAX.0 + 1);
        for page in 0..host_pages + 4 {
            // Ends inside pages, and an empty range.
            for (low, high) in [
                (0, 0),
                (0x800, 0x800),
                (0, 1),
                (0xfff, 0x1001),
                (0x800, 0x5800),
            ] {
                let base = page * 4096;
                compare_hva(view, model, space, base + low, base + high);
            }
        }
        compare_hva(view, model, space, 0, u64::MAX);
        compare_hva(view, model, space, host_pages * 4096, 0);
    }
}

pub(crate) fn compare_frame(view: SlotView<'_, u32>, model: &Model, space: u16, gfn: u64) {
    let found = (view.lookup(Gfn(gfn)), view.lookup_or_below(Gfn(gfn)));
    assert_eq!(
        found.0.map(Plain::of).as_ref(),
        model.at(space, gfn),
        "{gfn:#x}"
    );
    assert_eq!(
        found.1.map(Plain::of).as_ref(),
        model.or_below(space, gfn),
        "{gfn:#x}"
    );
}

pub(crate) fn compare_frames(
    view: SlotView<'_, u32>,
    model: &Model,
    space: u16,
    gfn: u64,
    pages: u64,
) {
    let range = GfnRange::new(Gfn(gfn), pages).expect("inside 64 bits of addresses");
    let expected = model.in_frames(space, gfn, pages);
    assert_eq!(plain(view.iter_gfn(range)), expected, "{range:?}");
}

pub(crate) fn compare_hva(
    view: SlotView<'_, u32>,
    model: &Model,
    space: u16,
    start: u64,
    end: u64,
) {
    let found = plain(view.iter_hva(Hva(start)..Hva(end)));
    assert_eq!(
        found,
        model.in_hva(space, start, end),
        "{start:#x}..{end:#x}"
    );
}

/// Compares a guard's look-ups of the newest state at each frame, up and down. So the slot found
/// last is the right one, a neighbour, and one far away.
pub(crate) fn compare_newest(guard: &SlotGuard<'_, u32>, model: &Model, frames: u64) {
    let spaces = model.limits.address_spaces;
    for gfn in (0..frames).chain((0..frames).rev().step_by(5)) {
        for space in 0..spaces {
            let found = guard.lookup_in(space, Gfn(gfn)).map(Plain::of);
            assert_eq!(found.as_ref(), model.at(space, gfn), "{gfn:#x} in {space}");
        }
        let first = guard.lookup(Gfn(gfn)).map(Plain::of);
        assert_eq!(first.as_ref(), model.at(0, gfn), "{gfn:#x}");
    }
    assert!(guard.lookup(Gfn(u64::MAX)).is_none());
    assert!(guard.lookup_in(spaces, Gfn(0)).is_none());
}

/// Compares all slots of a space in each order.
pub(crate) fn compare_whole(view: SlotView<'_, u32>, model: &Model, space: u16) {
    let view = view.space(space).expect("the address space exists");
    let all: Vec<_> = model.by_frame(space).copied().collect();
    assert!(plain(view.iter()) == all, "by frame");
    let found = plain(view.iter_hva(Hva(0)..Hva(u64::MAX)));
    assert!(found == model.in_hva(space, 0, u64::MAX), "by host address");
    for slot in all {
        assert_eq!(view.by_id(slot.id).map(Plain::of), Some(slot));
    }
}

/// Compares a guard's look-up of the newest state of space 0.
pub(crate) fn compare_sample_newest(guard: &SlotGuard<'_, u32>, model: &Model, gfn: u64) {
    for gfn in [gfn, gfn + 1] {
        let found = guard.lookup(Gfn(gfn)).map(Plain::of);
        assert_eq!(found.as_ref(), model.at(0, gfn), "{gfn:#x}");
    }
}
