#![expect(
    unsafe_code,
    reason = "slots and tree nodes are shared by pointer and freed after a grace period"
)]
//! The state that the writer and the readers of a table share.
//!
//! # The order in which an operation becomes visible
//!
//! Every step is a store with release order. Let `g` be the generation before.
//!
//! 1. The generation word gets its bit "update in progress".
//! 2. If a slot is deleted or moved, its record is marked invalid. (Here the caller takes back
//!    everything derived from the slot.) If flags change, the old record is marked as replaced.
//! 3. The trees are changed. New nodes and the new record are born at version `g + 1`. In the tree
//!    by frame, a slot that moves enters its new place before it leaves the old one. In a tree
//!    where the key stays, the new record is stored over the old one, its predecessor. A move keeps
//!    the keys by id and by host address. A change of flags keeps all three.
//! 4. The generation word becomes `g + 1`.
//! 5. Replaced nodes and records are stamped and retired, at once or together with those of some
//!    later operations.
//!
//! # What readers may see, and when memory is freed
//!
//! *Views* load the generation word, strip the bit, and look at that version: `g` before step 4, `g
//! + 1` after. So a view sees an operation wholly or not at all.
//!
//! 1. Each node and record that a view meets has its version and, if it replaced another, a pointer
//!    to that predecessor ([`crate::tree`]).
//! 2. A view goes back only to things that were replaced in a version above its own.
//! 3. So each such thing was stamped after that version was published. The loads of the view's
//!    guard did not see that publication.
//! 4. So the epochs keep the thing while the guard lasts ([`pageferry_epoch`]).
//!
//! *Look-ups of the newest state* follow the cells as they are.
//!
//! 1. By frame, a change other than a move is one store of a node or a record. A look-up sees that
//!    store or does not.
//! 2. During a move a look-up may find the old record at the old place. That record is invalid by
//!    then (step 2 before step 3), so the reader knows that it has to look again. A reader that has
//!    seen the new record finds the old one invalid or gone.
//! 3. A look-up that needs two leaves reads them at one version instead. If an operation is in
//!    progress, this is the version that it makes, because single look-ups may have seen parts of
//!    it. That version is as safe as `g`: everything that it or a later version replaces is stamped
//!    after `g + 1` was published.
//!
//! *Caches* remember a record and check its mark. A record that was deleted, moved or replaced is
//! marked before anything else shows that.
//!
//! The *generation* that a reader loads before a look-up is a good key for derived data. If a later
//! load returns the same word without "in progress", nothing has changed in between. An aborted
//! operation takes a generation too, so no reader misses that its mark came and went.

use crate::slab::Slab;
use crate::sync::{AtomicPtr, AtomicU64, Ordering};
use crate::tree::{At, ByGfn, ByHva, ById, NEWEST, NodePool, Replaced, Tree};
use crate::{Barrier, Limits, Slot, SlotError, SlotReader, SlotView};
use alloc::vec::Vec;
use core::cell::UnsafeCell;
use core::fmt;
use core::ptr;
use pageferry_epoch::{Domain, Epoch, Guard, Limbo, OutOfMemory, TryArc};

/// The number of changes of a table, and whether a change is in progress.
///
/// A reader that derives something from slots (a cached MMIO address, say) loads the generation
/// *before* the look-up. The derived data is valid as long as the reader loads the same generation
/// and [`in_progress`](Self::in_progress) is false. The kernel's flag for that is
/// `KVM_MEMSLOT_GEN_UPDATE_IN_PROGRESS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Generation(u64);

impl Generation {
    pub(crate) const IN_PROGRESS: u64 = 1 << 63;

    /// The number of operations that are complete or aborted.
    #[inline]
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0 & !Self::IN_PROGRESS
    }

    /// Whether an operation has begun and is neither complete nor aborted.
    #[inline]
    #[must_use]
    pub const fn in_progress(self) -> bool {
        self.0 & Self::IN_PROGRESS != 0
    }
}

/// A value on cache lines of its own. The writer writes some of these values at each change, and
/// readers read the others.
#[repr(align(128))]
struct Apart<T>(T);

