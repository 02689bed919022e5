#![expect(
    unsafe_code,
    reason = "owns a record of the MMU it holds, and frees tables when their grace period is over"
)]
//! A worker: one thread's access to the tables, and the sweeps it makes.

use crate::batch::Batch;
use crate::change::{Seen, Session, WorkerState};
use crate::format::{Access, Format, Leaf};
use crate::invalidate::Ticket;
use crate::log::Log;
use crate::mmio::absent;
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

/// One thread's access to an [`Mmu`]: each vCPU has one, and each thread that maintains tables.
///
/// It owns what must not be shared: a place among the readers, pages for tables to come, counts,
/// and tables that wait to be freed.
///
/// Calls that take something away flush the TLBs before they return, on the caller's thread and
/// without the MMU lock. They may wait for other workers' calls to end. So a thread that the
/// platform's flush would wait for must not make them.
///
/// Dropping it waits for nobody. It leaves tables that a guard may still use to the other workers,
/// and to the MMU.
pub struct Worker<F: Format, P: Platform> {
    pub(crate) state: WorkerState,
    pub(crate) reader: Reader,
    /// How many calls of [`deferred`](Self::deferred) there are around.
    deferring: u32,
    // Last: `state.counts` is a record of it.
    pub(crate) mmu: Arc<Mmu<F, P>>,
}

/// A translation that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// What the leaf says; its frame is that of the leaf's first page.
    pub leaf: Leaf,
    /// The level of the table it stands in: 1 for 4 KiB, 2 for 2 MiB, 3 for 1 GiB.
    pub level: u32,
}

/// What a walk on behalf of an access comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The access goes through.
    Allowed(Found),
    /// There is a leaf, but it denies the access.
    Denied(Found),
    /// There is no leaf.
    Absent,
    /// There is no leaf, but a [marker](Worker::mark_mmio): no slot held the frame. It counts if it
    /// is [current](crate::is_mmio_current), and means no more than `Absent` otherwise.
    Mmio {
        /// The slots' generation when it was made: the low bits that a marker keeps.
        generation: u64,
    },
}

/// The kind of guard that a sweep holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    /// Keeps memory, and excludes nothing.
    Guard,
    /// The shared side of the MMU lock.
    Shared,
    /// The exclusive side.
    Exclusive,
}

/// What a sweep does after it has visited an entry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// Goes on: down, side or up.
    On,
    /// Goes on, but not down.
    Side,
    /// Looks at the same entry again: the change was lost to another's.
    Again,
    /// Lets go, gets more pages for tables, and comes back to the same entry.
    NeedsTable,
    /// Lets go, waits for tables to be freed, for a moment and once a sweep, and comes back to the
    /// same entry.
    NeedsRoom,
}

/// Why a turn ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// It was over, or long enough.
    Well,
    /// As [`Then::NeedsTable`].
    NeedsTable,
    /// As [`Then::NeedsRoom`].
    NeedsRoom,
}

impl<F: Format, P: Platform> Worker<F, P> {
    /// A vCPU's fault needs a table on each level below the root at most.
    pub(crate) const FAULT_TABLES: usize = F::LEVELS as usize - 1;
    /// How often a fault looks whether exclusive work is over. Models do not wait.
    pub(crate) const SPINS: u32 = if cfg!(any(loom, shuttle)) { 0 } else { 32 };
    /// How often a fault begins again from the root after it met a frozen entry.
    pub(crate) const TRIES: u32 = 8;
    /// After how many entries a sweep asks whether a thread waits for it.
    const ASK: u32 = 64;
    /// After how many entries a sweep lets go in any case, so that memory can be freed.
    const MOST: u32 = 1 << 15;

    /// How often a sweep looks whether tables are freed before it leaves tables linked.
    const ROOM_TRIES: u32 = if cfg!(any(loom, shuttle)) { 2 } else { 1000 };
    /// How often a worker that goes looks whether its tables are freed.
    const LAST_TRIES: u32 = 8;

    /// How many tables of one worker wait for a grace period, before its calls stop cutting tables
    /// off.
    ///
    /// Then a call waits a moment for other workers' calls to end. If some last longer (a
    /// [`scan`](Self::scan) whose callback blocks, say), it goes on without: a zap empties tables
    /// and leaves them linked, and a recovery leaves small pages. A later zap or recovery of the
    /// range does the rest. So at most this many tables wait, and those of the last subtree; and no
    /// call waits for long.
    pub const MOST_WAITING: usize = MOST_WAITING;

