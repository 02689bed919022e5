//! The direct walk: from the root to every entry of a range, in order.
//!
//! **Guarantee.** The walk visits every entry that covers a frame of the range and is of the lowest
//! level asked for, or no link, in the order of frames. It visits links before what is below them
//! (pre-order). It sees an entry that changes meanwhile as it was or as it became.
//!
//! **Mechanism.** A path of tables, one a level. A step goes *down* if the current entry is a link
//! *now*: the walk reads it again, as the caller or another worker may have changed it. Otherwise
//! it goes to the *side*, or *up* at the end of a table. This is as in Linux's
//! `arch/x86/kvm/mmu/tdp_iter.c`, with one difference: an entry that was a link when it was
//! visited, and is none now, is visited again.
//!
//! A walk lives as long as its guard. A caller that drops the guard continues with a new walk, from
//! [`Walk::at`] on.

use crate::change::Seen;
use crate::format::Format;
use crate::mmu::Mmu;
use crate::pages::{Step, Table};
use crate::platform::{Entry, Platform};
use crate::sync::Ordering;
use core::ops::Range;
use pageferry_addr::Gfn;
use pageferry_epoch::Guard;

/// The most levels a format has.
const MOST_LEVELS: usize = 5;

pub(crate) struct Walk<'g, F: Format, P: Platform> {
    mmu: &'g Mmu<F, P>,
    /// By level, from 1. Those below the current level are left over.
    path: [Table<'g, F>; MOST_LEVELS],
    level: u32,
    lowest: u32,
    at: u64,
    end: u64,
    begun: bool,
    /// Whether the current entry was a link when it was looked at.
    link: bool,
}

impl<'g, F: Format, P: Platform> Walk<'g, F, P> {
    /// Over `frames`, down to tables of level `lowest`.
    pub(crate) fn new(
        mmu: &'g Mmu<F, P>,
        guard: &'g Guard<'_>,
        frames: Range<u64>,
        lowest: u32,
    ) -> Self {
        debug_assert!(lowest >= 1 && F::LEVELS as usize <= MOST_LEVELS);
        Self {
            mmu,
            path: [mmu.top(guard); MOST_LEVELS],
            level: F::LEVELS,
            lowest,
            at: frames.start,
            end: frames.end.min(F::GFN_LIMIT.0),
            begun: false,
            link: false,
        }
    }

    /// The frame at which the walk stands: another walk may continue there.
    pub(crate) const fn at(&self) -> u64 {
        self.at
    }

    #[inline(always)]
    fn table(&self) -> Table<'g, F> {
        self.path[self.level as usize - 1]
    }

    /// The next entry.
    #[inline(always)]
    pub(crate) fn next(&mut self) -> Option<Seen<'g>> {
        if !self.begun {
            self.begun = true;
            return (self.at < self.end).then(|| self.look());
        }
        if self.level > self.lowest {
            match self.table().step(self.mmu.platform(), Gfn(self.at)) {
                Step::Down(table) => {
                    self.level -= 1;
                    self.path[self.level as usize - 1] = table;
                    return Some(self.look());
                }
                // It holds now what was below it before.
                Step::Entry(_) if self.link => return Some(self.look()),
                Step::Entry(_) => {}
            }
        }
        self.side()
    }

    /// The current entry, as it is now.
    #[inline(always)]
    pub(crate) fn look(&mut self) -> Seen<'g> {
        let entry = self.table().entry(Gfn(self.at));
        let value = entry.load(Ordering::Acquire);
        self.link = F::is_table(value, self.level);
        Seen {
            entry,
            value,
            level: self.level,
            first: Gfn(self.at & !(F::frames_per_entry(self.level) - 1)),
        }
    }

    /// The entry after the current one and what is below it.
    #[inline(always)]
    pub(crate) fn side(&mut self) -> Option<Seen<'g>> {
        let frames = F::frames_per_entry(self.level);
        self.at = (self.at & !(frames - 1)) + frames;
        self.up()
    }

    /// For a current entry of level 1: it and those after it in its table that the walk has to
    /// visit, `most` in all. Most entries are of this level, and a plain loop over them is the
    /// fastest walk.
    #[inline(always)]
    pub(crate) fn run(&self, most: usize) -> &'g [Entry] {
        let count = (self.end - self.at).min(most as u64) as usize;
        self.table().entries_from(F::index(Gfn(self.at), 1), count)
    }

    /// Stands at the entry `count` behind the current one, in the same table.
    #[inline(always)]
    pub(crate) const fn skip(&mut self, count: u64) {
        self.at += count;
    }

    /// From the start of the entry at which it now stands, up where it is the first of its table.
    fn up(&mut self) -> Option<Seen<'g>> {
        if self.at >= self.end {
            return None;
        }
        while self.level < F::LEVELS && F::index(Gfn(self.at), self.level) == 0 {
            self.level += 1;
        }
        Some(self.look())
    }
}
