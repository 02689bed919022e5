#![expect(
    unsafe_code,
    reason = "an entry holds the frame of the next table, and following it is a dereference"
)]
//! Table memory: pages that are owned, and tables that a walk has reached.
//!
//! **Guarantee.** A [`Table`] that was reached under a guard stays readable and writable until the
//! guard ends, even if it is cut off meanwhile.
//!
//! **Mechanism.**
//!
//! 1. [`Table::step`] follows a link that it has loaded itself, with acquire order, from a table
//!    that was reached under the same guard.
//! 2. The one function in `change.rs` makes links, to pages of this platform.
//! 3. A page that was cut off is freed after a flush and a grace period
//!    ([`Batch`](crate::batch::Batch)).
//! 4. So a link that was seen under a guard leads to memory that is not freed before the guard
//!    ends. Entries of tables that were cut off are frozen, which is no link.

use crate::format::Format;
use crate::platform::{Entry, Platform};
use crate::sync::Ordering;
use alloc::vec::Vec;
use core::marker::PhantomData;
use core::ptr::NonNull;
use core::slice;
use pageferry_addr::{Gfn, Pfn};
use pageferry_epoch::Guard;

/// The memory of one table, owned. [`Page::free`] frees it. Dropping it leaks the memory.
#[derive(Debug)]
pub(crate) struct Page {
    table: NonNull<Entry>,
    entries: usize,
}

// SAFETY: the memory is the holder's, or shared by atomics; see `Platform`, 1.
unsafe impl Send for Page {}

impl Page {
    /// Allocates from the platform. All entries are not present.
    ///
    /// # Panics
    /// If an entry that points to the table would lead to memory other than the table.
    pub(crate) fn new<F: Format, P: Platform>(platform: &P, entries: usize) -> Option<Self> {
        let table = platform.allocate_table(entries)?;
        let frame = platform.frame(table);
        let link = F::table(frame);
        let (by_frame, by_address) = (
            platform.pointer(F::table_pfn(link)),
            platform.pointer_at(F::table_address(link)),
        );
        assert!(
            by_frame == table && by_address == table,
            "a new table is at {table:p}, but its frame {frame:?} leads to {by_frame:p} and \
             {by_address:p}: tables must be aligned to a page or more, and {} holds frames below {:?}",
            F::NAME,
            F::PFN_LIMIT
        );
        Some(Self { table, entries })
    }

    /// Returns the memory to the platform.
    ///
    /// # Safety
    /// Neither the hardware nor a guard can reach the memory.
    pub(crate) unsafe fn free<P: Platform>(self, platform: &P) {
        // SAFETY: `new`, or the owner before `from_link`, got it from `allocate_table` with
        // `entries`. The caller vouches for the rest.
        unsafe { platform.free_table(self.table, self.entries) };
    }

    /// The page of the table in frame `pfn`, which was allocated with `entries`.
    ///
    /// # Safety
    /// `pfn` is from the one link to the table, and the caller has removed that link, once.
    pub(crate) unsafe fn from_link<P: Platform>(platform: &P, pfn: Pfn, entries: usize) -> Self {
        let table = platform.pointer(pfn);
        Self { table, entries }
    }

    /// The frame for a link to this table.
    pub(crate) fn frame<P: Platform>(&self, platform: &P) -> Pfn {
        platform.frame(self.table)
    }

    /// The entries. The owner fills them before the page is linked, or reads them when no other
    /// thread can reach it.
    pub(crate) const fn entries(&self) -> &[Entry] {
        // SAFETY: valid for `entries` by `Platform`, 1, as long as `self` holds the memory; all are
        // atomics.
        unsafe { slice::from_raw_parts(self.table.as_ptr(), self.entries) }
    }
}

/// Empty tables of one size for later use. The worker fills the cache while it holds nothing, and
/// uses it under the lock.
#[derive(Debug)]
pub(crate) struct Cache {
    /// All are empty tables, except that the last may be [filled](Self::filled).
    pages: Vec<Page>,
    /// Whether the last page was handed out to be filled, and may not be empty.
    filled: bool,
}

impl Cache {
    pub(crate) const fn new() -> Self {
        Self {
            pages: Vec::new(),
            filled: false,
        }
    }

    /// Ensures that there are `count` pages.
    #[inline]
    pub(crate) fn fill<F: Format, P: Platform>(
        &mut self,
        platform: &P,
        count: usize,
    ) -> Result<(), OutOfTables> {
        if self.pages.len() < count {
            return self.fill_up::<F, P>(platform, count);
        }
        Ok(())
    }

