//! A vCPU's fault: from what its slot says to an entry in the tables.
//!
//! **Guarantee.** When a fault is answered with [`Mapped`], the access would succeed at that moment, and the log knows of
//! every store that can go unnoticed from then on. Any number of vCPUs fault at once: they share no line they write but
//! those of the tables themselves, and no fault waits for another.
//!
//! **Mechanism.** Pages for tables are taken before anything is held. Then, under the shared side of the MMU lock: the
//! check that no invalidation came between ([`Ticket`]), and a walk down, which links what is missing, splits what is too
//! large, and puts the leaf in place by compare-exchange. Who loses an exchange looks again, and mostly finds that the
//! winner has done the work. [`Worker::fast_fault`] does without the side and the check: it changes a leaf
//! only by the permission that the leaf itself grants, so it needs no look at the slot's frame.
//!
//! A fault waits a moment at most, as most exclusive work is over in less: then it is [refused](Refused::Excluded). So a platform
//! may wait, in its flush, for vCPUs to come out of their faults.

use crate::change::{Carries, Session, Spot};
use crate::format::{Access, Format, Leaf, MemoryType, Writes};
use crate::invalidate::Ticket;
use crate::log::Log;
use crate::pages::{OutOfTables, Table};
use crate::platform::Platform;
use crate::split::NotSplit;
use crate::worker::{Found, Worker, found};
use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_epoch::{Guard, Shared};

/// What a vCPU tried to do, and where. A load is an access that neither writes nor executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Where.
    pub gfn: Gfn,
    /// What beside loading.
    pub access: Access,
}

/// What may be mapped for a fault: found in the memory slot, under the fault's [`Ticket`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The frame behind the fault's `gfn`.
    pub pfn: Pfn,
    /// The level of the largest page that may be mapped: see [`largest_level`].
    pub level: u32,
    /// What the leaf allows. Where the slot is logged by write protection, stores only if the fault is one.
    pub access: Access,
    /// Who may allow stores later.
    pub writes: Writes,
    /// How the page is cached.
    pub memory: MemoryType,
}

/// What a fault has come to: the access is allowed now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// The leaf as it was left; its frame is that of the leaf's first page.
    pub leaf: Leaf,
    /// The level of the table it stands in.
    pub level: u32,
    /// What it took.
    pub how: How,
}

impl Mapped {
    /// The leaf and its level.
    #[must_use]
    pub const fn found(self) -> Found {
        Found {
            leaf: self.leaf,
            level: self.level,
        }
    }
}

/// What a fault did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// There was no leaf; now there is.
    Installed,
    /// The leaf allowed less, or was marked as not used.
    Upgraded,
    /// The access was allowed already: another vCPU has been faster, or the TLB was old.
    Spurious,
}

/// Why a fault has mapped nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Exclusive work goes on. [Wait](Worker::wait) where the platform's flush does not wait for this thread, then
    /// fault again.
    #[error("exclusive work on the tables goes on")]
    Excluded,
    /// The range is being invalidated, or was since the ticket was taken, or so much was that this is not known: what was looked up
    /// may be old; or tables were cut off again and again while the fault walked down. Fault again.
    #[error("the range was invalidated meanwhile")]
    Invalidated,
    /// A large page is in the way, and the format does not let it be split without a flush in between. Make it smaller
    /// by [`split`](Worker::split), outside the fault, and fault again.
    #[error("a page of level {level} is in the way")]
    TooLarge {
        /// The level of the table it stands in.
        level: u32,
    },
    /// The target does not allow the access.
    #[error("the target does not allow the access")]
    Denied,
    /// Another frame is mapped there, and nobody has invalidated it.
    #[error("{:?} is mapped there", existing.leaf.pfn)]
    Conflict {
        /// What is mapped.
        existing: Found,
    },
    /// There is no memory for a table.
    #[error(transparent)]
    OutOfTables(#[from] OutOfTables),
}

