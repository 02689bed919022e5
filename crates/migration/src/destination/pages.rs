//! Which pages of a receiving VM are missing, and which are being placed.
//!
//! **Guarantee.** Two threads never place one page at a time.
//!
//! **Mechanism.** The page states are the one truth about missing pages. A thread takes a page's
//! `placing` bit before it writes a byte of it.

use crate::error::MigrationError;
use crate::ledger::runs;
use crate::protocol_error::ProtocolError;
use crate::sync::{AtomicU64, Ordering};
use pageferry_addr::RamPage;
use pageferry_userfault::{PageBitmap, PageStates};
use std::ops::Range;
use std::sync::Arc;

/// The states of all pages.
pub(super) struct ArrivingPages {
    pub(super) states: PageStates,
    placing: PageBitmap,
    /// The number of pages that the host maps together.
    pub(super) unit: usize,
    /// The number of missing pages, from the switch-over on.
    left: AtomicU64,
}

impl ArrivingPages {
    /// Those of `missing`, of `pages` in all, are missing. The host maps `unit` pages together.
    pub(super) fn new(
        missing: Arc<PageBitmap>,
        pages: u64,
        unit: usize,
    ) -> Result<Self, MigrationError> {
        Ok(Self {
            states: PageStates::try_new(missing)?,
            placing: PageBitmap::try_new(pages as usize)?,
            unit,
            left: AtomicU64::new(0),
        })
    }

    /// Marks pages as present. Returns whether no page is missing any more.
    pub(super) fn arrive(&self, first: RamPage, pages: u64) -> bool {
        let arrived = self.states.arrive(first, pages as usize).newly as u64;
        self.left.fetch_sub(arrived, Ordering::AcqRel) == arrived
    }

    /// Takes the `placing` bits of `pages` pages from `first`, which must be missing.
    pub(super) fn begin_placing(&self, first: RamPage, pages: u64) -> Result<(), MigrationError> {
        let range = first.index()..(first.0 + pages) as usize;
        let missing = self.states.missing().count_range(range.clone());
        if missing as u64 == pages && self.placing.set_range(range) as u64 == pages {
            return Ok(());
        }
        Err(ProtocolError::NotMissing { first, pages }.into())
    }

    /// Takes the `placing` bits of pages that no vCPU can reach yet.
    pub(super) fn begin_filling(&self, first: RamPage, pages: u64) -> Result<(), MigrationError> {
        let range = first.index()..(first.0 + pages) as usize;
        if self.placing.set_range(range) as u64 == pages {
            return Ok(());
        }
        Err(ProtocolError::NotMissing { first, pages }.into())
    }

    /// Gives back the `placing` bits of pages that are still missing, or that may be filled again.
    pub(super) fn end_placing(&self, first: RamPage, pages: u64) {
        self.placing
            .clear_range(first.index()..(first.0 + pages) as usize);
    }

    /// The pages that threads place now.
    pub(super) fn placing(&self) -> &PageBitmap {
        &self.placing
    }

    /// Gives back the `placing` bits of all missing pages. No thread places any now.
    pub(super) fn end_all_placing(&self) {
        for run in runs(self.states.missing(), 0) {
            self.end_placing(RamPage(run.start), run.end - run.start);
        }
    }

    /// The missing pages are final: from now on they are counted down.
    pub(super) fn begin_counting(&self) {
        self.left.store(self.missing(), Ordering::Release);
    }

    /// The number of missing pages, from the switch-over on.
    pub(super) fn left(&self) -> u64 {
        self.left.load(Ordering::Acquire)
    }

    /// The pages that are mapped together with `page`, and only together.
    pub(super) fn mapped_with(&self, page: RamPage) -> Range<usize> {
        let start = page.index() - page.index() % self.unit;
        start..start + self.unit
    }

    /// Whether a page of `range` is missing.
    pub(super) fn is_any_missing(&self, range: Range<usize>) -> bool {
        let first = self.states.missing().next_set(range.start);
        first.is_some_and(|first| first < range.end)
    }

    /// Returns the number of missing pages.
    pub(super) fn missing(&self) -> u64 {
        self.states.missing().count() as u64
    }
}
