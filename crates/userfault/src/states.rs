//! The states of a page that has not been received: missing, requested, present.
//!
//! **Guarantee.**
//! 1. Of all threads that claim a missing page at most one gets [`Claim::Mine`], and exactly one
//!    unless the page arrives meanwhile.
//! 2. A thread that gets [`Claim::Present`] finds the page's bytes.
//! 3. If a thread gets [`Claim::Mine`] or [`Claim::Others`], the page's arrival counts the page in
//!    [`Arrival::requested`]. So if that is 0, no claimer waits for any of these pages.
//!
//! **Mechanism.** Two bitmaps, *missing* (M) and *requested* (R). For each page:
//!
//! ```text
//! claim:  c1  load M: clear -> Present             arrive:      (the bytes are written)
//!         c2  set R, learn the old bit                     a1   clear M
//!         c3  load M: clear -> Present                     a2   clear R, learn the old bit
//!             else R was clear -> Mine, R was set -> Others
//! ```
//!
//! **Why this suffices.** Loads acquire. Changes are read-modify-writes that acquire and release.
//! The c2s and the a2 of a page change the same word. So they are in one total order, and each
//! synchronizes with all before it. a1 comes before a2 in the same thread. Only a1 clears M, and
//! only a2 clears R. M is never set again after claims have begun.
//!
//! - *A c2 behind a2* synchronizes with a2. So a1 happens before its c3, which finds M clear:
//!   Present.
//! - *A c2 before a2* may get any answer. The first of these c2s, and no other, finds R clear: at
//!   most one is Mine. If c3 of the first finds M clear, it is Present and no claim is Mine. Then
//!   the page is arriving. If no arrival runs, all c3s find M set, and the first c2 is Mine.
//!   Together this is (1).
//! - So only a c2 before a2 gets Mine or Others. Only a2 clears R, so a2 finds it set and counts
//!   the page: (3). This is why a claim that finds the page present in c3 does not clear the bit
//!   that it set in c2. Another thread may have got Others by that bit, and the arrival would not
//!   know of it.
//! - A claim returns Present after a load of M that reads from a1 or from a later change of the
//!   word. The bytes were written before a1: (2).
//!
//! **Many pages at once.** [`PageStates::claim_around`] and [`PageStates::arrive`] take these steps
//! a word at a time. Each step of a word is one load or one read-modify-write. c2 sets only bits
//! that c1 found in M. So each page of the word goes through all steps, and the argument holds.
//!
//! A c2 behind a2 leaves R set for a page that is present. That bit has no effect: claims load M
//! before R, and [`PageStates::next_outstanding`] reads R only for pages whose M is set.

use crate::bitmap::BITS;
use crate::{OutOfMemory, PageBitmap};
use core::ops::Range;
use core::{fmt, mem};
use pageferry_addr::RamPage;
use std::sync::Arc;

/// The answer to a thread that needs a page. The set is closed: there is no fourth state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Claim {
    /// The page is here, and so are its bytes.
    Present,
    /// The page is missing and no thread has asked for it. The caller must ask.
    Mine,
    /// The page is missing and another thread asks or has asked for it. The caller must wait.
    Others,
}

impl Claim {
    /// The answer to a thread that found `first` in c2 and `missing` in c3.
    const fn of(first: bool, missing: bool) -> Self {
        match (missing, first) {
            (false, _) => Self::Present,
            (true, true) => Self::Mine,
            (true, false) => Self::Others,
        }
    }
}

/// The effect of an arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[must_use = "threads may wait for pages that were requested"]
#[non_exhaustive]
pub struct Arrival {
    /// The number of pages that were missing until now.
    pub newly: usize,
    /// The number of pages that had been claimed. If 0, there is no thread to wake.
    pub requested: usize,
}

/// The states of all pages of a VM that is being received.
///
/// ```
/// use pageferry_addr::RamPage;
/// use pageferry_userfault::{Claim, PageBitmap, PageStates};
/// use std::sync::Arc;
///
/// let missing = Arc::new(PageBitmap::new(100));
/// missing.set_range(10..20);
/// let states = PageStates::try_new(missing)?;
/// assert_eq!(states.claim(RamPage(9)), Claim::Present);
/// assert_eq!(states.claim(RamPage(10)), Claim::Mine);
/// assert_eq!(states.claim(RamPage(10)), Claim::Others);
/// let arrival = states.arrive(RamPage(10), 2); // the bytes of both are in place
/// assert_eq!((arrival.newly, arrival.requested), (2, 1));
/// assert_eq!(states.claim(RamPage(10)), Claim::Present);
/// # Ok::<(), pageferry_userfault::OutOfMemory>(())
/// ```
pub struct PageStates {
    missing: Arc<PageBitmap>,
    requested: PageBitmap,
}

