//! Shared and exclusive work on top of the announcements of guards.
//!
//! **Guarantee.** While an [`Exclusive`] is held there is neither a [`Shared`] guard of its domain
//! nor another `Exclusive`. The work under one of them happens before the work under the next.
//! Exclusive work neither keeps plain guards out nor waits for them. A thread that excludes comes
//! before threads that want to share from then on.
//!
//! **Mechanism.** This is a readers/writer lock whose readers write no cache line that another
//! reader writes. A shared guard sets one more bit in its announcement, in the reader's own line.
//! An excluding thread sets one bit of a word that sharers read, in the line of the epoch that they
//! read anyway. Then it waits for every announcement that has the shared bit. So sharing costs one
//! load more than a plain guard, for any number of sharers. Excluding costs one load per reader.
//!
//! # Steps
//!
//! | step | by | what |
//! |---|---|---|
//! | s1 | a sharer | announces with the bit |
//! | s2 | the same | a sequentially consistent fence; a light guard has none (`mode.rs`) |
//! | s3 | the same | loads the word. It has a guard if no thread excludes, and withdraws otherwise |
//! | x1 | a thread that excludes | sets the word's bit by compare-exchange |
//! | x2 | the same | a sequentially consistent fence |
//! | x3 | the same | loads each announcement until it has seen it once without the bit |
//! | x4 | the same | a fence with acquire order |
//! | x5 | the same, at its end | removes the word's bit with release order |
//!
//! # Why the sharer or the excluding thread sees the other
//!
//! 1. Let s2 precede x2 in the order of fences. Then x3 finds the reader's record and reads s1 or
//!    something later. So it waits until the guard has ended.
//! 2. Let x2 precede s2. Then s3 sees x1 or something later. If that has no such bit, the exclusive
//!    work had already ended. It cannot be a word from before x1.
//! 3. So x3 may look at one reader after the other: a reader that it has passed has no guard, and
//!    gets none before x5.
//!
//! Light guards do not fence at s2. `mode.rs`, which owns the word, proves that they are as safe.
//!
//! # The order of accesses
//!
//! 1. A guard ends with a release store, and the reader's next announcement is one too. x3 reads
//!    one of these or a later one, so x4 orders all accesses of the guard before the exclusive
//!    work.
//! 2. In the other direction s3 acquires x5.
//! 3. All changes of the word are exchanges that acquire and release. So exclusive work is one
//!    chain, and a load of a later word orders as much as a load of that x5.
//!
//! A refreshed guard announces another epoch with the same bit, by one store, so x3 sees no gap.
//! The count of waiting threads is a hint: it orders nothing.

use crate::domain::{Announced, Domain, Guard, Reader, SHARES};
use crate::sync::{Ordering, SCAN, fence};
use core::fmt;
use core::hint;
use core::mem;
use core::ops::Deref;

/// The number of spins for which a thread that wants to exclude lets waiting threads go first. The
/// delay orders nothing, so models have none.
const GIVE_WAY: u32 = if cfg!(loom) { 0 } else { 8 };

