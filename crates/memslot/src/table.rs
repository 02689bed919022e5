#![expect(
    unsafe_code,
    reason = "slots and tree nodes are shared by pointer and freed after a grace period"
)]
//! What the writer and the readers of a table share.
//!
//! # What readers may see, and when memory goes
//!
//! An operation becomes visible in this order, all by stores with release order:
//! 1. The generation word gets its bit "update in progress".
//! 2. Where a slot is deleted or moved, its record is marked invalid. (Here the caller takes back what it
//!    derived from the slot.) Where flags change, the old record is marked as replaced.
//! 3. The trees are changed; what is new in them, nodes, the record and a tombstone, is born at version `g + 1`. A slot that moves is
//!    put at its new place by frame before it is taken from the old. Where its key stays (by id and by host address, and
//!    everywhere where flags change) the new record is stored over the old one, which it knows as its predecessor. Where a slot
//!    goes, mostly a tombstone is stored over it, over which it may come again ([`crate::tree`]).
//! 4. The generation word becomes `g + 1`.
//! 5. Nodes, records and tombstones that were replaced are stamped and retired: at once, or with those of some later operations.
//!
//! *Views* load the generation word, strip the bit, and look at that version: `g` before 4, `g + 1` after. So a
//! view sees an operation wholly or not at all. Each node, record and tombstone it meets tells whether it is too new, and what was in
//! its place before, if anything ([`crate::tree`]). What it is led back to was retired, if at all, after the view's
//! guard was taken: it was replaced in a version above the view's, thus stamped after that version was published, which
//! the guard's loads did not see. So the epochs keep it ([`pageferry_epoch`]).
//!
//! *Look-ups of the newest state* follow the cells wherever they are. By gfn, a change other than a move is one
//! store, of a node, a record or a tombstone, so they see it or not. During a move they may find the old record at the old place,
//! which is invalid by then (2 before 3): they know that they have to look again. Who has seen the new record finds
//! the old one invalid or gone. A look-up that needs two leaves reads them at one version instead: the one that an operation in
//! progress makes, as single look-ups may have seen what it has done. That version is as safe as `g` is: what it
//! replaces, and what later ones do, is stamped after `g + 1` was published.
//!
//! *Caches* remember a record and check its mark: whatever was deleted, moved or replaced is marked before anything
//! else shows that.
//!
//! The generation that a reader loaded before it looked something up is good as the key of what it derives:
//! if the word is the same later, and has no "in progress", nothing has changed between. An operation that is given up
//! takes a generation too, so that its mark does not come and go unnoticed.

use crate::slab::Slab;
use crate::sync::{AtomicPtr, AtomicU64, Ordering};
use crate::tree::{
    At, ByGfn, ByHva, ById, NEWEST, Pool, Replaced, Tombstone, Tombstones, Tree, tombstone,
};
use crate::{Barrier, Limits, Slot, SlotReader, SlotView};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cell::UnsafeCell;
use core::fmt;
use core::ptr;
use pageferry_epoch::{Domain, Epoch, Guard, Limbo};

/// How often a table has changed, and whether it is changing now.
///
/// A reader that derives something from slots (a cached MMIO address, say) loads it *before* it looks, and uses
/// what it derived as long as it loads the same again and [`in_progress`](Self::in_progress) is false: the kernel's
/// `KVM_MEMSLOT_GEN_UPDATE_IN_PROGRESS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Generation(u64);

impl Generation {
    pub(crate) const IN_PROGRESS: u64 = 1 << 63;

    /// How many operations are complete or given up.
    #[inline]
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0 & !Self::IN_PROGRESS
    }

    /// Whether an operation has begun and is neither complete nor given up.
    #[inline]
    #[must_use]
    pub const fn in_progress(self) -> bool {
        self.0 & Self::IN_PROGRESS != 0
    }
}

/// On cache lines of its own: what the writer writes at each change, beside what all readers read.
#[repr(align(128))]
struct Apart<T>(T);

/// The slots of one address space.
pub(crate) struct Space<D> {
    pub(crate) by_gfn: Tree<ByGfn, D>,
    pub(crate) by_id: Tree<ById, D>,
    pub(crate) by_hva: Tree<ByHva, D>,
    /// The slot that some reader found last, one place for each of three epochs.
    last_used: Option<Box<[AtomicPtr<Slot<D>>; 3]>>,
}

pub(crate) struct Shared<D> {
    generation: Apart<AtomicU64>,
    pub(crate) domain: Arc<Domain>,
    pub(crate) limits: Limits,
    pub(crate) spaces: Box<[Space<D>]>,
    /// The writer's; see [`Shared::writer`].
    state: Apart<UnsafeCell<State<D>>>,
}

