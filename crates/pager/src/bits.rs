//! A bitmap over words that others own, such as words of a mapped file.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// A bit a page. Only the gate of a VM orders accesses, so all of them are relaxed.
#[derive(Clone, Copy, Debug)]
pub struct Bits<'a>(pub(crate) &'a [AtomicU64]);

impl<'a> Bits<'a> {
    /// The words: bit `i` of word `w` is page `64 * w + i`.
    #[must_use]
    pub fn words(self) -> &'a [AtomicU64] {
        self.0
    }

    /// Whether a page's bit is set.
    ///
    /// # Panics
    /// If the page lies behind the last word. So do all calls that take pages.
    #[must_use]
    pub fn test(self, page: u64) -> bool {
        let (word, bit) = place(page);
        self.0[word].load(Ordering::Relaxed) & bit != 0
    }

    /// Sets the bits of pages.
    pub fn set(self, pages: Range<u64>) {
        self.change(pages, |word, bits| {
            word.fetch_or(bits, Ordering::Relaxed);
        });
    }

    /// Clears the bits of pages.
    pub fn clear(self, pages: Range<u64>) {
        self.change(pages, |word, bits| {
            word.fetch_and(!bits, Ordering::Relaxed);
        });
    }

    /// The number of set bits.
    #[must_use]
    pub fn count(self) -> u64 {
        let ones = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.0.iter().map(ones).sum()
    }

    fn change(self, pages: Range<u64>, change: impl Fn(&AtomicU64, u64)) {
        let mut page = pages.start;
        while page < pages.end {
            let (word, _) = place(page);
            let end = pages.end.min((page / 64 + 1) * 64);
            let bits = u64::MAX >> (64 - (end - page)) << (page % 64);
            change(&self.0[word], bits);
            page = end;
        }
    }
}

fn place(page: u64) -> (usize, u64) {
    ((page / 64) as usize, 1 << (page % 64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_set_of_numbers(changes in prop::collection::vec((0..300u64, 0..300u64, any::<bool>()), 0..20)) {
            let words: Vec<AtomicU64> = (0..5).map(|_| AtomicU64::new(0)).collect();
            let bits = Bits(&words);
            let mut model = [false; 320];
            for (a, b, set) in changes {
                let range = a.min(b)..a.max(b);
                if set { bits.set(range.clone()) } else { bits.clear(range.clone()) }
                model[range.start as usize..range.end as usize].fill(set);
            }
            for (page, expected) in model.iter().enumerate() {
                prop_assert_eq!(bits.test(page as u64), *expected);
            }
            prop_assert_eq!(bits.count(), model.iter().filter(|set| **set).count() as u64);
        }
    }
}