impl Reader {
    /// Takes a guard that keeps exclusive work out. Calls `relax` while there is exclusive work or
    /// a thread waits for it.
    ///
    /// A thread that holds an [`Exclusive`] of the domain must not call this: it would wait for
    /// itself.
    #[inline]
    pub fn share(&mut self, relax: impl FnMut()) -> Shared<'_> {
        let mut announced = self.announce(SHARES);
        if self.is_kept_out(announced) {
            announced = self.announce_later(relax);
        }
        Shared(Guard {
            reader: self,
            announced,
        })
    }

    /// Takes a guard that keeps exclusive work out, unless there is exclusive work or a thread
    /// waits for it. Wait-free: it costs one load more than [`pin`](Self::pin).
    ///
    /// A failing call may make a concurrent [`Domain::try_exclude`] fail.
    #[inline]
    pub fn try_share(&mut self) -> Option<Shared<'_>> {
        let announced = self.announce(SHARES);
        if self.is_kept_out(announced) {
            self.withdraw();
            return None;
        }
        Some(Shared(Guard {
            reader: self,
            announced,
        }))
    }

    /// Like [`try_share`](Self::try_share), but beside exclusive work it tries again after each of
    /// at most `turns` calls of `relax`. Meanwhile it counts as waiting. It is for callers that
    /// must not wait for long, and for which a failure is expensive.
    #[inline]
    pub fn share_within(&mut self, turns: u32, relax: impl FnMut()) -> Option<Shared<'_>> {
        let mut announced = self.announce(SHARES);
        if self.is_kept_out(announced) {
            announced = self.announce_within(turns, relax)?;
        }
        Some(Shared(Guard {
            reader: self,
            announced,
        }))
    }

    /// Withdraws, and announces again when there is no exclusive work. Fails after `turns` calls of
    /// `relax`.
    #[cold]
    fn announce_within(&self, turns: u32, mut relax: impl FnMut()) -> Option<Announced> {
        self.withdraw();
        if turns == 0 {
            return None;
        }
        let _counted = KeptOut::new(self.domain());
        for _ in 0..turns {
            relax();
            if self.domain().is_excluded() {
                continue;
            }
            let announced = self.announce(SHARES);
            if !self.is_kept_out(announced) {
                return Some(announced);
            }
            self.withdraw();
        }
        None
    }

    /// Waits without a guard until there is a moment without exclusive work. Meanwhile it calls
    /// `relax` and counts as waiting. It is for callers whose [`try_share`](Self::try_share)
    /// failed. It orders nothing: exclusive work is ordered before their next success.
    pub fn wait_included(&self, mut relax: impl FnMut()) {
        if self.domain().is_excluded() {
            let _counted = KeptOut::new(self.domain());
            while self.domain().is_excluded() {
                relax();
            }
        }
    }

    /// Withdraws, and announces again when there is no exclusive work. It counts as waiting until
    /// it succeeds, so that [`Exclusive::yield_now`] does not overtake it.
    #[cold]
    fn announce_later(&self, mut relax: impl FnMut()) -> Announced {
        let _counted = KeptOut::new(self.domain());
        loop {
            self.withdraw();
            while self.domain().is_excluded() {
                relax();
            }
            let announced = self.announce(SHARES);
            if !self.is_kept_out(announced) {
                return announced;
            }
        }
    }

    /// Whether exclusive work keeps the new announcement out. (s3)
    #[inline]
    fn is_kept_out(&self, announced: Announced) -> bool {
        // Acquire: exclusive work happens before the accesses of the guard.
        !announced.light && self.domain().mode.load(Ordering::Acquire).is_excluded()
    }
}

/// A guard that keeps exclusive work out.
#[derive(Debug)]
#[must_use = "exclusive work begins as soon as the guard is dropped"]
pub struct Shared<'reader>(Guard<'reader>);

impl<'reader> Deref for Shared<'reader> {
    type Target = Guard<'reader>;

    #[inline]
    fn deref(&self) -> &Guard<'reader> {
        &self.0
    }
}

impl Shared<'_> {
    /// Whether a thread waits to exclude. If so, long shared work should [yield](Self::yield_now).
    /// It takes one load.
    #[inline]
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.0.reader.domain().is_excluded()
    }

    /// Does a [`Guard::refresh`] without letting exclusive work in. Things that were reached before
    /// may be freed.
    #[inline]
    pub fn refresh(&mut self) {
        self.0.refresh_as(SHARES);
    }

    /// Drops the guard and takes it again by [`Reader::share`]. A thread that waits to exclude
    /// comes first. Things that were reached before may have changed or been freed.
    ///
    /// There is a guard afterwards even if `relax` panics: the wait continues without `relax`, and
    /// then the panic continues.
    pub fn yield_now(&mut self, relax: impl FnMut()) {
        let again = ShareAgain(&mut self.0);
        again.0.announced = again.0.reader.announce_later(relax);
        mem::forget(again);
    }
}

/// Announces again when dropped, even by a panic, because the guard is used afterwards.
struct ShareAgain<'guard, 'reader>(&'guard mut Guard<'reader>);

impl Drop for ShareAgain<'_, '_> {
    fn drop(&mut self) {
        self.0.announced = self.0.reader.announce_later(hint::spin_loop);
    }
}

/// Counts a waiting thread until it is dropped.
struct KeptOut<'d>(&'d Domain);

