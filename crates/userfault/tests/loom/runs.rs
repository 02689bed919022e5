//! Claims of runs that cross a word, beside other claims and arrivals.

use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use loom::thread;
use pageferry_addr::RamPage;
use pageferry_userfault::{Claim, PageBitmap, PageStates};
use std::ops::Range;
use std::sync::Arc;

const BYTES: u64 = 0xb17e5;
/// All missing pages, two in each word.
const MISSING: Range<usize> = 62..66;

struct Pages {
    states: PageStates,
    bytes: AtomicU64,
}

/// The answers to a thread: the claim of its page, and all pages that it must ask for.
type Got = (Claim, Vec<usize>);

impl Pages {
    fn missing() -> Arc<Self> {
        let missing = Arc::new(PageBitmap::new(MISSING.end));
        missing.set_range(MISSING);
        Arc::new(Self {
            states: PageStates::try_new(missing).unwrap(),
            bytes: AtomicU64::new(0),
        })
    }

    fn claim(&self, page: usize, around: Range<usize>) -> Got {
        let mut mine = Vec::new();
        let asked = |first: RamPage, pages| mine.extend(first.index()..first.index() + pages);
        let claim = self
            .states
            .claim_around(RamPage(page as u64), around.clone(), asked);
        assert!(mine.is_sorted() && mine.iter().all(|page| around.contains(page)));
        assert_eq!(
            mine.contains(&page),
            claim == Claim::Mine,
            "{claim:?}: {mine:?}"
        );
        if claim == Claim::Present {
            assert_eq!(
                self.bytes.load(Relaxed),
                BYTES,
                "present, but without its bytes"
            );
        }
        (claim, mine)
    }

    fn spawn(self: &Arc<Self>, page: usize, around: Range<usize>) -> thread::JoinHandle<Got> {
        let pages = Arc::clone(self);
        thread::spawn(move || pages.claim(page, around))
    }
}

#[test]
fn overlapping_claims_share_the_pages_out() {
    loom::model(|| {
        let pages = Pages::missing();
        let other = pages.spawn(65, 63..66);
        let (claim, mut mine) = pages.claim(63, 62..65);
        let (others_claim, others) = other.join().unwrap();
        for (page, claim, theirs) in [(63, claim, &others), (65, others_claim, &mine)] {
            match claim {
                Claim::Mine => assert!(!theirs.contains(&page), "both ask for {page}"),
                Claim::Others => assert!(theirs.contains(&page), "nobody asks for {page}"),
                Claim::Present => panic!("no page has arrived"),
            }
        }
        mine.extend(others);
        let all = mine.len();
        mine.sort_unstable();
        mine.dedup();
        assert_eq!(mine.len(), all, "a page is asked for twice");
        for page in mine {
            assert_eq!(pages.states.claim(RamPage(page as u64)), Claim::Others);
        }
    });
}

#[test]
fn an_arrival_counts_all_pages_of_a_run_that_a_thread_claimed() {
    loom::model(|| {
        let pages = Pages::missing();
        let claimer = pages.spawn(63, 63..65);
        let waiter = {
            let pages = Arc::clone(&pages);
            thread::spawn(move || pages.states.claim(RamPage(64)))
        };
        pages.bytes.store(BYTES, Relaxed);
        let arrival = pages.states.arrive(RamPage(63), 2);
        assert_eq!(arrival.newly, 2);
        let (claim, mine) = claimer.join().unwrap();
        let waits = waiter.join().unwrap();
        assert_ne!(claim, Claim::Others);
        assert!(!(waits == Claim::Mine && mine.contains(&64)));
        let waited = [
            claim != Claim::Present,
            waits != Claim::Present || mine.contains(&64),
        ];
        let waited = waited.iter().filter(|waited| **waited).count();
        assert!(
            arrival.requested >= waited,
            "{arrival:?}: {mine:?} and {waits:?}"
        );
        assert_eq!(pages.claim(64, 63..66).0, Claim::Present);
    });
}
