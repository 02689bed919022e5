//! Write tracking: which pages of a slot no store may reach, and how they become so and cease to be.
//!
//! **Guarantee.** From the return of [`Vm::track_writes`] until a page is untracked no store of a guest to it goes through:
//! plain, misaligned, AMO or SC. It leaves the guest before it has any effect, and is in no dirty log (of a store over two
//! pages, the page that is not tracked may be). Loads and fetches go on.
//!
//! **Mechanism.** The truth is a bit a page in the slot's [`Tracked`], which the fault path asks before it lets a leaf be
//! stored to. The leaf of a tracked page is of the class [`Writes::MmuForbids`], which nothing but such a fault changes to one
//! that allows stores; so a TLB miss that finds a leaf which lets the access through asks no bit. Rights come back by the next store's fault: untracking
//! clears bits, and touches no entry and no vCPU; but where no page is tracked any more, large ones come back.
//!
//! **Neighbours.** `memory.rs` is the fault path, `revoke.rs` argues the order of the steps. What becomes of a page's contents
//! (a background snapshot copies it) is the VMM's business.

use crate::error::VmError;
use crate::log::SlotLog;
use crate::region::SlotData;
use crate::revoke::{Format, Writer};
use crate::slots::Memslots;
use crate::vm::Vm;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange};
use pageferry_memslot::{Slot, SlotFlags};
use pageferry_tdp::format::{Format as _, Writes};
use pageferry_userfault::PageBitmap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The tracked pages of one slot. The records that one slot has in turn share it.
pub(crate) struct Tracked {
    /// The slot's page `i` is bit `i`. Set with the VM's writer held only.
    bits: PageBitmap,
    extent: Mutex<Extent>,
}

/// How much is tracked. Changed with the VM's writer held only.
#[derive(Default)]
struct Extent {
    pages: usize,
    /// The pages that were tracked since none was: in no other have large pages gone.
    span: Range<usize>,
}

impl Tracked {
    pub(crate) fn new(pages: usize) -> Self {
        Self {
            bits: PageBitmap::new(pages),
            extent: Mutex::default(),
        }
    }

    /// Whether one of the `count` pages from `page` on is tracked.
    pub(crate) fn any(&self, page: u64, count: u64) -> bool {
        self.bits
            .count_range(page as usize..(page + count) as usize)
            != 0
    }

    /// The level, `level` at most, of the largest page around `gfn` none of which is tracked; or 1. A page that is tracked from now
    /// on is found by who tracks it: it waits for this fault.
    #[cold]
    pub(crate) fn largest_level(&self, slot: &Slot<SlotData>, gfn: Gfn, mut level: u32) -> u32 {
        let frames = |level| Format::frames_per_entry(level);
        let first = |level| (gfn.0 & !(frames(level) - 1)) - slot.range.start().0;
        while level > 1 && self.any(first(level), frames(level)) {
            level -= 1;
        }
        level
    }

    /// Whether any page is.
    pub(crate) fn is_on(&self) -> bool {
        self.extent().pages != 0
    }

    fn extent(&self) -> MutexGuard<'_, Extent> {
        self.extent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, pages: Range<usize>) -> usize {
        let mut extent = self.extent();
        extent.span = if extent.pages == 0 {
            pages.clone()
        } else {
            extent.span.start.min(pages.start)..extent.span.end.max(pages.end)
        };
        let added = self.bits.set_range(pages);
        extent.pages += added;
        added
    }

    /// Gives how many of `pages` were tracked and, if these were the last, the span.
    fn remove(&self, pages: Range<usize>) -> (usize, Option<Range<usize>>) {
        let mut extent = self.extent();
        // Releases what the caller has read of them: a store that finds the bit clear comes after.
        let removed = self.bits.clear_range(pages);
        extent.pages -= removed;
        let last = removed != 0 && extent.pages == 0;
        (removed, last.then(|| extent.span.clone()))
    }
}

