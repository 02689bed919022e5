#![expect(
    unsafe_code,
    reason = "readers' records form a list without locks that lives as long as its domain"
)]
//! The epoch, and the readers that announce it.
//!
//! # Why nothing is freed too early
//!
//! A reader takes a guard by (r1) loading the epoch, (r2) announcing it, (r3) a sequentially consistent fence (but see below),
//! and only then loads shared pointers. A writer unlinks something by (w1) a store, then takes a stamp: (w2) such
//! a fence, (w3) a load of the epoch `e`. Whoever moves the epoch on does (a1) a load of it, (a2) a fence, (a3)
//! loads of all announcements, and (a4) a compare-exchange to the next, if each is none or equal to what a1 gave.
//!
//! Let a guard have reached the thing. Then r3 precedes w2 in the order of fences, or the guard's loads would have
//! seen w1. So w3 gives at least what r1 gave: the announced epoch `p` is at most `e`. The thing is freed in epoch
//! `e + 2` or later, so somebody moves the epoch from `e + 1` on, after w3; its a2 comes after r3 too (it
//! read an epoch at least as new as w3, whose fence came after r3), so its a3 sees the announcement of `p`, or the guard's
//! end. `p` is not `e + 1`, so it must have seen the end. That store has release order and a fence
//! with acquire order follows a3, so all the guard did happens before a4, and before the free, whose load
//! of the epoch acquires a4.
//!
//! On x86, r2 and r3 are one locked exchange, and other fences locked instructions: see `sync.rs`.
//!
//! What is said of the thing and of w1 holds of any store w1 and what is retired after it: it is not freed while there is a guard
//! whose loads did not see w1.
//!
//! # Why guards without a fence are as good
//!
//! In a domain with a barrier most guards are *light*: they have no r3. Then `mode.rs` promises for each a2 and each q1 (below) that the
//! loads of the announcements find what the guard has announced, or a later announcement of that reader; or else the guard's loads see
//! what came before that a2 or q1. For what follows below that is what r3 is for. For what is above it takes two steps, in place of the
//! comparison with w2. Let a light guard have reached the thing, so its loads did not see w1. First, `p` is at most `e`: w1 was seen by
//! all processors when w3 loaded `e`, thus before any saw a greater epoch; had r1, which acquires, given one, the guard would
//! have seen w1. Second, whoever moves the epoch on from `e + 1` has read that in a1, so w1 came before its a2, and the guard's loads do
//! not see what came before that; so its a3 finds `p`, or the guard's end.
//!
//! # Why what is old may go when it is quiet
//!
//! [`Domain::is_quiet`] fences (q1) and looks at all announcements (q2). Let somebody unlink things, take a stamp, move the
//! epoch on to `n`, and then find it quiet. A guard that q2 did not see has ended, and all it did happens before; or its r3
//! comes after q1, so its loads see the things unlinked, and its check of the epoch sees `n`. A guard of epoch `n`
//! has read what a4 wrote, after the things were unlinked, so it has not reached them either. So nobody uses the
//! things, or will: neither a guard, nor what a guard of epoch `n` has remembered for later (below).
//!
//! # Why what one guard reached may be used under a later one
//!
//! [`Guard::epoch`] gives the announced epoch `p` if it is still current, so it was after r3. What a guard of epoch `p`
//! reached was unlinked, if at all, with a stamp of `p` or later (above), so it is not freed before epoch
//! `p + 2`. A later guard of the same reader, or another, whose `epoch` gives `p` as well keeps the epoch at
//! `p + 1` at most: whoever moves it on from `p + 1` had read that value before its fence, so that fence comes
//! after the guard's r3 (else the guard's check, a load after r3, would have seen `p + 1`), so it sees the
//! announcement of `p`, which is not `p + 1`. Hence caches of pointers need no more than to remember the epoch.

