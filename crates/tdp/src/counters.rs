//! The one function that changes a leaf, and the counts it keeps.
//!
//! **Guarantee.** Every change of a leaf is counted exactly once; while no change is in flight the counts
//! are exact.
//!
//! **Mechanism.** Counts are kept in stripes on cache lines of their own, chosen by the level-1 table that
//! is changed, so that vCPUs that fault in different places seldom write the same line. A [`Tally`] collects
//! the changes in one table and adds them to its stripe once.
//!
//! **Neighbours.** `stage_two` and `range` change leaves through [`Tally::change`] and nothing else.

use crate::format::{Entry, Sv48x4};
use crate::sync::{AtomicU64, Ordering};
use alloc::vec::Vec;
use pageferry_addr::Gfn;

/// log2 of the number of stripes; a model has one.
const STRIPE_BITS: u32 = if cfg!(loom) { 0 } else { 5 };

/// Counts on a pair of cache lines of their own (adjacent lines are fetched together on x86-64).
#[repr(align(128))]
struct Stripe {
    mapped: AtomicU64,
    writable: AtomicU64,
}

pub(crate) struct Counters {
    stripes: Vec<Stripe>,
}

impl Counters {
    pub(crate) fn new() -> Self {
        let stripe = |_| Stripe {
            mapped: AtomicU64::new(0),
            writable: AtomicU64::new(0),
        };
        Self {
            stripes: (0..1 << STRIPE_BITS).map(stripe).collect(),
        }
    }

    /// The tally for changes in the level-1 table of `gfn`.
    #[inline]
    pub(crate) fn tally(&self, gfn: Gfn) -> Tally<'_> {
        // Fibonacci hashing, since partitions of a guest's memory lie powers of two apart and would
        // meet in one stripe all the time by a plain remainder.
        let table = gfn.0 >> Sv48x4::INDEX_BITS;
        let hash = table.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let stripe = (hash >> (32 - STRIPE_BITS)) as usize;
        Tally {
            stripe: &self.stripes[stripe],
            mapped: 0,
            writable: 0,
        }
    }

    pub(crate) fn mapped(&self) -> u64 {
        self.sum(|stripe| &stripe.mapped)
    }

    pub(crate) fn writable(&self) -> u64 {
        self.sum(|stripe| &stripe.writable)
    }

    fn sum(&self, count: impl Fn(&Stripe) -> &AtomicU64) -> u64 {
        let total = self.stripes.iter().fold(0u64, |sum, stripe| {
            sum.wrapping_add(count(stripe).load(Ordering::Relaxed))
        });
        // A removal may be counted before the installation it undid: below zero for a moment.
        if total > i64::MAX as u64 { 0 } else { total }
    }
}

/// Changes of leaves in one level-1 table, counted when this is dropped.
pub(crate) struct Tally<'c> {
    stripe: &'c Stripe,
    /// Two's complement.
    mapped: u64,
    /// Two's complement.
    writable: u64,
}

impl Tally<'_> {
    /// Changes a leaf from `old` to `new`, and does all bookkeeping; all changes of leaves are made here.
    ///
    /// Fails with the value it found where that is not `old`. Release and acquire: what was done before
    /// mapping a page is seen by who looks the leaf up, and by who removes it.
    #[inline]
    pub(crate) fn change(
        &mut self,
        entry: &AtomicU64,
        old: Entry,
        new: Entry,
    ) -> Result<(), Entry> {
        entry
            .compare_exchange(old.0, new.0, Ordering::AcqRel, Ordering::Acquire)
            .map_err(Entry)?;
        let count = |was: bool, is: bool| u64::from(is).wrapping_sub(u64::from(was));
        self.mapped = self
            .mapped
            .wrapping_add(count(old.is_leaf(), new.is_leaf()));
        self.writable = self
            .writable
            .wrapping_add(count(old.is_writable(), new.is_writable()));
        Ok(())
    }
}

impl Drop for Tally<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.mapped != 0 {
            self.stripe.mapped.fetch_add(self.mapped, Ordering::Relaxed);
        }
        if self.writable != 0 {
            self.stripe
                .writable
                .fetch_add(self.writable, Ordering::Relaxed);
        }
    }
}
