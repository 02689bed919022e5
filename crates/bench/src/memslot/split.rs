//! The division of a test's memory into slots, as in `memslot_perf_test`.

use pageferry_addr::{Gpa, PAGE_SIZE};

/// The guest address of the test's memory: first the synchronisation page, then the tested pages.
/// Slot 0, with the guest's program, lies below.
pub(super) const BASE: Gpa = Gpa(0x1000_0000);

/// A test's memory, divided into slots 1 and up. All have the same number of pages; the last one
/// also gets the remainder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// The number of slots of the test's memory: one less than the VM has.
    pub(super) slots: u32,
    /// The number of pages of the test's memory.
    pub(super) pages: u64,
    per_slot: u64,
}

impl Split {
    /// The division for a VM of `slots` slots. `None` if there are fewer pages than slots, or no
    /// slots.
    pub(super) fn new(slots: u32, pages: u64) -> Option<Self> {
        let slots = slots.checked_sub(1).filter(|&slots| slots > 0)?;
        let per_slot = pages / u64::from(slots);
        (per_slot > 0).then_some(Self {
            slots,
            pages,
            per_slot,
        })
    }

    /// The first page of the `index`th slot, counted from 0.
    pub(super) fn first(&self, index: u32) -> u64 {
        u64::from(index) * self.per_slot
    }

    /// The pages of the `index`th slot.
    pub(super) fn pages_of(&self, index: u32) -> u64 {
        if index + 1 == self.slots {
            self.pages - self.first(index)
        } else {
            self.per_slot
        }
    }

    /// The index of the slot with this page.
    pub(super) fn index_of(&self, page: u64) -> u32 {
        // At most the number of slots, which is a u32.
        ((page / self.per_slot).min(u64::from(self.slots - 1))) as u32
    }

    /// Divides `pages` pages from `first` at the ends of slots. Yields the first page and the
    /// number of pages of each piece.
    pub(super) fn pieces(self, first: u64, pages: u64) -> impl Iterator<Item = (u64, u64)> {
        let (mut at, end) = (first, first + pages);
        std::iter::from_fn(move || {
            (at < end).then(|| {
                let index = self.index_of(at);
                let piece = (self.first(index) + self.pages_of(index) - at).min(end - at);
                at += piece;
                (at - piece, piece)
            })
        })
    }

    /// The guest address of a page.
    pub(super) fn gpa(page: u64) -> Gpa {
        Gpa(BASE.0 + page * PAGE_SIZE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_cover_all_pages_once() {
        for (slots, pages) in [
            (2, 1),
            (10, 131_073),
            (32_764, 131_073),
            (8194, 8193),
            (4, 11),
        ] {
            let split = Split::new(slots, pages).expect("enough pages");
            let mut next = 0;
            for index in 0..split.slots {
                assert_eq!(split.first(index), next);
                assert!(split.pages_of(index) > 0);
                assert_eq!(split.index_of(next), index);
                next += split.pages_of(index);
                assert_eq!(split.index_of(next - 1), index);
            }
            assert_eq!(next, pages);
        }
        assert_eq!(Split::new(8195, 8193), None);
        assert_eq!(Split::new(1, 8193), None);
    }

    #[test]
    fn with_all_slots_the_last_has_half_the_area_of_the_move_test() {
        let split = Split::new(32_764, 131_073).expect("enough pages");
        assert_eq!((split.pages_of(0), split.pages_of(32_762)), (4, 25));
    }

    #[test]
    fn pieces_end_where_slots_end() {
        let split = Split::new(4, 11).expect("enough pages");
        // Slots of 3, 3 and 5 pages.
        let pieces: Vec<_> = split.pieces(1, 9).collect();
        assert_eq!(pieces, [(1, 2), (3, 3), (6, 4)]);
        assert_eq!(split.pieces(4, 0).count(), 0);
    }
}