use crate::Barrier;
use crate::mode::{CALM, Mode, Seen};
use crate::sync::{
    AtomicBool, AtomicPtr, AtomicU64, Ordering, SCAN, fence, full_fence, light_fence,
};
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::cell::Cell;
use core::fmt;
use core::ptr;

/// The count of epochs at some moment; 64 bits do not wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(u64);

impl Epoch {
    /// An epoch that never is: less than all others.
    pub const NEVER: Self = Self(0);

    /// Whether what was unlinked in `self` may be freed in `now`.
    pub(crate) const fn is_over_in(self, now: Self) -> bool {
        now.0 >= self.0 + 2
    }

    /// Which of three consecutive epochs this is: 0, 1 or 2. For tables with one place an epoch, whose places of the
    /// epoch after next nobody uses any more.
    #[must_use]
    pub const fn modulo_3(self) -> usize {
        (self.0 % 3) as usize
    }

    /// The epoch after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Readers, and the epoch that they announce. Shared by `Arc`.
#[derive(Debug)]
#[repr(align(64))]
pub struct Domain {
    epoch: AtomicU64,
    /// Whether readers fence, and whether somebody excludes. In the line of `epoch`, as guards read both.
    pub(crate) mode: Mode,
    /// How many wait for exclusive work to end. It is written by those only, so it need not have a line of its own.
    pub(crate) kept_out: AtomicU64,
    /// The records of all readers there ever were; freed with the domain.
    records: AtomicPtr<Record>,
}

/// What came of [`Domain::try_advance_seldom`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Attempt {
    /// The epoch is as it was: a guard announces an older one.
    Held,
    /// Another thread has moved the epoch on at the same time.
    Raced,
    /// The epoch has moved on, and some guard announces the one before.
    Moved,
    /// The epoch has moved on, and no guard was seen. There may be one by now: see [`Domain::is_quiet`].
    MovedAlone,
}

impl Attempt {
    /// Whether this attempt has moved the epoch on.
    #[must_use]
    pub const fn has_moved(self) -> bool {
        matches!(self, Self::Moved | Self::MovedAlone)
    }
}

/// One reader's announcement, in cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Record {
    /// Twice the epoch of the reader's guard, and [`SHARES`] where it is a shared one; 0 without a guard.
    announced: AtomicU64,
    /// Whether a [`Reader`] owns the record.
    owned: AtomicBool,
    /// The record that was the first before this one came; never changes.
    next: *mut Record,
}

const NONE: u64 = 0;
/// In an announcement: the guard keeps exclusive work out.
pub(crate) const SHARES: u64 = 1;

