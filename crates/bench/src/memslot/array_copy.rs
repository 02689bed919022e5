#![expect(
    unsafe_code,
    reason = "array entries point at slots without owning them, so that a copy of the array is a plain copy"
)]
//! The memory slots as Linux kept them before its trees (up to 5.16), as a scheme for the same hypervisor.
//!
//! **Guarantee.** The semantics are those of `pageferry-memslot`: the same rules, the same two halves of a change, and
//! a reader sees the slots before a change or after it.
//!
//! **Mechanism.** A *version* is an array of slot structures sorted by guest frame, which never changes once it is
//! published. A look-up by frame is a binary search after a glance at the slot used last; by host address it is a
//! scan of the array; by id it is a static table, which only the writer has. Every change copies the whole
//! array: a creation and a change of flags once; a deletion and a move twice, first with the slot marked invalid, then
//! without it or with it at its new place. Readers keep the version they used last and compare generations by one
//! acquire load; only when they differ do they take the mutex around the newest version.
//!
//! It is meant to be as good as that scheme can be, so that beating it means something. Kinder than the kernel's: an
//! entry has 40 bytes (`struct kvm_memory_slot` had 88 on x86-64), is copied as bytes without touching a reference
//! count, the table of ids is not copied, look-ups by id need no index into the array that had to be kept right, and
//! arrays that no reader holds any more are used again instead of allocated.
//!
//! # Why the entries' pointers are good
//!
//! 1. An entry points at a [`Slot`] in an `Arc` of the writer, in [`ArrayCopy::slots`] while the slot is there and in
//!    [`ArrayCopy::retired`] afterwards. Nobody ever makes an exclusive reference to it.
//! 2. The writer frees a retired slot only when each reader has taken up a version without it (it says so under the
//!    mutex, where the writer looks) or is gone. A reader dereferences entries of its own version only.
//! 3. A writer that goes before its readers leaves all slots to [`Published`], which the readers keep.
//!
//! **Neighbours.** Only the benchmark uses it. It checks requests by [`pageferry_memslot::rules`].

use pageferry_addr::{Gfn, GfnRange, Hva, PAGE_SHIFT};
use pageferry_hypervisor::{Begun, Found, MemslotReader, MemslotUpdate, Memslots, SlotData};
use pageferry_memslot::rules::{Plan, check};
use pageferry_memslot::{Limits, Request, Slot, SlotError, SlotFlags};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How many arrays wait to be used again: readers seldom hold more than the last one.
const MAX_SPARE: usize = 3;
/// What a reader that is gone says it has seen.
const GONE: u64 = u64::MAX;

/// One slot in an array.
struct Entry<D> {
    range: GfnRange,
    hva: Hva,
    slot: NonNull<Slot<D>>,
    flags: SlotFlags,
    id: u16,
    invalid: bool,
}

// By hand, since derived ones would ask for `D: Copy`.
impl<D> Clone for Entry<D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D> Copy for Entry<D> {}

// SAFETY: an entry is used as a `&Slot<D>`, whose `Sync` follows from that of `D`, and the last to use a slot may drop
// it on another thread.
unsafe impl<D: Send + Sync> Send for Entry<D> {}
// SAFETY: as above; the fields are only read.
unsafe impl<D: Send + Sync> Sync for Entry<D> {}

impl<D> Entry<D> {
    fn of(slot: &Arc<Slot<D>>) -> Self {
        Self {
            range: slot.range,
            hva: slot.hva,
            slot: NonNull::from(&**slot),
            flags: slot.flags,
            id: slot.id,
            invalid: false,
        }
    }

    fn overlaps_hva(&self, hva: &Range<Hva>) -> bool {
        self.hva < hva.end && hva.start.0 < self.hva.0 + (self.range.pages() << PAGE_SHIFT)
    }
}

/// An array at one generation.
struct Version<D> {
    generation: u64,
    /// Ascending and disjoint.
    entries: Vec<Entry<D>>,
}

impl<D> Version<D> {
    /// The place of the first entry that ends above `gfn`: the one that holds it, if any does.
    #[inline]
    fn place(&self, gfn: Gfn) -> usize {
        self.entries
            .partition_point(|entry| entry.range.end() <= gfn)
    }

    /// Id and frames of an entry other than slot `id` that holds some of `range`.
    fn overlap(&self, range: GfnRange, id: u16) -> Option<(u16, GfnRange)> {
        self.entries[self.place(range.start())..]
            .iter()
            .take_while(|entry| entry.range.start() < range.end())
            .find(|entry| entry.id != id)
            .map(|entry| (entry.id, entry.range))
    }
}

