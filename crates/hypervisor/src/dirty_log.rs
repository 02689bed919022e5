//! The dirty log of a slot: one bit a page.

use pageferry_addr::RamPage;
use pageferry_userfault::PageBitmap;
use std::sync::Arc;

/// The way in which the log learns of a written page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DirtyBy {
    /// By write protection: the first store to each page faults.
    #[default]
    WriteProtection,
    /// By the dirty bits of the second-stage entries, which the hardware sets. Reading the log
    /// reads and clears them.
    Bits,
}

/// A slot's log. Bit `i` is the slot's page `i`.
#[derive(Clone)]
pub(crate) struct DirtyLog {
    pub(crate) bits: Arc<PageBitmap>,
    pub(crate) by: DirtyBy,
}

impl DirtyLog {
    /// Adds a page.
    pub(crate) fn note(&self, page: RamPage) {
        // The bit is usually set already. Then the cache line stays shared.
        if !self.bits.test(page) {
            self.bits.set(page);
        }
    }
}