impl<'d> KeptOut<'d> {
    fn new(domain: &'d Domain) -> Self {
        domain.kept_out.fetch_add(1, Ordering::Relaxed);
        Self(domain)
    }
}

impl Drop for KeptOut<'_> {
    fn drop(&mut self) {
        self.0.kept_out.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Domain {
    /// Waits for other exclusive work. Then it keeps new shared guards out, and waits until the
    /// present ones have ended. While it waits, it calls `relax`.
    ///
    /// If other threads wait already, it lets them go first, but only for a moment. Otherwise a
    /// thread that excludes repeatedly would leave the others only short gaps.
    ///
    /// A thread that holds a [`Shared`] or an [`Exclusive`] of the domain must not call this: it
    /// would wait for itself. A thread with a plain guard may call it. Nothing is freed while it
    /// waits.
    pub fn exclude(&self, mut relax: impl FnMut()) -> Exclusive<'_> {
        for _ in 0..GIVE_WAY {
            if self.kept_out.load(Ordering::Relaxed) == 0 {
                break;
            }
            // A waiting thread may have lost its core, so this delay must be short.
            hint::spin_loop();
        }
        let exclusive = match self.keep_out() {
            Some(exclusive) => exclusive,
            None => self.keep_out_later(&mut relax),
        };
        self.any_announcement(|announced| {
            while announced.load(SCAN) & SHARES != 0 {
                relax();
            }
            false
        });
        fence(Ordering::Acquire); // (x4)
        exclusive
    }

    /// Excludes if that needs no wait. Returns `None` if there is other exclusive work, if a thread
    /// waits for it, or if there is a shared guard. It does not queue. It keeps shared guards out
    /// only while it reads the announcements. A [`Reader::try_share`] at that moment fails.
    pub fn try_exclude(&self) -> Option<Exclusive<'_>> {
        let exclusive = self.keep_out()?;
        if self.any_announced(|announced| announced & SHARES != 0) {
            return None;
        }
        fence(Ordering::Acquire); // (x4)
        Some(exclusive)
    }

    /// Whether there is exclusive work, or a thread waits for shared guards to end. Then
    /// [`Reader::try_share`] would fail. This is a hint that orders nothing.
    #[inline]
    #[must_use]
    pub fn is_excluded(&self) -> bool {
        self.mode.load(Ordering::Relaxed).is_excluded()
    }

    /// Keeps new shared guards out, unless another thread does so (x1, x2). Present ones stay.
    /// Dropping the result lets others in, also if the wait for the present ones panics.
    fn keep_out(&self) -> Option<Exclusive<'_>> {
        let before = self.mode.exclude()?;
        let exclusive = Exclusive { domain: self };
        self.mode.fence_after_exclude(before);
        Some(exclusive)
    }

    #[cold]
    fn keep_out_later(&self, relax: &mut impl FnMut()) -> Exclusive<'_> {
        let _counted = KeptOut::new(self);
        loop {
            while self.is_excluded() {
                relax();
            }
            if let Some(exclusive) = self.keep_out() {
                return exclusive;
            }
        }
    }
}

/// Exclusive work on a domain.
#[must_use = "exclusive work ends when this is dropped"]
pub struct Exclusive<'d> {
    domain: &'d Domain,
}

impl Exclusive<'_> {
    /// Whether a thread waits to share or to exclude. If so, long exclusive work should
    /// [yield](Self::yield_now). It takes one load.
    #[inline]
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.domain.kept_out.load(Ordering::Relaxed) != 0
    }

    /// Ends the exclusive work, lets in the threads that wait or another one that excludes, and
    /// excludes again. Shared data may have changed meanwhile. The call lasts until each waiting
    /// thread has noticed, which takes as long as their `relax`.
    pub fn yield_now(self, mut relax: impl FnMut()) -> Self {
        let domain = self.domain;
        drop(self);
        while domain.kept_out.load(Ordering::Relaxed) != 0 && !domain.is_excluded() {
            relax();
        }
        domain.exclude(relax)
    }
}

impl fmt::Debug for Exclusive<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exclusive").finish_non_exhaustive()
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.domain.mode.include();
    }
}
