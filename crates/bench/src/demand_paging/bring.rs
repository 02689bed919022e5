//! Bringing missing pages, whoever noticed them.

use super::plan::Plan;
use crate::BenchError;
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;

/// What a page's bytes are when it is brought: not zero, so that a page that was not brought is
/// noticed.
pub(super) const BYTES: [u8; PAGE_SIZE as usize] = [0x5a; PAGE_SIZE as usize];

/// Which pages are missing, and which somebody is bringing. With overlapping touches several vCPUs
/// miss the same page; one brings it, as bringing it twice would undo what a guest has stored
/// meanwhile.
pub(super) struct Bring {
    missing: Arc<PageBitmap>,
    claimed: PageBitmap,
}

impl Bring {
    /// All pages that `plan` touches are missing, in a RAM of `pages` pages.
    pub(super) fn all(pages: u64, plan: &Plan) -> Self {
        let bring = Self {
            missing: Arc::new(PageBitmap::new(pages as usize)),
            claimed: PageBitmap::new(pages as usize),
        };
        bring
            .missing
            .set_range(plan.touched.start as usize..plan.touched.end as usize);
        bring
    }

    pub(super) const fn missing(&self) -> &Arc<PageBitmap> {
        &self.missing
    }

    /// Brings `page` by `bring`, which is given its bytes, and lets guests touch it; unless
    /// somebody else is at it. For a page that is there, `show` is called: userfaultfd also tells
    /// of pages that have their bytes and are only not mapped yet, those of the guest's program
    /// among them.
    pub(super) fn page(
        &self,
        page: RamPage,
        bring: impl FnOnce(&[u8; PAGE_SIZE as usize]) -> Result<(), BenchError>,
        show: impl FnOnce() -> Result<(), BenchError>,
    ) -> Result<(), BenchError> {
        if !self.missing.test(page) {
            return show();
        }
        if self.claimed.set(page) {
            bring(&BYTES)?;
            self.missing.clear(page);
        } else {
            // Whoever brings it may need this processor.
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Checks that no page is missing any more.
    pub(super) fn check(&self) -> Result<(), BenchError> {
        match self.missing.count() {
            0 => Ok(()),
            left => Err(BenchError::WrongValue(format!(
                "{left} pages are missing after every page was touched"
            ))),
        }
    }
}