/// The slots of one address space.
pub(crate) struct Space<D> {
    pub(crate) by_gfn: Tree<ByGfn, D>,
    pub(crate) by_id: Tree<ById, D>,
    pub(crate) by_hva: Tree<ByHva, D>,
    /// The slot that any reader found last, with one place for each of three epochs. Empty if
    /// readers do not share it.
    last_used: Vec<AtomicPtr<Slot<D>>>,
}

pub(crate) struct SharedTable<D> {
    generation: Apart<AtomicU64>,
    pub(crate) domain: TryArc<Domain>,
    pub(crate) limits: Limits,
    pub(crate) spaces: Vec<Space<D>>,
    /// Used by the writer only: see [`SharedTable::writer`].
    state: Apart<UnsafeCell<WriterState<D>>>,
}

/// State that only the writer uses.
pub(crate) struct WriterState<D> {
    pub(crate) pools: Pools<D>,
    pub(crate) limbo: Limbo<Garbage<D>>,
    /// Replaced things without a stamp. A change reserves room here before it begins.
    pub(crate) replaced: Vec<Garbage<D>>,
    /// The number of slots and of their pages, in all address spaces.
    pub(crate) len: usize,
    pub(crate) pages: u64,
    pub(crate) pending: Pending<D>,
    /// Whether the last scan of the writer found no reader with a guard.
    pub(crate) quiet: bool,
    pub(crate) relax: fn(),
}

pub(crate) struct Pools<D> {
    pub(crate) by_gfn: NodePool<ByGfn, D>,
    pub(crate) by_id: NodePool<ById, D>,
    pub(crate) by_hva: NodePool<ByHva, D>,
    pub(crate) slots: Slab<D>,
}

/// A replaced thing that readers may still use.
pub(crate) enum Garbage<D> {
    ByGfn(Replaced),
    ById(Replaced),
    ByHva(Replaced),
    Slot(*const Slot<D>),
}

/// An operation that has begun.
pub(crate) enum Pending<D> {
    Nothing,
    Create {
        new: *mut Slot<D>,
    },
    Delete {
        old: *const Slot<D>,
    },
    Move {
        old: *const Slot<D>,
        new: *mut Slot<D>,
    },
    Flags {
        old: *const Slot<D>,
        new: *mut Slot<D>,
    },
}

// Not derived: a derived impl would need `D: Copy`.
impl<D> Clone for Pending<D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D> Copy for Pending<D> {}

// SAFETY: readers get `&Slot<D>` on any thread (`D: Sync`). The last handle drops the slots, on any
// thread (`D: Send`). Cells and marks are atomics. Only the one writer and `drop` use `state`.
unsafe impl<D: Send + Sync> Send for SharedTable<D> {}
// SAFETY: as above.
unsafe impl<D: Send + Sync> Sync for SharedTable<D> {}

impl<D> SharedTable<D> {
    pub(crate) fn try_new(limits: Limits, barrier: Option<Barrier>) -> Result<Self, OutOfMemory> {
        let mut table = Self {
            generation: Apart(AtomicU64::new(0)),
            domain: Domain::try_with_barrier(barrier)?,
            limits,
            spaces: with_room(limits.address_spaces.into())?,
            state: Apart(UnsafeCell::new(WriterState {
                pools: Pools {
                    by_gfn: NodePool::new(),
                    by_id: NodePool::new(),
                    by_hva: NodePool::new(),
                    slots: Slab::new(),
                },
                limbo: Limbo::new(),
                replaced: Vec::new(),
                len: 0,
                pages: 0,
                pending: Pending::Nothing,
                quiet: true,
                relax: core::hint::spin_loop,
            })),
        };
        for _ in 0..limits.address_spaces {
            let space =
                Space::try_new(limits.shared_last_used, &mut table.state.0.get_mut().pools)?;
            table.spaces.push(space);
        }
        Ok(table)
    }

    /// The writer's state.
    ///
    /// # Safety
    /// The caller is the one writer, and borrows it by `&mut` while it uses the reference.
    #[expect(clippy::mut_from_ref, reason = "exclusive by the caller's promise")]
    pub(crate) unsafe fn writer(&self) -> &mut WriterState<D> {
        // SAFETY: there is no other reference, as the caller promises.
        unsafe { &mut *self.state.0.get() }
    }