impl PageStates {
    /// The states of the pages of `missing`, none of them requested.
    ///
    /// Bits of `missing` may still be set until the first claim. From then on they are only
    /// cleared, and only by [`PageStates::arrive`]. A VM that is received once more needs a new
    /// `PageStates`.
    ///
    /// # Errors
    /// If the allocator refuses memory.
    pub fn try_new(missing: Arc<PageBitmap>) -> Result<Self, OutOfMemory> {
        let requested = PageBitmap::try_new(missing.pages())?;
        Ok(Self { missing, requested })
    }

    /// The bitmap of missing pages, shared with the engines, which test it on their fault path.
    #[must_use]
    pub fn missing(&self) -> &Arc<PageBitmap> {
        &self.missing
    }

    /// Whether the page is missing. If not, its bytes are in place and the caller sees them.
    ///
    /// # Panics
    /// If the page lies behind the last one; so do all calls that take a page.
    #[inline]
    #[must_use]
    pub fn is_missing(&self, page: RamPage) -> bool {
        self.missing.test(page)
    }

    /// Claims `page` for the caller. A caller that gets [`Claim::Mine`] must ask for the page.
    #[inline]
    pub fn claim(&self, page: RamPage) -> Claim {
        if !self.missing.test(page) {
            return Claim::Present;
        }
        let first = self.requested.set(page);
        Claim::of(first, self.missing.test(page))
    }

    /// Claims `page` for the caller, and with it the other pages of `around` (page indices) that
    /// are missing and unclaimed. Returns the claim of `page`.
    ///
    /// The call passes all pages that the caller must ask for to `mine`, as runs of a first page
    /// and a number of pages, in ascending order. `page` is one of them if and only if the claim is
    /// [`Claim::Mine`]. If `page` is present or claimed already, the call claims no other page.
    /// `page` may arrive or be claimed during the call: the caller may then get other pages only.
    ///
    /// ```
    /// use pageferry_addr::RamPage;
    /// use pageferry_userfault::{Claim, PageBitmap, PageStates};
    /// use std::sync::Arc;
    ///
    /// let missing = Arc::new(PageBitmap::new(100));
    /// missing.set_range(10..90);
    /// let states = PageStates::try_new(missing)?;
    /// assert_eq!(states.claim(RamPage(20)), Claim::Mine);
    /// let mut runs = Vec::new();
    /// let claim = states.claim_around(RamPage(12), 0..32, |first, pages| {
    ///     runs.push((first.0, pages));
    /// });
    /// assert_eq!(claim, Claim::Mine);
    /// assert_eq!(runs, [(10, 10), (21, 11)]);
    /// for (first, pages) in runs {
    ///     // The bytes of the run come first.
    ///     assert_eq!(states.arrive(RamPage(first), pages).requested, pages);
    /// }
    /// # Ok::<(), pageferry_userfault::OutOfMemory>(())
    /// ```
    ///
    /// # Panics
    /// If `page` is not in `around`, or `around` reaches behind the last page.
    pub fn claim_around(
        &self,
        page: RamPage,
        around: Range<usize>,
        mut mine: impl FnMut(RamPage, usize),
    ) -> Claim {
        let at = page.index();
        assert!(
            around.contains(&at),
            "{page:?} is not one of the pages {around:?} around it"
        );
        if !self.missing.test(page) || self.requested.test(page) {
            return self.claim(page);
        }
        let mut give = |run: Range<usize>| {
            if !run.is_empty() {
                mine(RamPage(run.start as u64), run.len());
            }
        };
        let mut claim = Claim::Present;
        let mut run = 0..0;
        for (word, mask) in self.missing.masks(around) {
            let wanted = self.missing.word(word) & mask;
            let first = self.requested.or_word(word, wanted);
            let missing = self.missing.word(word);
            if word == at / BITS {
                let bit = 1 << (at % BITS);
                claim = Claim::of(first & bit != 0, missing & bit != 0);
            }
            let mut claimed = first & missing;
            while claimed != 0 {
                let low = claimed.trailing_zeros() as usize;
                let start = word * BITS + low;
                if run.end != start {
                    give(mem::replace(&mut run, start..start));
                }
                run.end = start + (claimed >> low).trailing_ones() as usize;
                // The carry takes the lowest run out.
                claimed &= claimed.wrapping_add(1 << low);
            }
        }
        give(run);
        claim
    }

