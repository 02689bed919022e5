//! A vCPU's fault: from the target in the memory slot to an entry in the tables.
//!
//! **Guarantee.** When a fault is answered with [`Mapped`], the access would succeed at that
//! moment. From then on, every store that causes no further fault is in the log. Any number of
//! vCPUs fault at once. They write no common cache line but those of the tables themselves, and no
//! fault waits for another.
//!
//! **Mechanism.** A fault allocates pages for tables before it holds anything. Then, under the
//! shared side of the MMU lock:
//!
//! 1. It checks that no invalidation came between ([`Ticket`]).
//! 2. It walks down, links missing tables, and splits pages that are too large.
//! 3. It puts the leaf in place by compare-exchange. A thread that loses the exchange retries.
//!    Usually the winner has already done the work.
//!
//! [`Worker::fast_fault`] needs neither the lock nor the check. It adds only permissions that the
//! leaf itself grants, so it does not depend on the slot's frame.
//!
//! A fault waits briefly for exclusive work. If the work is not over by then, the fault is
//! [refused](Refused::Excluded). So a platform's flush may wait for vCPUs to leave their faults.

use crate::change::{Preserves, Seen, Session};
use crate::format::{Access, Format, Leaf, MemoryType, TlbAfterFault, Writes};
use crate::invalidate::Ticket;
use crate::log::Log;
use crate::pages::{OutOfTables, Table};
use crate::platform::Platform;
use crate::resize::NotSplit;
use crate::worker::{Found, Worker, found};
use pageferry_addr::{Gfn, GfnRange, Pfn};
use pageferry_epoch::{Guard, Shared};

/// The access that a vCPU tried, and its frame. A load is an access that neither writes nor
/// executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The guest frame.
    pub gfn: Gfn,
    /// The access besides a load.
    pub access: Access,
}

/// The page that a fault may map, found in the memory slot under the fault's [`Ticket`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The frame behind the fault's `gfn`.
    pub pfn: Pfn,
    /// The level of the largest page that may be mapped: see [`largest_level`].
    pub level: u32,
    /// The accesses that the leaf allows. If the slot is logged by write protection, stores are
    /// among them only if the fault is a store.
    pub access: Access,
    /// The permission to allow stores later.
    pub writes: Writes,
    /// The caching of the page.
    pub memory: MemoryType,
}

/// The answer to a fault: the access is allowed now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// The leaf after the fault. Its frame is that of the leaf's first page.
    pub leaf: Leaf,
    /// The level of the table that holds it.
    pub level: u32,
    /// The work that the fault did.
    pub how: How,
    /// Whether the vCPU must invalidate its *own* TLB for the faulting page before it continues.
    /// Otherwise it may fault for ever at the entry that its TLB still has.
    ///
    /// This depends on the format. x86-64 processors drop the entry when they fault. Arm and RISC-V
    /// processors may keep a leaf that denied the access, and RISC-V processors also an entry that
    /// was not present. There the vCPU invalidates the page in its own TLB only (`TLBI IPAS2E1`
    /// without the shareable suffix, `HFENCE.GVMA`). Linux does so in
    /// `kvm_pgtable_stage2_relax_perms`. Other vCPUs need no flush, as each fault answers for its
    /// own TLB.
    pub local_flush: bool,
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

/// The work that a fault did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// It installed a leaf where there was none.
    Installed,
    /// It added permissions to the leaf, or marked it as accessed.
    Upgraded,
    /// None: the leaf already allowed the access. Another vCPU was faster, or the TLB was stale.
    Spurious,
}

/// The reason why a fault has mapped nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Exclusive work is in progress. Fault again later. If the platform's flush does not wait for
    /// this thread, [wait](Worker::wait) first.
    #[error("exclusive work on the tables is in progress: fault again")]
    Excluded,
    /// The look-up may be stale. The range is being invalidated, or may have been invalidated since
    /// the ticket was taken. Or other workers repeatedly cut tables off while the fault walked
    /// down. Fault again, with a new ticket.
    #[error("the range was invalidated meanwhile: fault again with a new ticket")]
    Invalidated,
    /// A large page is in the way, and splitting it needs a flush in this format.
    /// [Split](Worker::split) it outside the fault, and fault again.
    #[error("a page of level {level} is in the way: split it outside the fault")]
    TooLarge {
        /// The level of the table that holds it.
        level: u32,
    },
    /// The target does not allow the access.
    #[error("the target does not allow the access")]
    Denied,
    /// Another frame is mapped there, and was not invalidated.
    #[error("the page is mapped to {:?}, which was not invalidated", existing.leaf.pfn)]
    Conflict {
        /// The existing translation.
        existing: Found,
    },
    /// The format has no room for the frame. No hardware that walks these tables can access it: see
    /// [`EntryLayout::GFN_LIMIT`](crate::format::EntryLayout::GFN_LIMIT).
    #[error("{gfn:?} is past the tables' reach: expected a frame below {limit:?}")]
    OutOfReach {
        /// The frame.
        gfn: Gfn,
        /// The format's limit.
        limit: Gfn,
    },
    /// There is no memory for a table.
    #[error(transparent)]
    OutOfTables(#[from] OutOfTables),
}

