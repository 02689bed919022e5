//! One slot.

use crate::versions::SlotFlags;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange, Hva, PAGE_MASK, PAGE_SHIFT};

/// A guest range and the host range of the same size that backs it.
///
/// A slot never changes; a request that changes one puts another in its place. `data` is the user's own
/// (a hypervisor's dirty log and userfault bitmap, say), which this crate carries and never looks at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot<D> {
    /// The address space the slot belongs to, counted from 0.
    pub address_space: u16,
    /// The slot's name inside its address space.
    pub id: u16,
    /// The guest frames; never empty.
    pub range: GfnRange,
    /// The page-aligned host address of the first frame's first byte.
    pub hva: Hva,
    /// The flags; only known ones.
    pub flags: SlotFlags,
    /// The user's own.
    pub data: D,
}

impl<D> Slot<D> {
    /// The host address of `gfn`'s first byte, or `None` where the slot does not hold `gfn`.
    #[inline]
    #[must_use]
    pub const fn hva_of(&self, gfn: Gfn) -> Option<Hva> {
        if self.range.contains(gfn) {
            Some(Hva(
                self.hva.0 + ((gfn.0 - self.range.start().0) << PAGE_SHIFT)
            ))
        } else {
            None
        }
    }

    /// The host addresses of the slot's memory, end excluded.
    #[inline]
    #[must_use]
    pub const fn hva_range(&self) -> Range<Hva> {
        self.hva..Hva(self.hva.0 + (self.range.pages() << PAGE_SHIFT))
    }

    /// The frames of this slot any byte of which lies in `hva`, or `None` where there are none.
    ///
    /// Ends inside a page count as the whole page, as in the kernel's `kvm_handle_hva_range`.
    #[must_use]
    pub fn frames_in_hva(&self, hva: Range<Hva>) -> Option<GfnRange> {
        let own = self.hva_range();
        let first = hva.start.max(own.start);
        let end = hva.end.min(own.end);
        if first >= end {
            return None;
        }
        let skipped = (first.0 - own.start.0) >> PAGE_SHIFT;
        // No overflow: `own.end` is page-aligned and representable, and `end` is not above it.
        let end = (end.0 - own.start.0 + PAGE_MASK) >> PAGE_SHIFT;
        GfnRange::new(Gfn(self.range.start().0 + skipped), end - skipped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot() -> Slot<()> {
        Slot {
            address_space: 0,
            id: 1,
            range: GfnRange::new(Gfn(100), 4).unwrap(),
            hva: Hva(0x10000),
            flags: SlotFlags::EMPTY,
            data: (),
        }
    }

    #[test]
    fn frames_translate_inside_the_slot_only() {
        assert_eq!(slot().hva_of(Gfn(99)), None);
        assert_eq!(slot().hva_of(Gfn(100)), Some(Hva(0x10000)));
        assert_eq!(slot().hva_of(Gfn(103)), Some(Hva(0x13000)));
        assert_eq!(slot().hva_of(Gfn(104)), None);
    }

    #[test]
    fn host_ranges_round_outwards_to_pages() {
        let frames = |start, end| slot().frames_in_hva(Hva(start)..Hva(end));
        assert_eq!(frames(0, 0x10000), None);
        assert_eq!(frames(0x14000, u64::MAX), None);
        assert_eq!(frames(0x11000, 0x11000), None);
        assert_eq!(frames(0, 0x10001), GfnRange::new(Gfn(100), 1));
        assert_eq!(frames(0x11fff, 0x12001), GfnRange::new(Gfn(101), 2));
        assert_eq!(frames(0, u64::MAX), GfnRange::new(Gfn(100), 4));
    }
}
