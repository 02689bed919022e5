#![expect(unsafe_code, reason = "publishes and retires slots and tree nodes")]
//! The one writer of a table.
//!
//! [`crate::table`] describes the order in which changes become visible.

use crate::rules::{self, Plan};
use crate::slot::Predecessor;
use crate::table::{Garbage, Generation, Pending, SharedTable, Space, WriterState, view};
use crate::tree::NEWEST;
use crate::trees::{Places, Trees};
use crate::{Barrier, Change, Limits, Request, Slot, SlotError, SlotTable, SlotView, Update};
use core::fmt;
use core::mem;
use core::ptr;
use pageferry_addr::{Gfn, GfnRange};
use pageferry_epoch::TryArc;

/// The right to change a table. A table has one writer, and a change takes `&mut`. If several
/// threads change slots, put the writer into a mutex.
///
/// An operation takes O(log n) and does not wait for readers. Replaced slots and tree nodes wait
/// for a grace period. Later operations free them in batches of about 64. If a reader holds its
/// guard until [`Limits::max_retired`] of them wait, the next operation waits for one grace period.
/// While it waits, it calls the function given to [`with_relax`](Self::with_relax). So a thread
/// that holds a guard of the same table must neither write nor wait for a lock that the writer's
/// thread holds.
///
/// A lack of memory is an error ([`SlotError::OutOfMemory`]), and then nothing has changed: an
/// operation reserves all it needs before it begins. [`new`](Self::new),
/// [`with_barrier`](Self::with_barrier) and [`SlotTable::reader`] panic instead.
///
/// ```
/// use pageferry_addr::{Gfn, Gpa, Hva};
/// use pageferry_memslot::{Change, Limits, Request, SlotFlags, SlotWriter};
///
/// let mut writer = SlotWriter::new(Limits::default());
/// let request = Request {
///     gpa: Gpa(0x8000_0000),
///     size: 0x20_0000,
///     hva: Hva(0x7f00_0000_0000),
///     flags: SlotFlags::LOG_DIRTY_PAGES,
///     ..Request::delete(0, 3)
/// };
/// assert!(matches!(writer.set(request)?, Change::Created { .. }));
///
/// // To move a slot under running vCPUs: from `begin` on they find it invalid.
/// let moved = Request { gpa: Gpa(0x9000_0000), ..request };
/// let update = writer.begin(moved)?;
/// if let Change::Moved { old, .. } = update.change() {
///     assert!(old.is_invalid());
///     // Here a hypervisor zaps its mappings of `old.range`, and flushes.
/// }
/// update.commit();
/// assert!(writer.view().lookup(Gfn(0x80000)).is_none());
/// assert_eq!(writer.view().lookup(Gfn(0x90000)).map(|slot| slot.id), Some(3));
/// # let _: () = request.data;
/// # Ok::<(), pageferry_memslot::SlotError>(())
/// ```
pub struct SlotWriter<D> {
    pub(crate) shared: TryArc<SharedTable<D>>,
    /// The places of the pending operation. They are not in [`Update`], which callers move.
    places: Places,
}