/// The level of the largest page that can map `gfn` to `pfn` inside `slot`, if what is behind it allows `backing`: the
/// page must lie in the slot, and begin at a frame of its own size on both sides.
///
/// ```
/// use pageferry_addr::{Gfn, GfnRange, Pfn};
/// use pageferry_tdp::format::{Ept4, Format};
/// use pageferry_tdp::largest_level;
///
/// let slot = GfnRange::new(Gfn(0x100), 0x700).unwrap();
/// assert_eq!(largest_level::<Ept4>(slot, Gfn(0x345), Pfn(0x7_0345), 3), 2);
/// assert_eq!(largest_level::<Ept4>(slot, Gfn(0x145), Pfn(0x7_0145), 3), 1, "the slot begins at 0x100");
/// assert_eq!(largest_level::<Ept4>(slot, Gfn(0x345), Pfn(0x7_0346), 3), 1, "out of step");
/// ```
#[must_use]
pub fn largest_level<F: Format>(slot: GfnRange, gfn: Gfn, pfn: Pfn, backing: u32) -> u32 {
    let mut level = backing.clamp(1, F::MAX_LEAF_LEVEL);
    while level > 1 {
        let frames = F::frames_per_entry(level);
        let first = gfn.0 & !(frames - 1);
        let in_step = (gfn.0 ^ pfn.0) & (frames - 1) == 0;
        if in_step && first >= slot.start().0 && first + frames <= slot.end().0 {
            break;
        }
        level -= 1;
    }
    level
}

impl<F: Format, P: Platform> Worker<F, P> {
    /// Answers a fault from what is mapped, without the MMU lock: where another vCPU was faster; where a page was
    /// write-protected for its log, and the leaf itself says that stores are allowed; where it was marked as not used. `None`
    /// where that does not help, and [`fault`](Self::fault) must.
    ///
    /// The caller has looked at the page's slot, and no change of the slot's flags is over before this returns.
    #[inline]
    pub fn fast_fault<L: Log>(&mut self, fault: Fault, log: &L) -> Option<Mapped> {
        let Fault { gfn, access } = fault;
        if gfn >= F::GFN_LIMIT {
            return None;
        }
        let guard = self.reader.pin();
        let mmu = &*self.mmu;
        let (table, mut value) = mmu.top(&guard).descend(mmu.platform(), gfn);
        let level = table.level();
        let mut session = Session {
            mmu,
            kit: &mut self.kit,
            log,
        };
        loop {
            if !F::is_leaf(value, level) {
                return None;
            }
            if F::allows(value, access) {
                return mapped::<F>(value, level, How::Spurious);
            }
            let new = allow::<F>(value, access)?;
            if F::is_writable(new) && !F::is_writable(value) && level > 1 && log.is_on() {
                return None;
            }
            let spot = spot_of::<F>(table, gfn, value);
            match session.change(&spot, new, Carries::Nothing) {
                Ok(()) => return mapped::<F>(new, level, How::Upgraded),
                Err(now) => value = now,
            }
        }
    }

    /// Answers a fault by mapping `target`.
    ///
    /// A leaf that is there and maps the same frame is given more rights, never fewer. Where a table is in the way of a
    /// large page, a smaller one is mapped; where a large page is in the way of a smaller one (for a log, or since it
    /// allows less), it is split in place.
    ///
    /// # Errors
    /// [`Refused`]; nothing has changed then but that tables may have been linked, or large pages split.
    ///
    /// # Panics
    /// If the format has no room for `gfn` or for the target's frame, or `gfn` and the frame are out of step for the
    /// target's level.
    #[inline]
    pub fn fault<L: Log>(
        &mut self,
        ticket: Ticket,
        fault: Fault,
        target: Target,
        log: &L,
    ) -> Result<Mapped, Refused> {
        let Fault { gfn, access } = fault;
        assert!(gfn < F::GFN_LIMIT, "{gfn:?} is past the tables' reach");
        let offset = (gfn.0 ^ target.pfn.0) & (F::frames_per_entry(target.level) - 1);
        assert!(
            target.pfn < F::PFN_LIMIT && F::may_hold_leaves(target.level) && offset == 0,
            "{target:?} cannot be mapped at {gfn:?}"
        );
        let stores = target.access.write && target.writes.mmu_writable();
        if access.write && !stores || access.execute && !target.access.execute {
            return Err(Refused::Denied);
        }
        let frames = F::frames_per_entry(target.level);
        let (shared, mut session) = self.begin_fault(ticket, gfn, frames, log)?;
        if let Some(mapped) = session.install(session.mmu.top(&shared), fault, target) {
            return Ok(mapped);
        }
        session.map_or_retry(&shared, fault, target)
    }

