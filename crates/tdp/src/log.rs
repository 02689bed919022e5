//! The interface to dirty logs: what guests did to pages.

use pageferry_addr::Gfn;

/// Is told what the MMU learns about pages while it changes their entries: a dirty log, above all.
///
/// The MMU calls it after the entry has changed, and before the call that changed it returns. It
/// must not call the MMU. If it panics, the tables and counts stay right, but it is not told the
/// rest of that call.
///
/// A reader of the log misses nothing for good if it takes these steps in order, and copies the
/// pages then:
///
/// | log by write protection | log by dirty bits |
/// |---|---|
/// | 1. take the bits | 1. [clean](crate::Worker::clear_dirty) the pages, which tells the log |
/// | 2. protect those pages | 2. flush |
/// | 3. flush | 3. take the bits |
///
/// A call that is still under way may have found a page dirty, or made it writable, also for other
/// vCPUs, whose TLBs may hold it at once. The page is in the log when that call is over. So before
/// the last reading, vCPUs stand still outside their faults, and zaps are over.
pub trait Log {
    /// Whether the pages are logged at all. If so, no page larger than the smallest becomes
    /// writable.
    fn is_on(&self) -> bool {
        true
    }

    /// The guest has stored to some of the `pages` pages from `gfn` on, or can do so unnoticed from
    /// now on.
    fn dirtied(&self, gfn: Gfn, pages: u64);

    /// The guest has used some of the `pages` pages from `gfn` on, and the entry that said so is
    /// gone.
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
