//! Exact LR/SC between the harts of a VM.
//!
//! An SC fails if another hart stored to the reserved bytes since its LR, even if the bytes have
//! their old value again.
//!
//! **Why a comparison is not enough.** Over a word that holds A, another hart may store B and then
//! A again. An SC that is a compare-exchange would succeed after that. The manual (volume I,
//! "Load-Reserved/Store-Conditional Instructions") forbids it: an SC may succeed only if no store
//! from another hart to the reservation set can be observed between the LR and the SC. The pop of a
//! linked stack, for example, depends on it.
//!
//! **Guarantee.** Take [`Reservations::load_reserved`] and a [`Reservations::store_conditional`]
//! that returns true. Between them, no hart called [`Reservations::write`] for the aligned 8 bytes
//! around. All stores and AMOs to a page with reservations come through `write`, if the bus keeps
//! the rules below.
//!
//! **Mechanism.** Ordinary stores must cost nothing. So the first LR in a page makes it *watched*.
//! A store to a watched page never hits in a TLB: it takes the miss path, which calls `write`.
//!
//! Each aligned 8 bytes have a word with a lock bit and a count of writes. Hashing makes several of
//! them share a word. An LR reads the count, then loads. An SC takes the lock, and stores if the
//! count is still the same. A shared word can make an SC fail without need, which the manual
//! allows.
//!
//! **Rules for the bus.** Addresses here are host addresses, so that all harts use the same address
//! for the same memory.
//! 1. The bus fills a TLB entry for writing only if [`Reservations::is_announced`] is false for its
//!    page.
//! 2. An access that writes and finds no TLB entry for writing always goes through `write`.
//! 3. An LR in a page for which [`Reservations::is_watched`] is false leaves the guest
//!    ([`super::BusFault::Requested`]). Outside, its vCPU calls [`Reservations::announce`]. It
//!    makes every vCPU of the VM drop *all* TLB entries for writing, and waits until each has done
//!    so. Then it calls [`Reservations::confirm`] and enters again.
//!
//! Why the rules suffice:
//! 1. A hart that fills an entry before it sees the page announced does so before it takes the
//!    request to drop entries.
//! 2. The stores of that hart through that entry happen before `confirm`.
//! 3. So once an LR sees the page watched, every store goes through `write`.
//!
//! Both sets are hashed, so an alias makes another page watched as well.
//!
//! **The sets shrink.** Stores to watched pages are slow, so a page must not stay watched for ever.
//! A thread empties both sets at once:
//! 1. It calls [`Reservations::begin_unwatch`], after which no page is watched. LRs leave the
//!    guest, and SCs fail.
//! 2. It makes every vCPU drop its TLB entries for writing, and waits until each has left its guest
//!    once. So all LRs and SCs that found their page watched are over.
//! 3. It calls [`Reservations::finish_unwatch`]. That counts a write to every word, which ends all
//!    reservations. Then no page is announced, and stores are fast again.
//!
//! One thread at a time announces or unwatches. No SC succeeds over a store that step 3 made fast:
//! 1. An SC that found its page watched before step 1 is over before step 3.
//! 2. A later SC finds its page watched only after a new announcement. Its reservation is from
//!    before step 3, and fails by the count, or from after the announcement.
//!
//! A vCPU decides to unwatch when it has made 2^18 slow stores since the last time. They
//! cost as much as the exits by which the pages in use become watched again.
//!
//! **A VM of one vCPU** watches no page. Only the VMM's stores can end a reservation, and they all
//! call `write`. One word has the lock and the count for all addresses.
//!
//! **By value.** With [`LrSc::ByValue`], an SC is a compare-exchange, and no page is watched. The
//! guarantee above does not hold: an SC succeeds after stores that restored the value.
//!
//! **Stores of the VMM** go through [`Vm::stores`](crate::Vm::stores), which calls `write` too. The
//! thread of rule 3 also waits, before it confirms, for those that found the page not announced.