impl<D> SlotWriter<D> {
    /// A table without slots, at generation 0, and the right to change it:
    /// [`try_new`](Self::try_new) without a barrier, for callers that do not handle a lack of
    /// memory.
    ///
    /// # Panics
    /// If `limits` allows no address space, or if the allocator refuses memory.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self::with_barrier(limits, None)
    }

    /// [`try_new`](Self::try_new) for callers that do not handle a lack of memory.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    #[must_use]
    pub fn with_barrier(limits: Limits, barrier: Option<Barrier>) -> Self {
        Self::try_new(limits, barrier).unwrap_or_else(|error| panic!("no table: {error}"))
    }

    /// A table without slots, at generation 0, and the right to change it.
    ///
    /// With a barrier, readers usually need no fence: a guard is then two stores instead of an
    /// exchange and a store. A batch of changes beside active readers calls `barrier`, which takes
    /// microseconds. After each batch, readers fence for some hundred guards, and another batch
    /// during that time calls no barrier.
    ///
    /// # Errors
    /// [`SlotError::OutOfMemory`] if the allocator refuses memory.
    ///
    /// # Panics
    /// If `limits` allows no address space.
    pub fn try_new(limits: Limits, barrier: Option<Barrier>) -> Result<Self, SlotError> {
        assert!(limits.address_spaces > 0, "a VM has an address space");
        let table = SharedTable::try_new(limits, barrier)?;
        Ok(Self {
            shared: TryArc::try_new(table)?,
            places: Places::default(),
        })
    }

    /// Sets the function that the writer calls repeatedly while it waits for a grace period, for
    /// example to yield the processor. It should be short. Without it the writer spins.
    #[must_use]
    pub fn with_relax(mut self, relax: fn()) -> Self {
        self.state().relax = relax;
        self
    }

    /// A handle that makes readers.
    #[must_use]
    pub fn table(&self) -> SlotTable<D> {
        SlotTable {
            shared: self.shared.clone(),
        }
    }

    pub(crate) fn state(&mut self) -> &mut WriterState<D> {
        // SAFETY: `self` is the one writer: made with the table, and not `Clone`.
        unsafe { self.shared.writer() }
    }

    pub(crate) fn state_ref(&self) -> &WriterState<D> {
        // SAFETY: as above.
        unsafe { self.shared.writer_ref() }
    }

    /// A view of the current state of address space 0. Nothing changes while it is borrowed.
    #[inline]
    #[must_use]
    pub fn view(&self) -> SlotView<'_, D> {
        // Only the writer frees, and it needs `&mut self` for that.
        view(&self.shared, NEWEST, self.shared.generation())
    }

    /// The limits of the table.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.shared.limits
    }

    /// The number of slots in all address spaces.
    #[must_use]
    pub fn len(&self) -> usize {
        self.state_ref().len
    }

    /// Whether there is no slot in any address space.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The pages of all slots, in all address spaces.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.state_ref().pages
    }

    /// The number of operations that are complete or aborted. Refused requests do not count, nor do
    /// requests without a difference.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.shared.generation()
    }

    /// Does a whole operation: [`begin`](Self::begin) and [`Update::commit`].
    ///
    /// # Errors
    /// As for [`begin`](Self::begin).
    pub fn set(&mut self, request: Request<D>) -> Result<Change<'_, D>, SlotError> {
        Ok(self.begin(request)?.commit())
    }

    /// Checks a request and begins its operation. If the request deletes or moves a slot, look-ups
    /// after this call find that slot [invalid](Slot::is_invalid). Everything else becomes visible
    /// at the commit. A look-up that runs beside this call may still find the slot valid. So a
    /// caller that takes back data derived from the slot first waits for such look-ups. For
    /// example, it makes every vCPU leave its guest. Then it zaps, flushes, and commits.
    ///
    /// The call first aborts an update that was forgotten (by `mem::forget`), even if it then
    /// refuses the request. It may wait as [`SlotWriter`] says, even before a refusal.
    ///
    /// # Errors
    /// One [`SlotError`] for each rule, and one for a lack of memory. After an error nothing has
    /// changed.
    pub fn begin(&mut self, request: Request<D>) -> Result<Update<'_, D>, SlotError> {
        // An update that was forgotten instead of dropped.
        self.abort();
        self.free_some()?;
        let space = usize::from(request.address_space);
        let Self { shared, places } = self;
        let shared = &**shared;
        // SAFETY: `self` is the one writer, and makes no other reference to its state while `state`
        // lives.
        let state = unsafe { shared.writer() };
        let here = shared.spaces.get(space);
        // If there is no such space, `check` refuses the request and asks for no place.
        let old = here.and_then(|here| places.find(here, &request));
        // SAFETY: the slot is in the tree, and nothing is freed meanwhile.
        let old_slot = old.map(|old| unsafe { &*old });
        let plan = rules::check(
            &shared.limits,
            &request,
            state.pages,
            |_, _| old_slot,
            |space, range, id| {
                if here.is_some_and(|here| places.are_free(here, range)) {
                    return None;
                }
                let now = view(shared, NEWEST, shared.generation());
                overlapping(now.space(space)?, range, id)
            },
        )?;
        if let Some(here) = here {
            places.reserve(here, state, plan, &request, old_slot)?;
        }
        let version = shared.generation().number() + 1;
        let slots = &mut state.pools.slots;
        let record = |range, old: *const Slot<D>| {
            let mut slot = Slot::new(request, range);
            slot.born = version;
            slot.previous = Predecessor(old);
            slots.insert(slot)
        };
        // Not a pointer made from the reference: the slab frees a record by the pointer with which
        // it was put in.
        let pending = match (plan, old) {
            (Plan::Create(range), None) => Pending::Create {
                new: record(range, ptr::null())?,
            },
            (Plan::Delete, Some(old)) => Pending::Delete { old },
            (Plan::Move(range), Some(old)) => Pending::Move {
                old,
                new: record(range, old)?,
            },
            (Plan::Flags, Some(old)) => Pending::Flags {
                old,
                // SAFETY: as above.
                new: record(unsafe { &*old }.range, old)?,
            },
            _ => Pending::Nothing,
        };
        if !matches!(pending, Pending::Nothing) {
            let word = shared.generation().number() | Generation::IN_PROGRESS;
            shared.set_generation(word);
        }
        if let Pending::Delete { old } | Pending::Move { old, .. } = pending {
            // SAFETY: as above.
            unsafe { &*old }.mark_invalid();
        }
        state.pending = pending;
        Ok(Update::new(self, space))
    }

    /// Aborts a pending update.
    pub(crate) fn abort(&mut self) {
        let pending = mem::replace(&mut self.state().pending, Pending::Nothing);
        let new = match pending {
            Pending::Nothing => return,
            Pending::Create { new } | Pending::Flags { new, .. } => Some(new),
            Pending::Delete { old } => {
                // SAFETY: the record is in the trees, as nothing was committed.
                unsafe { &*old }.unmark();
                None
            }
            Pending::Move { old, new } => {
                // SAFETY: as above.
                unsafe { &*old }.unmark();
                Some(new)
            }
        };
        // Take a new version, though it equals the last. Otherwise a reader that waits for another
        // generation would wait for ever.
        self.shared
            .set_generation(self.shared.generation().number() + 1);
        if let Some(new) = new {
            // SAFETY: `begin` made the record, and no reader has seen it. This comes last, because
            // it drops the user's data.
            unsafe { self.state().pools.slots.remove(new) };
        }
    }

    /// Completes the pending operation and returns it. It allocates nothing.
    pub(crate) fn commit(&mut self, space: usize) -> Pending<D> {
        let version = self.shared.generation().number() + 1;
        let Self { shared, places } = self;
        let shared = &**shared;
        // SAFETY: `self` is the one writer, and makes no other reference to its state while `state`
        // lives.
        let state = unsafe { shared.writer() };
        let pending = mem::replace(&mut state.pending, Pending::Nothing);
        let half_done = HalfDone;
        let mut trees = Trees {
            space: &shared.spaces[space],
            version,
            places,
            state,
        };
        // SAFETY: new records live until they are retired, which happens after they left the trees.
        // Old records are in the trees.
        let gone = unsafe {
            match pending {
                Pending::Nothing => {
                    mem::forget(half_done);
                    return pending;
                }
                Pending::Create { new } => {
                    trees.put_by_gfn(new);
                    trees.put_elsewhere(new);
                    trees.state.len += 1;
                    trees.state.pages += (*new).range.pages();
                    None
                }
                Pending::Delete { old } => {
                    trees.remove(&*old);
                    trees.state.len -= 1;
                    trees.state.pages -= (*old).range.pages();
                    Some(old)
                }
                Pending::Move { old, new } => {
                    trees.move_by_gfn(&*old, new);
                    trees.replace_elsewhere(new);
                    Some(old)
                }
                Pending::Flags { old, new } => {
                    (*old).mark_replaced();
                    trees.replace_by_gfn(new);
                    trees.replace_elsewhere(new);
                    Some(old)
                }
            }
        };
        shared.set_generation(version);
        trees.trim();
        mem::forget(half_done);
        if let Some(slot) = gone {
            state.replaced.push(Garbage::Slot(slot));
        }
        pending
    }

    /// The bytes that this table occupies: its fixed part, tree nodes, and slots with their `D`
    /// (not the memory that `D` points at). Nodes and slots that wait for a grace period or for
    /// reuse count. Readers (256 bytes each), the lists of retired things, and the allocator's own
    /// overhead do not.
    #[must_use]
    pub fn metadata_bytes(&self) -> usize {
        let state = self.state_ref();
        size_of::<SharedTable<D>>()
            + size_of::<pageferry_epoch::Domain>()
            + self.shared.spaces.len() * size_of::<Space<D>>()
            + state.pools.bytes()
    }
}