    #[cold]
    fn fill_up<F: Format, P: Platform>(
        &mut self,
        platform: &P,
        count: usize,
    ) -> Result<(), OutOfTables> {
        self.wipe();
        while self.pages.len() < count {
            let page = Page::new::<F, P>(platform, F::entries(1)).ok_or(OutOfTables)?;
            self.pages.push(page);
        }
        Ok(())
    }

    /// An empty page.
    pub(crate) fn take(&mut self) -> Option<Page> {
        self.wipe();
        self.pages.pop()
    }

    /// Puts back an empty page that was not linked.
    pub(crate) fn put_back(&mut self, page: Page) {
        self.wipe();
        self.pages.push(page);
    }

    /// A page for the caller to fill before it links it. It stays here until
    /// [`take_filled`](Self::take_filled), so that a panic does not lose it.
    pub(crate) fn page_to_fill(&mut self) -> Option<&Page> {
        self.filled = true;
        self.pages.last()
    }

    /// Gives up the page that was filled and linked: the link owns it.
    pub(crate) fn take_filled(&mut self) {
        self.filled = false;
        let _linked = self.pages.pop();
    }

    /// Makes the last page empty again.
    fn wipe(&mut self) {
        if core::mem::take(&mut self.filled)
            && let Some(page) = self.pages.last()
        {
            for entry in page.entries() {
                entry.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Gives all pages back to the platform.
    pub(crate) fn free_all<P: Platform>(&mut self, platform: &P) {
        for page in self.pages.drain(..) {
            // SAFETY: pages in a cache were never linked.
            unsafe { page.free(platform) };
        }
    }
}

/// The platform has no memory for tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory for page tables")]
pub struct OutOfTables;

/// A table that was reached under a guard.
pub(crate) struct Table<'g, F> {
    entries: &'g [Entry],
    level: u32,
    format: PhantomData<F>,
}

// By hand, since derived implementations would require `F: Copy`.
impl<F> Clone for Table<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F> Copy for Table<'_, F> {}

/// The result of [`Table::step`].
pub(crate) enum Step<'g, F> {
    /// A table one level down.
    Down(Table<'g, F>),
    /// An entry that is no link.
    Entry(u64),
}

impl<'g, F: Format> Table<'g, F> {
    /// The root in frame `root`.
    ///
    /// # Safety
    /// The caller loaded `root` under `guard`, with acquire order, from the MMU's current root.
    pub(crate) unsafe fn root<P: Platform>(_: &'g Guard<'_>, platform: &P, root: Pfn) -> Self {
        let table = platform.pointer(root);
        // SAFETY: a root is freed after its replacement, a flush and a grace period, so not under
        // the guard.
        let entries = unsafe { slice::from_raw_parts(table.as_ptr(), F::entries(F::LEVELS)) };
        Self {
            entries,
            level: F::LEVELS,
            format: PhantomData,
        }
    }

    #[inline]
    pub(crate) const fn level(self) -> u32 {
        self.level
    }

    /// The entry for `gfn`.
    #[inline]
    pub(crate) fn entry(self, gfn: Gfn) -> &'g Entry {
        &self.entries[F::index(gfn, self.level)]
    }

    /// The entries from `index` on, at most `count`.
    #[cfg_attr(not(debug_assertions), inline(always))]
    pub(crate) fn entries_from(self, index: usize, count: usize) -> &'g [Entry] {
        let end = self.entries.len().min(index + count);
        &self.entries[index..end]
    }

    /// Goes down from here to the entry for `gfn` that is no link. Returns the table it stands in,
    /// and its value.
    #[cfg_attr(not(debug_assertions), inline(always))]
    pub(crate) fn descend<P: Platform>(self, platform: &P, gfn: Gfn) -> (Self, u64) {
        let mut table = self;
        // Each iteration follows one link. The compiler knows the level of each if the walk begins
        // at the root.
        for _ in 1..F::LEVELS {
            match table.step(platform, gfn) {
                Step::Down(below) => table = below,
                Step::Entry(value) => return (table, value),
            }
        }
        (table, table.entry(gfn).load(Ordering::Acquire))
    }

    /// Reads the entry for `gfn`, and follows it if it is a link.
    #[inline]
    pub(crate) fn step<P: Platform>(self, platform: &P, gfn: Gfn) -> Step<'g, F> {
        // Acquire: the contents of the table, and the history of the entry.
        let value = self.entry(gfn).load(Ordering::Acquire);
        if !F::is_table(value, self.level) {
            return Step::Entry(value);
        }
        let table = platform.pointer_at(F::table_address(value));
        // SAFETY: see the module's first lines. Links are to tables of `entries(level - 1)`, as
        // only the root is larger.
        let entries = unsafe { slice::from_raw_parts(table.as_ptr(), F::entries(self.level - 1)) };
        Step::Down(Self {
            entries,
            level: self.level - 1,
            format: PhantomData,
        })
    }
}
