//! The dirty ring of one vCPU: which pages has it dirtied since their last protection?
//!
//! **Guarantee.** Every pushed page is harvested once, in the order of the pushes, and then handed
//! to a reset once (again if a panic interrupted the reset). A push fails only if no entry is
//! empty: as many pages as there are entries were pushed and not reset. No thread waits for
//! another. Until the ring is [soft-full](Producer::is_soft_full), a push reads no line that
//! another thread writes, except for the entries.
//!
//! **Mechanism.** That of KVM (`Documentation/virt/kvm/api.rst`, `KVM_CAP_DIRTY_LOG_RING`;
//! `virt/kvm/dirty_ring.c`): a fixed power of two of entries with the layout of `struct
//! kvm_dirty_gfn`. The [`Producer`] makes an entry dirty, the [`Harvester`] harvested, and the
//! [`Resetter`] empty again, always in the order of the ring. There is one value of each type, and
//! each serves one thread at a time. KVM holds its slots lock during a reset. Here the resetter's
//! owner has a lock.
//!
//! # Orderings
//!
//! An entry has one owner at a time. The actions of each owner happen before those of the next:
//! - (p) The producer fills the entry and then stores *dirty*, release. The harvester loads that,
//!   acquire.
//! - (h) The harvester reads the entry and then stores *harvested*, release. The resetter loads
//!   that, acquire.
//! - (z) The resetter reads the entry, has the page protected, and stores *empty*. Then it stores
//!   the count of reset entries, release. The producer loads that count, acquire, before it takes
//!   the entry again. So it does not read the flags.
//!
//! # What keeps the log complete
//!
//! 1. A vCPU pushes a page after its entry in the second-stage tables became writable, and before a
//!    TLB can hold that entry.
//! 2. The thread that copies pages harvests them, resets, flushes the TLBs of all vCPUs, and then
//!    copies them.
//! 3. A store that the copy misses finds the page protected, so its vCPU pushes the page again.
//!
//! A page that another thread finds dirty (for example a zap that meets a dirty bit) does not fit
//! the ring of one producer. It goes into a bitmap, as with `KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP`.
//!
//! **Neighbours.** None: this module knows slots and offsets as numbers.
//!
//! ```
//! use pageferry_tdp::ring::{self, DirtyPage};
//!
//! let (producer, mut harvester, mut resetter) = ring::new(8, 2)?;
//! for offset in [10, 11, 13] {
//!     producer.push(DirtyPage { slot: 1, offset }).expect("it is not soft-full");
//! }
//! assert!(!producer.is_soft_full());
//! assert_eq!(harvester.harvest(), Some(DirtyPage { slot: 1, offset: 10 }));
//! while harvester.harvest().is_some() {}
//! // Protect the harvested pages, then flush, then copy them.
//! let pages = resetter.reset(|slot, base, mask| assert_eq!((slot, base, mask), (1, 10, 0b1011)));
//! assert_eq!(pages, 3);
//! # Ok::<(), ring::BadRing>(())
//! ```

use crate::sync::{AtomicU32, AtomicU64, Ordering};
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::cell::Cell;

/// The most entries that a ring can have, as with KVM (`KVM_DIRTY_RING_MAX_ENTRIES`).
pub const MAX_ENTRIES: u32 = 65_536;

/// The reserve that KVM keeps for the pages that a vCPU may dirty on its way out
/// (`KVM_DIRTY_RING_RSVD_ENTRIES`). A vCPU that pushes a huge page as small ones, or a hardware
/// log, needs that many more.
pub const RESERVED_ENTRIES: u32 = 64;

/// The flags of an entry, as in `struct kvm_dirty_gfn`.
const EMPTY: u32 = 0;
/// `KVM_DIRTY_GFN_F_DIRTY`.
const DIRTY: u32 = 1;
/// `KVM_DIRTY_GFN_F_RESET`: harvested.
const HARVESTED: u32 = 2;

/// A page that a vCPU has dirtied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DirtyPage {
    /// The memory slot, with the address space in the upper 16 bits, as the producer and its user
    /// agree.
    pub slot: u32,
    /// The page's number within the slot.
    pub offset: u64,
}

/// The reason why a ring cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRing {
    /// The number of entries is not allowed.
    #[error(
        "a dirty ring cannot have {0} entries: expected a power of two from 2 to {MAX_ENTRIES}"
    )]
    Entries(u32),
    /// The reserve leaves no entry.
    #[error("the reserve of {reserve} entries leaves none: the dirty ring has {entries} entries")]
    Reserve {
        /// The requested number of entries.
        entries: u32,
        /// The requested reserve.
        reserve: u32,
    },
}

