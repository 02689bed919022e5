//! A version of all slots of a VM, and the step to the next.

use crate::versions::{Change, Limits, Request, Slot, SlotError, SlotFlags, SlotSet};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;
use pageferry_addr::{Gfn, GfnRange, Hva, PAGE_MASK, PAGE_SHIFT};

/// All slots of a VM at one version; never changes.
///
/// The look-ups here are those of address space 0, the only one by default; [`space`](Self::space) gives
/// the others.
#[derive(Debug)]
pub struct SlotTable<D> {
    limits: Limits,
    generation: u64,
    /// The pages of all slots in all address spaces.
    pages: u64,
    /// At least one.
    spaces: Vec<Arc<SlotSet<D>>>,
}

impl<D> SlotTable<D> {
    /// A table without slots, at generation 0.
    ///
    /// # Panics
    /// If `limits` allows no address space.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        assert!(limits.address_spaces > 0, "a VM has an address space");
        Self {
            limits,
            generation: 0,
            pages: 0,
            spaces: (0..limits.address_spaces)
                .map(|_| Arc::new(SlotSet::new()))
                .collect(),
        }
    }

    /// The slots of an address space, or `None` where there is no such space.
    #[inline]
    #[must_use]
    pub fn space(&self, address_space: u16) -> Option<&SlotSet<D>> {
        self.spaces
            .get(usize::from(address_space))
            .map(|set| &**set)
    }

    /// [`SlotSet::lookup`] in address space 0.
    #[inline]
    #[must_use]
    pub fn lookup(&self, gfn: Gfn) -> Option<&Arc<Slot<D>>> {
        self.spaces[0].lookup(gfn)
    }

    /// [`SlotSet::lookup_or_below`] in address space 0.
    #[must_use]
    pub fn lookup_or_below(&self, gfn: Gfn) -> Option<&Arc<Slot<D>>> {
        self.spaces[0].lookup_or_below(gfn)
    }

    /// [`SlotSet::by_id`] in address space 0.
    #[must_use]
    pub fn by_id(&self, id: u16) -> Option<&Arc<Slot<D>>> {
        self.spaces[0].by_id(id)
    }

    /// [`SlotSet::iter_gfn`] in address space 0.
    pub fn iter_gfn(&self, range: GfnRange) -> impl Iterator<Item = &Arc<Slot<D>>> {
        self.spaces[0].iter_gfn(range)
    }

    /// [`SlotSet::iter_hva`] in address space 0.
    pub fn iter_hva(&self, range: Range<Hva>) -> impl Iterator<Item = &Arc<Slot<D>>> {
        self.spaces[0].iter_hva(range)
    }

    /// [`SlotSet::iter`] in address space 0.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Arc<Slot<D>>> {
        self.spaces[0].iter()
    }

    /// How many changes led from the empty table to this one.
    #[inline]
    #[must_use]
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    /// How many slots there are, in all address spaces.
    #[must_use]
    pub fn len(&self) -> usize {
        self.spaces.iter().map(|set| set.len()).sum()
    }

    /// Whether there is no slot in any address space.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.spaces.iter().all(|set| set.is_empty())
    }

    /// The pages of all slots, in all address spaces.
    #[must_use]
    pub const fn pages(&self) -> u64 {
        self.pages
    }

    /// What the table allows.
    #[must_use]
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The next version, and what the request did; O(n) in the slots of its address space.
    ///
    /// The generation grows by one, unless the request asks for what is there. Requests that are applied
    /// concurrently to one version give versions that do not know each other: the caller applies them one
    /// at a time, each to the version it published last.
    ///
    /// # Errors
    /// One [`SlotError`] for each rule; `self` stays the current version.
    pub fn apply(&self, request: Request<D>) -> Result<(Self, Change<D>), SlotError> {
        check_flags(request.flags)?;
        let set = self.check_place(&request)?;
        let old = set.by_id(request.id);
        if request.size == 0 {
            let old = old.ok_or(SlotError::NothingToDelete {
                address_space: request.address_space,
                id: request.id,
            })?;
            let next = self.step(old, None, self.pages - old.range.pages());
            let old = Arc::clone(old);
            return Ok((next, Change::Deleted { old }));
        }
        let range = self.check_range(&request)?;
        let Some(old) = old else {
            let pages = self.pages.checked_add(range.pages());
            let pages = pages.ok_or(SlotError::TotalPagesOverflow {
                total: self.pages,
                pages: range.pages(),
            })?;
            check_free(set, request.id, range)?;
            let new = Arc::new(slot_of(request, range));
            return Ok((self.step(&new, Some(&new), pages), Change::Created { new }));
        };
        check_same(old, &request, range)?;
        let moved = range != old.range;
        if moved {
            check_free(set, request.id, range)?;
        } else if request.flags == old.flags {
            return Ok((self.clone(), Change::Nothing));
        }
        let old = Arc::clone(old);
        let new = Arc::new(slot_of(request, range));
        let next = self.step(&old, Some(&new), self.pages);
        let change = if moved {
            Change::Moved { old, new }
        } else {
            Change::FlagsChanged { old, new }
        };
        Ok((next, change))
    }

    /// The version in which `new` has replaced whatever has the address space and id of `named`.
    fn step(&self, named: &Slot<D>, new: Option<&Arc<Slot<D>>>, pages: u64) -> Self {
        let mut next = self.clone();
        let set = &mut next.spaces[usize::from(named.address_space)];
        *set = Arc::new(set.replaced(Some(named.id), new.cloned()));
        next.generation += 1;
        next.pages = pages;
        next
    }

    /// What holds for every request, a deletion included; gives the address space it is for.
    fn check_place(&self, request: &Request<D>) -> Result<&SlotSet<D>, SlotError> {
        let &Request { gpa, size, hva, .. } = request;
        if size & PAGE_MASK != 0 {
            return Err(SlotError::UnalignedSize { size });
        }
        if !gpa.is_page_aligned() {
            return Err(SlotError::UnalignedGpa { gpa });
        }
        if !hva.is_page_aligned() {
            return Err(SlotError::UnalignedHva { hva });
        }
        if hva.checked_add(size).is_none() {
            return Err(SlotError::HvaOverflow { hva, size });
        }
        let set = self
            .space(request.address_space)
            .ok_or(SlotError::NoSuchAddressSpace {
                address_space: request.address_space,
                count: self.limits.address_spaces,
            })?;
        if request.id >= self.limits.max_slots {
            return Err(SlotError::IdTooLarge {
                id: request.id,
                max_slots: self.limits.max_slots,
            });
        }
        Ok(set)
    }

    fn check_range(&self, request: &Request<D>) -> Result<GfnRange, SlotError> {
        let &Request { gpa, size, .. } = request;
        let pages = size >> PAGE_SHIFT;
        let limit = self.limits.gfn_limit;
        let range = GfnRange::new(gpa.gfn(), pages)
            .filter(|range| range.end() <= limit)
            .ok_or(SlotError::GpaTooHigh { gpa, size, limit })?;
        let max_pages = self.limits.max_slot_pages;
        if pages > max_pages {
            return Err(SlotError::TooManyPages { pages, max_pages });
        }
        Ok(range)
    }
}

