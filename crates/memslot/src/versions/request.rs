//! What can be asked of a table, within which limits, and what came of it.

use crate::versions::{Slot, SlotFlags};
use alloc::sync::Arc;
use pageferry_addr::{Gfn, Gpa, Hva};

/// What a table allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How many address spaces there are; at least 1.
    pub address_spaces: u16,
    /// Ids in each address space are below this, so it is the largest number of slots as well.
    pub max_slots: u16,
    /// The largest slot, in pages.
    pub max_slot_pages: u64,
    /// The first frame no slot may hold: one past what the second-stage tables can map.
    pub gfn_limit: Gfn,
}

impl Default for Limits {
    /// One address space, 32 764 slots (x86-64's `KVM_USER_MEM_SLOTS`) of at most 2^31 - 1 pages
    /// (`KVM_MEM_MAX_NR_PAGES`), anywhere in 64 bits of guest-physical address space.
    fn default() -> Self {
        Self {
            address_spaces: 1,
            max_slots: 32_764,
            max_slot_pages: (1 << 31) - 1,
            gfn_limit: Gfn(Gfn::MAX.0 + 1),
        }
    }
}

/// A request with the meaning of `KVM_SET_USER_MEMORY_REGION2`.
///
/// Where no slot has `id`, it creates one. Where one has, a size of zero deletes it, another `gpa` moves it
/// (and sets its flags), other `flags` alone change its flags, and no difference does nothing.
#[derive(Clone, Copy, Debug)]
pub struct Request<D> {
    /// The address space, counted from 0.
    pub address_space: u16,
    /// The slot's name inside its address space.
    pub id: u16,
    /// The first guest address; page-aligned.
    pub gpa: Gpa,
    /// The size in bytes, in whole pages; zero deletes.
    pub size: u64,
    /// The host address that backs `gpa`; page-aligned.
    pub hva: Hva,
    /// The flags the slot is to have.
    pub flags: SlotFlags,
    /// What the new slot carries; dropped where the request makes none.
    pub data: D,
}

impl<D: Default> Request<D> {
    /// The request that deletes slot `id` of `address_space`.
    #[must_use]
    pub fn delete(address_space: u16, id: u16) -> Self {
        Self {
            address_space,
            id,
            gpa: Gpa(0),
            size: 0,
            hva: Hva(0),
            flags: SlotFlags::EMPTY,
            data: D::default(),
        }
    }
}

/// What a request did, so that its caller can bring everything derived from slots in step.
///
/// After `Deleted` and `Moved` the second-stage mappings of `old.range` must be zapped and flushed before
/// the old slot's memory is put to another use; after `FlagsChanged` the flags say what is due (write
/// protection when dirty logging starts, a zap when userfault starts).
#[derive(Debug)]
#[must_use = "second-stage mappings of the old slot stay usable until the caller zaps them"]
pub enum Change<D> {
    /// The request asked for what is there; the table is the same version.
    Nothing,
    /// A slot came.
    Created {
        /// The slot.
        new: Arc<Slot<D>>,
    },
    /// A slot went.
    Deleted {
        /// The slot as it was.
        old: Arc<Slot<D>>,
    },
    /// A slot has another first frame, and perhaps other flags.
    Moved {
        /// The slot as it was.
        old: Arc<Slot<D>>,
        /// The slot as it is.
        new: Arc<Slot<D>>,
    },
    /// A slot has other flags at the same place.
    FlagsChanged {
        /// The slot as it was.
        old: Arc<Slot<D>>,
        /// The slot as it is.
        new: Arc<Slot<D>>,
    },
}
