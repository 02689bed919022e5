//! Hashes of the bytes that the destination holds: pre-copy without a dirty log.
//!
//! **Guarantee.** If a page's hash is that of the bytes at the source, the destination holds these
//! bytes, but for a chance of 2^-64. It checks them itself before it calls the page present. So a
//! chance match costs a connection and no page.
//!
//! **Mechanism.** A thread that sends a copy of a page in pre-copy notes the hash of that copy. It
//! owns the page by the ledger until the receipt. So the last note is about the last bytes that
//! came. Nothing is noted after the switch-over: a page that has changed is sent whole, as often as
//! it takes. The hash has a random seed, which no guest knows.
//!
//! **Why 8 bytes a page.** They are 0.2 % of the memory, and 16 would be twice that. A confirmation
//! needs a match here, and then one of the frame's checksum, which has another seed.
//!
//! **Neighbours.** `pages` and `urgent` ask it, `bulk` notes what it sends.

use crate::error::MigrationError;
use crate::sync::{AtomicU64, Ordering};
use crate::wire::{PAGE_BYTES, xxh3_64_seeded};
use pageferry_addr::RamPage;
use pageferry_transport::handshake::random_bytes;
use std::io::ErrorKind;

/// The page was never sent.
const NEVER: u64 = 0;
/// The page was sent as zero.
const ZERO: u64 = 1;
/// The least hash of bytes.
const LEAST: u64 = 2;

/// The hashes of all pages.
pub(super) struct SentHashes {
    seed: u64,
    hashes: Box<[AtomicU64]>,
}

impl SentHashes {
    /// No page was sent.
    pub(super) fn try_new(pages: usize) -> Result<Self, MigrationError> {
        let seed = random_bytes().map_err(|e| MigrationError::os("cannot make a seed", e))?;
        let mut hashes = Vec::new();
        hashes.try_reserve_exact(pages).map_err(|_| {
            MigrationError::os("no memory for hashes of pages", ErrorKind::OutOfMemory)
        })?;
        hashes.resize_with(pages, || AtomicU64::new(NEVER));
        Ok(Self {
            seed: u64::from_ne_bytes(seed),
            hashes: hashes.into(),
        })
    }

    /// The hash of a page that is zero.
    pub(super) const fn of_zero() -> u64 {
        ZERO
    }

    /// The hash of a page with these bytes, which are not all zero.
    pub(super) fn of(&self, bytes: &[u8; PAGE_BYTES]) -> u64 {
        xxh3_64_seeded(self.seed, bytes).max(LEAST)
    }

    /// Whether this is the hash of what was sent of the page.
    pub(super) fn is(&self, page: RamPage, hash: u64) -> bool {
        self.hashes[page.index()].load(Ordering::Relaxed) == hash
    }

    /// Whether bytes of the page were sent.
    pub(super) fn was_sent(&self, page: RamPage) -> bool {
        self.hashes[page.index()].load(Ordering::Relaxed) >= LEAST
    }

    /// Notes what is sent of the page. The caller has claimed it: a thread that claims it later
    /// finds this.
    pub(super) fn note(&self, page: RamPage, hash: u64) {
        self.hashes[page.index()].store(hash, Ordering::Relaxed);
    }
}
