//! Operations on ranges of guest frames.
//!
//! **Guarantee.** Every page that was mapped before a call, and that nobody else changes meanwhile, is met
//! exactly once. Absent subtrees cost one load each, whatever they would cover.
//!
//! **Mechanism.** A pre-order descent to the level-1 tables that are linked; leaves change one by one
//! through [`Tally::change`].

use crate::StageTwo;
use crate::counters::Tally;
use crate::format::{Entry, Sv48x4};
use crate::sync::{AtomicU64, Ordering};
use crate::table::Node;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange};

impl StageTwo {
    /// Takes the permission to store from all pages of `range`; gives how many had it.
    ///
    /// The caller owes a TLB flush where that is not 0; see [`StageTwo`] for this and for dirty logging.
    pub fn write_protect(&self, range: GfnRange) -> u64 {
        let mut changed = 0;
        self.leaf_tables(range.start().0..range.end().0, |table, first, indices| {
            let mut tally = self.counters.tally(Gfn(first));
            for index in indices {
                changed += u64::from(write_protect_leaf(table.leaf(index), &mut tally));
            }
        });
        changed
    }

    /// As [`write_protect`](Self::write_protect), for those of the 64 frames from `base` whose bit is set in
    /// `mask` (bit 0 is `base`): for one word of a dirty log. `base` needs no alignment.
    pub fn write_protect_mask(&self, base: Gfn, mask: u64) -> u64 {
        let mut changed = 0;
        let end = base.0.saturating_add(64);
        self.leaf_tables(base.0..end, |table, first, indices| {
            let mut tally = self.counters.tally(Gfn(first));
            // The bits of this table's part, its first frame at bit 0.
            let part = mask >> (first - base.0) & (u64::MAX >> (64 - indices.len()));
            let mut bits = part;
            while bits != 0 {
                let index = indices.start + bits.trailing_zeros() as usize;
                changed += u64::from(write_protect_leaf(table.leaf(index), &mut tally));
                bits &= bits - 1;
            }
        });
        changed
    }

    /// Removes all translations of `range`; gives how many there were.
    ///
    /// The caller owes a TLB flush where that is not 0; see [`StageTwo`].
    pub fn zap(&self, range: GfnRange) -> u64 {
        let mut removed = 0;
        self.leaf_tables(range.start().0..range.end().0, |table, first, indices| {
            let mut tally = self.counters.tally(Gfn(first));
            for index in indices {
                removed += u64::from(zap_leaf(table.leaf(index), &mut tally));
            }
        });
        removed
    }

    /// Calls `visit` for each linked level-1 table that covers any of `frames`: with the table, the first of
    /// `frames` that it covers, and the indices of all that it covers (never none).
    fn leaf_tables<'t>(
        &'t self,
        frames: Range<u64>,
        mut visit: impl FnMut(Node<'t>, u64, Range<usize>),
    ) {
        let frames = frames.start..frames.end.min(Sv48x4::GFN_LIMIT.0);
        if !frames.is_empty() {
            descend(self.tree.root(), frames, &mut visit);
        }
    }
}

/// `frames` is not empty and lies inside what `node` covers.
fn descend<'t>(
    node: Node<'t>,
    frames: Range<u64>,
    visit: &mut impl FnMut(Node<'t>, u64, Range<usize>),
) {
    let level = node.level();
    let first = Sv48x4::index(Gfn(frames.start), level);
    let last = Sv48x4::index(Gfn(frames.end - 1), level);
    if level == 1 {
        visit(node, frames.start, first..last + 1);
        return;
    }
    let span = Sv48x4::frames_per_entry(level);
    // The first frame below the entry at `first`.
    let base = frames.start & !(span - 1);
    for index in first..=last {
        if let Some(child) = node.child(index) {
            let start = base + (index - first) as u64 * span;
            let part = frames.start.max(start)..frames.end.min(start + span);
            descend(child, part, visit);
        }
    }
}

/// Whether the leaf had the permission.
#[inline]
fn write_protect_leaf(entry: &AtomicU64, tally: &mut Tally<'_>) -> bool {
    let mut old = Entry(entry.load(Ordering::Relaxed));
    while old.is_writable() {
        match tally.change(entry, old, old.write_protected()) {
            Ok(()) => return true,
            Err(found) => old = found,
        }
    }
    false
}

/// Whether there was a leaf.
#[inline]
fn zap_leaf(entry: &AtomicU64, tally: &mut Tally<'_>) -> bool {
    let mut old = Entry(entry.load(Ordering::Relaxed));
    while old.is_leaf() {
        match tally.change(entry, old, Entry::ABSENT) {
            Ok(()) => return true,
            Err(found) => old = found,
        }
    }
    false
}