fn check_flags(flags: SlotFlags) -> Result<(), SlotError> {
    let unknown = flags.without(SlotFlags::KNOWN);
    if unknown != SlotFlags::EMPTY {
        return Err(SlotError::UnknownFlags { unknown });
    }
    let kept = SlotFlags::GUEST_MEMFD | SlotFlags::USERFAULT;
    let refused = flags.without(kept);
    if flags.contains(SlotFlags::GUEST_MEMFD) && refused != SlotFlags::EMPTY {
        return Err(SlotError::GuestMemfdFlags { refused });
    }
    Ok(())
}

/// What an existing slot keeps. A slot with guest_memfd may change `USERFAULT` and nothing else, as in the
/// KVM Userfault series ("Allow late setting of KVM_MEM_USERFAULT on guest_memfd memslot").
fn check_same<D>(old: &Slot<D>, request: &Request<D>, range: GfnRange) -> Result<(), SlotError> {
    let id = request.id;
    if range.pages() != old.range.pages() {
        return Err(SlotError::SizeChanged {
            id,
            old: old.range.pages(),
            new: range.pages(),
        });
    }
    if request.hva != old.hva {
        return Err(SlotError::HvaChanged {
            id,
            old: old.hva,
            new: request.hva,
        });
    }
    let free = SlotFlags::LOG_DIRTY_PAGES | SlotFlags::USERFAULT;
    let toggled = request.flags.difference(old.flags).without(free);
    if toggled != SlotFlags::EMPTY {
        return Err(SlotError::FixedFlags {
            id,
            old: old.flags,
            new: request.flags,
            toggled,
        });
    }
    if old.flags.contains(SlotFlags::GUEST_MEMFD) && range != old.range {
        return Err(SlotError::GuestMemfdMoved {
            id,
            old: old.range.start(),
            new: range.start(),
        });
    }
    Ok(())
}

/// Refuses frames that any slot but `id` holds.
fn check_free<D>(set: &SlotSet<D>, id: u16, range: GfnRange) -> Result<(), SlotError> {
    match set.iter_gfn(range).find(|slot| slot.id != id) {
        Some(other) => Err(SlotError::Overlap {
            range,
            other: other.id,
            taken: other.range,
        }),
        None => Ok(()),
    }
}

fn slot_of<D>(request: Request<D>, range: GfnRange) -> Slot<D> {
    Slot {
        address_space: request.address_space,
        id: request.id,
        range,
        hva: request.hva,
        flags: request.flags,
        data: request.data,
    }
}

impl<D> Default for SlotTable<D> {
    /// A table without slots, with the default [`Limits`].
    fn default() -> Self {
        Self::new(Limits::default())
    }
}

// By hand, since a derived one would ask for `D: Clone`.
impl<D> Clone for SlotTable<D> {
    /// The same version; shares all slots.
    fn clone(&self) -> Self {
        Self {
            limits: self.limits,
            generation: self.generation,
            pages: self.pages,
            spaces: self.spaces.clone(),
        }
    }
}