    /// The writer's state, for reading.
    ///
    /// # Safety
    /// The caller is the one writer.
    pub(crate) unsafe fn writer_ref(&self) -> &WriterState<D> {
        // SAFETY: the writer, which the caller borrows, makes no other reference meanwhile.
        unsafe { &*self.state.0.get() }
    }

    #[inline]
    pub(crate) fn generation(&self) -> Generation {
        Generation(self.generation.0.load(Ordering::Acquire))
    }

    pub(crate) fn set_generation(&self, word: u64) {
        self.generation.0.store(word, Ordering::Release);
    }

    /// Empties the places of the shared last-used slots that readers of epoch `next` will use. The
    /// writer calls this before it advances the epoch, because the places still hold pointers from
    /// three epochs before.
    pub(crate) fn forget_last_used(&self, next: Epoch) {
        for space in &self.spaces {
            if let Some(place) = space.last_used.get(next.modulo_3()) {
                place.store(ptr::null_mut(), Ordering::Relaxed);
            }
        }
    }
}

impl<D> Space<D> {
    fn try_new(shared_last_used: bool, pools: &mut Pools<D>) -> Result<Self, OutOfMemory> {
        let mut last_used = Vec::new();
        if shared_last_used {
            last_used = with_room(3)?;
            last_used.extend((0..3).map(|_| AtomicPtr::new(ptr::null_mut())));
        }
        // First everything that can fail. A pool frees what it has reserved.
        pools.by_gfn.reserve_empty()?;
        pools.by_id.reserve_empty()?;
        pools.by_hva.reserve_empty()?;
        Ok(Self {
            by_gfn: Tree::new(&mut pools.by_gfn),
            by_id: Tree::new(&mut pools.by_id),
            by_hva: Tree::new(&mut pools.by_hva),
            last_used,
        })
    }

    /// The newest state of the tree by gfn.
    #[inline]
    pub(crate) fn newest<'g>(&'g self, _: &'g Guard<'_>) -> At<'g, ByGfn, D> {
        // SAFETY: the guard lasts as long as `'g`. It keeps everything that the cells hold from now
        // on, because the writer stamps a node after the store that replaced it.
        unsafe { self.by_gfn.at(NEWEST) }
    }

    #[inline]
    pub(crate) const fn shares_last_used(&self) -> bool {
        !self.last_used.is_empty()
    }

    /// The slot that any reader of `epoch` found last. `epoch` is that of `guard`, or `NEVER`.
    #[cold]
    pub(crate) fn last_used<'g>(
        &'g self,
        _guard: &'g Guard<'_>,
        epoch: Epoch,
    ) -> Option<&'g Slot<D>> {
        if epoch == Epoch::NEVER {
            return None;
        }
        let place = self.last_used.get(epoch.modulo_3())?;
        let slot = place.load(Ordering::Acquire);
        // SAFETY: the pointer is null, or a reader whose guard had this very epoch stored it. The
        // writer empties a place before the epoch comes to it, and by then the readers of three
        // epochs before have gone. A record that was reached under a guard of the same epoch may be
        // used.
        let slot = unsafe { slot.as_ref() }?;
        slot.alive.used();
        Some(slot)
    }

    /// Offers `slot` to other readers. `epoch` is that of the guard under which it was reached, or
    /// `NEVER`.
    #[cold]
    pub(crate) fn remember(&self, epoch: Epoch, slot: *const Slot<D>) {
        if let Some(place) = self.last_used.get(epoch.modulo_3())
            && epoch != Epoch::NEVER
        {
            place.store(slot.cast_mut(), Ordering::Release);
        }
    }
}

impl<D> WriterState<D> {
    /// Makes room for the things that a change replaces.
    #[inline]
    pub(crate) fn reserve_replaced(&mut self, count: usize) -> Result<(), OutOfMemory> {
        let bytes = count * size_of::<Garbage<D>>();
        self.replaced
            .try_reserve(count)
            .map_err(|_| OutOfMemory { bytes })
    }
}

