#![expect(
    unsafe_code,
    reason = "owns a record of the MMU it holds, and frees tables when their grace period is over"
)]
//! A worker: one thread's hands on the tables, and the sweeps it makes.

use crate::batch::Batch;
use crate::change::{Kit, Session, Spot};
use crate::format::{Access, Format, Leaf};
use crate::invalidate::Ticket;
use crate::log::Log;
use crate::mmio::absent;
use crate::mmu::Mmu;
use crate::pages::{Cache, OutOfTables};
use crate::platform::Platform;
use crate::sync::Ordering;
use crate::walk::Walk;
use alloc::sync::Arc;
use core::fmt;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange};
use pageferry_epoch::{Guard, Limbo, Reader};

/// What one thread changes and reads an [`Mmu`] by: each vCPU has one, and each thread that maintains tables.
///
/// It owns what must not be shared: a place among the readers, pages for tables to come, counts, and tables that wait to be
/// freed. Calls that take something away flush the TLBs before they return, on the caller's thread and without the MMU
/// lock; they may wait for other workers' calls to end, and must not be made by a thread that the platform's flush would
/// wait for.
///
/// Dropping it waits for a grace period where tables are left to free.
pub struct Worker<F: Format, P: Platform> {
    pub(crate) kit: Kit,
    pub(crate) reader: Reader,
    /// How many calls of [`deferred`](Self::deferred) there are around.
    deferring: u32,
    // Last: `kit.counts` is a record of it.
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
    /// There is a leaf, which does not let it through.
    Denied(Found),
    /// There is no leaf.
    Absent,
    /// There is no leaf, but a [marker](Worker::mark_mmio): no slot held the frame. It counts where it is
    /// [current](crate::is_mmio_current), and is no more than `Absent` elsewhere.
    Mmio {
        /// The slots' generation when it was made, as far as the marker keeps it.
        generation: u64,
    },
}

/// Which sort of guard a sweep holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    /// Keeps memory, and excludes nobody.
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
}

impl<F: Format, P: Platform> Worker<F, P> {
    /// A vCPU's fault needs a table on each level below the root at most.
    pub(crate) const FAULT_TABLES: usize = F::LEVELS as usize - 1;
    /// How often a fault looks whether exclusive work is over. Models go without.
    pub(crate) const SPINS: u32 = if cfg!(any(loom, shuttle)) { 0 } else { 32 };
    /// How often a fault begins again from the root where it met a frozen entry.
    pub(crate) const TRIES: u32 = 8;
    /// After how many entries a sweep asks whether somebody waits for it.
    const ASK: u32 = 64;
    /// After how many entries a sweep lets go in any case, so that memory can be freed.
    const MOST: u32 = 1 << 15;

    pub(crate) fn new(mmu: Arc<Mmu<F, P>>) -> Self {
        // SAFETY: `mmu` is dropped after `kit`.
        let counts = unsafe { mmu.counts.register() };
        Self {
            kit: Kit {
                cache: Cache::new(),
                batch: Batch::new(),
                counts,
                limbo: Limbo::new(),
            },
            reader: mmu.domain().register(),
            deferring: 0,
            mmu,
        }
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

    /// What an MMU does that walks the tables in software, on behalf of a guest: finds the leaf for `gfn` and, where it lets
    /// `access` through and the format's hardware sets accessed and dirty bits, sets them as that would: by
    /// compare-exchange, without a lock, and without telling a log.
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

    /// The leaf that lets `access` to `gfn` through, as [`look`](Self::look) finds it; `None` where the hardware would
    /// fault.
    #[inline]
    #[must_use]
    pub fn translate(&mut self, gfn: Gfn, access: Access) -> Option<Found> {
        match self.look(gfn, access) {
            Look::Allowed(found) => Some(found),
            Look::Denied(_) | Look::Absent | Look::Mmio { .. } => None,
        }
    }

    /// Calls `visit` with each leaf that covers a frame of `range`, and its first frame, as they are when they are met. Takes
    /// no lock.
    pub fn scan(&mut self, range: GfnRange, mut visit: impl FnMut(Gfn, Found)) {
        let swept = self.sweep(range, 1, Hold::Guard, &(), |_, spot| {
            if let Some(found) = found::<F>(spot.value, spot.level) {
                visit(spot.first, found);
            }
            Then::On
        });
        debug_assert!(swept.is_ok(), "looking needs no tables");
    }

    /// For a fault: the moment it begins. Take it before the memory slot, or the host's frame, is looked up.
    #[inline]
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        self.mmu.invalidation.ticket()
    }

    /// Whether `gfn` is being invalidated, so that a fault there would be refused: a hint that costs two loads and
    /// saves looking up what will not be used.
    #[inline]
    #[must_use]
    pub fn is_invalidating(&self, gfn: Gfn) -> bool {
        self.mmu.invalidation.covers(gfn, 1)
    }

    /// Waits until nobody holds the exclusive side: after a fault was refused with
    /// [`Excluded`](crate::Refused::Excluded), and where the platform's flush does not wait for this thread.
    pub fn wait(&mut self) {
        let mmu = &*self.mmu;
        self.reader.wait_included(|| mmu.platform().relax());
    }

