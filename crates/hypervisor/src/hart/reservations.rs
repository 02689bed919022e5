//! LR/SC between the harts of a VM, exactly: an SC fails if anybody stored to the reserved bytes
//! since its LR, even if the bytes are again what they were.
//!
//! **Why a comparison is not enough.** An SC made of a compare-exchange succeeds after another
//! hart's stores B, A over an A. The manual (volume I, "Load-Reserved/Store-Conditional
//! Instructions") forbids that: an SC may succeed only if no store from another hart to the
//! reservation set can be observed between the LR and the SC. Code like the pop of a linked stack
//! rests on it.
//!
//! **Guarantee.** Between [`Reservations::load_reserved`] and a [`Reservations::store_conditional`]
//! that returns true there was no [`Reservations::write`] to the aligned 8 bytes around, by any
//! hart. All stores and AMOs to a page with reservations come through `write`, if the users keep
//! the rules below.
//!
//! **Mechanism.** Ordinary stores must cost nothing. So pages are *watched* from the first LR in
//! them on, and a TLB never lets a store to a watched page hit: it takes the miss path, which calls
//! `write`. There each aligned 8 bytes have a word (shared with others by hash) with a lock bit and
//! a count of writes. An LR notes the count, then loads; an SC takes the lock, and stores if the
//! count is still the same. Sharing a word makes an SC fail without need, which the manual allows.
//!
//! **Rules for the bus.** An address here is the same for all who reach the same memory: the
//! host's.
//! 1. A TLB entry for writing is filled only if [`Reservations::is_announced`] is false for its
//!    page.
//! 2. An access that writes and misses goes through `write`, always.
//! 3. An LR in a page that is not [`Reservations::is_watched`] leaves the guest
//!    ([`super::BusFault::Requested`]). Outside, its vCPU calls [`Reservations::announce`], makes
//!    every vCPU of the VM drop *all* TLB entries for writing, waits until each has, and calls
//!    [`Reservations::confirm`]. Then it enters again.
//!
//! Why they suffice: a fill that saw the page not announced was made before its hart took the
//! request to drop entries, and what that hart stored through it happens before `confirm`; so once
//! an LR sees the page watched, nobody stores past `write`. Both sets only grow; an alias in them
//! (they are hashed) watches a page too many.
//!
//! **Not seen** are stores by the VMM's threads, unless they go through `write` as well.

use super::bus::Reserved;
use super::int::{AmoInt, AmoOp};
use super::sync::{AtomicU64, Ordering};
use pageferry_addr::PAGE_SHIFT;

/// Bits in a set of pages: a page falls together with one in 4096.
const PAGE_BITS: usize = 4096;
/// Words with a lock and a count.
const WORDS: usize = 1024;

const LOCKED: u64 = 1;
/// One write, in the count above the lock bit.
const WRITE: u64 = 2;

/// How often a locked word is looked at before the thread gives up its processor.
const SPINS: u32 = 100;

/// The reservations of one VM. About 9 KiB.
pub struct Reservations {
    announced: [AtomicU64; PAGE_BITS / 64],
    watched: [AtomicU64; PAGE_BITS / 64],
    words: [AtomicU64; WORDS],
}

impl Default for Reservations {
    fn default() -> Self {
        Self::new()
    }
}

impl core::fmt::Debug for Reservations {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let watched: u32 = self
            .watched
            .iter()
            .map(|bits| bits.load(Ordering::Relaxed).count_ones())
            .sum();
        f.debug_struct("Reservations")
            .field("watched", &watched)
            .finish_non_exhaustive()
    }
}

/// The top `bits` bits of Fibonacci hashing.
const fn hash(value: u64, bits: u32) -> usize {
    (value.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - bits)) as usize
}

const fn page_bit(address: u64) -> (usize, u64) {
    let bit = hash(address >> PAGE_SHIFT, PAGE_BITS.ilog2());
    (bit / 64, 1 << (bit % 64))
}

const fn word_index(address: u64) -> usize {
    hash(address >> 3, WORDS.ilog2())
}

