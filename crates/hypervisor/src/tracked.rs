//! The write-tracked pages of a slot: one bit a page.

use crate::platform::Format;
use core::ops::Range;
use pageferry_addr::Gfn;
use pageferry_tdp::format::Format as _;
use pageferry_userfault::{OutOfMemory, PageBitmap};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The tracked pages of one slot. Successive records of the slot share it.
pub(crate) struct Tracked {
    /// Bit `i` is the slot's page `i`. Only a thread that holds the VM's writer sets bits.
    bits: PageBitmap,
    extent: Mutex<Extent>,
}

/// The extent of the tracking. Only a thread that holds the VM's writer changes it.
#[derive(Default)]
struct Extent {
    /// The number of tracked pages.
    pages: usize,
    /// A range around all pages that were tracked since `pages` was last 0. Large pages can be
    /// split only there.
    span: Range<usize>,
}

impl Tracked {
    pub(crate) fn try_new(pages: usize) -> Result<Self, OutOfMemory> {
        Ok(Self {
            bits: PageBitmap::try_new(pages)?,
            extent: Mutex::default(),
        })
    }

    /// Whether one of the `count` pages from `page` on is tracked.
    pub(crate) fn any(&self, page: u64, count: u64) -> bool {
        self.bits
            .count_range(page as usize..(page + count) as usize)
            != 0
    }

    /// The level of the largest page around `gfn` that holds no tracked page: `level` at most, 1 at
    /// least. The slot begins at `start`. A page may become tracked during the call: the thread
    /// that tracks it waits for this fault.
    #[cold]
    pub(crate) fn largest_level(&self, start: Gfn, gfn: Gfn, mut level: u32) -> u32 {
        let frames = |level| Format::frames_per_entry(level);
        let first = |level| (gfn.0 & !(frames(level) - 1)) - start.0;
        while level > 1 && self.any(first(level), frames(level)) {
            level -= 1;
        }
        level
    }

    /// Whether any page is tracked.
    pub(crate) fn is_on(&self) -> bool {
        self.extent().pages != 0
    }

    fn extent(&self) -> MutexGuard<'_, Extent> {
        self.extent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tracks `pages`. Returns the number of pages that were not tracked before.
    pub(crate) fn add(&self, pages: Range<usize>) -> usize {
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

    /// Stops tracking `pages`. Returns the number of pages that were tracked. If no tracked page is
    /// left, it also returns the span.
    pub(crate) fn remove(&self, pages: Range<usize>) -> (usize, Option<Range<usize>>) {
        let mut extent = self.extent();
        // Release: a store that finds the bit clear comes after the caller's earlier reads of the
        // pages.
        let removed = self.bits.clear_range(pages);
        extent.pages -= removed;
        let last = removed != 0 && extent.pages == 0;
        (removed, last.then(|| extent.span.clone()))
    }
}
