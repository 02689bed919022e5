//! The dirty log of one slot, as the MMU tells it.

use crate::region::SlotData;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange, RamPage};
use pageferry_memslot::{Slot, SlotFlags};
use pageferry_tdp::Log;
use pageferry_tdp::ring::{DirtyPage, Producer};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;

/// How it is known that a page was written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DirtyBy {
    /// Pages are write-protected; the fault of the first store to each says so.
    #[default]
    WriteProtection,
    /// The dirty bits of the second-stage entries, which the hardware sets; reading the log reads and clears them.
    Bits,
}

/// A slot's log: its page `i` is bit `i`.
#[derive(Clone)]
pub(crate) struct DirtyLog {
    pub(crate) bits: Arc<PageBitmap>,
    pub(crate) by: DirtyBy,
}

impl DirtyLog {
    fn note(&self, page: RamPage) {
        // Mostly set already; then the line stays shared.
        if !self.bits.test(page) {
            self.bits.set(page);
        }
    }
}

/// Where the pages of one slot are logged, if they are.
#[derive(Clone, Copy)]
pub(crate) struct SlotLog<'a> {
    id: u16,
    frames: GfnRange,
    log: Option<&'a DirtyLog>,
    ring: Option<&'a Producer>,
}

impl<'a> SlotLog<'a> {
    pub(crate) fn of(slot: &'a Slot<SlotData>) -> Self {
        let logged = slot.flags.contains(SlotFlags::LOG_DIRTY_PAGES);
        Self {
            id: slot.id,
            ring: None,
            frames: slot.range,
            log: slot.data.dirty.as_ref().filter(|_| logged),
        }
    }

    /// For a slot that leaves `frames`, and takes `kept` along where it is logged on.
    pub(crate) const fn leaving(id: u16, frames: GfnRange, kept: Option<&'a DirtyLog>) -> Self {
        Self {
            id,
            frames,
            log: kept,
            ring: None,
        }
    }

    /// This log for a vCPU that has a ring: pages that it dirties go there.
    pub(crate) const fn with_ring(self, ring: Option<&'a Producer>) -> Self {
        Self { ring, ..self }
    }

    /// Whether the vCPU has to leave its guest before it may dirty another page.
    pub(crate) fn is_ring_full(&self) -> bool {
        self.log.is_some() && self.ring.is_some_and(Producer::is_soft_full)
    }

    /// Whether the log hears of a page by the fault that makes it writable, and not from a bit of its entry.
    pub(crate) fn is_by_fault(&self) -> bool {
        self.log
            .is_some_and(|log| log.by == DirtyBy::WriteProtection)
    }

    /// Whether a TLB may let stores to a page through whose entry is writable and dirty. A fault by a store makes it so.
    #[inline]
    pub(crate) fn admits_writes(&self, page: RamPage, store: bool) -> bool {
        match self.log {
            // Who made the entry writable has the page in its ring, or is about to.
            Some(_) if self.ring.is_some() => true,
            Some(log) if log.by == DirtyBy::WriteProtection => {
                if store {
                    log.note(page);
                }
                store || log.bits.test(page)
            }
            _ => true,
        }
    }

    /// The slot's pages among the `pages` from `gfn` on.
    fn part(&self, gfn: Gfn, pages: u64) -> Range<usize> {
        // An empty part is one inside the slot as well: what goes may be another slot's, on either side.
        let (first, last) = (self.frames.start().0, self.frames.end().0);
        let offset = |frame: u64| (frame.clamp(first, last) - first) as usize;
        offset(gfn.0)..offset(gfn.0 + pages)
    }
}

impl Log for SlotLog<'_> {
    fn is_on(&self) -> bool {
        self.log.is_some()
    }

    fn dirtied(&self, gfn: Gfn, pages: u64) {
        let Some(log) = self.log else { return };
        let part = self.part(gfn, pages);
        if let Some(ring) = self.ring {
            let page = |offset| DirtyPage {
                slot: self.id.into(),
                offset,
            };
            let mut offsets = part.start as u64..part.end as u64;
            // What does not fit is in the bitmap; but a vCPU whose ring is nearly full does not come here.
            let left = offsets.find(|&offset| ring.push(page(offset)).is_err());
            if let Some(first) = left {
                log.bits.set_range(first as usize..part.end);
            }
        } else if part.len() == 1 {
            log.note(RamPage(part.start as u64));
        } else {
            log.bits.set_range(part);
        }
    }
}

/// The logs of several slots.
pub(crate) struct SlotLogs<'a>(pub(crate) Vec<SlotLog<'a>>);

impl Log for SlotLogs<'_> {
    fn is_on(&self) -> bool {
        self.0.iter().any(SlotLog::is_on)
    }

    fn dirtied(&self, gfn: Gfn, pages: u64) {
        for log in &self.0 {
            log.dirtied(gfn, pages);
        }
    }
}
