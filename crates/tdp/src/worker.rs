#![expect(
    unsafe_code,
    reason = "owns a record of the MMU it holds, and frees tables when their grace period is over"
)]
//! A worker: one thread's access to the tables, and its sweeps.

use crate::batch::Batch;
use crate::change::{Seen, Session, WorkerState};
use crate::format::{Access, Format, Leaf};
use crate::invalidate::Ticket;
use crate::log::Log;
use crate::mmu::Mmu;
use crate::pages::{Cache, OutOfTables};
use crate::platform::Platform;
use crate::sync::Ordering;
use crate::waiting::{MOST_WAITING, free_expired};
use crate::walk::Walk;
use alloc::sync::Arc;
use core::fmt;
use core::mem;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange};
use pageferry_epoch::{Guard, Limbo, OutOfMemory, Reader};

/// One thread's access to an [`Mmu`]. Each vCPU has one, and each thread that maintains tables.
///
/// It owns data that threads must not share: a reader of the epoch, pages for new tables, counts,
/// and tables that wait to be freed.
///
/// Calls that take permissions or translations away flush the TLBs before they return, on the
/// caller's thread and without the MMU lock. They may wait for other workers' calls to end. So a
/// thread that the platform's flush waits for must not make them.
///
/// Dropping it waits for nobody. If a guard may still use some of its tables, it leaves them to the
/// other workers and the MMU.
pub struct Worker<F: Format, P: Platform> {
    pub(crate) state: WorkerState,
    pub(crate) reader: Reader,
    /// The number of calls of [`deferred`](Self::deferred) in progress.
    deferring: u32,
    // Last: `state.counts` is a record of it.
    pub(crate) mmu: Arc<Mmu<F, P>>,
}

/// A translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The contents of the leaf. Its frame is that of the leaf's first page.
    pub leaf: Leaf,
    /// The level of the table that holds it: 1 for 4 KiB, 2 for 2 MiB, 3 for 1 GiB.
    pub level: u32,
}

/// The result of a walk for an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// A leaf allows the access.
    Allowed(Found),
    /// There is a leaf, but it denies the access.
    Denied(Found),
    /// There is no leaf.
    Absent,
    /// There is no leaf, but a [marker](Worker::mark_mmio): no slot held the frame. If the marker
    /// is not [current](crate::is_mmio_current), this means the same as `Absent`.
    Mmio {
        /// The low bits of the slots' generation at which the marker was made.
        generation: u64,
    },
}

/// The kind of guard that a sweep holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    /// A plain guard. It keeps memory, and excludes nothing.
    Guard,
    /// The shared side of the MMU lock.
    Shared,
    /// The exclusive side.
    Exclusive,
}

/// The next step of a sweep after it has visited an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// Continue: down, side or up.
    On,
    /// Continue, but not down.
    Side,
    /// Read the same entry again: another thread has changed it.
    Again,
    /// Release the lock, get more pages for tables, and return to the same entry.
    NeedsTable,
    /// Release the lock, wait briefly for tables to be freed (once a sweep), and return to the same
    /// entry.
    NeedsRoom,
}

/// The reason why a turn ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// It was over, or long enough.
    Well,
    /// As [`Then::NeedsTable`].
    NeedsTable,
    /// As [`Then::NeedsRoom`].
    NeedsRoom,
}

/// The answer for an entry that is no leaf.
#[inline]
fn absent<F: Format>(value: u64) -> Look {
    if F::is_mmio(value) {
        let generation = F::mmio_generation(value);
        Look::Mmio { generation }
    } else {
        Look::Absent
    }
}

impl<F: Format, P: Platform> Mmu<F, P> {
    /// A worker, for one thread at a time. Callers that handle a lack of memory use
    /// [`try_worker`](Self::try_worker).
    ///
    /// # Panics
    /// If the allocator refuses memory for the worker's records.
    #[must_use]
    pub fn worker(self: &Arc<Self>) -> Worker<F, P> {
        self.try_worker()
            .unwrap_or_else(|error| panic!("no worker: {error}"))
    }

    /// A worker, for one thread at a time. It takes the records of a worker that was dropped, or
    /// allocates new ones.
    ///
    /// # Errors
    /// If the allocator refuses memory for the worker's records.
    pub fn try_worker(self: &Arc<Self>) -> Result<Worker<F, P>, OutOfMemory> {
        Worker::new(Arc::clone(self))
    }
}

