//! What was unlinked and waits to be freed.

use crate::{Domain, Epoch};
use alloc::collections::VecDeque;

/// Things that nobody can reach any more who comes now, but that readers who came earlier may still use; oldest
/// first. It belongs to one writer; several writers have one each.
///
/// It only keeps things: what comes out by [`next_expired`](Self::next_expired) is the caller's to free, in amounts
/// the caller chooses. Dropping a limbo drops what is in it, so its owner must know then that no guard is left.
#[derive(Debug)]
pub struct Limbo<T> {
    waiting: VecDeque<(Epoch, T)>,
}

impl<T> Limbo<T> {
    /// An empty one; allocates nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            waiting: VecDeque::new(),
        }
    }

    /// Puts `thing` in. `stamp` is one that [`Domain::stamp`] gave *after* `thing` was unlinked, and at least as
    /// new as the one before.
    #[inline]
    pub fn retire(&mut self, stamp: Epoch, thing: T) {
        debug_assert!(self.waiting.back().is_none_or(|&(last, _)| last <= stamp));
        self.waiting.push_back((stamp, thing));
    }

    /// Takes the oldest thing out, if its grace period is over.
    #[inline]
    pub fn next_expired(&mut self, domain: &Domain) -> Option<T> {
        self.next_expired_in(domain.epoch())
    }

    /// [`next_expired`](Self::next_expired) for many: with an epoch that [`Domain::epoch`] gave.
    #[inline]
    pub fn next_expired_in(&mut self, now: Epoch) -> Option<T> {
        if self.waiting.front()?.0.is_over_in(now) {
            return self.waiting.pop_front().map(|(_, thing)| thing);
        }
        None
    }

    /// How many things wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes the oldest thing out, whatever its stamp: for an owner who knows that no guard is left, or who moved the epoch
    /// on after the last stamp and then found the domain [quiet](Domain::is_quiet).
    pub fn take(&mut self) -> Option<T> {
        self.waiting.pop_front().map(|(_, thing)| thing)
    }
}

impl<T> Default for Limbo<T> {
    fn default() -> Self {
        Self::new()
    }
}
