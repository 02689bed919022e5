//! Unlinked things that wait to be freed.

use crate::{Domain, Epoch, OutOfMemory};
use alloc::collections::VecDeque;

/// Unlinked things, oldest first. New guards cannot reach them, but older ones may still use them.
/// A limbo belongs to one writer; several writers have one each.
///
/// It only keeps things. The caller frees what comes out by [`next_expired`](Self::next_expired),
/// as much at a time as it likes. Dropping a limbo drops what is in it, so no guard may be left
/// then.
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

    /// Makes room for `additional` things, so that retiring them allocates nothing.
    ///
    /// # Errors
    /// If the allocator refuses the room.
    pub fn try_reserve(&mut self, additional: usize) -> Result<(), OutOfMemory> {
        let bytes = additional.saturating_mul(size_of::<(Epoch, T)>());
        self.waiting
            .try_reserve(additional)
            .map_err(|_| OutOfMemory { bytes })
    }

    /// Puts `thing` in. `stamp` comes from a [`Domain::stamp`] *after* `thing` was unlinked, and is
    /// at least as new as the one before. It allocates unless there is
    /// [room](Self::try_reserve).
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

    /// [`next_expired`](Self::next_expired) for many things, with an epoch that [`Domain::epoch`]
    /// returned.
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

    /// Takes the oldest thing out, whatever its stamp. For an owner that knows that no guard is
    /// left, or that advanced the epoch after the last stamp and then found the domain
    /// [quiet](Domain::is_quiet).
    pub fn take(&mut self) -> Option<T> {
        self.waiting.pop_front().map(|(_, thing)| thing)
    }
}

impl<T> Default for Limbo<T> {
    fn default() -> Self {
        Self::new()
    }
}
