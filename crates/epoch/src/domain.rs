#![expect(
    unsafe_code,
    reason = "readers' records form a list without locks that lives as long as its domain"
)]
//! The epoch, and the readers that announce it.
//!
//! # Steps
//!
//! | step | by | what |
//! |---|---|---|
//! | r1 | a reader that takes a guard | loads the epoch `p` |
//! | r2 | the same | announces `p` |
//! | r3 | the same | a sequentially consistent fence; a light guard has none (see below) |
//! | w1 | a writer | a store that unlinks something |
//! | w2 | the same, taking a stamp | a sequentially consistent fence |
//! | w3 | the same | loads the epoch: the stamp `e` |
//! | a1 | a thread that advances the epoch | loads the epoch |
//! | a2 | the same | a sequentially consistent fence |
//! | a3 | the same | loads all announcements, and gives up unless each is none or the epoch of a1 |
//! | a4 | the same | moves the epoch to the next by compare-exchange |
//! | q1 | a thread that asks whether the domain is quiet | a sequentially consistent fence |
//! | q2 | the same | loads all announcements |
//!
//! A guard loads shared pointers after r3. On x86-64, r2 and r3 are one locked exchange, and the
//! other fences are locked instructions: see `sync.rs`.
//!
//! # Why nothing is freed too early
//!
//! Something unlinked with stamp `e` is freed in epoch `e + 2` or later. Let a guard have reached
//! it.
//!
//! 1. r3 precedes w2 in the order of fences. Otherwise the guard's loads would have seen w1.
//! 2. So w3 returns at least what r1 returned: `p` is at most `e`.
//! 3. Some thread moves the epoch on from `e + 1`, after w3.
//! 4. That thread's a2 comes after r3: its a1 read an epoch at least as new as w3's, and the fence
//!    of w3 came after r3.
//! 5. So its a3 sees the announcement of `p`, or the end of the guard.
//! 6. `p` is not `e + 1`, so its a3 saw the end.
//! 7. The end is a release store, and a fence with acquire order follows a3. So all accesses of the
//!    guard happen before a4.
//! 8. The free loads the epoch that a4 wrote, with acquire order. So all accesses of the guard
//!    happen before the free.
//!
//! The same holds for any store w1 and any thing that is retired after it: the thing is not freed
//! while there is a guard whose loads did not see w1.
//!
//! # Why light guards are as safe
//!
//! In a domain with a barrier most guards are *light*: they have no r3. `mode.rs` proves this
//! promise for each a2 and each q1. Either the later loads of announcements see that of the guard,
//! or a later one of its reader. Or the guard's loads see everything before that a2 or q1. The
//! sections on quiet domains and on later guards need no more than that from r3. The section above
//! also compares r3 with w2. Two steps replace steps 1 to 5. Let a light guard have reached the
//! thing, so its loads did not see w1.
//!
//! 1. All processors see w1 before any sees an epoch above `e`, as w3 loaded `e` after the fence
//!    w2.
//! 2. r1 has acquire order. Had it returned an epoch above `e`, the guard would have seen w1. So
//!    `p` is at most `e`.
//! 3. The thread that moves the epoch on from `e + 1` read that epoch in its a1, so w1 came before
//!    its a2.
//! 4. The guard's loads do not see w1, which came before that a2. So, by the promise, its a3 sees
//!    `p` or the end of the guard.
//!
//! # Why a quiet domain frees everything retired
//!
//! Let a writer unlink things, take a stamp, move the epoch on to `n`, and then find the domain
//! quiet.
//!
//! 1. A guard that q2 did not see has ended, or its r3 comes after q1.
//! 2. If it has ended, all its accesses happen before the writer's next.
//! 3. If its r3 comes after q1, its loads see that the things are unlinked, and its check of the
//!    epoch sees `n`.
//! 4. A guard of epoch `n` has read the epoch that a4 wrote, after the things were unlinked. So it
//!    has not reached them either.
//! 5. So no guard uses the things, and no reader remembers them under epoch `n` (next section).
//!
//! # Why a later guard of the same epoch may use things that an earlier one reached
//!
//! [`Guard::epoch`] returns the announced epoch `p` if it finds, after r3, that the epoch is still
//! `p`.
//!
//! 1. A thing that such a guard reached was unlinked, if at all, with a stamp of `p` or later
//!    (first section). So it is not freed before epoch `p + 2`.
//! 2. Let a later guard, of this or another reader, also have `p` from [`Guard::epoch`].
//! 3. A thread that moves the epoch on from `p + 1` read `p + 1` before its a2.
//! 4. That a2 comes after the later guard's r3. Otherwise the guard's check, a load after r3, would
//!    have seen `p + 1`.
//! 5. So that thread sees the announcement of `p`, which is not `p + 1`, and gives up. The epoch
//!    stays at `p + 1` at most while the later guard lasts.
//!
//! Hence a cache of pointers needs to remember only the epoch.

