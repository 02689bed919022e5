#![expect(
    unsafe_code,
    reason = "keeps a pointer to the slot that was found last"
)]
//! Readers, their guards, and the slot each found last.

use crate::table::{Generation, Shared, view};
use crate::tree::TwoLeaves;
use crate::{Slot, SlotView};
use alloc::sync::Arc;
use core::cell::Cell;
use core::fmt;
use core::ptr;
use pageferry_addr::Gfn;
use pageferry_epoch::{Epoch, Guard, Reader};

/// One reader of a table: a vCPU, or any thread. It can be sent to another thread and serves one at a time.
///
/// It remembers the slot it found last by gfn, so that looking it up again costs about a nanosecond (the kernel's
/// per-vCPU `last_used_slot`).
pub struct SlotReader<D> {
    reader: Reader,
    last: Memory<D>,
    // After `reader`, so that the record is given back before the domain can go.
    shared: Arc<Shared<D>>,
}

/// What a reader remembers.
struct Memory<D> {
    last: Cell<Last<D>>,
    /// The epoch of the guard under which the slot was found; of the current one, if there is a guard.
    epoch: Cell<Epoch>,
}

/// The slot found last.
struct Last<D> {
    slot: *const Slot<D>,
    /// What the slot holds: as in the record, but at hand. No pages where there is no slot.
    start: u64,
    pages: u64,
}

impl<D> Last<D> {
    const NOTHING: Self = Self {
        slot: ptr::null(),
        start: 0,
        pages: 0,
    };
}

impl<D> Clone for Last<D> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}
impl<D> Copy for Last<D> {}

// SAFETY: the pointer in `last` is used under a guard of this reader only, and is good on any thread; slots are shared
// (`D: Sync`), and the last handle drops them (`D: Send`).
unsafe impl<D: Send + Sync> Send for SlotReader<D> {}

impl<D> SlotReader<D> {
    pub(crate) fn new(shared: Arc<Shared<D>>) -> Self {
        Self {
            reader: shared.domain.register(),
            last: Memory {
                last: Cell::new(Last::NOTHING),
                epoch: Cell::new(Epoch::NEVER),
            },
            shared,
        }
    }

    /// Begins to read. Wait-free: a few nanoseconds, no cache line that others write often.
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

impl<D> Memory<D> {
    /// A slot that was found in another epoch than the guard's may have been freed.
    #[inline]
    fn forget_older(&self, epoch: Epoch) {
        if self.epoch.get() != epoch {
            self.epoch.set(epoch);
            self.last.set(Last::NOTHING);
        }
    }
}

impl<D> fmt::Debug for SlotReader<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotReader").finish_non_exhaustive()
    }
}

/// Witness that nothing a reader sees is freed. What was looked up through it lives no longer than it.
///
/// Hold it for as long as slots are in use and no longer: while any guard is held, what was replaced since it was
/// taken stays in memory, and a writer that has replaced too much ([`crate::Limits::max_retired`]) waits.
#[must_use = "slots can be looked up as long as the guard lives"]
pub struct SlotGuard<'r, D> {
    guard: Guard<'r>,
    last: &'r Memory<D>,
    shared: &'r Shared<D>,
}

impl<D> SlotGuard<'_, D> {
    /// The slot that holds `gfn` in address space 0, newest state: see [`lookup_in`](Self::lookup_in).
    #[inline]
    #[must_use]
    pub fn lookup(&self, gfn: Gfn) -> Option<&Slot<D>> {
        self.lookup_in(0, gfn)
    }

    /// The slot that holds `gfn`, as of some moment during the call: before or after any one operation.
    ///
    /// While that slot is being deleted or moved the answer is the old slot, and [`Slot::is_invalid`]: leave, let the
    /// writer finish, and look again. `None` also where there is no such address space. O(1) where it is the slot
    /// that this reader found last, else O(log n).
    #[inline]
    #[must_use]
    pub fn lookup_in(&self, address_space: u16, gfn: Gfn) -> Option<&Slot<D>> {
        let last = self.last.last.get();
        if gfn.0.wrapping_sub(last.start) < last.pages {
            // SAFETY: the pointer was reached under this guard, or one of the same epoch other than `NEVER`, since `pin` and
            // `refresh` forget all others; so it is not freed. See `pageferry_epoch`.
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

    /// Where one leaf alone cannot tell.
    ///
    /// An operation that is in progress may have changed the tree already, and this reader may have seen that. So it
    /// asks for the version that the operation makes. A move makes that in two steps, of which a look-up may
    /// miss the first and meet the second; looking again, it meets both.
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

    /// The epoch of the guard as it was when it was taken: it counts for what is remembered however often the guard is asked.
    #[inline]
    fn epoch(&self) -> Epoch {
        self.last.epoch.get()
    }

    #[inline]
    fn remember<'g>(&'g self, slot: &'g Slot<D>) -> &'g Slot<D> {
        if self.epoch() != Epoch::NEVER {
            self.last.last.set(Last {
                slot,
                start: slot.range.start().0,
                pages: slot.range.pages(),
            });
        }
        slot
    }

    /// All look-ups at one version: the newest that is complete.
    #[inline]
    #[must_use]
    pub fn view(&self) -> SlotView<'_, D> {
        let generation = self.shared.generation();
        view(self.shared, generation.number(), generation)
    }

    /// How often the table has changed, and whether it is changing now.
    #[inline]
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.shared.generation()
    }

    /// As if the guard were dropped and taken again, at the price of one load where nothing has been freed lately.
    /// For readers that stay for long; nothing that was looked up before can be in use.
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
