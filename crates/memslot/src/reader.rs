#![expect(
    unsafe_code,
    reason = "keeps a pointer to the slot that was found last"
)]
//! Readers, their guards, and the slot that each reader found last.

use crate::table::{Generation, SharedTable, view};
use crate::tree::TwoLeaves;
use crate::{Slot, SlotView};
use core::cell::Cell;
use core::fmt;
use core::ptr;
use pageferry_addr::Gfn;
use pageferry_epoch::{Epoch, Guard, OutOfMemory, Reader, TryArc};

/// One reader of a table, for a vCPU or any other thread. It can be sent to another thread and
/// serves one thread at a time.
///
/// It remembers the slot it found last by gfn, so that looking it up again costs about a nanosecond
/// (the kernel's per-vCPU `last_used_slot`).
pub struct SlotReader<D> {
    reader: Reader,
    last: LastUsed<D>,
    // Declared after `reader`, so that `reader` gives its record back before the domain can go.
    shared: TryArc<SharedTable<D>>,
}

/// A reader's cache: the slot that it found last by gfn.
struct LastUsed<D> {
    cached: Cell<Cached<D>>,
    /// The epoch of the current guard or, without one, of the last guard. The slot was found under
    /// a guard of this epoch.
    epoch: Cell<Epoch>,
}

/// The slot found last.
struct Cached<D> {
    slot: *const Slot<D>,
    /// The frames of the slot, copied from the record. `pages` is 0 if there is no slot.
    start: u64,
    pages: u64,
}

impl<D> Cached<D> {
    const NOTHING: Self = Self {
        slot: ptr::null(),
        start: 0,
        pages: 0,
    };
}

impl<D> Clone for Cached<D> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}
impl<D> Copy for Cached<D> {}

// SAFETY: the pointer in `last` is followed under a guard of this reader only, and is valid on any
// thread. Slots are shared (`D: Sync`), and the last handle drops them (`D: Send`).
unsafe impl<D: Send + Sync> Send for SlotReader<D> {}

impl<D> SlotReader<D> {
    pub(crate) fn new(shared: TryArc<SharedTable<D>>) -> Result<Self, OutOfMemory> {
        Ok(Self {
            reader: shared.domain.try_register()?,
            last: LastUsed {
                cached: Cell::new(Cached::NOTHING),
                epoch: Cell::new(Epoch::NEVER),
            },
            shared,
        })
    }

    /// Takes a guard. Wait-free. It takes a few nanoseconds and reads no cache line that others
    /// write often.
    #[inline]
    pub fn pin(&mut self) -> SlotGuard<'_, D> {
        let guard = self.reader.pin();
        self.last.forget_older(guard.epoch());
        SlotGuard {
            guard,
            last: &self.last,
            shared: &self.shared,
        }
    }
}

impl<D> LastUsed<D> {
    /// Forgets a slot that was found in another epoch than the guard's: the writer may have freed
    /// it.
    #[inline]
    fn forget_older(&self, epoch: Epoch) {
        if self.epoch.get() != epoch {
            self.epoch.set(epoch);
            self.cached.set(Cached::NOTHING);
        }
    }
}

impl<D> fmt::Debug for SlotReader<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotReader").finish_non_exhaustive()
    }
}

/// A read section. While the guard lives, nothing that its reader sees is freed. Look-ups borrow
/// from it.
///
/// Hold it as long as slots are in use and no longer. Everything that is replaced while a guard
/// lives stays in memory. A writer that has replaced too much ([`crate::Limits::max_retired`])
/// waits for the guard.
#[must_use = "slots can be looked up as long as the guard lives"]
pub struct SlotGuard<'r, D> {
    guard: Guard<'r>,
    last: &'r LastUsed<D>,
    shared: &'r SharedTable<D>,
}