use super::bus::Reserved;
use super::int::{AmoInt, AmoOp};
use super::sync::{AtomicU64, Ordering};
use pageferry_addr::PAGE_SHIFT;

/// The number of bits in a set of pages: two pages share a bit with probability 1/4096.
const PAGE_BITS: usize = 4096;
/// The number of words with a lock and a count.
const WORDS: usize = 1024;

const LOCKED: u64 = 1;
/// One write, in the count above the lock bit.
const WRITE: u64 = 2;

/// The number of polls of a locked word before a thread yields its CPU.
const SPINS: u32 = 100;

/// The rule by which an SC finds that nobody else stored to its bytes since the LR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum LrSc {
    /// It finds every store, as the manual demands (volume I, "Load-Reserved/Store-Conditional
    /// Instructions").
    #[default]
    Exact,
    /// It compares the bytes with those that the LR loaded, as QEMU's emulation does. Stores that
    /// restored the bytes are not found. Guests that use LR and SC for a compare-exchange, such as
    /// Linux, cannot tell the difference. A linked stack whose pop relies on SC can lose an
    /// element.
    ///
    /// A VM of several vCPUs is faster with it: see `docs/decisions/hypervisor.md`.
    ByValue,
}

/// How an SC learns of the stores since its LR.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StoresSeen {
    /// Its page is watched.
    Watched,
    /// Only the VMM stores beside the one vCPU.
    Alone,
    /// It does not: it compares the value.
    Value,
}

/// The reservations of one VM. About 9 KiB.
pub struct Reservations {
    way: StoresSeen,
    announced: [AtomicU64; PAGE_BITS / 64],
    watched: [AtomicU64; PAGE_BITS / 64],
    words: [AtomicU64; WORDS],
    unwatched: AtomicU64,
}

impl Default for Reservations {
    fn default() -> Self {
        Self::new()
    }
}

impl core::fmt::Debug for Reservations {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Reservations")
            .field("watched", &self.watched())
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

impl Reservations {
    /// Makes an exact set, for any number of harts, in which no page is watched.
    #[must_use]
    pub const fn new() -> Self {
        Self::of(LrSc::Exact, u32::MAX)
    }

    /// Makes the set of a VM with at most `vcpus` vCPUs.
    #[must_use]
    pub const fn of(lr_sc: LrSc, vcpus: u32) -> Self {
        Self {
            way: match (lr_sc, vcpus) {
                (LrSc::ByValue, _) => StoresSeen::Value,
                (LrSc::Exact, 0 | 1) => StoresSeen::Alone,
                (LrSc::Exact, _) => StoresSeen::Watched,
            },
            announced: [const { AtomicU64::new(0) }; PAGE_BITS / 64],
            watched: [const { AtomicU64::new(0) }; PAGE_BITS / 64],
            words: [const { AtomicU64::new(0) }; WORDS],
            unwatched: AtomicU64::new(0),
        }
    }

    /// The index of the word for the 8 bytes around `address`.
    fn index(&self, address: u64) -> usize {
        match self.way {
            StoresSeen::Alone => 0,
            _ => hash(address >> 3, WORDS.ilog2()),
        }
    }

    /// The number of pages that are watched, without aliases.
    #[must_use]
    pub fn watched(&self) -> u32 {
        let bits = |word: &AtomicU64| word.load(Ordering::Relaxed).count_ones();
        self.watched.iter().map(bits).sum()
    }

    /// The number of times that [`Reservations::finish_unwatch`] was called.
    #[must_use]
    pub fn unwatched(&self) -> u64 {
        self.unwatched.load(Ordering::Relaxed)
    }

    /// Whether no TLB entry for writing may be made for the page of `address`.
    #[must_use]
    pub fn is_announced(&self, address: u64) -> bool {
        let (index, bit) = page_bit(address);
        self.announced[index].load(Ordering::Relaxed) & bit != 0
    }