impl Domain {
    /// A domain without readers. Taking a guard is an exchange that is a full memory barrier.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Self::with_barrier(None)
    }

    /// A domain without readers, most of whose guards need no memory barrier: `barrier` makes one in all threads where somebody
    /// moves the epoch on or excludes.
    ///
    /// Readers go through barriers of their own as long as no one of them has 500 guards between two such demands; so
    /// frequent demands do not call `barrier` each time. Who knows that it demands seldom says so ([`try_advance_seldom`](Self::try_advance_seldom)). Without a barrier it is [`new`](Self::new). It is not used on processors other than x86-64,
    /// AArch64 and RISC-V, nor under Miri and ThreadSanitizer, which cannot see it.
    ///
    /// ```
    /// # #[cfg(feature = "membarrier")]
    /// # {
    /// use pageferry_epoch::{Barrier, Domain};
    ///
    /// // `None` where the kernel has no such barrier: then readers go through one of their own each time.
    /// let domain = Domain::with_barrier(Barrier::membarrier());
    /// let mut reader = domain.register();
    /// let guard = reader.pin();
    /// // What is reached here stays until the guard goes.
    /// drop(guard);
    /// assert!(domain.try_advance());
    /// # }
    /// ```
    #[must_use]
    pub fn with_barrier(barrier: Option<Barrier>) -> Arc<Self> {
        Arc::new(Self {
            epoch: AtomicU64::new(1),
            mode: Mode::new(barrier),
            kept_out: AtomicU64::new(0),
            records: AtomicPtr::new(ptr::null_mut()),
        })
    }

    /// Whether readers may go without barriers of their own: it was made [with](Self::with_barrier) one, on processors where that is enough.
    #[inline]
    #[must_use]
    pub fn has_barrier(&self) -> bool {
        self.mode.has_barrier()
    }

    /// A new reader, for one thread at a time. Takes the record of one that has gone, or allocates one.
    #[must_use]
    pub fn register(self: &Arc<Self>) -> Reader {
        let mut record = self.records.load(Ordering::Acquire);
        while !record.is_null() {
            // SAFETY: records in the list are freed with the domain only, which is borrowed here.
            let known = unsafe { &*record };
            if !known.owned.load(Ordering::Relaxed) && !known.owned.swap(true, Ordering::Acquire) {
                return self.reader(record);
            }
            record = known.next;
        }
        let mut first = self.records.load(Ordering::Relaxed);
        let mut record = Box::new(Record {
            announced: AtomicU64::new(NONE),
            owned: AtomicBool::new(true),
            next: first,
        });
        loop {
            let raw = Box::into_raw(record);
            // Release: who finds the record finds what is in it. A scan that misses it because it came too
            // early is as one that finds no announcement: this comes before the announcement.
            match self
                .records
                .compare_exchange(first, raw, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return self.reader(raw),
                Err(now) => {
                    first = now;
                    // SAFETY: made by `into_raw` above and not shared, as the exchange failed.
                    record = unsafe { Box::from_raw(raw) };
                    record.next = first;
                }
            }
        }
    }

    fn reader(self: &Arc<Self>, record: *const Record) -> Reader {
        Reader {
            domain: Arc::clone(self),
            record,
            calm: Cell::new(Calm::NOT),
        }
    }

    /// The current epoch; what a limbo frees by.
    #[inline]
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        // Acquire: all that guards did which the epoch waited for happens before what is done next.
        Epoch(self.epoch.load(Ordering::Acquire))
    }

    /// The stamp of all that the caller has unlinked before: see [`Limbo::retire`](crate::Limbo::retire).
    #[inline]
    #[must_use]
    pub fn stamp(&self) -> Epoch {
        full_fence();
        Epoch(self.epoch.load(Ordering::Relaxed))
    }

    /// Moves the epoch on, unless a guard announces an older one or another thread moves it at the same time. Any thread may call it; it looks at every reader's
    /// record once. Two advances after a stamp was taken, what has that stamp may be freed.
    pub fn try_advance(&self) -> bool {
        let attempt = self.advance(Mode::demand);
        if attempt == Attempt::Held {
            self.mode.ask_again();
        }
        attempt.has_moved()
    }

    /// [`try_advance`](Self::try_advance) for who calls it seldom, having much to free each time: in a domain
    /// [with a barrier](Self::with_barrier) readers go on without barriers of their own, and each call pays for one in all threads, where they do.
    /// It pays where a reader takes some hundred guards or more between two calls.
    pub fn try_advance_seldom(&self) -> Attempt {
        self.advance(Mode::demand_of_light)
    }

    fn advance(&self, demand: impl FnOnce(&Mode)) -> Attempt {
        // Relaxed would do for the compare-exchange; acquire chains one advance to the next.
        let epoch = self.epoch.load(Ordering::Acquire);
        demand(&self.mode);
        let mut alone = true;
        if self.any_announced(|announced| {
            alone &= announced == NONE;
            announced != NONE && announced >> 1 != epoch
        }) {
            return Attempt::Held;
        }
        fence(Ordering::Acquire);
        let (both, failed) = (Ordering::AcqRel, Ordering::Relaxed);
        match self.epoch.compare_exchange(epoch, epoch + 1, both, failed) {
            Ok(_) if alone => Attempt::MovedAlone,
            Ok(_) => Attempt::Moved,
            Err(_) => Attempt::Raced,
        }
    }
}