impl<F: Format, P: Platform> Worker<F, P> {
    /// The number of tables that a vCPU's fault needs at most: one on each level below the root.
    pub(crate) const FAULT_TABLES: usize = F::LEVELS as usize - 1;
    /// The number of times that a fault tests whether exclusive work is over. Models do not wait.
    pub(crate) const SPINS: u32 = if cfg!(any(loom, shuttle)) { 0 } else { 32 };
    /// The number of times that a fault starts from the root before it gives up on frozen entries.
    pub(crate) const TRIES: u32 = 8;
    /// The number of entries after which a sweep tests whether a thread waits for it.
    const ASK: u32 = 64;
    /// The number of entries after which a sweep releases the lock in any case, so that memory can
    /// be freed.
    const MOST: u32 = 1 << 15;

    /// The number of times that a sweep tests whether tables are freed, before it leaves tables
    /// linked.
    const ROOM_TRIES: u32 = if cfg!(any(loom, shuttle)) { 2 } else { 1000 };
    /// The number of times that a worker's drop tests whether its tables are freed.
    const LAST_TRIES: u32 = 8;

    /// The number of one worker's tables that wait for a grace period at which its calls stop
    /// cutting tables off.
    ///
    /// A call at this bound waits briefly for other workers' calls to end. If some last longer (for
    /// example a [`scan`](Self::scan) whose callback blocks), it continues without cutting off. A
    /// zap then empties tables and leaves them linked, and a recovery leaves small pages. A later
    /// zap or recovery of the range does the rest. So at most this many tables wait, plus those of
    /// the last subtree, and no call waits for long.
    pub const MOST_WAITING: usize = MOST_WAITING;

    fn new(mmu: Arc<Mmu<F, P>>) -> Result<Self, OutOfMemory> {
        // SAFETY: `mmu` is dropped after `state`. On an error it is dropped last too: a parameter
        // outlives the locals.
        let counts = unsafe { mmu.counts.try_register()? };
        let reader = mmu.domain().try_register()?;
        Ok(Self {
            state: WorkerState {
                cache: Cache::new(),
                batch: Batch::new(),
                counts,
                limbo: Limbo::new(),
                has_waited: false,
            },
            reader,
            deferring: 0,
            mmu,
        })
    }

    /// The MMU.
    #[must_use]
    pub const fn mmu(&self) -> &Arc<Mmu<F, P>> {
        &self.mmu
    }

    /// The current translation of `gfn`. Wait-free: a guard, and a load a level.
    #[inline]
    #[must_use]
    pub fn walk(&mut self, gfn: Gfn) -> Option<Found> {
        if gfn >= F::GFN_LIMIT {
            return None;
        }
        let guard = self.reader.pin();
        let (table, value) = self.mmu.top(&guard).descend(self.mmu.platform(), gfn);
        found::<F>(value, table.level())
    }

    /// Does the hardware's walk in software: finds the leaf for `gfn`. If the leaf allows `access`,
    /// and the format's hardware sets accessed and dirty bits, this sets them too. It does so by
    /// compare-exchange, without a lock, and without a report to a log.
    #[inline]
    #[must_use]
    pub fn look(&mut self, gfn: Gfn, access: Access) -> Look {
        if gfn >= F::GFN_LIMIT {
            return Look::Absent;
        }
        let guard = self.reader.pin();
        let (table, mut value) = self.mmu.top(&guard).descend(self.mmu.platform(), gfn);
        let level = table.level();
        loop {
            let Some(leaf) = found::<F>(value, level) else {
                return absent::<F>(value);
            };
            if !F::allows(value, access) {
                return Look::Denied(leaf);
            }
            let dirty = if access.write { F::DIRTY } else { 0 };
            let new = value | (F::ACCESSED | dirty) & F::HARDWARE_UPDATES;
            if new == value {
                return Look::Allowed(leaf);
            }
            let set =
                table
                    .entry(gfn)
                    .compare_exchange(value, new, Ordering::AcqRel, Ordering::Acquire);
            value = set.map_or_else(|now| now, |_| new);
        }
    }