/// All entries of a ring are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the dirty ring is full: none of its {entries} pages was reset")]
pub struct Full {
    /// The number of entries of the ring.
    pub entries: u32,
}

/// `struct kvm_dirty_gfn`.
#[derive(Debug)]
#[repr(C)]
struct RingEntry {
    flags: AtomicU32,
    slot: AtomicU32,
    offset: AtomicU64,
}

#[cfg(not(any(loom, shuttle)))]
const _: () =
    assert!(size_of::<RingEntry>() == 16 && core::mem::offset_of!(RingEntry, offset) == 8);

impl RingEntry {
    fn page(&self) -> DirtyPage {
        DirtyPage {
            slot: self.slot.load(Ordering::Relaxed),
            offset: self.offset.load(Ordering::Relaxed),
        }
    }
}

#[derive(Debug)]
struct Ring {
    entries: Box<[RingEntry]>,
    /// The number of entries that were reset so far, from [`Ring::first`] on. It wraps.
    reset: Apart,
}

/// A count in its own cache line, since producers read the neighbouring fields.
#[derive(Debug)]
#[repr(align(64))]
struct Apart(AtomicU32);

impl Ring {
    fn len(&self) -> u32 {
        self.entries.len() as u32
    }

    /// The start of all counts: one lap before they wrap, so that every ring in use tests the wrap.
    const fn first(entries: u32) -> u32 {
        0_u32.wrapping_sub(entries)
    }

    fn entry(&self, count: u32) -> &RingEntry {
        &self.entries[count as usize & (self.entries.len() - 1)]
    }
}

/// Makes a ring of `entries`. It keeps `reserve` of them for the pushes of a vCPU that has yet to
/// notice that the ring is soft-full. It takes 16 bytes an entry.
///
/// # Errors
/// If `entries` is not a power of two from 2 to [`MAX_ENTRIES`], or `reserve` is not less.
pub fn new(entries: u32, reserve: u32) -> Result<(Producer, Harvester, Resetter), BadRing> {
    if !entries.is_power_of_two() || !(2..=MAX_ENTRIES).contains(&entries) {
        return Err(BadRing::Entries(entries));
    }
    if reserve >= entries {
        return Err(BadRing::Reserve { entries, reserve });
    }
    let empty = |_| RingEntry {
        flags: AtomicU32::new(EMPTY),
        slot: AtomicU32::new(0),
        offset: AtomicU64::new(0),
    };
    let first = Ring::first(entries);
    let ring = Arc::new(Ring {
        entries: (0..entries).map(empty).collect(),
        reset: Apart(AtomicU32::new(first)),
    });
    let producer = Producer {
        ring: Arc::clone(&ring),
        soft_limit: entries - reserve,
        pushed: Cell::new(first),
        reset: Cell::new(first),
    };
    let harvester = Harvester {
        ring: Arc::clone(&ring),
        harvested: first,
    };
    let resetter = Resetter { ring, reset: first };
    Ok((producer, harvester, resetter))
}

/// The vCPU's end of its ring.
#[derive(Debug)]
pub struct Producer {
    ring: Arc<Ring>,
    soft_limit: u32,
    pushed: Cell<u32>,
    /// The value of `Ring::reset` that the producer read last. The current one may be higher.
    reset: Cell<u32>,
}

impl Producer {
    /// Pushes `page` as dirty. Allocates nothing and never waits.
    ///
    /// # Errors
    /// If all entries are taken, including the reserve. The page is then not in the ring, so the
    /// guest must not get to write it unnoticed.
    #[inline]
    pub fn push(&self, page: DirtyPage) -> Result<(), Full> {
        let entries = self.ring.len();
        if !self.has_fewer_than(entries) {
            return Err(Full { entries });
        }
        let pushed = self.pushed.get();
        let entry = self.ring.entry(pushed);
        entry.slot.store(page.slot, Ordering::Relaxed);
        entry.offset.store(page.offset, Ordering::Relaxed);
        entry.flags.store(DIRTY, Ordering::Release); // (p)
        self.pushed.set(pushed.wrapping_add(1));
        Ok(())
    }

    /// Whether only the reserve is left. The vCPU then leaves the guest, as with
    /// `KVM_EXIT_DIRTY_RING_FULL`, and does not enter it before pages were harvested and reset.
    #[inline]
    #[must_use]
    pub fn is_soft_full(&self) -> bool {
        !self.has_fewer_than(self.soft_limit)
    }

