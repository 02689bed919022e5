//! A table of the threads that sleep until a page arrives.
//!
//! **Guarantee.** A thread announces its page, then finds the page still missing, then sleeps. The
//! arrival of the page wakes it. While no thread sleeps, an arrival costs one fence and one load.
//!
//! **Mechanism.** Store buffering, with a full fence on both sides.
//!
//! | the sleeper | the thread that brings the page |
//! |---|---|
//! | 1. writes its page into its slot, and counts itself | a. clears the missing bit |
//! | 2. fence | b. fence |
//! | 3. tests the missing bit | c. reads the count and, if it is not zero, the slots |
//! | 4. sleeps | |
//!
//! Either (3) sees (a), and the sleeper does not sleep. Or (c) sees (1), and the other thread wakes
//! it. With the two fences, they cannot both miss the other. A loom model checks this: it deadlocks
//! without either fence.
//!
//! The caller does the sleeping and the waking. A wake-up may come before the sleep, so it must
//! persist (`Thread::unpark`, an eventfd).

use crate::sync::{AtomicU64, AtomicUsize, Ordering, fence};
use std::ops::Range;

/// The slot of a thread that waits for nothing.
const NOBODY: u64 = u64::MAX;

/// One slot for each thread that may sleep.
#[derive(Debug)]
pub struct Waiters {
    sleepers: AtomicUsize,
    slots: Box<[AtomicU64]>,
}

impl Waiters {
    /// A table of `slots` slots without sleepers.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        Self {
            sleepers: AtomicUsize::new(0),
            slots: (0..slots).map(|_| AtomicU64::new(NOBODY)).collect(),
        }
    }

    /// Announces that the owner of `slot` is about to sleep until `page` arrives. The owner must
    /// test the page's missing bit after this call and before it sleeps, and call
    /// [`Waiters::withdraw`] afterwards.
    pub fn announce(&self, slot: usize, page: u64) {
        self.slots[slot].store(page, Ordering::Relaxed);
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Ends the announcement of the owner of `slot`.
    pub fn withdraw(&self, slot: usize) {
        self.slots[slot].store(NOBODY, Ordering::Relaxed);
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Calls `wake` with each slot whose owner may sleep until one of `pages` arrives. The caller
    /// must have cleared the pages' missing bits.
    pub fn arrived(&self, pages: Range<u64>, wake: impl FnMut(usize)) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            self.asleep()
                .filter(|(_, page)| pages.contains(page))
                .map(|(slot, _)| slot)
                .for_each(wake);
        }
    }

    /// The slots whose owners may sleep now, with their pages.
    pub fn asleep(&self) -> impl Iterator<Item = (usize, u64)> {
        self.slots
            .iter()
            .enumerate()
            .map(|(slot, page)| (slot, page.load(Ordering::Relaxed)))
            .filter(|(_, page)| *page != NOBODY)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn woken(waiters: &Waiters, pages: Range<u64>) -> Vec<usize> {
        let mut slots = Vec::new();
        waiters.arrived(pages, |slot| slots.push(slot));
        slots
    }

    #[test]
    fn only_those_who_wait_for_an_arrived_page_are_woken() {
        let waiters = Waiters::new(4);
        assert_eq!(woken(&waiters, 0..100), []);
        waiters.announce(1, 7);
        waiters.announce(3, 9);
        assert_eq!(woken(&waiters, 0..7), []);
        assert_eq!(woken(&waiters, 7..8), [1]);
        assert_eq!(woken(&waiters, 0..100), [1, 3]);
        waiters.withdraw(1);
        assert_eq!(woken(&waiters, 0..100), [3]);
    }
}
