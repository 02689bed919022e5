//! A bitmap with one bit per page. Any number of threads may read and change it at once.
//!
//! **Guarantee.** Making a bitmap writes no words. Searching and counting skip the parts that the
//! [`Summary`] calls empty. Testing a bit loads one word.
//!
//! **Mechanism.** Bits are in atomic words. A call that sets a bit tells the summary afterwards.
//! The ordering rules, for a bitmap of *missing* pages:
//! 1. A page's bytes are written before its bit is cleared, and [`PageBitmap::clear`] releases.
//! 2. [`PageBitmap::test`] acquires. So a thread that finds the bit clear also finds the bytes.
//! 3. [`PageBitmap::set`] releases too. Both calls acquire and return the old bit. So exactly one
//!    of several racing threads finds that it made the change.
//!
//! **Neighbours.** `summary` has the proof that a search misses no bit. `zeroed` makes the words.

use crate::OutOfMemory;
use crate::summary::{BLOCK, Summary};
use crate::sync::{AtomicU64, Ordering};
use crate::zeroed::zeroed;
use core::fmt;
use core::ops::Range;
use pageferry_addr::RamPage;

/// Pages of a word.
pub(crate) const BITS: usize = u64::BITS as usize;

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
    summary: Summary,
    pages: usize,
}

impl PageBitmap {
    /// A bitmap of `pages` pages, with all bits clear. It costs memory where bits are set.
    ///
    /// # Panics
    /// If the allocator refuses memory. See [`PageBitmap::try_new`].
    #[must_use]
    pub fn new(pages: usize) -> Self {
        match Self::try_new(pages) {
            Ok(bitmap) => bitmap,
            Err(error) => panic!("no bitmap of {pages} pages: {error}"),
        }
    }

    /// A bitmap of `pages` pages, with all bits clear. It costs memory where bits are set.
    ///
    /// ```
    /// use pageferry_userfault::PageBitmap;
    ///
    /// let of_12_tib = PageBitmap::try_new((12 << 40) / 4096)?;
    /// assert_eq!(of_12_tib.next_set(0), None);
    /// assert!(PageBitmap::try_new(usize::MAX).is_err());
    /// # Ok::<(), pageferry_userfault::OutOfMemory>(())
    /// ```
    ///
    /// # Errors
    /// If the allocator refuses memory.
    pub fn try_new(pages: usize) -> Result<Self, OutOfMemory> {
        let words = zeroed(pages.div_ceil(BITS))?;
        Ok(Self {
            summary: Summary::try_new(words.len())?,
            words,
            pages,
        })
    }

    /// The number of pages.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Word `index`, loaded with acquire order.
    ///
    /// # Panics
    /// If the word is behind the last.
    #[inline]
    #[must_use]
    pub fn word(&self, index: usize) -> u64 {
        self.words[index].load(Ordering::Acquire)
    }

    /// The address of the bits from page `first` on, for a kernel that reads them.
    ///
    /// KVM takes it as the userfault bitmap of a slot whose first page is `first`: bit `i` of word
    /// `w` is page `first + 64 * w + i`. The words stay in place as long as the bitmap lives. Only
    /// the bitmap's methods may write them, because searches rely on a summary.
    ///
    /// ```
    /// use pageferry_addr::RamPage;
    /// use pageferry_userfault::PageBitmap;
    ///
    /// let missing = PageBitmap::new(1000);
    /// let of_slot = missing.address_from(RamPage(128)).unwrap();
    /// assert_eq!(of_slot.addr() - missing.address_from(RamPage(0)).unwrap().addr(), 2 * 8);
    /// assert_eq!(missing.address_from(RamPage(100)), None);
    /// ```
    ///
    /// # Errors
    /// `None` if `first` is not a multiple of 64, or lies behind the end of the bitmap.
    #[must_use]
    pub fn address_from(&self, first: RamPage) -> Option<*const u64> {
        let index = first.index();
        let aligned = index.is_multiple_of(BITS).then_some(index / BITS)?;
        self.words.get(aligned..).map(|words| words.as_ptr().cast())
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
        let old = word.fetch_or(bit, Ordering::AcqRel);
        self.summary.occupy(page.index() / BITS);
        old & bit == 0
    }

