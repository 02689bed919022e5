//! Claims of runs agree with claims of single pages.

use pageferry_addr::RamPage;
use pageferry_userfault::{Claim, PageBitmap, PageStates};
use proptest::prelude::*;
use std::sync::Arc;

const PAGES: usize = 200;

/// States in which `missing[page]` says whether a page is missing, and `claimed` pages are claimed.
fn states(missing: &[bool], claimed: &[usize]) -> PageStates {
    let bitmap = Arc::new(PageBitmap::new(PAGES));
    for page in (0..PAGES).filter(|page| missing[*page]) {
        bitmap.set(RamPage(page as u64));
    }
    let states = PageStates::try_new(bitmap).unwrap();
    for page in claimed {
        states.claim(RamPage(*page as u64));
    }
    states
}

/// Miri is about a thousand times slower.
const CASES: u32 = if cfg!(miri) { 4 } else { 512 };

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_run_has_the_pages_that_single_claims_would_get(
        missing in prop::collection::vec(prop::bool::weighted(0.9), PAGES),
        claimed in prop::collection::vec(0..PAGES, 0..8),
        (start, page, end) in (0..PAGES).prop_flat_map(|page| (0..=page, Just(page), page + 1..=PAGES)),
    ) {
        let (runs, single) = (states(&missing, &claimed), states(&missing, &claimed));
        let mut found: Vec<(usize, usize)> = Vec::new();
        let claim = runs.claim_around(RamPage(page as u64), start..end, |first, pages| {
            found.push((first.index(), first.index() + pages));
        });
        prop_assert_eq!(claim, single.claim(RamPage(page as u64)));
        let mut expected: Vec<(usize, usize)> = Vec::new();
        for other in (start..end).filter(|_| claim == Claim::Mine) {
            if other == page || single.claim(RamPage(other as u64)) == Claim::Mine {
                match expected.last_mut() {
                    Some(run) if run.1 == other => run.1 += 1,
                    _ => expected.push((other, other + 1)),
                }
            }
        }
        prop_assert_eq!(&found, &expected);
        for (first, end) in found {
            let arrival = runs.arrive(RamPage(first as u64), end - first);
            prop_assert_eq!((arrival.newly, arrival.requested), (end - first, end - first));
        }
    }
}

#[test]
#[should_panic(expected = "is not one of the pages 8..16 around it")]
fn a_page_outside_its_run_is_refused() {
    states(&[true; PAGES], &[]).claim_around(RamPage(7), 8..16, |_, _| {});
}
