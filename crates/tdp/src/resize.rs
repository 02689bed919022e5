//! One entry changes between a large leaf and a link to a table of smaller ones.
//!
//! **Guarantee.** The entry changes as by [`Session::change`], or not at all.
//!
//! **Mechanism.** One compare-exchange. In a format with break-before-make, the worker freezes the
//! entry, flushes, and then stores the new value. If the flush panics, it restores the old value.
//!
//! **Neighbours.** Faults split a page that they need in part. `split.rs` changes whole ranges.

use crate::change::{Preserves, Seen, Session};
use crate::format::Format;
use crate::log::Log;
use crate::platform::{Entry, Flush, Platform};
use crate::sync::Ordering;
use pageferry_addr::GfnRange;

/// The reason why a page was not split.
pub(crate) enum NotSplit {
    /// The cache is empty.
    NoTable,
    /// Another thread has changed the entry.
    Lost,
}

impl<F: Format, P: Platform, L: Log> Session<'_, F, P, L> {
    /// Splits the leaf at `seen` into a table of the next level.
    #[cold]
    pub(crate) fn split_here(&mut self, seen: &Seen<'_>) -> Result<(), NotSplit> {
        let (level, children) = (seen.level, F::entries(seen.level - 1));
        let page = self.state.cache.page_to_fill().ok_or(NotSplit::NoTable)?;
        for (index, child) in page.entries().iter().enumerate() {
            child.store(F::split(seen.value, level, index), Ordering::Relaxed);
        }
        let link = F::table(page.frame(self.mmu.platform()));
        self.replace(seen, link, Preserves::All)
            .map_err(|_| NotSplit::Lost)?;
        self.state.cache.take_filled();
        self.state.counts.leaves(level - 1, children as i64);
        Ok(())
    }

    /// A change between leaf and link.
    ///
    /// # Errors
    /// The current value of the entry, if `seen` has another.
    pub(crate) fn replace(
        &mut self,
        seen: &Seen<'_>,
        new: u64,
        preserves: Preserves,
    ) -> Result<(), u64> {
        if !F::BREAK_BEFORE_MAKE {
            return self.change(seen, new, preserves);
        }
        seen.entry
            .compare_exchange(seen.value, F::FROZEN, Ordering::AcqRel, Ordering::Acquire)?;
        let mut broken = Broken {
            entry: seen.entry,
            next: seen.value,
        };
        let frames = F::frames_per_entry(seen.level);
        let range = GfnRange::new(seen.first, frames);
        let range = range.unwrap_or_else(|| unreachable!("frames below the format's limit"));
        self.mmu.platform().flush(Flush::Range(range));
        broken.next = new;
        drop(broken);
        self.account(seen.first, seen.level, seen.value, new, preserves);
        Ok(())
    }
}

/// A frozen entry between break and make. Dropping it stores the next value, which is the old one
/// if the flush panics.
struct Broken<'e> {
    entry: &'e Entry,
    next: u64,
}

impl Drop for Broken<'_> {
    fn drop(&mut self) {
        // The entry is frozen, so no other worker changes it. Release: the contents of the table
        // that it leads to.
        self.entry.store(self.next, Ordering::Release);
    }
}