/// Guards a change of the trees that is half done. After a panic, which is a bug, nobody may use
/// the trees.
struct HalfDone;

impl Drop for HalfDone {
    fn drop(&mut self) {
        // Only a panic drops it, and a panic during a panic aborts the process.
        panic!("a change of memory slots was interrupted");
    }
}

/// A slot of `now` other than `id` that holds some of `range`.
fn overlapping<D>(now: SlotView<'_, D>, range: GfnRange, id: u16) -> Option<(u16, GfnRange)> {
    // Slots do not overlap each other. So the slots that overlap the range are the last ones that
    // begin below its end.
    let mut below = range.end();
    loop {
        let slot = now.lookup_or_below(Gfn(below.0.checked_sub(1)?))?;
        if slot.range.end() <= range.start() {
            return None;
        }
        if slot.id != id {
            return Some((slot.id, slot.range));
        }
        below = slot.range.start();
    }
}

impl<D> Drop for SlotWriter<D> {
    /// Aborts an update that was forgotten, and frees everything that no reader uses.
    fn drop(&mut self) {
        self.abort();
        self.reclaim();
    }
}

impl<D> fmt::Debug for SlotWriter<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotWriter")
            .field("generation", &self.generation())
            .field("len", &self.len())
            .field("retired", &self.retired())
            .finish_non_exhaustive()
    }
}
