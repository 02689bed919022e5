//! The pages that the source has not sent after switch-over.
//!
//! **Guarantee.** Every missing page is sent exactly once, on one of the two connections.
//!
//! **Mechanism.** One bitmap has the unsent pages. The thread that clears a page's bit (by one
//! atomic read-modify-write) sends the page. The urgent thread claims requested pages. The
//! background push claims pages in order from a cursor. After a request, the cursor moves behind
//! the requested page, since a guest often touches nearby pages next.

use crate::sync::{AtomicU64, Ordering};
use pageferry_addr::RamPage;
use pageferry_userfault::PageBitmap;

/// The value of `hint` if no request has arrived since the last call of `take_hint`.
const NO_HINT: u64 = u64::MAX;

/// The unsent pages.
#[derive(Debug)]
pub(crate) struct UnsentPages {
    unsent: PageBitmap,
    hint: AtomicU64,
}

impl UnsentPages {
    /// Every page of `missing` is unsent.
    pub(crate) fn new(missing: PageBitmap) -> Self {
        Self {
            unsent: missing,
            hint: AtomicU64::new(NO_HINT),
        }
    }

    /// Claims a requested page. Returns false if another thread has claimed it before.
    pub(crate) fn claim_urgent(&self, page: RamPage) -> bool {
        let mine = self.unsent.clear(page);
        if mine {
            self.hint.store(page.0 + 1, Ordering::Relaxed);
        }
        mine
    }

    /// Returns the new cursor of the background push, if a request has arrived since the last call.
    pub(crate) fn take_hint(&self) -> Option<usize> {
        let hint = self.hint.load(Ordering::Relaxed);
        if hint == NO_HINT {
            return None;
        }
        self.hint.store(NO_HINT, Ordering::Relaxed);
        Some(hint as usize)
    }

    /// Claims the next unsent page from `from` on, without wrapping around.
    pub(crate) fn claim_next(&self, from: usize) -> Option<RamPage> {
        let mut at = from;
        while let Some(index) = self.unsent.next_set(at) {
            let page = RamPage(index as u64);
            if self.unsent.clear(page) {
                return Some(page);
            }
            at = index + 1;
        }
        None
    }

    /// Returns the number of unsent pages.
    pub(crate) fn count(&self) -> u64 {
        self.unsent.count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering as StdOrdering};

    #[test]
    fn every_page_is_claimed_once_however_many_claim() {
        const PAGES: usize = 5000;
        let missing = PageBitmap::new(PAGES);
        missing.set_range(0..PAGES);
        let unsent = UnsentPages::new(missing);
        let claims: Vec<AtomicUsize> = (0..PAGES).map(|_| AtomicUsize::new(0)).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut from = 0;
                while let Some(page) = unsent.claim_next(from) {
                    claims[page.index()].fetch_add(1, StdOrdering::Relaxed);
                    from = page.index() + 1;
                }
            });
            for start in [1, 7] {
                let (unsent, claims) = (&unsent, &claims);
                scope.spawn(move || {
                    for i in 0..PAGES {
                        let page = RamPage(((start + i * 13) % PAGES) as u64);
                        if unsent.claim_urgent(page) {
                            claims[page.index()].fetch_add(1, StdOrdering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(unsent.count(), 0);
        assert!(claims.iter().all(|c| c.load(StdOrdering::Relaxed) == 1));
    }

    #[test]
    fn the_background_follows_the_faults() {
        let missing = PageBitmap::new(100);
        missing.set_range(0..100);
        let unsent = UnsentPages::new(missing);
        assert_eq!(unsent.take_hint(), None);
        assert!(unsent.claim_urgent(RamPage(40)));
        assert!(!unsent.claim_urgent(RamPage(40)));
        assert_eq!(unsent.take_hint(), Some(41));
        assert_eq!(unsent.take_hint(), None);
        assert_eq!(unsent.claim_next(40), Some(RamPage(41)));
        assert_eq!(unsent.claim_next(100), None);
    }
}
