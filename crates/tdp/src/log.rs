//! The interface to dirty logs: reports of what guests did to pages.

use pageferry_addr::Gfn;

/// Receives reports about pages from the MMU, above all for a dirty log.
///
/// The MMU calls it after an entry has changed, and before the call that changed it returns. It
/// must not call the MMU. If it panics, the tables and counts stay right, but it does not get the
/// rest of that call's reports.
///
/// A reader of the log misses nothing for good if it takes these steps in order, and then copies
/// the pages:
///
/// | log by write protection | log by dirty bits |
/// |---|---|
/// | 1. take the bits | 1. [clean](crate::Worker::clear_dirty) the pages, which reports them |
/// | 2. protect those pages | 2. flush |
/// | 3. flush | 3. take the bits |
///
/// A call in progress may have found a page dirty, or made it writable for all vCPUs, and not
/// reported it yet. Other vCPUs' TLBs may hold that page at once. The page is in the log when that
/// call is over. So before the last reading, vCPUs must stand still outside their faults, and zaps
/// must be over.
pub trait Log {
    /// Whether the pages are logged at all. If so, only pages of the smallest size become writable.
    fn is_on(&self) -> bool {
        true
    }

    /// Reports that the guest has stored to some of the `pages` pages from `gfn` on, or can from
    /// now on do so without a fault.
    fn dirtied(&self, gfn: Gfn, pages: u64);

    /// Reports that the guest has used some of the `pages` pages from `gfn` on. The entry that
    /// recorded this is gone.
    fn accessed(&self, gfn: Gfn, pages: u64) {
        let _ = (gfn, pages);
    }
}

/// No log.
impl Log for () {
    fn is_on(&self) -> bool {
        false
    }

    fn dirtied(&self, _: Gfn, _: u64) {}
}

impl<L: Log + ?Sized> Log for &L {
    fn is_on(&self) -> bool {
        (**self).is_on()
    }

    fn dirtied(&self, gfn: Gfn, pages: u64) {
        (**self).dirtied(gfn, pages);
    }

    fn accessed(&self, gfn: Gfn, pages: u64) {
        (**self).accessed(gfn, pages);
    }
}