    /// Marks `pages` pages from `first` as present. Their bytes must be in place, because threads
    /// that find the pages present read them.
    pub fn arrive(&self, first: RamPage, pages: usize) -> Arrival {
        let range = first.index()..first.index() + pages;
        Arrival {
            newly: self.missing.clear_range(range.clone()),
            requested: self.requested.clear_range(range),
        }
    }

    /// The first page at or behind index `from` that is requested and still missing. A new
    /// connection must ask for these pages again. Beside claims and arrivals this is a snapshot.
    #[must_use]
    pub fn next_outstanding(&self, mut from: usize) -> Option<RamPage> {
        loop {
            let index = self.requested.next_set(from)?;
            let page = RamPage(index as u64);
            if self.missing.test(page) {
                return Some(page);
            }
            from = index + 1;
        }
    }
}

impl fmt::Debug for PageStates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "PageStates({} of {} pages missing)",
            self.missing.count(),
            self.missing.pages()
        )
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::thread;

    fn states(pages: usize) -> PageStates {
        let missing = Arc::new(PageBitmap::new(pages));
        missing.set_range(0..pages);
        PageStates::try_new(missing).unwrap()
    }

    #[test]
    fn an_arrival_counts_what_was_missing_and_what_was_claimed() {
        let states = states(200);
        assert_eq!(states.claim(RamPage(64)), Claim::Mine);
        assert_eq!(states.claim(RamPage(199)), Claim::Mine);
        assert_eq!(
            states.arrive(RamPage(63), 2),
            Arrival {
                newly: 2,
                requested: 1
            }
        );
        assert_eq!(states.arrive(RamPage(64), 1), Arrival::default());
        assert_eq!(
            states.arrive(RamPage(0), 200),
            Arrival {
                newly: 198,
                requested: 1
            }
        );
        assert_eq!(states.missing().count(), 0);
    }

    #[test]
    fn outstanding_pages_are_requested_and_missing() {
        let states = states(200);
        for page in [3, 70, 71, 130] {
            assert_eq!(states.claim(RamPage(page)), Claim::Mine);
        }
        let _ = states.arrive(RamPage(70), 1);
        let mut found = Vec::new();
        let mut from = 0;
        while let Some(page) = states.next_outstanding(from) {
            found.push(page.0);
            from = page.index() + 1;
        }
        assert_eq!(found, [3, 71, 130]);
    }

    /// Runs the protocol of the loom test at full speed over many pages.
    #[test]
    fn racing_threads_claim_each_page_once_and_none_is_forgotten() {
        const PAGES: usize = if cfg!(miri) { 100 } else { 20_000 };
        const CLAIMERS: usize = 3;
        let states = states(PAGES);
        let start = Barrier::new(CLAIMERS + 1);
        let (told, arrivals) = thread::scope(|scope| {
            let claimers: Vec<_> = (0..CLAIMERS)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        (0..PAGES)
                            .map(|page| states.claim(RamPage(page as u64)))
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            start.wait();
            let arrivals: Vec<_> = (0..PAGES)
                .map(|page| states.arrive(RamPage(page as u64), 1))
                .collect();
            let told: Vec<_> = claimers
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect();
            (told, arrivals)
        });
        for page in 0..PAGES {
            let claims: Vec<_> = told.iter().map(|claims| claims[page]).collect();
            let mine = claims.iter().filter(|claim| **claim == Claim::Mine).count();
            assert!(mine <= 1, "page {page}: {claims:?}");
            assert_eq!(arrivals[page].newly, 1);
            if claims.iter().any(|claim| *claim != Claim::Present) {
                assert_eq!(arrivals[page].requested, 1, "page {page}: {claims:?}");
            }
        }
    }
}