/// What writer and readers share.
struct Published<D> {
    generation: AtomicU64,
    newest: Mutex<Newest<D>>,
}

struct Newest<D> {
    version: Arc<Version<D>>,
    /// For each reader the generation it has taken up.
    seen: Vec<Arc<AtomicU64>>,
    /// The slots of a writer that is gone.
    estate: Vec<Arc<Slot<D>>>,
}

impl<D> Published<D> {
    fn newest(&self) -> MutexGuard<'_, Newest<D>> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The writer's side: all slots of a VM, in one address space.
pub(super) struct ArrayCopy<D> {
    limits: Limits,
    /// The pages of all slots.
    pages: u64,
    /// By id; owns the slots.
    slots: Box<[Option<Arc<Slot<D>>>]>,
    current: Arc<Version<D>>,
    /// Versions that were current once, for their arrays.
    spare: Vec<Arc<Version<D>>>,
    /// Slots that are in no current version, with the first generation without them.
    retired: Vec<(u64, Arc<Slot<D>>)>,
    published: Arc<Published<D>>,
}

impl<D> ArrayCopy<D> {
    /// No slots.
    ///
    /// # Panics
    /// If `limits` allows another number of address spaces than one.
    #[must_use]
    pub(super) fn with_limits(limits: Limits) -> Self {
        assert_eq!(limits.address_spaces, 1, "this scheme has one");
        let current = Arc::new(Version {
            generation: 0,
            entries: Vec::new(),
        });
        Self {
            slots: (0..limits.max_slots).map(|_| None).collect(),
            limits,
            pages: 0,
            spare: Vec::with_capacity(MAX_SPARE),
            retired: Vec::new(),
            published: Arc::new(Published {
                generation: AtomicU64::new(0),
                newest: Mutex::new(Newest {
                    version: Arc::clone(&current),
                    seen: Vec::new(),
                    estate: Vec::new(),
                }),
            }),
            current,
        }
    }

    /// One more reader.
    #[must_use]
    pub(super) fn new_reader(&self) -> ArrayReader<D> {
        let mut newest = self.published.newest();
        let version = Arc::clone(&newest.version);
        let seen = Arc::new(AtomicU64::new(version.generation));
        newest.seen.push(Arc::clone(&seen));
        ArrayReader {
            published: Arc::clone(&self.published),
            version,
            last: 0,
            seen,
        }
    }

    /// How many slots there are.
    #[must_use]
    pub(super) fn len(&self) -> usize {
        self.current.entries.len()
    }

    /// The slot with this id.
    #[must_use]
    pub(super) fn find_id(&self, id: u16) -> Option<&Slot<D>> {
        self.slots.get(usize::from(id))?.as_deref()
    }

    /// Calls `f` for each slot whose memory any byte of `hva` lies in, by ascending frame. Looks at every slot.
    pub(super) fn find_hva(&self, hva: &Range<Hva>, mut f: impl FnMut(&Slot<D>)) {
        for entry in &self.current.entries {
            if entry.overlaps_hva(hva) {
                // SAFETY: point 1 of the module's first lines: the entry is in the current version.
                f(unsafe { entry.slot.as_ref() });
            }
        }
    }

    /// The first half of a change.
    ///
    /// # Errors
    /// By the rules of [`pageferry_memslot::rules`]; nothing has changed then.
    pub(super) fn start(&mut self, request: Request<D>) -> Result<ArrayUpdate<'_, D>, SlotError> {
        let plan = check(
            &self.limits,
            &request,
            self.pages,
            |_, id| self.slots[usize::from(id)].as_deref(),
            |_, range, id| self.current.overlap(range, id),
        )?;
        let place = match &self.slots.get(usize::from(request.id)) {
            Some(Some(slot)) => self.current.place(slot.range.start()),
            _ => 0,
        };
        if matches!(plan, Plan::Delete | Plan::Move(_)) {
            self.publish(|old, new| {
                new.extend_from_slice(old);
                new[place].invalid = true;
            });
        }
        Ok(ArrayUpdate {
            slots: self,
            request: Some(request),
            plan,
            place,
        })
    }

    /// Makes what `build` makes of the current array the current one.
    fn publish(&mut self, build: impl FnOnce(&[Entry<D>], &mut Vec<Entry<D>>)) {
        let mut next = self.spare_version();
        let version = Arc::get_mut(&mut next).expect("a spare version has one owner");
        version.generation = self.current.generation + 1;
        version.entries.clear();
        build(&self.current.entries, &mut version.entries);
        let generation = version.generation;
        {
            let mut newest = self.published.newest();
            newest.version = Arc::clone(&next);
            // Release: who reads this generation and then locks finds this version or a later one.
            self.published
                .generation
                .store(generation, Ordering::Release);
        }
        let old = std::mem::replace(&mut self.current, next);
        if self.spare.len() == MAX_SPARE {
            self.spare.swap_remove(0);
        }
        self.spare.push(old);
    }