    /// Whether there may be reservations in the page of `address`. Where no page is watched, they
    /// may be in all.
    #[must_use]
    pub fn is_watched(&self, address: u64) -> bool {
        if self.way != StoresSeen::Watched {
            return true;
        }
        let (index, bit) = page_bit(address);
        self.watched[index].load(Ordering::Acquire) & bit != 0
    }

    /// Forbids new TLB entries for writing the page of `address`. The caller then does the rest of
    /// rule 3.
    pub fn announce(&self, address: u64) {
        let (index, bit) = page_bit(address);
        self.announced[index].fetch_or(bit, Ordering::AcqRel);
    }

    /// Allows reservations in the page of `address`. No TLB may have an entry for writing it.
    pub fn confirm(&self, address: u64) {
        let (index, bit) = page_bit(address);
        self.watched[index].fetch_or(bit, Ordering::AcqRel);
    }

    /// Makes no page watched. The caller then does the rest of the protocol above.
    pub fn begin_unwatch(&self) {
        for bits in &self.watched {
            bits.store(0, Ordering::Release);
        }
    }

    /// Ends all reservations, and makes no page announced. Every vCPU has left its guest since
    /// [`Reservations::begin_unwatch`].
    pub fn finish_unwatch(&self) {
        for index in 0..WORDS {
            let word = self.lock(index);
            self.words[index].store(word.wrapping_add(WRITE), Ordering::Release);
        }
        for bits in &self.announced {
            bits.store(0, Ordering::Release);
        }
        self.unwatched.fetch_add(1, Ordering::Relaxed);
    }

    /// LR: loads from `cell`, which is at `address`. The bus has found its page watched.
    ///
    /// Another thread may have begun to unwatch since then. It waits for this LR, and then ends its
    /// reservation.
    pub fn load_reserved<T: AmoInt>(&self, address: u64, cell: &T::Atomic) -> Reserved<T> {
        let word = &self.words[self.index(address)];
        // The count comes before the value, so that a write in between only makes the SC fail.
        // Acquire keeps the load of the value behind it.
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
            place: address,
        }
    }

    /// SC: stores `value` to `cell`, which is at `address`, unless a hart wrote there since
    /// `reserved`, `reserved` is of another address, or the page is no longer watched. By value: if
    /// `cell` has the value of `reserved`, which must be of this address. Returns whether it
    /// stored.
    pub fn store_conditional<T: AmoInt>(
        &self,
        address: u64,
        cell: &T::Atomic,
        reserved: Reserved<T>,
        value: T,
    ) -> bool {
        if self.way == StoresSeen::Value {
            return reserved.place == address && T::compare_exchange(cell, reserved.value, value);
        }
        let word = &self.words[self.index(address)];
        // The exchange expects the count that the LR saw. It fails if a hart wrote or is writing.
        let locked = reserved.version | LOCKED;
        let unchanged = reserved.place == address
            && self.is_watched(address)
            && word
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

    /// Calls `write`, which stores to the `size` bytes (1 to 8) at `address`, and ends reservations
    /// there. If the page is not announced, there are none to end, but for the one vCPU's.
    pub fn write<R>(&self, address: u64, size: u64, write: impl FnOnce() -> R) -> R {
        let last = address.wrapping_add(size.saturating_sub(1));
        let ends = match self.way {
            StoresSeen::Watched => self.is_announced(address) || self.is_announced(last),
            StoresSeen::Alone => true,
            StoresSeen::Value => false,
        };
        if !ends {
            return write();
        }
        // A misaligned store may need two words. Locking them in index order avoids a deadlock of
        // two stores.
        let (a, b) = (self.index(address), self.index(last));
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

    /// Locks word `index`. Returns its value without the lock bit.
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

/// Waits a little for a lock. Its holder needs a few instructions only, unless its thread is
/// descheduled.
fn pause(spins: &mut u32) {
    if *spins < SPINS {
        *spins += 1;
        core::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}