    pub(crate) fn new(mmu: Arc<Mmu<F, P>>) -> Result<Self, OutOfMemory> {
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

    /// What `gfn` translates to at this moment. Wait-free: a guard, and a load a level.
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

    /// Does what the hardware's walk does, in software: finds the leaf for `gfn`. If the leaf
    /// allows `access`, and the format's hardware sets accessed and dirty bits, it sets them
    /// likewise: by compare-exchange, without a lock, and without telling a log.
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

    /// The leaf that allows `access` to `gfn`, as [`look`](Self::look) finds it. `None` if the
    /// hardware would fault.
    #[inline]
    #[must_use]
    pub fn translate(&mut self, gfn: Gfn, access: Access) -> Option<Found> {
        match self.look(gfn, access) {
            Look::Allowed(found) => Some(found),
            Look::Denied(_) | Look::Absent | Look::Mmio { .. } => None,
        }
    }

    /// Calls `visit` with each leaf that covers a frame of `range`, and its first frame, as it is
    /// when the walk meets it. Takes no lock.
    ///
    /// `visit` runs under a guard: no table is freed before it returns. It may use other workers,
    /// but [`zap_all`](Self::zap_all) would wait for this call to end.
    pub fn scan(&mut self, range: GfnRange, mut visit: impl FnMut(Gfn, Found)) {
        let swept = self.sweep(range, 1, Hold::Guard, &(), |_, seen| {
            if let Some(found) = found::<F>(seen.value, seen.level) {
                visit(seen.first, found);
            }
            Then::On
        });
        debug_assert!(swept.is_ok(), "looking needs no tables");
    }

    /// The moment at which a fault begins. Take it before the memory slot, or the host's frame, is
    /// looked up.
    #[inline]
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        self.mmu.invalidations.ticket()
    }

    /// Whether `gfn` is being invalidated, so that a fault there would be refused. It is a hint
    /// that costs two loads, and saves a look-up that would be in vain.
    #[inline]
    #[must_use]
    pub fn is_invalidating(&self, gfn: Gfn) -> bool {
        self.mmu.invalidations.covers(gfn, 1)
    }

    /// Waits until no thread holds the exclusive side: after a fault was refused with
    /// [`Excluded`](crate::Refused::Excluded), if the platform's flush does not wait for this
    /// thread.
    pub fn wait(&mut self) {
        let mmu = &*self.mmu;
        self.reader.wait_included(|| mmu.platform().relax());
    }

    /// Makes several calls with one flush: calls inside `f` that take something away leave the
    /// flush to the end of this one. They may still flush if they cut off many tables.
    pub fn deferred<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> R {
        /// Counts one call less, also if `f` panics.
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

    /// The end of every call that takes something away.
    pub(crate) fn finish(&mut self) {
        if self.deferring == 0 {
            self.flush();
        }
    }

    /// Flushes the TLBs if any worker has taken something away and not flushed yet. After this,
    /// TLBs contradict nothing that happened before the call.
    pub fn flush(&mut self) {
        self.settle();
        let platform = self.mmu.platform();
        self.mmu.unflushed.pay(platform, all_frames::<F>());
    }

    /// Frees the tables of this worker, and of workers that are gone, that nobody can use any more.
    /// Returns how many of these still wait.
    ///
    /// Calls that cut tables off do it too, for more tables than they cut off. So it is for a
    /// worker that makes no such calls for a while: call it again where the result is not 0.
    /// [`Stats::waiting`](crate::Stats::waiting) shows what waits, whichever worker has it.
    pub fn reclaim(&mut self) -> usize {
        self.reclaim_some(usize::MAX)
    }

    /// [`reclaim`](Self::reclaim) for at most `most` tables of its own.
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

    /// Pays what the last changes owe: flush, then hand tables over to the grace period. No guard
    /// is held.
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
        // More than was added, so that what has waited for a long guard goes.
        self.reclaim_some(2 * count + Batch::MOST_TABLES);
    }

    /// Waits a moment until fewer tables wait than may; returns whether that is so. No guard is
    /// held.
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
    /// two turns it holds nothing, and threads that waited can go first. Each turn visits at least
    /// one entry that is no link. The caller [settles](Self::settle) what is owed at the end.
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
                    // Twice at one entry: there was no memory for the batch's room.
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

    /// One turn: returns where to go on, and why it ended.
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
        match hold {
            Hold::Guard => {
                let guard = self.reader.pin();
                advance(&mut session, &guard, frames, lowest, visit, || false)
            }
            Hold::Shared => {
                let shared = self.reader.share(|| mmu.platform().relax());
                let wanted = || shared.is_wanted();
                advance(&mut session, &shared, frames, lowest, visit, wanted)
            }
            Hold::Exclusive => {
                let exclusive = mmu.domain().exclude(|| mmu.platform().relax());
                let guard = self.reader.pin();
                let wanted = || exclusive.is_wanted();
                advance(&mut session, &guard, frames, lowest, visit, wanted)
            }
        }
    }
}

/// Walks under a guard until the end, or until it should let go.
fn advance<F: Format, P: Platform, L: Log>(
    session: &mut Session<'_, F, P, L>,
    guard: &Guard<'_>,
    frames: Range<u64>,
    lowest: u32,
    visit: &mut impl FnMut(&mut Session<'_, F, P, L>, &mut Seen<'_>) -> Then,
    wanted: impl Fn() -> bool,
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
                // Its table was cut off, or its owner will put something else there: from the root
                // again.
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

/// Visits `seen`, at which the walk stands. If that is of level 1, it visits what comes after it in
/// its table too, `most` entries in all, until `visit` returns anything but [`Then::On`]. Then
/// `seen` and the walk are at the last entry that was visited. Returns the answer for that one, and
/// how many there were.
///
/// Most entries are of level 1. This plain loop visits them, and the compiler knows their level in
/// it.
#[inline(always)]
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

/// What an entry translates to.
#[inline]
pub(crate) fn found<F: Format>(value: u64, level: u32) -> Option<Found> {
    // The same either way, but most leaves are decoded with a level that the compiler knows.
    if level == 1 {
        decode::<F>(value, 1)
    } else {
        decode::<F>(value, level)
    }
}

#[inline(always)]
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