    /// A version that nobody else has.
    fn spare_version(&mut self) -> Arc<Version<D>> {
        let free = |version: &mut Arc<Version<D>>| Arc::get_mut(version).is_some();
        match self.spare.iter_mut().position(free) {
            Some(index) => self.spare.swap_remove(index),
            None => Arc::new(Version {
                generation: 0,
                // Room for one that is added; `Vec` grows by doubling.
                entries: Vec::with_capacity(self.len() + 1),
            }),
        }
    }

    /// Frees the replaced slots that no reader can find any more.
    pub(super) fn free_retired(&mut self) {
        if self.retired.is_empty() {
            return;
        }
        let oldest = {
            let mut newest = self.published.newest();
            // Acquire: what a reader did with its version before it took up another, or before it went,
            // happens before the slots are freed.
            newest
                .seen
                .retain(|seen| seen.load(Ordering::Acquire) != GONE);
            let seen = newest.seen.iter().map(|seen| seen.load(Ordering::Acquire));
            seen.min().unwrap_or(GONE)
        };
        self.retired.retain(|(without, _)| *without > oldest);
    }

    /// The bytes of arrays, tables and slots.
    #[must_use]
    pub(super) fn bytes(&self) -> usize {
        let arrays = self.spare.iter().chain([&self.current]);
        let entries: usize = arrays.map(|version| version.entries.capacity()).sum();
        entries * size_of::<Entry<D>>()
            + size_of_val(&*self.slots)
            + (self.len() + self.retired.len()) * size_of::<Slot<D>>()
    }
}

impl<D> Drop for ArrayCopy<D> {
    fn drop(&mut self) {
        // Point 3 of the module's first lines.
        let slots = std::mem::take(&mut self.slots);
        let retired = std::mem::take(&mut self.retired);
        let mut newest = self.published.newest();
        newest.estate.extend(slots.into_iter().flatten());
        newest
            .estate
            .extend(retired.into_iter().map(|(_, slot)| slot));
    }
}

/// A change between its two halves; dropped, it is given up.
pub(super) struct ArrayUpdate<'a, D> {
    slots: &'a mut ArrayCopy<D>,
    /// `None` once committed.
    request: Option<Request<D>>,
    plan: Plan,
    /// Of the slot that is there already.
    place: usize,
}

impl<D> ArrayUpdate<'_, D> {
    /// What the change does.
    #[must_use]
    pub(super) fn what(&self) -> Begun {
        let old = self.slots.current.entries.get(self.place);
        match (self.plan, old, &self.request) {
            (Plan::Create(new), ..) => Begun::Created { new },
            (Plan::Delete, Some(old), _) => Begun::Deleted { old: old.range },
            (Plan::Move(new), Some(old), _) => Begun::Moved {
                old: old.range,
                new,
            },
            (Plan::Flags, Some(old), Some(request)) => Begun::FlagsChanged {
                range: old.range,
                old: old.flags,
                new: request.flags,
            },
            _ => Begun::Nothing,
        }
    }

    /// The second half.
    pub(super) fn finish(mut self) {
        let Some(request) = self.request.take() else {
            return;
        };
        let (place, id) = (self.place, usize::from(request.id));
        let slots = &mut *self.slots;
        let new = match self.plan {
            Plan::Nothing => return,
            Plan::Delete => None,
            Plan::Create(range) | Plan::Move(range) => Some(range),
            Plan::Flags => Some(slots.current.entries[place].range),
        };
        let new = new.map(|range| Arc::new(Slot::new(request, range)));
        let entry = new.as_ref().map(Entry::of);
        let gone = usize::from(!matches!(self.plan, Plan::Create(_)));
        slots.publish(|old, next| match entry {
            None => {
                next.extend_from_slice(&old[..place]);
                next.extend_from_slice(&old[place + 1..]);
            }
            Some(entry) => {
                // Where the new slot comes to be among the old ones, the one that goes still counted.
                let to = old.partition_point(|one| one.range.start() < entry.range.start());
                // Where a slot goes: below, at or above the place of the new one.
                let from = if gone == 0 { to } else { place };
                next.extend_from_slice(&old[..from.min(to)]);
                if from < to {
                    next.extend_from_slice(&old[from + gone..to]);
                    next.push(entry);
                    next.extend_from_slice(&old[to..]);
                } else {
                    next.push(entry);
                    next.extend_from_slice(&old[to..from]);
                    next.extend_from_slice(&old[from + gone..]);
                }
            }
        });
        slots.pages += new.as_ref().map_or(0, |slot| slot.range.pages());
        if let Some(old) = std::mem::replace(&mut slots.slots[id], new) {
            slots.pages -= old.range.pages();
            slots.retired.push((slots.current.generation, old));
        }
    }
}