    /// Does several things with one flush: calls inside `f` that take something away leave the flush to the end of this
    /// one. They may still flush where many tables are cut off.
    pub fn deferred<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> R {
        /// Counts one call less, also where `f` panics.
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

    /// What every call that takes something away ends with.
    pub(crate) fn finish(&mut self) {
        if self.deferring == 0 {
            self.flush();
        }
    }

    /// Flushes the TLBs if any worker has taken something away and not flushed yet: after this, TLBs contradict nothing
    /// that happened before the call.
    pub fn flush(&mut self) {
        self.settle();
        let platform = self.mmu.platform();
        self.mmu.unflushed.pay(platform, all_frames::<F>());
    }

    /// Frees tables whose grace period is over, 64 at most; gives how many still wait.
    pub fn reclaim(&mut self) -> usize {
        let domain = self.mmu.domain();
        if !self.kit.limbo.is_empty() {
            domain.try_advance();
            let now = domain.epoch();
            for _ in 0..Batch::MOST_TABLES {
                let Some(page) = self.kit.limbo.next_expired_in(now) else {
                    break;
                };
                // SAFETY: cut off, then flushed, then stamped, and the grace period after that is over.
                unsafe { page.free(self.mmu.platform()) };
            }
        }
        self.kit.limbo.len()
    }

    /// Pays what the last changes owe: flush, then hand tables over to the grace period. No guard is held.
    pub(crate) fn settle(&mut self) {
        if self.kit.batch.is_empty() {
            return;
        }
        let Kit { batch, limbo, .. } = &mut self.kit;
        let tables = batch.settle(&self.mmu.unflushed, self.mmu.platform());
        let mut tables = tables.peekable();
        if tables.peek().is_some() {
            let stamp = self.mmu.domain().stamp();
            for page in tables {
                limbo.retire(stamp, page);
            }
            self.reclaim();
        }
    }

    /// Visits the entries of `range` down to level `lowest`, in as many turns as it takes: between two turns nothing is
    /// held, and whoever waited has had the chance to go first. Each turn visits at least one leaf, or one entry that
    /// is none. What is owed at the end is the caller's to [`settle`](Self::settle).
    ///
    /// # Errors
    /// If there is no memory for a table that `visit` needs.
    pub(crate) fn sweep<L: Log>(
        &mut self,
        range: GfnRange,
        lowest: u32,
        hold: Hold,
        log: &L,
        mut visit: impl FnMut(&mut Session<'_, F, P, L>, &mut Spot<'_>) -> Then,
    ) -> Result<(), OutOfTables> {
        let mut at = range.start().0;
        let end = range.end().0;
        let mut needs_table = false;
        while at < end {
            if needs_table {
                self.kit
                    .cache
                    .fill::<F, P>(self.mmu.platform(), F::LEVELS as usize)?;
            }
            (at, needs_table) = self.turn(at..end, lowest, hold, log, &mut visit);
            if self.kit.batch.is_full() {
                self.settle();
            }
        }
        Ok(())
    }

    /// One turn: gives where to go on, and whether that needs a table.
    fn turn<L: Log>(
        &mut self,
        frames: Range<u64>,
        lowest: u32,
        hold: Hold,
        log: &L,
        visit: &mut impl FnMut(&mut Session<'_, F, P, L>, &mut Spot<'_>) -> Then,
    ) -> (u64, bool) {
        let mmu = &*self.mmu;
        let mut session = Session {
            mmu,
            kit: &mut self.kit,
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
    visit: &mut impl FnMut(&mut Session<'_, F, P, L>, &mut Spot<'_>) -> Then,
    wanted: impl Fn() -> bool,
) -> (u64, bool) {
    let end = frames.end;
    let mut walk = Walk::new(session.mmu, guard, frames, lowest);
    let Some(mut spot) = walk.next() else {
        return (end, false);
    };
    let mut visited = 0;
    loop {
        let most = Worker::<F, P>::ASK - visited % Worker::<F, P>::ASK;
        let (then, count) = visit_run(session, &mut walk, &mut spot, most, visit);
        visited += count;
        let next = match then {
            Then::On => walk.next(),
            Then::Side => walk.side(),
            Then::Again if F::is_frozen(spot.entry.load(Ordering::Acquire)) => {
                // Its table was cut off, or its owner is about to put something else there: from the root again.
                session.mmu.platform().relax();
                return (walk.at(), false);
            }
            Then::Again => Some(walk.look()),
            Then::NeedsTable => return (walk.at(), true),
        };
        let Some(next) = next else {
            return (end, false);
        };
        spot = next;
        let ask = visited % Worker::<F, P>::ASK == 0;
        if session.kit.batch.is_full() || ask && (visited >= Worker::<F, P>::MOST || wanted()) {
            return (walk.at(), false);
        }
    }
}

/// Visits `spot`, at which the walk stands, and where it is of level 1 what comes after it in its table, `most` entries
/// in all, until `visit` says something else than to go on. `spot` and the walk then are at the last one that was visited;
/// gives what was said of it, and how many there were.
///
/// Most entries are of level 1. Here they are met by a plain loop, in which the level is known to the compiler.
#[inline(always)]
fn visit_run<'g, F: Format, P: Platform, L: Log>(
    session: &mut Session<'_, F, P, L>,
    walk: &mut Walk<'g, F, P>,
    spot: &mut Spot<'g>,
    most: u32,
    visit: &mut impl FnMut(&mut Session<'_, F, P, L>, &mut Spot<'_>) -> Then,
) -> (Then, u32) {
    if spot.level > 1 {
        return (visit(session, spot), 1);
    }
    let (first, mut then, mut count) = (walk.at(), Then::On, 0);
    for entry in walk.run(most as usize) {
        *spot = Spot {
            entry,
            value: entry.load(Ordering::Acquire),
            level: 1,
            first: Gfn(first + u64::from(count)),
        };
        count += 1;
        then = visit(session, spot);
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
        self.kit.cache.empty(self.mmu.platform());
        // Guards live inside calls of workers only, and those end.
        while self.reclaim() != 0 {
            self.mmu.platform().relax();
        }
    }
}

impl<F: Format, P: Platform> fmt::Debug for Worker<F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}