    /// The leaf that allows `access` to `gfn`, as in [`look`](Self::look). `None` if the hardware
    /// would fault.
    #[inline]
    #[must_use]
    pub fn translate(&mut self, gfn: Gfn, access: Access) -> Option<Found> {
        match self.look(gfn, access) {
            Look::Allowed(found) => Some(found),
            Look::Denied(_) | Look::Absent | Look::Mmio { .. } => None,
        }
    }

    /// Calls `visit` with each leaf that covers a frame of `range`, and the leaf's first frame. The
    /// leaf is as the walk meets it. Takes no lock.
    ///
    /// `visit` runs under a guard, so no table is freed before it returns. It may use other
    /// workers, but [`zap_all`](Self::zap_all) would wait for this call to end.
    pub fn scan(&mut self, range: GfnRange, mut visit: impl FnMut(Gfn, Found)) {
        let swept = self.sweep(range, 1, Hold::Guard, &(), |_, seen| {
            if let Some(found) = found::<F>(seen.value, seen.level) {
                visit(seen.first, found);
            }
            Then::On
        });
        debug_assert!(swept.is_ok(), "looking needs no tables");
    }

    /// The moment at which a fault begins. Take it before you look up the memory slot or the host's
    /// frame.
    #[inline]
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        self.mmu.invalidations.ticket()
    }

    /// Whether `gfn` is being invalidated, so that a fault there would be refused. This hint costs
    /// two loads, and saves a look-up in vain.
    #[inline]
    #[must_use]
    pub fn is_invalidating(&self, gfn: Gfn) -> bool {
        self.mmu.invalidations.covers(gfn, 1)
    }

    /// Waits until no thread holds the exclusive side. Call it after a fault was refused with
    /// [`Excluded`](crate::Refused::Excluded), if the platform's flush does not wait for this
    /// thread.
    pub fn wait(&mut self) {
        let mmu = &*self.mmu;
        self.reader.wait_included(|| mmu.platform().relax());
    }

    /// Makes several calls with one flush. The calls inside `f` leave their flush to the end of
    /// this one. They may still flush if they cut off many tables.
    pub fn deferred<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> R {
        /// Decrements the count, also if `f` panics.
        struct Within<'w, F: Format, P: Platform>(&'w mut Worker<F, P>);
        impl<F: Format, P: Platform> Drop for Within<'_, F, P> {
            fn drop(&mut self) {
                self.0.deferring -= 1;
                self.0.finish();
            }
        }
        self.deferring += 1;
        f(Within(self).0)
    }

    /// Ends every call that takes permissions or translations away.
    pub(crate) fn finish(&mut self) {
        if self.deferring == 0 {
            self.flush();
        }
    }

    /// Flushes the TLBs if any worker has taken something away and not flushed yet. After this,
    /// TLBs contradict no change that happened before the call.
    pub fn flush(&mut self) {
        self.settle();
        let platform = self.mmu.platform();
        self.mmu.unflushed.pay(platform, all_frames::<F>());
    }

    /// Frees tables of this worker, and of dropped workers, that nobody can use any more. Returns
    /// the number of these tables that still wait.
    ///
    /// Calls that cut tables off also free more tables than they cut off. So this call is for a
    /// worker that makes no such calls for a while. Repeat it while the result is not 0.
    /// [`Stats::waiting`](crate::Stats::waiting) counts the waiting tables of all workers.
    pub fn reclaim(&mut self) -> usize {
        self.reclaim_some(usize::MAX)
    }

    /// Does [`reclaim`](Self::reclaim) for at most `most` tables of its own.
    fn reclaim_some(&mut self, most: usize) -> usize {
        let WorkerState { limbo, counts, .. } = &mut self.state;
        let (domain, platform) = (self.mmu.domain(), self.mmu.platform());
        let abandoned = &self.mmu.abandoned;
        if !limbo.is_empty() || abandoned.tables() != 0 {
            domain.try_advance();
            let own = free_expired(limbo, domain, platform, most);
            let others = abandoned.free_expired(domain, platform);
            counts.waiting(-((own + others) as i64));
        }
        limbo.len() + abandoned.tables()
    }

    /// Settles the batch: flushes, then hands tables over to the grace period. The caller holds no
    /// guard.
    pub(crate) fn settle(&mut self) {
        if self.state.batch.is_empty() {
            return;
        }
        let WorkerState { batch, limbo, .. } = &mut self.state;
        let tables = batch.settle(&self.mmu.unflushed, self.mmu.platform());
        let count = tables.len();
        if count == 0 {
            return;
        }
        let stamp = self.mmu.domain().stamp();
        for page in tables {
            limbo.retire(stamp, page);
        }
        // More than were added, so that a backlog behind a long guard shrinks.
        self.reclaim_some(2 * count + Batch::MOST_TABLES);
    }

    /// Waits briefly until fewer tables wait than the bound. Returns whether that is so. The caller
    /// holds no guard.
    #[cold]
    fn wait_for_room(&mut self) -> bool {
        self.settle();
        for _ in 0..Self::ROOM_TRIES {
            if self.reclaim_some(usize::MAX) < Self::MOST_WAITING {
                return true;
            }
            self.mmu.platform().relax();
        }
        false
    }

    /// Visits the entries of `range` down to level `lowest`, in as many turns as it takes. Between
    /// two turns it holds nothing, and waiting threads can go first. Each turn visits at least one
    /// entry that is no link. The caller [settles](Self::settle) the debts at the end.
    ///
    /// # Errors
    /// If there is no memory for a table that `visit` needs.
    pub(crate) fn sweep<L: Log>(
        &mut self,
        range: GfnRange,
        lowest: u32,
        hold: Hold,
        log: &L,
        mut visit: impl FnMut(&mut Session<'_, F, P, L>, &mut Seen<'_>) -> Then,
    ) -> Result<(), OutOfTables> {
        let mut at = range.start().0;
        let end = range.end().0;
        self.state.has_waited = false;
        let mut waited_at = None;
        while at < end {
            let ended;
            (at, ended) = self.turn(at..end, lowest, hold, log, &mut visit);
            match ended {
                Ended::Well => {}
                Ended::NeedsTable => {
                    let platform = self.mmu.platform();
                    self.state
                        .cache
                        .fill::<F, P>(platform, F::LEVELS as usize)?;
                }
                Ended::NeedsRoom => {
                    // The second time at one entry: there was no memory for the batch's room.
                    let again = waited_at.replace(at) == Some(at);
                    self.state.has_waited = !self.wait_for_room() || again;
                }
            }
            if self.state.batch.is_full() {
                self.settle();
            } else if self.state.has_waited {
                self.reclaim();
            }
        }
        Ok(())
    }

    /// Makes one turn. Returns the frame where the next one starts, and the reason for the end.
    fn turn<L: Log>(
        &mut self,
        frames: Range<u64>,
        lowest: u32,
        hold: Hold,
        log: &L,
        visit: &mut impl FnMut(&mut Session<'_, F, P, L>, &mut Seen<'_>) -> Then,
    ) -> (u64, Ended) {
        let mmu = &*self.mmu;
        let mut session = Session {
            mmu,
            state: &mut self.state,
            log,
        };
        // Of these, `hold` selects some. One call of `advance` compiles faster than three.
        let (exclusive, pinned, shared);
        let (asks_exclusive, asks_shared);
        let (guard, wanted): (&Guard<'_>, &dyn Fn() -> bool) = match hold {
            Hold::Guard => {
                pinned = self.reader.pin();
                (&pinned, &|| false)
            }
            Hold::Shared => {
                shared = mmu.share(&mut self.reader);
                asks_shared = || shared.is_wanted();
                (&shared, &asks_shared)
            }
            Hold::Exclusive => {
                exclusive = mmu.exclude();
                pinned = self.reader.pin();
                asks_exclusive = || exclusive.is_wanted();
                (&pinned, &asks_exclusive)
            }
        };
        advance(&mut session, guard, frames, lowest, visit, wanted)
    }
}