    /// What a fault needs to change the page of `frames` frames around `gfn`, under its ticket: tables, the shared side, and that
    /// no invalidation came between.
    #[inline(always)]
    pub(crate) fn begin_fault<'w, L: Log>(
        &'w mut self,
        ticket: Ticket,
        gfn: Gfn,
        frames: u64,
        log: &'w L,
    ) -> Result<(Shared<'w>, Session<'w, F, P, L>), Refused> {
        let Self {
            mmu, kit, reader, ..
        } = self;
        kit.cache.fill::<F, P>(mmu.platform(), Self::FAULT_TABLES)?;
        let shared = reader
            .share_within(Self::SPINS, core::hint::spin_loop)
            .ok_or(Refused::Excluded)?;
        if !mmu.invalidation.admits(ticket, gfn, frames) {
            return Err(Refused::Invalidated);
        }
        Ok((shared, Session { mmu, kit, log }))
    }
}

impl<F: Format, P: Platform, L: Log> Session<'_, F, P, L> {
    /// What most faults come to, by itself, as straight code: the tables are there, nothing is mapped, nobody interferes.
    /// `None` where it is not so, and nothing has changed.
    #[inline(always)]
    fn install(&mut self, top: Table<'_, F>, fault: Fault, target: Target) -> Option<Mapped> {
        let (table, value) = top.descend(self.mmu.platform(), fault.gfn);
        if table.level() != 1 || F::is_present(value) || F::is_frozen(value) {
            return None;
        }
        let spot = spot_of::<F>(table, fault.gfn, value);
        let leaf = F::canonical(new_leaf::<F>(1, fault, target));
        self.change(&spot, F::leaf(leaf, 1), Carries::Nothing)
            .ok()?;
        Some(Mapped {
            leaf,
            level: 1,
            how: How::Installed,
        })
    }

    /// All that a fault can meet.
    #[inline(never)]
    fn map_or_retry(
        &mut self,
        guard: &Guard<'_>,
        fault: Fault,
        target: Target,
    ) -> Result<Mapped, Refused> {
        for _ in 0..Worker::<F, P>::TRIES {
            if let Some(answer) = self.map(self.mmu.top(guard), fault, target) {
                return answer;
            }
        }
        // What is frozen may stay so until a flush is over, and that may wait for this very vCPU.
        Err(Refused::Invalidated)
    }

    /// One walk from the root; `None` where it met what another worker is about to change.
    fn map(
        &mut self,
        mut table: Table<'_, F>,
        fault: Fault,
        target: Target,
    ) -> Option<Result<Mapped, Refused>> {
        let platform = self.mmu.platform();
        loop {
            let value;
            (table, value) = table.descend(platform, fault.gfn);
            if F::is_frozen(value) {
                platform.relax();
                return None;
            }
            let level = table.level();
            let spot = spot_of::<F>(table, fault.gfn, value);
            let logged = target.access.write && self.log.is_on();
            // A store to a logged page must not make a large one writable.
            let limit = if logged { 1 } else { target.level };
            if F::is_leaf(value, level) {
                let offset = fault.gfn.0 & (F::frames_per_entry(level) - 1);
                if F::pfn(value, level).0 + offset != target.pfn.0 {
                    let existing = found::<F>(value, level)?;
                    return Some(Err(Refused::Conflict { existing }));
                }
                if F::allows(value, fault.access) {
                    return mapped::<F>(value, level, How::Spurious).map(Ok);
                }
                if level > limit {
                    if F::BREAK_BEFORE_MAKE {
                        return Some(Err(Refused::TooLarge { level }));
                    }
                    match self.split_here(&spot) {
                        // Where it was lost another has changed it: look again.
                        Ok(()) | Err(NotSplit::Lost) => continue,
                        Err(NotSplit::NoTable) => return Some(Err(Refused::Invalidated)),
                    }
                }
                let new = more::<F>(value, level, fault, target);
                if self.change(&spot, new, Carries::Nothing).is_ok() {
                    return mapped::<F>(new, level, How::Upgraded).map(Ok);
                }
            } else if level > limit {
                if !self.link(&spot) {
                    return Some(Err(Refused::Invalidated));
                }
            } else {
                let new = leaf_for::<F>(level, fault, target);
                if self.change(&spot, new, Carries::Nothing).is_ok() {
                    return mapped::<F>(new, level, How::Installed).map(Ok);
                }
            }
        }
    }

    /// Links an empty table at `spot`, which is no link and no leaf; where another was faster, its page goes back.
    /// Whether there was a page: there is one for each level, but tables that others cut off meanwhile cost one each.
    #[cold]
    pub(crate) fn link(&mut self, spot: &Spot<'_>) -> bool {
        let Some(page) = self.kit.cache.take() else {
            return false;
        };
        let link = F::table(page.frame(self.mmu.platform()));
        if self.change(spot, link, Carries::Nothing).is_err() {
            self.kit.cache.put_back(page);
        }
        true
    }
}

