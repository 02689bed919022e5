#![expect(
    unsafe_code,
    reason = "takes over the memory of tables whose link it has removed"
)]
//! The one function that changes an entry of a table that others can reach, and all the bookkeeping.
//!
//! **Guarantee.** An entry changes from the value the caller has seen to the new one, or not at all. Each change is
//! counted once; a dirty or accessed state that is lost with it is told to the log; what TLBs may contradict is owed
//! to them; a table that is cut off has all its entries frozen, recursively, and waits for flush and grace period.
//!
//! **Mechanism.** Compare-exchange, on entries that anybody else changes in the same way: other workers, and hardware
//! that sets accessed and dirty bits. After it, [`account`](Session::account) compares old and new, as
//! `handle_changed_spte` of Linux's `arch/x86/kvm/mmu/tdp_mmu.c`.
//!
//! # Why frozen entries suffice
//!
//! Who removes a link still shares the table with workers that went down before. Each entry in it is *exchanged* for
//! [`FROZEN`](crate::format::Layout::FROZEN): a change by another worker comes before that, and is then found and
//! accounted for, or fails, since nobody's expected value is `FROZEN`; such a worker starts again from the root. So after
//! the exchange of the last entry the table is nobody's. An entry that is frozen already belongs to a worker that
//! changes the size of a page and will put something else there soon: it is waited for.

use crate::batch::{Batch, Unflushed};
use crate::counts::OwnCounts;
use crate::format::{DirtyBy, Format, Writes};
use crate::log::Log;
use crate::mmu::Mmu;
use crate::pages::{Cache, Page};
use crate::platform::{Entry, Platform};
use crate::sync::Ordering;
use pageferry_addr::{Gfn, Pfn};
use pageferry_epoch::Limbo;

/// Where an entry is, and what it held when it was looked at.
pub(crate) struct Spot<'g> {
    pub(crate) entry: &'g Entry,
    pub(crate) value: u64,
    pub(crate) level: u32,
    /// The first frame the entry covers.
    pub(crate) first: Gfn,
}

/// What of the old entry goes on in the new one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Carries {
    /// Nothing but what the two entries say.
    Nothing,
    /// The translations and their state: the new entry, or the table it links, says the same.
    All,
    /// All but the accessed state, which ages without a flush, and the permission to store where it goes with that: who
    /// needs it gone flushes.
    AllButAge,
}

/// What a worker works with, beside its reader.
#[derive(Debug)]
pub(crate) struct Kit {
    pub(crate) cache: Cache,
    pub(crate) batch: Batch,
    pub(crate) counts: OwnCounts,
    pub(crate) limbo: Limbo<Page>,
}

/// A worker at work, under a guard.
pub(crate) struct Session<'w, F: Format, P: Platform, L> {
    pub(crate) mmu: &'w Mmu<F, P>,
    pub(crate) kit: &'w mut Kit,
    pub(crate) log: &'w L,
}