impl Reservations {
    /// No page is watched.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            announced: [const { AtomicU64::new(0) }; PAGE_BITS / 64],
            watched: [const { AtomicU64::new(0) }; PAGE_BITS / 64],
            words: [const { AtomicU64::new(0) }; WORDS],
        }
    }

    /// Whether no TLB entry for writing may be made for the page of `address`.
    #[must_use]
    pub fn is_announced(&self, address: u64) -> bool {
        let (index, bit) = page_bit(address);
        self.announced[index].load(Ordering::Relaxed) & bit != 0
    }

    /// Whether there may be reservations in the page of `address`.
    #[must_use]
    pub fn is_watched(&self, address: u64) -> bool {
        let (index, bit) = page_bit(address);
        self.watched[index].load(Ordering::Acquire) & bit != 0
    }

    /// From now on no TLB entry for writing is made for the page of `address`. Rule 3 says what has
    /// to follow.
    pub fn announce(&self, address: u64) {
        let (index, bit) = page_bit(address);
        self.announced[index].fetch_or(bit, Ordering::AcqRel);
    }

    /// No TLB has an entry for writing the page of `address`: there may be reservations in it.
    pub fn confirm(&self, address: u64) {
        let (index, bit) = page_bit(address);
        self.watched[index].fetch_or(bit, Ordering::AcqRel);
    }

    /// LR: loads from `cell`, which is at `address`, in a watched page.
    pub fn load_reserved<T: AmoInt>(&self, address: u64, cell: &T::Atomic) -> Reserved<T> {
        debug_assert!(
            self.is_watched(address),
            "an LR at {address:#x} in a page that is not watched"
        );
        let word = &self.words[word_index(address)];
        // The count before the value: a write in between only makes the SC fail. Acquire, and the
        // load itself is ordered: it does not move up.
        let mut spins = 0;
        let version = loop {
            let version = word.load(Ordering::Acquire);
            if version & LOCKED == 0 {
                break version;
            }
            pause(&mut spins);
        };
        Reserved {
            value: T::load_ordered(cell),
            version,
        }
    }

    /// SC: stores `value` to `cell`, which is at `address`, unless somebody wrote there since
    /// `reserved`.
    pub fn store_conditional<T: AmoInt>(
        &self,
        address: u64,
        cell: &T::Atomic,
        reserved: Reserved<T>,
        value: T,
    ) -> bool {
        let word = &self.words[word_index(address)];
        // Only from the count the LR saw to locked: if it fails, somebody wrote or is writing.
        let locked = reserved.version | LOCKED;
        let unchanged = word
            .compare_exchange(
                reserved.version,
                locked,
                Ordering::SeqCst,
                Ordering::Relaxed,
            )
            .is_ok();
        if unchanged {
            T::amo(cell, AmoOp::Swap, value);
            word.store(reserved.version.wrapping_add(WRITE), Ordering::Release);
        }
        unchanged
    }

    /// Calls `write`, which stores to the `size` bytes (1 to 8) at `address`, so that reservations
    /// there end. If the page is not announced, it only calls it.
    pub fn write<R>(&self, address: u64, size: u64, write: impl FnOnce() -> R) -> R {
        let last = address.wrapping_add(size.saturating_sub(1));
        if !self.is_announced(address) && !self.is_announced(last) {
            return write();
        }
        // A misaligned store may touch two words; in the order of their places, so that two stores
        // cannot each wait for the other.
        let (a, b) = (word_index(address), word_index(last));
        let (first, second) = (a.min(b), a.max(b));
        let first_word = self.lock(first);
        let second_word = (second != first).then(|| self.lock(second));
        let result = write();
        if let Some(before) = second_word {
            self.words[second].store(before.wrapping_add(WRITE), Ordering::Release);
        }
        self.words[first].store(first_word.wrapping_add(WRITE), Ordering::Release);
        result
    }

    /// Locks word `index`. Returns its count.
    fn lock(&self, index: usize) -> u64 {
        let word = &self.words[index];
        let mut spins = 0;
        loop {
            let seen = word.load(Ordering::Relaxed);
            if seen & LOCKED == 0
                && word
                    .compare_exchange_weak(
                        seen,
                        seen | LOCKED,
                        Ordering::Acquire,
                        Ordering::Relaxed,
                    )
                    .is_ok()
            {
                return seen;
            }
            pause(&mut spins);
        }
    }
}

/// Waits a little for a lock that is held for a few instructions, unless its holder's thread is off
/// its processor.
fn pause(spins: &mut u32) {
    if *spins < SPINS {
        *spins += 1;
        core::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}