/// The level of the largest page that can map `gfn` to `pfn` inside `slot`, if the host memory
/// behind it allows `backing`. The page must lie in the slot, and begin at a multiple of its size
/// on both sides.
///
/// ```
/// use pageferry_addr::{Gfn, GfnRange, Pfn};
/// use pageferry_tdp::format::{Ept4, Format};
/// use pageferry_tdp::largest_level;
///
/// let slot = GfnRange::new(Gfn(0x100), 0x700).unwrap();
/// assert_eq!(largest_level::<Ept4>(slot, Gfn(0x345), Pfn(0x7_0345), 3), 2);
/// // The slot begins at 0x100.
/// assert_eq!(largest_level::<Ept4>(slot, Gfn(0x145), Pfn(0x7_0145), 3), 1);
/// assert_eq!(largest_level::<Ept4>(slot, Gfn(0x345), Pfn(0x7_0346), 3), 1, "out of step");
/// ```
#[must_use]
pub fn largest_level<F: Format>(slot: GfnRange, gfn: Gfn, pfn: Pfn, backing: u32) -> u32 {
    let mut level = backing.clamp(1, F::MAX_LEAF_LEVEL);
    while level > 1 {
        let frames = F::frames_per_entry(level);
        let first = gfn.0 & !(frames - 1);
        let in_step = (gfn.0 ^ pfn.0) & (frames - 1) == 0;
        let fits = (first.checked_add(frames)).is_some_and(|end| end <= slot.end().0);
        if in_step && first >= slot.start().0 && fits {
            break;
        }
        level -= 1;
    }
    level
}

impl<F: Format, P: Platform> Worker<F, P> {
    /// Answers a fault from the existing leaf, without the MMU lock. That works in three cases:
    ///
    /// - another vCPU was faster;
    /// - the page was write-protected for its log, and its class allows stores;
    /// - the page was marked as not accessed.
    ///
    /// Otherwise it returns `None`, and the caller calls [`fault`](Self::fault).
    ///
    /// The caller has looked at the page's slot. No change of the slot's flags completes before
    /// this returns.
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
            state: &mut self.state,
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
            let seen = see::<F>(table, gfn, value);
            match session.change(&seen, new, Preserves::Nothing) {
                Ok(()) => return mapped::<F>(new, level, How::Upgraded),
                Err(now) => value = now,
            }
        }
    }

    /// Answers a fault by mapping `target`.
    ///
    /// If a leaf already maps the same frame, it gets more rights, never fewer. If a table is in
    /// the way of a large page, the fault maps a smaller page. If a large page is in the way of a
    /// smaller one (for a log, or since it allows less), the fault splits it in place.
    ///
    /// The vCPU then obeys [`Mapped::local_flush`].
    ///
    /// # Errors
    /// [`Refused`]. Then nothing has changed, except that tables may have been linked, or large
    /// pages split.
    ///
    /// # Panics
    /// If the format has no room for the target's frame; if `gfn` and the frame are out of step for
    /// the target's level; or if the ticket is of another MMU.
    #[inline]
    pub fn fault<L: Log>(
        &mut self,
        ticket: Ticket,
        fault: Fault,
        target: Target,
        log: &L,
    ) -> Result<Mapped, Refused> {
        let Fault { gfn, access } = fault;
        Self::check_reach(gfn)?;
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

    /// Refuses a frame that the tables cannot map. The guest chooses it.
    #[inline]
    pub(crate) fn check_reach(gfn: Gfn) -> Result<(), Refused> {
        let limit = F::GFN_LIMIT;
        if gfn < limit {
            Ok(())
        } else {
            Err(Refused::OutOfReach { gfn, limit })
        }
    }

    /// Prepares a change of the page of `frames` frames around `gfn`, under a fault's ticket. It
    /// fills the cache of tables, takes the shared side, and checks that no invalidation came
    /// between.
    #[cfg_attr(not(debug_assertions), inline(always))]
    pub(crate) fn begin_fault<'w, L: Log>(
        &'w mut self,
        ticket: Ticket,
        gfn: Gfn,
        frames: u64,
        log: &'w L,
    ) -> Result<(Shared<'w>, Session<'w, F, P, L>), Refused> {
        let Self {
            mmu, state, reader, ..
        } = self;
        state
            .cache
            .fill::<F, P>(mmu.platform(), Self::FAULT_TABLES)?;
        let shared = reader
            .share_within(Self::SPINS, core::hint::spin_loop)
            .ok_or(Refused::Excluded)?;
        if !mmu.invalidations.admits(ticket, gfn, frames) {
            return Err(Refused::Invalidated);
        }
        Ok((shared, Session { mmu, state, log }))
    }
}