impl<D> Drop for ArrayUpdate<'_, D> {
    fn drop(&mut self) {
        if self.request.is_some() && matches!(self.plan, Plan::Delete | Plan::Move(_)) {
            let place = self.place;
            self.slots.publish(|old, next| {
                next.extend_from_slice(old);
                next[place].invalid = false;
            });
        }
    }
}

/// One reader.
pub(super) struct ArrayReader<D> {
    published: Arc<Published<D>>,
    version: Arc<Version<D>>,
    /// The place of the slot found last: a guess, checked at each use.
    last: usize,
    seen: Arc<AtomicU64>,
}

impl<D> ArrayReader<D> {
    /// Takes up the newest version, if there is a newer one.
    #[inline]
    pub(super) fn take_up(&mut self) {
        if self.published.generation.load(Ordering::Acquire) != self.version.generation {
            self.take_up_newer();
        }
    }

    #[cold]
    fn take_up_newer(&mut self) {
        let version = {
            let newest = self.published.newest();
            // Release, for `free_retired`: this reader's own version is of no use to it from here on.
            self.seen
                .store(newest.version.generation, Ordering::Release);
            Arc::clone(&newest.version)
        };
        self.version = version;
    }

    /// Calls `f` with the slot that holds `gfn`, and with whether it is invalid.
    #[inline]
    pub(super) fn find<R>(&mut self, gfn: Gfn, f: impl FnOnce(Option<(&Slot<D>, bool)>) -> R) -> R {
        self.take_up();
        let entries = &self.version.entries;
        let last = entries
            .get(self.last)
            .filter(|entry| entry.range.contains(gfn));
        let entry = match last {
            Some(entry) => entry,
            None => {
                let place = self.version.place(gfn);
                match entries.get(place).filter(|entry| entry.range.contains(gfn)) {
                    Some(entry) => {
                        self.last = place;
                        entry
                    }
                    None => return f(None),
                }
            }
        };
        // SAFETY: points 1 to 3 of the module's first lines: the entry is in this reader's version.
        f(Some((unsafe { entry.slot.as_ref() }, entry.invalid)))
    }
}

impl<D> Drop for ArrayReader<D> {
    fn drop(&mut self) {
        self.seen.store(GONE, Ordering::Release);
    }
}

// SAFETY: 1. Slots are made from committed requests only. 2. and 3. `start` and `finish` publish with release order; a
// look-up that happens afterwards acquires the generation and takes that version up. 4. Slots never change; those
// that go are freed after all readers have left them.
unsafe impl Memslots for ArrayCopy<SlotData> {
    type Reader = ArrayReader<SlotData>;
    type Update<'a> = ArrayUpdate<'a, SlotData>;

    fn new(limits: Limits) -> Self {
        Self::with_limits(limits)
    }

    fn reader(&self) -> Self::Reader {
        self.new_reader()
    }

    fn begin(&mut self, request: Request<SlotData>) -> Result<Self::Update<'_>, SlotError> {
        self.start(request)
    }

    fn by_id(&self, id: u16) -> Option<&Slot<SlotData>> {
        self.find_id(id)
    }

    fn for_each_in_hva(&self, hva: Range<Hva>, f: impl FnMut(&Slot<SlotData>)) {
        self.find_hva(&hva, f);
    }

    fn reclaim(&mut self) {
        self.free_retired();
    }

    fn metadata_bytes(&self) -> usize {
        self.bytes()
    }
}

impl MemslotUpdate for ArrayUpdate<'_, SlotData> {
    fn begun(&self) -> Begun {
        self.what()
    }

    fn commit(self) {
        self.finish();
    }
}

impl MemslotReader for ArrayReader<SlotData> {
    #[inline]
    fn lookup<R>(&mut self, gfn: Gfn, f: impl FnOnce(Found<'_>) -> R) -> R {
        self.find(gfn, |found| match found {
            None => f(Found::Nothing),
            Some((_, true)) => f(Found::Invalid),
            Some((slot, false)) => f(Found::Slot(slot)),
        })
    }

    fn refresh(&mut self) {
        self.take_up();
    }
}
