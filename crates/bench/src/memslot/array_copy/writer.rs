//! The writer's side.

use super::{ArrayReader, Entry, GONE, Newest, Published, Version};
use pageferry_addr::Hva;
use pageferry_hypervisor::Begun;
use pageferry_memslot::rules::{Plan, check};
use pageferry_memslot::{Limits, Request, Slot, SlotError};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The number of arrays that are kept for reuse. Readers rarely hold more than the newest.
const MAX_SPARE: usize = 3;

/// All slots of a VM, in one address space.
pub(in crate::memslot) struct ArrayCopy<D> {
    limits: Limits,
    /// The number of pages of all slots.
    pages: u64,
    /// The slots by id. This owns them.
    slots: Box<[Option<Arc<Slot<D>>>]>,
    current: Arc<Version<D>>,
    /// Former versions, kept for their arrays.
    spare: Vec<Arc<Version<D>>>,
    /// Slots that the current version lacks, each with the first generation without it.
    retired: Vec<(u64, Arc<Slot<D>>)>,
    published: Arc<Published<D>>,
}

impl<D> ArrayCopy<D> {
    /// A writer without slots.
    ///
    /// # Panics
    /// If `limits` does not have exactly one address space.
    #[must_use]
    pub(in crate::memslot) fn with_limits(limits: Limits) -> Self {
        assert_eq!(
            limits.address_spaces, 1,
            "this scheme has one address space"
        );
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
                    orphans: Vec::new(),
                }),
            }),
            current,
        }
    }

    /// A new reader.
    #[must_use]
    pub(in crate::memslot) fn new_reader(&self) -> ArrayReader<D> {
        ArrayReader::new(&self.published)
    }

    /// The number of slots.
    #[must_use]
    pub(in crate::memslot) fn len(&self) -> usize {
        self.current.entries.len()
    }

    /// The slot with this id.
    #[must_use]
    pub(in crate::memslot) fn find_id(&self, id: u16) -> Option<&Slot<D>> {
        self.slots.get(usize::from(id))?.as_deref()
    }

    /// Calls `f` for each slot with host memory in `hva`, by ascending frame. Scans all slots.
    pub(in crate::memslot) fn find_hva<'a>(
        &'a self,
        hva: &Range<Hva>,
        mut f: impl FnMut(&'a Slot<D>),
    ) {
        for entry in &self.current.entries {
            if entry.overlaps_hva(hva) {
                // SAFETY: point 1 of the parent module; the entry is in the current version.
                f(unsafe { entry.slot.as_ref() });
            }
        }
    }

    /// The first half of a change.
    ///
    /// # Errors
    /// The error of [`pageferry_memslot::rules`]. In that case nothing has changed.
    pub(in crate::memslot) fn start(
        &mut self,
        request: Request<D>,
    ) -> Result<ArrayUpdate<'_, D>, SlotError> {
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

    /// Publishes the array that `build` creates from the current one.
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
            // Release: a reader that loads this generation and then locks finds this version or a
            // later one.
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

    /// A version that this writer alone holds.
    fn spare_version(&mut self) -> Arc<Version<D>> {
        let free = |version: &mut Arc<Version<D>>| Arc::get_mut(version).is_some();
        match self.spare.iter_mut().position(free) {
            Some(index) => self.spare.swap_remove(index),
            None => Arc::new(Version {
                generation: 0,
                // Room for one more slot, since `Vec` would double its capacity.
                entries: Vec::with_capacity(self.len() + 1),
            }),
        }
    }

    /// Frees the retired slots that no reader can find any more.
    pub(in crate::memslot) fn free_retired(&mut self) {
        if self.retired.is_empty() {
            return;
        }
        let oldest = {
            let mut newest = self.published.newest();
            // Acquire: a reader's use of its old version happens before the slots are freed.
            newest
                .seen
                .retain(|seen| seen.load(Ordering::Acquire) != GONE);
            let seen = newest.seen.iter().map(|seen| seen.load(Ordering::Acquire));
            seen.min().unwrap_or(GONE)
        };
        self.retired.retain(|(without, _)| *without > oldest);
    }

    /// The size of arrays, tables and slots, in bytes.
    #[must_use]
    pub(in crate::memslot) fn bytes(&self) -> usize {
        let arrays = self.spare.iter().chain([&self.current]);
        let entries: usize = arrays.map(|version| version.entries.capacity()).sum();
        entries * size_of::<Entry<D>>()
            + size_of_val(&*self.slots)
            + (self.len() + self.retired.len()) * size_of::<Slot<D>>()
    }
}

impl<D> Drop for ArrayCopy<D> {
    fn drop(&mut self) {
        // Point 3 of the parent module.
        let slots = std::mem::take(&mut self.slots);
        let retired = std::mem::take(&mut self.retired);
        let mut newest = self.published.newest();
        newest.orphans.extend(slots.into_iter().flatten());
        newest
            .orphans
            .extend(retired.into_iter().map(|(_, slot)| slot));
    }
}

/// A change between its two halves. Dropping it abandons the change.
pub(in crate::memslot) struct ArrayUpdate<'a, D> {
    slots: &'a mut ArrayCopy<D>,
    /// `None` once committed.
    request: Option<Request<D>>,
    plan: Plan,
    /// The index of the existing slot.
    place: usize,
}

impl<D> ArrayUpdate<'_, D> {
    /// The effect of the change.
    #[must_use]
    pub(in crate::memslot) fn what(&self) -> Begun {
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
    pub(in crate::memslot) fn finish(mut self) {
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
                // The index of the new slot among the old ones, including the one that goes.
                let to = old.partition_point(|one| one.range.start() < entry.range.start());
                // The index of the slot that goes, which may be below, at or above `to`.
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
