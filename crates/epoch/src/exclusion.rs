//! Shared and exclusive work, by the announcements that guards make anyway.
//!
//! **Guarantee.** While an [`Exclusive`] is held there is neither a [`Shared`] guard of its domain nor another
//! `Exclusive`, and what the one did happens before what the next does. Plain guards are neither kept out nor waited
//! for. Whoever excludes comes before those who want to share from then on.
//!
//! **Mechanism.** A readers/writer lock whose readers write no cache line that another reader writes. A shared guard
//! has one bit more in its announcement, in the reader's own line. To exclude is to set one bit of a word that sharers
//! read, in the line of the epoch that they read anyway, and to wait for every announcement that has the bit. So
//! sharing costs one load more than a plain guard, however many share; excluding costs a look at every reader.
//!
//! # Why the two sides keep each other out
//!
//! A sharer (s1) announces with the bit, (s2) fences, sequentially consistent, and (s3) loads the word;
//! it has a guard where nobody excludes, and withdraws otherwise. An excluder (x1) sets the word's bit by
//! compare-exchange, (x2) fences likewise, (x3) loads each announcement until it has seen it once without the bit, and
//! then (x4) fences with acquire order. At its end it (x5) takes the word's bit away with release order.
//!
//! *One of them sees the other.* If s2 precedes x2 in the order of fences, x3 finds the reader's record and reads s1
//! or something later: it waits until the guard has ended. If x2 precedes s2, s3 sees x1 or something later; if that
//! has no such bit, exclusive work had already ended. A word from before x1 it cannot be. Hence it does no harm
//! that x3 looks at one reader after the other: who is passed has no guard, and gets none before x5. Light guards do not
//! fence at s2; `mode.rs`, whose word it is, says why that is as good.
//!
//! *What happens before.* A guard ends with a release store, and so does what the reader announces next, so whatever
//! x3 has read instead of the bit, x4 orders all that the guard did before what the excluder does. In the other
//! direction s3 acquires x5. All that changes the word does so by exchanges that acquire and release, so exclusive work is one
//! chain, and reading what is later than an x5 is as good as reading it.
//!
//! A refreshed guard announces another epoch with the same bit, by one store, so x3 sees no gap.
//!
//! The count of those who wait is a hint: it orders nothing.

use crate::domain::{Announced, Domain, Guard, Reader, SHARES};
use crate::sync::{Ordering, SCAN, fence};
use core::fmt;
use core::hint;
use core::mem;
use core::ops::Deref;

/// How often who wants to exclude looks whether those who wait have come to their turn. A delay that orders nothing, so models
/// go without.
const GIVE_WAY: u32 = if cfg!(loom) { 0 } else { 8 };

impl Reader {
    /// Takes a guard that keeps exclusive work out; calls `relax` while there is some, or somebody waits for it.
    ///
    /// A thread that holds an [`Exclusive`] of the domain must not call it: it would wait for itself.
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

    /// Takes a guard that keeps exclusive work out, unless there is some or somebody waits for it. Wait-free: what
    /// [`pin`](Self::pin) does, and one load.
    ///
    /// Without success it still is, for a moment, in the way of [`Domain::try_exclude`].
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

    /// [`try_share`](Self::try_share), but where there is exclusive work it looks again, after each of at most `turns` calls of
    /// `relax`, and counts as somebody who waits meanwhile: for those who must not wait for long, and would have to
    /// begin something again if they had no success.
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

    /// Withdraws, and announces when there is no exclusive work, unless that takes more than `turns` calls of `relax`.
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

    /// Waits without a guard, calling `relax`, until there is a moment without exclusive work, and counts as somebody who
    /// waits meanwhile. For those who had no success with [`try_share`](Self::try_share) and shall not try again in vain;
    /// what exclusive work did is ordered before their next success, not before this returns.
    pub fn wait_included(&self, mut relax: impl FnMut()) {
        if self.domain().is_excluded() {
            let _counted = KeptOut::new(self.domain());
            while self.domain().is_excluded() {
                relax();
            }
        }
    }

    /// Withdraws, and announces when there is no exclusive work. It counts as waiting until it has succeeded, so that
    /// [`Exclusive::yield_now`] does not come before it again.
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

