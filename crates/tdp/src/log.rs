//! Who is told what guests did to pages.

use pageferry_addr::Gfn;

/// Is told what the MMU learns about pages while it changes their entries: a dirty log, above all.
///
/// It is called after the entry has changed and before the call that changed it returns. It must not call the MMU.
///
/// A reader misses nothing for good if it takes these steps in order, and copies the pages then. By write protection: take
/// the bits, protect those pages, flush. By dirty bits: [clean](crate::Worker::clear_dirty) the pages, which tells the
/// log, and flush; take the bits. What a call that is still under way has found, or made writable (for other vCPUs
/// too, whose TLBs may hold it at once), is in the log when that call is over: so before the last reading, vCPUs stand still
/// outside their faults, and zaps are over. See `docs/mmu.md`.
pub trait Log {
    /// Whether the pages are logged at all. Where they are, no page larger than the smallest becomes writable.
    fn is_on(&self) -> bool {
        true
    }

    /// The guest has stored to some of the `pages` pages from `gfn` on, or can from now on without being noticed.
    fn dirtied(&self, gfn: Gfn, pages: u64);

    /// The guest has used some of the `pages` pages from `gfn` on, and the entry that said so is gone.
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
