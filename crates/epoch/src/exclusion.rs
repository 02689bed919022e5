//! Shared and exclusive work, by the announcements that guards make anyway.
//!
//! **Guarantee.** While an [`Exclusive`] is held there is neither a [`Shared`] guard of its domain
//! nor another `Exclusive`, and what the one did happens before what the next does. Exclusive work
//! neither keeps plain guards out nor waits for them. A thread that excludes comes before those
//! that want to share from then on.
//!
//! **Mechanism.** A readers/writer lock whose readers write no cache line that another reader
//! writes. A shared guard has one bit more in its announcement, in the reader's own line. To
//! exclude is to set one bit of a word that sharers read, in the line of the epoch that they read
//! anyway, and to wait for every announcement that has the bit. So sharing costs one load more than
//! a plain guard, however many share. Excluding costs a look at every reader.
//!
//! # Steps
//!
//! | step | by | what |
//! |---|---|---|
//! | s1 | a sharer | announces with the bit |
//! | s2 | the same | a sequentially consistent fence; a light guard has none (`mode.rs`) |
//! | s3 | the same | loads the word; it has a guard if nobody excludes, and withdraws otherwise |
//! | x1 | a thread that excludes | sets the word's bit by compare-exchange |
//! | x2 | the same | a sequentially consistent fence |
//! | x3 | the same | loads each announcement until it has seen it once without the bit |
//! | x4 | the same | a fence with acquire order |
//! | x5 | the same, at its end | removes the word's bit with release order |
//!
//! # Why one of the two sees the other
//!
//! 1. Let s2 precede x2 in the order of fences. Then x3 finds the reader's record and reads s1 or
//!    something later. So it waits until the guard has ended.
//! 2. Let x2 precede s2. Then s3 sees x1 or something later. If that has no such bit, the exclusive
//!    work had already ended. It cannot be a word from before x1.
//! 3. So x3 may look at one reader after the other: a reader that it has passed has no guard, and
//!    gets none before x5.
//!
//! Light guards do not fence at s2. `mode.rs`, whose word it is, says why they are as good.
//!
//! # What happens before what
//!
//! 1. A guard ends with a release store, and the reader's next announcement is one too. So whatever
//!    x3 reads instead of the bit, x4 orders all that the guard did before what the excluding
//!    thread does.
//! 2. In the other direction s3 acquires x5.
//! 3. All changes of the word are exchanges that acquire and release. So exclusive work is one
//!    chain, and reading a word later than an x5 is as good as reading that x5.
//!
//! A refreshed guard announces another epoch with the same bit, by one store, so x3 sees no gap.
//! The count of waiting threads is a hint: it orders nothing.

use crate::domain::{Announced, Domain, Guard, Reader, SHARES};
use crate::sync::{Ordering, SCAN, fence};
use core::fmt;
use core::hint;
use core::mem;
use core::ops::Deref;

/// How often a thread that wants to exclude checks whether waiting threads have had their turn. The
/// delay orders nothing, so models have none.
const GIVE_WAY: u32 = if cfg!(loom) { 0 } else { 8 };

impl Reader {
    /// Takes a guard that keeps exclusive work out. Calls `relax` while there is exclusive work or
    /// a thread waits for it.
    ///
    /// A thread that holds an [`Exclusive`] of the domain must not call it: it would wait for
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
    /// waits for it. Wait-free: what [`pin`](Self::pin) does, and one load.
    ///
    /// A call that fails can still make [`Domain::try_exclude`] fail, for a moment.
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

    /// [`try_share`](Self::try_share), but beside exclusive work it tries again after each of at
    /// most `turns` calls of `relax`, and counts as waiting meanwhile. For callers that must
    /// not wait for long, and that would have to start over if it failed.
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

    /// Withdraws, and announces again when there is no exclusive work; gives up after `turns` calls
    /// of `relax`.
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

    /// Waits without a guard, calling `relax`, until there is a moment without exclusive work;
    /// counts as waiting meanwhile. For callers whose [`try_share`](Self::try_share) failed.
    /// What exclusive work did is ordered before their next success, not before this returns.
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

    /// Whether exclusive work keeps out what was just announced. (s3)
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
    /// Whether a thread waits to exclude. Long shared work [yields](Self::yield_now) then. One
    /// load.
    #[inline]
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.0.reader.domain().is_excluded()
    }

    /// [`Guard::refresh`], without letting exclusive work in. What was reached before may be freed.
    #[inline]
    pub fn refresh(&mut self) {
        self.0.refresh_as(SHARES);
    }

    /// Drops the guard and takes it again by [`Reader::share`]. A thread that waits to exclude
    /// comes first. What was reached or found before may have changed and may have been freed.
    ///
    /// There is a guard afterwards even if `relax` panics: the wait continues without `relax`, and
    /// then the panic.
    pub fn yield_now(&mut self, relax: impl FnMut()) {
        let again = ShareAgain(&mut self.0);
        again.0.announced = again.0.reader.announce_later(relax);
        mem::forget(again);
    }
}

/// Announces again however a wait ends, since the guard is used afterwards.
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
    /// Waits for other exclusive work, then keeps new shared guards out and waits until there are
    /// none. Calls `relax` while it waits.
    ///
    /// If other threads wait already, it lets them go first, but only for a moment. Otherwise a
    /// thread that excludes again and again would leave the others gaps that are hard to hit.
    ///
    /// A thread that holds a [`Shared`] or an [`Exclusive`] of the domain must not call it: it
    /// would wait for itself. With a plain guard it may; nothing is freed while it waits.
    pub fn exclude(&self, mut relax: impl FnMut()) -> Exclusive<'_> {
        for _ in 0..GIVE_WAY {
            if self.kept_out.load(Ordering::Relaxed) == 0 {
                break;
            }
            // A waiting thread may have lost its core, so this must not take long.
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

    /// Excludes if that needs no wait: `None` if there is other exclusive work, a thread waits for
    /// it, or there is a shared guard. It does not queue. It keeps shared guards out only while
    /// it looks at the readers, and a [`Reader::try_share`] at that moment fails.
    pub fn try_exclude(&self) -> Option<Exclusive<'_>> {
        let exclusive = self.keep_out()?;
        if self.any_announced(|announced| announced & SHARES != 0) {
            return None;
        }
        fence(Ordering::Acquire); // (x4)
        Some(exclusive)
    }

    /// Whether there is exclusive work, or a thread waits for shared guards to end: whether
    /// [`Reader::try_share`] would fail. A hint that orders nothing.
    #[inline]
    #[must_use]
    pub fn is_excluded(&self) -> bool {
        self.mode.load(Ordering::Relaxed).is_excluded()
    }

    /// Keeps new shared guards out, unless another thread does (x1, x2). Present ones stay.
    /// Dropping the result lets others in, also if the wait for the present ones ends by a
    /// panic.
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
    /// Whether a thread waits, to share or to exclude. Long exclusive work
    /// [yields](Self::yield_now) then. One load.
    #[inline]
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.domain.kept_out.load(Ordering::Relaxed) != 0
    }

    /// Ends, lets in the threads that wait, or another one that excludes, and excludes again. What
    /// was found before may have changed. It lasts at least until each waiting thread has
    /// noticed, so as long as their `relax` takes.
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