impl Domain {
    /// Whether there is no guard at this moment. Then all that was retired before the last successful
    /// [`try_advance`](Self::try_advance) by the caller, or before one that happened earlier, may be freed at
    /// once, whatever its stamp: see [`Limbo::take`](crate::Limbo::take). It looks at every reader's record once, and leaves
    /// readers without barriers of their own where they are ([`try_advance_seldom`](Self::try_advance_seldom)).
    pub fn is_quiet(&self) -> bool {
        self.mode.demand_of_light();
        if self.any_announced(|announced| announced != NONE) {
            return false;
        }
        // All that guards did which have gone happens before what the caller does next.
        fence(Ordering::Acquire);
        true
    }

    /// Whether `found` holds for a reader's announcement. The caller fences, before and after.
    pub(crate) fn any_announced(&self, mut found: impl FnMut(u64) -> bool) -> bool {
        self.any_announcement(|announced| found(announced.load(SCAN)))
    }

    /// Whether `found` holds for the word of a reader's announcement. It may wait for another value.
    pub(crate) fn any_announcement(&self, mut found: impl FnMut(&AtomicU64) -> bool) -> bool {
        let mut record = self.records.load(Ordering::Acquire);
        while !record.is_null() {
            // SAFETY: as in `register`.
            let known = unsafe { &*record };
            if found(&known.announced) {
                return true;
            }
            record = known.next;
        }
        false
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // Each reader holds the domain, so there is none.
        let mut record = self.records.load(Ordering::Relaxed);
        while !record.is_null() {
            // SAFETY: made by `Box::into_raw`, in the list once, and nobody else is left.
            record = unsafe { Box::from_raw(record) }.next;
        }
    }
}

/// One thread's place in a domain. It can be sent to another thread, and serves one at a time.
pub struct Reader {
    domain: Arc<Domain>,
    record: *const Record,
    /// Makes the reader `!Sync`, too, as pinning it by `&mut` asks for.
    calm: Cell<Calm>,
}

/// How many guards in a row have fenced in vain.
#[derive(Clone, Copy)]
struct Calm {
    mode: Seen,
    epoch: Epoch,
    guards: u32,
}

impl Calm {
    const NOT: Self = Self {
        mode: Seen::NEVER,
        epoch: Epoch::NEVER,
        guards: 0,
    };
}

// SAFETY: the record is shared by atomics only and lives as long as `domain`; a reader is used from one thread
// at a time since it is not `Sync` and pinning it takes `&mut`.
unsafe impl Send for Reader {}

impl Reader {
    fn record(&self) -> &Record {
        // SAFETY: records live as long as the domain, which `self` holds.
        unsafe { &*self.record }
    }

