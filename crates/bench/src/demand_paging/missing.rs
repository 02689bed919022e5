//! Installing missing pages, for every delivery of faults.

use super::plan::Plan;
use crate::BenchError;
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;

/// The bytes of an installed page. They are not zero, so that a check notices a page that was not
/// installed.
pub(super) const BYTES: [u8; PAGE_SIZE as usize] = [0x5a; PAGE_SIZE as usize];

/// The missing pages, and those that a thread has claimed. With overlapping touches, several vCPUs
/// fault on the same page. One of them installs it. A second installation would undo the stores
/// that a guest has made since.
pub(super) struct MissingPages {
    missing: Arc<PageBitmap>,
    claimed: PageBitmap,
}

impl MissingPages {
    /// All pages that `plan` touches are missing from a RAM of `pages` pages.
    pub(super) fn all(pages: u64, plan: &Plan) -> Self {
        let pages = Self {
            missing: Arc::new(PageBitmap::new(pages as usize)),
            claimed: PageBitmap::new(pages as usize),
        };
        pages
            .missing
            .set_range(plan.touched.start as usize..plan.touched.end as usize);
        pages
    }

    pub(super) const fn bitmap(&self) -> &Arc<PageBitmap> {
        &self.missing
    }

    /// Installs `page` by `write`, which gets its bytes, and marks it present. If another thread
    /// has claimed the page, it does nothing. If the page is present, it calls `map`: userfaultfd
    /// also reports pages that have their bytes and are not mapped yet, such as those of the
    /// guest's program.
    pub(super) fn install(
        &self,
        page: RamPage,
        write: impl FnOnce(&[u8; PAGE_SIZE as usize]) -> Result<(), BenchError>,
        map: impl FnOnce() -> Result<(), BenchError>,
    ) -> Result<(), BenchError> {
        if !self.missing.test(page) {
            return map();
        }
        if self.claimed.set(page) {
            write(&BYTES)?;
            self.missing.clear(page);
        } else {
            // The thread that installs the page may need this core.
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Checks that all pages are present.
    pub(super) fn check(&self) -> Result<(), BenchError> {
        match self.missing.count() {
            0 => Ok(()),
            left => Err(BenchError::WrongValue(format!(
                "{left} pages are still missing after every page was touched"
            ))),
        }
    }
}
