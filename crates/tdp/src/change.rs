#![expect(
    unsafe_code,
    reason = "takes over the memory of tables whose link it has removed"
)]
//! The one function that changes an entry of a table that others can reach, and all the
//! bookkeeping.
//!
//! **Guarantee.** An entry changes from the value that the caller has seen to the new one, or not
//! at all. For each change:
//!
//! - it is counted once;
//! - the log is told of a dirty or accessed state that is lost with it;
//! - what TLBs may contradict is owed to them;
//! - a table that it cuts off has all its entries frozen, recursively, and waits for a flush and a
//!   grace period.
//!
//! A panic of the log changes none of this, except that the log is not told the rest.
//!
//! **Mechanism.** Compare-exchange, on entries that all others change in the same way: other
//! workers, and hardware that sets accessed and dirty bits. Then [`account`](Session::account)
//! compares old and new, as `handle_changed_spte` of Linux's `arch/x86/kvm/mmu/tdp_mmu.c` does.
//!
//! # Why frozen entries suffice
//!
//! 1. The worker that removes a link still shares the table with workers that went down before.
//! 2. It *exchanges* each entry of the table for [`FROZEN`](crate::format::EntryLayout::FROZEN).
//! 3. A change by another worker that comes before this exchange is found by it, and accounted for.
//! 4. A change that comes after it fails, since no worker's expected value is `FROZEN`. That worker
//!    starts again from the root.
//! 5. So after the exchange of the last entry the table belongs to the worker that cut it off.
//!
//! An entry that is frozen already belongs to a worker that changes the size of a page. That worker
//! will put something else there soon, so step 2 waits for it.

use crate::batch::{Batch, Unflushed};
use crate::counts::OwnCounts;
use crate::format::{DirtyBy, Format, Writes};
use crate::log::Log;
use crate::mmu::Mmu;
use crate::pages::{Cache, Page};
use crate::platform::{Entry, Platform};
use crate::sync::Ordering;
use crate::waiting::MOST_WAITING;
use core::mem::ManuallyDrop;
use pageferry_addr::{Gfn, Pfn};
use pageferry_epoch::Limbo;

/// An entry, and what it held when it was looked at.
pub(crate) struct Seen<'g> {
    pub(crate) entry: &'g Entry,
    pub(crate) value: u64,
    pub(crate) level: u32,
    /// The first frame the entry covers.
    pub(crate) first: Gfn,
}

/// What the new entry preserves of the old one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Preserves {
    /// Nothing but what the two entries say.
    Nothing,
    /// The translations and their state: the new entry, or the table it links, says the same.
    All,
    /// All but the accessed state, which ages without a flush, and the permission to store where
    /// that goes with it. A caller that needs these gone flushes.
    AllButAge,
}

/// What a worker owns, beside its reader.
#[derive(Debug)]
pub(crate) struct WorkerState {
    pub(crate) cache: Cache,
    pub(crate) batch: Batch,
    pub(crate) counts: OwnCounts,
    pub(crate) limbo: Limbo<Page>,
    /// Whether this sweep has waited in vain for tables to be freed.
    pub(crate) has_waited: bool,
}

/// A worker at work, under a guard.
pub(crate) struct Session<'w, F: Format, P: Platform, L> {
    pub(crate) mmu: &'w Mmu<F, P>,
    pub(crate) state: &'w mut WorkerState,
    pub(crate) log: &'w L,
}

impl<F: Format, P: Platform, L: Log> Session<'_, F, P, L> {
    /// Changes the entry at `seen` to `new`.
    ///
    /// # Errors
    /// What the entry holds, if that is not what `seen` says.
    #[inline(always)]
    pub(crate) fn change(
        &mut self,
        seen: &Seen<'_>,
        new: u64,
        preserves: Preserves,
    ) -> Result<(), u64> {
        let (old, level) = (seen.value, seen.level);
        debug_assert!(old != F::FROZEN, "nobody may change a frozen entry");
        if preserves == Preserves::Nothing && F::needs_flush(old, new, level) {
            let frames = F::frames_per_entry(level);
            let writes_only = F::is_leaf(old, level) && same_but_for_writes::<F>(old, new, level);
            let unflushed: &Unflushed = &self.mmu.unflushed;
            self.state
                .batch
                .owe(unflushed, seen.first, frames, writes_only);
        }
        let ages_stores =
            preserves == Preserves::AllButAge && F::is_writable(old) && !F::is_writable(new);
        if ages_stores {
            self.mmu.unflushed.open();
        }
        // Release: what the entry leads to is filled. Acquire: what led to the old value.
        let changed = seen
            .entry
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        if ages_stores {
            self.mmu.unflushed.close_aged();
        }
        changed?;
        self.account(seen.first, level, old, new, preserves);
        Ok(())
    }

    /// The bookkeeping of a change that was made. The log comes last, as it may panic.
    #[inline(always)]
    pub(crate) fn account(
        &mut self,
        first: Gfn,
        level: u32,
        old: u64,
        new: u64,
        preserves: Preserves,
    ) {
        let (was_leaf, is_leaf) = (F::is_leaf(old, level), F::is_leaf(new, level));
        if was_leaf != is_leaf {
            let change = if is_leaf { 1 } else { -1 };
            self.state.counts.leaves(level, change);
        }
        if F::is_table(new, level) {
            self.state.counts.tables(1);
        }
        if F::is_table(old, level) {
            self.cut_off(first, level - 1, F::table_pfn(old), true);
        }
        if preserves != Preserves::All {
            let (old, new) = (was_leaf.then_some(old), is_leaf.then_some(new));
            self.tell(first, level, old, new);
        }
    }

    /// Tells the log what a change from one leaf to another, or to none, means for the page.
    #[inline(always)]
    pub(crate) fn tell(&self, first: Gfn, level: u32, old: Option<u64>, new: Option<u64>) {
        tell::<F>(self.log, first, level, old, new);
    }

    /// Whether there is room for `tables` more that wait to be freed. If not, their link stays.
    pub(crate) fn may_cut_off(&self, tables: usize) -> bool {
        let WorkerState { batch, limbo, .. } = &*self.state;
        let waiting = batch.len() + limbo.len() + self.mmu.abandoned.tables();
        batch.has_room(tables) && waiting < MOST_WAITING
    }

    /// Freezes the entries of a table of `level` whose link was just removed by `self`, and of all
    /// below, and tells the log if `told`; `first` is the first frame it covers.
    #[cold]
    fn cut_off(&mut self, first: Gfn, level: u32, pfn: Pfn, told: bool) {
        // SAFETY: the caller has replaced the one link to this table by compare-exchange, so it is
        // the only one to take it over. Workers that went down before hold guards, and its memory
        // waits for them in the batch.
        let page = unsafe { Page::from_link(self.mmu.platform(), pfn, F::entries(level)) };
        let mut cut = CutOff {
            session: self,
            page: ManuallyDrop::new(page),
            level,
            first,
            frozen: 0,
        };
        cut.freeze_rest(told);
    }
}

