//! The second stage of a VM: looking up and mapping single pages.

use crate::counters::Counters;
use crate::format::{Entry, Sv48x4};
use crate::sync::Ordering;
use crate::table::Tree;
use core::fmt;
use pageferry_addr::{Gfn, Pfn};

/// The second-stage tables of one VM.
///
/// All methods take `&self`, and any thread may call any of them at any time. Each changes entries one by
/// one: a range operation is not one atomic step, and pages that are mapped while it runs may or may not be
/// met by it.
///
/// # What the caller owes
///
/// **TLB flushes.** Harts keep translations of their own, and nothing here knows them.
/// - After [`zap`](Self::zap) or one of the write protections has changed an entry, harts may go on using
///   the old one until their TLBs are flushed. The old page must not be put to another use, and the log of a
///   write-protected page not be taken for complete, before that flush is acknowledged by every hart.
/// - A result of 0 says that *this* call changed nothing. Another thread may have changed an entry of the
///   range and not have flushed yet: who needs the flush to be over must wait for that thread as well.
/// - [`map`](Self::map) needs no flush: from absent to present, and from read-only to writable, a stale
///   translation costs a spurious fault and no more.
///
/// **Faults that race a removal.** A fault looks its `Pfn` up before it maps; if the page is taken away and
/// zapped between the two, the fault would install a dead page. The caller either excludes that by a lock or
/// re-checks an invalidation count after mapping, and zaps its own page if the count moved. With the count,
/// both sides need a `SeqCst` fence: between raising the count and `zap`, and between `map` and the
/// re-check.
///
/// **Dirty logging.** A fault first maps the page writable and *then* sets its bit in the log, before any
/// hart stores through the new translation. Reading the log takes the bits first, then write-protects the
/// pages they name, then flushes. In the other order a store could fall between and be in no log.
pub struct StageTwo {
    pub(crate) tree: Tree,
    pub(crate) counters: Counters,
}

/// A translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leaf {
    /// The host's frame.
    pub pfn: Pfn,
    /// Whether the guest may store to it; loads and instruction fetches it may always do.
    pub writable: bool,
}

impl Leaf {
    fn from_entry(entry: Entry) -> Option<Self> {
        entry.is_leaf().then(|| Self {
            pfn: entry.pfn(),
            writable: entry.is_writable(),
        })
    }
}

/// What [`StageTwo::map`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapOutcome {
    /// There was no translation; now there is.
    Installed,
    /// The page was mapped read-only; now it is writable.
    Upgraded,
    /// The page was mapped with the permission asked for, or with more; nothing changed.
    Spurious,
    /// Another host page is mapped there; nothing changed. The caller zaps it first, or takes it as it is.
    Conflict {
        /// What is mapped.
        existing: Leaf,
    },
}

impl StageTwo {
    /// Tables that translate nothing: a root of 16 KiB and the counters.
    #[must_use]
    pub fn new() -> Self {
        Self {
            tree: Tree::new(),
            counters: Counters::new(),
        }
    }

    /// What `gfn` translates to at this moment, or `None` where it is not mapped.
    ///
    /// Wait-free: four loads. Whatever was written before the page was mapped is visible to the caller.
    /// Frames at and above [`Sv48x4::GFN_LIMIT`] are never mapped.
    #[inline]
    #[must_use]
    pub fn walk(&self, gfn: Gfn) -> Option<Leaf> {
        if gfn >= Sv48x4::GFN_LIMIT {
            return None;
        }
        let table = self.tree.leaf_table(gfn)?;
        let entry = table.leaf(Sv48x4::index(gfn, 1)).load(Ordering::Acquire);
        Leaf::from_entry(Entry(entry))
    }

    /// Maps `gfn` to `pfn`, a base page, with permission to store where `writable`.
    ///
    /// Never takes a permission away: asking for read-only where `pfn` is mapped writable is
    /// [`Spurious`](MapOutcome::Spurious). Links the tables that are missing; lock-free, and tries again only
    /// where another thread changed the very entry.
    ///
    /// # Panics
    /// If `gfn` is not below [`Sv48x4::GFN_LIMIT`] or `pfn` not below [`Sv48x4::PFN_LIMIT`]. Memory slots
    /// that reach past the limit are to be refused when they are created.
    pub fn map(&self, gfn: Gfn, pfn: Pfn, writable: bool) -> MapOutcome {
        assert!(gfn < Sv48x4::GFN_LIMIT, "{gfn:?} is past the tables' reach");
        assert!(pfn < Sv48x4::PFN_LIMIT, "{pfn:?} does not fit an entry");
        let table = self.tree.leaf_table_or_link(gfn);
        let entry = table.leaf(Sv48x4::index(gfn, 1));
        let mut tally = self.counters.tally(gfn);
        let new = Entry::leaf(pfn, writable);
        // Acquire, as a spurious fault goes on to use the page another thread has mapped.
        let mut old = Entry(entry.load(Ordering::Acquire));
        loop {
            let outcome = match Leaf::from_entry(old) {
                None => MapOutcome::Installed,
                Some(existing) if existing.pfn != pfn => return MapOutcome::Conflict { existing },
                Some(existing) if writable && !existing.writable => MapOutcome::Upgraded,
                Some(_) => return MapOutcome::Spurious,
            };
            match tally.change(entry, old, new) {
                Ok(()) => return outcome,
                Err(found) => old = found,
            }
        }
    }

    /// How many pages are mapped.
    ///
    /// Exact while no change is in flight; otherwise it may miss changes that are.
    #[must_use]
    pub fn mapped_pages(&self) -> u64 {
        self.counters.mapped()
    }

    /// How many pages are mapped writable; as exact as [`mapped_pages`](Self::mapped_pages).
    #[must_use]
    pub fn writable_pages(&self) -> u64 {
        self.counters.writable()
    }

    /// The bytes of all tables. They never get fewer: tables stay until `self` is dropped.
    #[must_use]
    pub fn table_bytes(&self) -> u64 {
        self.tree.bytes()
    }
}

impl Default for StageTwo {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for StageTwo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StageTwo")
            .field("mapped_pages", &self.mapped_pages())
            .field("writable_pages", &self.writable_pages())
            .field("table_bytes", &self.table_bytes())
            .finish_non_exhaustive()
    }
}