use crate::Barrier;
use crate::mode::{Mode, QUIET_GUARDS, Seen};
use crate::sync::{
    AtomicBool, AtomicPtr, AtomicU64, Ordering, SCAN, fence, full_fence, light_fence,
};
use crate::try_arc::{TryArc, try_box};
use alloc::boxed::Box;
use core::cell::Cell;
use core::fmt;
use core::ptr;

/// An epoch: a count of advances, in 64 bits that do not wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(u64);

impl Epoch {
    /// An epoch that no domain ever has. It is less than all others.
    pub const NEVER: Self = Self(0);

    /// Whether things that were unlinked in `self` may be freed in `now`.
    pub(crate) const fn is_over_in(self, now: Self) -> bool {
        now.0 >= self.0 + 2
    }

    /// The epoch modulo 3. A table with one place per epoch needs three places: when an epoch
    /// begins, nobody uses the place of the next epoch any more.
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

/// The allocator refused memory. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// The size of the refused allocation.
    pub bytes: usize,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.bytes;
        write!(
            f,
            "the allocator refused {bytes} bytes; nothing has changed: free memory and try again"
        )
    }
}

impl core::error::Error for OutOfMemory {}

/// Readers, and the epoch that they announce. Shared by [`TryArc`].
#[derive(Debug)]
#[repr(align(64))]
pub struct Domain {
    epoch: AtomicU64,
    /// Whether readers fence, and whether a thread excludes. It lies in the cache line of `epoch`,
    /// because guards read both.
    pub(crate) mode: Mode,
    /// The number of threads that wait for exclusive work to end. Only those threads write it, so
    /// it needs no separate cache line.
    pub(crate) kept_out: AtomicU64,
    /// The list of all readers' records, former ones included. Freed with the domain.
    records: AtomicPtr<Record>,
}

/// One reader's announcement, in separate cache lines.
#[derive(Debug)]
#[repr(align(128))]
struct Record {
    /// Twice the epoch of the reader's guard, plus [`SHARES`] for a shared guard. 0 without a
    /// guard.
    announced: AtomicU64,
    /// Whether a [`Reader`] owns the record.
    owned: AtomicBool,
    /// The record that was first in the list before this one. It never changes.
    next: *mut Record,
}

impl Record {
    /// A record that a reader owns.
    fn new() -> Self {
        Self {
            announced: AtomicU64::new(NONE),
            owned: AtomicBool::new(true),
            next: ptr::null_mut(),
        }
    }
}

const NONE: u64 = 0;
/// The bit of an announcement that keeps exclusive work out.
pub(crate) const SHARES: u64 = 1;

impl Domain {
    /// A domain without readers. All its guards fence.
    ///
    /// # Panics
    /// If the allocator refuses memory.
    #[must_use]
    pub fn new() -> TryArc<Self> {
        Self::with_barrier(None)
    }

