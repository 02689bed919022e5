//! Requests, the limits of a table, and the changes that requests make.

use crate::{Slot, SlotFlags};
use pageferry_addr::{Gfn, Gpa, Hva};

/// The limits of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The number of address spaces, at least 1.
    pub address_spaces: u16,
    /// Ids in each address space are below this, so it also limits the number of slots.
    pub max_slots: u16,
    /// The largest slot, in pages.
    pub max_slot_pages: u64,
    /// The first frame that no slot may hold: one past the last frame that the second-stage tables
    /// can map. A request for a slot behind it is refused. The default is what four levels of
    /// tables map. Set it to the limit of the tables in use (`GFN_LIMIT` of a format of
    /// `pageferry-tdp`) if they map less or more. A table without second-stage tables may have
    /// [`Limits::ALL_FRAMES`].
    pub gfn_limit: Gfn,
    /// Whether readers of an address space share the slot that they found last, besides remembering
    /// it themselves. This suits short-lived readers that mostly use one slot. It harms readers
    /// that work in different slots, as all of them write one cache line.
    pub shared_last_used: bool,
    /// The number of replaced slots and tree nodes that may wait for readers before the writer
    /// waits. One operation usually replaces 1 to 4, and rarely some dozens. After such a wait
    /// [`SlotWriter::reclaim`](crate::SlotWriter::reclaim) frees all of them. An operation frees
    /// only about 64.
    pub max_retired: usize,
}

impl Limits {
    /// The [`gfn_limit`](Self::gfn_limit) that allows all frames of 64 bits of guest-physical
    /// address space. No second-stage tables reach that far.
    pub const ALL_FRAMES: Gfn = Gfn(Gfn::MAX.0 + 1);
}

impl Default for Limits {
    /// One address space, 32 764 slots (x86-64's `KVM_USER_MEM_SLOTS`) of at most 2^31 - 1 pages
    /// (`KVM_MEM_MAX_NR_PAGES`), in 48 bits of guest-physical address space. No shared last-used
    /// slot, and 4096 retired things (about 3 MB).
    ///
    /// Tables of four or five levels reach 48 bits: Intel's EPT, AMD's NPT, RISC-V's Sv48x4, and
    /// arm64's stage 2 with 48 bits of guest-physical addresses.
    fn default() -> Self {
        Self {
            address_spaces: 1,
            max_slots: 32_764,
            max_slot_pages: (1 << 31) - 1,
            gfn_limit: Gfn(1 << 36),
            shared_last_used: false,
            max_retired: 4096,
        }
    }
}

/// A request with the meaning of `KVM_SET_USER_MEMORY_REGION2`.
///
/// If no slot has `id`, the request creates one. If a slot has `id`, a size of zero deletes it.
/// Another `gpa` moves it and sets its flags. Other `flags` alone change its flags. A request
/// without a difference does nothing.
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
    /// The host address that backs `gpa`; page-aligned. The whole host range must lie in the lowest
    /// or the highest 2^59 bytes of the address space. The memory of all existing hosts does.
    pub hva: Hva,
    /// The flags the slot is to have.
    pub flags: SlotFlags,
    /// With the flag `USERFAULT`: the address of the 64-bit word with the first page's bit, a
    /// multiple of 8. Ignored without the flag, as in the KVM Userfault series.
    pub userfault_bitmap: Option<Hva>,
    /// The user's data of the new slot. Dropped if the request makes no slot.
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
            userfault_bitmap: None,
            data: D::default(),
        }
    }
}

/// The effect of a request. With it the caller updates everything derived from slots.
///
/// For `Deleted` and `Moved` the caller must zap and flush the second-stage mappings of `old.range`
/// before it puts the old slot's memory to another use. For `FlagsChanged` the caller compares the
/// flags. If dirty logging starts, it write-protects. If userfault starts, it zaps.
#[derive(Debug)]
pub enum Change<'table, D> {
    /// The request changes nothing.
    Nothing,
    /// The request creates a slot.
    Created {
        /// The slot.
        new: &'table Slot<D>,
    },
    /// The request deletes a slot.
    Deleted {
        /// The slot as it was, marked invalid.
        old: &'table Slot<D>,
    },
    /// A slot gets another first frame, and perhaps other flags.
    Moved {
        /// The slot as it was, marked invalid.
        old: &'table Slot<D>,
        /// The slot as it will be.
        new: &'table Slot<D>,
    },
    /// A slot gets other flags at the same place.
    FlagsChanged {
        /// The slot as it was.
        old: &'table Slot<D>,
        /// The slot as it will be.
        new: &'table Slot<D>,
    },
}

// Not derived: a derived impl would need `D: Clone`.
impl<D> Clone for Change<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D> Copy for Change<'_, D> {}