    /// Whether fewer than `limit` pages were pushed and not reset.
    #[inline]
    fn has_fewer_than(&self, limit: u32) -> bool {
        let pushed = self.pushed.get();
        if pushed.wrapping_sub(self.reset.get()) < limit {
            return true;
        }
        self.reset.set(self.ring.reset.0.load(Ordering::Acquire)); // (z)
        pushed.wrapping_sub(self.reset.get()) < limit
    }
}

/// The end of the thread that collects dirty pages.
#[derive(Debug)]
pub struct Harvester {
    ring: Arc<Ring>,
    harvested: u32,
}

impl Harvester {
    /// The next pushed page, if there is one. The producer does not reuse its entry before a
    /// [reset](Resetter::reset). Copy the page only after that reset and a flush.
    #[inline]
    pub fn harvest(&mut self) -> Option<DirtyPage> {
        let entry = self.ring.entry(self.harvested);
        // Acquire: the contents of the entry. Any other flag means empty, or harvested a lap ago
        // and not reset. (p)
        if entry.flags.load(Ordering::Acquire) != DIRTY {
            return None;
        }
        let page = entry.page();
        entry.flags.store(HARVESTED, Ordering::Release); // (h)
        self.harvested = self.harvested.wrapping_add(1);
        Some(page)
    }
}

/// The end of the thread that protects pages again.
#[derive(Debug)]
pub struct Resetter {
    ring: Arc<Ring>,
    reset: u32,
}

impl Resetter {
    /// Empties the harvested entries, at most one lap of them, and returns their number.
    ///
    /// Before it empties entries it calls `protect` with their slot, the offset of a page in it,
    /// and a mask. Bit `i` stands for the page at that offset plus `i`, and bit 0 is set.
    /// Consecutive entries within 64 pages share a call. `protect` takes the permission to store,
    /// or the dirty bit, from those pages, so that the next store pushes them again. If the result
    /// is not 0, the caller flushes TLBs afterwards.
    ///
    /// If `protect` panics, its entries stay harvested, and the next reset hands them out again.
    pub fn reset(&mut self, mut protect: impl FnMut(u32, u64, u64)) -> u32 {
        let first = self.reset;
        let mut batch: Option<Batch> = None;
        let mut next = first;
        while next.wrapping_sub(first) < self.ring.len() {
            let entry = self.ring.entry(next);
            // Acquire: the contents of the entry. (h)
            if entry.flags.load(Ordering::Acquire) & HARVESTED == 0 {
                break;
            }
            let page = entry.page();
            batch = Some(match batch {
                None => Batch::of(page),
                Some(batch) => batch.with(page).unwrap_or_else(|| {
                    protect(batch.slot, batch.base, batch.mask);
                    self.empty_until(next);
                    Batch::of(page)
                }),
            });
            next = next.wrapping_add(1);
        }
        if let Some(batch) = batch {
            protect(batch.slot, batch.base, batch.mask);
            self.empty_until(next);
        }
        next.wrapping_sub(first)
    }

    fn empty_until(&mut self, end: u32) {
        while self.reset != end {
            let entry = self.ring.entry(self.reset);
            entry.flags.store(EMPTY, Ordering::Relaxed);
            self.reset = self.reset.wrapping_add(1);
        }
        self.ring.reset.0.store(end, Ordering::Release); // (z)
    }
}

/// Pages of one slot within 64 of each other.
#[derive(Clone, Copy)]
struct Batch {
    slot: u32,
    base: u64,
    /// Bit 0 stands for the page at `base`, and is set.
    mask: u64,
}

impl Batch {
    const fn of(page: DirtyPage) -> Self {
        Self {
            slot: page.slot,
            base: page.offset,
            mask: 1,
        }
    }

    /// The batch with `page` added, or `None` if it does not fit. The page may precede all others.
    fn with(self, page: DirtyPage) -> Option<Self> {
        if page.slot != self.slot {
            return None;
        }
        if let Some(ahead) = page.offset.checked_sub(self.base) {
            let mask = self.mask | 1_u64.checked_shl(u32::try_from(ahead).ok()?)?;
            return Some(Self { mask, ..self });
        }
        let behind = self.base - page.offset;
        if behind > u64::from(self.mask.leading_zeros()) {
            return None;
        }
        let (base, mask) = (page.offset, self.mask << behind | 1);
        Some(Self { base, mask, ..self })
    }
}