    /// A domain without readers. Most of its guards need no fence. Instead, a thread that advances
    /// the epoch or excludes calls `barrier`, which fences in all threads.
    ///
    /// Readers fence until one of them has taken about 500 guards without such a call in between.
    /// So frequent advances do not call `barrier` each time. Without a barrier this is
    /// [`new`](Self::new). The domain uses the barrier on x86-64 only, and not under
    /// ThreadSanitizer, which cannot see it.
    ///
    /// ```
    /// # #[cfg(feature = "membarrier")]
    /// # {
    /// use pageferry_epoch::{Barrier, Domain};
    ///
    /// // `None` where the kernel has no such barrier. Then each guard fences.
    /// let domain = Domain::with_barrier(Barrier::membarrier());
    /// let mut reader = domain.register();
    /// let guard = reader.pin();
    /// // What is reached here stays until the guard is dropped.
    /// drop(guard);
    /// assert!(domain.try_advance());
    /// # }
    /// ```
    ///
    /// # Panics
    /// If the allocator refuses memory.
    #[must_use]
    pub fn with_barrier(barrier: Option<Barrier>) -> TryArc<Self> {
        Self::try_with_barrier(barrier).unwrap_or_else(|error| panic!("no domain: {error}"))
    }

    /// [`with_barrier`](Self::with_barrier) for callers that handle a lack of memory.
    ///
    /// # Errors
    /// If the allocator refuses memory.
    pub fn try_with_barrier(barrier: Option<Barrier>) -> Result<TryArc<Self>, OutOfMemory> {
        TryArc::try_new(Self {
            epoch: AtomicU64::new(1),
            mode: Mode::new(barrier),
            kept_out: AtomicU64::new(0),
            records: AtomicPtr::new(ptr::null_mut()),
        })
    }
}

impl TryArc<Domain> {
    /// A new reader, for one thread at a time: [`try_register`](Self::try_register) for callers
    /// that do not handle a lack of memory.
    ///
    /// # Panics
    /// If the allocator refuses a record.
    #[must_use]
    pub fn register(&self) -> Reader {
        self.try_register()
            .unwrap_or_else(|error| panic!("no reader: {error}"))
    }

    /// A new reader, for one thread at a time. It takes the record of a reader that was dropped, or
    /// allocates one.
    ///
    /// # Errors
    /// If the allocator refuses a record.
    pub fn try_register(&self) -> Result<Reader, OutOfMemory> {
        let mut record = self.records.load(Ordering::Acquire);
        while !record.is_null() {
            // SAFETY: records in the list are freed only with the domain, which is borrowed here.
            let known = unsafe { &*record };
            if !known.owned.load(Ordering::Relaxed) && !known.owned.swap(true, Ordering::Acquire) {
                return Ok(self.reader(record));
            }
            record = known.next;
        }
        let raw = Box::into_raw(try_box(Record::new())?);
        let mut first = self.records.load(Ordering::Relaxed);
        loop {
            // SAFETY: the record was made above, and is not shared before the exchange succeeds.
            unsafe { (*raw).next = first };
            // Release: a thread that finds the record sees its contents. A scan that comes too
            // early to find the record may as well have found no announcement: the reader announces
            // after this exchange.
            match self
                .records
                .compare_exchange(first, raw, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return Ok(self.reader(raw)),
                Err(now) => first = now,
            }
        }
    }

    fn reader(&self, record: *const Record) -> Reader {
        Reader {
            domain: self.clone(),
            record,
            streak: Cell::new(Streak::NONE),
        }
    }
}