impl<D> SlotGuard<'_, D> {
    /// The slot that holds `gfn` in the newest state of address space 0: see
    /// [`lookup_in`](Self::lookup_in).
    #[inline]
    #[must_use]
    pub fn lookup(&self, gfn: Gfn) -> Option<&Slot<D>> {
        self.lookup_in(0, gfn)
    }

    /// The slot that holds `gfn` at some moment during the call. That moment lies before or after
    /// any one operation.
    ///
    /// While a writer deletes or moves that slot, the answer is the old slot, and
    /// [`Slot::is_invalid`] holds. Then drop the guard, let the writer finish, and look again. The
    /// answer is also `None` if there is no such address space. O(1) for the slot that this reader
    /// found last, otherwise O(log n).
    #[inline]
    #[must_use]
    pub fn lookup_in(&self, address_space: u16, gfn: Gfn) -> Option<&Slot<D>> {
        let last = self.last.cached.get();
        if gfn.0.wrapping_sub(last.start) < last.pages {
            // SAFETY: the pointer was reached under this guard, or under one of the same epoch
            // other than `NEVER`: `pin` and `refresh` forget all others. So the slot is not freed:
            // see `pageferry_epoch`.
            let slot = unsafe { &*last.slot };
            slot.alive.used();
            if slot.is_current() && slot.address_space == address_space {
                return Some(slot);
            }
        }
        self.find(address_space, gfn)
    }

    #[inline(never)]
    fn find(&self, address_space: u16, gfn: Gfn) -> Option<&Slot<D>> {
        let space = self.shared.spaces.get(usize::from(address_space))?;
        if space.shares_last_used()
            && let Some(slot) = space.last_used(&self.guard, self.epoch())
            && slot.range.contains(gfn)
            && slot.is_current()
        {
            return Some(self.remember(slot));
        }
        let key = gfn.0.min(Gfn::MAX.0);
        let found = match space.newest(&self.guard).newest_floor(key) {
            Ok(found) => found.filter(|slot| slot.range.contains(gfn)),
            Err(TwoLeaves) => self.find_in_two_leaves(address_space, gfn),
        };
        let slot = found?;
        if space.shares_last_used() {
            space.remember(self.epoch(), slot);
        }
        Some(self.remember(slot))
    }

    /// Does the look-up if one leaf alone cannot answer it.
    ///
    /// An operation in progress may have changed the tree already, and this reader may have seen
    /// that. So it looks at the version that the operation makes. A move takes two steps. A first
    /// look-up may miss the first step and meet the second. Then a second look-up meets both.
    #[cold]
    fn find_in_two_leaves(&self, address_space: u16, gfn: Gfn) -> Option<&Slot<D>> {
        let generation = self.shared.generation();
        let version = generation.number() + u64::from(generation.in_progress());
        let view = view(self.shared, version, generation).space(address_space)?;
        let found = view.lookup(gfn);
        if found.is_none() && generation.in_progress() {
            return view.lookup(gfn);
        }
        found
    }

    /// The epoch of the guard when it was taken. The reader's cache belongs to that epoch.
    #[inline]
    fn epoch(&self) -> Epoch {
        self.last.epoch.get()
    }

    #[inline]
    fn remember<'g>(&'g self, slot: &'g Slot<D>) -> &'g Slot<D> {
        if self.epoch() != Epoch::NEVER {
            self.last.cached.set(Cached {
                slot,
                start: slot.range.start().0,
                pages: slot.range.pages(),
            });
        }
        slot
    }

    /// A view of the newest complete version.
    #[inline]
    #[must_use]
    pub fn view(&self) -> SlotView<'_, D> {
        let generation = self.shared.generation();
        view(self.shared, generation.number(), generation)
    }

    /// The number of changes, and whether one is in progress.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.shared.generation()
    }

    /// Drops the guard and takes it again. If the epoch has not moved, this costs one load. It is
    /// for readers that work for long. The borrow checker ensures that no earlier look-up is still
    /// in use.
    #[inline]
    pub fn refresh(&mut self) {
        self.guard.refresh();
        self.last.forget_older(self.guard.epoch());
    }
}

impl<D> fmt::Debug for SlotGuard<'_, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotGuard").finish_non_exhaustive()
    }
}