impl<D> Pools<D> {
    pub(crate) const fn bytes(&self) -> usize {
        self.by_gfn.bytes() + self.by_id.bytes() + self.by_hva.bytes() + self.slots.bytes()
    }

    /// # Safety
    /// No new reader can reach the thing, no old reader uses it, and it is freed once.
    pub(crate) unsafe fn free(&mut self, garbage: Garbage<D>) {
        // SAFETY: as the caller promises.
        unsafe {
            match garbage {
                Garbage::ByGfn(node) => self.by_gfn.free(node),
                Garbage::ById(node) => self.by_id.free(node),
                Garbage::ByHva(node) => self.by_hva.free(node),
                Garbage::Slot(slot) => self.slots.remove(slot),
            }
        }
    }
}

impl<D> Drop for SharedTable<D> {
    fn drop(&mut self) {
        // Every reader and the writer hold the table. So no reader, writer or guard is left.
        let state = self.state.0.get_mut();
        match state.pending {
            Pending::Nothing | Pending::Delete { .. } => {}
            Pending::Create { new } | Pending::Move { new, .. } | Pending::Flags { new, .. } => {
                // SAFETY: `begin` made the record, and it is in no tree.
                unsafe { state.pools.slots.remove(new) };
            }
        }
        let unstamped = core::mem::take(&mut state.replaced).into_iter();
        let stamped = core::iter::from_fn(|| state.limbo.take());
        for garbage in unstamped.chain(stamped) {
            // SAFETY: the thing was replaced once, and nobody is left.
            unsafe { state.pools.free(garbage) };
        }
        let Pools {
            by_gfn,
            by_id,
            by_hva,
            slots,
        } = &mut state.pools;
        for space in &mut self.spaces {
            // SAFETY: nobody is left. Each slot is in each of the three trees once, and only the
            // last of them frees it.
            unsafe {
                space.by_gfn.free_all(by_gfn, &mut |_| ());
                space.by_hva.free_all(by_hva, &mut |_| ());
                space.by_id.free_all(by_id, &mut |slot| slots.remove(slot));
            }
        }
    }
}

/// A handle to a table. It makes readers. A clone is another handle to the same table.
pub struct SlotTable<D> {
    pub(crate) shared: TryArc<SharedTable<D>>,
}

impl<D> SlotTable<D> {
    /// A new reader, for one thread (a vCPU) at a time: [`try_reader`](Self::try_reader) for
    /// callers that do not handle a lack of memory.
    ///
    /// # Panics
    /// If the allocator refuses the reader's record.
    #[must_use]
    pub fn reader(&self) -> SlotReader<D> {
        self.try_reader()
            .unwrap_or_else(|error| panic!("no reader: {error}"))
    }

    /// A new reader, for one thread (a vCPU) at a time. It allocates a small record, or takes that
    /// of a dropped reader. Records live as long as the table, and each batch of changes scans all
    /// of them. So make one reader per thread, not one per request.
    ///
    /// # Errors
    /// [`SlotError::OutOfMemory`] if the allocator refuses it.
    pub fn try_reader(&self) -> Result<SlotReader<D>, SlotError> {
        Ok(SlotReader::new(self.shared.clone())?)
    }

    /// The number of changes, and whether one is in progress.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.shared.generation()
    }

    /// The limits of the table.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.shared.limits
    }
}

impl<D> Clone for SlotTable<D> {
    fn clone(&self) -> Self {
        Self {
            shared: self.shared.clone(),
        }
    }
}

impl<D> fmt::Debug for SlotTable<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotTable")
            .field("generation", &self.generation())
            .finish_non_exhaustive()
    }
}

/// A vector with room for `count` things.
fn with_room<T>(count: usize) -> Result<Vec<T>, OutOfMemory> {
    let mut room = Vec::new();
    let bytes = count * size_of::<T>();
    room.try_reserve_exact(count)
        .map_err(|_| OutOfMemory { bytes })?;
    Ok(room)
}

/// A view of address space 0.
pub(crate) fn view<D>(
    shared: &SharedTable<D>,
    version: u64,
    generation: Generation,
) -> SlotView<'_, D> {
    SlotView::new(shared, &shared.spaces[0], version, generation)
}
