//! Every method of `PageBitmap` agrees with a plain `Vec<bool>`.

use pageferry_addr::RamPage;
use pageferry_userfault::PageBitmap;
use proptest::prelude::*;
use std::ops::Range;

/// The plain model: slow and obviously correct.
struct Model(Vec<bool>);

impl Model {
    fn replace(&mut self, range: Range<usize>, value: bool) -> usize {
        let bits = &mut self.0[range];
        let changed = bits.iter().filter(|bit| **bit != value).count();
        bits.fill(value);
        changed
    }

    fn next(&self, from: usize, value: bool) -> Option<usize> {
        (from..self.0.len()).find(|page| self.0[*page] == value)
    }

    fn next_run(&self, from: usize, limit: usize) -> Option<Range<usize>> {
        let start = self.next(from, true)?;
        let mut end = start + 1;
        while end < self.0.len() && self.0[end] && end - start < limit {
            end += 1;
        }
        Some(start..end)
    }

    fn words(&self) -> Vec<u64> {
        self.0
            .chunks(64)
            .map(|bits| {
                bits.iter()
                    .rev()
                    .fold(0, |word, bit| word << 1 | u64::from(*bit))
            })
            .collect()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Set(usize),
    Clear(usize),
    SetRange(Range<usize>),
    ClearRange(Range<usize>),
    OrWord(usize, u64),
    TakeWord(usize, u64),
}

/// A position in `0..=pages`, often at the edge of a word.
fn position(pages: usize) -> impl Strategy<Value = usize> {
    prop_oneof![
        0..=pages,
        (0..=pages / 64, 0..3usize)
            .prop_map(move |(word, off)| (word * 64 + off).saturating_sub(1).min(pages)),
    ]
}

fn range(pages: usize) -> impl Strategy<Value = Range<usize>> {
    (position(pages), position(pages)).prop_map(|(a, b)| a.min(b)..a.max(b))
}

fn step(pages: usize) -> impl Strategy<Value = Step> {
    let words = pages.div_ceil(64);
    let bits = prop_oneof![
        any::<u64>(),
        Just(0),
        Just(u64::MAX),
        (0..64u32).prop_map(|bit| 1 << bit)
    ]
    .boxed();
    prop_oneof![
        (0..pages).prop_map(Step::Set),
        (0..pages).prop_map(Step::Clear),
        range(pages).prop_map(Step::SetRange),
        range(pages).prop_map(Step::ClearRange),
        (0..words, bits.clone()).prop_map(move |(word, bits)| {
            let left = pages - word * 64;
            Step::OrWord(
                word,
                if left < 64 {
                    bits & ((1 << left) - 1)
                } else {
                    bits
                },
            )
        }),
        (0..words, bits).prop_map(|(word, bits)| Step::TakeWord(word, bits)),
    ]
}

/// Miri is about a thousand times slower.
const CASES: u32 = if cfg!(miri) { 4 } else { 512 };
const MOST_PAGES: usize = if cfg!(miri) { 150 } else { 400 };

type Case = (usize, Vec<Step>, Vec<(Range<usize>, usize, usize)>);

fn case() -> impl Strategy<Value = Case> {
    prop_oneof![
        1..MOST_PAGES,
        (1..=MOST_PAGES / 64).prop_map(|words| words * 64)
    ]
    .prop_flat_map(|pages| {
        let limit = prop_oneof![0..5usize, 60..70usize, 0..=pages + 1, Just(usize::MAX)];
        let looks = prop::collection::vec((range(pages), 0..pages + 70, limit), 1..20);
        (
            Just(pages),
            prop::collection::vec(step(pages), 0..40),
            looks,
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_method_agrees_with_a_vector_of_bools((pages, steps, looks) in case()) {
        let map = PageBitmap::new(pages);
        let mut model = Model(vec![false; pages]);
        prop_assert_eq!(map.pages(), pages);
        for step in steps {
            match step.clone() {
                Step::Set(page) => {
                    prop_assert_eq!(map.set(RamPage(page as u64)), model.replace(page..page + 1, true) == 1);
                }
                Step::Clear(page) => {
                    prop_assert_eq!(map.clear(RamPage(page as u64)), model.replace(page..page + 1, false) == 1);
                }
                Step::SetRange(range) => {
                    prop_assert_eq!(map.set_range(range.clone()), model.replace(range, true));
                }
                Step::ClearRange(range) => {
                    prop_assert_eq!(map.clear_range(range.clone()), model.replace(range, false));
                }
                Step::OrWord(word, bits) => {
                    let before = model.words()[word];
                    prop_assert_eq!(map.or_word(word, bits), bits & !before);
                    for bit in (0..64).filter(|bit| bits >> bit & 1 == 1) {
                        model.0[word * 64 + bit] = true;
                    }
                }
                Step::TakeWord(word, bits) => {
                    let before = model.words()[word];
                    prop_assert_eq!(map.take_word(word, bits), bits & before);
                    for page in (word * 64..pages.min(word * 64 + 64)).filter(|page| bits >> (page % 64) & 1 == 1) {
                        model.0[page] = false;
                    }
                }
            }
            prop_assert_eq!(map.snapshot(), model.words(), "after {:?}", step);
            prop_assert_eq!(map.word(0), model.words()[0]);
        }
        prop_assert_eq!(map.count(), model.0.iter().filter(|bit| **bit).count());
        for page in 0..pages {
            prop_assert_eq!(map.test(RamPage(page as u64)), model.0[page]);
        }
        for (range, from, limit) in looks {
            prop_assert_eq!(map.count_range(range.clone()), model.0[range].iter().filter(|bit| **bit).count());
            prop_assert_eq!(map.next_set(from), model.next(from, true));
            prop_assert_eq!(map.next_clear(from), model.next(from, false));
            prop_assert_eq!(map.next_run(from, limit), model.next_run(from, limit), "from {} limit {}", from, limit);
        }
    }

    #[test]
    fn the_runs_of_a_bitmap_cover_each_set_page_once(
        (pages, ranges) in (1..500usize).prop_flat_map(|pages| (Just(pages), prop::collection::vec(range(pages), 0..8))),
        limit in 1..100usize,
    ) {
        let map = PageBitmap::new(pages);
        for range in ranges {
            map.set_range(range);
        }
        let covered = PageBitmap::new(pages);
        let mut from = 0;
        while let Some(run) = map.next_run(from, limit) {
            prop_assert!(!run.is_empty() && run.len() <= limit && run.start >= from);
            prop_assert_eq!(covered.set_range(run.clone()), run.len());
            from = run.end;
        }
        prop_assert_eq!(covered.snapshot(), map.snapshot());
    }
}

#[test]
fn an_empty_bitmap_has_nothing() {
    let map = PageBitmap::new(0);
    assert_eq!((map.pages(), map.count(), map.snapshot().len()), (0, 0, 0));
    assert_eq!(
        (map.next_set(0), map.next_clear(0), map.next_run(0, 8)),
        (None, None, None)
    );
    assert_eq!(
        (
            map.set_range(0..0),
            map.clear_range(0..0),
            map.count_range(0..0)
        ),
        (0, 0, 0)
    );
}

fn panics<R>(call: impl FnOnce(&PageBitmap) -> R + std::panic::UnwindSafe) -> bool {
    std::panic::catch_unwind(|| call(&PageBitmap::new(100))).is_err()
}

#[test]
fn pages_behind_the_last_are_refused() {
    assert!(panics(|map| map.test(RamPage(100))));
    assert!(panics(|map| map.set(RamPage(127))));
    assert!(panics(|map| map.clear(RamPage(u64::MAX))));
    assert!(panics(|map| map.set_range(99..101)));
    assert!(panics(|map| map.clear_range(101..101)));
    let (high, low) = (5, 4);
    assert!(panics(|map| map.count_range(high..low)));
    assert!(panics(|map| map.or_word(1, 1 << 36)));
    assert!(panics(|map| map.or_word(2, 0)));
    assert!(panics(|map| map.take_word(2, 1)));
    assert!(!panics(|map| map.or_word(1, (1 << 36) - 1)));
}
