//! Unlinked things that wait to be freed.

use crate::{Domain, Epoch, OutOfMemory};
use alloc::collections::VecDeque;

/// Unlinked things, oldest first. New guards cannot reach them, but older ones may still use them.
/// A limbo belongs to one writer. Each of several writers has one.
///
/// A limbo only keeps things. The caller takes them out with [`next_expired`](Self::next_expired)
/// and frees them, as many at a time as it likes. Dropping a limbo drops its things, so no guard
/// may be left then.
#[derive(Debug)]
pub struct Limbo<T> {
    waiting: VecDeque<(Epoch, T)>,
}

impl<T> Limbo<T> {
    /// An empty limbo. It allocates nothing.
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

    /// Puts `thing` in. The caller takes `stamp` from [`Domain::stamp`] *after* it unlinked
    /// `thing`. Stamps must not decrease. The call allocates unless there is
    /// [room](Self::try_reserve).
    #[inline]
    pub fn retire(&mut self, stamp: Epoch, thing: T) {
        debug_assert!(self.waiting.back().is_none_or(|&(last, _)| last <= stamp));
        self.waiting.push_back((stamp, thing));
    }

    /// Takes the oldest thing out if its grace period is over.
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

    /// The number of things that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes the oldest thing out regardless of its stamp. The owner must know that no guard is
    /// left, or must have advanced the epoch after the last stamp and then found the domain
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