/// What only the writer uses.
pub(crate) struct State<D> {
    pub(crate) pools: Pools<D>,
    pub(crate) limbo: Limbo<Garbage<D>>,
    /// What was replaced and has no stamp yet.
    pub(crate) replaced: Vec<Garbage<D>>,
    /// Slots, and their pages.
    pub(crate) len: usize,
    pub(crate) pages: u64,
    pub(crate) pending: Pending<D>,
    /// Whether no reader had a guard when the writer looked last.
    pub(crate) quiet: bool,
    pub(crate) relax: fn(),
}

pub(crate) struct Pools<D> {
    pub(crate) by_gfn: Pool<ByGfn, D>,
    pub(crate) by_id: Pool<ById, D>,
    pub(crate) by_hva: Pool<ByHva, D>,
    pub(crate) slots: Slab<D>,
    pub(crate) tombstones: Tombstones<D>,
}

/// What waits for readers.
pub(crate) enum Garbage<D> {
    ByGfn(Replaced),
    ById(Replaced),
    ByHva(Replaced),
    Slot(*const Slot<D>),
    Tombstone(*const Tombstone<D>),
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

// By hand, since derived ones would ask for `D: Copy`.
impl<D> Clone for Pending<D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D> Copy for Pending<D> {}

// SAFETY: readers get `&Slot<D>` on any thread (`D: Sync`), and the last handle, on any thread, drops the slots (`D:
// Send`). Cells and marks are atomics; `state` is used by the one writer, which is unique, and by `drop`.
unsafe impl<D: Send + Sync> Send for Shared<D> {}
// SAFETY: as above.
unsafe impl<D: Send + Sync> Sync for Shared<D> {}

impl<D> Shared<D> {
    pub(crate) fn new(limits: Limits, barrier: Option<Barrier>) -> Self {
        Self {
            generation: Apart(AtomicU64::new(0)),
            domain: Domain::with_barrier(barrier),
            limits,
            spaces: (0..limits.address_spaces)
                .map(|_| Space::new(limits.shared_last_used))
                .collect(),
            state: Apart(UnsafeCell::new(State {
                pools: Pools {
                    by_gfn: Pool::new(),
                    by_id: Pool::new(),
                    by_hva: Pool::new(),
                    slots: Slab::new(),
                    tombstones: Tombstones::new(),
                },
                limbo: Limbo::new(),
                replaced: Vec::new(),
                len: 0,
                pages: 0,
                pending: Pending::Nothing,
                quiet: true,
                relax: core::hint::spin_loop,
            })),
        }
    }

    /// The writer's state.
    ///
    /// # Safety
    /// The caller is the one writer, by `&mut` while it uses the reference.
    #[expect(clippy::mut_from_ref, reason = "exclusive by the caller's promise")]
    pub(crate) unsafe fn writer(&self) -> &mut State<D> {
        // SAFETY: nobody else has one, as the caller promises.
        unsafe { &mut *self.state.0.get() }
    }

    /// The writer's state, to read.
    ///
    /// # Safety
    /// The caller is the one writer.
    pub(crate) unsafe fn writer_ref(&self) -> &State<D> {
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

    /// Before the epoch moves to `next`: the places of the shared last-used slots that readers of that epoch
    /// will use still hold what those of three epochs before put there.
    pub(crate) fn forget_last_used(&self, next: Epoch) {
        for space in &self.spaces {
            if let Some(places) = &space.last_used {
                places[next.modulo_3()].store(ptr::null_mut(), Ordering::Relaxed);
            }
        }
    }
}

impl<D> Space<D> {
    fn new(shared_last_used: bool) -> Self {
        let place = |_| AtomicPtr::new(ptr::null_mut());
        Self {
            by_gfn: Tree::new(),
            by_id: Tree::new(),
            by_hva: Tree::new(),
            last_used: shared_last_used.then(|| Box::new(core::array::from_fn(place))),
        }
    }

    /// The newest state of the tree by gfn.
    #[inline]
    pub(crate) fn newest<'g>(&'g self, _: &'g Guard<'_>) -> At<'g, ByGfn, D> {
        // SAFETY: the guard, which lasts as long as `'g`, keeps all that the cells hold from now on: nodes are
        // retired with a stamp taken after the store that replaced them.
        unsafe { self.by_gfn.at(NEWEST) }
    }

    #[inline]
    pub(crate) const fn shares_last_used(&self) -> bool {
        self.last_used.is_some()
    }

