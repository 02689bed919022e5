//! The interface between the MMU and the dirty logs of slots.

use crate::dirty_log::{DirtyBy, DirtyLog};
use crate::region::SlotData;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange, RamPage};
use pageferry_memslot::{Slot, SlotFlags};
use pageferry_tdp::Log;
use pageferry_tdp::ring::{DirtyPage, Producer};

/// The log of one slot's pages, or none.
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

    /// The log of a slot that leaves `frames`. `kept` is its dirty log, if it stays logged.
    pub(crate) const fn leaving(id: u16, frames: GfnRange, kept: Option<&'a DirtyLog>) -> Self {
        Self {
            id,
            frames,
            log: kept,
            ring: None,
        }
    }

    /// This log for a vCPU with a ring. The ring gets the pages that the vCPU dirties.
    pub(crate) const fn with_ring(self, ring: Option<&'a Producer>) -> Self {
        Self { ring, ..self }
    }

    /// Whether the vCPU has to leave its guest before it may dirty another page.
    pub(crate) fn is_ring_full(&self) -> bool {
        self.log.is_some() && self.ring.is_some_and(Producer::is_soft_full)
    }

    /// Whether there is a log, and the fault that makes a page writable logs it. Other logs read
    /// the dirty bits of the entries.
    pub(crate) fn is_by_fault(&self) -> bool {
        self.log
            .is_some_and(|log| log.by == DirtyBy::WriteProtection)
    }

    /// Whether a TLB may let stores to `page` through. The page's entry is writable and dirty. If
    /// the fault is a `store`, this logs the page first.
    #[inline]
    pub(crate) fn admits_writes(&self, page: RamPage, store: bool) -> bool {
        match self.log {
            // The vCPU that made the entry writable has pushed the page to its ring, or is about
            // to.
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
        // Pages may belong to a neighbouring slot. The clamping keeps an empty part inside this
        // slot.
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
            // Pages that do not fit go into the bitmap. A vCPU whose ring is nearly full leaves its
            // guest before it gets here.
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

/// The logs of several slots, in the order of their frames. Slots do not overlap.
pub(crate) struct SlotLogs<'a>(Vec<SlotLog<'a>>);

impl<'a> SlotLogs<'a> {
    /// Keeps those of `logs` that are on.
    pub(crate) fn new(mut logs: Vec<SlotLog<'a>>) -> Self {
        logs.retain(SlotLog::is_on);
        logs.sort_unstable_by_key(|log| log.frames.start());
        Self(logs)
    }

    /// The logs of the slots that hold any of the `pages` frames from `gfn` on. It is a binary
    /// search: a notifier reports each dirty page, and a VM may have 32 764 slots.
    fn around(&self, gfn: Gfn, pages: u64) -> &[SlotLog<'a>] {
        let first = self.0.partition_point(|log| log.frames.end() <= gfn);
        let rest = &self.0[first..];
        let count = rest.partition_point(|log| log.frames.start().0 < gfn.0 + pages);
        &rest[..count]
    }
}

impl Log for SlotLogs<'_> {
    fn is_on(&self) -> bool {
        !self.0.is_empty()
    }

    fn dirtied(&self, gfn: Gfn, pages: u64) {
        for log in self.around(gfn, pages) {
            log.dirtied(gfn, pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_userfault::PageBitmap;
    use std::sync::Arc;

    /// The number of slots. Slot `i` has four frames, from `6 * i + 1` on.
    const SLOTS: u64 = 5000;
    const FRAMES: u64 = 4;

    fn frames(slot: u64) -> GfnRange {
        GfnRange::new(Gfn(6 * slot + 1), FRAMES).unwrap()
    }

    fn dirty_logs() -> Vec<DirtyLog> {
        let bits = |_| Arc::new(PageBitmap::new(FRAMES as usize));
        let by = DirtyBy::Bits;
        (0..SLOTS)
            .map(bits)
            .map(|bits| DirtyLog { bits, by })
            .collect()
    }

    /// The logs in the order of host addresses, which differs from that of frames.
    fn logs_of(dirty: &[DirtyLog]) -> SlotLogs<'_> {
        let log = |slot: u64| {
            let kept = slot.is_multiple_of(2).then(|| &dirty[slot as usize]);
            SlotLog::leaving(slot as u16, frames(slot), kept)
        };
        SlotLogs::new((0..SLOTS).map(|i| log(i * 3 % SLOTS)).collect())
    }

    #[test]
    fn a_dirty_page_visits_the_log_of_its_own_slot_only() {
        let dirty = dirty_logs();
        let logs = logs_of(&dirty);
        for slot in 0..SLOTS {
            let (first, logged) = (frames(slot).start().0, usize::from(slot.is_multiple_of(2)));
            for gfn in first..first + FRAMES {
                assert_eq!(logs.around(Gfn(gfn), 1).len(), logged, "slot {slot}");
            }
            assert!(logs.around(Gfn(first - 1), 1).is_empty());
            assert!(logs.around(Gfn(first + FRAMES), 1).is_empty());
        }
    }

    #[test]
    fn each_log_gets_its_slots_part_of_what_was_dirtied() {
        let dirty = dirty_logs();
        let logs = logs_of(&dirty);
        // From the third frame of slot 10 to the second of slot 14.
        let (first, end) = (frames(10).start().0 + 2, frames(14).start().0 + 2);
        logs.dirtied(Gfn(first), end - first);
        for (slot, log) in (0..).zip(&dirty) {
            let expected = match slot {
                10 => 0b1100,
                12 => 0b1111,
                14 => 0b0011,
                _ => 0,
            };
            assert_eq!(log.bits.snapshot()[0], expected, "slot {slot}");
        }
        assert!(logs.is_on() && !SlotLogs::new(Vec::new()).is_on());
    }
}