impl<F: Format, P: Platform, L: Log> Session<'_, F, P, L> {
    /// The common case, as straight code: the tables exist, nothing is mapped, and no thread
    /// interferes. Otherwise it returns `None`, and nothing has changed.
    #[cfg_attr(not(debug_assertions), inline(always))]
    fn install(&mut self, top: Table<'_, F>, fault: Fault, target: Target) -> Option<Mapped> {
        let (table, value) = top.descend(self.mmu.platform(), fault.gfn);
        if table.level() != 1 || F::is_present(value) || F::is_frozen(value) {
            return None;
        }
        let seen = see::<F>(table, fault.gfn, value);
        let leaf = F::canonical(new_leaf::<F>(1, fault, target));
        self.change(&seen, F::leaf(leaf, 1), Preserves::Nothing)
            .ok()?;
        Some(Mapped {
            leaf,
            level: 1,
            how: How::Installed,
            local_flush: local_flush::<F>(How::Installed),
        })
    }

    /// All cases.
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
        // An entry may stay frozen until a flush is over, and that flush may wait for this very
        // vCPU.
        Err(Refused::Invalidated)
    }

    /// One walk from the root. `None` if it met an entry that another worker is about to change.
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
            let seen = see::<F>(table, fault.gfn, value);
            let logged = target.access.write && self.log.is_on();
            // A store to a logged page must not make a large page writable.
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
                    match self.split_here(&seen) {
                        // If the exchange was lost, another worker has changed the entry, so read
                        // it again.
                        Ok(()) | Err(NotSplit::Lost) => continue,
                        Err(NotSplit::NoTable) => return Some(Err(Refused::Invalidated)),
                    }
                }
                let new = more::<F>(value, level, fault, target);
                if self.change(&seen, new, Preserves::Nothing).is_ok() {
                    return mapped::<F>(new, level, How::Upgraded).map(Ok);
                }
            } else if level > limit {
                if !self.link(&seen) {
                    return Some(Err(Refused::Invalidated));
                }
            } else {
                let new = leaf_for::<F>(level, fault, target);
                if self.change(&seen, new, Preserves::Nothing).is_ok() {
                    return mapped::<F>(new, level, How::Installed).map(Ok);
                }
            }
        }
    }

    /// Links an empty table at `seen`, which is no link and no leaf. If another worker was faster,
    /// the page returns to the cache. Returns whether there was a page. The cache has one for each
    /// level, but each table that others cut off meanwhile costs one more.
    #[cold]
    pub(crate) fn link(&mut self, seen: &Seen<'_>) -> bool {
        let Some(page) = self.state.cache.take() else {
            return false;
        };
        let link = F::table(page.frame(self.mmu.platform()));
        if self.change(seen, link, Preserves::Nothing).is_err() {
            self.state.cache.put_back(page);
        }
        true
    }
}

#[inline]
pub(crate) fn see<'g, F: Format>(table: Table<'g, F>, gfn: Gfn, value: u64) -> Seen<'g> {
    let level = table.level();
    Seen {
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
        local_flush: local_flush::<F>(how),
    })
}

/// Whether the vCPU's own TLB may still have the entry at which it faulted.
#[inline]
fn local_flush<F: Format>(how: How) -> bool {
    match F::TLB_AFTER_FAULT {
        TlbAfterFault::Forgets => false,
        TlbAfterFault::KeepsDenied => how != How::Installed,
        TlbAfterFault::KeepsAbsent => true,
    }
}

/// The first frame of a leaf of `level` that maps the target's page.
#[inline]
fn pfn_at<F: Format>(target: Target, level: u32) -> Pfn {
    Pfn(target.pfn.0 & !(F::frames_per_entry(level) - 1))
}

/// The contents of a new leaf.
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

/// The leaf `old` with the target's permissions added. It loses none, as a fault flushes nothing.
/// State, memory type, and a class that lets the MMU allow stores are kept.
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

/// The leaf with the permissions that it may get without a look-up, so that it allows `access`.
/// `None` if they do not suffice.
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