/// Walks under a guard until the end, or until it should release the guard.
fn advance<F: Format, P: Platform, L: Log>(
    session: &mut Session<'_, F, P, L>,
    guard: &Guard<'_>,
    frames: Range<u64>,
    lowest: u32,
    visit: &mut impl FnMut(&mut Session<'_, F, P, L>, &mut Seen<'_>) -> Then,
    wanted: &dyn Fn() -> bool,
) -> (u64, Ended) {
    let end = frames.end;
    let mut walk = Walk::new(session.mmu, guard, frames, lowest);
    let Some(mut seen) = walk.next() else {
        return (end, Ended::Well);
    };
    let mut visited = 0;
    loop {
        let most = Worker::<F, P>::ASK - visited % Worker::<F, P>::ASK;
        let (then, count) = visit_run(session, &mut walk, &mut seen, most, visit);
        visited += count;
        let next = match then {
            Then::On => walk.next(),
            Then::Side => walk.side(),
            Then::Again if F::is_frozen(seen.entry.load(Ordering::Acquire)) => {
                // The table was cut off, or the entry's owner will store something else there.
                // Start again from the root.
                session.mmu.platform().relax();
                return (walk.at(), Ended::Well);
            }
            Then::Again => Some(walk.look()),
            Then::NeedsTable => return (walk.at(), Ended::NeedsTable),
            Then::NeedsRoom => return (walk.at(), Ended::NeedsRoom),
        };
        let Some(next) = next else {
            return (end, Ended::Well);
        };
        seen = next;
        let ask = visited % Worker::<F, P>::ASK == 0;
        if session.state.batch.is_full() || ask && (visited >= Worker::<F, P>::MOST || wanted()) {
            return (walk.at(), Ended::Well);
        }
    }
}

