//! The slots of one address space, at one version.

use crate::versions::Slot;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange, Hva};

/// The slots of one address space; never changes.
///
/// Kept as the kernel kept them before its trees: arrays sorted by frame, copied at every change.
#[derive(Debug)]
pub struct SlotSet<D> {
    /// The frames of each slot, ascending and disjoint. Apart from `slots` so that a search stays in few
    /// cache lines.
    spans: Vec<GfnRange>,
    /// The slots, in the same order.
    slots: Vec<Arc<Slot<D>>>,
    /// Ids, ascending, each with its slot's place in `slots`.
    ids: Vec<(u16, u32)>,
}

impl<D> SlotSet<D> {
    pub(crate) const fn new() -> Self {
        Self {
            spans: Vec::new(),
            slots: Vec::new(),
            ids: Vec::new(),
        }
    }

    /// The slot that holds `gfn`. O(log n).
    #[inline]
    #[must_use]
    pub fn lookup(&self, gfn: Gfn) -> Option<&Arc<Slot<D>>> {
        self.at(self.place_at_or_below(gfn)?, gfn)
    }

    /// The slot that holds `gfn`, or else the nearest one below it; `None` where all slots lie above.
    ///
    /// The kernel's `gfn_to_memslot_approx`, with a defined answer between slots. O(log n).
    #[must_use]
    pub fn lookup_or_below(&self, gfn: Gfn) -> Option<&Arc<Slot<D>>> {
        self.slots.get(self.place_at_or_below(gfn)?)
    }

    /// The slot with this id. O(log n).
    #[must_use]
    pub fn by_id(&self, id: u16) -> Option<&Arc<Slot<D>>> {
        self.slots.get(self.place_of_id(id)?)
    }

    /// The slots that hold any frame of `range`, by ascending frame. O(log n) for the first.
    pub fn iter_gfn(&self, range: GfnRange) -> impl Iterator<Item = &Arc<Slot<D>>> {
        let first = self
            .spans
            .partition_point(|span| span.end() <= range.start());
        self.slots[first..]
            .iter()
            .take_while(move |slot| slot.range.intersection(range).is_some())
    }

    /// The slots whose memory any byte of `range` lies in, by ascending frame.
    ///
    /// There may be several for one address: slots may share memory. O(n): looks at every slot.
    pub fn iter_hva(&self, range: Range<Hva>) -> impl Iterator<Item = &Arc<Slot<D>>> {
        self.slots.iter().filter(move |slot| {
            let own = slot.hva_range();
            own.start.max(range.start) < own.end.min(range.end)
        })
    }

    /// All slots, by ascending frame.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Arc<Slot<D>>> {
        self.slots.iter()
    }

    /// How many slots there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The slot at `place` if it holds `gfn`.
    #[inline]
    pub(crate) fn at(&self, place: usize, gfn: Gfn) -> Option<&Arc<Slot<D>>> {
        self.spans
            .get(place)
            .is_some_and(|span| span.contains(gfn))
            .then(|| &self.slots[place])
    }

    /// The place of the last slot that starts at `gfn` or below.
    #[inline]
    pub(crate) fn place_at_or_below(&self, gfn: Gfn) -> Option<usize> {
        self.spans
            .partition_point(|span| span.start() <= gfn)
            .checked_sub(1)
    }

    fn place_of_id(&self, id: u16) -> Option<usize> {
        let index = self.ids.binary_search_by_key(&id, |entry| entry.0).ok()?;
        Some(self.ids[index].1 as usize)
    }

    /// The next version: without the slot that has id `gone`, then with `come`. O(n).
    ///
    /// The caller has checked that `come`'s frames and id are free in what remains.
    pub(crate) fn replaced(&self, gone: Option<u16>, come: Option<Arc<Slot<D>>>) -> Self {
        let mut next = self.clone();
        if let Some(place) = gone.and_then(|id| self.place_of_id(id)) {
            next.spans.remove(place);
            next.slots.remove(place);
            next.ids.retain(|&(_, at)| at as usize != place);
            for (_, at) in &mut next.ids {
                *at -= u32::from(*at as usize > place);
            }
        }
        if let Some(slot) = come {
            let place = next
                .spans
                .partition_point(|span| span.start() < slot.range.start());
            for (_, at) in &mut next.ids {
                *at += u32::from(*at as usize >= place);
            }
            let index = next.ids.partition_point(|&(id, _)| id < slot.id);
            next.ids.insert(index, (slot.id, place as u32));
            next.spans.insert(place, slot.range);
            next.slots.insert(place, slot);
        }
        next
    }
}

// By hand, since a derived one would ask for `D: Clone`.
impl<D> Clone for SlotSet<D> {
    fn clone(&self) -> Self {
        Self {
            spans: self.spans.clone(),
            slots: self.slots.clone(),
            ids: self.ids.clone(),
        }
    }
}
