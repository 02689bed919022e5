//! Bitmaps of many blocks, of which few have set bits: searches skip blocks and miss no bit.

use pageferry_addr::RamPage;
use pageferry_testkit::skip;
use pageferry_userfault::{OutOfMemory, PageBitmap};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::ops::Range;

/// The pages of a block of the summary.
const BLOCK: usize = 64 * 4096;
const BLOCKS: usize = 4;
/// The last block is not whole.
const PAGES: usize = (BLOCKS - 1) * BLOCK + 100;

#[derive(Clone, Debug)]
enum Step {
    Set(Range<usize>),
    Clear(Range<usize>),
    Find(usize),
    Count(Range<usize>),
}

/// A page, often at the edge of a block.
fn page() -> impl Strategy<Value = usize> {
    let edge =
        (0..=BLOCKS, 0..4usize).prop_map(|(block, off)| (block * BLOCK + off).saturating_sub(2));
    prop_oneof![0..PAGES, edge].prop_map(|page| page.min(PAGES - 1))
}

fn few() -> impl Strategy<Value = Range<usize>> {
    (page(), 1..130usize).prop_map(|(page, pages)| page..PAGES.min(page + pages))
}

fn many() -> impl Strategy<Value = Range<usize>> {
    (page(), page()).prop_map(|(a, b)| a.min(b)..a.max(b))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => few().prop_map(Step::Set),
        2 => few().prop_map(Step::Clear),
        2 => prop_oneof![Just(0..PAGES), many()].prop_map(Step::Clear),
        4 => prop_oneof![Just(0), page(), Just(PAGES), Just(PAGES + 70)].prop_map(Step::Find),
        1 => many().prop_map(Step::Count),
    ]
}

/// Miri is about a thousand times slower.
const CASES: u32 = if cfg!(miri) { 1 } else { 256 };
const STEPS: usize = if cfg!(miri) { 6 } else { 40 };

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_sparse_bitmap_agrees_with_a_set_of_pages(steps in prop::collection::vec(step(), 1..STEPS)) {
        let map = PageBitmap::new(PAGES);
        let mut model = BTreeSet::new();
        for step in steps {
            match step {
                Step::Set(pages) => {
                    let newly = pages.clone().filter(|page| model.insert(*page)).count();
                    prop_assert_eq!(map.set_range(pages), newly);
                }
                Step::Clear(pages) => {
                    let there: Vec<usize> = model.range(pages.clone()).copied().collect();
                    there.iter().for_each(|page| { model.remove(page); });
                    prop_assert_eq!(map.clear_range(pages), there.len());
                }
                Step::Find(from) => {
                    prop_assert_eq!(map.next_set(from), model.range(from..).next().copied());
                }
                Step::Count(pages) => {
                    prop_assert_eq!(map.count_range(pages.clone()), model.range(pages).count());
                }
            }
        }
        prop_assert_eq!(map.next_set(0), model.first().copied());
        prop_assert_eq!(map.count(), model.len());
    }
}

/// The memory of this process, in bytes.
fn resident_bytes() -> Option<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

#[test]
#[cfg_attr(miri, ignore = "Miri's memory is not the process's")]
fn making_and_searching_a_bitmap_of_12_tib_writes_no_words() {
    const PAGES: usize = (12 << 40) / 4096;
    const WORDS_BYTES: usize = PAGES / 8;
    let Some(before) = resident_bytes() else {
        skip("/proc", "it does not say how much memory this process has");
        return;
    };
    let map = PageBitmap::try_new(PAGES).unwrap();
    assert_eq!(
        (map.next_set(0), map.next_run(0, 8), map.count()),
        (None, None, 0)
    );
    assert_eq!(map.or_word(PAGES / 64 - 1, 0), 0);
    let after = resident_bytes().unwrap();
    // Tests run beside this one, so there is some slack.
    assert!(
        after < before + WORDS_BYTES / 8,
        "from {before} to {after} bytes"
    );
    assert!(map.set(RamPage(PAGES as u64 - 1)));
    assert_eq!(map.next_set(0), Some(PAGES - 1));
}

#[test]
#[cfg_attr(miri, ignore = "Miri ends where an allocator refuses memory")]
fn a_bitmap_that_does_not_fit_is_an_error() {
    let error = PageBitmap::try_new(usize::MAX).err();
    assert_eq!(error, Some(OutOfMemory { bytes: 1 << 61 }));
    assert!(PageBitmap::try_new(1 << 62).is_err());
}

#[test]
fn a_kernel_reads_the_bits_of_a_slot_from_their_own_word() {
    let map = PageBitmap::new(1000);
    map.set(RamPage(128 + 65));
    let words: Vec<u64> = map.snapshot()[2..].to_vec();
    assert_eq!(words[1], 1 << 1, "bit 1 of word 1 is the slot's page 65");
    let base = map.address_from(RamPage(0)).unwrap();
    assert_eq!(map.address_from(RamPage(128)), Some(base.wrapping_add(2)));
    assert_eq!(map.address_from(RamPage(960)), Some(base.wrapping_add(15)));
    for (first, why) in [
        (1, "not aligned"),
        (100, "not aligned"),
        (1088, "behind the end"),
    ] {
        assert_eq!(map.address_from(RamPage(first)), None, "{why}");
    }
}