    /// Takes a guard. Wait-free: some loads and one exchange, or one store ([`Domain::with_barrier`]).
    #[inline]
    pub fn pin(&mut self) -> Guard<'_> {
        let announced = self.announce(0);
        Guard {
            reader: self,
            announced,
        }
    }

    /// Announces the current epoch, and `flags`.
    #[inline]
    pub(crate) fn announce(&self, flags: u64) -> Announced {
        let (domain, announced) = (&*self.domain, &self.record().announced);
        // Acquire: a light guard sees what was unlinked before this epoch.
        let epoch = Epoch(domain.epoch.load(Ordering::Acquire));
        let announcement = epoch.0 << 1 | flags;
        // Models of domains without a barrier go without the load.
        let asks = domain.mode.has_barrier() || !cfg!(loom);
        if asks && domain.mode.load(Ordering::Relaxed).is_light() {
            // Release: what an earlier guard of this reader did happens before whoever sees this announcement. (l1 to l4)
            announced.store(announcement, Ordering::Release);
            light_fence();
            if domain.mode.load(Ordering::Acquire).is_light() {
                return Announced { epoch, light: true };
            }
            fence_after_all();
        } else if domain.mode.has_barrier() {
            self.announce_calmly(epoch, announcement);
        } else {
            announce_and_fence(announced, announcement);
        }
        Announced {
            epoch,
            light: false,
        }
    }

    /// Announces with a fence where that need not be so, if it was in vain often enough.
    #[inline(never)]
    fn announce_calmly(&self, epoch: Epoch, announcement: u64) {
        announce_and_fence(&self.record().announced, announcement);
        let mode = self.domain.mode.load(Ordering::Relaxed);
        let calm = self.calm.get();
        if calm.mode != mode || calm.epoch != epoch {
            self.calm.set(Calm {
                mode,
                epoch,
                guards: 1,
            });
        } else if calm.guards < CALM {
            self.calm.set(Calm {
                guards: calm.guards + 1,
                ..calm
            });
        } else {
            self.domain.mode.turn_light(mode);
        }
    }

    /// Ends what was announced. Release: what the guard did happens before whoever sees this.
    #[inline]
    pub(crate) fn withdraw(&self) {
        self.record().announced.store(NONE, Ordering::Release);
    }

    /// The domain.
    #[must_use]
    pub const fn domain(&self) -> &Arc<Domain> {
        &self.domain
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // A guard that was forgotten ends here.
        self.withdraw();
        // Release: the next owner announces after this one has ended.
        self.record().owned.store(false, Ordering::Release);
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").finish_non_exhaustive()
    }
}

/// Announces, and goes through a full memory barrier.
#[inline]
fn announce_and_fence(announced: &AtomicU64, announcement: u64) {
    // Release: what an earlier guard of this reader did happens before whoever sees this announcement.
    #[cfg(all(target_arch = "x86_64", not(any(loom, shuttle, miri))))]
    {
        use crate::sync::full_fence_after_exchange;
        // Cheaper than a store and a fence.
        announced.swap(announcement, Ordering::SeqCst);
        full_fence_after_exchange();
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(loom, shuttle, miri)))))]
    {
        announced.store(announcement, Ordering::Release);
        full_fence();
    }
}

/// What a guard does that began light and is not.
#[cold]
fn fence_after_all() {
    full_fence();
}

/// What a reader announced just now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Announced {
    epoch: Epoch,
    /// Whether that was without a fence. Then nobody excluded, and who does so from then on finds it.
    pub(crate) light: bool,
}

/// Witness that nothing the reader reaches is freed.
#[derive(Debug)]
#[must_use = "what was reached may be freed as soon as the guard is dropped"]
pub struct Guard<'reader> {
    pub(crate) reader: &'reader Reader,
    pub(crate) announced: Announced,
}

impl Guard<'_> {
    /// The epoch this guard holds, or [`Epoch::NEVER`] where that has moved on since. What a guard reached may be used
    /// under any guard of the same domain that has had the same epoch, other than `NEVER`; see the module's first
    /// lines. One load.
    #[inline]
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        let Announced { epoch, .. } = self.announced;
        if self.has_moved_on() {
            Epoch::NEVER
        } else {
            epoch
        }
    }

    fn has_moved_on(&self) -> bool {
        self.reader.domain.epoch.load(Ordering::Relaxed) != self.announced.epoch.0
    }

    /// As if the guard were dropped and taken again, at the price of one load where the epoch has not moved. A
    /// reader that holds its guard for long calls it now and then, so that memory can be freed.
    #[inline]
    pub fn refresh(&mut self) {
        self.refresh_as(0);
    }

    /// [`refresh`](Self::refresh) for a guard that announces `flags`.
    #[inline]
    pub(crate) fn refresh_as(&mut self, flags: u64) {
        if self.has_moved_on() {
            self.announced = self.reader.announce(flags);
        }
    }
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.reader.withdraw();
    }
}
