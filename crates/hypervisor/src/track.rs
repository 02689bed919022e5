//! Write tracking: calls that make stores to chosen pages leave the guest, and calls that let them
//! through again.
//!
//! **Guarantee.** From the return of [`Vm::track_writes`] until a page is untracked, no guest store
//! to it goes through: plain, misaligned, AMO or SC. The store leaves the guest before it has any
//! effect, and no dirty log has it. (If a store covers two pages, the log may have the untracked
//! page.) Loads and fetches go through.
//!
//! **Mechanism.** The truth is one bit a page in the slot's [`Tracked`](crate::tracked::Tracked).
//! The fault path tests it before it makes a leaf writable. The leaf of a tracked page has the
//! class [`Writes::MmuForbids`], which only such a fault changes to a class that allows stores. So
//! a TLB miss tests no bit if its leaf lets the access through.
//!
//! Untracking clears bits, and changes no entry and no vCPU. The fault of the next store restores
//! the write permission. When a slot's last tracked page is untracked, large pages come back.
//!
//! **Neighbours.** `memory.rs` is the fault path, and `revoke.rs` proves the order of the steps.
//! The VMM decides what to do with a page's contents: a background snapshot copies them.

use crate::error::VmError;
use crate::log::SlotLog;
use crate::platform::Format;
use crate::region::SlotData;
use crate::slots::Memslots;
use crate::state::Writer;
use crate::vm::Vm;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange};
use pageferry_memslot::{Slot, SlotFlags};
use pageferry_tdp::format::{Format as _, Writes};

impl<M: Memslots> Vm<M> {
    /// Tracks the stores to `pages` of `slot`, whose first page is 0. Returns the number of pages
    /// that were not tracked before. From then on, a guest store to one of the pages does not
    /// happen. It leaves the guest with [`Exit::MemoryFault`](crate::Exit::MemoryFault), with
    /// `write_tracked` set.
    ///
    /// QEMU's background snapshots use `UFFDIO_WRITEPROTECT` for the same purpose. But this call
    /// tracks pages of the slot, like KVM's `page_track`, and not pages of the host. So it sees no
    /// store through another slot over the same memory, and none by the VMM, unless the VMM asks
    /// [`Vm::stores`].
    ///
    /// A store that goes through during the call is over when the call returns: all vCPUs agree on
    /// the set of earlier stores. From then until a page is [untracked](Self::untrack_writes), the
    /// caller can copy its contents of that moment.
    ///
    /// The call splits large pages that hold a tracked page. A dirty log, `USERFAULT` and notifiers
    /// do not change the set of tracked pages. If a tracked page is missing, its first fault is a
    /// userfault. A slot that moves or gets other flags keeps its tracked pages. Deleting the slot
    /// ends its tracking.
    ///
    /// # Errors
    /// If there is no such slot, it is read-only, or it does not have all of `pages`. Or if the
    /// allocator refuses memory for the bits of tracked pages. Nothing has changed then.
    pub fn track_writes(&self, slot: u16, pages: Range<u64>) -> Result<u64, VmError> {
        let mut writer = self.changes.lock();
        let Writer { slots, worker, .. } = &mut *writer;
        let (slot, frames) = part_of(slots, slot, &pages)?;
        if slot.flags.contains(SlotFlags::READONLY) {
            return Err(VmError::ReadOnlySlot(slot.id));
        }
        if pages.is_empty() {
            return Ok(0);
        }
        let tracked = slot.data.track(slot.range.pages() as usize)?;
        self.state.vmm_stores.track();
        let added = tracked.add(pages.start as usize..pages.end as usize);
        // Then faults that tested the bits before have ended, and the sweep sees the entries that
        // they made writable.
        self.state.quiesce();
        worker.deferred(|worker| {
            let _held = slots.exclude();
            let Ok(_) = worker.split(frames, 1, &()) else {
                unreachable!("the platform aborts where there is no memory");
            };
            worker.set_writes(frames, Writes::MmuForbids, &SlotLog::of(slot));
        });
        Ok(added as u64)
    }

    /// Lets stores to `pages` of `slot` through again. Returns the number of those pages that were
    /// tracked. All reads of the pages that the caller did before come before the stores that the
    /// call lets through.
    ///
    /// The call looks the slot up and clears one bit a page. It waits for no vCPU, unless another
    /// call of the VM does. The next store to each page faults once.
    ///
    /// Several threads may copy a tracked page, and then untrack it. Only the thread whose call
    /// reports the page as tracked has a whole copy.
    ///
    /// A call that untracks the slot's last page joins small pages to large ones again, if the host
    /// memory has large pages. It does so between the first and the last page that were tracked.
    ///
    /// A vCPU may have found the page tracked just before. It then leaves the guest although the
    /// page is no longer tracked. Enter it again, which repeats the store.
    ///
    /// # Errors
    /// If there is no such slot, or it does not have all of `pages`. Nothing has changed then.
    pub fn untrack_writes(&self, slot: u16, pages: Range<u64>) -> Result<u64, VmError> {
        let mut writer = self.changes.lock();
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

/// The slot with this id, and the frames of `pages`.
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

/// The frames of `pages`, extended to aligned pages of `size` frames and clipped to the slot.
/// `pages` is not empty.
fn around(slot: &Slot<SlotData>, pages: &Range<usize>, size: u64) -> GfnRange {
    let (begin, end) = (slot.range.start().0, slot.range.end().0);
    let first = ((begin + pages.start as u64) & !(size - 1)).max(begin);
    let end = (begin + pages.end as u64).next_multiple_of(size).min(end);
    GfnRange::new(Gfn(first), end - first)
        .unwrap_or_else(|| unreachable!("a part of the slot that is not empty"))
}
