//! The log of the pages that the VMM wrote, a part of the machine's dirty log.
//!
//! **Guarantee.** A write that is marked is in the harvest under way or in the next one. A caller
//! that reads a page after its harvest finds the bytes of every write in that harvest.
//!
//! **Mechanism.** A writer marks its pages *after* their bytes, by read-modify-writes that release.
//! A harvest takes marks by read-modify-writes that acquire. A harvest between the bytes and the
//! mark finds nothing. Then the next one finds the mark: too late is harmless, too early would lose
//! the write. Marks are set even while the log is off. So there is no flag that a writer could read
//! too early, and [`WriteLog::clear`] loses no write whose bytes the caller does not see.
//!
//! **Neighbours.** `access` and the KVM engine's vCPUs mark. Those also mark the pages of a full
//! dirty ring, under the lock of harvests. The engines merge it into their harvests.

use core::ops::Range;
#[cfg(feature = "vm-memory")]
use pageferry_addr::RamPage;
use pageferry_userfault::{OutOfMemory, PageBitmap};

/// The pages that the VMM wrote since the last harvest.
pub(crate) struct WriteLog(PageBitmap);

impl WriteLog {
    pub(crate) fn try_new(pages: u64) -> Result<Self, OutOfMemory> {
        Ok(Self(PageBitmap::try_new(pages as usize)?))
    }

    /// Marks pages whose bytes have been written (page indices).
    pub(crate) fn mark(&self, pages: Range<u64>) {
        self.0.set_range(pages.start as usize..pages.end as usize);
    }

    /// Whether the page is marked.
    #[cfg(feature = "vm-memory")]
    pub(crate) fn is_marked(&self, page: RamPage) -> bool {
        self.0.test(page)
    }

    /// Forgets all marks, when a log begins.
    pub(crate) fn clear(&self) {
        let mut from = 0;
        while let Some(run) = self.0.next_run(from, usize::MAX) {
            self.0.clear_range(run.clone());
            from = run.end;
        }
    }

    /// Adds the marks to `dirty`, and takes them out of the log if `take`. Returns the number of
    /// pages that were not in `dirty`.
    pub(crate) fn harvest(&self, dirty: &PageBitmap, take: bool) -> usize {
        const BITS: usize = u64::BITS as usize;
        let mut newly = 0;
        let mut from = 0;
        while let Some(page) = self.0.next_set(from) {
            let index = page / BITS;
            let bits = self.0.word(index);
            // Into `dirty` first: an interruption in between reports a page twice.
            newly += dirty.or_word(index, bits).count_ones() as usize;
            if take {
                self.0.take_word(index, bits);
            }
            from = (index + 1) * BITS;
        }
        newly
    }
}
