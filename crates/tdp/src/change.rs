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
//! - the counts change once;
//! - the log hears of each dirty or accessed state that the change clears;
//! - the flush of the old translation is owed;
//! - if it cuts a table off, all entries of that table and the tables below are frozen. The tables
//!   then wait for a flush and a grace period.
//!
//! If the log panics, all of this still holds, except that the log does not hear the rest.
//!
//! **Mechanism.** Compare-exchange, on entries that all others change in the same way: other
//! workers, and hardware that sets accessed and dirty bits. Then [`account`](Session::account)
//! compares old and new, like `handle_changed_spte` in Linux's `arch/x86/kvm/mmu/tdp_mmu.c`.
//!
//! # Why frozen entries suffice
//!
//! 1. The worker that removes a link still shares the table with workers that went down before.
//! 2. It *exchanges* each entry of the table for [`FROZEN`](crate::format::EntryLayout::FROZEN).
//! 3. If another worker changes an entry before this exchange, the exchange returns that change,
//!    and the worker accounts for it.
//! 4. A change after the exchange fails, since no worker's expected value is `FROZEN`. The worker
//!    that tried it starts again from the root.
//! 5. So after the exchange of the last entry the table belongs to the worker that cut it off.
//!
//! If an entry is frozen already, another worker is changing the size of that page. That worker
//! will soon store something else there, so step 2 waits for it.

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

/// An entry, with the value that it held when it was read.
pub(crate) struct Seen<'g> {
    pub(crate) entry: &'g Entry,
    pub(crate) value: u64,
    pub(crate) level: u32,
    /// The first frame the entry covers.
    pub(crate) first: Gfn,
}

/// The part of the old entry that the new one preserves.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Preserves {
    /// Only the fields that are equal in both entries.
    Nothing,
    /// The translations and their state: the new entry, or the table it links, has the same.
    All,
    /// All but two things: the accessed state, and the permission to store if it goes with that
    /// state. Neither is flushed. A caller that needs a flush makes it.
    AllButAge,
}

/// The data that a worker owns, besides its reader.
#[derive(Debug)]
pub(crate) struct WorkerState {
    pub(crate) cache: Cache,
    pub(crate) batch: Batch,
    pub(crate) counts: OwnCounts,
    pub(crate) limbo: Limbo<Page>,
    /// Whether this sweep has waited in vain for tables to be freed.
    pub(crate) has_waited: bool,
}

/// A worker during a call, under a guard.
pub(crate) struct Session<'w, F: Format, P: Platform, L> {
    pub(crate) mmu: &'w Mmu<F, P>,
    pub(crate) state: &'w mut WorkerState,
    pub(crate) log: &'w L,
}

impl<F: Format, P: Platform, L: Log> Session<'_, F, P, L> {
    /// Changes the entry at `seen` to `new`.
    ///
    /// # Errors
    /// The current value of the entry, if `seen` has another.
    #[cfg_attr(not(debug_assertions), inline(always))]
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
        // Release: the contents of the table that the entry leads to. Acquire: the history of the
        // old value.
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

    /// Does the bookkeeping of a change. The log comes last, as it may panic.
    #[cfg_attr(not(debug_assertions), inline(always))]
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

    /// Reports a change from one leaf to another, or to none, to the log.
    #[cfg_attr(not(debug_assertions), inline(always))]
    pub(crate) fn tell(&self, first: Gfn, level: u32, old: Option<u64>, new: Option<u64>) {
        tell::<F>(self.log, first, level, old, new);
    }

    /// Whether there is room for `tables` more that wait to be freed. Without room, the caller
    /// leaves the tables linked.
    pub(crate) fn may_cut_off(&self, tables: usize) -> bool {
        let WorkerState { batch, limbo, .. } = &*self.state;
        let waiting = batch.len() + limbo.len() + self.mmu.abandoned.tables();
        batch.has_room(tables) && waiting < MOST_WAITING
    }

    /// Takes over a table of `level` after `self` has removed its link. It freezes the entries of
    /// that table and of all tables below. It reports them to the log if `told`. `first` is the
    /// first frame that the table covers.
    #[cold]
    fn cut_off(&mut self, first: Gfn, level: u32, pfn: Pfn, told: bool) {
        // SAFETY: the caller has replaced the one link to this table by compare-exchange, so no
        // other thread takes it over. Workers that went down before hold guards, and the memory
        // waits for them in the batch.
        let page = unsafe { Page::from_link(self.mmu.platform(), pfn, F::entries(level)) };
        self.freeze(first, level, page, told);
    }

    /// Cuts off a whole tree after its root was replaced, beside vCPUs that may still use it.
    #[cold]
    pub(crate) fn cut_off_root(&mut self, root: Page) {
        self.state.batch.owe_root();
        // The root becomes a table like the others here, but no root is counted.
        self.state.counts.tables(1);
        self.freeze(Gfn(0), F::LEVELS, root, true);
    }

    fn freeze(&mut self, first: Gfn, level: u32, page: Page, told: bool) {
        let mut cut = CutOff {
            session: self,
            page: ManuallyDrop::new(page),
            level,
            first,
            frozen: 0,
            leaves: 0,
        };
        cut.freeze_rest(told);
    }
}

/// A table during its cut-off. Dropping it freezes the remaining entries, so that a panic of the
/// log loses nothing.
struct CutOff<'s, 'w, F: Format, P: Platform, L: Log> {
    session: &'s mut Session<'w, F, P, L>,
    page: ManuallyDrop<Page>,
    level: u32,
    first: Gfn,
    /// The number of entries that are frozen.
    frozen: usize,
    /// The number of leaves among them. The worker's record gets the sum, once.
    leaves: i64,
}

impl<F: Format, P: Platform, L: Log> CutOff<'_, '_, F, P, L> {
    fn freeze_rest(&mut self, told: bool) {
        let (level, frames) = (self.level, F::frames_per_entry(self.level));
        let rest = &self.page.entries()[self.frozen..];
        for (index, entry) in (self.frozen..).zip(rest) {
            let old = loop {
                // Acquire: the history of the value. Release is not needed: `AcqRel` keeps the
                // meaning of the release sequence simple.
                let old = entry.swap(F::FROZEN, Ordering::AcqRel);
                if !F::is_frozen(old) {
                    break old;
                }
                self.session.mmu.platform().relax();
            };
            self.frozen = index + 1;
            let first = Gfn(self.first.0 + index as u64 * frames);
            if F::is_leaf(old, level) {
                self.leaves += 1;
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
        // Does nothing unless the log has panicked.
        self.freeze_rest(false);
        let state = &mut *self.session.state;
        if self.leaves != 0 {
            state.counts.leaves(self.level, -self.leaves);
        }
        state.counts.tables(-1);
        state.counts.waiting(1);
        // SAFETY: taken once, as `drop` runs once.
        state
            .batch
            .keep(unsafe { ManuallyDrop::take(&mut self.page) });
    }
}

/// Reports a change from one leaf to another, or to none, to `log`.
#[cfg_attr(not(debug_assertions), inline(always))]
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
    // A log by write protection hears of a leaf that becomes dirty. A log by dirty bits hears of a
    // dirty bit that is cleared.
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

/// Whether a change of leaf `old` takes only permissions to store, or the record of a store, and
/// nothing else that needs a flush. No change takes the permission to execute and keeps the page.
#[inline]
fn same_but_for_writes<F: Format>(old: u64, new: u64, level: u32) -> bool {
    F::is_leaf(new, level)
        && F::pfn(old, level) == F::pfn(new, level)
        && F::memory(old) == F::memory(new)
}
