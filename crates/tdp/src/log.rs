//! Who is told what guests did to pages.

use pageferry_addr::Gfn;

/// Is told what the MMU learns about pages while it changes their entries: a dirty log, above all.
///
/// It is called after the entry has changed and, where the change is a fault's, before the fault returns: so
/// before any TLB can hold the new translation. It must not call the MMU.
///
/// The log is complete if its reader first takes its bits, then protects (or cleans) the pages, then flushes: see
/// `docs/mmu.md`.
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