#[inline]
pub(crate) fn spot_of<'g, F: Format>(table: Table<'g, F>, gfn: Gfn, value: u64) -> Spot<'g> {
    let level = table.level();
    Spot {
        entry: table.entry(gfn),
        value,
        level,
        first: Gfn(gfn.0 & !(F::frames_per_entry(level) - 1)),
    }
}

#[inline]
fn mapped<F: Format>(value: u64, level: u32, how: How) -> Option<Mapped> {
    found::<F>(value, level).map(|found| Mapped {
        leaf: found.leaf,
        level,
        how,
    })
}

/// The first frame of a leaf of `level` that maps the target's page.
#[inline]
fn pfn_at<F: Format>(target: Target, level: u32) -> Pfn {
    Pfn(target.pfn.0 & !(F::frames_per_entry(level) - 1))
}

/// What a new leaf says.
#[inline]
fn new_leaf<F: Format>(level: u32, fault: Fault, target: Target) -> Leaf {
    Leaf {
        pfn: pfn_at::<F>(target, level),
        access: target.access,
        memory: target.memory,
        accessed: true,
        dirty: fault.access.write,
        writes: target.writes,
    }
}

/// A new leaf.
#[inline]
pub(crate) fn leaf_for<F: Format>(level: u32, fault: Fault, target: Target) -> u64 {
    F::leaf(new_leaf::<F>(level, fault, target), level)
}

/// The leaf `old` with what the target allows beside: nothing is taken away, as a fault flushes nothing, and what `old`
/// knows stays. So does its memory type, and a class that lets the MMU allow stores.
fn more<F: Format>(old: u64, level: u32, fault: Fault, target: Target) -> u64 {
    let leaf = Leaf {
        pfn: pfn_at::<F>(target, level),
        access: Access {
            write: target.access.write || F::is_writable(old),
            execute: target.access.execute || F::is_executable(old),
        },
        memory: F::memory(old),
        accessed: true,
        dirty: fault.access.write || F::is_dirty(old),
        writes: if F::mmu_writable(old) && !target.writes.mmu_writable() {
            F::writes(old)
        } else {
            target.writes
        },
    };
    F::leaf(leaf, level)
}

/// The leaf with what it may be given without asking, so that it allows `access`; `None` where that is not enough.
#[inline]
fn allow<F: Format>(leaf: u64, access: Access) -> Option<u64> {
    let mut new = F::set_accessed(leaf);
    if access.write && !F::is_writable(new) {
        new = F::make_writable(new)?;
    }
    if access.write {
        new = F::set_dirty(new);
    }
    (F::allows(new, access) && new != leaf).then_some(new)
}