    /// Whether what was just announced is no guard. (s3)
    #[inline]
    fn is_kept_out(&self, announced: Announced) -> bool {
        // Acquire: what exclusive work did happens before what the guard does.
        !announced.light && self.domain().mode.load(Ordering::Acquire).is_excluded()
    }
}

/// A guard during which there is no exclusive work.
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
    /// Whether somebody waits to exclude: long shared work [yields](Self::yield_now) then. One load.
    #[inline]
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.0.reader.domain().is_excluded()
    }

    /// [`Guard::refresh`], without letting exclusive work in: what was reached before may be freed, what is locked
    /// stays so.
    #[inline]
    pub fn refresh(&mut self) {
        self.0.refresh_as(SHARES);
    }

    /// As if the guard were dropped and taken again by [`Reader::share`]: whoever waits to exclude gets in before.
    /// What was reached or found before may have changed and may have been freed.
    ///
    /// Also where `relax` panics there is a guard afterwards: the wait goes on without it, and then the panic.
    pub fn yield_now(&mut self, relax: impl FnMut()) {
        let again = ShareAgain(&mut self.0);
        again.0.announced = again.0.reader.announce_later(relax);
        mem::forget(again);
    }
}

/// Announces again, however a wait ends, since the guard is there to be used afterwards.
struct ShareAgain<'guard, 'reader>(&'guard mut Guard<'reader>);

impl Drop for ShareAgain<'_, '_> {
    fn drop(&mut self) {
        self.0.announced = self.0.reader.announce_later(hint::spin_loop);
    }
}

/// Counts somebody who waits, until it is dropped.
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
    /// Keeps shared guards out and waits until there are none, calling `relax` meanwhile; before that it waits for
    /// other exclusive work likewise. New shared guards are kept out from the beginning of the former on.
    ///
    /// Where somebody waits already, it waits for those first, but for a moment only: a thread that excludes again and again
    /// would leave the others gaps that are hard to meet.
    ///
    /// A thread that holds a [`Shared`] or an [`Exclusive`] of the domain must not call it: it would wait for itself.
    /// With a plain guard it may; nothing is freed while it waits.
    pub fn exclude(&self, mut relax: impl FnMut()) -> Exclusive<'_> {
        for _ in 0..GIVE_WAY {
            if self.kept_out.load(Ordering::Relaxed) == 0 {
                break;
            }
            // Whoever waits may have lost its core, so this is not to take long.
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

    /// Excludes where that needs no wait: `None` where there is other exclusive work, somebody waits for it, or there is a
    /// shared guard. It does not stay in the queue: shared guards are kept out only while it looks at the readers, and a
    /// [`Reader::try_share`] that comes at that moment has no success.
    pub fn try_exclude(&self) -> Option<Exclusive<'_>> {
        let exclusive = self.keep_out()?;
        if self.any_announced(|announced| announced & SHARES != 0) {
            return None;
        }
        fence(Ordering::Acquire); // (x4)
        Some(exclusive)
    }

    /// Whether there is exclusive work or somebody waits for shared guards to end: whether [`Reader::try_share`] would
    /// fail. A hint that orders nothing.
    #[inline]
    #[must_use]
    pub fn is_excluded(&self) -> bool {
        self.mode.load(Ordering::Relaxed).is_excluded()
    }

    /// Keeps new shared guards out, unless somebody else does (x1, x2). Those who are in stay. Dropping the result lets
    /// others in, also where the wait for those who are in ends by a panic.
    fn keep_out(&self) -> Option<Exclusive<'_>> {
        let owed = self.mode.exclude()?;
        let exclusive = Exclusive { domain: self };
        self.mode.pay(owed);
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
    /// Whether somebody waits, to share or to exclude: long exclusive work [yields](Self::yield_now) then. One load.
    #[inline]
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.domain.kept_out.load(Ordering::Relaxed) != 0
    }

    /// Lets go, lets in those who are counted as waiting, or another who excludes, and excludes again. What was found
    /// before may have changed. It lasts at least until each of those who wait has noticed, so as long as their
    /// `relax` takes.
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