impl<F: Format, P: Platform, L: Log> Session<'_, F, P, L> {
    /// Changes the entry at `spot` to `new`.
    ///
    /// # Errors
    /// What the entry holds, where that is not what `spot` says.
    #[inline(always)]
    pub(crate) fn change(
        &mut self,
        spot: &Spot<'_>,
        new: u64,
        carries: Carries,
    ) -> Result<(), u64> {
        let (old, level) = (spot.value, spot.level);
        debug_assert!(old != F::FROZEN, "nobody may change a frozen entry");
        if carries == Carries::Nothing && F::needs_flush(old, new, level) {
            let frames = F::frames_per_entry(level);
            let writes_only = F::is_leaf(old, level) && same_but_for_writes::<F>(old, new, level);
            let unflushed: &Unflushed = &self.mmu.unflushed;
            self.kit
                .batch
                .owe(unflushed, spot.first, frames, writes_only);
        }
        let ages_stores =
            carries == Carries::AllButAge && F::is_writable(old) && !F::is_writable(new);
        if ages_stores {
            self.mmu.unflushed.open();
        }
        // Release: what the entry leads to is filled. Acquire: what led to the old value.
        let changed = spot
            .entry
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        if ages_stores {
            self.mmu.unflushed.close_aged();
        }
        changed?;
        self.account(spot.first, level, old, new, carries);
        Ok(())
    }

    /// The bookkeeping of a change that was made.
    #[inline(always)]
    pub(crate) fn account(&mut self, first: Gfn, level: u32, old: u64, new: u64, carries: Carries) {
        let (was_leaf, is_leaf) = (F::is_leaf(old, level), F::is_leaf(new, level));
        if was_leaf != is_leaf {
            let change = if is_leaf { 1 } else { -1 };
            self.kit.counts.leaves(level, change);
        }
        if carries != Carries::All {
            self.tell::<F>(
                first,
                level,
                was_leaf.then_some(old),
                is_leaf.then_some(new),
            );
        }
        if F::is_table(new, level) {
            self.kit.counts.tables(1);
        }
        if F::is_table(old, level) {
            self.cut_off(first, level - 1, F::table_pfn(old), carries);
        }
    }

    /// Tells the log what a change from one leaf to another, or to none, means for the page.
    #[inline(always)]
    pub(crate) fn tell<G: Format>(
        &self,
        first: Gfn,
        level: u32,
        old: Option<u64>,
        new: Option<u64>,
    ) {
        let frames = G::frames_per_entry(level);
        let same_page = matches!((old, new), (Some(old), Some(new)) if G::pfn(old, level) == G::pfn(new, level));
        // Where dirty is what is writable, the log hears of it when it begins; else when its bit goes.
        let became = new.is_some_and(|new| {
            by_fault::<G>(new)
                && G::is_dirty(new)
                && !(same_page && old.is_some_and(|old| G::is_dirty(old) && by_fault::<G>(old)))
        });
        let went = old.is_some_and(|old| {
            !by_fault::<G>(old)
                && G::is_dirty(old)
                && !(same_page && new.is_some_and(|new| G::is_dirty(new) && !by_fault::<G>(new)))
        });
        if became || went {
            self.log.dirtied(first, frames);
        }
        if let Some(old) = old
            && G::is_accessed(old)
            && !(same_page && new.is_some_and(|new| G::is_accessed(new)))
        {
            self.log.accessed(first, frames);
        }
    }

    /// Freezes the entries of a table of `level` whose link was just removed by `self`, and of all below; `first` is the
    /// first frame it covers.
    #[cold]
    fn cut_off(&mut self, first: Gfn, level: u32, pfn: Pfn, carries: Carries) {
        let platform = self.mmu.platform();
        // SAFETY: the caller has replaced the one link to this table by compare-exchange, so it is the only one
        // to take it over; those who went down before hold guards, and its memory waits for them in the batch.
        let page = unsafe { Page::from_link(platform, pfn, F::entries(level)) };
        let frames = F::frames_per_entry(level);
        for (index, entry) in page.entries().iter().enumerate() {
            let first = Gfn(first.0 + index as u64 * frames);
            let old = loop {
                // Acquire: what led to the value. Release: nothing; AcqRel keeps the release sequence's meaning simple.
                let old = entry.swap(F::FROZEN, Ordering::AcqRel);
                if !F::is_frozen(old) {
                    break old;
                }
                platform.relax();
            };
            if F::is_leaf(old, level) {
                self.kit.counts.leaves(level, -1);
                if carries != Carries::All {
                    self.tell::<F>(first, level, Some(old), None);
                }
            } else if F::is_table(old, level) {
                self.cut_off(first, level - 1, F::table_pfn(old), carries);
            }
        }
        self.kit.counts.tables(-1);
        let whole = frames * F::entries(level) as u64;
        self.kit.batch.owe(&self.mmu.unflushed, first, whole, false);
        self.kit.batch.keep(page);
    }
}

/// Whether the leaf's dirty state is whether it is writable.
#[inline]
fn by_fault<F: Format>(leaf: u64) -> bool {
    F::DIRTY_BY == DirtyBy::WriteProtection || F::writes(leaf) == Writes::AllowedLoggedByFault
}

/// Whether a change of leaf `old` takes permissions to store, or the state that a store was seen, and nothing else.
#[inline]
fn same_but_for_writes<F: Format>(old: u64, new: u64, level: u32) -> bool {
    F::is_leaf(new, level)
        && F::pfn(old, level) == F::pfn(new, level)
        && F::memory(old) == F::memory(new)
        && (F::is_executable(new) || !F::is_executable(old))
}
