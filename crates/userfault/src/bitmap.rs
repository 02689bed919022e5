//! A bitmap with one bit per page. Any number of threads may read and change it at once.
//!
//! The ordering rules, for a bitmap of *missing* pages:
//! 1. A page's bytes are written before its bit is cleared, and [`PageBitmap::clear`] releases.
//! 2. [`PageBitmap::test`] acquires. So a thread that finds the bit clear also finds the bytes.
//! 3. [`PageBitmap::set`] releases too. Both calls acquire and return the old bit. So exactly one
//!    of several racing threads finds that it made the change.

use crate::sync::{AtomicU64, Ordering};
use core::fmt;
use core::ops::Range;
use pageferry_addr::RamPage;

const BITS: usize = u64::BITS as usize;

/// One bit for each page of a VM's RAM.
///
/// The bit order is that of KVM's dirty and userfault bitmaps: bit `i` of word `w` is page `64 * w
/// + i`. Bits behind the last page are always clear.
///
/// ```
/// use pageferry_addr::RamPage;
/// use pageferry_userfault::PageBitmap;
///
/// let missing = PageBitmap::new(100);
/// assert!(missing.set(RamPage(7)));        // newly set
/// assert!(!missing.set(RamPage(7)));       // it was set already
/// assert!(missing.test(RamPage(7)));
/// assert!(missing.clear(RamPage(7)));      // this call cleared it
/// assert_eq!(missing.count(), 0);
/// ```
pub struct PageBitmap {
    words: Box<[AtomicU64]>,
    pages: usize,
}

