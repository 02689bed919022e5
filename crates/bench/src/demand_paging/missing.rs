//! Installing missing pages, for every delivery of faults.

use super::plan::Plan;
use crate::BenchError;
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_migration::FAULT_SPIN;
use pageferry_migration::channel::Spinner;
use pageferry_userfault::{Claim, PageBitmap, PageStates};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// The bytes of an installed page. They are not zero, so that a check notices a page that was not
/// installed.
pub(super) const BYTES: [u8; PAGE_SIZE as usize] = [0x5a; PAGE_SIZE as usize];

/// The states of the pages. With overlapping touches, several vCPUs fault on the same page. One of
/// them installs it. A second installation would undo the stores that a guest has made since.
pub(super) struct MissingPages {
    states: PageStates,
    touched: Range<usize>,
    around: usize,
}

impl MissingPages {
    /// All pages that `plan` touches are missing from a RAM of `pages` pages.
    ///
    /// # Errors
    /// If the allocator refuses memory.
    pub(super) fn all(pages: u64, plan: &Plan) -> Result<Self, BenchError> {
        let no_memory = |e| BenchError::Os {
            what: "cannot record the missing pages",
            source: io::Error::new(io::ErrorKind::OutOfMemory, e),
        };
        let touched = plan.touched.start as usize..plan.touched.end as usize;
        let missing = PageBitmap::try_new(pages as usize).map_err(no_memory)?;
        missing.set_range(touched.clone());
        Ok(Self {
            states: PageStates::try_new(Arc::new(missing)).map_err(no_memory)?,
            touched,
            around: plan.around as usize,
        })
    }

    pub(super) fn bitmap(&self) -> &Arc<PageBitmap> {
        self.states.missing()
    }

    /// Installs `page`, and with it the missing pages of the aligned block around it. `write` gets
    /// each run of pages. If another thread installs `page`, this waits for it. If the page is
    /// present, it calls `map`: userfaultfd also reports pages that have their bytes and are not
    /// mapped yet, such as those of the guest's program.
    pub(super) fn install(
        &self,
        page: RamPage,
        mut write: impl FnMut(RamPage, u64) -> Result<(), BenchError>,
        map: impl FnOnce() -> Result<(), BenchError>,
    ) -> Result<(), BenchError> {
        let index = page.index();
        if !self.touched.contains(&index) {
            return map();
        }
        let from = index - index % self.around;
        let block = from.max(self.touched.start)..(from + self.around).min(self.touched.end);
        let mut written = Ok(());
        let claim = self.states.claim_around(page, block, |first, pages| {
            if written.is_ok() {
                written = write(first, pages as u64);
                if written.is_ok() {
                    // Waiters look at the page's state.
                    let _ = self.states.arrive(first, pages);
                }
            }
        });
        written?;
        match claim {
            Claim::Present => map(),
            Claim::Mine => Ok(()),
            Claim::Others => {
                let spinner = Spinner::new(FAULT_SPIN);
                while self.states.is_missing(page) {
                    if !spinner.spin() {
                        // The thread that installs the page may need this core. It may also have
                        // failed: the vCPU then leaves the guest again, and finds that out.
                        std::thread::yield_now();
                        break;
                    }
                }
                Ok(())
            }
        }
    }

    /// Checks that all pages are present.
    pub(super) fn check(&self) -> Result<(), BenchError> {
        match self.bitmap().count() {
            0 => Ok(()),
            left => Err(BenchError::WrongValue(format!(
                "{left} pages are still missing after every page was touched"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_guest::Isa;

    #[test]
    fn a_fault_installs_the_missing_pages_of_its_block() {
        let plan = Plan::new(Isa::Rv64, 1, 40, false).unwrap().with_around(16);
        let first = plan.touched.start;
        let missing = MissingPages::all(first + 100, &plan).unwrap();
        let installed = |page: u64| {
            let (mut runs, mut mapped) = (Vec::new(), false);
            let write = |first: RamPage, pages| {
                runs.push(first.0..first.0 + pages);
                Ok(())
            };
            let map = || {
                mapped = true;
                Ok(())
            };
            missing.install(RamPage(page), write, map).unwrap();
            (runs, mapped)
        };
        let block = |page: u64| page - page % 16;
        let second = block(first) + 16;
        let whole = second..second + 16;
        assert_eq!(installed(second + 5), (vec![whole], false));
        assert_eq!(installed(second + 6), (vec![], true));
        let rest = first..second;
        assert_eq!(installed(first), (vec![rest], false));
        assert_eq!(installed(first - 1), (vec![], true));
        let last = plan.touched.end - 1;
        let rest = block(last).max(second + 16)..last + 1;
        assert_eq!(installed(last), (vec![rest], false));
    }
}
