//! The slots and the keys of a measurement.

use crate::kit::Random;
use pageferry_addr::{Gfn, Hva, PAGE_SIZE};

/// One slot in plain numbers. Every scheme gets slots in this form, and most schemes store it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlainSlot {
    /// The first guest frame.
    pub(crate) start: Gfn,
    /// The size in base pages, at least one.
    pub(crate) pages: u64,
    /// The host address of the first byte.
    pub(crate) hva: Hva,
    /// The identifier, unique in a set.
    pub(crate) id: u16,
}

impl PlainSlot {
    /// The frame after the last.
    #[inline]
    #[must_use]
    pub(crate) const fn end(&self) -> Gfn {
        Gfn(self.start.0 + self.pages)
    }

    /// The host address of `gfn`, if the slot holds it.
    #[inline]
    #[must_use]
    pub(crate) const fn hva_of(&self, gfn: Gfn) -> Option<Hva> {
        let page = gfn.0.wrapping_sub(self.start.0);
        if page < self.pages {
            Some(Hva(self.hva.0 + page * PAGE_SIZE))
        } else {
            None
        }
    }

    /// The frame that `hva` backs, if it is one of the slot's.
    #[inline]
    #[must_use]
    pub(crate) const fn gfn_of(&self, hva: Hva) -> Option<Gfn> {
        let page = hva.0.wrapping_sub(self.hva.0) / PAGE_SIZE;
        if page < self.pages {
            Some(Gfn(self.start.0 + page))
        } else {
            None
        }
    }
}

/// Slots of 1 to 16 pages, in ascending order of guest frames and identifiers, with free places.
///
/// A place has 16 pages. Every fifth place is free, so that slots can move. Host addresses ascend
/// with the frames, as in a VMM. One slot in 16 shares the host range of its predecessor, because
/// slots may overlap by host address.
#[derive(Clone, Debug)]
pub(crate) struct SlotSet {
    slots: Vec<PlainSlot>,
    free: Vec<Gfn>,
}

/// The number of pages of a place.
const PLACE_PAGES: u64 = 16;
/// One place in this many is free.
const FREE_EVERY: u64 = 5;
/// One slot in this many has the host address of its predecessor.
const ALIAS_EVERY: usize = 16;
/// The frame of the first place: 4 GiB.
const FIRST: Gfn = Gfn(1 << 20);

impl SlotSet {
    /// The smallest number of slots of a set.
    pub(crate) const MIN_SLOTS: u32 = 4;
    /// The largest number of slots of a set. It is also KVM's limit on x86-64
    /// (`KVM_USER_MEM_SLOTS`).
    pub(crate) const MAX_SLOTS: u32 = 32_764;

    /// A set of `count` slots over the host addresses from `base` on. `seed` determines the sizes.
    ///
    /// # Panics
    /// If `count` is outside [`Self::MIN_SLOTS`]`..=`[`Self::MAX_SLOTS`].
    #[must_use]
    pub(crate) fn new(count: u32, base: Hva, seed: u64) -> Self {
        assert!(
            (Self::MIN_SLOTS..=Self::MAX_SLOTS).contains(&count),
            "a set of {count} slots"
        );
        let mut random = Random::new(seed);
        let place = |number: u64| Gfn(FIRST.0 + number * PLACE_PAGES);
        let places = u64::from(count) * FREE_EVERY / (FREE_EVERY - 1) + 2;
        let (mut slots, mut free) = (Vec::<PlainSlot>::new(), Vec::new());
        for number in 0..places {
            if number % FREE_EVERY == FREE_EVERY - 1 || slots.len() == count as usize {
                free.push(place(number));
                continue;
            }
            let id = slots.len() as u16;
            let hva = match slots.last() {
                Some(last) if slots.len() % ALIAS_EVERY == ALIAS_EVERY / 2 => last.hva,
                _ => Hva(base.0 + number * PLACE_PAGES * PAGE_SIZE),
            };
            slots.push(PlainSlot {
                start: place(number),
                pages: 1 + random.below(PLACE_PAGES),
                hva,
                id,
            });
        }
        Self { slots, free }
    }

    /// The slots, in ascending order of frames.
    #[must_use]
    pub(crate) fn slots(&self) -> &[PlainSlot] {
        &self.slots
    }