impl PageBitmap {
    /// A bitmap of `pages` pages, with all bits clear.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        Self {
            words: (0..pages.div_ceil(BITS))
                .map(|_| AtomicU64::new(0))
                .collect(),
            pages,
        }
    }

    /// The number of pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// The words, for a fast path that tests bits without a call, or for a kernel.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    #[inline]
    fn split(&self, page: RamPage) -> (&AtomicU64, u64) {
        let index = page.index();
        assert!(
            index < self.pages,
            "{page:?} is behind the {} pages",
            self.pages
        );
        (&self.words[index / BITS], 1 << (index % BITS))
    }

    /// Whether the page's bit is set. Acquires the earlier writes of the thread that changed the
    /// bit.
    ///
    /// # Panics
    /// If the page lies behind the last one. So do all calls that take a page.
    #[inline]
    #[must_use]
    pub fn test(&self, page: RamPage) -> bool {
        let (word, bit) = self.split(page);
        word.load(Ordering::Acquire) & bit != 0
    }

    /// Sets the page's bit. Returns whether this call changed it.
    #[inline]
    pub fn set(&self, page: RamPage) -> bool {
        let (word, bit) = self.split(page);
        word.fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    /// Clears the page's bit, and releases all earlier writes. Returns whether this call changed
    /// it.
    #[inline]
    pub fn clear(&self, page: RamPage) -> bool {
        let (word, bit) = self.split(page);
        word.fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }

    /// The mask of `range`'s bits in word `word`.
    fn mask(range: &Range<usize>, word: usize) -> u64 {
        let low = range.start.max(word * BITS) - word * BITS;
        let high = range.end.min((word + 1) * BITS) - word * BITS;
        let width = high - low;
        if width == BITS {
            u64::MAX
        } else {
            ((1u64 << width) - 1) << low
        }
    }

    fn words_of(&self, range: &Range<usize>) -> Range<usize> {
        assert!(
            range.start <= range.end && range.end <= self.pages,
            "pages {range:?} are not all within {} pages",
            self.pages
        );
        if range.is_empty() {
            0..0
        } else {
            range.start / BITS..range.end.div_ceil(BITS)
        }
    }

    /// Sets every bit of `range` (page indices). Returns the number of bits that were clear.
    pub fn set_range(&self, range: Range<usize>) -> usize {
        self.words_of(&range)
            .map(|w| {
                let mask = Self::mask(&range, w);
                (mask & !self.words[w].fetch_or(mask, Ordering::AcqRel)).count_ones() as usize
            })
            .sum()
    }

    /// Clears every bit of `range` (page indices) with release order. Returns the number of bits
    /// that were set.
    pub fn clear_range(&self, range: Range<usize>) -> usize {
        self.words_of(&range)
            .map(|w| {
                let mask = Self::mask(&range, w);
                (mask & self.words[w].fetch_and(!mask, Ordering::AcqRel)).count_ones() as usize
            })
            .sum()
    }

    /// The number of set bits of `range` (page indices).
    #[must_use]
    pub fn count_range(&self, range: Range<usize>) -> usize {
        self.words_of(&range)
            .map(|w| {
                (self.words[w].load(Ordering::Acquire) & Self::mask(&range, w)).count_ones()
                    as usize
            })
            .sum()
    }

    /// The number of set bits. While other threads change bits this is an estimate.
    #[must_use]
    pub fn count(&self) -> usize {
        self.words
            .iter()
            .map(|w| w.load(Ordering::Acquire).count_ones() as usize)
            .sum()
    }

    /// The first page at or behind index `from` whose bit is set.
    #[must_use]
    pub fn next_set(&self, from: usize) -> Option<usize> {
        self.scan(from, self.pages, |word| word)
    }

    /// The first page at or behind index `from` whose bit is clear.
    #[must_use]
    pub fn next_clear(&self, from: usize) -> Option<usize> {
        self.scan(from, self.pages, |word| !word)
    }

    /// The first page in `from..to` whose bit is set in `view` of its word. `to` is at most the
    /// page count.
    fn scan(&self, from: usize, to: usize, view: impl Fn(u64) -> u64) -> Option<usize> {
        if from >= to {
            return None;
        }
        let mut mask = u64::MAX << (from % BITS);
        for w in from / BITS..to.div_ceil(BITS) {
            let hits = view(self.words[w].load(Ordering::Acquire)) & mask;
            if hits != 0 {
                let index = w * BITS + hits.trailing_zeros() as usize;
                return (index < to).then_some(index);
            }
            mask = u64::MAX;
        }
        None
    }

    /// The first run of set bits at or behind `from`, at most `limit` pages long (a limit of 0
    /// counts as 1). It loads no word behind the returned run.
    ///
    /// While other threads change bits, each page of the run was set when its word was loaded.
    #[must_use]
    pub fn next_run(&self, from: usize, limit: usize) -> Option<Range<usize>> {
        let start = self.next_set(from)?;
        let cap = self.pages.min(start.saturating_add(limit.max(1)));
        Some(start..self.scan(start + 1, cap, |word| !word).unwrap_or(cap))
    }

    /// Sets the bits `bits` in word `index`. Returns those that were clear before.
    ///
    /// # Panics
    /// If the word is behind the last, or a bit names a page behind the last.
    pub fn or_word(&self, index: usize, bits: u64) -> u64 {
        self.check_tail(index, bits);
        bits & !self.words[index].fetch_or(bits, Ordering::AcqRel)
    }

    /// Takes all set bits out of word `index`.
    ///
    /// # Panics
    /// If the word is behind the last.
    pub fn take_word(&self, index: usize) -> u64 {
        self.words[index].swap(0, Ordering::AcqRel)
    }

    fn check_tail(&self, index: usize, bits: u64) {
        let left = self.pages - (index * BITS).min(self.pages);
        assert!(
            left >= BITS || bits >> left == 0,
            "word {index} with bits {bits:#x} names pages behind the last of {}",
            self.pages
        );
    }

    /// A copy of the words, for the wire.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u64> {
        self.words
            .iter()
            .map(|w| w.load(Ordering::Acquire))
            .collect()
    }
}

impl fmt::Debug for PageBitmap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "PageBitmap({} of {} pages set)",
            self.count(),
            self.pages
        )
    }
}