    /// The slot that some reader of `epoch` found last; `guard` has had that epoch, unless it is `NEVER`.
    #[cold]
    pub(crate) fn last_used<'g>(
        &'g self,
        _guard: &'g Guard<'_>,
        epoch: Epoch,
    ) -> Option<&'g Slot<D>> {
        let places = self.last_used.as_ref()?;
        if epoch == Epoch::NEVER {
            return None;
        }
        let slot = places[epoch.modulo_3()].load(Ordering::Acquire);
        // SAFETY: null, or a record that a reader put there whose guard had this very epoch: places are emptied before
        // the epoch comes to them, and by then those who used them three epochs before have gone. What was
        // reached under a guard of the same epoch may be used.
        unsafe { slot.as_ref() }
    }

    /// Tells other readers of `slot`, which was reached under a guard that had `epoch`, unless it is `NEVER`.
    #[cold]
    pub(crate) fn remember(&self, epoch: Epoch, slot: *const Slot<D>) {
        if let Some(places) = &self.last_used
            && epoch != Epoch::NEVER
        {
            places[epoch.modulo_3()].store(slot.cast_mut(), Ordering::Release);
        }
    }
}

impl<D> Pools<D> {
    pub(crate) const fn bytes(&self) -> usize {
        let trees = self.by_gfn.bytes() + self.by_id.bytes() + self.by_hva.bytes();
        trees + self.slots.bytes() + self.tombstones.bytes()
    }

    /// # Safety
    /// Nobody can reach it any more, and it is freed once.
    pub(crate) unsafe fn free(&mut self, garbage: Garbage<D>) {
        // SAFETY: as the caller promises.
        unsafe {
            match garbage {
                Garbage::ByGfn(node) => self.by_gfn.free(node),
                Garbage::ById(node) => self.by_id.free(node),
                Garbage::ByHva(node) => self.by_hva.free(node),
                Garbage::Slot(slot) => self.slots.remove(slot),
                Garbage::Tombstone(tombstone) => self.tombstones.free(tombstone),
            }
        }
    }
}

impl<D> Drop for Shared<D> {
    fn drop(&mut self) {
        // Every reader and the writer hold the table, so there is none, and no guard.
        let state = self.state.0.get_mut();
        match state.pending {
            Pending::Nothing | Pending::Delete { .. } => {}
            Pending::Create { new } | Pending::Move { new, .. } | Pending::Flags { new, .. } => {
                // SAFETY: made for the operation, and in no tree.
                unsafe { state.pools.slots.remove(new) };
            }
        }
        let unstamped = core::mem::take(&mut state.replaced).into_iter();
        let stamped = core::iter::from_fn(|| state.limbo.take());
        for garbage in unstamped.chain(stamped) {
            // SAFETY: replaced once, and nobody is left.
            unsafe { state.pools.free(garbage) };
        }
        let Pools {
            by_gfn,
            by_id,
            by_hva,
            slots,
            tombstones,
        } = &mut state.pools;
        for space in &mut self.spaces {
            // SAFETY: nobody is left; each slot is in each of the three trees once, and freed by the last, and each tombstone by the
            // last that it is in.
            unsafe {
                let mut held = |held, last: bool| match tombstone(held) {
                    Some(tombstone) if (*tombstone).take() => tombstones.free(tombstone),
                    None if last => slots.remove(held),
                    _ => {}
                };
                space.by_gfn.free_all(by_gfn, &mut |slot| held(slot, false));
                space.by_hva.free_all(by_hva, &mut |slot| held(slot, false));
                space.by_id.free_all(by_id, &mut |slot| held(slot, true));
            }
        }
    }
}

/// A handle to a table, from which readers come. Cloning gives another handle to the same table.
pub struct SlotTable<D> {
    pub(crate) shared: Arc<Shared<D>>,
}

impl<D> SlotTable<D> {
    /// A new reader, for one thread (a vCPU) at a time. Takes a small allocation, unless one has gone before; what it allocates
    /// lives as long as the table, and each batch of changes looks at all of them. So make one a thread, not one a request.
    #[must_use]
    pub fn reader(&self) -> SlotReader<D> {
        SlotReader::new(Arc::clone(&self.shared))
    }

    /// How often the table has changed, and whether it is changing now.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.shared.generation()
    }

    /// What the table allows.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.shared.limits
    }
}

impl<D> Clone for SlotTable<D> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
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

/// A view of address space 0 for [`SlotView`]'s makers.
pub(crate) fn view<D>(shared: &Shared<D>, version: u64, generation: Generation) -> SlotView<'_, D> {
    SlotView::new(shared, &shared.spaces[0], version, generation)
}