impl Domain {
    /// The current epoch. A limbo compares stamps with it.
    #[inline]
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        // Acquire: all accesses of the guards that the epoch waited for happen before the caller's
        // next.
        Epoch(self.epoch.load(Ordering::Acquire))
    }

    /// A stamp for everything that the caller has unlinked before: see
    /// [`Limbo::retire`](crate::Limbo::retire).
    #[inline]
    #[must_use]
    pub fn stamp(&self) -> Epoch {
        full_fence(); // (w2)
        Epoch(self.epoch.load(Ordering::Relaxed)) // (w3)
    }

    /// Moves the epoch on, unless a guard announces an older one or another thread moves it at the
    /// same time. Returns whether it moved. Any thread may call it. It reads every reader's record
    /// once. Things may be freed two advances after their stamp was taken.
    pub fn try_advance(&self) -> bool {
        // The compare-exchange needs only a relaxed load. Acquire chains one advance to the next.
        let epoch = self.epoch.load(Ordering::Acquire); // (a1)
        self.mode.fence_before_scan(); // (a2)
        if self.any_announced(|announced| announced != NONE && announced >> 1 != epoch) {
            self.mode.count_failed_scan();
            return false;
        }
        fence(Ordering::Acquire);
        let (both, failed) = (Ordering::AcqRel, Ordering::Relaxed);
        self.epoch
            .compare_exchange(epoch, epoch + 1, both, failed) // (a4)
            .is_ok()
    }

    /// Whether there is no guard at this moment. If so, the caller may free at once everything that
    /// was retired before its last successful [`try_advance`](Self::try_advance), or before an
    /// advance that happened earlier. Stamps do not matter: see
    /// [`Limbo::take`](crate::Limbo::take). It reads every reader's record once.
    pub fn is_quiet(&self) -> bool {
        self.mode.fence_before_scan(); // (q1)
        if self.any_announced(|announced| announced != NONE) {
            return false;
        }
        // All accesses of ended guards happen before the caller's next.
        fence(Ordering::Acquire);
        true
    }

    /// Whether `found` holds for any reader's announcement. The caller fences before and after.
    pub(crate) fn any_announced(&self, mut found: impl FnMut(u64) -> bool) -> bool {
        self.any_announcement(|announced| found(announced.load(SCAN)))
    }

    /// Whether `found` holds for the word of any reader's announcement. `found` may wait for
    /// another value.
    pub(crate) fn any_announcement(&self, mut found: impl FnMut(&AtomicU64) -> bool) -> bool {
        let mut record = self.records.load(Ordering::Acquire);
        while !record.is_null() {
            // SAFETY: as in `try_register`.
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
        // Each reader holds the domain, so there is no reader.
        let mut record = self.records.load(Ordering::Relaxed);
        while !record.is_null() {
            // SAFETY: the record comes from `Box::into_raw` and is in the list once. Nobody else is
            // left.
            record = unsafe { Box::from_raw(record) }.next;
        }
    }
}

/// One thread's place in a domain. It can be sent to another thread and serves one thread at a
/// time.
pub struct Reader {
    domain: TryArc<Domain>,
    record: *const Record,
    /// Counts guards for the turn to light. The `Cell` also makes the reader `!Sync`, which pinning
    /// by `&mut` requires.
    streak: Cell<Streak>,
}

/// A row of guards that fenced although no thread scanned: word and epoch stayed the same.
#[derive(Clone, Copy)]
struct Streak {
    mode: Seen,
    epoch: Epoch,
    guards: u32,
}

impl Streak {
    const NONE: Self = Self {
        mode: Seen::NEVER,
        epoch: Epoch::NEVER,
        guards: 0,
    };
}

// SAFETY: the record is shared through atomics only and lives as long as `domain`. One thread at a
// time uses a reader: it is not `Sync`, and pinning takes `&mut`.
unsafe impl Send for Reader {}

impl Reader {
    fn record(&self) -> &Record {
        // SAFETY: records live as long as the domain, which `self` holds.
        unsafe { &*self.record }
    }