/// A table that is being cut off. Dropping it does what is left, so that a panic of the log loses
/// nothing.
struct CutOff<'s, 'w, F: Format, P: Platform, L: Log> {
    session: &'s mut Session<'w, F, P, L>,
    page: ManuallyDrop<Page>,
    level: u32,
    first: Gfn,
    /// How many entries are frozen.
    frozen: usize,
}

impl<F: Format, P: Platform, L: Log> CutOff<'_, '_, F, P, L> {
    fn freeze_rest(&mut self, told: bool) {
        let (level, frames) = (self.level, F::frames_per_entry(self.level));
        while let Some(entry) = self.page.entries().get(self.frozen) {
            let first = Gfn(self.first.0 + self.frozen as u64 * frames);
            let old = loop {
                // Acquire: what led to the value. Release: nothing; AcqRel keeps the release
                // sequence's meaning simple.
                let old = entry.swap(F::FROZEN, Ordering::AcqRel);
                if !F::is_frozen(old) {
                    break old;
                }
                self.session.mmu.platform().relax();
            };
            self.frozen += 1;
            if F::is_leaf(old, level) {
                self.session.state.counts.leaves(level, -1);
                if told {
                    self.session.tell(first, level, Some(old), None);
                }
            } else if F::is_table(old, level) {
                let below = F::table_pfn(old);
                self.session.cut_off(first, level - 1, below, told);
            }
        }
    }
}

impl<F: Format, P: Platform, L: Log> Drop for CutOff<'_, '_, F, P, L> {
    fn drop(&mut self) {
        // Nothing, unless the log has panicked.
        self.freeze_rest(false);
        let state = &mut *self.session.state;
        state.counts.tables(-1);
        state.counts.waiting(1);
        // SAFETY: taken once, as this is dropped once.
        state
            .batch
            .keep(unsafe { ManuallyDrop::take(&mut self.page) });
    }
}

/// Tells `log` what a change from one leaf to another, or to none, means for the page.
#[inline(always)]
pub(crate) fn tell<F: Format>(
    log: &impl Log,
    first: Gfn,
    level: u32,
    old: Option<u64>,
    new: Option<u64>,
) {
    let frames = F::frames_per_entry(level);
    let same_page =
        matches!((old, new), (Some(old), Some(new)) if F::pfn(old, level) == F::pfn(new, level));
    // A log by write protection hears of a dirty leaf when it becomes one, a log by dirty bits when
    // the bit goes.
    let became = new.is_some_and(|new| {
        by_fault::<F>(new)
            && F::is_dirty(new)
            && !(same_page && old.is_some_and(|old| F::is_dirty(old) && by_fault::<F>(old)))
    });
    let went = old.is_some_and(|old| {
        !by_fault::<F>(old)
            && F::is_dirty(old)
            && !(same_page && new.is_some_and(|new| F::is_dirty(new) && !by_fault::<F>(new)))
    });
    if became || went {
        log.dirtied(first, frames);
    }
    if let Some(old) = old
        && F::is_accessed(old)
        && !(same_page && new.is_some_and(|new| F::is_accessed(new)))
    {
        log.accessed(first, frames);
    }
}

/// Whether the leaf is dirty exactly while it is writable.
#[inline]
fn by_fault<F: Format>(leaf: u64) -> bool {
    F::DIRTY_BY == DirtyBy::WriteProtection || F::writes(leaf) == Writes::AllowedLoggedByFault
}

/// Whether a change of leaf `old` takes permissions to store, or the state that a store was seen,
/// and nothing else that needs a flush. No change takes the permission to execute and keeps the
/// page.
#[inline]
fn same_but_for_writes<F: Format>(old: u64, new: u64, level: u32) -> bool {
    F::is_leaf(new, level)
        && F::pfn(old, level) == F::pfn(new, level)
        && F::memory(old) == F::memory(new)
}
