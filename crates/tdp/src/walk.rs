//! The direct walk: from the root to every entry of a range, in order.
//!
//! **Guarantee.** The walk visits every entry that covers a frame of the range and is no link, or
//! is of the lowest level that was asked for. It goes in the order of frames. It visits each link
//! before the entries below it (pre-order). It sees an entry that changes meanwhile as it was
//! before or after the change.
//!
//! **Mechanism.** The walk keeps a path of tables, one a level. A step goes *down* if the current
//! entry is a link *now*: the walk reads it again, as the caller or another worker may have changed
//! it. Otherwise the step goes to the *side*, or *up* at the end of a table. This is as in Linux's
//! `arch/x86/kvm/mmu/tdp_iter.c`, with one difference. An entry that was a link when it was
//! visited, and is none now, is visited again.
//!
//! A walk lives as long as its guard. A caller that drops the guard continues with a new walk from
//! [`Walk::at`].

use crate::change::Seen;
use crate::format::Format;
use crate::mmu::Mmu;
use crate::pages::{Step, Table};
use crate::platform::{Entry, Platform};
use crate::sync::Ordering;
use core::ops::Range;
use pageferry_addr::Gfn;
use pageferry_epoch::Guard;

/// The largest number of levels of any format.
const MOST_LEVELS: usize = 5;

pub(crate) struct Walk<'g, F: Format, P: Platform> {
    mmu: &'g Mmu<F, P>,
    /// The tables by level, from 1. Those below the current level are stale.
    path: [Table<'g, F>; MOST_LEVELS],
    level: u32,
    lowest: u32,
    at: u64,
    end: u64,
    begun: bool,
    /// Whether the current entry was a link when it was last read.
    link: bool,
}

impl<'g, F: Format, P: Platform> Walk<'g, F, P> {
    /// A walk over `frames`, down to tables of level `lowest`.
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

    /// The current frame. Another walk may continue there.
    pub(crate) const fn at(&self) -> u64 {
        self.at
    }

    #[cfg_attr(not(debug_assertions), inline(always))]
    fn table(&self) -> Table<'g, F> {
        self.path[self.level as usize - 1]
    }

    /// The next entry.
    #[cfg_attr(not(debug_assertions), inline(always))]
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
                // The entry itself now holds the frames that were below it.
                Step::Entry(_) if self.link => return Some(self.look()),
                Step::Entry(_) => {}
            }
        }
        self.side()
    }

    /// The current entry, read again.
    #[cfg_attr(not(debug_assertions), inline(always))]
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

    /// The entry after the current one, without the entries below it.
    #[cfg_attr(not(debug_assertions), inline(always))]
    pub(crate) fn side(&mut self) -> Option<Seen<'g>> {
        let frames = F::frames_per_entry(self.level);
        self.at = (self.at & !(frames - 1)) + frames;
        self.up()
    }

    /// At level 1: the current entry and its successors in the same table that the walk must visit,
    /// at most `most`. Most entries are of this level, and a plain loop over them is the fastest
    /// walk.
    #[cfg_attr(not(debug_assertions), inline(always))]
    pub(crate) fn run(&self, most: usize) -> &'g [Entry] {
        let count = (self.end - self.at).min(most as u64) as usize;
        self.table().entries_from(F::index(Gfn(self.at), 1), count)
    }

    /// Moves `count` entries forward in the same table.
    #[cfg_attr(not(debug_assertions), inline(always))]
    pub(crate) const fn skip(&mut self, count: u64) {
        self.at += count;
    }

    /// Goes up while the new position is the first entry of its table.
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