    /// Takes a guard. Wait-free: it takes a few loads, and one exchange or one store
    /// ([`Domain::with_barrier`]).
    #[inline]
    pub fn pin(&mut self) -> Guard<'_> {
        let announced = self.announce(0);
        Guard {
            reader: self,
            announced,
        }
    }

    /// Announces the current epoch and `flags`.
    #[inline]
    pub(crate) fn announce(&self, flags: u64) -> Announced {
        let (domain, announced) = (&*self.domain, &self.record().announced);
        // Acquire: a light guard sees every unlink before this epoch. (r1)
        let epoch = Epoch(domain.epoch.load(Ordering::Acquire));
        let announcement = epoch.0 << 1 | flags;
        // Loom models of domains without a barrier skip this load, to explore less.
        let asks = domain.mode.has_barrier() || !cfg!(loom);
        if asks && domain.mode.load(Ordering::Relaxed).is_light() {
            // Release: the accesses of earlier guards of this reader happen before a scan that sees
            // this. (l1 to l4)
            announced.store(announcement, Ordering::Release);
            light_fence();
            if domain.mode.load(Ordering::Acquire).is_light() {
                return Announced { epoch, light: true };
            }
            fence_late();
        } else if domain.mode.has_barrier() {
            self.announce_and_count(epoch, announcement);
        } else {
            announce_and_fence(announced, announcement);
        }
        Announced {
            epoch,
            light: false,
        }
    }

    /// Announces and fences in a domain with a barrier. After enough guards without a scan between
    /// them, it turns the domain light.
    #[inline(never)]
    fn announce_and_count(&self, epoch: Epoch, announcement: u64) {
        announce_and_fence(&self.record().announced, announcement);
        let mode = self.domain.mode.load(Ordering::Relaxed);
        let streak = self.streak.get();
        if streak.mode != mode || streak.epoch != epoch {
            self.streak.set(Streak {
                mode,
                epoch,
                guards: 1,
            });
        } else if streak.guards < QUIET_GUARDS {
            self.streak.set(Streak {
                guards: streak.guards + 1,
                ..streak
            });
        } else {
            self.domain.mode.turn_light(mode);
        }
    }

    /// Ends the announcement. Release: the accesses of the guard happen before a scan that sees
    /// this.
    #[inline]
    pub(crate) fn withdraw(&self) {
        self.record().announced.store(NONE, Ordering::Release);
    }

    /// The domain.
    #[must_use]
    pub const fn domain(&self) -> &TryArc<Domain> {
        &self.domain
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // This ends a guard that was forgotten (`mem::forget`).
        self.withdraw();
        // Release: the next owner announces after this owner's guard has ended.
        self.record().owned.store(false, Ordering::Release);
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader").finish_non_exhaustive()
    }
}

/// Announces and fences. (r2, r3)
#[inline]
fn announce_and_fence(announced: &AtomicU64, announcement: u64) {
    // Release: the accesses of earlier guards of this reader happen before a scan that sees this
    // announcement.
    #[cfg(all(target_arch = "x86_64", not(any(loom, shuttle, miri))))]
    {
        use crate::sync::full_fence_after_exchange;
        // An exchange is cheaper than a store and a fence.
        announced.swap(announcement, Ordering::SeqCst);
        full_fence_after_exchange();
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(loom, shuttle, miri)))))]
    {
        announced.store(announcement, Ordering::Release);
        full_fence();
    }
}

/// The fence of a guard that began light and found that readers must fence.
#[cold]
fn fence_late() {
    full_fence();
}

/// The announcement of a reader.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Announced {
    epoch: Epoch,
    /// Whether the reader announced without a fence. Then no thread excluded, and a thread that
    /// excludes later finds the announcement.
    pub(crate) light: bool,
}

/// A read section: while it lives, nothing that the reader reaches is freed.
#[derive(Debug)]
#[must_use = "things that were reached may be freed as soon as the guard is dropped"]
pub struct Guard<'reader> {
    pub(crate) reader: &'reader Reader,
    pub(crate) announced: Announced,
}

impl Guard<'_> {
    /// The epoch that this guard announces, or [`Epoch::NEVER`] if the epoch has moved on since.
    /// Things that a guard reached may be used under any guard of the same domain with the same
    /// epoch other than `NEVER`. It takes one load.
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

    /// Drops the guard and takes it again. This takes one load if the epoch has not moved. A reader
    /// that holds a guard for long calls this from time to time, so that memory can be freed.
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
