#![expect(unsafe_code, reason = "a record knows which one it took the place of")]
//! One slot.

use crate::sync::{Alive, AtomicU32, Ordering};
use crate::{Request, SlotFlags};
use core::fmt;
use core::ops::Range;
use core::ptr;
use pageferry_addr::{Gfn, GfnRange, Hva, PAGE_MASK, PAGE_SHIFT};

/// The slot is being deleted or moved, or was.
const INVALID: u32 = 1;
/// Another record takes this one's place: caches must not answer with it.
const REPLACED: u32 = 2;

/// The record that another record replaced. Only trees follow the pointer, and a table is shared
/// between threads only if `D` may be.
pub(crate) struct Predecessor<D>(pub(crate) *const Slot<D>);

// SAFETY: this is an address. The code that follows it shows that the record lives: see
// `tree/mod.rs`.
unsafe impl<D> Send for Predecessor<D> {}
// SAFETY: as above.
unsafe impl<D> Sync for Predecessor<D> {}

impl<D> fmt::Debug for Predecessor<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("_")
    }
}

/// A guest range and the host range of the same size that backs it.
///
/// Only the mark [`is_invalid`](Self::is_invalid) of a record ever changes: a request that changes
/// a slot puts another record in its place. `data` belongs to the user (a hypervisor's dirty log
/// and userfault bitmap, say). This crate carries it and never looks at it.
// The order of the fields matters: a fault reads the beginning of the record only.
#[derive(Debug)]
#[repr(C)]
pub struct Slot<D> {
    /// The guest frames; never empty.
    pub range: GfnRange,
    /// The page-aligned host address of the first frame's first byte.
    pub hva: Hva,
    /// The flags; only known ones.
    pub flags: SlotFlags,
    mark: AtomicU32,
    /// The address space the slot belongs to, counted from 0.
    pub address_space: u16,
    /// The slot's name inside its address space.
    pub id: u16,
    /// The index of the record in its chunk: see `slab.rs`.
    pub(crate) place: u32,
    /// 0 without the flag `USERFAULT`.
    bitmap: Hva,
    /// The version in which the record entered the trees.
    pub(crate) born: u64,
    /// The record that this one replaced in the trees by id and by host address, and by frame if
    /// the frames are the same. Heads of tree nodes have the same field.
    pub(crate) previous: Predecessor<D>,
    /// The user's data. The writer drops it some operations after the slot was deleted or replaced:
    /// see [`SlotWriter::reclaim`](crate::SlotWriter::reclaim).
    pub data: D,
    pub(crate) alive: Alive,
}

impl<D> Slot<D> {
    /// Makes the slot that `request` asks for, at `range`. Tables make their own slots. This
    /// function is for other structures that keep slots, after
    /// [`rules::check`](crate::rules::check) has allowed the request.
    ///
    /// # Panics
    /// If the host addresses of `range`'s size do not fit 64 bits.
    #[must_use]
    pub fn new(request: Request<D>, range: GfnRange) -> Self {
        let bytes = range.pages().checked_mul(1 << PAGE_SHIFT);
        assert!(
            bytes.is_some_and(|bytes| request.hva.checked_add(bytes).is_some()),
            "host addresses do not fit 64 bits"
        );
        Self {
            address_space: request.address_space,
            id: request.id,
            place: 0,
            range,
            hva: request.hva,
            flags: request.flags,
            bitmap: request.userfault_bitmap.unwrap_or(Hva(0)),
            born: 0,
            previous: Predecessor(ptr::null()),
            data: request.data,
            mark: AtomicU32::new(0),
            alive: Alive::new(),
        }
    }

    /// The address of the bitmap of missing pages, if and only if the slot has the flag
    /// `USERFAULT`. It is the address of the 64-bit word with the first page's bit. This crate
    /// never reads the bitmap.
    #[inline]
    #[must_use]
    pub const fn userfault_bitmap(&self) -> Option<Hva> {
        if self.flags.contains(SlotFlags::USERFAULT) {
            Some(self.bitmap)
        } else {
            None
        }
    }

    /// The host address of `gfn`'s first byte, or `None` if the slot does not hold `gfn`.
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

    /// The frames of this slot with a byte in `hva`, or `None` if there are none.
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

    /// Whether the slot is being deleted or moved, or was. Do not use an invalid slot: let the
    /// writer finish, and look again when the [`Generation`](crate::Generation) has changed. The
    /// kernel's name for this is `KVM_MEMSLOT_INVALID`.
    ///
    /// The writer marks the record before any other part of the change becomes visible. All readers
    /// share that record, so the mark also shows under guards and views that are older than the
    /// change. It goes away only if the change is aborted, which changes the generation too.
    #[inline]
    #[must_use]
    pub fn is_invalid(&self) -> bool {
        self.mark.load(Ordering::Acquire) & INVALID != 0
    }

    /// Whether a cache may answer with this record.
    #[inline]
    pub(crate) fn is_current(&self) -> bool {
        self.mark.load(Ordering::Acquire) == 0
    }

    pub(crate) fn mark_invalid(&self) {
        self.mark.store(INVALID, Ordering::Release);
    }

    pub(crate) fn mark_replaced(&self) {
        self.mark.store(REPLACED, Ordering::Release);
    }

    pub(crate) fn unmark(&self) {
        self.mark.store(0, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn slot() -> Slot<()> {
        let request = Request {
            id: 1,
            hva: Hva(0x10000),
            ..Request::delete(0, 1)
        };
        Slot::new(request, GfnRange::new(Gfn(100), 4).unwrap())
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