    /// Clears the page's bit, and releases all earlier writes. Returns whether this call changed
    /// it.
    #[inline]
    pub fn clear(&self, page: RamPage) -> bool {
        let (word, bit) = self.split(page);
        word.fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }

    /// The mask of `range`'s bits in word `word`, which has some.
    fn mask(range: &Range<usize>, word: usize) -> u64 {
        let low = range.start.max(word * BITS) - word * BITS;
        let high = range.end.min((word + 1) * BITS) - word * BITS;
        u64::MAX >> (BITS - (high - low)) << low
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

    /// The words that have bits of `range` (page indices), each with the mask of these bits.
    pub(crate) fn masks(&self, range: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
        self.words_of(&range)
            .map(move |word| (word, Self::mask(&range, word)))
    }

    /// Sets every bit of `range` (page indices). Returns the number of bits that were clear.
    pub fn set_range(&self, range: Range<usize>) -> usize {
        self.masks(range)
            .map(|(word, mask)| self.or_word(word, mask).count_ones() as usize)
            .sum()
    }

    /// Clears every bit of `range` (page indices) with release order. Returns the number of bits
    /// that were set.
    pub fn clear_range(&self, range: Range<usize>) -> usize {
        self.masks(range)
            .map(|(word, mask)| self.take_word(word, mask).count_ones() as usize)
            .sum()
    }

    /// The number of set bits of `range` (page indices). While other threads change bits this is an
    /// estimate.
    #[must_use]
    pub fn count_range(&self, range: Range<usize>) -> usize {
        self.summary
            .occupied(self.words_of(&range))
            .flatten()
            .map(|word| (self.word(word) & Self::mask(&range, word)).count_ones() as usize)
            .sum()
    }

    /// The number of set bits. While other threads change bits this is an estimate.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count_range(0..self.pages)
    }

    /// The first page at or behind index `from` whose bit is set. It skips blocks of 256 Ki pages
    /// that an earlier search found empty, by one load each.
    #[must_use]
    pub fn next_set(&self, from: usize) -> Option<usize> {
        let pages = from.min(self.pages)..self.pages;
        for words in self.summary.occupied(self.words_of(&pages)) {
            let first = words.start * BITS;
            let found = self.scan(first.max(from), pages.end.min(words.end * BITS), |word| {
                word
            });
            if found.is_some() {
                return found;
            }
            if words.start.is_multiple_of(BLOCK) && from <= first {
                self.summary.check(words.start / BLOCK, &self.words);
            }
        }
        None
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
        let word = &self.words[index];
        if bits == 0 {
            // This spares the summary, and memory that was never written.
            return 0;
        }
        let old = word.fetch_or(bits, Ordering::AcqRel);
        self.summary.occupy(index);
        bits & !old
    }

    /// Clears the bits `bits` in word `index`, and releases all earlier writes. Returns those that
    /// were set before.
    ///
    /// # Panics
    /// If the word is behind the last.
    pub fn take_word(&self, index: usize, bits: u64) -> u64 {
        bits & self.words[index].fetch_and(!bits, Ordering::AcqRel)
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_search_behind_the_last_clear_makes_all_blocks_empty() {
        let pages = 2 * BLOCK * BITS + 1;
        let map = PageBitmap::new(pages);
        let occupied = || map.summary.occupied(0..map.words.len()).count();
        map.or_word(0, 0);
        assert_eq!(occupied(), 0);
        map.set_range(0..pages);
        map.clear_range(1..pages);
        assert_eq!(
            (map.next_set(0), map.next_set(1), occupied()),
            (Some(0), None, 1)
        );
        assert!(map.clear(RamPage(0)) && map.next_set(1).is_none());
        assert_eq!(
            occupied(),
            1,
            "a search of a part of a block does not check it"
        );
        assert_eq!((map.next_set(0), occupied()), (None, 0));
        assert!(map.set(RamPage(9)));
        assert_eq!((map.next_set(0), occupied()), (Some(9), 1));
    }
}
