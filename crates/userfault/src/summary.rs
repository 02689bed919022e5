//! The summary of a bitmap: the blocks of words that may have set bits.
//!
//! **Guarantee.** A block that the summary calls empty has no set bit, apart from bits whose set is
//! still in progress. A thread that finds a block empty also finds everything that happened before
//! its bits were cleared. The summary may call a block occupied that is empty.
//!
//! **Mechanism.** Each block of [`BLOCK`] words has a state: two flags, and the number of *checks*
//! in the bits above. A block is empty if both flags are clear. Clearing bits never touches the
//! state. A search that finds no bit in an occupied block checks the block, and so makes it empty.
//!
//! ```text
//! set:  s1  set the bit in its word              check:  c1  OCCUPIED -> CHECKING, count the check
//!       s2  load the state: OCCUPIED -> done             c2  load each word by a read-modify-write
//!       s3  set OCCUPIED                                 c3  all are 0: exactly the state of c1
//!                                                            -> empty; else set OCCUPIED
//! ```
//!
//! **Why this suffices.** All changes of words and states are read-modify-writes. s1 and c2 acquire
//! and release. c1, c3 and s3 change the same state, so they are in one total order.
//!
//! 1. Suppose that c3 makes a block empty. The count makes the state of c1 unique. So no change of
//!    the state lies between c1 and c3.
//! 2. Take any s1 in this block, and the c2 of its word. If s1 comes before c2, then c2 found the
//!    word 0. So the bit was cleared in between, and the block may be called empty.
//! 3. If s1 comes behind c2, then s1 synchronizes with c2. So c1 happens before s2. By (1), s2
//!    finds the state of c1, that of c3, or a later one. If it is not OCCUPIED, s3 follows. By (1)
//!    again, s3 comes behind c3.
//! 4. So the set has found or made an OCCUPIED state that comes behind c3 in the total order. A
//!    thread that knows of the set does not find the older empty state.
//! 5. c3 releases, and follows c2, which acquires. A thread that loads the empty state (acquire)
//!    finds everything from before the clearing. A block that was always empty has had no bits.
//!
//! s2, s3 and c1 are relaxed: (3) needs only the order of changes of one state, and c1 comes before
//! c2 in its thread. A plain load in c2 would not do: s1 and c2 could then miss each other.

use crate::sync::{AtomicU64, Ordering};
use crate::zeroed::zeroed;
use core::ops::Range;
use pageferry_epoch::OutOfMemory;

/// The words of a block, which stand for 1 GiB of a guest.
pub(crate) const BLOCK: usize = 4096;

/// A bit of the block may be set.
const OCCUPIED: u64 = 1;
/// A thread checks whether all bits of the block are clear.
const CHECKING: u64 = 2;
const FLAGS: u64 = OCCUPIED | CHECKING;
/// One check, in the count of checks.
const ONE_CHECK: u64 = 4;

/// The states of all blocks.
pub(crate) struct Summary(Box<[AtomicU64]>);

impl Summary {
    /// The summary of `words` words, all of them 0.
    pub(crate) fn try_new(words: usize) -> Result<Self, OutOfMemory> {
        zeroed(words.div_ceil(BLOCK)).map(Self)
    }

    /// Marks the block of `word` as occupied. The caller has just set a bit of the word.
    #[inline]
    pub(crate) fn occupy(&self, word: usize) {
        let state = &self.0[word / BLOCK];
        // The state is usually set already. Then its cache line stays shared.
        if state.load(Ordering::Relaxed) & OCCUPIED == 0 {
            state.fetch_or(OCCUPIED, Ordering::Relaxed);
        }
    }

    /// The parts of `words` in blocks that may have set bits, in ascending order.
    pub(crate) fn occupied(&self, words: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let blocks = words.start / BLOCK..words.end.div_ceil(BLOCK);
        self.0[blocks.clone()]
            .iter()
            .zip(blocks)
            .filter(|(state, _)| state.load(Ordering::Acquire) & FLAGS != 0)
            .map(move |(_, block)| {
                let (first, end) = (block * BLOCK, (block + 1) * BLOCK);
                first.max(words.start)..end.min(words.end)
            })
    }

    /// Makes `block` empty if all its words are 0. `words` are the words of the whole bitmap.
    #[cold]
    pub(crate) fn check(&self, block: usize, words: &[AtomicU64]) {
        let state = &self.0[block];
        let old = state.load(Ordering::Relaxed);
        let begun = (old & !FLAGS) + ONE_CHECK + CHECKING;
        // A thread that fails here has met another check or a set.
        if old & OCCUPIED == 0
            || state
                .compare_exchange(old, begun, Ordering::Relaxed, Ordering::Relaxed)
                .is_err()
        {
            return;
        }
        let words = &words[block * BLOCK..words.len().min((block + 1) * BLOCK)];
        if words.iter().all(|w| w.fetch_or(0, Ordering::AcqRel) == 0) {
            // If this fails, a bit was set meanwhile.
            let empty = begun & !FLAGS;
            let _ = state.compare_exchange(begun, empty, Ordering::Release, Ordering::Relaxed);
        } else {
            state.fetch_or(OCCUPIED, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_search_makes_an_emptied_block_empty_and_a_set_makes_it_occupied() {
        let words = zeroed(3 * BLOCK - 1).unwrap();
        let summary = Summary::try_new(words.len()).unwrap();
        let parts = || summary.occupied(5..words.len());
        let occupied = || -> Vec<_> { parts().map(|part| (part.start, part.end)).collect() };
        assert_eq!(occupied(), []);
        summary.occupy(0);
        summary.occupy(words.len() - 1);
        assert_eq!(occupied(), [(5, BLOCK), (2 * BLOCK, words.len())]);
        words[BLOCK - 1].store(1, Ordering::Relaxed);
        (0..3).for_each(|block| summary.check(block, &words));
        assert_eq!(occupied(), [(5, BLOCK)]);
        words[BLOCK - 1].store(0, Ordering::Relaxed);
        summary.check(0, &words);
        assert_eq!(occupied(), []);
        summary.occupy(0);
        assert_eq!(occupied(), [(5, BLOCK)]);
    }
}