    /// The first frames of the free places. Each has room for any slot of the set.
    #[must_use]
    pub(crate) fn free(&self) -> &[Gfn] {
        &self.free
    }
}

/// The number of keys of each kind, a power of two.
pub(crate) const KEYS: usize = 1 << 16;

/// Keys of one kind.
pub(crate) type KeyList<K> = Box<[K; KEYS]>;

/// Keys of a set, in random order.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    /// Random frames of random slots.
    pub(crate) gfns: KeyList<Gfn>,
    /// Random frames of one slot.
    pub(crate) same: KeyList<Gfn>,
    /// Random host addresses of random slots.
    pub(crate) hvas: KeyList<Hva>,
    /// Random identifiers.
    pub(crate) ids: KeyList<u16>,
}

impl Keys {
    /// Keys of `set`. `seed` determines their order.
    pub(crate) fn new(set: &SlotSet, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let slots = set.slots();
        let one = slots[slots.len() / 2];
        let any = |random: &mut Random| slots[random.below(slots.len() as u64) as usize];
        let page = |random: &mut Random, slot: PlainSlot| random.below(slot.pages);
        Self {
            gfns: list(|| {
                let slot = any(&mut random);
                Gfn(slot.start.0 + page(&mut random, slot))
            }),
            same: list(|| Gfn(one.start.0 + page(&mut random, one))),
            hvas: list(|| {
                let slot = any(&mut random);
                Hva(slot.hva.0 + page(&mut random, slot) * PAGE_SIZE + random.below(PAGE_SIZE))
            }),
            ids: list(|| any(&mut random).id),
        }
    }
}

fn list<K>(mut next: impl FnMut() -> K) -> KeyList<K> {
    let keys: Vec<K> = (0..KEYS).map(|_| next()).collect();
    keys.try_into()
        .unwrap_or_else(|_| unreachable!("as many keys as were asked for"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_has_its_slots_apart_and_room_to_move_them() {
        for count in [4, 10, 509, SlotSet::MAX_SLOTS] {
            let set = SlotSet::new(count, Hva(1 << 40), 3);
            assert_eq!(set.slots().len(), count as usize);
            assert!(set.free().len() >= 3);
            let mut taken: Vec<(u64, u64)> = set
                .slots()
                .iter()
                .map(|slot| (slot.start.0, slot.end().0))
                .chain(set.free().iter().map(|f| (f.0, f.0 + PLACE_PAGES)))
                .collect();
            taken.sort_unstable();
            assert!(taken.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            let end = set.slots().iter().map(|s| s.hva.0 + s.pages * PAGE_SIZE);
            assert!(end.max().expect("slots") <= (1 << 40) + crate::slots::host::RESERVED_BYTES);
        }
    }

    #[test]
    fn some_slots_share_host_addresses() {
        let set = SlotSet::new(100, Hva(0), 3);
        let aliases = set.slots().windows(2).filter(|p| p[0].hva == p[1].hva);
        assert_eq!(aliases.count(), 6);
    }

    #[test]
    fn keys_are_in_the_layout() {
        let set = SlotSet::new(30, Hva(1 << 30), 1);
        let keys = Keys::new(&set, 2);
        let held = |gfn: &Gfn| set.slots().iter().any(|s| s.hva_of(*gfn).is_some());
        assert!(keys.gfns.iter().chain(keys.same.iter()).all(held));
        assert!(
            keys.hvas
                .iter()
                .all(|hva| set.slots().iter().any(|s| s.gfn_of(*hva).is_some()))
        );
        assert!(keys.ids.iter().all(|id| *id < 30));
    }

    #[test]
    fn translations_end_where_the_slot_does() {
        let slot = PlainSlot {
            start: Gfn(8),
            pages: 2,
            hva: Hva(0x10000),
            id: 0,
        };
        assert_eq!(slot.hva_of(Gfn(9)), Some(Hva(0x11000)));
        assert_eq!((slot.hva_of(Gfn(7)), slot.hva_of(Gfn(10))), (None, None));
        assert_eq!(slot.gfn_of(Hva(0x11fff)), Some(Gfn(9)));
        assert_eq!(
            (slot.gfn_of(Hva(0xffff)), slot.gfn_of(Hva(0x12000))),
            (None, None)
        );
    }
}