impl<M: Memslots> Vm<M> {
    /// Tracks the stores to `pages` of `slot` (its first page is 0): from the return of this on, a store of a guest to one of
    /// them leaves the guest with [`Exit::MemoryFault`](crate::Exit::MemoryFault), which says that the page is write-tracked,
    /// and has not happened. Gives how many pages were not tracked before. As `UFFDIO_WRITEPROTECT`, which QEMU's background
    /// snapshots use; but it is the slot's pages that are tracked, as by KVM's `page_track`, and not the host's: a store through
    /// another slot over the same memory, or by the VMM, is not seen.
    ///
    /// A store that goes through while this runs is over when it returns: all vCPUs agree about which stores came before. Each page
    /// can then be copied as it was at that moment, at any time until it is [untracked](Self::untrack_writes).
    ///
    /// Large pages that hold a tracked one are split. A dirty log, `USERFAULT` and notifiers do not change what is tracked; a missing
    /// page is brought first. Tracking stays with a slot that moves or gets other flags, and goes with one that is deleted.
    ///
    /// # Errors
    /// If there is no such slot, it is read-only, or it does not have all of `pages`. Nothing has changed then.
    pub fn track_writes(&self, slot: u16, pages: Range<u64>) -> Result<u64, VmError> {
        let mut writer = self.shared.writer();
        let Writer { slots, worker, .. } = &mut *writer;
        let (slot, frames) = part_of(slots, slot, &pages)?;
        if slot.flags.contains(SlotFlags::READONLY) {
            return Err(VmError::ReadOnlySlot(slot.id));
        }
        if pages.is_empty() {
            return Ok(0);
        }
        let tracked = slot.data.track(slot.range.pages() as usize);
        let added = tracked.add(pages.start as usize..pages.end as usize);
        // Faults that looked at the bits before are over. What they made writable is there to be found.
        self.shared.quiesce();
        worker.deferred(|worker| {
            let _held = slots.exclude();
            let Ok(_) = worker.split(frames, 1, &()) else {
                unreachable!("the platform aborts where there is no memory");
            };
            worker.set_writes(frames, Writes::MmuForbids, &SlotLog::of(slot));
        });
        Ok(added as u64)
    }

    /// Lets stores to `pages` of `slot` through again; gives how many of them were tracked. What the caller has read of the pages
    /// before is older than any store that this lets through.
    ///
    /// It costs a look at the slot and a bit a page, and waits for no vCPU, unless another call of the VM does; the next store to each page faults once. Several threads
    /// may copy a page, since it is tracked, and untrack it: what that one copied to which this says that it was tracked is
    /// whole, what others copied may not be. Only the call that leaves no page of the slot tracked, in memory that is made of
    /// large pages, makes those large again between the first and the last page that were tracked.
    ///
    /// A vCPU may have met the tracked page just before: it leaves the guest although the page is not tracked any more, and has
    /// to be entered again, which repeats the store.
    ///
    /// # Errors
    /// If there is no such slot, or it does not have all of `pages`. Nothing has changed then.
    pub fn untrack_writes(&self, slot: u16, pages: Range<u64>) -> Result<u64, VmError> {
        let mut writer = self.shared.writer();
        let Writer { slots, worker, .. } = &mut *writer;
        let (slot, _) = part_of(slots, slot, &pages)?;
        let Some(tracked) = slot.data.tracked() else {
            return Ok(0);
        };
        let (removed, last) = tracked.remove(pages.start as usize..pages.end as usize);
        let backing = slot.data.backing();
        if let Some(span) = last
            && backing > 1
        {
            let frames = around(slot, &span, Format::frames_per_entry(backing));
            self.recover(slots, worker, slot, frames);
        }
        Ok(removed as u64)
    }
}

/// The slot, and the frames of `pages`.
fn part_of<'a, M: Memslots>(
    slots: &'a M,
    id: u16,
    pages: &Range<u64>,
) -> Result<(&'a Slot<SlotData>, GfnRange), VmError> {
    let slot = slots.by_id(id).ok_or(VmError::NoSuchSlot(id))?;
    let (count, has) = (pages.end.checked_sub(pages.start), slot.range.pages());
    let inside = count.filter(|_| pages.end <= has);
    let frames = inside.and_then(|count| {
        let first = slot.range.start().checked_add(pages.start)?;
        GfnRange::new(first, count)
    });
    match frames {
        Some(frames) => Ok((slot, frames)),
        None => Err(VmError::PagesOutside {
            slot: id,
            pages: pages.clone(),
            has,
        }),
    }
}

/// The slot's frames in the pages of `size` frames that hold any of `pages`, of which there is one.
fn around(slot: &Slot<SlotData>, pages: &Range<usize>, size: u64) -> GfnRange {
    let (begin, end) = (slot.range.start().0, slot.range.end().0);
    let first = ((begin + pages.start as u64) & !(size - 1)).max(begin);
    let end = (begin + pages.end as u64).next_multiple_of(size).min(end);
    GfnRange::new(Gfn(first), end - first)
        .unwrap_or_else(|| unreachable!("a part of the slot that is not empty"))
}