/// Visits `seen`, the walk's current entry. At level 1, it also visits the following entries of the
/// same table, at most `most` entries in all, until `visit` returns anything but [`Then::On`]. Then
/// `seen` and the walk are at the last visited entry. Returns the answer for that entry, and the
/// number of visited entries.
///
/// Most entries are of level 1. The compiler knows the level in this plain loop.
#[cfg_attr(not(debug_assertions), inline(always))]
fn visit_run<'g, F: Format, P: Platform, L: Log>(
    session: &mut Session<'_, F, P, L>,
    walk: &mut Walk<'g, F, P>,
    seen: &mut Seen<'g>,
    most: u32,
    visit: &mut impl FnMut(&mut Session<'_, F, P, L>, &mut Seen<'_>) -> Then,
) -> (Then, u32) {
    if seen.level > 1 {
        return (visit(session, seen), 1);
    }
    let (first, mut then, mut count) = (walk.at(), Then::On, 0);
    for entry in walk.run(most as usize) {
        *seen = Seen {
            entry,
            value: entry.load(Ordering::Acquire),
            level: 1,
            first: Gfn(first + u64::from(count)),
        };
        count += 1;
        then = visit(session, seen);
        if then != Then::On {
            break;
        }
    }
    walk.skip(u64::from(count) - 1);
    (then, count)
}

/// All frames that the format can map.
pub(crate) fn all_frames<F: Format>() -> GfnRange {
    GfnRange::new(Gfn(0), F::GFN_LIMIT.0)
        .unwrap_or_else(|| unreachable!("frames below the format's limit"))
}

/// The translation of an entry.
#[inline]
pub(crate) fn found<F: Format>(value: u64, level: u32) -> Option<Found> {
    // Both branches do the same. Most leaves take the first, where the compiler knows the level.
    if level == 1 {
        decode::<F>(value, 1)
    } else {
        decode::<F>(value, level)
    }
}

#[cfg_attr(not(debug_assertions), inline(always))]
fn decode<F: Format>(value: u64, level: u32) -> Option<Found> {
    if !F::is_leaf(value, level) {
        return None;
    }
    let access = Access {
        write: F::is_writable(value),
        execute: F::is_executable(value),
    };
    let leaf = Leaf {
        pfn: F::pfn(value, level),
        access,
        memory: F::memory(value),
        accessed: F::is_accessed(value),
        dirty: F::is_dirty(value),
        writes: F::writes(value),
    };
    Some(Found { leaf, level })
}

impl<F: Format, P: Platform> Drop for Worker<F, P> {
    fn drop(&mut self) {
        self.settle();
        self.state.cache.free_all(self.mmu.platform());
        for _ in 0..Self::LAST_TRIES {
            if self.reclaim() == 0 {
                return;
            }
            self.mmu.platform().relax();
        }
        let limbo = mem::take(&mut self.state.limbo);
        if !limbo.is_empty() {
            self.mmu.abandoned.leave(limbo);
        }
    }
}

impl<F: Format, P: Platform> fmt::Debug for Worker<F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}
